"""The settings of ``narrowgauge train``: a field is a flag, and a setting in the record.

Nothing here needs PyTorch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.errors import DataError, RankError, RecordError, require_package
from narrowgauge.runs.paths import is_run, require_free
from narrowgauge.runs.record import SchemaError, read_run, read_settings, read_summary
from narrowgauge.runs.text import plural
from narrowgauge.spec.models import MODELS, get_model
from narrowgauge.spec.parse import parse
from narrowgauge.spec.require import require_number
from narrowgauge.trainer import checkpoints
from narrowgauge.trainer.tokens import open_tokens

OF_A_RUN = ("recipe", "seed", "out", "stop_after")
"""Settings that the runs of a comparison do not share."""
FIXED = ("model", "recipe", "batch_size", "sequence_length", "seed")
"""Settings that decide the numbers of a run from its first step on."""


def setting(default: Any, help: str, least: float = 0, below: float = math.inf) -> Any:
    """Return a field; a number is at least ``least`` and ``below``."""
    metadata = {"help": help, "least": least, "below": below}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """The settings of a training run; ``narrowgauge train --help`` explains each.

    ``Settings(**vars(settings)) == settings``, also through a TOML file.

    Example:
        >>> Settings(steps=400, lr=1e-3).learning_rate(400)
        0.0001
    """

    # fmt: off
    data: str = setting("tokens", "Tokens: the folder that narrowgauge tokenize has made.")
    model: str = setting(
        "llama-1m", "A preset (narrowgauge show models), a Hugging Face folder, or ORG/NAME in the hub's cache; weights are "
        "used, if there are any.")
    recipe: str = setting("bfloat16/word", "A recipe (narrowgauge show recipes).")
    out: str = setting("", "Run folder: new, or with a run, which continues.  [default: runs/MODEL-RECIPE]")
    steps: int = setting(400, "Optimizer steps.", 1)
    batch_size: int = setting(8, "Sequences per optimizer step.", 1)
    sequence_length: int = setting(256, "Tokens per sequence.", 1)
    gradient_accumulation_steps: int = setting(
        1, "Micro-batches per optimizer step, a multiple of the ranks; must divide the batch size.", 1)
    lr: float = setting(1e-3, "Peak learning rate.")
    warmup_steps: int = setting(-1, "Warm-up steps of the learning rate.  [default: a tenth of the steps, at most 100]", -1)
    weight_decay: float = setting(0.1, "Weight decay of matrices.")
    max_grad_norm: float = setting(1.0, "Maximum gradient norm for clipping; 0 disables it.")
    seed: int = setting(0, "Seed of the initial weights, the order of the data and stochastic rounding.", 0, 1 << 32)
    eval_every: int = setting(100, "Steps between validations; 0: only at the end.")
    eval_sequences: int = setting(64, "Sequences per validation, over all ranks.", 1)
    checkpoint_every: int = setting(100, "Steps between checkpoints; 0: only at the end.")
    keep_checkpoints: int = setting(2, "Number of latest checkpoints to keep.", 1)
    fingerprints_every: int = setting(
        0, "Steps between fingerprints of every tensor, by which narrowgauge diagnose compares two runs; 0: none.")
    stop_after: int = setting(0, "Stop after this step with a checkpoint, as if interrupted.  [default: never]")
    # fmt: on

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", parse(self.recipe).name)  # an alias, or a Recipe
        for field in fields(self):
            value = getattr(self, field.name)
            kind = type(field.default)
            if kind is not str:
                bounds = field.metadata["least"], field.metadata["below"]
                require_number(field.name, value, *bounds, is_whole=kind is int)

    @property
    def folder(self) -> Path:
        default = f"runs/{Path(self.model).name}-{self.recipe.replace('/', '-')}"
        return Path(self.out or default)

    @property
    def micro_batch_size(self) -> int:
        return self.batch_size // self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step, from 1 on: a linear warm-up, then a cosine to a tenth."""
        warmup = self.warmup_steps
        if warmup < 0:
            warmup = min(self.steps // 10, 100)
        if step <= warmup:
            return self.lr * step / warmup
        progress = min((step - warmup) / (self.steps - warmup), 1.0)
        return self.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)

    def checked(self, num_ranks: int = 1) -> Settings:
        """Check the settings against each other, and return them with full paths and an ``out``.

        Raises:
            NarrowgaugeError: an invalid value.
        """
        require_package("transformers")
        number = self.gradient_accumulation_steps
        if self.batch_size % number or number % num_ranks:
            raise RankError(
                f"Cannot split a batch of {self.batch_size} sequences into {number} micro-batches "
                f"for {plural(num_ranks, 'rank')}.",
                "Choose a --gradient-accumulation-steps that divides --batch-size and is a multiple "
                "of the number of ranks.",
            )
        model = known_model(self.model)
        tokens = open_tokens(self.data)
        parts = {
            "held-out": (tokens.held_out, self.sequence_length),
            "training": (tokens.train, self.tokens_per_step),
        }
        for part, (ids, needed) in parts.items():
            if len(ids) <= needed:
                raise DataError(
                    f"Cannot train on {self.data} because its {part} part has {len(ids):,} tokens, "
                    f"and more than {needed:,} are needed.",
                    "Give more text, or a smaller --sequence-length or --batch-size.",
                )
        data = str(Path(self.data).resolve())
        return replace(self, model=model, data=data, out=str(self.folder))


