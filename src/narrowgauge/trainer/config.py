"""What a training run is asked for: one frozen value, from which flags, TOML keys and ``run.toml`` are all read.

A setting is declared once, with its default, one line of help and the law its value must obey; the command line makes
a flag of each, a ``--config`` file has a key of each, and a run's own record holds all of them. So a flag and a key
cannot differ, and what was asked for can be asked for again. Settings left at None follow from the others by a rule
stated in their help; ``validated`` fills them in, so that the record of a run never depends on rules that may change.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError, NarrowgaugeError, RecipeError, suggestion
from narrowgauge.spec.accumulations import ACCUMULATIONS
from narrowgauge.spec.models import MODELS, get_model, refuse_own_code
from narrowgauge.spec.notation import load_toml, parse, parse_value
from narrowgauge.spec.recipes import Recipe

SCHEDULES = ("cosine", "linear", "constant")
SPIKE_ACTIONS = ("report", "skip", "rollback", "stop")

# Peak learning rate by number of parameters, up to and without the bound. Between 1 and 100 million it is what small
# Llamas on source text bear in every storage; from there on the published rates (GPT-3, arXiv 2005.14165, table 2.1).
LEARNING_RATES = ((4e6, 3e-3), (6e7, 1e-3), (6e8, 6e-4), (math.inf, 3e-4))

# Of unit-scaled models, whatever their width: the best of those tried at 1 million parameters.
UNIT_LEARNING_RATE = 0.5

OF_A_RUN = ("recipe", "seed", "out", "stop_after")
"""Settings that the runs of a comparison do not share."""
NUM_EVALS = 10
"""Validations per run of a comparison, where nothing says: enough to read a loss off at any second."""
KEPT_CHECKPOINTS = 1
"""Checkpoints kept per run of a comparison, where nothing says: one is enough to go on from."""
COMPARED = {"eval_every": f"steps / {NUM_EVALS}", "keep_checkpoints": str(KEPT_CHECKPOINTS)}
"""Settings whose default is another in a comparison, and what it is there, in words."""

# From here on a compiled model wins back its compilation within a short run.
COMPILE_PARAMETERS = 5_000_000
COMPILE_STEPS = 1000

_KINDS: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "Recipe": Recipe}
_KIND_NAMES: dict[type, str] = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false", Recipe: "a recipe",
}  # fmt: skip


def _about(help: str, law: str = "", holds: Callable[[Any], bool] = lambda _: True) -> dict[str, Any]:
    """What is known of a setting: its help, and its law in words and as a test."""
    return {"help": help, "law": law, "holds": holds}


def _setting(default: Any, *about: Any) -> Any:
    return dataclasses.field(default=default, metadata=_about(*about))


def _count(default: int | None, help: str, least: int = 1) -> Any:
    return _setting(default, help, f"at least {least}", lambda value: least <= value < 2**63)


@dataclass(frozen=True)
class TrainConfig:
    """Everything a training run is asked for.

    Law: ``TrainConfig.from_dict(config.to_dict()) == config``, and a TOML file in between changes nothing.

    Attributes:
        model: a preset's name, or a folder with a Hugging Face ``config.json``.
        recipe: a value; command lines and files give names, which are parsed where they are read.
        steps, batch_size, …: ``narrowgauge train --help`` says of each what it is, and so does its metadata.

    Example:
        >>> TrainConfig(model="llama-1m", steps=400).validated().lr
        0.003
    """

    model: str = _setting(
        "llama-1m", "A preset (narrowgauge show models) or a folder with a Hugging Face config.json.", "not empty", bool
    )
    data: str = _setting(
        "stdlib", "stdlib, a file or folder of text or jsonl, a token map, or datasets:NAME.", "not empty", bool
    )
    recipe: Recipe = dataclasses.field(
        default=parse("bfloat16/word"),
        metadata=_about("A recipe (narrowgauge show recipes) or a .toml file that says one."),
    )
    steps: int = _count(400, "Optimizer steps.")
    batch_size: int = _count(8, "Sequences per optimizer step.")
    sequence_length: int = _count(256, "Tokens per sequence.")
    gradient_accumulation_steps: int = _count(1, "Parts a batch is computed in; must divide the batch size.")
    lr: float | None = _setting(
        None,
        "Peak learning rate.  [default: by parameters: 0.003 below 4 million, 0.001 below 60, 0.0006 below 600, else "
        "0.0003; unit-scaled models: 0.5]",
        "above 0 and finite",
        lambda value: 0 < value < math.inf,
    )
    schedule: str = _setting(
        "cosine",
        "How the rate falls after the warm-up: cosine, linear or constant.",
        f"one of {', '.join(SCHEDULES)}",
        lambda value: value in SCHEDULES,
    )
    warmup_steps: int | None = _count(
        None, "Steps over which the rate rises.  [default: a tenth of the steps, at most 100]", 0
    )
    min_lr_ratio: float = _setting(
        0.1, "Last learning rate, as a share of the peak.", "from 0 to 1", lambda value: 0 <= value <= 1
    )
    beta1: float = _setting(0.9, "Decay of the first moment.", "from 0 to below 1", lambda value: 0 <= value < 1)
    beta2: float = _setting(0.95, "Decay of the second moment.", "from 0 to below 1", lambda value: 0 <= value < 1)
    eps: float = _setting(1e-8, "AdamW's epsilon.", "at least 0 and finite", lambda value: 0 <= value < math.inf)
    weight_decay: float = _setting(
        0.1, "Decoupled weight decay of matrices.", "at least 0 and finite", lambda value: 0 <= value < math.inf
    )
    max_grad_norm: float = _setting(
        1.0, "Norm to which gradients are clipped; inf clips nothing.", "above 0", lambda value: value > 0
    )
    seed: int = _count(0, "Of the initial weights, the order of the data and stochastic rounding.", 0)
    out: str | None = _setting(
        None, "Run folder; new or empty.  [default: runs/MODEL-RECIPE-N, the first free N]", "a path", bool
    )
    tokenizer: str | None = _setting(
        None, "A tokenizer.json or a folder with one.  [default: a BPE trained on the data]", "a path", bool
    )
    held_out: float = _setting(
        0.05, "Share of the documents kept for validation.", "above 0 and below 1", lambda value: 0 < value < 1
    )
    eval_every: int = _count(100, "Steps between validations; 0: only at the end.", 0)
    eval_batches: int = _count(8, "Batches per validation.")
    checkpoint_every: int = _count(100, "Steps between checkpoints; 0: only at the end.", 0)
    keep_checkpoints: int = _count(2, "Checkpoints kept, the latest ones.")
    accumulation_dtype: str = _setting(
        "float32",
        f"In which format micro-batch gradients are summed: {', '.join(ACCUMULATIONS)}.",
        f"one of {', '.join(ACCUMULATIONS)}",
        lambda value: value in ACCUMULATIONS,
    )
    audit_every: int = _count(10, "Steps between audits of the update; 0: never.", 0)
    gauges_every: int = _count(20, "Steps between samples of the gauges; 0: none.", 0)
    on_spike: str = _setting(
        "report",
        "What to do about a spike of loss or gradient norm: report it, skip the batch, rollback to the last checkpoint and go "
        "round the data, or stop.",
        f"one of {', '.join(SPIKE_ACTIONS)}",
        lambda value: value in SPIKE_ACTIONS,
    )
    max_rollbacks: int = _count(3, "Rollbacks after which a spike stops the run.", 0)
    tensorboard: bool = _setting(False, "Also write TensorBoard's event files, to the run folder's tensorboard/.")
    log_every: int = _count(10, "Steps between printed lines; every step is recorded.")
    stop_after: int | None = _count(
        None, "Stop after this step with a checkpoint, as if interrupted.  [default: never]"
    )
    activation_checkpointing: bool = _setting(False, "Recompute activations in the backward pass to save memory.")
    compile: bool | None = _setting(None, "Compile the model.  [default: from 5 million parameters or 1000 steps on]")

    @property
    def betas(self) -> tuple[float, float]:
        """Both decays, as ``ng.AdamW`` takes them."""
        return self.beta1, self.beta2

    @property
    def micro_batch_size(self) -> int:
        """Sequences in each part of a batch."""
        return self.batch_size // self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens in each optimizer step."""
        return self.batch_size * self.sequence_length

    def learning_rate(self, step: int) -> float:
        """The learning rate of one optimizer step: a pure function of the settings.

        Law: it rises in equal parts to ``lr`` at ``warmup_steps`` and falls to ``lr * min_lr_ratio`` at ``steps``.

        Args:
            step: from 1 to ``steps``.
        Returns:
            The rate.
        Example:
            >>> config = TrainConfig(steps=110, lr=1.0, warmup_steps=10, schedule="linear", min_lr_ratio=0.0)
            >>> [config.learning_rate(step) for step in (1, 10, 60, 110)]
            [0.1, 1.0, 0.5, 0.0]
        """
        filled = self.filled()
        assert filled.warmup_steps is not None
        if filled.lr is None:
            raise NarrowgaugeError(
                f"model {self.model!r} is no preset, and its learning rate is not set.", "Give --lr."
            )
        if step <= filled.warmup_steps:
            return filled.lr * step / filled.warmup_steps
        if self.schedule == "constant":
            return filled.lr
        progress = min((step - filled.warmup_steps) / (self.steps - filled.warmup_steps), 1.0)
        left = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return filled.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * left)

    def filled(self, num_parameters: int | None = None) -> TrainConfig:
        """The same settings with the rules for ``lr``, ``warmup_steps`` and ``compile`` worked out.

        Args:
            num_parameters: of the model; None takes a preset's own. Without either, ``lr`` and ``compile`` may stay
                None.
        Returns:
            The filled settings; what was given is untouched.
        Example:
            >>> TrainConfig(model="llama-125m").filled().lr
            0.0006
        """
        if num_parameters is None and self.model in MODELS:
            num_parameters = MODELS[self.model].num_parameters
        filled = self
        if self.warmup_steps is None:
            filled = replace(filled, warmup_steps=min(self.steps // 10, 100))
        if self.lr is None and self.recipe.compute.transform == "unit":
            filled = replace(filled, lr=UNIT_LEARNING_RATE)
        elif self.lr is None and num_parameters is not None:
            filled = replace(filled, lr=next(rate for bound, rate in LEARNING_RATES if num_parameters < bound))
        if self.compile is None and (self.steps >= COMPILE_STEPS or num_parameters is not None):
            large = num_parameters is not None and num_parameters >= COMPILE_PARAMETERS
            filled = replace(filled, compile=large or self.steps >= COMPILE_STEPS)
        return filled

    def validated(self) -> TrainConfig:
        """Check every setting, alone and against the others, and fill in what follows by rule.

        Law: idempotent, and nothing is written. Only what needs the model or the text itself is left to the loop.

        Returns:
            The settings with the model's full name, ``out`` chosen, and all rules worked out.
        Raises:
            RecipeError: a recipe that its name or table does not say in full, or an unknown preset.
            DataError: the data, the tokenizer or the model folder does not exist.
            RecordError: ``out`` is a file, or a folder that is not empty.
            NarrowgaugeError: any other value that cannot be.
        """
        for field in fields(self):
            _require(field, getattr(self, field.name))
        if parse_value(self.recipe.to_value()) != self.recipe:
            raise RecipeError(
                f"recipe '{self.recipe.title}' has a compute or storage that differs from the table's of that name.",
                "A run records its recipe by name: take one from narrowgauge show recipes.",
            )
        named = replace(self, model=_known_model(self.model)).filled()
        named._require_agreement()
        named._require_sources()
        return replace(
            named, out=_free_folder(named.model, self.recipe.name) if named.out is None else named._free_out()
        )

    def located(self) -> TrainConfig:
        """The same settings with full paths, so that a run or a comparison can go on from any folder.

        Law: idempotent; what is no path here (a preset, ``stdlib``, a name on the hub) stays as it is.

        Returns:
            The settings.
        Example:
            >>> TrainConfig(data=".").located().data == str(Path.cwd())
            True
        """

        def full(name: str) -> str:
            path = Path(name).expanduser()
            return str(path.resolve()) if path.exists() else name

        model = self.model if self.model in MODELS else full(self.model)
        data = self.data if self.data == "stdlib" else full(self.data)
        return replace(self, model=model, data=data, tokenizer=self.tokenizer and full(self.tokenizer))

    def to_dict(self) -> dict[str, Any]:
        """A TOML table with a key per setting; None is left out."""
        table = {field.name: getattr(self, field.name) for field in fields(self)} | {"recipe": self.recipe.to_value()}
        return {name: value for name, value in table.items() if value is not None}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "the settings") -> TrainConfig:
        """Read a table such as ``to_dict`` gives; keys that are missing have their defaults.

        Args:
            table: settings by name; ``recipe`` is a name or a table of its own.
            where: what to call the table in an error.
        Returns:
            The settings, not validated against each other.
        Raises:
            NarrowgaugeError: an unknown key, or a value of the wrong kind or out of range.
        """
        known = {field.name: field for field in fields(cls)}
        given: dict[str, Any] = {}
        for name, value in table.items():
            if name not in known:
                near = (
                    suggestion(name, known) or "narrowgauge train --help lists all: a key is a flag with underscores."
                )
                raise NarrowgaugeError(f"{where} has an unknown key '{name}'.", near)
            if name == "recipe":
                value = parse_value(value, where)
            # TOML and people write a whole number as an integer.
            elif kind_of(known[name]) is float and type(value) is int:
                value = float(value)
            _require(known[name], value, f" in {where}")
            given[name] = value
        return cls(**given)

    @classmethod
    def from_toml(cls, path: str | Path) -> TrainConfig:
        """Read settings from a TOML file.

        Args:
            path: a UTF-8 file.
        Returns:
            The settings, not validated against each other.
        Raises:
            DataError: the file is missing or is no TOML.
            NarrowgaugeError: a key or value that cannot be.
        """
        try:
            table = load_toml(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(f"the settings file {path} does not exist.", "Name a TOML file with --config.") from None
        except (ValueError, OSError) as error:
            said = " ".join(str(error).split())
            raise DataError(f"the settings file {path} cannot be read: {said}.", "It must be UTF-8 TOML.") from None
        return cls.from_dict(table, str(path))

    def _require_agreement(self) -> None:
        """Settings that are each possible but contradict one another."""
        if self.batch_size % self.gradient_accumulation_steps:
            raise NarrowgaugeError(
                f"a batch of {self.batch_size} sequences cannot be cut into {self.gradient_accumulation_steps} equal "
                "parts.",
                "Let --gradient-accumulation-steps divide --batch-size.",
            )
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise NarrowgaugeError(
                f"a warm-up of {self.warmup_steps} steps was asked for in a run of {self.steps}.",
                "Lower --warmup-steps.",
            )
        if self.on_spike == "rollback" and not self.checkpoint_every:
            raise NarrowgaugeError(
                "a rollback to the last checkpoint was asked for, and no checkpoints.", "Give --checkpoint-every."
            )
        if self.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise NarrowgaugeError(
                "files for TensorBoard were asked for, and it is not installed.", "pip install tensorboard."
            )
        model = MODELS.get(self.model)
        if model is not None and self.sequence_length > model.max_positions:
            raise RecipeError(
                f"sequences of {self.sequence_length} tokens were asked of {model.name}, which has "
                f"{model.max_positions} positions.",
                f"Take --sequence-length {model.max_positions} or less, or another --model.",
            )

    def _require_sources(self) -> None:
        """The text and the tokenizer are there; both are read later."""
        # Late, because the command line makes flags of this file's settings and needs nothing of this.
        from narrowgauge.trainer.corpus import open_texts

        if not self.data.startswith("datasets:"):
            open_texts(self.data)
        if self.tokenizer is not None and not Path(self.tokenizer).exists():
            raise DataError(f"the tokenizer {self.tokenizer} does not exist.", "Name a tokenizer.json or its folder.")

    def _free_out(self) -> str:
        from narrowgauge.runs.writer import require_free

        assert self.out is not None
        require_free(self.out, beside=left_by_a_kill(Path(self.out)))
        return self.out


def left_by_a_kill(folder: Path) -> tuple[str, ...]:
    """Names that may lie in a new run's folder: what a killed command left before there was a run, whole data and rubbish."""
    # Late, as above.
    from narrowgauge.runs.writer import leftovers

    return (*leftovers(folder), *(("data",) if (folder / "data" / "data.json").is_file() else ()))


def kind_of(field: dataclasses.Field[Any]) -> type:
    """The type of a setting that is not None: ``str``, ``int``, ``float``, ``bool`` or ``Recipe``."""
    # The annotations of this file are text, and each names the plain type first.
    return _KINDS[str(field.type).split(" ")[0]]


def _require(field: dataclasses.Field[Any], value: Any, where: str = "") -> None:
    """The law of one setting."""
    if value is None and field.default is None:
        return
    kind = kind_of(field)
    flag = f"--{field.name.replace('_', '-')}"
    # Exact types: True is an int to Python, and nobody means it. An int may stand for a float.
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise NarrowgaugeError(
            f"{field.name} = {value!r} was asked for{where}, and it must be {_KIND_NAMES[kind]}.",
            f"For instance {field.name} = {field.default!r}." if field.default is not None else "",
        )
    if not field.metadata["holds"](value):
        raise NarrowgaugeError(
            f"{field.name} = {value!r} was asked for{where}, and it must be {field.metadata['law']}.",
            f"Change {flag}, or leave it out.",
        )


def _known_model(name: str) -> str:
    """The full name of a preset, or the path of a folder that describes a model."""
    path = Path(name).expanduser()
    if name.strip().lower() in MODELS or not (path.exists() or "/" in name or "\\" in name):
        return get_model(name).name
    if not path.exists():
        raise DataError(
            f"the model folder {name} does not exist.", "Name a preset (narrowgauge show models) or a folder."
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise DataError(f"the model folder {name} holds no config.json.", "Name a folder that Hugging Face wrote.")
    refuse_own_code(path)
    return str(path)


def _free_folder(model: str, recipe: str) -> str:
    """``runs/MODEL-RECIPE-N`` with the first N after every one that is taken."""
    stem = Path(model).name.removesuffix(".json") if model not in MODELS else model
    stem = f"{stem}-{recipe.replace('/', '-')}"
    number = 1
    while (Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return str(Path("runs") / f"{stem}-{number}")
