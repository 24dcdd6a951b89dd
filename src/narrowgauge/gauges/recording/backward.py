"""The backward passes of a watched loop, by the gradients of the smallest tensor of each optimizer:
how many a step has, whether gradients were cleared before and between them, and whether they are
equal. The same tensor shows whether weights were written between two steps.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import of_all
from narrowgauge.analysis.snapshot import is_sampled
from narrowgauge.analysis.thresholds import LEAST_PROBE, MOST_PROBES, UNSTEPPED
from narrowgauge.checks.manifest import master_of
from narrowgauge.gauges.hub import Listener
from narrowgauge.numerics.dtensor import is_sharded

if TYPE_CHECKING:
    from narrowgauge.gauges.recording.watch import Watch


class BackwardPasses(Listener):
    """Follow the gradients of some small tensors.

    Attributes:
        probe: the smallest trained tensor; ``None`` if all are sharded.
        number: backward passes so far.
        is_shared: two optimizers stepped after the same pass, as those of one loss do.
    """

    title = "the watch of backward passes"

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._undo = ExitStack()
        self._was_cleared: dict[Tensor, bool | Tensor] = {}
        self._after: Tensor | None = None  # the probe after the last step
        self._was_evaluated = False  # since then
        self._first: Tensor | None = None  # gradient of the last sampled step
        self._had_gradient: bool | Tensor = False  # in the last pass, other than zero
        self.number = 0
        self.is_shared = False
        self._num_seen = 0  # gradients of any probe
        self._last_step: tuple[torch.optim.Optimizer | None, int] = None, 0
        self._probes = _probes_of(watch)
        self.probe = next(iter(self._probes.values()), None)
        for p in self._probes.values():
            watch.hub.follow_gradients(self, partial(self.see_gradient, p), self._undo, p)

    def end(self) -> None:
        """Remove the hooks."""
        self._undo.close()

    def before_evaluation(self) -> None:
        """Note an evaluation: weights that it changes were not restored."""
        self._was_evaluated |= not self._watch.watched_model.training

    def see_gradient(self, probe: Tensor, gradient: Tensor) -> None:
        """See one backward pass, before its gradient is added to the last one."""
        now = self._watch.now
        self._num_seen += 1
        last = probe.grad
        is_cleared: bool | Tensor = True
        if last is not None and last.layout is torch.strided:
            is_cleared = ~last.any()
        self._was_cleared[probe] = self._was_cleared.get(probe, False) | is_cleared
        if probe is not self.probe:
            return
        self.number += 1
        now.num_backward += 1
        if now.num_backward > 1:
            # A gradient of zeros, as beside a factor that is zero, was not cleared.
            self._watch.numbers_of_step.add("cleared within", self._had_gradient & is_cleared)
        is_dense = gradient.layout is torch.strided
        self._had_gradient = gradient.any() if is_dense else False
        if is_sampled(now.step) and is_dense and probe.numel() >= LEAST_PROBE:
            self._compare(gradient, is_first=now.num_backward == 1)
        if self.number == UNSTEPPED and now.step == 1:
            self._look_for_steps()

    def _compare(self, gradient: Tensor, *, is_first: bool) -> None:
        """Count the passes of a sampled step with the gradient of its first pass, where this is not
        that of the sampled step before.
        """
        before = self._first
        is_alike = before is not None and before.shape == gradient.shape
        if is_first:
            self._first = gradient.clone()
        if before is None or not is_alike:
            return
        if is_first:
            self._watch.numbers_of_step.add("fresh", (gradient != before).any())
        else:
            self._watch.numbers_of_step.add(
                "equal passes", (gradient == before).all() & before.any()
            )

    def _look_for_steps(self) -> None:
        """Report passes without a step: several micro-batches make one, so another optimizer must
        have stepped.
        """
        stepped = self._watch.steppers.stepped()
        if stepped and stepped.isdisjoint(self._watch.optimizers):
            names = of_all(type(optimizer).__name__ for optimizer in stepped)
            words = f", and another one has ({names}): watch the one that steps"
            self._watch.report(
                [KINDS["step-order"].case("never").reading("", UNSTEPPED, words=words)]
            )

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take what the passes, and the time between two steps, left in the probes."""
        last, number = self._last_step
        self.is_shared |= last is not optimizer and number == self._num_seen > 0
        self._last_step = optimizer, self._num_seen
        probe = self._probes.get(optimizer)
        if probe is None:
            return
        watch = self._watch
        if probe in self._was_cleared and watch.now.step > 1:
            name = watch.name(probe) if len(self._probes) > 1 else ""
            is_cleared = self._was_cleared[probe]
            is_kept = ~is_cleared if isinstance(is_cleared, Tensor) else not is_cleared
            watch.numbers_of_step.add("kept", is_kept, name)
        if probe is self.probe and self._after is not None:
            is_written = ((probe != self._after) & (self._after == self._after)).any()
            watch.numbers_of_step.add("swapped" if self._was_evaluated else "written", is_written)
            self._was_evaluated = False

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the probe as the step leaves it."""
        probe = self._probes.get(optimizer)
        if probe is not None:
            self._was_cleared.pop(probe, None)
        if probe is not None and probe is self.probe:
            self._after = probe.detach().clone()


def _probes_of(watch: Watch) -> dict[torch.optim.Optimizer, Tensor]:
    """Return the smallest trained parameter of each optimizer, as backward passes reach it."""
    trained = watch.trained.values()
    unsharded = [p for p in trained if p.is_leaf and not is_sharded(p) and p.numel()]
    probes: dict[torch.optim.Optimizer, Tensor] = {}
    for p in sorted(unsharded, key=Tensor.numel):
        if not probes or len(watch.optimizers) <= MOST_PROBES:
            probes.setdefault(watch.optimizer_of[p], p)
    inside = dict.fromkeys(watch.watched_model.parameters())
    for optimizer, p in probes.items():
        if p not in inside:  # a master: backward passes reach its weight
            weights = [q for q in inside if master_of(q, [p]) is not None]
            probes[optimizer] = [*weights, p][0]
    return probes
