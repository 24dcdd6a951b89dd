"""The sampled steps of a watched loop: 1, 2, 3, 5, 8, 13 … and every hundredth.

Such a step is repeated on copies (:mod:`narrowgauge.gauges.recording.twin`). What it wrote is looked
at again before the next one, and so is what no optimizer may write.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.analysis.reading import Reading, joined, of_all, words_of
from narrowgauge.analysis.snapshot import AT_ZERO, MOVED, is_sampled, shortened
from narrowgauge.analysis.thresholds import ROUNDINGS
from narrowgauge.checks.step_samples import evenly_spread, weight_of
from narrowgauge.gauges.hub import Listener
from narrowgauge.gauges.recording.leaves import Averages, copies_of
from narrowgauge.gauges.recording.step_fit import step_readings
from narrowgauge.gauges.recording.twin import Twin, on_host
from narrowgauge.gauges.recording.written import Writes
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.anatomy import moving_statistics
from narrowgauge.torch_support.torch_hooks import members_of
from narrowgauge.torch_support.torch_names import plain_name

if TYPE_CHECKING:
    from narrowgauge.gauges.recording.watch import Watch

Elements = dict[str, tuple[Tensor, Tensor]]
"""Tensors by name, each with a copy of some elements."""


class _Start(NamedTuple):
    """Elements of a weight when the watch began, and which of them have differed since."""

    parameter: Tensor
    elements: Tensor
    has_moved: Tensor


class StoredShares:
    """The share of the update that was stored, of each group of the optimizers."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._sums: dict[Tensor, list[float]] = {}

    def take(self, twin: Twin) -> None:
        """Add the stored share of each group to the snapshot."""
        watch = self._watch
        sums = self._sums_of(twin)
        for number, optimizer, group in watch.groups():
            if optimizer is not twin.optimizer:
                continue
            members = [p for p in group["params"] if p in sums and sums[p][0] > 0]
            if group.get("lr") is None:
                watch.unseen["effective learning rate"] = "a group has no lr"
            if group.get("lr") is None or not members:
                continue
            intended, stored, variance = map(sum, zip(*(sums[p] for p in members), strict=True))
            share = stored / intended
            watch.shares[number] = share
            # Our audit has alarms of its own.
            if isinstance(optimizer, Optimizer):
                continue
            error = 3 * math.sqrt(variance) / intended
            worst = min(members, key=lambda p: sums[p][1] / sums[p][0])
            least = sums[worst][1] / sums[worst][0]
            named = dtype_name(worst.dtype), watch.name(worst), least
            watch.now.shares[number] = [float(group["lr"]), share, error, *named]

    def _sums_of(self, twin: Twin) -> dict[Tensor, list[float]]:
        """Return ⟨D,D⟩, ⟨D,E⟩ and its variance of each tensor, from our audit or from the repeated
        step.
        """
        watch = self._watch
        optimizer = twin.optimizer
        area = "effective learning rate"
        if len(watch.optimizers) > 1:
            area += f" of {type(optimizer).__name__}"
        sums: dict[Tensor, list[float]] = {}
        if isinstance(optimizer, Optimizer):
            optimizer.settle()
            if not optimizer.audit_every:
                watch.unseen[area] = "audit_every is 0"
            for p, rows in optimizer.auditor.windows.items():
                sums[p] = [*rows[:, :2].sum(0).tolist(), 0.0]
            return sums
        if watch.now.step == 1 and not twin.is_torchs:
            return {}  # its first step may make masters
        sums, unrepeated = twin.sums()
        if twin.why_not:
            watch.unseen[area] = twin.why_not
        elif unrepeated:
            names = of_all(map(watch.name, unrepeated))
            watch.unseen[area] = f"the step of {names} is not repeated by a copy"
        for p, values in sums.items():
            if values[2]:  # one sample of stochastic rounding is noise: take all
                before = self._sums.get(p, [0.0, 0.0, 0.0])
                self._sums[p] = [a + b for a, b in zip(before, values, strict=True)]
            sums[p] = self._sums.get(p, values)
        return sums


