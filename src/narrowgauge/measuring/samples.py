"""Samples of an optimizer's step: some elements of each tensor before and after it, and the step again
by copies.

A copy of the optimizer (:mod:`narrowgauge.measuring.twin`) steps the samples twice. In the formats of
the run this shows whether a copy repeats the step at all: a rule by elements, without random bits. In a
wide format it shows what the step was meant to be.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer as AnyOptimizer

from narrowgauge.measuring.twin import Twin, no_trace, wide_of
from narrowgauge.numerics.dtensor import local_of

SIZE = 64
"""Elements of a tensor."""
TENSORS = 16
"""Tensors of a step, in turn; more in the first ten steps, so that these reach all of them."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_REPEATS = 1e-4
"""Squared distance of the repeated step from the stored one, over its squared length."""


@cache
def _places(size: int, device: torch.device) -> Tensor:
    parts = torch.arange(SIZE, dtype=torch.float64, device="cpu") * _GOLDEN % 1.0
    return (parts * size).long().to(device)


def take(x: Tensor) -> Tensor:
    """Return elements of this rank's part of a tensor, spread over it: the same of each size."""
    local = decoded(x)
    return torch.take(local, _places(local.numel(), local.device))


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

    kind: tuple[int, torch.dtype]
    group: dict[str, Any]
    members: list[Any]
    weights: Tensor
    gradients: Tensor
    states: dict[str, Any] | None = None


def samples_of(
    optimizer: AnyOptimizer, gradients: Mapping[Tensor, Tensor], number: int
) -> list[Sample]:
    """Return samples of some of what an optimizer is about to step: each of its tensors in turn.

    Masters may be made in a first step, so it is not repeated.

    Args:
        number: steps that are done.
    """
    candidates = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            is_dense = p in gradients and not gradients[p].is_sparse
            if is_dense and p.is_floating_point() and local_of(p).numel():
                candidates.append((group, p))
    kinds: dict[Any, tuple[dict[str, Any], list[Any]]] = {}
    for group, p in in_turn(candidates, number):
        key = id(group), p.dtype, gradients[p].dtype, p.device, *optimizer.state.get(p, {})
        kinds.setdefault(key, (group, []))[1].append(p)
    samples = []
    for group, members in kinds.values():
        options = {name: copy.deepcopy(x) for name, x in group.items() if name != "params"}
        kind = id(group), members[0].dtype
        values = join([gradients[p] for p in members])
        sample = Sample(kind, options, members, join(members), values)
        if number > 0 or optimizer.state.get(members[0]):
            sample.states = _states([optimizer.state.get(p) or {} for p in members], members[0])
        samples.append(sample)
    return samples


def _states(states: Sequence[Mapping[Any, Any]], first: Tensor) -> dict[str, Any] | None:
    """Return the states of the elements; ``None`` if one of them is not beside the elements."""
    taken: dict[str, Any] = {}
    for name, x in states[0].items():
        if not isinstance(x, Tensor) or x.ndim == 0:
            taken[name] = copy.deepcopy(x)
            continue
        tensors = [state[name] for state in states]
        is_code = type(x) is Tensor and x.element_size() == 1
        if x.shape != first.shape or is_code:
            return None
        taken[name] = join(tensors)
    return taken


def size_of(sample: Sample) -> Tensor:
    """Return the largest change of each tensor of a sample beyond one rounding, after the step."""
    before = sample.weights.double().view(-1, SIZE)
    rounding = before.abs() * torch.finfo(sample.weights.dtype).eps
    return ((_stored(sample)).abs() - rounding).clamp_min(0.0).amax(1)


def _stored(sample: Sample) -> Tensor:
    return (join(sample.members).double() - sample.weights.double()).view(-1, SIZE)


def repeated(optimizer: AnyOptimizer, sample: Sample) -> dict[str, Tensor]:
    """Return numbers of each tensor of a sample, after the step.

    ``meant`` is the sum of squares of the change that was meant, -1 where a copy does not repeat the
    step; ``stored`` is its product with the stored change.

    Raises:
        ArithmeticError: the class has no copy.
    """
    stored = _stored(sample)
    wide = wide_of(sample.weights)
    states = copy.deepcopy(sample.states or {})
    for name, x in states.items():
        if isinstance(x, Tensor) and x.shape == wide.shape and x.is_floating_point():
            states[name] = x.to(torch.promote_types(x.dtype, wide.dtype))
    with no_trace():
        twins = (
            Twin(optimizer, sample.group, sample.weights.clone(), copy.deepcopy(sample.states)),
            Twin(optimizer, sample.group, wide, states),
        )
        again, meant = (twin.step(sample.gradients).view(-1, SIZE) for twin in twins)
    squares = meant.square().sum(1)
    is_apart = (again - stored).square().sum(1) > _REPEATS * squares
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
