"""``narrowgauge.watch``: watch a training loop, and say nothing while all is well.

Hooks on the model and on the optimizer's step only read. The numbers of a step go to the host in
one vector: the norm of each gradient, the sum of each block's outputs, and some flags. A GPU's
vector is read one step later, so that nothing waits for it. Together they are one snapshot, which
the laws read (:mod:`narrowgauge.analysis.laws`). A watch has parts, which hear the loop too:
sampled steps, the leaves of the graph, and the ranks.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.laws import Laws
from narrowgauge.analysis.log import emit
from narrowgauge.analysis.reading import Reading, in_order
from narrowgauge.analysis.snapshot import MOVED, Facts, Snapshot, is_sampled, shortened
from narrowgauge.analysis.thresholds import TWICE, UNSTEPPED
from narrowgauge.checks.loss_value import vocabulary_of
from narrowgauge.checks.manifest import master_of
from narrowgauge.checks.set_up import SetUp, set_up_of
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.gauges.hub import Hub, Listener, RunNotice
from narrowgauge.gauges.recording.backward import BackwardPasses
from narrowgauge.gauges.recording.forward import ForwardPasses, nonfinite_weight
from narrowgauge.gauges.recording.host_numbers import HostNumbers, norms_of
from narrowgauge.gauges.recording.leaves import Leaves, Steppers
from narrowgauge.gauges.recording.of_ranks import OfRanks
from narrowgauge.gauges.recording.sampled import Sampled
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import counted
from narrowgauge.spec.recipes import Recipe
from narrowgauge.torch_support.torch_hooks import members_of
from narrowgauge.torch_support.torch_names import (
    is_compiled_model,
    unwrapped_model,
)


class Watch(Listener):
    """Hold the numbers of a watched loop; created by :func:`watch`.

    Attributes:
        hub: the hooks on the loop.
        unseen: what is not watched, and why.
        now: the snapshot of the step that comes, or is being taken.
        trained, names, optimizer_of: the parameters that the optimizers step.
        forward, backward: the passes of the model, and those that reach gradients.
        numbers_of_step: what goes to the host from the step that comes.
        steppers: the optimizers of this process.
        measured: numbers of the last step, by name. ``shares``: of each group, the share of its
            update that was stored in the last sampled step.
        goes_on: the next step is the first after a checkpoint was loaded.
        is_ended: the hooks are removed.
        laws: which read the snapshots.
        recipe: with which the model was prepared, if it is known.
    """

    title = "the watch"
    is_ended = False
    recipe: Recipe | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        called: nn.Module | None = None,
        max_grad_norm: float | None = None,
        ignore: Collection[str] = (),
    ) -> None:
        for name in ignore:
            if name not in KINDS:
                raise RecipeError(
                    f"Cannot ignore '{name}' because no kind of reading has this name.",
                    suggestion(name, KINDS) or "Try narrowgauge show checks, which lists them.",
                )
        self.optimizers = set_up_of(model, optimizer).optimizers
        inner = unwrapped_model(model)
        self.watched_model = inner
        if called is None:
            # A compiler skips hooks inside the model that it compiles.
            called = model if is_compiled_model(model) else inner
        self.hub = Hub(inner, self.optimizers, called)
        self.undo = ExitStack()
        self.unseen: dict[str, str] = {}
        self.is_sharded = any(is_sharded(p) for p in inner.parameters())
        if self.is_sharded:
            for part in ("tensors without an optimizer", "gradients that were not cleared"):
                self.unseen[part] = "parameters are sharded"
        self.names: dict[Tensor, str] = {}
        self.trained: dict[str, Tensor] = {}
        self.optimizer_of: dict[Tensor, torch.optim.Optimizer] = {}
        self.goes_on = False
        self.measured: dict[str, float] = {}
        self.shares: dict[str, float] = {}
        self._told: dict[tuple[str, ...], float] = {}
        self._reached: set[str] = set()  # had a gradient other than zero
        self.take_up()
        self._step = 0
        self.now = Snapshot(1)
        self._num_calls = 0  # of step()
        self.numbers_of_step = HostNumbers(self.names)
        # Of each optimizer's last step: passes before it, and its first gradient.
        self._last: dict[torch.optim.Optimizer, tuple[int, ...]] = {}
        self._has_bad_output = False
        self.steppers = Steppers(self.optimizers)
        self.forward = ForwardPasses(self)
        self.laws = Laws(self._facts(max_grad_norm, ignore))
        self.sampled = Sampled(self)
        self.backward = BackwardPasses(self)
        self._parts: list[Listener] = [self.forward, self.sampled, Leaves(self), self.backward]
        self._of_ranks: OfRanks | None = None
        if self.hub.here.size > 1:
            self._of_ranks = OfRanks(self)
            self._parts.append(self._of_ranks)
        self.hub.listeners += [*self._parts, self]  # the snapshot is sent last

    # ── what the optimizers step ──────────────────────────────────────────────────────────────────

    def take_up(self) -> None:
        """Watch what the optimizers step now: parameters may be added, or thawed, while the loop
        runs.
        """
        set_up = SetUp(self.watched_model, self.optimizers)
        self._num_members = len(members_of(*self.optimizers))
        for stepped in set_up.stepped:
            self.names[stepped.parameter] = stepped.name
            self.optimizer_of[stepped.parameter] = stepped.optimizer
        self.trained = {p.name: p.parameter for p in set_up.trained}
        self._first = next(iter(self.trained.values()), None)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return every parameter that an optimizer steps or has stepped, by name."""
        return {name: p for p, name in self.names.items()}

    def name(self, p: Tensor) -> str:
        """Return the name of a parameter."""
        return self.names.get(p, "a new tensor")

    @property
    def num_compared(self) -> int:
        """Return how many tensors' steps were compared with their class's."""
        return self.sampled.num_compared

    def has_master(self, p: Tensor) -> bool:
        """Return whether an optimizer steps a master of a weight, which the loop writes back."""
        return master_of(p, self.trained.values()) is not None

    def groups(self) -> Iterator[tuple[str, torch.optim.Optimizer, dict[str, Any]]]:
        """Yield the number of each group, over all optimizers, with its optimizer and itself."""
        number = 0
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield str(number), optimizer, group
                number += 1

    def gradients(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return this rank's gradients by name, in the order of a backward pass; of sparse ones the
        values.
        """
        # All ranks ask in one order.
        placed = {p: gradient_of(p) for p in members_of(optimizer)}
        gradients: dict[str, Tensor] = {}
        for p, gradient in reversed(placed.items()):
            if gradient is None:
                continue
            part = local_of(gradient)
            if part.numel():
                is_dense = part.layout is torch.strided
                gradients[self.name(p)] = part if is_dense else part.coalesce().values()
        return gradients

    def _facts(self, limit: float | None, ignore: Collection[str]) -> Facts:
        model = self.watched_model
        epsilon = 0.0
        if limit is not None:
            epsilon = max(torch.finfo(p.dtype).eps for p in self.names)
        is_whole = not self.is_sharded or self.hub.here.size == 1
        rates = {}
        for number, _, group in self.groups():
            rate = group.get("initial_lr", group.get("lr"))
            if isinstance(rate, (int, float)):
                rates[number] = float(rate)
        facts = Facts(
            len(self.optimizers), self.hub.here.size, vocabulary_of(model), limit, is_whole,
            epsilon, self.forward.mode_dependent, tuple(ignore), rates,
        )  # fmt: skip
        return facts.advised_for(self.recipe)

    # ── the loop calls these ──────────────────────────────────────────────────────────────────────

    def go_on_after(self, step: int, *, anew: bool = False) -> None:
        """Compare the step that comes, and nothing with the last one: weights and states were
        loaded.

        Args:
            step: steps that are done.
            anew: compare with the weights of now from here on.
        """
        self.sampled.begin(anew=anew)
        self._step = step
        self.now = Snapshot(step + 1)
        self.goes_on = True
        self._reached = set()
        self.numbers_of_step.forget()

    def end(self) -> None:
        """End the watch; other listeners go on."""
        self.is_ended = True
        self.undo.close()
        for part in self._parts:
            if part in self.hub.listeners:
                self.hub.listeners.remove(part)
                part.end()

    def remove(self) -> None:
        """Remove every hook."""
        self.end()
        self.hub.undo.close()

    def numbers(self) -> dict[str, float]:
        """Return the newest numbers by name, for Weights & Biases, TensorBoard or MLflow.

        ``lr/groupN`` is the group's rate of now, ``effective_lr/groupN`` that times the share of the
        update that was stored in the last sampled step. ``grad_norm`` is of the gradients that
        reached the last step; of shards, the last sampled one. ``frozen_tensors`` never moved, and
        ``untrained_tensors`` have a gradient and no optimizer. On several ranks, ``/min`` and
        ``/max`` of ``rank_loss``, and of ``rank_grad_norm``, the smallest tensor's before the sum.
        """
        numbers = dict(self.measured)
        rates = self._rates()
        for index, share in self.shares.items():
            if index in rates:
                numbers[f"lr/group{index}"] = rates[index]
                numbers[f"effective_lr/group{index}"] = rates[index] * share
        return numbers

    def step(
        self, loss: float | Tensor | None = None, *, grad_norm: float | Tensor | None = None
    ) -> None:
        """Watch the loss of a step too, after the optimizer's step.

        The call is optional. On several ranks, all of them make it.

        Args:
            loss: of this rank, in nats per token. Reading a tensor waits for its device.
            grad_norm: of all gradients, before the loop clips them.
        """
        self._count_call()
        told = Snapshot(self._step)
        if loss is not None:
            told.loss = loss.item() if isinstance(loss, Tensor) else loss
        if grad_norm is not None:
            self._read()
            told.unclipped = grad_norm.item() if isinstance(grad_norm, Tensor) else grad_norm
        self._tell(told)

    def _count_call(self) -> None:
        """Count a call of :meth:`step`, and report a loop that does not step."""
        self._num_calls += 1
        if self._num_calls == UNSTEPPED and not self.steppers.stepped() & {*self.optimizers}:
            words = f", and watch.step() was called {self._num_calls} times: does the loop step?"
            self.report(
                [KINDS["step-order"].case("never").reading("", self.backward.number, words=words)]
            )

    def _tell(self, told: Snapshot) -> None:
        """Read what the loop tells of its last step."""
        self.see(told)
        if told.loss is not None:
            self.unseen.pop("losses of ranks", None)
            if self._of_ranks is not None and is_sampled(self._step):
                now = self._of_ranks.compare_losses(told.loss, self._step)
                self._keep(now)
                self.see(now)

    # ── reports ───────────────────────────────────────────────────────────────────────────────────

    def see(self, now: Snapshot) -> None:
        """Let the laws read a snapshot, and report what is new."""
        self._report([*self.laws.read(now)])

    def report(self, readings: Iterable[Reading]) -> None:
        """Report what is new of readings that are no law's: they need tensors."""
        self._report([*self.laws.new(readings)])

    def _report(self, readings: list[Reading]) -> None:
        """Log readings, and say what is new of a kind: once, and again when it is twice as far
        beyond its bound.
        """
        fresh = []
        for reading in readings:
            self._log(reading)
            is_new = reading.excess > TWICE * self._told.get(reading.cause, -1.0)
            if reading.severity != "note" and (is_new or not reading.tensor):
                fresh.append(reading)
        for reading in fresh:
            self._told[reading.cause] = reading.excess
        if fresh:
            self._say(in_order(fresh))

    def _log(self, reading: Reading) -> None:
        """Pass a reading on. A watch without a folder writes nothing."""
        emit(reading)

    def _say(self, readings: list[Reading]) -> None:
        """Show the readings of one step in a sentence."""
        parts = []
        for reading in readings:
            words = reading.advice.rstrip(".")
            parts.append(words if reading.tensor in words else f"{reading.tensor}: {words}")
        step = readings[0].step
        # No line of the loop is at fault, so none is shown.
        words = f"step {step}: {'; '.join(parts)}"
        warnings.warn_explicit(words, RunNotice, "narrowgauge.watch", step)

    # ── the step ──────────────────────────────────────────────────────────────────────────────────

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the numbers of a step that has its gradients."""
        self._read()
        if len(members_of(*self.optimizers)) != self._num_members:
            self.take_up()
        if optimizer is self.optimizers[0]:
            self.now.rates = self._rates()
        self.now.count = None if self.goes_on else self._count()
        self.now.is_resumed = self.goes_on
        has_own_passes = len(self.optimizers) > 1 and not self.backward.is_shared
        self.now.is_game = has_own_passes or self.steppers.step_other_models(self.names)
        gradients = self.gradients(optimizer)
        self.now.is_repeated = self._is_repeated(optimizer, gradients)
        # Of torch.amp.GradScaler, for fused optimizers.
        scale = getattr(optimizer, "grad_scale", None)
        norms = norms_of([*gradients.values()])
        for name, norm in zip(gradients, norms, strict=True):
            self.numbers_of_step.add("gradient", norm if scale is None else norm / scale, name)

    def _is_repeated(self, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor]) -> bool:
        """Return whether a step has the gradients of the last one."""
        first = next(iter(gradients.values()), None)
        version = 0 if first is None else first._version
        present = self.forward.number, self.backward.number, id(first), version
        last = self._last.get(optimizer)
        self._last[optimizer] = present
        return self.backward.number > 0 and present == last

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the numbers of a step to the host."""
        numbers = self.numbers_of_step
        skipped = getattr(optimizer, "found_inf", None)
        if isinstance(optimizer, Optimizer) and optimizer.last_control is not None:
            numbers.add("clip", optimizer.last_control[0])
            skipped = optimizer.last_control[1]
        if skipped is not None:
            numbers.add("skipped", skipped)
        numbers.send(self.now)
        if optimizer is self.optimizers[-1]:
            self._step = self.now.step
            self.goes_on = False
        self.now = Snapshot(self._step + 1)
        if numbers.device.type == "cpu":
            self._read()
        if self._step == 3 and optimizer is self.optimizers[-1]:
            self._print_what_is_seen()

    def _read(self) -> None:
        """Let the laws read the snapshots whose numbers have reached the host."""
        for now, values in self.numbers_of_step.arrived():
            self._add_gradients(now, values["gradient"])
            bad_outputs = [name for name, x in values["output"].items() if not math.isfinite(x)]
            now.bad_output = next(iter(bad_outputs), "")
            if now.bad_output and not self._has_bad_output:
                self._has_bad_output = True
                now.bad_weight = nonfinite_weight(self.watched_model, now.bad_output)
            now.kept = [name for name, is_kept in values["kept"].items() if is_kept]
            now.num_cleared = int(values["cleared within"].get("", 0))
            if values["fresh"].get(""):
                now.num_equal = int(values["equal passes"].get("", 0)) + 1
            now.clip = values["clip"].get("", 1.0)
            if values["skipped"]:
                now.is_skipped = bool(values["skipped"][""])
            now.is_written = bool(values["written"].get(""))
            now.is_swapped = bool(values["swapped"].get(""))
            if now.weights:
                self.measured["frozen_tensors"] = sum(x != MOVED for x in now.weights.values())
            self._keep(now)
            self.see(now)

    def _keep(self, now: Snapshot) -> None:
        """Write a snapshot. A watch without a folder writes nothing."""

    def _add_gradients(self, now: Snapshot, norms: dict[str, float]) -> None:
        """Add the numbers of the gradients: all of them in sampled steps, else the exceptions."""
        now.norm = shortened(math.hypot(*norms.values()))
        bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
        now.bad = next(iter(bad), "")
        now.num_bad = len(bad)
        with_gradient = {name for name, norm in norms.items() if norm}
        now.first = [name for name in norms if name in with_gradient - self._reached]
        self._reached |= with_gradient
        if with_gradient and len(self.optimizers) == 1:
            now.zero = sorted(self._reached - with_gradient)
        if is_sampled(now.step):
            now.norms = {name: shortened(norm) for name, norm in norms.items()}
        if self.laws.facts.is_whole:
            now.whole_norm = now.norm
        if now.whole_norm is not None:
            self.measured["grad_norm"] = now.whole_norm

    def _print_what_is_seen(self) -> None:
        """Print one line: what is watched, and what is not."""
        if not self.forward.number and self.backward.number:
            parts = "modes, tensors without an optimizer, batches of ranks"
            self.unseen[parts] = "the model is not called itself: name what is with called="
        if self.hub.here.is_first:
            print(self.seen(), file=sys.stderr)

    def seen(self) -> str:
        """Return what is watched, and what is not, in one line."""
        line = f"watch: {counted(len(self.trained), 'tensor')}, rate, gradients"
        if self.forward.number:
            line += ", modes"
        if self.unseen:
            missing = [f"{area} ({why})" for area, why in self.unseen.items()]
            line += f"; not: {', '.join(missing)}"
        return line

    def _rates(self) -> dict[str, float]:
        """Return the learning rate of each group by its number, without those on a device."""
        rates = {}
        for number, _, group in self.groups():
            if isinstance(group.get("lr"), (int, float)):
                rates[number] = float(group["lr"])
        return rates

    def _count(self) -> float | None:
        """Return the count of steps in the first trained parameter's state, on the host; ``None``
        where all its moments were reset too.
        """
        if self._first is None:
            return None
        state = self.optimizer_of[self._first].state.get(self._first, {})
        step = state.get("step")
        if not isinstance(step, (int, float, Tensor)) or getattr(step, "is_cuda", False):
            return None
        if not step:
            moments = [x for x in state.values() if isinstance(x, Tensor) and x.ndim]
            if not any(bool(x.any()) for x in moments):
                return None
        return float(step)