class Sampled(Listener):
    """Look at the sampled steps of a watched loop.

    Attributes:
        num_compared: tensors whose step was compared with that of the optimizer's class, so far.
    """

    title = "the watch of sampled steps"

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.num_compared = 0
        self._starts: dict[str, _Start] = {}
        self._stored = StoredShares(watch)
        self._twins: dict[torch.optim.Optimizer, Twin] = {}
        self._frozen: Elements = {}
        self._writes = Writes()
        self._averages: Averages | None = None
        self._start_new()

    def begin(self, *, anew: bool) -> None:
        """Compare nothing with the last step: weights and states were loaded.

        Args:
            anew: compare with the weights of now from here on.
        """
        if anew:
            self._starts = {}
        self._twins = {}
        self._start_new()

    def _start_new(self) -> None:
        starts = {}
        for name, p in self._watch.trained.items():
            start = self._starts.get(name)
            if start is None or start.parameter is not p:
                elements = _elements(self._watch, p)
                start = _Start(p, elements, torch.zeros_like(elements, dtype=torch.bool))
            starts[name] = start
        self._starts = starts

    def end(self) -> None:
        """Release the copies."""
        self._starts = {}
        self._twins = {}
        self._averages = None

    # ── the hub calls these ───────────────────────────────────────────────────────────────────────

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at what was written since a sampled step, and copy what the next one may change, and
        what it must not.
        """
        watch = self._watch
        twin = self._twins.pop(optimizer, None)
        if twin is not None and twin.samples and twin.samples[0].after:
            step = watch.now.step - 1
            starts = {start.parameter: start.elements for start in self._starts.values()}
            watch.report(self._compared(lambda: self._writes.readings(twin, step, starts)))
        if not (is_sampled(watch.now.step) or watch.goes_on):
            return
        watch.take_up()
        self._start_new()
        watch.now.drifting = _drifting(self._frozen)
        self._frozen = {}
        for name, p in {**_named(watch.watched_model), **watch.parameters}.items():
            if not p.requires_grad:
                self._frozen[name] = p, evenly_spread(p).clone()
        self._twins[optimizer] = Twin(optimizer, watch.names)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Read a sampled step."""
        if optimizer not in self._twins:
            return
        watch = self._watch
        twin = self._twins[optimizer]
        twin.complete()
        watch.report(self._step_readings(twin))
        self._stored.take(twin)
        watch.now.moved = _largest_moves(twin)
        watch.now.frozen = _changed(self._frozen)
        if optimizer is watch.optimizers[-1]:
            watch.now.weights = _weights(watch, self._starts)
            watch.now.frozen_norms = _frozen_norms(watch)
            self._take_averages(watch)

    # ── the step and its class's ──────────────────────────────────────────────────────────────────

    def _compared(self, readings: Callable[[], Iterable[Any]]) -> list[Any]:
        """Return what a comparison yields. Its error is a reason for what is not seen."""
        try:
            return list(readings())
        except Exception as error:
            self._watch.unseen["the optimizer's step"] = words_of(error)
            return []

    def _step_readings(self, twin: Twin) -> Iterator[Reading]:
        """Read the differences between a step and its class's. A first step may make masters."""
        step = self._watch.now.step
        if step == 1 and not self._watch.goes_on:
            return
        if twin.reference is None and not isinstance(twin.optimizer, Optimizer):
            reason = f"{type(twin.optimizer).__name__} has a rule of its own"
            self._watch.unseen.setdefault("the optimizer's step", reason)
        differences = self._compared(lambda: step_readings(twin))
        self.num_compared += twin.num_compared
        for reading in joined(differences, len(twin.samples)):
            yield replace(reading, step=step)

    # ── averages ──────────────────────────────────────────────────────────────────────────────────

    def _take_averages(self, watch: Watch) -> None:
        """Add the copies of the weights that the loop writes to the snapshot."""
        step = watch.now.step
        if step == 1:  # an average may begin as a copy after it
            return
        if self._averages is None:
            self._averages = Averages(copies_of(watch.watched_model), watch.trained, step)
        before = {}
        for twin in self._twins.values():
            for sample in twin.samples:
                before[sample.name] = sample.before["weight"]
        moved = {}
        for name, state in watch.now.weights.items():
            if name in self._averages.names and state == MOVED:
                start = self._starts[name]
                now = _elements(watch, start.parameter)
                last = before.get(name, now)  # of rules that need matrices, another shape
                moved[name] = start.elements, last if last.shape == now.shape else now, now
        stepped = members_of(*watch.steppers.stepped())
        watch.now.averages = self._averages.numbers(step, moved, stepped)


