"""Samples of an optimizer's step: some elements of each tensor before and after it, and the step that was
meant, which a copy of the optimizer in a wide format takes (:mod:`narrowgauge.measuring.optimizer_copy`).
"""

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer as AnyOptimizer

from narrowgauge.measuring.optimizer_copy import OptimizerCopy, no_trace, wide_of
from narrowgauge.numerics.dtensor import local_of

SIZE = 64
"""Elements of a tensor."""
TENSORS = 16
"""Tensors of a step, in turn; more in the first ten steps, so that these reach all of them."""
_GOLDEN = (math.sqrt(5) - 1) / 2
REPEATS = 1e-3
"""Squared distance of the stored step from the meant one beyond one rounding, over its squared length:
a copy whose step is further away does not repeat the step. bfloat16 moments give up to 1e-4.
"""


@cache
def _indices(total: int, number: int, device: torch.device) -> Tensor:
    parts = (
        torch.arange(min(number, total * number), dtype=torch.float64, device="cpu") * _GOLDEN % 1.0
    )
    return (parts * total).long().to(device)


def take(x: Tensor, number: int = SIZE) -> Tensor:
    """Return elements of this rank's part of a tensor, spread over it: the same of each size."""
    local = decoded(x)
    return local.reshape(-1).index_select(0, _indices(local.numel(), number, local.device))


def decoded(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as values where it holds codes of another library."""
    local = local_of(x.detach())
    is_code = type(local) is not Tensor and hasattr(type(local), "dequantize")
    return local.dequantize() if is_code else local


def join(tensors: Iterable[Tensor]) -> Tensor:
    """Return the elements of several tensors, one after another."""
    return torch.cat([*map(take, tensors)])


@dataclass
class Sample:
    """Hold elements of the tensors of one group with one kind of state, before a step.

    Args:
        kind: group and format.
        group: its options before the step, which may change a count among them.
        members: the parameters.
        states: of these elements; ``None`` where a step of samples is not the step of the whole.
    """

    kind: Any
    group: dict[str, Any]
    members: list[Any]
    weights: Tensor
    gradients: Tensor
    states: dict[str, Any] | None

    def change(self) -> Tensor:
        """Return the change of each tensor's elements, after the step."""
        return (join(self.members).double() - self.weights.double()).view(-1, SIZE)

    def beyond(self, change: Tensor) -> Tensor:
        """Return the sizes of changes less one rounding of the weights."""
        rounding = self.weights.double().abs() * torch.finfo(self.weights.dtype).eps
        return (change.abs() - rounding.view(-1, SIZE)).clamp_min(0.0)


def samples_of(
    optimizer: AnyOptimizer, gradients: Mapping[Tensor, Tensor], number: int
) -> list[Sample]:
    """Return samples of some of what an optimizer is about to step: each of its tensors in turn.

    Args:
        gradients: those that are dense.
        number: steps that are done.
    """
    candidates = []
    for group in optimizer.param_groups:
        candidates += [(group, p) for p in group["params"] if p in gradients]
    groups = {}
    alike = defaultdict[Any, list[Any]](list)
    for group, p in in_turn(candidates, number):
        state = optimizer.state.get(p, {})
        key = id(group), p.dtype, gradients[p].dtype, p.device, *state, *_counts(state)
        groups[key] = group
        alike[key].append(p)
    samples = []
    for key, members in alike.items():
        options = copy.deepcopy({name: x for name, x in groups[key].items() if name != "params"})
        weights = join(members)
        wide = wide_of(weights).dtype
        states = _states([optimizer.state.get(p) or {} for p in members], members[0], wide)
        values = join(gradients[p] for p in members)
        samples.append(Sample(key[:2], options, members, weights, values, states))
    return samples


def _counts(state: Mapping[Any, Any]) -> list[float]:
    """Return the numbers of a state that are on the host: tensors may have taken unlike steps."""
    counts = []
    for x in state.values():
        is_number = isinstance(x, Tensor) and x.ndim == 0 and x.device.type == "cpu"
        if is_number or isinstance(x, (int, float)):
            counts.append(float(x))
    return counts


def _states(
    states: Sequence[Mapping[Any, Any]], first: Tensor, wide: torch.dtype
) -> dict[str, Any] | None:
    """Return the states of the elements, in a wide format or a wider one of their own; ``None`` if one of
    them is not a value of each element.
    """
    taken = {}
    for name, x in states[0].items():
        if not isinstance(x, Tensor) or x.ndim == 0:
            taken[name] = copy.deepcopy(x)
        elif x.shape != first.shape or (type(x) is Tensor and x.element_size() == 1):
            return None
        else:
            values = join(state[name] for state in states)
            is_float = values.is_floating_point()
            taken[name] = values.to(torch.promote_types(values.dtype, wide)) if is_float else values
    return taken


def shares_of(optimizer: AnyOptimizer, sample: Sample) -> dict[str, Tensor]:
    """Return numbers of each tensor of a sample, after the step.

    ``meant`` is the sum of squares of the change that was meant, -1 where the copy does not repeat the
    step; ``stored`` is its product with the stored change.

    Raises:
        ArithmeticError: a copy of elements does not step as the whole.
    """
    if sample.states is None:
        raise ArithmeticError(f"{type(optimizer).__name__} has states that are not by elements")
    with no_trace():
        copied = OptimizerCopy(optimizer, sample.group, wide_of(sample.weights), sample.states)
        meant = copied.step(sample.gradients).view(-1, SIZE)
        if meant.any():
            copied.require_wide(sample.weights.dtype)
    stored = sample.change()
    squares = meant.square().sum(1)
    is_apart = sample.beyond(stored - meant).square().sum(1) > REPEATS * squares
    return {"meant": squares.masked_fill(is_apart, -1.0), "stored": (meant * stored).sum(1)}


def in_turn(items: Sequence[Any], number: int) -> list[Any]:
    """Return those of the items whose turn it is after ``number`` steps.

    Example:
        >>> in_turn("abc", 1), len(in_turn(range(1000), 9)), in_turn(range(1000), 10)[0]
        (['b', 'c', 'a'], 100, 160)
    """
    total = len(items)
    size = TENSORS
    if number < 10:
        size = max(size, -(-total // 10))
    start = size * number % max(total, 1)
    return [*items[start:], *items[:start]][:size]
