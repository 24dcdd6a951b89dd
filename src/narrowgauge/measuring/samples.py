"""Samples of an optimizer's step: some elements of each tensor before and after it, and the step again
without rounding.

The optimizer's own class steps copies of the samples twice. In the formats of the run this tells
whether a copy repeats the step at all: a rule by elements, without random bits. In a wide format it
tells what the step was meant to be.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.numerics.dtensor import local_of
from narrowgauge.optim.optimizer import Optimizer

SIZE = 64
"""Elements of a tensor."""
TENSORS = 16
"""Tensors of a step, in turn; more in the first ten steps, so that these reach all of them."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_REPEATS = 1e-4
"""Squared distance of the repeated step from the stored one, over its squared length."""
_OF_EVERY_OPTIMIZER = frozenset({"defaults", "state", "param_groups", "step"})


class Sampler:
    """Take the same elements of each tensor, and remember which state is a master of the weight."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, torch.device], Tensor] = {}
        self.homes: dict[Tensor, str] = {}

    def take(self, x: Tensor) -> Tensor:
        """Return elements of this rank's part of a tensor, spread over it."""
        local = local_of(x.detach())
        key = local.numel(), local.device
        if key not in self._places:
            parts = torch.arange(SIZE, dtype=torch.float64) * _GOLDEN % 1.0
            self._places[key] = (parts * local.numel()).long().to(local.device)
        return torch.take(local, self._places[key])

    def join(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the elements of several tensors, one after another."""
        return torch.cat([*map(self.take, tensors)])

    def bits(self, x: Tensor) -> Tensor:
        """Return the sum of the bits of a tensor's elements: exact in any order."""
        values = self.take(x)
        formats = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return values.view(formats[values.element_size()]).double().sum()


class StepSample:
    """Sample the tensors of one group with one kind of state, before a step.

    Attributes:
        members: the parameters.
        sizes: after the step, the largest change of each tensor beyond one rounding, NaN at a rate of 0.
        meant: sum of squares of the change that was meant, 0 where a copy does not repeat the step;
            ``None`` where none was tried. ``kept`` is its product with the stored change.
    """

    meant: Tensor | None = None
    kept: Tensor
    sizes: Tensor

    def __init__(
        self,
        sampler: Sampler,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        members: list[Any],
        gradients: Mapping[Tensor, Tensor],
    ) -> None:
        self.sampler = sampler
        self.optimizer = optimizer
        self.group = group
        self.members = members
        self.weights = sampler.join(members)
        self.gradients = sampler.join(map(gradients.__getitem__, members))
        self.states: dict[str, Any] = {}
        self.home = ""

    def follow(self) -> None:
        """Take the states, if a step of samples can be the step of these elements.

        What an optimizer holds that is no number may be shared with it.
        """
        first = self.members[0]
        state = self.optimizer.state.get(first) or {}
        for x in state.values():
            if _is_by_element(x) and (x.shape != first.shape or x.element_size() == 1):
                return
        for name, x in vars(self.optimizer).items():
            is_own = not name.startswith("_") and name not in _OF_EVERY_OPTIMIZER
            if is_own and isinstance(x, (list, dict, Tensor, nn.Module)):
                return
        for name, x in state.items():
            if _is_by_element(x):
                self.states[name] = self.sampler.join(self._states_named(name))
            else:
                self.states[name] = copy.deepcopy(x)
        if first not in self.sampler.homes:
            self.sampler.homes[first] = self._find_home()
        self.home = self.sampler.homes[first]
        # Until the step is repeated.
        self.meant = torch.zeros(len(self.members), device=self.weights.device)

    def _states_named(self, name: str) -> list[Tensor]:
        return [self.optimizer.state[p][name] for p in self.members]

    def _find_home(self) -> str:
        """Return the state that holds the weight in a wider format; empty without one."""
        for name, x in self.states.items():
            is_wider = _is_by_element(x) and x.element_size() > self.weights.element_size()
            if is_wider and torch.equal(x.to(self.weights.dtype), self.weights):
                return name
        return ""

    def finish(self) -> None:
        """Compare with the weights after the step."""
        stored = self._by_tensor(self.sampler.join(self.members).double() - self.weights.double())
        rounding = self.weights.abs().double() * torch.finfo(self.weights.dtype).eps
        self.sizes = (stored.abs() - self._by_tensor(rounding)).clamp_min(0.0).amax(1)
        if not self.group.get("lr"):
            self.sizes.fill_(math.nan)
        if self.meant is None:
            return
        if self.home:
            masters = self.sampler.join(self._states_named(self.home))
            stored = self._by_tensor(masters.double() - self.states[self.home].double())
        self.kept = self.meant
        wide = torch.float64 if self.weights.element_size() > 2 else torch.float32
        with suppress(Exception):  # a class that cannot be stepped so is not followed
            again = self._again(None)
            meant = self._again(wide)
            squares = meant.square().sum(1)
            distance = (again - stored).square().sum(1)
            self.kept = (meant * stored).sum(1)
            self.meant = squares * (distance <= _REPEATS * squares)

    def _by_tensor(self, x: Tensor) -> Tensor:
        return x.view(-1, SIZE)

    def _again(self, format: torch.dtype | None) -> Tensor:
        """Step copies in a format, and return the change of the weights, or of their masters."""
        p = nn.Parameter(self._copied(self.weights, format))
        p.grad = self._copied(self.gradients, format)
        state = {name: self._copied(x, format) for name, x in self.states.items()}
        start = state.get(self.home, p.detach()).double().clone()
        twin = object.__new__(type(self.optimizer))
        vars(twin).update(vars(self.optimizer))
        for name in vars(self.optimizer):
            if "hooks" in name:
                setattr(twin, name, OrderedDict())
        twin.param_groups = [{**self.group, "params": [p]}]
        twin.state = defaultdict(dict, {p: state})
        devices = [p.device] if p.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            type(self.optimizer).step(twin)
        end = state.get(self.home, p.detach())
        return self._by_tensor(end.double() - start)

    def _copied(self, x: Any, format: torch.dtype | None) -> Any:
        if isinstance(x, Tensor) and x.shape == self.weights.shape:
            return x.to(format or x.dtype, copy=True)
        return copy.deepcopy(x)


def _is_by_element(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0


def samples_of(
    sampler: Sampler,
    optimizer: torch.optim.Optimizer,
    gradients: Mapping[Tensor, Tensor],
    number: int,
) -> list[StepSample]:
    """Return samples of some of what an optimizer is about to step: each of its tensors in turn.

    Masters may be made in a first step, so it is not repeated.
    """
    members = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            is_dense = p in gradients and not gradients[p].is_sparse
            if is_dense and p.is_floating_point() and local_of(p).numel():
                members.append((group, p))
    kinds: dict[Any, tuple[dict[str, Any], list[Any]]] = {}
    for group, p in in_turn(members, number):
        key = id(group), p.dtype, gradients[p].dtype, p.device, *optimizer.state.get(p, {})
        kinds.setdefault(key, (group, []))[1].append(p)
    samples = []
    for group, of_kind in kinds.values():
        sample = StepSample(sampler, optimizer, group, of_kind, gradients)
        samples.append(sample)
        is_begun = number > 0 or bool(optimizer.state.get(of_kind[0]))
        if is_begun and not isinstance(optimizer, Optimizer):
            sample.follow()
    return samples


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
