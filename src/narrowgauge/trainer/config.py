"""The configuration of a training run: one frozen dataclass that defines the flags, the TOML keys and ``run.toml``.

A field is declared once, with its default, one line of help and a constraint on its value. The command line has a flag for
each, a ``--config`` file a key, and the record of a run holds all of them. Fields left at None are derived from others by a
rule stated in their help; ``validated`` fills them in, so that the record of a run does not depend on rules that may change.
Nothing here needs PyTorch.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

from narrowgauge.errors import ChipError, DataError, NarrowgaugeError, RecipeError, suggestion
from narrowgauge.machine.cpp_compiler import gpu_compiler_missing, model_compiler_missing, switched_off
from narrowgauge.runs.loggers.logger import LOGGERS, names_in, require_loggers
from narrowgauge.spec.models import MODELS, UNIT_LEARNING_RATE, get_model, refuse_own_code, usual_rate
from narrowgauge.spec.notation import parse, parse_value
from narrowgauge.spec.recipes import DEFAULT_RECIPE, Recipe
from narrowgauge.spec.sums import ACCUMULATIONS, SHARDINGS
from narrowgauge.spec.toml import load_toml
from narrowgauge.spec.update_rules import UPDATE_RULES, UpdateRule, refuse_matrix_rule, rule_title

_KINDS: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "Recipe": Recipe}
_KIND_NAMES: dict[type, str] = {
    str: "text", int: "an integer", float: "a number", bool: "true or false", Recipe: "a recipe",
}  # fmt: skip


def described(help: str, constraint: str = "", holds: Callable[[Any], bool] = lambda _: True) -> dict[str, Any]:
    """Metadata of a setting: its help, and its constraint as text and as a predicate."""
    return {"help": help, "constraint": constraint, "holds": holds, "names": ()}


def config_field(default: Any, *description: Any) -> Any:
    """A field with a default and the arguments of :func:`described`."""
    return dataclasses.field(default=default, metadata=described(*description))


def name_field(default: str, help: str, names: Collection[str]) -> Any:
    """A field that holds one of some names."""
    metadata = {**described(help, f"one of {', '.join(names)}", lambda value: value in names), "names": tuple(names)}
    return dataclasses.field(default=default, metadata=metadata)


def count_field(default: int | None, help: str, least: int = 1) -> Any:
    """A field that holds a number from ``least`` on."""
    return config_field(default, help, f"at least {least}", lambda value: least <= value < 2**63)


def of_rules(name: str, help: str, *constraint: Any) -> Any:
    """A field whose default is its update rule's; the help says AdamW's, and each other one."""
    usual = UPDATE_RULES["adamw"].settings[name]
    others = {row.name: row.settings.get(name) for row in UPDATE_RULES.values()}
    told = [f"{rule} {'has none' if value is None else value}" for rule, value in others.items() if value != usual]
    return config_field(None, f"{help}  [default: {'; '.join([str(usual), *told])}]", *constraint)


def kind_of(field: dataclasses.Field[Any]) -> type:
    """The type of a setting that is not None: ``str``, ``int``, ``float``, ``bool`` or ``Recipe``."""
    # Annotations of settings are strings that name the plain type first.
    return _KINDS[str(field.type).split(" ")[0]]


def require(field: dataclasses.Field[Any], value: Any, where: str = "") -> None:
    """Check the type and constraint of one setting; ``where`` says in messages where it was found."""
    if value is None and field.default is None:
        return
    kind = kind_of(field)
    flag = f"--{field.name.replace('_', '-')}"
    # Exact types: True is an int in Python. An int may stand for a float.
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise NarrowgaugeError(
            f"{field.name} = {value!r} was requested{where}; it must be {_KIND_NAMES[kind]}.",
            f"For example {field.name} = {field.default!r}." if field.default is not None else "",
        )
    if not field.metadata["holds"](value):
        raise NarrowgaugeError(
            f"{field.name} = {value!r} was requested{where}; it must be {field.metadata['constraint']}.",
            suggestion(str(value), field.metadata["names"]) or f"Change {flag}, or omit it.",
        )


def load_settings(path: str | Path) -> dict[str, Any]:
    """The table of a settings file, unchecked; ``DataError`` where the file is missing or not TOML.

    The ``run.toml`` of a run is one too: it has the settings in a table, and the folder, which is the run's own, is left out.
    """
    try:
        found = load_toml(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"the settings file {path} does not exist.", "Name a TOML file with --config.") from None
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"the settings file {path} cannot be read: {reason}.", "It must be UTF-8 TOML.") from None
    settings = found.get("config")
    return {name: settings[name] for name in settings if name != "out"} if isinstance(settings, dict) else found


# ── models and folders that a configuration names ───────────────────────────────────────────────────────────────────


def known_model(name: str) -> str:
    """The full name of a preset, or the path of a model folder."""
    path = Path(name).expanduser()
    if name.strip().lower() in MODELS or not (path.exists() or "/" in name or "\\" in name):
        return get_model(name).name
    if not path.exists():
        raise DataError(
            f"the model folder {name} does not exist.", "Name a preset (narrowgauge show models) or a folder."
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise DataError(f"the model folder {name} holds no config.json.", "Name a Hugging Face model folder.")
    refuse_own_code(path)
    return str(path)


def free_folder(model: str, recipe: str) -> str:
    """``runs/MODEL-RECIPE-N`` with the first free N."""
    stem = Path(model).name.removesuffix(".json")
    return str(first_free(Path("runs") / f"{stem}-{recipe.replace('/', '-')}"))


def first_free(stem: Path) -> Path:
    """``STEM-N`` with the first N, from 1, that does not exist."""
    return next(path for number in count(1) if not (path := Path(f"{stem}-{number}")).exists())


def left_by_a_kill(folder: Path) -> tuple[str, ...]:
    """Names allowed in the folder of a new run: leftovers of a command killed before the run existed, and complete data."""
    # Imported here: the command line makes flags of settings and does not need it.
    from narrowgauge.runs.writer import leftovers

    return (*leftovers(folder), *(("data",) if (folder / "data" / "data.json").is_file() else ()))


# ── the configuration ───────────────────────────────────────────────────────────────────────────────────────────────

SCHEDULES = ("cosine", "linear", "constant")
SPIKE_ACTIONS = ("report", "skip", "rollback", "stop")

OF_A_RUN = ("recipe", "seed", "out", "stop_after")
"""Settings that the runs of a comparison do not share."""
OF_RANKS = ("shard", "replicas", "offload", "narrow_gather", "threads")
"""Settings that say how a run is distributed over ranks."""
CHANGEABLE_ON_RESUME = (*OF_RANKS, "log_to")
"""Settings that a resume may change: they say where a run is computed and shown, not what."""
NUM_EVALS = 10
"""Default number of validations per run of a comparison: enough to interpolate the loss at any time."""
KEPT_CHECKPOINTS = 1
"""Default number of checkpoints per run of a comparison: one is enough to resume."""
COMPARED = {"eval_every": f"steps / {NUM_EVALS}", "keep_checkpoints": str(KEPT_CHECKPOINTS)}
"""Settings with another default in a comparison, and that default as text."""

# Above these sizes compilation pays off within a short run.
COMPILE_PARAMETERS = 5_000_000
COMPILE_STEPS = 1000


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run.

    Invariant: ``TrainConfig.from_dict(config.to_dict()) == config``, also through a TOML file.

    Attributes:
        model: a preset's name, or a folder with a Hugging Face ``config.json`` and, optionally, weights to start from.
        recipe: the recipe; command lines and files hold its name, which is parsed there.
        steps, batch_size, …: see ``narrowgauge train --help``, or the metadata of each field.

    Example:
        >>> TrainConfig(model="llama-1m", steps=400).validated().lr
        0.003
    """

    model: str = config_field(
        "llama-1m", "A preset (narrowgauge show models) or a folder with a Hugging Face config.json.", "not empty", bool
    )
    data: str = config_field(
        "stdlib", "stdlib, a file or folder of text or jsonl, a token map, or datasets:NAME.", "not empty", bool
    )
    recipe: Recipe = dataclasses.field(
        default=parse(DEFAULT_RECIPE),
        metadata=described("A recipe (narrowgauge show recipes) or a .toml file with one."),
    )
    rule: str = name_field(
        "adamw",
        "Update rule (narrowgauge show rules); matrix rules leave embeddings and vectors to AdamW.",
        UPDATE_RULES,
    )
    rule_options: str | None = config_field(
        None, "The rule's own options, such as momentum=0.9,nesterov=false.  [default: those of narrowgauge show rules]"
    )
    steps: int = count_field(400, "Optimizer steps.")
    batch_size: int = count_field(8, "Sequences per optimizer step.")
    sequence_length: int = count_field(256, "Tokens per sequence.")
    gradient_accumulation_steps: int = count_field(1, "Micro-batches per optimizer step; must divide the batch size.")
    lr: float | None = config_field(
        None,
        "Peak learning rate.  [default: by parameters: 0.003 below 4 million, 0.001 below 60, 0.0006 below 600, else "
        "0.0003; unit-scaled models: 0.5; times the factor of the rule]",
        "above 0 and finite",
        lambda value: 0 < value < math.inf,
    )
    schedule: str = name_field(
        "cosine", "Decay of the learning rate after the warm-up: cosine, linear or constant.", SCHEDULES
    )
    warmup_steps: int | None = count_field(
        None, "Warm-up steps of the learning rate.  [default: a tenth of the steps, at most 100]", 0
    )
    min_lr_ratio: float = config_field(
        0.1, "Final learning rate as a fraction of the peak.", "from 0 to 1", lambda value: 0 <= value <= 1
    )
    beta1: float | None = of_rules(
        "beta1", "Decay of the first moment.", "from 0 to below 1", lambda value: 0 <= value < 1
    )
    beta2: float | None = of_rules(
        "beta2", "Decay of the second moment.", "from 0 to below 1", lambda value: 0 <= value < 1
    )
    eps: float | None = of_rules(
        "eps", "AdamW's epsilon.", "at least 0 and finite", lambda value: 0 <= value < math.inf
    )
    weight_decay: float | None = of_rules(
        "weight_decay", "Weight decay of matrices.", "at least 0 and finite", lambda value: 0 <= value < math.inf
    )
    max_grad_norm: float = config_field(
        1.0, "Maximum gradient norm for clipping; inf disables it.", "above 0", lambda value: value > 0
    )
    seed: int = count_field(0, "Seed of the initial weights, the order of the data and stochastic rounding.", 0)
    out: str | None = config_field(
        None, "Run folder; new or empty.  [default: runs/MODEL-RECIPE-N, the first free N]", "a path", bool
    )
    tokenizer: str | None = config_field(
        None, "A tokenizer.json or a folder with one.  [default: a BPE trained on the data]", "a path", bool
    )
    held_out: float = config_field(
        0.05, "Fraction of the documents held out for validation.", "above 0 and below 1", lambda value: 0 < value < 1
    )
    eval_every: int = count_field(100, "Steps between validations; 0: only at the end.", 0)
    eval_batches: int = count_field(8, "Batches per validation.")
    checkpoint_every: int = count_field(100, "Steps between checkpoints; 0: only at the end.", 0)
    keep_checkpoints: int = count_field(2, "Number of latest checkpoints to keep.")
    accumulation_dtype: str = name_field(
        "float32",
        f"Format in which micro-batch gradients are accumulated: {', '.join(ACCUMULATIONS)}.",
        ACCUMULATIONS,
    )
    audit_every: int = count_field(10, "Steps between audits of the update; 0: never.", 0)
    gauges_every: int = count_field(20, "Steps between samples of the gauges; 0: none.", 0)
    fingerprints_every: int = count_field(
        0, "Steps between fingerprints of every tensor, by which narrowgauge diagnose compares two runs; 0: none.", 0
    )
    verify_every: int = count_field(
        1000, "On several ranks, steps between comparisons of what they hold and compute; 0: never.", 0
    )
    on_spike: str = name_field(
        "report",
        "Reaction to a spike of the loss or gradient norm: report it, skip the batch, rollback to the last checkpoint and skip "
        "the data since, or stop.",
        SPIKE_ACTIONS,
    )
    max_rollbacks: int = count_field(3, "Rollbacks after which a spike stops the run.", 0)
    tensorboard: bool = config_field(False, "Also write TensorBoard event files to tensorboard/ in the run folder.")
    log_to: str = config_field(
        "none",
        f"Also send metrics and events to loggers, separated by commas: {', '.join(LOGGERS)}.",
        f"none, or names out of {', '.join(LOGGERS)}",
        lambda value: set(names_in(value)) <= set(LOGGERS),
    )
    log_every: int = count_field(10, "Steps between printed lines; every step is recorded.")
    stop_after: int | None = count_field(
        None, "Stop after this step with a checkpoint, as if interrupted.  [default: never]"
    )
    activation_checkpointing: bool = config_field(False, "Recompute activations in the backward pass to save memory.")
    compile: bool | None = config_field(
        None, "Compile the model.  [default: from 5 million parameters or 1000 steps on, if possible]"
    )
    shard: str = name_field(
        "full", "On several ranks, share weights, gradients and states out over them: full or none.", SHARDINGS
    )
    replicas: int = count_field(1, "Copies of the sharded model; must divide the number of ranks.")
    offload: bool = config_field(False, "On several ranks, keep shards in the host's memory.")
    narrow_gather: bool = config_field(
        False, "On several ranks, gather sharded weights as the codes that the recipe's matmuls take."
    )
    threads: int | None = count_field(
        None, "CPU threads per rank.  [default: 1 with an order-invariant reduction, else cores / ranks]"
    )

    @property
    def update_rule(self) -> UpdateRule:
        """The row of the run's update rule."""
        return UPDATE_RULES[self.rule]

    @property
    def betas(self) -> tuple[float, float] | None:
        """The decay rates of both moments; ``None`` for a rule that takes none."""
        taken = {**self.update_rule.settings, **self._given_settings()}
        return (taken["beta1"], taken["beta2"]) if "beta1" in taken else None

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """The arguments of the rule's optimizer, but for the learning rate."""
        taken: dict[str, Any] = {**self.update_rule.settings, **self._given_settings()}
        options = {"weight_decay": taken["weight_decay"], **self.update_rule.in_training(self.rule_options or "")}
        if self.betas is not None:
            options["betas"] = self.betas
        return options | ({self.update_rule.eps_option: taken["eps"]} if "eps" in taken else {})

    def _given_settings(self) -> dict[str, Any]:
        """Those of the settings that rules take which are not left to the rule."""
        found = {name: getattr(self, name) for name in UPDATE_RULES["adamw"].settings}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def loggers(self) -> tuple[str, ...]:
        """The loggers that the run is sent to."""
        return names_in(["tensorboard" if self.tensorboard else "none", *names_in(self.log_to)])

    @property
    def micro_batch_size(self) -> int:
        """Sequences per micro-batch."""
        return self.batch_size // self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    def learning_rate(self, step: int) -> float:
        """The learning rate of one optimizer step, from 1 to ``steps``: a pure function of the settings.

        Invariant: it rises linearly to ``lr`` at ``warmup_steps`` and, unless the schedule is constant, falls to
        ``lr * min_lr_ratio`` at ``steps``.

        Example:
            >>> config = TrainConfig(steps=110, lr=1.0, warmup_steps=10, schedule="linear", min_lr_ratio=0.0)
            >>> [config.learning_rate(step) for step in (1, 10, 60, 110)]
            [0.1, 1.0, 0.5, 0.0]
        """
        filled = self.filled()
        assert filled.warmup_steps is not None
        if filled.lr is None:
            raise NarrowgaugeError(
                f"model {self.model!r} is not a preset, and its learning rate is not set.", "Set --lr."
            )
        if step <= filled.warmup_steps:
            return filled.lr * step / filled.warmup_steps
        if self.schedule == "constant":
            return filled.lr
        progress = min((step - filled.warmup_steps) / (self.steps - filled.warmup_steps), 1.0)
        left = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return filled.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * left)

    def filled(self, num_parameters: int | None = None) -> TrainConfig:
        """The same settings with those filled in that are None: by the model, by the steps, and by the update rule.

        Args:
            num_parameters: size of the model; None uses that of a preset. Without either, ``lr`` and ``compile`` may
                stay None. A setting that the rule does not take stays None.
        Example:
            >>> TrainConfig(model="llama-125m").filled().lr
            0.0006
        """
        if num_parameters is None and self.model in MODELS:
            num_parameters = MODELS[self.model].num_parameters
        rule = self.update_rule
        filled = replace(self, **{**rule.settings, **self._given_settings()})
        if rule.options:
            filled = replace(filled, rule_options=rule.text(rule.in_training(self.rule_options or "")))
        if self.warmup_steps is None:
            filled = replace(filled, warmup_steps=min(self.steps // 10, 100))
        if self.lr is None and not self._why_no_rate():
            if self.recipe.compute.transform == "unit":
                filled = replace(filled, lr=UNIT_LEARNING_RATE)
            elif num_parameters is not None:
                filled = replace(filled, lr=usual_rate(num_parameters) * (rule.rate or 1.0))
        if self.compile is None and (self.steps >= COMPILE_STEPS or num_parameters is not None):
            filled = replace(filled, compile=self._is_worth_compiling(num_parameters) and not _compiler_missing())
        return filled

    def _why_no_rate(self) -> str:
        """Why a size of the model gives no learning rate, or an empty string."""
        if self.update_rule.rate is None:
            return self.update_rule.rate_because
        # Unit scaling multiplies the rate of each matrix for steps of AdamW's kind and size.
        is_other = self.recipe.compute.transform == "unit" and self.rule != "adamw"
        return "the usual rate of unit-scaled models is AdamW's" if is_other else ""

    def _is_worth_compiling(self, num_parameters: int | None) -> bool:
        if self.recipe.dtype == "float64":
            return False
        return self.steps >= COMPILE_STEPS or (num_parameters or 0) >= COMPILE_PARAMETERS

    def why_uncompiled(self, num_parameters: int) -> str:
        """Why a model that is worth compiling is not, or an empty string."""
        return _compiler_missing() if not self.compile and self._is_worth_compiling(num_parameters) else ""

    def require_compiler(self) -> None:
        """Refuse a compiled model where nothing can be compiled."""
        if self.compile and (missing := _compiler_missing()):
            raise ChipError(
                f"a compiled model was requested, and {missing}.",
                "Name a compiler that works with the variable CXX, or train without: --no-compile (compile = false).",
            )

    def validated(self) -> TrainConfig:
        """Check every setting, alone and against the others, and fill in derived settings.

        Invariant: idempotent, and nothing is written. Checks that need the model or the text happen in the loop.

        Returns:
            The settings with the model's full name, ``out`` chosen, and all rules worked out.
        Raises:
            RecipeError: a recipe that its name or table does not say in full, or an unknown preset.
            DataError: the data, the tokenizer or the model folder does not exist.
            RecordError: ``out`` is a file, or a folder that is not empty.
            ChipError: a compiled model was requested, and nothing can be compiled here.
            NarrowgaugeError: any other invalid value.
        """
        for field in fields(self):
            require(field, getattr(self, field.name))
        if parse_value(self.recipe.to_value()) != self.recipe:
            raise RecipeError(
                f"recipe '{self.recipe.title}' has a compute or storage that differs from the table's of that name.",
                "A run records its recipe by name: take one from narrowgauge show recipes.",
            )
        named = replace(self, model=known_model(self.model)).filled()
        named.require_agreement()
        named.require_compiler()
        named._require_sources()
        return replace(
            named, out=free_folder(named.model, self._named_recipe()) if named.out is None else named._free_out()
        )

    def _named_recipe(self) -> str:
        return self.recipe.name if self.rule == "adamw" else f"{self.recipe.name}-{self.rule}"

    @property
    def title(self) -> str:
        """The recipe's title, and the rule where it is not AdamW."""
        return rule_title(self.recipe.title, self.rule)

    def located(self) -> TrainConfig:
        """The same settings with full paths, so that a run or a comparison can be resumed from any folder.

        Invariant: idempotent; what is not a path here (a preset, ``stdlib``, a name on the hub) stays as it is.

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
        """Read a table from :meth:`to_dict`; missing keys have their defaults. Values are not checked against each other.

        Args:
            table: settings by name; ``recipe`` is a name or a table of its own.
            where: name of the table in error messages.
        Raises:
            NarrowgaugeError: an unknown key, or a value of the wrong type or out of range.
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
            # In TOML a float may be written as an integer.
            elif kind_of(known[name]) is float and type(value) is int:
                value = float(value)
            require(known[name], value, f" in {where}")
            given[name] = value
        return cls(**given)

    @classmethod
    def from_toml(cls, path: str | Path) -> TrainConfig:
        """Read settings from a UTF-8 TOML file, as :meth:`from_dict` does from a table.

        Raises:
            DataError: the file is missing or not TOML.
            NarrowgaugeError: an unknown key or an invalid value.
        """
        return cls.from_dict(load_settings(path), str(path))

    def require_agreement(self) -> None:
        """Refuse settings that contradict each other."""
        self._require_rule()
        if self.batch_size % self.gradient_accumulation_steps:
            raise NarrowgaugeError(
                f"a batch of {self.batch_size} sequences cannot be split into {self.gradient_accumulation_steps} equal "
                "micro-batches.",
                "Choose a --gradient-accumulation-steps that divides --batch-size.",
            )
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise NarrowgaugeError(
                f"a warm-up of {self.warmup_steps} steps was requested in a run of {self.steps}.",
                "Lower --warmup-steps.",
            )
        if self.shard == "none" and (self.replicas > 1 or self.offload or self.narrow_gather):
            asked = "offload" if self.offload else "narrow_gather" if self.narrow_gather else "replicas"
            raise NarrowgaugeError(
                f"shard = 'none' was requested with {asked} = {getattr(self, asked)}, which is about shards.",
                f"Omit --shard or --{asked.replace('_', '-')}.",
            )
        if self.on_spike == "rollback" and not self.checkpoint_every:
            raise NarrowgaugeError(
                "rollback to the last checkpoint was requested, and no checkpoints.", "Set --checkpoint-every."
            )
        require_loggers(self.loggers)
        model = MODELS.get(self.model)
        if model is not None and self.sequence_length > model.max_positions:
            raise RecipeError(
                f"sequences of {self.sequence_length} tokens were requested for {model.name}, which has "
                f"{model.max_positions} positions.",
                f"Use --sequence-length {model.max_positions} or less, or another --model.",
            )

    def _require_rule(self) -> None:
        """Refuse settings that the update rule does not take, a rate that it needs, and a storage that it cannot step."""
        rule = self.update_rule
        rule.read(self.rule_options or "")
        for name, value in self._given_settings().items():
            if name not in rule.settings:
                raise RecipeError(
                    f"{name} = {value:g} was requested with rule '{rule.name}', which has none.",
                    f"Omit --{name.replace('_', '-')}.",
                )
        if self.lr is None and (reason := self._why_no_rate()):
            raise RecipeError(
                f"rule '{rule.name}' was requested without a learning rate: {reason}.", "Set --lr; try several."
            )
        if self.compile and self.recipe.dtype == "float64":
            raise RecipeError(
                f"a compiled model was requested in '{self.recipe.title}', whose scope of float64 no graph can hold.",
                "Omit --compile: reference runs are eager.",
            )
        if rule.is_matrix:
            for storage in self.recipe.storages:
                refuse_matrix_rule(rule.name, storage)

    def _require_sources(self) -> None:
        """Require that text and tokenizer exist; both are read later."""
        # Imported here: the command line makes flags of these settings and does not need it.
        from narrowgauge.trainer.data.corpus import open_texts

        if not self.data.startswith("datasets:"):
            open_texts(self.data)
        if self.tokenizer is not None and not Path(self.tokenizer).exists():
            raise DataError(f"the tokenizer {self.tokenizer} does not exist.", "Name a tokenizer.json or its folder.")

    def _free_out(self) -> str:
        from narrowgauge.runs.writer import require_free

        assert self.out is not None
        require_free(self.out, beside=left_by_a_kill(Path(self.out)))
        return self.out


def _compiler_missing() -> str:
    """Why a model cannot be compiled here, or an empty string; on a GPU kernels are not C++."""
    torch = sys.modules.get("torch")
    on_gpu = Path("/dev/nvidiactl").exists() if torch is None else torch.cuda.is_available()
    return switched_off() or gpu_compiler_missing() if on_gpu else model_compiler_missing()
