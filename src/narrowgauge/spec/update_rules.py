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
from narrowgauge.spec.toml import load_data

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
            plan needs no more; ``None`` if this depends on options. (Adafactor's values by row and
            column are extra.)
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
            ranges[self.eps_option] = Range()
        for option in self.options:
            ranges[option.name] = option.law
        return ranges

    @property
    def eps_option(self) -> str:
        """Return the optimizer's option for AdamW's epsilon.

        It has another name if the rule has its own ``eps``.
        """
        for option in self.options:
            if option.name == "eps":
                return "adam_eps"
        return "eps"


def _option(name: str, row: dict[str, Any]) -> Option:
    default = row.pop("default", None)
    trained = row.pop("trained", None)
    if isinstance(default, list):
        default = tuple(default)
    law: Range | Choice = FLAG
    if "values" in row:
        nothing = () if default else (None,)
        law = Choice((*row["values"], *nothing))
    elif not isinstance(default, bool):
        law = Range(**row)
    return Option(name, default, law, trained)


def _rule(name: str, row: dict[str, Any]) -> UpdateRule:
    options = [_option(key, option) for key, option in row.pop("options", {}).items()]
    if "moments" in row:
        row["moments"] = tuple(map(tuple, row["moments"]))
    row["rate"] = row.get("rate", 1.0) or None
    return UpdateRule(name, options=tuple(options), **row)


UPDATE_RULES: dict[str, UpdateRule] = {
    name: _rule(name, row) for name, row in load_data("update_rules").items()
}
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
