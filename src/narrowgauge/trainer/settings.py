"""The settings of ``narrowgauge train``: a field is a flag, a key of a ``--config`` file, and a
setting in the record.

Nothing here needs PyTorch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import (
    DataError,
    NarrowgaugeError,
    RankError,
    RecipeError,
    require_package,
    suggestion,
)
from narrowgauge.spec.models import MODELS, get_model, refuse_own_code, usual_rate
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.toml import read_file
from narrowgauge.spec.values import require_choice, require_number

_KINDS: dict[str, tuple[type, str]] = {
    "str": (str, "text"), "int": (int, "an integer"), "float": (float, "a number"),
    "Recipe": (Recipe, "a recipe"),
}  # fmt: skip
OF_A_RUN = ("recipe", "seed", "out", "stop_after")
"""Settings that the runs of a comparison do not share."""
FIXED = ("model", "recipe", "batch_size", "sequence_length", "seed")
"""Settings that decide the numbers of a run from its first step on."""


def setting(default: Any, help: str, law: Callable[[str, Any], None] | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "law": law})


def _within(*bounds: float, **kind: bool) -> Callable[[str, Any], None]:
    return lambda name, value: require_number(name, value, *bounds, **kind)


def _one_of(choices: Iterable[Any]) -> Callable[[str, Any], None]:
    return lambda name, value: require_choice(name, value, choices)


def count(default: int | None, help: str, least: int = 1) -> Any:
    """Return a field that holds a whole number from ``least`` on."""
    return setting(default, help, _within(least, 10**9, is_whole=True))


def kind_of(field: dataclasses.Field[Any]) -> type:
    """Return the type of a setting that is not None: ``str``, ``int``, ``float`` or ``Recipe``."""
    return _KINDS[str(field.type).split(" ")[0]][0]


@dataclass(frozen=True)
class Settings:
    """The settings of a training run; ``narrowgauge train --help`` explains each.

    ``Settings.from_dict(settings.to_dict()) == settings``, also through a TOML file.

    Example:
        >>> Settings(steps=400, lr=1e-3).learning_rate(400)
        0.0001
    """

    # fmt: off
    data: str | None = setting(None, "Tokens: the folder that narrowgauge tokenize has made.")
    model: str = setting(
        "llama-1m", "A preset (narrowgauge show models), a Hugging Face folder, or ORG/NAME in the hub's cache; weights are "
        "used, if there are any.")
    recipe: Recipe = setting(  # noqa: RUF009
        parse("bfloat16/word"), "A recipe (narrowgauge show recipes).")
    out: str | None = setting(None, "Run folder: new, or with a run, which goes on with the settings given.  "
        "[default: runs/MODEL-RECIPE-N, the first free N]")
    steps: int = count(400, "Optimizer steps.")
    batch_size: int = count(8, "Sequences per optimizer step.")
    sequence_length: int = count(256, "Tokens per sequence.")
    gradient_accumulation_steps: int = count(
        1, "Micro-batches per optimizer step, at least one for each rank; must divide the batch size.")
    lr: float | None = setting(
        None, "Peak learning rate.  [default: by parameters: 0.003 below 4 million, 0.001 below 60, 0.0006 below 600, else "
        "0.0003]", _within(is_open=True))
    warmup_steps: int | None = count(None, "Warm-up steps of the learning rate.  [default: a tenth of the steps, at most 100]", 0)
    weight_decay: float = setting(0.1, "Weight decay of matrices.", _within())
    max_grad_norm: float = setting(
        1.0, "Maximum gradient norm for clipping; inf disables it.", _within(0, math.inf, is_open=True))
    seed: int = setting(
        0, "Seed of the initial weights, the order of the data and stochastic rounding.", _within(0, 1 << 32, is_whole=True))
    eval_every: int = count(100, "Steps between validations; 0: only at the end.", 0)
    eval_sequences: int = count(64, "Sequences per validation, over all ranks.")
    checkpoint_every: int = count(100, "Steps between checkpoints; 0: only at the end.", 0)
    keep_checkpoints: int = count(2, "Number of latest checkpoints to keep.")
    gauges_every: int = count(20, "Steps between samples of the gauges; 0: none.", 0)
    fingerprints_every: int = count(
        0, "Steps between fingerprints of every tensor, by which narrowgauge diagnose compares two runs; 0: none.", 0)
    stop_after: int | None = count(None, "Stop after this step with a checkpoint, as if interrupted.  [default: never]")
    report_to: str = setting(
        "none", "Also send the numbers to tensorboard or wandb.", _one_of(("none", "tensorboard", "wandb")))
    # fmt: on

    def __post_init__(self) -> None:
        for field in fields(self):
            _require(field, getattr(self, field.name))

    @property
    def folder(self) -> Path:
        return Path(str(self.out))

    @property
    def micro_batch_size(self) -> int:
        return self.batch_size // self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step, from 1 on: a linear warm-up, then a cosine to a tenth."""
        assert self.lr is not None
        warmup = min(self.steps // 10, 100) if self.warmup_steps is None else self.warmup_steps
        if step <= warmup:
            return self.lr * step / warmup
        progress = min((step - warmup) / (self.steps - warmup), 1.0)
        return self.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)

    def filled(self, num_parameters: int) -> Settings:
        """Return the settings with a learning rate, by the model's size if none was named."""
        return replace(self, lr=self.lr or usual_rate(num_parameters))

    def checked(self, num_ranks: int = 1) -> Settings:
        """Check the settings against each other, and return them with full paths and an ``out``.

        Raises:
            NarrowgaugeError: an invalid value.
        """
        # Imported late: the command line makes flags of these settings without this module.
        from narrowgauge.trainer.tokens import open_tokens

        require_package("transformers")
        if parse(self.recipe.name) != self.recipe:
            raise RecipeError(
                f"recipe '{self.recipe.name}' has a compute or storage that differs from the "
                "table's of that name.",
                "A run records its recipe by name: take one from narrowgauge show recipes.",
            )
        settings = replace(self, model=known_model(self.model))
        if self.gradient_accumulation_steps == 1:
            settings = replace(settings, gradient_accumulation_steps=num_ranks)
        settings._require_agreement(num_ranks)
        if self.data is None:
            raise DataError(
                "Cannot train because no data was named.",
                "Tokenize a text, and name it: narrowgauge tokenize TEXT OUT, then --data OUT.",
            )
        open_tokens(self.data).require(self.sequence_length)
        settings = replace(settings, data=str(Path(self.data).resolve()))
        if settings.out is None:
            stem = f"{Path(settings.model).name}-{self.recipe.name.replace('/', '-')}"
            settings = replace(settings, out=str(first_free(Path("runs") / stem)))
        return settings

    def _require_agreement(self, num_ranks: int) -> None:
        parts = self.gradient_accumulation_steps
        if self.batch_size % parts:
            raise NarrowgaugeError(
                f"Cannot train: a batch of {self.batch_size} sequences cannot be split into "
                f"{parts} equal micro-batches.",
                "Choose a --gradient-accumulation-steps that divides --batch-size.",
            )
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise NarrowgaugeError(
                f"Cannot train: a warm-up of {self.warmup_steps} steps is longer than the run of "
                f"{self.steps}.",
                "Lower --warmup-steps.",
            )
        if num_ranks > parts:
            raise RankError(
                f"Cannot train: each of {num_ranks} ranks needs one of a step's {parts} "
                "micro-batches.",
                f"Set --gradient-accumulation-steps to {num_ranks} or more, or start fewer ranks.",
            )

    def to_dict(self) -> dict[str, Any]:
        table = {**vars(self), "recipe": self.recipe.name}
        return {name: value for name, value in table.items() if value is not None}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "the settings") -> Settings:
        """Read a table from :meth:`to_dict`. Missing keys get their defaults.

        ``where`` names the table in error messages.
        """
        names = [field.name for field in fields(cls)]
        for name in table:
            if name not in names:
                near = suggestion(name, names)
                raise NarrowgaugeError(
                    f"{where} has an unknown key '{name}'.",
                    near or "narrowgauge train --help: a key is a flag with underscores.",
                )
        values = dict(table)
        if "recipe" in values:
            values["recipe"] = parse(values["recipe"], where)
        return cls(**values)


