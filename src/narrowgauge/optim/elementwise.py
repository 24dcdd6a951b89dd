"""Elementwise rules: what step an optimizer wants to take, as pure functions of float32 values.

A rule sees one weight, its gradient and its moments, and returns the intended change and the new moments. It knows
nothing of formats, layouts or devices; any storage that keeps its moments can carry it.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from narrowgauge.numerics.rounding import sqrt

Scalars = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Rule:
    """An update rule.

    Args:
        name: what tables and caches call it.
        states: names of the moments it keeps, in the order ``update`` takes and returns them.
        scalars: names of the per-step float32 scalars that ``update`` reads.
        prepare: from a param group's options and the number of steps taken (this one included) to those scalars.
        update: ``(weight, gradient, *states, scalars) -> (change, *new states)``.
    """

    name: str
    states: tuple[str, ...]
    scalars: tuple[str, ...]
    prepare: Callable[[Mapping[str, Any], int], tuple[float, ...]]
    update: Callable[..., tuple[Tensor, ...]]


# Added to eps = 0: where nothing was ever seen, 0/0 must be no step, and nothing else notices the smallest normal float32.
TINY = 2.0**-126


def _adamw_scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    correction1 = 1 - beta1**step
    correction2 = (1 - beta2**step) ** 0.5
    eps = max(float(group["eps"]), TINY)
    return 1 - beta1, 1 - beta2, -lr / correction1, 1 / correction2, eps, -lr * group["weight_decay"]


def _adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, s: Scalars) -> tuple[Tensor, Tensor, Tensor]:
    m = m + (g - m) * s["one_minus_beta1"]
    v = v + (g * g - v) * s["one_minus_beta2"]
    ratio = m / (sqrt(v) * s["inverse_root_correction2"] + s["eps"])
    return ratio * s["negative_step_size"] + s["negative_decay"] * w, m, v


ADAMW = Rule(
    "adamw",
    ("exp_avg", "exp_avg_sq"),
    ("one_minus_beta1", "one_minus_beta2", "negative_step_size", "inverse_root_correction2", "eps", "negative_decay"),
    _adamw_scalars,
    _adamw,
)

RULES = {rule.name: rule for rule in (ADAMW,)}


def rule_source(rule: Rule) -> str:
    """The text of the rule's arithmetic, for the name of its compiled kernel."""
    try:
        return inspect.getsource(rule.update)
    except (OSError, TypeError):
        return uuid.uuid4().hex  # typed into an interpreter: compiled anew in every process
