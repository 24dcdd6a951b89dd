"""Samples of an optimizer's step: some elements of each tensor before and after it, and the step again
without rounding.

The optimizer's own class steps copies of the samples twice. In the formats of the run this shows
whether a copy repeats the step at all: a rule by elements, without random bits. In a wide format it
shows what the step was meant to be.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as AnyOptimizer

from narrowgauge.numerics.dtensor import local_of
from narrowgauge.optim.optimizer import Optimizer

SIZE = 64
"""Elements of a tensor."""
TENSORS = 16
"""Tensors of a step, in turn; more in the first ten steps, so that these reach all of them."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_REPEATS = 1e-4
"""Squared distance of the repeated step from the stored one, over its squared length."""
_OF_EVERY_OPTIMIZER = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))


@cache
def _places(size: int, device: torch.device) -> Tensor:
    parts = torch.arange(SIZE, dtype=torch.float64, device="cpu") * _GOLDEN % 1.0
    return (parts * size).long().to(device)


def take(x: Tensor) -> Tensor:
    """Return elements of this rank's part of a tensor, spread over it: the same of each size."""
    local = local_of(x.detach())
    return torch.take(local, _places(local.numel(), local.device))


def join(tensors: Iterable[Tensor]) -> Tensor:
    """Return the elements of several tensors, one after another."""
    return torch.cat([*map(take, tensors)])


def bits(x: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor's elements: exact in any order."""
    values = take(x)
    integers = getattr(torch, f"int{8 * values.element_size()}")
    return values.view(integers).double().sum()


@dataclass
class Sample:
    """Hold elements of the tensors of one group with one kind of state, before a step.

    Args:
        members: the parameters.
        states: of these elements; ``None`` where a step of samples is not the step of the whole.
        home: the state that holds the weight in a wider format; empty without one.
    """

    group: dict[str, Any]
    members: list[Any]
    weights: Tensor
    gradients: Tensor
    states: dict[str, Any] | None = None
    home: str = ""


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
        sample = Sample(group, members, join(members), join([gradients[p] for p in members]))
        if _is_repeatable(optimizer) and (number > 0 or optimizer.state.get(members[0])):
            _add_states(sample, [optimizer.state.get(p) or {} for p in members])
        samples.append(sample)
    return samples


def _is_repeatable(optimizer: AnyOptimizer) -> bool:
    """Return whether a copy of an optimizer shares nothing with it but numbers. Ours has an audit."""
    for name, x in vars(optimizer).items():
        is_shared = isinstance(x, (list, dict, Tensor, nn.Module))
        if is_shared and name not in _OF_EVERY_OPTIMIZER:
            return False
    return not isinstance(optimizer, Optimizer)


def _add_states(sample: Sample, states: Sequence[Mapping[str, Any]]) -> None:
    """Take the states of the elements, if a step of samples can be the step of these."""
    first = sample.members[0]
    taken: dict[str, Any] = {}
    for name, x in states[0].items():
        if not isinstance(x, Tensor) or x.ndim == 0:
            taken[name] = copy.deepcopy(x)
            continue
        if x.shape != first.shape or x.element_size() == 1:
            return
        taken[name] = join([state[name] for state in states])
        is_wider = x.element_size() > first.element_size()
        if is_wider and torch.equal(taken[name].to(first.dtype), sample.weights):
            sample.home = name
    sample.states = taken


def measured(optimizer: AnyOptimizer, sample: Sample) -> dict[str, Tensor]:
    """Return numbers of each tensor of a sample, after the step.

    ``size`` is the largest change beyond one rounding. ``meant`` is the sum of squares of the change
    that was meant, 0 where a copy does not repeat the step; ``stored`` its product with the stored
    change.
    """
    before = sample.weights.double().view(-1, SIZE)
    stored = join(sample.members).double().view(-1, SIZE) - before
    rounding = before.abs() * torch.finfo(sample.weights.dtype).eps
    numbers = {"size": (stored.abs() - rounding).clamp_min(0.0).amax(1)}
    if sample.states is None:
        return numbers
    if sample.home:
        masters = join([optimizer.state[p][sample.home] for p in sample.members])
        stored = (masters.double() - sample.states[sample.home].double()).view(-1, SIZE)
    with suppress(Exception):  # such a class is not followed
        again = _repeated(optimizer, sample, None)
        is_wide = sample.weights.element_size() > 2
        meant = _repeated(optimizer, sample, torch.float64 if is_wide else torch.float32)
        squares = meant.square().sum(1)
        is_repeated = (again - stored).square().sum(1) <= _REPEATS * squares
        numbers |= {"meant": squares * is_repeated, "stored": (meant * stored).sum(1)}
    return numbers


def _repeated(optimizer: AnyOptimizer, sample: Sample, format: torch.dtype | None) -> Tensor:
    """Step copies in a format, and return the change of the weights, or of their masters."""

    def copied(x: Any) -> Any:
        if isinstance(x, Tensor) and x.shape == sample.weights.shape:
            return x.to(format or x.dtype, copy=True)
        return copy.deepcopy(x)

    p = nn.Parameter(copied(sample.weights))
    p.grad = copied(sample.gradients)
    state = {name: copied(x) for name, x in (sample.states or {}).items()}
    start = state.get(sample.home, p.detach()).double().clone()
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    for name in vars(optimizer):
        if "hooks" in name:
            setattr(twin, name, OrderedDict())
    options = {name: copied(x) for name, x in sample.group.items() if name != "params"}
    twin.param_groups = [{**options, "params": [p]}]
    twin.state = defaultdict(dict, {p: state})
    with torch.random.fork_rng(devices=[p.device] if p.is_cuda else []):
        type(optimizer).step(twin)
    change: Tensor = state.get(sample.home, p.detach()).double() - start
    return change.view(-1, SIZE)


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
