"""The update rules by name: each rule's optimizer, AdamW's settings that it takes, and its own
options.

The checks of options, ``narrowgauge plan --rule`` and ``narrowgauge show rules`` read this table. A
new rule is a row, and a class in :mod:`narrowgauge.optim.optimizers`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.spec.storages import Storage

# ── what an option may be ─────────────────────────────────────────────────────────────────────────


_ANY = "a number"


@dataclass(frozen=True)
class Range:
    """A numeric option in ``[low, high)``, or in ``(low, high)`` if ``above``.

    NaN is never inside. A pair has two of them.
    """

    low: float = 0.0
    high: float = math.inf
    above: bool = False
    is_integer: bool = False
    is_pair: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuse a value outside the range. For a pair, check both."""
        if self.is_pair:
            if not isinstance(value, (tuple, list)) or len(value) != 2:
                raise RecipeError(
                    f"Cannot use {name} = {value!r}: it must be two numbers, each {self}."
                )
            single = replace(self, is_pair=False)
            part = "beta" if name == "betas" else name
            for place, number in enumerate(value):
                single.check(f"{part}{place + 1}", number)
            return
        try:
            if isinstance(value, (bool, str)):
                raise TypeError
            read = operator.index if self.is_integer else float
            number = read(value)
        except (TypeError, ValueError, RuntimeError):
            words = "one integer" if self.is_integer else "one number"
            if str(self) != _ANY:
                words += f", {self}"
            raise RecipeError(f"Cannot use {name} = {value!r}: it must be {words}.") from None
        is_inside = self.low <= number < self.high
        if self.above:
            is_inside = self.low < number < self.high
        if not is_inside:
            words = str(self)
            if not self.is_integer:
                words += " and finite"
            shown = value if isinstance(value, (int, float)) else number
            raise RecipeError(f"Cannot use {name} = {shown}: it must be {words}.")

    def __str__(self) -> str:
        words = []
        if self.low > -math.inf:
            words.append(f"above {self.low:g}" if self.above else f"at least {self.low:g}")
        if self.high < math.inf:
            words.append(f"below {self.high:g}")
        return " and ".join(words) or _ANY


COUNT = Range(1, is_integer=True)


@dataclass(frozen=True)
class Choice:
    """An option that is one of some values."""

    values: tuple[Any, ...]

    def check(self, name: str, value: Any) -> None:
        """Refuse any other value."""
        if value not in self.values:
            near = ""
            if isinstance(value, str):
                near = suggestion(value, list(map(str, self.values)))
            raise RecipeError(f"Cannot use {name} = {value!r}: it must be one of {self}.", near)

    def __str__(self) -> str:
        return ", ".join(map(option_text, self.values))


FLAG = Choice((False, True))
Laws = dict[str, Range | Choice]

# ── the rows ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Option:
    """An option of one rule: its class's default, its allowed values, and the usual value for
    language models if it differs.
    """

    name: str
    default: Any
    law: Range | Choice
    trained: Any = None

    @property
    def in_training(self) -> Any:
        """Return the usual value for language models."""
        return self.default if self.trained is None else self.trained


def option_text(value: Any) -> str:
    """Write an option's value as a table shows it.

    Example:
        >>> [option_text(value) for value in (True, None, 0.9, (1e-30, 1e-3))]
        ['true', 'none', '0.9', '1e-30/0.001']
    """
    if isinstance(value, tuple):
        return "/".join(map(option_text, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value) or "empty"


@dataclass(frozen=True)
class UpdateRule:
    """One update rule.

    Args:
        optimizer: its class in ``narrowgauge.optim.optimizers``.
        purpose: one line.
        settings: those of ``beta1``, ``beta2``, ``eps`` and ``weight_decay`` that it takes, as
            language models are trained.
        options: its own.
        rate: factor on AdamW's usual peak learning rates; ``None`` if they do not apply.
        is_matrix: it steps whole matrices. AdamW steps vectors, embeddings and output heads.
        moments: its states for each element of a matrix, with the storage's code for each, if a
            plan needs no more; ``None`` if this depends on options.
        source: the paper.
    """

    name: str
    optimizer: str
    purpose: str
    settings: Mapping[str, float]
    options: tuple[Option, ...] = ()
    rate: float | None = 1.0
    is_matrix: bool = False
    moments: tuple[tuple[str, str], ...] | None = None
    source: str = field(default="", kw_only=True)

    @property
    def laws(self) -> Laws:
        """Return the allowed values of a param group's options."""
        ranges: Laws = {
            "lr": Range(),
            "weight_decay": Range(),
            "seed": Range(-math.inf, is_integer=True),
        }
        if "beta1" in self.settings:
            ranges["betas"] = Range(0, 1, is_pair=True)
        if "eps" in self.settings:
            ranges["eps"] = Range()
        for option in self.options:
            ranges[option.name] = option.law
        return ranges


_ADAM: Mapping[str, float] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
_MOMENTS = (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))
_SUBSPACE = (
    Option("rank", 128, COUNT),
    Option("update_proj_gap", 200, COUNT),
)

