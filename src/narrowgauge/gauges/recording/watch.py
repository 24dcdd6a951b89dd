"""``narrowgauge.watch``: watch a training loop, and say nothing while all is well.

Hooks on the model and on the optimizer's step only read. The numbers of a step go to the host in
one vector: the norm of each gradient, the sum of each block's outputs, and some flags. A GPU's
vector is read one step later, so that nothing waits for it. On some *sampled* steps the intended
update is computed too (:mod:`narrowgauge.gauges.recording.intended_updates`).
"""

from __future__ import annotations

import itertools
import math
import re
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.utils._pytree import tree_leaves

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, in_order, of_all
from narrowgauge.analysis.thresholds import (
    EVALUATIONS_APART,
    LOSS_APART,
    MOST_PROBES,
    SETTLED,
    TWICE,
    UNIFORM_STEPS,
    UNSTEPPED,
)
from narrowgauge.checks.float32_copy import is_called_from
from narrowgauge.checks.gradients import has_own_batches, vocabulary_of, weights_of_ranks
from narrowgauge.checks.set_up import SetUp, set_up_of
from narrowgauge.checks.step_samples import evenly_spread, weight_of
from narrowgauge.distributed.replica_verification import unlike
from narrowgauge.gauges.hub import Hub, Listener, RunNotice
from narrowgauge.gauges.recording.intended_updates import IntendedStep, on_host
from narrowgauge.gauges.recording.leaves import Averages, copies_of, names_of
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of
from narrowgauge.numerics.hashing import fingerprint_all
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import counted
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.torch_hooks import after_every_step, members_of
from narrowgauge.torch_support.torch_names import (
    HostCopy,
    graph_nodes,
    is_compiled_model,
    plain_name,
    unwrapped_model,
)