def _drifting(frozen: Elements) -> list[str]:
    """Return the frozen tensors that changed by a few roundings since the last sampled step."""
    names = []
    flags = []
    for name, (p, before) in frozen.items():
        now = evenly_spread(p)
        if p.requires_grad or not p.is_floating_point() or now.shape != before.shape:
            continue
        ulps = (now - before).abs() / (before.abs() * torch.finfo(p.dtype).eps).clamp_min(1e-30)
        names.append(name)
        flags.append((ulps <= ROUNDINGS).all() & (ulps > 0).any())
    return list(itertools.compress(names, on_host(flags)))


def _changed(elements: Elements) -> list[str]:
    """Return the frozen tensors that the step changed."""
    frozen = {name: x for name, x in elements.items() if not x[0].requires_grad}
    flags = [(evenly_spread(p) != before).any() for p, before in frozen.values()]
    return list(itertools.compress(frozen, on_host(flags)))


def _weights(watch: Watch, starts: dict[str, _Start]) -> dict[str, str]:
    """Return which trained weights moved since the watch began, and why the others did not."""
    at_zero: set[Tensor] = set()
    for _, _, group in watch.groups():
        if group.get("lr") == 0:
            at_zero.update(group["params"])
    states = {}
    flags = []
    for name, start in starts.items():
        p = start.parameter
        now = _elements(watch, p)
        if now.shape == start.elements.shape:
            start.has_moved.logical_or_(now != start.elements)
        if now.numel():
            states[name] = AT_ZERO if p in at_zero else dtype_name(p.dtype)
            flags.append(start.has_moved.any())
    for name, has_moved in zip(states, on_host(flags), strict=True):
        if has_moved:
            states[name] = MOVED
    return states


def _frozen_norms(watch: Watch) -> list[str]:
    """Return the batch norms whose statistics move and whose weights no optimizer steps."""
    stepped = {*members_of(*watch.steppers.stepped())}
    norms = moving_statistics(watch.watched_model)
    return [
        plain_name(name) for name, norm in norms.items() if stepped.isdisjoint(norm.parameters())
    ]


def _elements(watch: Watch, p: Tensor) -> Tensor:
    """Copy spread elements of the stored weight, on its device."""
    return evenly_spread(weight_of(watch.optimizer_of[p], p)).clone()


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): p for name, p in model.named_parameters()}


def _largest_moves(twin: Twin) -> dict[str, float]:
    """Return the largest change of each tensor in units of the learning rate, for rules whose steps
    are about one.
    """
    largest: dict[str, Tensor] = {}
    if "adam" not in type(twin.optimizer).__name__.lower():
        return {}
    for sample in twin.samples:
        rate = float(sample.group[1].get("lr") or 0.0)
        if rate and sample.parameter.numel() and sample.parameter.is_floating_point():
            change = sample.after["weight"].double() - sample.before["weight"].double()
            largest[sample.name] = change.abs().max() / rate
    sizes = map(shortened, on_host([*largest.values()]))
    return dict(zip(largest, sizes, strict=True))
