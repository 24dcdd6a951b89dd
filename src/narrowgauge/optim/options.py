"""The options of param groups: what each may be, one row an option, checked when a group is added, loaded and stepped.

What a group says is obeyed at its next step or refused before anything has changed; nothing that it says is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.optim.rules.elementwise import ADAM, ADAMW, LION, SGD, Rule
from narrowgauge.optim.rules.matrix import ADAFACTOR, GALORE, GRADNORM_LORP, LR_SCALES, MUON, MatrixRule


@dataclass(frozen=True)
class Range:
    """An option that is a number in ``[low, high)``, or in ``(low, high)`` where ``above``; NaN is outside of all.

    Args:
        low, high, above: the range.
        or_none: whether ``None`` is allowed too.
    """

    low: float = 0.0
    high: float = math.inf
    above: bool = False
    or_none: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuse a value outside; of a pair, either."""
        parts = value if isinstance(value, (tuple, list)) else (value,)
        for place, part in enumerate(parts):
            own = name if part is value else f"{_SINGULAR.get(name, name)}{place + 1}"
            if part is None and self.or_none:
                continue
            try:
                number = float(part)
            except (TypeError, ValueError, RuntimeError):
                raise RecipeError(f"{own} = {part!r} was asked for; it must be one number, {self}.") from None
            if not (self.low < number if self.above else self.low <= number) or not number < self.high:
                found = part if isinstance(part, (int, float)) else number
                raise RecipeError(f"{own} = {found} was asked for; it must be {self} and finite.")

    def __str__(self) -> str:
        low = [] if self.low == -math.inf else [f"{'above' if self.above else 'at least'} {self.low:g}"]
        return " and ".join([*low, *([] if self.high == math.inf else [f"below {self.high:g}"])]) or "a number"


_SINGULAR = {"betas": "beta"}


@dataclass(frozen=True)
class Choice:
    """An option that is one of some names."""

    names: tuple[str, ...]
    or_none: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuse another name."""
        if value not in self.names and not (value is None and self.or_none):
            listed = ", ".join(f"'{known}'" for known in self.names)
            near = suggestion(value, self.names) if isinstance(value, str) else ""
            raise RecipeError(f"{name} = {value!r} was asked for; it is one of {listed}.", near)


Laws = dict[str, Range | Choice]
_RATE: Laws = {"lr": Range(), "weight_decay": Range()}
_ADAM: Laws = {**_RATE, "betas": Range(0, 1), "eps": Range()}
_SUBSPACE: Laws = {**_ADAM, "rank": Range(1), "update_proj_gap": Range(1), "scale": Range()}
LAWS: dict[str, Laws] = {
    ADAMW.name: _ADAM,
    ADAM.name: _ADAM,
    SGD.name: {**_RATE, "momentum": Range()},
    LION.name: _ADAM,
    MUON.name: {
        **_ADAM,
        "momentum": Range(0, 1),
        "ns_steps": Range(1),
        "adjust_lr_fn": Choice(tuple(LR_SCALES), or_none=True),
        "ns_dtype": Choice(("bfloat16", "float32")),
    },
    ADAFACTOR.name: {
        **_ADAM,
        "eps": Range(or_none=True),
        "adam_eps": Range(),
        "beta1": Range(0, 1, or_none=True),
        "beta2_decay": Range(-math.inf, 0, above=True),
        "clip_threshold": Range(0, above=True),
    },
    GALORE.name: _SUBSPACE,
    GRADNORM_LORP.name: _SUBSPACE,
}
"""What the options of each rule may be; a rule that is not here checks its own."""

_FLAGS = {
    "amsgrad": "No rule here keeps the largest second moment; leave it out.",
    "fused": "Every step here is one fused kernel; leave it out.",
    "foreach": "Every step here is one fused kernel; leave it out.",
    "capturable": "A step asks the host for its rates and cannot be captured in a graph; leave it out.",
    "differentiable": "A step here cannot be differentiated; leave it out.",
}
HOW_TORCH_STEPS = ("fused", "foreach", "capturable", "differentiable")
"""Flags of ``torch.optim`` that say how a step is computed, and nothing about the state."""
_OF_THE_OPTIMIZER = ("max_grad_norm", "audit_every", "compile", "loss_scaler")
# torch's name for what makes an Adam an AdamW.
_DECOUPLED = {ADAM.name: False, ADAMW.name: True}


def check_options(options: Mapping[str, Any], rule: Rule | MatrixRule) -> None:
    """Refuse options that a rule cannot obey.

    Args:
        options: a param group, or the defaults of all.
        rule: the optimizer's.
    Raises:
        RecipeError: one that is out of range, that no rule here has, that belongs to the optimizer and not to a group, or
            another rule than the group may have.
    """
    for name in _OF_THE_OPTIMIZER:
        if name in options:
            raise RecipeError(
                f"a param group says {name} = {options[name]}.", "Give it to the optimizer: it is for all."
            )
    check_step(options, rule)
    _check_values(options, LAWS.get(rule.name, {}))


def check_step(options: Mapping[str, Any], rule: Rule | MatrixRule) -> None:
    """:func:`check_options` of what may have been set since; a schedule may take a rate a little below zero."""
    for name, advice in _FLAGS.items():
        if options.get(name):
            raise RecipeError(f"{name} = {options[name]} was asked for, which this optimizer does not have.", advice)
    decoupled = options.get("decoupled_weight_decay")
    if decoupled is not None and decoupled is not _DECOUPLED.get(rule.name, decoupled):
        raise RecipeError(
            f"decoupled_weight_decay = {decoupled} was asked for, and the rule is '{rule.name}'.",
            f"Take ng.{'AdamW' if decoupled else 'Adam'}.",
        )
    known = [rule.name, *([ADAMW.name] if isinstance(rule, MatrixRule) else [])]
    if options.get("rule", rule.name) not in known:
        raise RecipeError(
            f"rule = {options['rule']!r} was asked for in a param group of an optimizer whose rule is '{rule.name}'; it may "
            f"be {' or '.join(map(repr, known))}.",
            suggestion(str(options["rule"]).lower(), known) or "Build another optimizer for these parameters.",
        )
    _check_values(options, {**LAWS.get(rule.name, {}), "lr": Range(-math.inf, above=True)})


def _check_values(options: Mapping[str, Any], laws: Laws) -> None:
    for name, law in laws.items():
        if name in options:
            law.check(name, options[name])