_BLOCK = re.compile(r"\D*(\d+(\.[^.]+)?)?")
"""Names of the modules whose outputs are summed: blocks and their parts, not the layers in these
parts.
"""
_LEAST_SHARE = 1e-6
"""Of the largest gradient's norm. A smaller gradient may be rounding alone, as that of a bias before a batch norm."""
_CLOCK = itertools.count()
_LAST_STEPS: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""When each optimizer of this process stepped last, since the first watch: a reading of the clock."""


class _Interval(NamedTuple):
    """Counts of passes and of backward passes up to an optimizer's last step, and the first
    gradient of that step.
    """

    num_passes: int = 0
    num_backward: int = 0
    gradient: tuple[int, int] = (0, 0)


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
        is_ended: the hooks are removed.
    """

    title = "the watch"
    is_ended = False

    def __init__(
        self, model: nn.Module, optimizer: Any, *, every: int = 50, called: nn.Module | None = None
    ) -> None:
        self.optimizers = set_up_of(model, optimizer).optimizers
        inner = unwrapped_model(model)
        self.watched_model = inner
        self.every = every
        if called is None:
            # A compiler skips hooks inside the model that it compiles.
            called = model if is_compiled_model(model) else inner
        self.hub = Hub(inner, self.optimizers, called)
        self.unseen: dict[str, str] = {}
        self._undo = ExitStack()
        self._here = self.hub.here
        self._is_sharded = any(is_sharded(p) for p in inner.parameters())
        if self._is_sharded:
            for part in ("tensors without an optimizer", "gradients that were not cleared"):
                self.unseen[part] = "parameters are sharded"
        if self._here.size > 1:
            self.unseen["losses of ranks"] = "watch.step(loss) was not called"
        self._names: dict[Tensor, str] = {}
        self._trained: dict[str, Tensor] = {}
        self._optimizer_of: dict[Tensor, torch.optim.Optimizer] = {}
        self._since: dict[str, int] = {}
        self._start: dict[str, Tensor] = {}
        self._moved: dict[str, Tensor] = {}
        self._shares: dict[Tensor, list[float]] = {}
        self._step = 0
        self._numbers: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._has_moved: set[str] = set()
        self._had_gradient: set[str] = set()
        self._had_more: set[str] = set()  # than rounding of the others' gradients
        self._is_bad = False
        self._num_zero = 0
        self._num_uniform = 0
        self._num_overflows = 0
        self._take_up()
        # Of the current step:
        self._num_passes = 0
        self._num_backward = 0
        self._intervals = dict.fromkeys(self.optimizers, _Interval())
        self._sums: dict[str, Tensor] = {}
        self._square: tuple[int, Tensor | float] = -1, 0.0
        self._flags: dict[str, Tensor] = {}
        self._modes: set[bool] = set()
        self._num_dropping = 0
        self._evaluations: set[bool] = set()
        self._was_cleared: dict[Tensor, bool | Tensor] = {}
        self._intended: IntendedStep | None = None
        self._frozen: dict[Tensor, Tensor] = {}
        # Between steps:
        self._unread: list[tuple[int, list[str], HostCopy]] = []
        self._num_calls = 0  # of step()
        self._is_evaluated = False
        self._was_evaluated = False
        self._has_own_writes = False
        self._num_evaluated = 0
        self._num_dropped = 0
        self._after: Tensor | None = None
        self._leaves: dict[int, tuple[weakref.ref[Tensor], Tensor, set[int]]] = {}
        self._hashes: tuple[str, str] | None = None
        self._averages: Averages | None = None
        self._follow()

    def _start_samples(self) -> None:
        """Compare with the weights of now from here on."""
        for name in self._trained:
            self._start_sample(name)

    def _start_sample(self, name: str) -> None:
        self._start[name] = self._elements(name)
        self._moved[name] = torch.zeros_like(self._start[name], dtype=torch.bool)

    def _take_up(self) -> None:
        """Watch what the optimizers step now: parameters may be added, or thawed, while the loop
        runs.
        """
        set_up = SetUp(self.watched_model, self.optimizers)
        self._num_members = len(members_of(*self.optimizers))
        for stepped in set_up.stepped:
            self._names[stepped.parameter] = stepped.name
            self._optimizer_of[stepped.parameter] = stepped.optimizer
        trained = {p.name: p.parameter for p in set_up.trained}
        for name, p in trained.items():
            if self._trained.get(name) is not p:
                self._trained[name] = p
                self._since[name] = self._step
                self._start_sample(name)
        for name in self._trained.keys() - trained.keys():
            del self._trained[name], self._start[name], self._moved[name]

    def _elements(self, name: str) -> Tensor:
        """Copy spread elements of the stored weight, on its device."""
        p = self._trained[name]
        return evenly_spread(weight_of(self._optimizer_of[p], p)).clone()

    def _follow(self) -> None:
        """Follow the blocks and the smallest trained parameter of each optimizer."""
        self._began = next(_CLOCK)
        after_every_step(_remember)
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
        self.hub.follow_outputs(self, self._add_sum, self._undo, blocks)
        trained = self._trained.values()
        unsharded = [p for p in trained if p.is_leaf and not is_sharded(p) and p.numel()]
        self._probe: Tensor | None = min(unsharded, key=Tensor.numel, default=None)
        self._probes: dict[torch.optim.Optimizer, Tensor] = {}
        for p in sorted(unsharded, key=Tensor.numel):
            self._probes.setdefault(self._optimizer_of[p], p)
        if self._probe is not None and len(self._probes) > MOST_PROBES:
            self._probes = {self._optimizer_of[self._probe]: self._probe}
        for p in self._probes.values():
            self.hub.follow_gradients(self, partial(self._see_gradient, p), self._undo, p)
        self._vocabulary = vocabulary_of(model)
        self.hub.listeners.append(self)

    def end(self) -> None:
        """End the watch; other listeners go on."""
        self.is_ended = True
        self._undo.close()

    def remove(self) -> None:
        """Remove every hook."""
        self.end()
        self.hub.undo.close()

    def numbers(self) -> dict[str, float]:
        """Return the newest numbers by name, for Weights & Biases, TensorBoard or MLflow.

        ``lr/groupN`` and ``effective_lr/groupN`` are of the last sampled step, ``grad_norm`` is of
        this rank's gradients that reached the last step. ``frozen_tensors`` never moved, and
        ``untrained_tensors`` have a gradient and no optimizer. On several ranks, ``/min`` and
        ``/max`` of ``rank_loss``, and of ``rank_grad_norm``, the smallest tensor's before the sum.
        """
        return dict(self._numbers)

    def step(self, loss: float | Tensor | None = None) -> None:
        """Watch the loss of a step too, after the optimizer's step.

        The call is optional. On several ranks, all of them make it.

        Args:
            loss: of this rank, in nats per token. Reading a tensor waits for its device.
        """
        self._num_calls += 1
        if self._num_calls == UNSTEPPED and not self._stepped() & {*self.optimizers}:
            words = f", and watch.step() was called {self._num_calls} times: does the loop step?"
            self._report([KINDS["never-steps"].reading("", self._num_backward, words=words)])
        if loss is not None:
            self.unseen.pop("losses of ranks", None)
            if isinstance(loss, Tensor):
                loss = loss.item()
            self._report(self._loss_readings(loss))

    # ── reports ───────────────────────────────────────────────────────────────────────────────────

    def _report(self, readings: Iterable[Reading]) -> None:
        """Say what is new: each kind once, and again when it is twice as far beyond its bound."""
        fresh = []
        for reading in readings:
            reported = self._told.get(reading.what)
            if reported is None or reading.excess > TWICE * reported:
                fresh.append(reading)
        for reading in fresh:
            self._told[reading.what] = reading.excess
        if fresh:
            self._say(in_order(fresh))

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

    def before_evaluation(self) -> None:
        """Note the mode of a pass without gradients. One in training mode may be part of a step."""
        if is_called_from(swa_utils.__file__, "update_bn"):
            return  # which must run in training mode
        self._evaluations.add(_trains(self._dropouts))
        self._is_evaluated |= not self.watched_model.training

    def before_pass(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note the mode of a pass, and hash the first batch on several ranks."""
        self._num_passes += 1
        self._modes.add(module.training or _trains(self._modal))
        self._num_dropping = sum(dropout.training for dropout in self._dropouts)
        if self._here.size == 1 or self._step != 1 or self._hashes is not None:
            return
        batch = {}
        for place, x in enumerate(tree_leaves(inputs)):
            if isinstance(x, Tensor) and x.element_size() <= 8:
                batch[str(place)] = x
        device = next(module.parameters()).device
        state = torch.get_rng_state()
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device)
        self._hashes = (
            fingerprint_all(batch) if batch else "",
            fingerprint_all({"": state}) if _trains(self._dropouts) else "",
        )

    def after_pass(self, output: Any) -> None:
        """Walk the graph to its leaves in two steps, and remember those that the optimizers do not
        step.
        """
        # The leaves of sharded parameters are gathered copies.
        if self._since_walk() >= 2 or self._is_sharded:
            return
        for node in graph_nodes(output):
            leaf = getattr(node, "variable", None)
            if not isinstance(leaf, Tensor) or leaf in self._names:
                continue
            reference, values, steps = self._leaves.get(id(leaf), (None, None, set[int]()))
            if reference is None or reference() is not leaf or values is None:
                values = evenly_spread(leaf).clone()
                steps = set()
            self._leaves[id(leaf)] = weakref.ref(leaf), values, steps | {self._step}

    def _since_walk(self) -> int:
        """Return the steps since the last one in which walks to the leaves began: the first one,
        and later ones, since parameters may be thawed while the loop runs.
        """
        if self.every == 0 or self._step < SETTLED:
            return self._step
        return self._step % max(self.every, SETTLED)

    def _add_sum(self, name: str, x: Tensor) -> None:
        if torch.is_grad_enabled() and x.element_size() > 1:
            total = x.sum(dtype=torch.float32)
            self._sums[name] = total if name not in self._sums else self._sums[name] + total

    def _see_gradient(self, probe: Tensor, gradient: Tensor) -> None:
        """See one backward pass, before its gradient is added to the last one."""
        last = probe.grad
        is_cleared: bool | Tensor = True
        if last is not None and last.layout is torch.strided:
            is_cleared = ~last.any()
        self._was_cleared[probe] = self._was_cleared.get(probe, False) | is_cleared
        if probe is not self._probe:
            return
        self._num_backward += 1
        if self._num_backward == UNSTEPPED and self._step == 0:
            # Several micro-batches make one step, so another optimizer must have stepped.
            stepped = self._stepped()
            unwatched = stepped.difference(self.optimizers)
            if unwatched and unwatched == stepped:
                names = of_all(type(optimizer).__name__ for optimizer in unwatched)
                words = f", and another one has ({names}): watch the one that steps"
                self._report([KINDS["never-steps"].reading("", UNSTEPPED, words=words)])
        if self._here.size > 1 and self._is_sampled(self._step + 1):
            # The ranks' gradients are not summed yet.
            step, square = self._square
            if step != self._step:
                square = 0.0
            self._square = self._step, gradient.float().square().sum() + square

    # ── the step ──────────────────────────────────────────────────────────────────────────────────

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the flags of a step that has its gradients."""
        self._read()
        step = self._step + 1
        is_sampled = self._is_sampled(step)
        if is_sampled or len(members_of(*self.optimizers)) != self._num_members:
            self._take_up()
        if optimizer is self.optimizers[0]:
            self._report(self._pass_readings(step))
        gradients = self._gradients(optimizer)
        last = self._intervals[optimizer]
        signature = (0, 0)
        for first in [*gradients.values()][:1]:
            signature = id(first), first._version
        interval = _Interval(self._num_passes, self._num_backward, signature)
        self._intervals[optimizer] = interval
        if last.num_backward and interval == last:
            self._report([KINDS["repeated-step"].reading("", 1, 0, step=step)])
        self._flags = {f"output:{name}": x for name, x in self._sums.items()}
        self._sums = {}
        norms = _norms([*gradients.values()])
        # Of torch.amp.GradScaler, for fused optimizers.
        scale = getattr(optimizer, "grad_scale", None)
        for name, norm in zip(gradients, norms, strict=True):
            self._flags[f"grad:{name}"] = norm if scale is None else norm / scale
        probe = self._probes.get(optimizer)
        if probe in self._was_cleared and step > 1:
            is_cleared = self._was_cleared[probe]
            name = ""
            if len(self._probes) > 1:
                name = self._name(probe)
            self._flags[f"cleared:{name}"] = torch.as_tensor(is_cleared, device=probe.device)
        if probe is self._probe and self._after is not None:
            is_written = ((probe != self._after) & (self._after == self._after)).any()
            self._flags["swapped" if self._was_evaluated else "written"] = is_written
        if is_sampled:
            self._frozen = {p: evenly_spread(p).clone() for p in self._names if not p.requires_grad}
            self._intended = None if isinstance(optimizer, Optimizer) else IntendedStep(optimizer)

    def _gradients(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
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
                gradients[self._name(p)] = part if is_dense else part.coalesce().values()
        return gradients

    def _name(self, p: Tensor) -> str:
        return self._names.get(p, "a new tensor")

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the flags of a step to the host, and read a sampled step."""
        step = self._step + 1
        skipped = getattr(optimizer, "found_inf", None)
        if isinstance(optimizer, Optimizer) and optimizer.last_control is not None:
            skipped = optimizer.last_control[1]
        if skipped is not None:
            self._flags["skipped"] = skipped.reshape(())
        device = next(iter(self._names)).device
        flags = []
        for x in self._flags.values():
            # A cast costs more than a test.
            is_ready = x.dtype is torch.float32 and x.device == device
            flags.append(x if is_ready else x.to(device, torch.float32))
        vector = torch.stack(flags) if flags else torch.zeros(0, device=device)
        self._unread.append((step, list(self._flags), HostCopy(vector)))
        probe = self._probes.get(optimizer)
        if probe is not None:
            self._was_cleared.pop(probe, None)
            if probe is self._probe:
                self._after = probe.detach().clone()
        if self._is_sampled(step):
            self._report(self._sampled_readings(optimizer, step))
        if device.type == "cpu":
            self._read()
        if optimizer is self.optimizers[-1]:
            self._step = step
            if step == 2 and self._here.size > 1:
                self._report(self._rank_readings(step))
            if step == 3:
                self._print_what_is_seen()

    def _print_what_is_seen(self) -> None:
        """Print one line: what is watched, and what is not."""
        if not self._num_passes and self._num_backward:
            parts = "modes, tensors without an optimizer, batches of ranks"
            self.unseen[parts] = "the model is not called itself: name what is with called="
        if self._here.is_first:
            print(self.seen(), file=sys.stderr)

    def seen(self) -> str:
        """Return what is watched, and what is not, in one line."""
        line = f"watch: {counted(len(self._trained), 'tensor')}, rate, gradients"
        if self._num_passes:
            line += ", modes"
        if self.unseen:
            missing = [f"{area} ({why})" for area, why in self.unseen.items()]
            line += f"; not: {', '.join(missing)}"
        return line

    def _is_sampled(self, step: int) -> bool:
        return self.every > 0 and (step == 2 or step % self.every == 0)

    def _pass_readings(self, step: int) -> Iterator[Reading]:
        """Read the modes of the passes since the last step, and after two steps with walks the
        leaves that no optimizer steps.
        """
        things = of_all(f"dropout {m.p:g}" for m in self._dropouts) or "batch statistics"
        self._was_evaluated = self._is_evaluated
        self._is_evaluated = False
        self._num_evaluated += bool(self._evaluations)
        kind = KINDS["wrong-mode"]
        if self._modal and self._modes == {False}:
            words = f"the model trains in evaluation mode, without {things}: call model.train()"
            yield kind.reading("", 1, 0, step=step, words=words)
        elif self._was_evaluated and 0 < self._num_dropping < self._num_dropped:
            left = self._num_dropped - self._num_dropping
            words = f"an evaluation left {left} of {counted(self._num_dropped, 'dropout')} in"
            words += " evaluation mode: call model.train() after it"
            yield kind.reading("", left, 0, step=step, words=words)
        self._num_dropped = self._num_dropping
        # A loop with such passes in most steps means them.
        if self._evaluations == {True} and step >= EVALUATIONS_APART * self._num_evaluated:
            words = f"the evaluation ran in training mode, with {things}: call model.eval() before"
            yield kind.reading("", 1, 0, step=step - 1, words=f"{words} it")
        self._modes = set()
        self._evaluations = set()
        if self._since_walk() == 2:
            yield from self._leaf_readings(step)

    def _stepped(self) -> set[torch.optim.Optimizer]:
        """Return the optimizers that have stepped since this watch began, its own ones among
        them. Those that stepped only before may belong to another loop.
        """
        return {optimizer for optimizer, last in _LAST_STEPS.items() if last > self._began}

    def _stepped_by_others(self) -> Iterator[list[str]]:
        """Yield the names of the parameters that each other optimizer steps too.

        Wrappers are left out.
        """
        ours = set(map(id, self.optimizers))
        for optimizer in self.optimizers:
            ours.update(map(id, optimizer.param_groups))
        for unwatched in self._stepped().difference(self.optimizers):
            names = [self._names[p] for p in members_of(unwatched) if p in self._names]
            if names and ours.isdisjoint(
                map(id, (*unwatched.param_groups, *vars(unwatched).values()))
            ):
                yield names

    def _leaf_readings(self, step: int) -> Iterator[Reading]:
        stepped = {*members_of(*self._stepped())}
        leaves = []
        for reference, values, steps in self._leaves.values():
            leaf = reference()
            if leaf is None or leaf.grad is None or leaf in stepped or len(steps) < 2:
                continue
            if torch.equal(evenly_spread(leaf), values):
                leaves.append(leaf)
        self._leaves = {}
        self._numbers["untrained_tensors"] = len(leaves)
        yield from KINDS["missing-parameters"].of(names_of(self.watched_model, leaves), step)
        for names in self._stepped_by_others():
            yield from KINDS["parameters-twice"].of(names, step)

    def _read(self) -> None:
        for step, keys, copied in self._unread:
            values = dict(zip(keys, copied.cpu().tolist(), strict=True))
            self._report(self._value_readings(step, values))
        self._unread = []

    def _value_readings(self, step: int, values: dict[str, float]) -> Iterator[Reading]:
        self._has_own_writes |= bool(values.pop("written", 0.0))
        if values.pop("swapped", 0.0) and not self._has_own_writes:
            yield KINDS["weights-not-restored"].reading("", 1, 0, step=step - 1)
        is_skipped = bool(values.pop("skipped", 0.0))
        norms = {}
        outputs = []
        gradients = []
        for key, value in values.items():
            kind, _, name = key.partition(":")
            if kind == "cleared":
                if not value:
                    yield KINDS["gradients-kept"].reading(name, 1, 0, step=step)
            elif kind == "grad":
                norms[name] = value
                if not math.isfinite(value):
                    gradients.append(name)
            elif not math.isfinite(value):
                outputs.append(name)
        yield from self._nonfinite_readings(step, outputs, gradients, is_skipped)
        if not is_skipped:
            least = _LEAST_SHARE * max(norms.values(), default=0.0)
            for name, norm in norms.items():
                if 0 < norm < math.inf:
                    self._had_gradient.add(name)
                if norm > least:
                    self._had_more.add(name)
        self._num_zero += 1
        if any(norms.values()):
            self._num_zero = 0
        zero = KINDS["zero-gradients"]
        if self._num_zero == zero.bound:
            yield zero.reading("", self._num_zero, step=step)
        self._numbers["grad_norm"] = math.hypot(*norms.values())

    def _nonfinite_readings(
        self, step: int, outputs: list[str], gradients: list[str], is_skipped: bool
    ) -> Iterator[Reading]:
        """Read the first place that is not finite, once: it makes all later ones so."""
        was_bad = self._is_bad
        self._is_bad |= bool(outputs or (gradients and not is_skipped))
        kind = KINDS["first-nonfinite"]
        self._num_overflows += 1
        if not gradients or not is_skipped:
            self._num_overflows = 0
        if was_bad:
            return
        if outputs:
            bad_weights = _nonfinite_weights(self.watched_model, outputs[0])
            words = ", at finite weights"
            if bad_weights:
                words = f", at weights that are not finite ({bad_weights})"
            output = KINDS["nonfinite-output"]
            yield output.reading(outputs[0], math.nan, step=step, words=words)
        if self._num_overflows == kind.bound:
            words = f", in {self._num_overflows} skipped steps in a row"
            yield kind.reading(gradients[0], self._num_overflows, step=step, words=words)
        elif gradients and not is_skipped and not outputs:
            words = f", of {counted(len(gradients), 'tensor')}, and the optimizer took the step"
            yield kind.reading(gradients[0], len(gradients), 0, 0, step, words=words)

    # ── sampled steps ─────────────────────────────────────────────────────────────────────────────

    def _sampled_readings(self, optimizer: torch.optim.Optimizer, step: int) -> Iterator[Reading]:
        index = 0
        for earlier in self.optimizers[: self.optimizers.index(optimizer)]:
            index += len(earlier.param_groups)
        sums = self._sums_of(optimizer)
        for group in optimizer.param_groups:
            members = [p for p in group["params"] if p in sums and sums[p][0] > 0]
            if group["lr"] is None:
                self.unseen["effective learning rate"] = "a group has no lr"
            elif members:
                yield from self._rate_readings(optimizer, step, index, group, members, sums)
            index += 1
        yield from self._moved_readings(optimizer, step)
        if optimizer is self.optimizers[-1]:
            if self._averages is None:
                copies = copies_of(self.watched_model)
                self._averages = Averages(copies, self._trained, step)
            start = {name: self._start[name] for name in self._has_moved}
            stepped = members_of(*self._stepped())
            yield from self._averages.readings(step, start, self._elements, stepped)

    def _rate_readings(
        self,
        optimizer: torch.optim.Optimizer,
        step: int,
        index: int,
        group: dict[str, Any],
        members: list[Tensor],
        sums: dict[Tensor, list[float]],
    ) -> Iterator[Reading]:
        """Read the rate at which a group really trains: lr times the stored share of its update."""
        rate = float(group["lr"])
        intended = 0.0
        stored = 0.0
        variance = 0.0
        for p in members:
            intended += sums[p][0]
            stored += sums[p][1]
            variance += sums[p][2]
        share = stored / intended
        error = 3 * math.sqrt(variance) / intended
        worst = min(members, key=lambda p: sums[p][1] / sums[p][0])
        self._numbers[f"lr/group{index}"] = rate
        self._numbers[f"effective_lr/group{index}"] = rate * share
        kind = KINDS["effective-rate"]
        # Our audit has alarms of its own.
        if share + error < kind.bound and not isinstance(optimizer, Optimizer):
            yield kind.reading(
                "", rate * share, None, kind.bound * rate, step, rate=rate, share=share,
                format=dtype_name(worst.dtype), worst=self._name(worst), least=sums[worst][1] / sums[worst][0],
            )  # fmt: skip

    def _sums_of(self, optimizer: torch.optim.Optimizer) -> dict[Tensor, list[float]]:
        """Return ⟨D,D⟩, ⟨D,E⟩ and its variance of each tensor, from our audit or from the repeated
        step.
        """
        area = "effective learning rate"
        sums: dict[Tensor, list[float]] = {}
        if isinstance(optimizer, Optimizer):
            optimizer.settle()
            if not optimizer.audit_every:
                self.unseen[area] = "audit_every is 0"
            for p, rows in optimizer.auditor.windows.items():
                sums[p] = [*rows[:, :2].sum(0).tolist(), 0.0]
            return sums
        assert self._intended is not None
        sums, unrepeated = self._intended.sums()
        if self._intended.why_not:
            self.unseen[area] = self._intended.why_not
        elif unrepeated:
            names = of_all(map(self._name, unrepeated))
            self.unseen[area] = f"the step of {names} is not repeated by a copy"
        for p, values in sums.items():
            if values[2]:  # one sample of stochastic rounding is noise: take all
                before = self._shares.get(p, [0.0, 0.0, 0.0])
                self._shares[p] = [a + b for a, b in zip(before, values, strict=True)]
            sums[p] = self._shares.get(p, values)
        return sums

    def _moved_readings(self, optimizer: torch.optim.Optimizer, step: int) -> Iterator[Reading]:
        for name, p in self._trained.items():
            if self._optimizer_of[p] is optimizer:
                now = self._elements(name)
                if now.shape == self._start[name].shape:
                    self._moved[name] |= now != self._start[name]
        changes = {}
        for p, values in self._frozen.items():
            if not p.requires_grad:
                changes[self._names[p]] = evenly_spread(p) != values
        tensors = self._moved | changes
        flags = dict(zip(tensors, on_host([x.any() for x in tensors.values()]), strict=True))
        yield from KINDS["frozen-moves"].of([name for name in changes if flags[name]], step)
        still = [name for name, x in self._moved.items() if x.numel() and not flags[name]]
        without = [name for name in self._trained if name not in self._had_gradient]
        self._has_moved = self._trained.keys() - {*still}
        self._numbers["frozen_tensors"] = len(still)
        self._numbers["tensors_without_gradient"] = len(without)
        if optimizer is self.optimizers[-1]:
            yield from self._still_readings(step, still, without)

    def _still_readings(self, step: int, still: list[str], without: list[str]) -> Iterator[Reading]:
        """Read the tensors without a change, and those without a gradient."""
        count = len(self._trained)
        idle = []
        lost = []
        for name in without:
            if step - self._since[name] < SETTLED:
                continue
            if name in self._has_moved:
                idle.append(name)
            else:
                lost.append(name)
        yield from KINDS["idle-moves"].of(idle, step)
        if self._num_passes and len(lost) < count:
            words = f" in {step} steps"
            yield from KINDS["no-gradient"].of(lost, step, count=count, words=words)
        unmoving: set[Tensor] = set()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if group["lr"] == 0:
                    unmoving.update(group["params"])
        at_zero = []
        rounded = []
        for name in still:
            if step - self._since[name] < SETTLED or name in lost:
                continue
            if self._trained[name] in unmoving:
                at_zero.append(name)
            elif name in self._had_more:
                rounded.append(name)
        kind = KINDS["never-moved"]
        cause = "the learning rate of the group is 0"
        yield from kind.of(at_zero, step, count=count, cause=cause)
        formats = of_all(dtype_name(self._trained[name].dtype) for name in rounded)
        cause = f"{formats} rounds the updates away"
        yield from kind.of(rounded, step, count=count, cause=cause)

    # ── losses and ranks ──────────────────────────────────────────────────────────────────────────

    def _loss_readings(self, loss: float) -> Iterator[Reading]:
        step = self._step
        count = self._vocabulary
        expected = math.log(count) if count > 1 else math.nan
        kind = KINDS["uniform-loss"]
        self._num_uniform += 1
        if not abs(loss / expected - 1) < kind.bound:
            self._num_uniform = 0
        if self._num_uniform == UNIFORM_STEPS:
            bound = kind.bound * expected
            words = {"vocabulary": count, "steps": UNIFORM_STEPS}
            yield kind.reading("", loss, expected, bound, step, **words)
        if self._here.size == 1 or not self._is_sampled(step):
            return
        norm = math.nan if self._probe is None else math.sqrt(float(self._square[1]))
        losses, norms = zip(*self._here.gather((loss, norm)), strict=True)
        for name, values in (("rank_loss", losses), ("rank_grad_norm", norms)):
            # Sharded gradients are not measured before their sum.
            if not any(map(math.isnan, values)):
                self._numbers[f"{name}/min"] = min(values)
                self._numbers[f"{name}/max"] = max(values)
        if len({*losses}) == len({*norms}) == 1 and 0 < norm < math.inf:
            yield from self._same_batch(step)
        worst = max(losses, key=lambda x: (not math.isfinite(x), x))
        middle = sorted(losses)[(len(losses) - 1) // 2]
        kind = KINDS["rank-loss"]
        bound = kind.bound * max(middle, 0.0) + LOSS_APART
        if not math.isfinite(worst) or worst > middle + bound:
            yield kind.reading("", worst, middle, bound, step, rank=losses.index(worst))

    def _rank_readings(self, step: int) -> Iterator[Reading]:
        """Compare the batches and the random generators of the ranks, where each trains on its own
        data.
        """
        batches, states = zip(*self._here.gather(self._hashes or ("", "")), strict=True)
        if len({*batches}) == 1 and batches[0]:
            yield from self._same_batch(step)
        elif len({*states}) == 1 and states[0] and self._has_own_data():
            words = "draw the same dropout masks for other batches: seed each rank with its number"
            yield KINDS["equal-ranks"].reading("", len(states), 1, 0, step, words=words)

    def _same_batch(self, step: int) -> Iterator[Reading]:
        if self._has_own_data():
            cure = "give each rank its share of the data (DistributedSampler)"
            words = f"trained on the same batch: {cure}"
            yield KINDS["equal-ranks"].reading("", self._here.size, 1, 0, step, words=words)

    def _has_own_data(self) -> bool:
        """Return whether each rank should train on its own batch. All ranks make the call."""
        is_own = has_own_batches(self.watched_model)
        if not is_own:
            self.unseen["batches of ranks"] = "parameters are sharded, not by FSDP"
        elif parts := unlike(weights_of_ranks(self.watched_model, self._here)):
            self.unseen["batches of ranks"] = f"ranks hold other values of {of_all(sorted(parts))}"
            is_own = False
        return is_own


def _trains(modules: Sequence[nn.Module]) -> bool:
    return any(module.training for module in modules)


def _nonfinite_weights(model: nn.Module, name: str) -> str:
    """Return the first weight of a module that is not finite; empty if all are.

    It waits for the device.
    """
    for inner, module in model.named_modules():
        if plain_name(inner) == name:
            for parameter, p in module.named_parameters():
                if not bool(local_of(p).isfinite().all()):
                    return str(parameter)
    return ""


def _remember(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _LAST_STEPS[optimizer] = next(_CLOCK)


def watch(
    model: nn.Module, optimizer: Any, *, every: int = 50, called: nn.Module | None = None
) -> Watch:
    """Watch a training loop.

    Print at the third step what is watched and what is not, and a sentence at a step that is not
    well.

    Each kind of fault is told once, and again when it is twice as large:

    * the learning rate at which the weights really train, for any optimizer;
    * after 50 steps, tensors that never moved or never had a gradient;
    * at the third step, and later after sampled ones, tensors with a gradient and no optimizer, or with two;
    * on sampled steps, frozen tensors that the optimizer changes;
    * gradients that were not cleared, that are zero everywhere, or that are not finite; a step that is repeated;
    * training in evaluation mode, evaluation in training mode, weights that an evaluation did not restore;
    * the first module whose output is not finite;
    * a copy of the model that the loop writes, such as an average of its weights, which cannot move in its format or runs away;
    * on several ranks, equal batches and equal dropout masks; on sampled steps, a rank whose loss is far from the others'.

    A watched loop computes the same bits. On several ranks, all of them make the call.

    Args:
        model: the trained model, before ``torch.compile`` or not.
        optimizer: any ``torch.optim.Optimizer``, possibly wrapped; or a list of several, the last
            to step at the end.
        every: steps between sampled steps, on which the intended update is computed; the second
            step is sampled too.
        called: the module whose forward pass the loop calls, if not the model itself.
    Returns:
        The watch. ``numbers()`` is a flat dict of floats for a logger; ``step(loss)`` watches the
            loss too; ``remove()`` ends it.
    Raises:
        RecipeError: ``model`` is not a module, or ``optimizer`` not an optimizer.

    Cost: one read of the gradients and of the blocks' outputs in each step. A sampled step repeats the optimizer's step on at
        most 65,536 elements of each tensor, in float64.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> watch = ng.watch(model, optimizer)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     for _ in range(2):
        ...         model(torch.ones(4, 64, dtype=torch.bfloat16)).float().square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> str(caught[0].message).split(":")[0], watch.numbers()["lr/group0"]
        ('step 2', 1e-05)
    """
    return Watch(model, optimizer, every=every, called=called)
