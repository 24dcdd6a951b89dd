"""The configuration of a training run: one frozen dataclass that defines the flags, the TOML keys
and ``run.toml``.

A field has its default, one line of help and a constraint on its value. It is a flag of the command
line and a key of a ``--config`` file. ``filled`` derives fields left at None when the model is
there, so that the record of a run does not depend on rules that may change. Nothing here needs
PyTorch.
"""

from __future__ import annotations

import dataclasses
import math
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
from narrowgauge.spec.sums import ACCUMULATION_DTYPES, SHARDINGS
from narrowgauge.spec.toml import read_file
from narrowgauge.spec.values import require_choice, require_number

_KINDS: dict[type, str] = {
    str: "text", int: "an integer", float: "a number", Recipe: "a recipe",
}  # fmt: skip


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
    return next(kind for kind in _KINDS if kind.__name__ == str(field.type).split(" ")[0])


def require(field: dataclasses.Field[Any], value: Any) -> None:
    """Check the type and the allowed values of one setting."""
    if value is None and field.default is None:
        return
    kind = kind_of(field)
    flag = f"--{field.name.replace('_', '-')}"
    # Exact types: True is an int in Python. An int may stand for a float.
    if type(value) not in (kind, int if kind is float else kind):
        raise NarrowgaugeError(
            f"Cannot use {field.name} = {value!r}: it must be {_KINDS[kind]}.", f"Change {flag}."
        )
    if value == "":
        raise NarrowgaugeError(f"{field.name} is empty.", f"Omit {flag}.")
    if field.metadata["law"] is not None:
        field.metadata["law"](field.name, value)


def known_model(name: str) -> str:
    """Return the full name of a preset, or the path of a model folder, which may be given by its
    ``config.json``.
    """
    path = Path(name).expanduser()
    if name.strip().lower() in MODELS or not (path.exists() or "/" in name or "\\" in name):
        return get_model(name).name
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        problem = "holds no config.json" if path.exists() else "does not exist"
        raise DataError(
            f"the model folder {name} {problem}.",
            "Name a Hugging Face model folder, or a preset: narrowgauge show models.",
        )
    refuse_own_code(folder)
    return str(folder.resolve())


def first_free(stem: Path) -> Path:
    """Return ``STEM-N`` with the first N, from 1, that does not exist."""
    number = 1
    while Path(f"{stem}-{number}").exists():
        number += 1
    return Path(f"{stem}-{number}")


OF_A_RUN = ("recipe", "seed", "out", "stop_after")
"""Settings that the runs of a comparison do not share."""

