"""``narrowgauge.watch``: watch a training loop, and say nothing while all is well.

Hooks on the model and on the optimizer's step only read. The numbers of a step go to the host in
one vector: the norm of each gradient, the sum of each block's outputs, and some flags. A GPU's
vector is read one step later, so that nothing waits for it. Together they are one snapshot, which
the laws read (:mod:`narrowgauge.analysis.laws`). A watch has parts, which hear the loop too:
sampled steps, the leaves of the graph, and the ranks.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.laws import Laws
from narrowgauge.analysis.log import emit
from narrowgauge.analysis.reading import Reading, in_order, of_all
from narrowgauge.analysis.snapshot import MOVED, Facts, Snapshot, is_sampled, shortened
from narrowgauge.analysis.thresholds import LEAST_PROBE, MOST_PROBES, TWICE, UNSTEPPED
from narrowgauge.checks.float32_copy import is_called_from
from narrowgauge.checks.gradients import vocabulary_of
from narrowgauge.checks.manifest import master_of
from narrowgauge.checks.set_up import SetUp, set_up_of
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.gauges.hub import Hub, Listener, RunNotice
from narrowgauge.gauges.recording.leaves import Leaves, Steppers
from narrowgauge.gauges.recording.of_ranks import OfRanks
from narrowgauge.gauges.recording.sampled import Sampled
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import counted
from narrowgauge.spec.recipes import Recipe
from narrowgauge.torch_support.torch_hooks import members_of
from narrowgauge.torch_support.torch_names import (
    HostCopy,
    is_compiled_model,
    plain_name,
    unwrapped_model,
)

_BLOCK = re.compile(r"\D*(\d+(\.[^.]+)?)?")
"""Names of the modules whose outputs are summed: blocks and their parts, not the layers in these
parts.
"""


def _norms(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return norms, in float32 or wider: squares overflow in float16."""
    if not gradients:
        return ()
    wide = torch.float32
    parts = []
    for x in gradients:
        part = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        parts.append(part)
        wide = torch.promote_types(wide, part.dtype)
    return torch._foreach_norm(parts, 2, wide)


