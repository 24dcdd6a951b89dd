"""Tensors that no optimizer steps: names of tensors with a gradient, and copies of a model, such as
an average of its weights.
"""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.analysis.snapshot import is_sampled
from narrowgauge.analysis.thresholds import SETTLED
from narrowgauge.checks.step_samples import evenly_spread
from narrowgauge.gauges.hub import Listener
from narrowgauge.gauges.recording.twin import on_host
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.put_back import objects_of
from narrowgauge.torch_support.torch_hooks import after_every_step, members_of
from narrowgauge.torch_support.torch_names import callers_of_step, graph_nodes

if TYPE_CHECKING:
    from narrowgauge.gauges.recording.watch import Watch

_CLOSE = 3
"""Sampled steps up to this one are too close together for a look at each."""
_CLOCK = itertools.count()
_LAST_STEPS: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""When each optimizer of this process stepped last, since the first watch: a reading of the clock."""
_CALLERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[torch.optim.Optimizer]]
_CALLERS = weakref.WeakKeyDictionary()
"""The optimizers whose ``step`` calls an optimizer's: wrappers, and containers of several."""


def _remember(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _LAST_STEPS[optimizer] = next(_CLOCK)
    callers = callers_of_step(optimizer)
    if callers:
        _CALLERS.setdefault(optimizer, weakref.WeakSet()).update(callers)


class Steppers:
    """Know the optimizers of this process that step since a watch began."""

    def __init__(self, watched: Iterable[torch.optim.Optimizer]) -> None:
        self._watched = {*watched}
        self._began = next(_CLOCK)
        after_every_step(_remember)

    def stepped(self) -> set[torch.optim.Optimizer]:
        """Return the optimizers that have stepped, the watched ones among them.

        Those that stepped only before may belong to another loop.
        """
        return {optimizer for optimizer, last in _LAST_STEPS.items() if last > self._began}

    def stepped_by_others(self, names: Mapping[Tensor, str]) -> Iterator[list[str]]:
        """Yield the names of the parameters that each other optimizer steps too.

        One whose step calls a watched one's, or is called by it, is the same step.
        """
        for other in self._others():
            twice = [names[p] for p in members_of(other) if p in names]
            if twice:
                yield twice

    def step_other_models(self, names: Mapping[Tensor, str]) -> bool:
        """Return whether another optimizer steps tensors of other models alone, as a critic's."""
        return any(names.keys().isdisjoint(members_of(other)) for other in self._others())

    def _others(self) -> Iterator[torch.optim.Optimizer]:
        """Yield the other optimizers that stepped, without those that call a watched one's step or
        are called by it.
        """
        callers = {caller for watched in self._watched for caller in _CALLERS.get(watched, ())}
        for other in self.stepped() - self._watched - callers:
            if self._watched.isdisjoint(_CALLERS.get(other, ())):
                yield other


class Leaves(Listener):
    """Walk the graph of a pass to its leaves, and read those that no optimizer steps.

    It looks at two steps of every 50, and at sampled steps and the next ones, since parameters may
    be thawed while the loop runs.
    """

    title = "the watch of leaves"

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._leaves: dict[int, tuple[weakref.ref[Tensor], Tensor, set[int]]] = {}

    def _since_look(self) -> int:
        """Return the steps since the last one in which a look began, at most 3."""
        for since in range(3):
            step = self._watch.now.step - since
            if step % SETTLED == 1 or (step > _CLOSE and is_sampled(step)):
                return since
        return 3

    def after_pass(self, output: Any) -> None:
        """Remember the leaves that the optimizers do not step."""
        # The leaves of sharded parameters are gathered copies.
        if self._since_look() >= 2 or self._watch.is_sharded:
            return
        for node in graph_nodes(output):
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor):
                self._remember(leaf)

    def _remember(self, leaf: Tensor) -> None:
        if leaf in self._watch.names:
            return
        reference, values, steps = self._leaves.get(id(leaf), (None, None, set[int]()))
        if reference is None or reference() is not leaf or values is None:
            values = evenly_spread(leaf).clone()
            steps = set()
        steps.add(self._watch.now.step)
        self._leaves[id(leaf)] = weakref.ref(leaf), values, steps

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the parameters with a gradient too, since a loop may not call the model itself;
        and read the leaves after two steps with walks.
        """
        if optimizer is not self._watch.optimizers[0]:
            return
        since = self._since_look()
        if since < 2 and not self._watch.is_sharded:
            for p in self._watch.watched_model.parameters():
                if p.grad is not None:
                    self._remember(p)
        elif since == 2:
            self._take()

    def _take(self) -> None:
        """Add the tensors without an optimizer, and those with two, to the snapshot."""
        steppers = self._watch.steppers
        stepped = {*members_of(*steppers.stepped())}
        leaves = []
        for reference, values, steps in self._leaves.values():
            leaf = reference()
            if leaf is None or leaf.grad is None or leaf in stepped or len(steps) < 2:
                continue
            if torch.equal(evenly_spread(leaf), values) and not self._watch.has_master(leaf):
                leaves.append(leaf)
        self._leaves = {}
        self._watch.measured["untrained_tensors"] = len(leaves)
        now = self._watch.now
        now.untrained += names_of(self._watch.watched_model, leaves)
        now.twice += steppers.stepped_by_others(self._watch.names)


def names_of(model: nn.Module, tensors: Iterable[Tensor]) -> list[str]:
    """Name tensors by their parameter, or by the attribute that holds them or their module, or by
    their shape.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for name, value in objects_of(model):
        if isinstance(value, Tensor):
            names.setdefault(id(value), name)
    return [names.get(id(x), f"a tensor {list(x.shape)}") for x in tensors]