_DEFAULT = parse("bfloat16/word")


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run; ``narrowgauge train --help`` explains each.

    ``TrainConfig.from_dict(config.to_dict()) == config``, also through a TOML file.

    Example:
        >>> TrainConfig(model="llama-1m", steps=400).filled().lr
        0.003
    """

    # fmt: off
    model: str = setting(
        "llama-1m", "A preset (narrowgauge show models) or a folder with a Hugging Face config.json; its weights are "
        "used, if it holds any.")
    data: str | None = setting(None, "A token map: the folder that narrowgauge tokenize has made.")
    recipe: Recipe = setting(_DEFAULT, "A recipe (narrowgauge show recipes) or a .toml file with one.")  # noqa: RUF009
    steps: int = count(400, "Optimizer steps.")
    batch_size: int = count(8, "Sequences per optimizer step.")
    sequence_length: int = count(256, "Tokens per sequence.")
    gradient_accumulation_steps: int = count(
        1, "Micro-batches per optimizer step, at least one for each rank; must divide the batch size.")
    lr: float | None = setting(
        None, "Peak learning rate.  [default: by parameters: 0.003 below 4 million, 0.001 below 60, 0.0006 below 600, else "
        "0.0003]", _within(is_open=True))
    schedule: str = setting(
        "cosine", "Decay of the learning rate after the warm-up: cosine, linear or constant.",
        _one_of(("cosine", "linear", "constant")))
    warmup_steps: int | None = count(None, "Warm-up steps of the learning rate.  [default: a tenth of the steps, at most 100]", 0)
    min_lr_ratio: float = setting(0.1, "Final learning rate as a fraction of the peak.", _within(0, 1))
    beta1: float = setting(0.9, "AdamW's decay of the first moment.", _within(0, 1))
    beta2: float = setting(0.95, "AdamW's decay of the second moment.", _within(0, 1))
    eps: float = setting(1e-8, "AdamW's epsilon.", _within())
    weight_decay: float = setting(0.1, "Weight decay of matrices.", _within())
    max_grad_norm: float = setting(1.0, "Maximum gradient norm for clipping; inf disables it.")
    seed: int = setting(
        0, "Seed of the initial weights, the order of the data and stochastic rounding.", _within(0, 1 << 64, is_whole=True))
    out: str | None = setting(None, "Run folder: new, or with a run, which continues with the settings given.  "
        "[default: runs/MODEL-RECIPE-N, the first free N]")
    held_out: float = setting(0.05, "Fraction of the documents held out for validation.", _within(0, 1, is_open=True))
    eval_every: int = count(100, "Steps between validations; 0: only at the end.", 0)
    eval_sequences: int = count(64, "Sequences per validation, over all ranks.")
    checkpoint_every: int = count(100, "Steps between checkpoints; 0: only at the end.", 0)
    keep_checkpoints: int = count(2, "Number of latest checkpoints to keep.")
    accumulation_dtype: str = setting(
        "float32", f"Format in which micro-batch gradients are accumulated: {', '.join(ACCUMULATION_DTYPES)}.",
        _one_of(ACCUMULATION_DTYPES))
    audit_every: int = count(10, "Steps between audits of the update; 0: never.", 0)
    gauges_every: int = count(20, "Steps between samples of the gauges; 0: none.", 0)
    fingerprints_every: int = count(
        0, "Steps between fingerprints of every tensor, by which narrowgauge diagnose compares two runs; 0: none.", 0)
    log_every: int = count(10, "Steps between printed lines; every step is recorded.")
    stop_after: int | None = count(None, "Stop after this step with a checkpoint, as if interrupted.  [default: never]")
    shard: str = setting(
        "full", "On several ranks, shard weights, gradients and states over them: full or none.", _one_of(tuple(SHARDINGS)))
    threads: int | None = setting(
        None, "CPU threads per rank.  [default: 1 with an order-invariant reduction, else cores / ranks]",
        _within(1, 1025, is_whole=True))
    # fmt: on

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            require(field, value)
            if kind_of(field) is float and value is not None:  # TOML may write 1 for 1.0
                object.__setattr__(self, field.name, float(value))

    @property
    def optimizer_options(self) -> dict[str, Any]:
        return {
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }

    @property
    def micro_batch_size(self) -> int:
        return self.batch_size // self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of one optimizer step, from 1 to ``steps``, of filled settings."""
        assert self.lr is not None
        warmup = min(self.steps // 10, 100) if self.warmup_steps is None else self.warmup_steps
        if step <= warmup:
            return self.lr * step / warmup
        if self.schedule == "constant":
            return self.lr
        progress = min((step - warmup) / (self.steps - warmup), 1.0)
        remaining = 1 - progress
        if self.schedule == "cosine":
            remaining = (1 + math.cos(math.pi * progress)) / 2
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * remaining)

    def filled(self, num_parameters: int = 0) -> TrainConfig:
        """Return the same settings with a learning rate, derived from the model's size if it is None.

        Args:
            num_parameters: size of a model that is not a preset.
        """
        if self.lr is not None:
            return self
        if self.model in MODELS:
            num_parameters = MODELS[self.model].num_parameters
        return replace(self, lr=usual_rate(num_parameters))

    def validated(self, num_ranks: int = 1) -> TrainConfig:
        """Check the settings against each other.

        Checks that need the model happen when it is built.

        Returns:
            The settings with full names and paths, so that the run can be resumed from any folder;
                with ``out`` chosen, and with a micro-batch for each rank, unless they name several.
        Raises:
            NarrowgaugeError: an invalid value.
        """
        # Imported late: the command line makes flags of these settings without this module.
        from narrowgauge.trainer.data.tokens import read_tokens

        require_package("transformers")
        if self.max_grad_norm != math.inf:
            require_number("max_grad_norm", self.max_grad_norm, is_open=True)
        if parse(self.recipe.to_value()) != self.recipe:
            raise RecipeError(
                f"recipe '{self.recipe.title}' has a compute or storage that differs from the "
                "table's of that name.",
                "A run records its recipe by name: take one from narrowgauge show recipes.",
            )
        config = replace(self, model=known_model(self.model))
        if self.gradient_accumulation_steps == 1:
            config = replace(config, gradient_accumulation_steps=num_ranks)
        config.require_agreement(num_ranks)
        if self.data is None:
            raise DataError(
                "Cannot train because no data was named.",
                "Make a token map, and name it: narrowgauge tokenize TEXT OUT, then --data OUT.",
            )
        config = replace(config, data=str(read_tokens(self.data).folder.resolve()))
        if config.out is None:
            stem = f"{Path(config.model).name}-{config.recipe.name.replace('/', '-')}"
            config = replace(config, out=str(first_free(Path("runs") / stem)))
        return config

    def require_agreement(self, num_ranks: int = 1) -> None:
        """Refuse settings that contradict each other or the number of ranks."""
        parts = self.gradient_accumulation_steps
        sums = self.accumulation_dtype
        if parts > 1 and sums == "bfloat16" and self.recipe.storage.visible == "float16":
            raise RecipeError(
                "Cannot train: accumulation_dtype 'bfloat16' sums no float16 gradients.",
                "Use --accumulation-dtype float32.",
            )
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
        if self.model in MODELS:
            require_positions(self, MODELS[self.model].max_positions)

    def to_dict(self) -> dict[str, Any]:
        table = {**vars(self), "recipe": self.recipe.to_value()}
        return {name: value for name, value in table.items() if value is not None}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "the settings") -> TrainConfig:
        """Read a table from :meth:`to_dict`.

        Missing keys get their defaults. Values are not checked against each other.

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


def require_positions(config: TrainConfig, number: int) -> None:
    """Refuse sequences that are longer than the model's number of positions."""
    if config.sequence_length > number:
        raise RecipeError(
            f"Cannot train: {config.model} has {number} positions, and sequences have "
            f"{config.sequence_length} tokens.",
            f"Use --sequence-length {number} or less, or another --model.",
        )


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return the settings that a UTF-8 TOML file names, or a ``run.toml``, of which the folder is
    left out. Check each.
    """
    table = read_file(path, "settings file", "Name a UTF-8 TOML file.")
    if "schema_version" in table and isinstance(recorded := table.get("config"), dict):
        table = {name: value for name, value in recorded.items() if name != "out"}
    TrainConfig.from_dict(table, str(path))
    return table
