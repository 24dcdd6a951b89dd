"""A copy of an optimizer that steps some elements of a tensor: what check predicts before a run, and
what a watch measures in it, is the step of such a copy.

The copy shares nothing with the optimizer. A class whose attributes cannot be copied, such as one that
holds the model, has no copy.
"""

import copy
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import Enum
from statistics import fmean
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as AnyOptimizer
from torch.utils._pytree import tree_leaves

from narrowgauge.measuring.reading import words_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.torch_support.preserve import preserve_generators

PROBES = 16
"""Steps of the same gradient that show whether low bits are kept."""
STEP = 0.15
"""Step of a probe over the gap between two values of a format: rounding to nearest loses it, and three
times as much.
"""
VALUE = -1.5
"""Of the weights of a probe, which step up: 16 such steps meet no other gap."""
RATE = 2.0**-10
"""At which the size of a class's step over its rate is measured."""
PLAIN = (
    type(None), int, float, complex, str, bytes, set, frozenset, type, Enum, torch.dtype, torch.device, FunctionType,
    BuiltinFunctionType,
)  # fmt: skip
"""Types whose copies share nothing that a step changes."""
_OF_THE_COPY = ("state", "param_groups", "step")  # a schedule replaces the step by a method


class OptimizerCopy:
    """Step elements by the class of an optimizer, or by the rule of ours in float32.

    Args:
        group: options of the step.
        weights: the elements, in the format of the copy.
        state: of these elements; empty before the first step.
        options: replace those of the group.

    Raises:
        ArithmeticError: the class has no copy.
    """

    def __init__(
        self,
        optimizer: AnyOptimizer,
        group: Mapping[str, Any],
        weights: Tensor,
        state: Mapping[Any, Any] | None = None,
        options: Mapping[str, float] | None = None,
    ) -> None:
        self.weights = nn.Parameter(weights)
        chosen = {name: copy.deepcopy(x) for name, x in group.items() if name != "params"}
        for name, value in (options or {}).items():
            before = chosen.get(name)
            if before is not None:  # another rule has no such option
                chosen[name] = (
                    torch.full_like(before, value) if isinstance(before, Tensor) else value
                )
        if isinstance(optimizer, Optimizer):
            named = optimizer.defaults.keys() - {"storage", "seed", "low_bits"}
            defaults = {name: chosen[name] for name in named}
            self.optimizer: AnyOptimizer = Optimizer(
                [self.weights], optimizer.rule, defaults, storage="float32", audit_every=0, compile=False
            )  # fmt: skip
            return
        self.optimizer = copied = object.__new__(type(optimizer))
        for name, x in vars(optimizer).items():
            if "hooks" in name:
                setattr(copied, name, OrderedDict())
            elif name not in _OF_THE_COPY:
                if name != "defaults" and not all(isinstance(y, PLAIN) for y in tree_leaves(x)):
                    raise ArithmeticError(f"{type(optimizer).__name__}.{name} has no copy")
                setattr(copied, name, copy.deepcopy(x))
        copied.param_groups = [{**chosen, "params": [self.weights]}]
        copied.state = defaultdict(dict, {self.weights: dict(state or {})})

    def step(self, gradient: Tensor) -> Tensor:
        """Take a step, and return the change of the weights in float64.

        Raises:
            ArithmeticError: the class raises an error.
        """
        before = self.weights.detach().double().clone()
        self.weights.grad = gradient.to(self.weights.dtype, copy=True)
        kind = type(self.optimizer)
        try:
            kind.step(self.optimizer)
        except Exception as error:  # whatever a class raises of a copy
            raise ArithmeticError(f"a copy of {kind.__name__}: {words_of(error)}") from error
        return self.weights.detach().double() - before

    def require_wide(self, dtype: torch.dtype) -> None:
        """Refuse a copy whose weights a narrower format holds: its class rounds them itself.

        Raises:
            ArithmeticError: the class rounds the weights of a wider copy, too.
        """
        weights = self.weights.detach()
        if torch.equal(weights.to(dtype).to(weights.dtype), weights):
            name = type(self.optimizer).__name__
            raise ArithmeticError(f"{name} rounds the weights of a copy in {weights.dtype}, too")


@contextmanager
def no_trace() -> Iterator[None]:
    """Step copies without drawing random numbers of the run, and without a compiler."""
    stance = nullcontext()
    if "torch._dynamo" in sys.modules:  # its import takes seconds
        stance = torch.compiler.set_stance("force_eager")
    with preserve_generators(), stance:
        yield


def wide_of(x: Tensor) -> Tensor:
    """Copy elements in a format in which no step is lost: float32 of 16 bits, else float64."""
    return x.to(torch.float64 if x.element_size() > 2 else torch.float32, copy=True)


def low_bits_kept(optimizer: AnyOptimizer, group: Mapping[str, Any], p: Tensor) -> bool:
    """Return whether steps that are less than half the gap between two weights add up, as with Kahan
    sums, random roundings and masters in states.

    Raises:
        ArithmeticError: the class has no copy.
    """
    start = torch.full((64,), VALUE, dtype=p.dtype, device=p.device)
    gradient = torch.full_like(start, -1.0)

    def changes(weights: Tensor, rate: float) -> list[float]:
        """Return the mean change of each step, without a decay."""
        copied = OptimizerCopy(optimizer, group, weights, options={"lr": rate, "weight_decay": 0.0})
        return [float(copied.step(gradient).mean()) for _ in range(PROBES)]

    with no_trace():
        gap = torch.finfo(p.dtype).eps
        size = fmean(changes(wide_of(start), RATE))
        rate = STEP * gap * RATE / (size or 1.0)
        wide = changes(wide_of(start), rate)
        if not STEP / 2 < fmean(wide) / gap < 2 * STEP or max(wide) > 3 * STEP * gap:
            return False  # the rate does not decide the step
        return fmean(changes(start, rate)) > fmean(wide) / 2