def copies_of(model: nn.Module) -> dict[Tensor, str]:
    """Return the parameters of each other module of this process that has parameters of the same
    names and shapes as the model or a part of it, with their names in the model.
    """
    tensors = {*model.parameters()}
    parts = dict[Signature, str]()
    for prefix, module in model.named_modules():
        signature = _signature(dict(module.named_parameters()))
        if len(signature) > 1 or not prefix:
            parts.setdefault(signature, prefix)
    names: dict[Tensor, str] = {}
    # A copy of the model first, and then those of its parts: blocks are alike.
    for parameters in sorted(_others(tensors), key=len, reverse=True):
        prefix = parts.get(_signature(parameters))
        if prefix is not None:
            for name, p in parameters.items():
                names.setdefault(p, f"{prefix}.{name}" if prefix else name)
    return names


Signature = tuple[tuple[str, torch.Size], ...]


def _signature(parameters: Mapping[str, Tensor]) -> Signature:
    return tuple((name, p.shape) for name, p in parameters.items())


def _others(tensors: Set[Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the parameters of each module of this process that has none of some tensors."""
    for candidate in gc.get_objects():
        kind = type(candidate)
        # Code of other libraries is not called.
        if not issubclass(kind, nn.Module) or "_modules" not in vars(candidate):
            continue
        if kind.named_parameters is not nn.Module.named_parameters:
            continue
        parameters = dict(candidate.named_parameters())
        if parameters and tensors.isdisjoint(parameters.values()):
            yield parameters


class Averages:
    """Copies of the model's weights that the loop writes in every step, as an average of them.

    A copy of the best weights is not written in every step, and another model has an optimizer.

    Args:
        copies: the parameters of other models, with their names in this one.
        trained: the watched weights.
        step: the present one.

    Attributes:
        names: of the weights that have a copy.
    """

    def __init__(
        self, copies: Mapping[Tensor, str], trained: Mapping[str, Tensor], step: int
    ) -> None:
        self._step = step
        self._copies: list[tuple[str, weakref.ref[Tensor], int, Tensor]] = []
        for p, name in copies.items():
            if name in trained and not p.is_meta:
                self._copies.append((name, weakref.ref(p), p._version, evenly_spread(p).clone()))
        self.names = {name for name, *_ in self._copies}

    def numbers(
        self, step: int, moved: Mapping[str, tuple[Tensor, ...]], stepped: Iterable[Tensor]
    ) -> dict[str, list[Any]]:
        """Return the numbers of each copy that the loop writes, for a snapshot.

        Args:
            moved: elements of the weights that moved: when the watch began, before and after the step.
            stepped: parameters with an optimizer.
        """
        stepped_params = {*stepped}
        formats = {}
        norms = []
        for name, reference, version, first in self._copies:
            p = reference()
            if p is None or p in stepped_params or name not in moved:
                continue
            if p._version - version < SETTLED:
                continue
            values = evenly_spread(p)
            formats[name] = dtype_name(p.dtype)
            # An average may be on the CPU.
            start, before, now = (x.double().to(values.device) for x in moved[name])
            wide = values.double()
            tensors = (wide - first, wide, start, now, wide - before, wide - now, now - before)
            norms.append(torch.stack([x.norm() for x in tensors]))
        has_settled = step >= self._step + SETTLED
        numbers: dict[str, list[Any]] = {}
        for (name, format), row in zip(formats.items(), on_host(norms), strict=True):
            change, size, *sizes, to_before, to_now, step_size = row
            lag = min(to_before, to_now) / (step_size or math.inf)
            numbers[name] = [change, size, max(sizes), format, has_settled, lag]
        return numbers