class Watch(Listener):
    """Hold the numbers of a watched loop; created by :func:`watch`.

    Attributes:
        hub: the hooks on the loop.
        unseen: what is not watched, and why.
        now: the snapshot of the step that comes, or is being taken.
        trained, names, optimizer_of: the parameters that the optimizers step.
        probe: the smallest of them.
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
        self._told: dict[str, float] = {}
        self._reached: set[str] = set()  # had a gradient other than zero
        self.take_up()
        self._step = 0
        self.now = Snapshot(1)
        self._num_passes = 0
        self._num_backward = 0
        self._num_calls = 0  # of step()
        # What goes to the host from the current step, and from steps before.
        self._flags: dict[tuple[str, str], Tensor] = {}
        self._unread: list[tuple[Snapshot, list[tuple[str, str]], HostCopy]] = []
        self._was_cleared: dict[Tensor, bool | Tensor] = {}
        # Of each optimizer's last step: passes before it, and its first gradient.
        self._last: dict[torch.optim.Optimizer, tuple[int, ...]] = {}
        self._has_bad_output = False
        self._first_gradient: Tensor | None = None  # of the probe, in the last sampled step
        self._after: Tensor | None = None  # the probe after the last step
        self._was_evaluated = False  # since then
        self.steppers = Steppers(self.optimizers)
        self._follow()
        self._follow_probes()
        self.laws = Laws(self._facts(max_grad_norm, ignore))
        self.sampled = Sampled(self)
        self._parts: list[Listener] = [self.sampled, Leaves(self)]
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

    def _follow(self) -> None:
        """Follow the blocks, and the modules that a mode changes."""
        model = self.watched_model
        blocks: set[str] = set()
        self._dropouts: list[nn.modules.dropout._DropoutNd] = []
        self._modal: list[nn.Module] = []
        for name, module in model.named_modules():
            if name and _BLOCK.fullmatch(plain_name(name)):
                blocks.add(name)
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                self._dropouts.append(module)
                self._modal.append(module)
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                self._modal.append(module)
        self.hub.follow_outputs(self, self._add_sum, self.undo, blocks)

    def _follow_probes(self) -> None:
        """Follow the smallest trained parameter of each optimizer."""
        trained = self.trained.values()
        unsharded = [p for p in trained if p.is_leaf and not is_sharded(p) and p.numel()]
        probes: dict[torch.optim.Optimizer, Tensor] = {}
        for p in sorted(unsharded, key=Tensor.numel):
            if not probes or len(self.optimizers) <= MOST_PROBES:
                probes.setdefault(self.optimizer_of[p], p)
        inside = dict.fromkeys(self.watched_model.parameters())
        for optimizer, p in probes.items():
            if p not in inside:  # a master: backward passes reach its weight
                weights = [q for q in inside if master_of(q, [p]) is not None]
                probes[optimizer] = [*weights, p][0]
        self._probes = probes
        self.probe = next(iter(probes.values()), None)
        for p in probes.values():
            self.hub.follow_gradients(self, partial(self._see_gradient, p), self.undo, p)

    def _facts(self, limit: float | None, ignore: Collection[str]) -> Facts:
        model = self.watched_model
        epsilon = 0.0
        if limit is not None:
            epsilon = max(torch.finfo(p.dtype).eps for p in self.names)
        things = of_all(f"dropout {m.p:g}" for m in self._dropouts)
        if self._modal and not things:
            things = "batch statistics"
        is_whole = not self.is_sharded or self.hub.here.size == 1
        rates = {}
        for number, _, group in self.groups():
            rate = group.get("initial_lr", group.get("lr"))
            if isinstance(rate, (int, float)):
                rates[number] = float(rate)
        facts = Facts(
            len(self.optimizers), self.hub.here.size, vocabulary_of(model), limit, is_whole,
            epsilon, things, tuple(ignore), rates,
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
        self._unread = []

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
            self.report([KINDS["never-steps"].reading("", self._num_backward, words=words)])

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
            is_new = reading.excess > TWICE * self._told.get(reading.what, -1.0)
            if reading.severity != "note" and (is_new or not reading.tensor):
                fresh.append(reading)
        for reading in fresh:
            self._told[reading.what] = reading.excess
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

    # ── forward and backward ──────────────────────────────────────────────────────────────────────

    def drops_out(self) -> bool:
        """Return whether a dropout is in training mode."""
        return any(dropout.training for dropout in self._dropouts)

    def before_evaluation(self) -> None:
        """Note the mode of a pass without gradients. One in training mode may be part of a step."""
        if is_called_from(swa_utils.__file__, "update_bn"):
            return  # which must run in training mode
        _add(self.now.evaluations, self.drops_out())
        self.now.is_evaluated |= not self.watched_model.training
        self._was_evaluated |= not self.watched_model.training

    def before_pass(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note the mode of a pass."""
        self._num_passes += 1
        is_training = module.training or any(part.training for part in self._modal)
        _add(self.now.modes, is_training)
        self.now.num_dropping = sum(dropout.training for dropout in self._dropouts)

    def _add_sum(self, name: str, x: Tensor) -> None:
        if torch.is_grad_enabled() and x.element_size() > 1:
            total = x.sum(dtype=torch.float32)
            before = self._flags.get(("output", name))
            self._flags["output", name] = total if before is None else before + total

    def _see_gradient(self, probe: Tensor, gradient: Tensor) -> None:
        """See one backward pass, before its gradient is added to the last one."""
        last = probe.grad
        is_cleared: bool | Tensor = True
        if last is not None and last.layout is torch.strided:
            is_cleared = ~last.any()
        self._was_cleared[probe] = self._was_cleared.get(probe, False) | is_cleared
        if probe is not self.probe:
            return
        self._num_backward += 1
        self.now.num_backward += 1
        if self.now.num_backward > 1:
            self._add_flag("cleared within", is_cleared)
        if is_sampled(self.now.step) and probe.numel() >= LEAST_PROBE:
            self._compare_pass(gradient)
        if self._num_backward == UNSTEPPED and self._step == 0:
            # Several micro-batches make one step, so another optimizer must have stepped.
            stepped = self.steppers.stepped()
            if stepped and stepped.isdisjoint(self.optimizers):
                names = of_all(type(optimizer).__name__ for optimizer in stepped)
                words = f", and another one has ({names}): watch the one that steps"
                self.report([KINDS["never-steps"].reading("", UNSTEPPED, words=words)])

    def _compare_pass(self, gradient: Tensor) -> None:
        """Count the passes of a sampled step with the gradient of its first pass, where this is not
        that of the sampled step before.
        """
        first = self._first_gradient
        is_alike = first is not None and first.shape == gradient.shape
        if self.now.num_backward == 1:
            if first is not None and is_alike:
                self._add_flag("fresh", (gradient != first).any())
            self._first_gradient = gradient.clone()
        elif first is not None and is_alike:
            self._add_flag("equal passes", (gradient == first).all() & first.any())

    def _add_flag(self, what: str, flag: bool | Tensor) -> None:
        """Count how often a flag is raised in this step, on the device."""
        device = next(iter(self.names)).device
        count = torch.as_tensor(flag, dtype=torch.float32, device=device)
        self._flags[what, ""] = count + self._flags.get((what, ""), 0.0)

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
        gradients = self.gradients(optimizer)
        self.now.is_repeated = self._is_repeated(optimizer, gradients)
        # Of torch.amp.GradScaler, for fused optimizers.
        scale = getattr(optimizer, "grad_scale", None)
        norms = _norms([*gradients.values()])
        for name, norm in zip(gradients, norms, strict=True):
            self._flags["gradient", name] = norm if scale is None else norm / scale
        probe = self._probes.get(optimizer)
        if probe is None:
            return
        if probe in self._was_cleared and self._step > 0:
            name = self.name(probe) if len(self._probes) > 1 else ""
            is_cleared = torch.as_tensor(self._was_cleared[probe], device=probe.device)
            self._flags["cleared", name] = is_cleared
        if probe is self.probe and self._after is not None:
            is_written = ((probe != self._after) & (self._after == self._after)).any()
            self._flags["swapped" if self._was_evaluated else "written", ""] = is_written
            self._was_evaluated = False

    def _is_repeated(self, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor]) -> bool:
        """Return whether a step has the gradients of the last one."""
        first = next(iter(gradients.values()), None)
        version = 0 if first is None else first._version
        present = self._num_passes, self._num_backward, id(first), version
        last = self._last.get(optimizer)
        self._last[optimizer] = present
        return self._num_backward > 0 and present == last

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the numbers of a step to the host."""
        skipped = getattr(optimizer, "found_inf", None)
        if isinstance(optimizer, Optimizer) and optimizer.last_control is not None:
            self._flags["clip", ""] = optimizer.last_control[0]
            skipped = optimizer.last_control[1]
        if skipped is not None:
            self._flags["skipped", ""] = skipped.reshape(())
        device = next(iter(self.names)).device
        flags = []
        for x in self._flags.values():
            # A cast costs more than a test.
            is_ready = x.dtype is torch.float32 and x.device == device
            flags.append(x if is_ready else x.to(device, torch.float32))
        vector = torch.stack(flags) if flags else torch.zeros(0, device=device)
        self._unread.append((self.now, list(self._flags), HostCopy(vector)))
        self._flags = {}
        probe = self._probes.get(optimizer)
        if probe is not None:
            self._was_cleared.pop(probe, None)
            if probe is self.probe:
                self._after = probe.detach().clone()
        if optimizer is self.optimizers[-1]:
            self._step = self.now.step
            self.goes_on = False
        self.now = Snapshot(self._step + 1)
        if device.type == "cpu":
            self._read()
        if self._step == 3 and optimizer is self.optimizers[-1]:
            self._print_what_is_seen()

    def _read(self) -> None:
        """Let the laws read the snapshots whose numbers have reached the host."""
        unread = self._unread
        self._unread = []
        for now, keys, copied in unread:
            values: dict[str, dict[str, float]] = defaultdict(dict)
            for (kind, name), value in zip(keys, copied.cpu().tolist(), strict=True):
                values[kind][name] = value
            self._add_gradients(now, values["gradient"])
            bad_outputs = [name for name, x in values["output"].items() if not math.isfinite(x)]
            now.bad_output = next(iter(bad_outputs), "")
            if now.bad_output and not self._has_bad_output:
                self._has_bad_output = True
                now.bad_weight = _nonfinite_weight(self.watched_model, now.bad_output)
            now.kept = [name for name, is_cleared in values["cleared"].items() if not is_cleared]
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
        if not self._num_passes and self._num_backward:
            parts = "modes, tensors without an optimizer, batches of ranks"
            self.unseen[parts] = "the model is not called itself: name what is with called="
        if self.hub.here.is_first:
            print(self.seen(), file=sys.stderr)

    def seen(self) -> str:
        """Return what is watched, and what is not, in one line."""
        line = f"watch: {counted(len(self.trained), 'tensor')}, rate, gradients"
        if self._num_passes:
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


def _add(modes: list[bool], mode: bool) -> None:
    if mode not in modes:
        modes.append(mode)


def _nonfinite_weight(model: nn.Module, name: str) -> str:
    """Return the first weight of a module that is not finite; empty if all are.

    It waits for the device.
    """
    for inner, module in model.named_modules():
        if plain_name(inner) == name:
            for parameter, p in module.named_parameters():
                if not bool(local_of(p).isfinite().all()):
                    return str(parameter)
    return ""