def _require(field: dataclasses.Field[Any], value: Any) -> None:
    """Check the type and the allowed values of one setting."""
    if value is None and field.default is None:
        return
    kind, noun = _KINDS[str(field.type).split(" ")[0]]
    flag = f"--{field.name.replace('_', '-')}"
    # Exact types: True is an int in Python. An int may stand for a float.
    if type(value) not in (kind, int if kind is float else kind):
        raise NarrowgaugeError(
            f"Cannot use {field.name} = {value!r}: it must be {noun}.", f"Change {flag}."
        )
    if value == "":
        raise NarrowgaugeError(f"{field.name} is empty.", f"Omit {flag}.")
    is_unlimited = field.name == "max_grad_norm" and value == math.inf
    if field.metadata["law"] is not None and not is_unlimited:
        field.metadata["law"](field.name, value)


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return the settings that a UTF-8 TOML file names, or a ``run.toml``, of which the folder is
    left out. Check each.
    """
    table = read_file(path, "settings file", "Name a UTF-8 TOML file.")
    if "schema_version" in table and isinstance(recorded := table.get("config"), dict):
        table = {name: value for name, value in recorded.items() if name != "out"}
    Settings.from_dict(table, str(path))
    return table


def known_model(name: str) -> str:
    """Return the full name of a preset, the path of a model folder, or its place in the hub's cache.

    A folder may be given by its ``config.json``.
    """
    path = Path(name).expanduser()
    if name.strip().lower() in MODELS or not (path.exists() or "/" in name):
        return get_model(name).name
    if not path.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        require_package("transformers")
        from huggingface_hub import try_to_load_from_cache

        path = Path(str(try_to_load_from_cache(name, "config.json")))
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        problem = "holds no config.json" if path.exists() else "does not exist"
        raise DataError(
            f"the model folder {name} {problem}.",
            "Name a Hugging Face model folder, a preset (narrowgauge show models), or a model of "
            f"the hub after hf download {name}.",
        )
    refuse_own_code(folder)
    return str(folder.resolve())


def first_free(stem: Path) -> Path:
    """Return ``STEM-N`` with the first N, from 1, that does not exist."""
    number = 1
    while Path(f"{stem}-{number}").exists():
        number += 1
    return Path(f"{stem}-{number}")