_RULES = (
    UpdateRule(
        "adamw", "AdamW", "two moments, decoupled decay", _ADAM, moments=_MOMENTS,
        source="Kingma & Ba, ICLR 2015 (1412.6980); Loshchilov & Hutter, ICLR 2019 (1711.05101)",
    ),
    UpdateRule(
        # An L2 penalty of 0.1 would outweigh most gradients. The default is none, as in
        # torch.optim.
        "adam", "Adam", "two moments, decay as a penalty in the gradient", {**_ADAM, "weight_decay": 0.0},
        moments=_MOMENTS, source="Kingma & Ba, ICLR 2015 (1412.6980)",
    ),
    UpdateRule(
        "sgd", "SGD", "along the gradient, with momentum where one is given", {"weight_decay": 0.0},
        (
            Option("momentum", 0.0, Range()), Option("dampening", 0.0, Range(-math.inf, above=True)),
            Option("nesterov", False, FLAG),
        ),
        rate=None,  # its steps are as large as the gradient, which no rule of a model's size knows
        source="Sutskever et al., ICML 2013",
    ),
    UpdateRule(
        "lion", "Lion", "one moment; its sign is the step", {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.3},
        rate=1 / 3,  # of 3 to 10 in the paper, with as much more decay
        moments=_MOMENTS[:1], source="Chen et al., NeurIPS 2023 (2302.06675)",
    ),
    UpdateRule(
        "muon", "Muon", "one moment, whose singular values become 1", _ADAM,
        (
            Option("momentum", 0.95, Range(0, 1)), Option("nesterov", True, FLAG),
            Option("ns_steps", 5, COUNT),
            Option("adjust_lr_fn", None, Choice(("original", "match_rms_adamw", None)), trained="match_rms_adamw"),
            Option("ns_dtype", "bfloat16", Choice(("bfloat16", "float32"))),
        ),
        # With match_rms_adamw its steps are as large as AdamW's (2502.16982).
        is_matrix=True, moments=(("momentum_buffer", "exp_avg"),), source="Jordan et al. 2024; Liu et al. 2025 (2502.16982)",
    ),
    UpdateRule(
        "galore", "GaLore", "AdamW in a low-rank subspace of each gradient", _ADAM,
        (*_SUBSPACE, Option("scale", 0.25, Range())),
        is_matrix=True, moments=(), source="Zhao et al., ICML 2024 (2403.03507)",
    ),
    UpdateRule(
        "gradnorm_lorp", "GradNormLoRP", "after the paper: columns as lengths and low-rank directions", _ADAM,
        (*_SUBSPACE, Option("scale", 1.0, Range())),
        is_matrix=True, moments=(), source="Huang et al., AAAI 2025 (2412.19616)",
    ),
)  # fmt: skip

UPDATE_RULES: dict[str, UpdateRule] = {row.name: row for row in _RULES}
"""The rules by name."""


def refuse_pair(rule: str, storage: Storage, *, is_matrix: bool, is_adamw: bool) -> None:
    """Refuse a rule, by name, with a storage that cannot hold its states.

    The storage has the rule's states.

    Raises:
        RecipeError: Collage's arithmetic is published for AdamW alone. Matrix rules compute in
            float32. Scales by row beside a weight must be known before the step, and a matrix
            rule's result is not.
    """
    if is_matrix and storage.scaled:
        raise RecipeError(
            f"Cannot step rule '{rule}' in storage '{storage.name}' because its "
            f"'{storage.scaled[0]}' has scales by row, which "
            "a matrix rule does not know before the step.",
            "Take a storage such as 'word' or 'master'.",
        )
    if is_matrix and storage.arithmetic == "float64":
        raise RecipeError(
            f"Cannot step rule '{rule}' in storage '{storage.name}' because matrix rules compute "
            "in float32.",
            "Take a storage such as 'master'.",
        )
    if storage.arithmetic == "expansion" and not is_adamw:
        raise RecipeError(
            f"Cannot step rule '{rule}' in storage '{storage.name}' because its arithmetic is "
            "published for AdamW alone.",
            "Take rule 'adamw', or a storage such as 'kahan' or 'split'.",
        )