def known_model(name: str) -> str:
    """Return the full name of a preset, the path of a model folder, or a name of the hub."""
    folder = Path(name).expanduser()
    if folder.is_dir() and name not in MODELS:
        return str(folder.resolve())
    return name if "/" in name else get_model(name).name


class Start(NamedTuple):
    """A run that may begin or continue: its checked settings, and its newest good checkpoint.

    ``step`` is the last one that was trained and is not repeated. ``events`` are pairs of a kind
    and a sentence: what differs from what was asked for. ``is_finished``: nothing is left to train.
    """

    settings: Settings
    checkpoint: Path | None = None
    step: int = 0
    events: tuple[tuple[str, str], ...] = ()
    is_finished: bool = False


def find_start(named: Mapping[str, Any], num_ranks: int = 1) -> Start:
    """Return the run that settings ask for. Nothing is written, and what is wrong is refused before
    PyTorch is loaded.

    The settings come from the newest good checkpoint, or from ``run.toml`` before there is one, and
    those that are named replace them. A run is finished if its summary or its last planned row is
    there, with or without checkpoints.

    Args:
        named: the settings that were named; others are those of the run in ``out``, or defaults.
    Raises:
        NarrowgaugeError: an invalid setting, a folder with something else, or a run that has no
            good checkpoint left or cannot change a setting.
    """
    settings = Settings(**named)
    folder = settings.folder
    checkpoint = None
    events = []
    reasons = []
    if checkpoints.folders(folder):
        has_settings(folder)  # or is of another version
        checkpoint, damaged = checkpoints.require(folder)
        notes = checkpoints.notes_of(checkpoint)
        for name in damaged:
            events.append(("damaged-checkpoint", f"{name} does not match its checksums"))
    elif is_run(folder):
        notes = _notes_of_record(folder)
    else:
        require_free(folder)
        return Start(settings.checked(num_ranks))
    before = Settings(**notes["settings"])
    settings = Settings(**{**notes["settings"], **named, "out": str(folder)}).checked(num_ranks)
    step = notes["step"]
    summary = read_summary(folder, []) or {}
    last = max(notes.get("last", 0), summary.get("steps", 0))
    is_finished = last >= settings.steps
    if is_finished:
        step = max(step, last)
    elif checkpoint is None and notes["was_saved"]:
        reasons.append("its checkpoints are gone")
    elif checkpoint is None:
        events.append(("note", "no checkpoint was saved yet, so the run begins again"))
    for name, old in vars(before).items():
        new = getattr(settings, name)
        if name not in ("out", "data", "stop_after") and new != old:
            words = f"{name} was {old} and is {new}"
            events.append(("changed-settings", f"{words} at step {step}"))
            if step >= settings.steps or name in FIXED:
                reasons.append(words)
    if notes["tokens"] not in ("", open_tokens(settings.data).fingerprint):
        reasons.append(f"the tokens in {settings.data} are not those that it started with")
    if reasons:
        raise RecordError(
            f"Cannot continue {folder} after step {max(step, last)} because {reasons[0]}.",
            "Leave the setting as it was, or start another run with another --out.",
        )
    return Start(settings, checkpoint, step, tuple(events), is_finished)


def has_settings(folder: Path) -> bool:
    """Return whether ``run.toml`` can be read. Refuse one of another version, which is whole."""
    try:
        read_settings(folder)
    except SchemaError:
        raise
    except RecordError:
        return False
    return True


def _notes_of_record(folder: Path) -> dict[str, Any]:
    """Return the notes of a run without a checkpoint: it ended, lost its checkpoints, or begins again."""
    run = read_run(folder)
    if run.config.keys() != Settings.__dataclass_fields__.keys():  # of another program
        require_free(folder)
    last = run.last_step.get("step", 0)
    return {
        "step": 0, "last": last, "settings": {**run.config, "stop_after": 0}, "tokens": run.data_fingerprint,
        "was_saved": any(event["what"] == "checkpoint" for event in run.events),
    }  # fmt: skip
