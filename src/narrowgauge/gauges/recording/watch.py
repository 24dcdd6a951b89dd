"""``narrowgauge.watch``: watch a training loop, and say nothing while all is well.

Hooks on the model and on the optimizer's step only read. The numbers of a step go to the host in
one vector: the norm of each gradient, the sum of each block's outputs, and some flags. A GPU's
vector is read one step later, so that nothing waits for it. On *sampled* steps, 1, 2, 3, 5, 8, 13 …
and every hundredth, the step is repeated too (:mod:`narrowgauge.gauges.recording.twin`).
"""

from __future__ import annotations

import itertools
import math
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.utils._pytree import tree_leaves

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, in_order, joined, of_all, words_of
from narrowgauge.analysis.thresholds import (
    MOST_PROBES,
    ROUNDINGS,
    SETTLED,
    TWICE,
    UNSTEPPED,
)
from narrowgauge.checks.float32_copy import is_called_from
from narrowgauge.checks.gradients import has_own_batches, vocabulary_of, weights_of_ranks
from narrowgauge.checks.manifest import master_of
from narrowgauge.checks.set_up import SetUp, set_up_of
from narrowgauge.checks.step_samples import evenly_spread, weight_of
from narrowgauge.distributed.replica_verification import possible_parts, unlike
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.gauges.hub import Hub, Listener, RunNotice
from narrowgauge.gauges.recording.laws import Facts, Laws, Passes, Snapshot, is_sampled
from narrowgauge.gauges.recording.leaves import Averages, copies_of, names_of
from narrowgauge.gauges.recording.twin import Twin, on_host
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of
from narrowgauge.numerics.hashing import fingerprint_all
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import counted
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.torch_hooks import after_every_step, members_of
from narrowgauge.torch_support.torch_names import (
    HostCopy,
    callers_of_step,
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
_CALLERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[torch.optim.Optimizer]]
_CALLERS = weakref.WeakKeyDictionary()
"""The optimizers whose ``step`` calls an optimizer's: wrappers, and containers of several."""


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
        num_compared: tensors whose step was compared with that of the optimizer's class, so far.
        is_ended: the hooks are removed.
    """

    title = "the watch"
    is_ended = False

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
        self._ignored = frozenset(ignore)
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
                self.unseen["weights of ranks"] = "parameters are sharded"
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
        self._share_of_group: dict[int, float] = {}
        self._told: dict[str, float] = {}
        self._logged: dict[tuple[str, str], float] = {}
        self._has_moved: set[str] = set()
        self._had_gradient: set[str] = set()
        self._had_more: set[str] = set()  # than rounding of the others' gradients
        self._goes_on = False  # from a checkpoint, in the next step
        self._arrived: float | None = None  # the norm of the gradients in the last step
        self._take_up()
        weights = {name: p.detach() for name, p in self._trained.items()}
        self._split = possible_parts(self._sums_of_ranks(weights))
        # Of the current step:
        self._num_passes = 0
        self._num_backward = 0
        self._intervals = dict.fromkeys(self.optimizers, _Interval())
        self._sums: dict[str, Tensor] = {}
        self._square: tuple[int, Tensor | float] = -1, 0.0
        self._flags: dict[str, Tensor] = {}
        self._passes = Passes()
        self._was_cleared: dict[Tensor, bool | Tensor] = {}
        self._twins: dict[torch.optim.Optimizer, Twin] = {}
        self._strays: dict[str, tuple[Tensor, Tensor]] = {}
        self._frozen: dict[str, tuple[Tensor, Tensor]] = {}
        # Between steps:
        self._unread: list[tuple[int, list[str], HostCopy, float | None]] = []
        self._step_count: float | None = None  # before the step
        self._num_calls = 0  # of step()
        self._was_evaluated = False
        # After the first step, until the second.
        self._first_writes: dict[tuple[str, str], Reading] = {}
        self._projected: set[tuple[str, str]] = set()
        self.num_compared = 0
        self._after: Tensor | None = None
        self._leaves: dict[int, tuple[weakref.ref[Tensor], Tensor, set[int]]] = {}
        self._hashes: tuple[str, str] | None = None
        self._averages: Averages | None = None
        self._follow()
        self._laws = Laws(self._facts(max_grad_norm))

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
        inside = {*self.watched_model.parameters()}
        for optimizer, p in self._probes.items():
            copies = [q for q in inside if p not in inside and master_of(q, [p]) is not None]
            if copies:  # backward passes reach the weight of a master
                self._probes[optimizer] = copies[0]
                if p is self._probe:
                    self._probe = copies[0]
        for p in self._probes.values():
            self.hub.follow_gradients(self, partial(self._see_gradient, p), self._undo, p)
        self.hub.listeners.append(self)

    def _facts(self, limit: float | None) -> Facts:
        model = self.watched_model
        epsilon = 0.0
        if limit is not None:
            epsilon = max(torch.finfo(p.dtype).eps for p in self._names)
        things = of_all(f"dropout {m.p:g}" for m in self._dropouts)
        if self._modal and not things:
            things = "batch statistics"
        return Facts(
            len(self.optimizers), vocabulary_of(model), None if self._is_sharded else limit, epsilon,
            things, partial(_nonfinite_weights, model),
        )  # fmt: skip

    def _judge(self, step: int, **numbers: Any) -> None:
        """Ask the laws about numbers of a step."""
        self._report(self._laws.read(Snapshot(step, **numbers)))

    def go_on_from_checkpoint(self) -> None:
        """Compare the next step, and nothing with the last one: weights and states were loaded."""
        self._twins = {}
        self._strays = {}
        self._goes_on = True

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

        ``lr/groupN`` is the group's rate of now, ``effective_lr/groupN`` that times the share of the
        update that was stored in the last sampled step. ``grad_norm`` is of this rank's gradients
        that reached the last step. ``frozen_tensors`` never moved, and
        ``untrained_tensors`` have a gradient and no optimizer. On several ranks, ``/min`` and
        ``/max`` of ``rank_loss``, and of ``rank_grad_norm``, the smallest tensor's before the sum.
        """
        numbers = dict(self._numbers)
        for index, rate in self._rates().items():
            if f"lr/group{index}" in numbers:
                numbers[f"lr/group{index}"] = rate
                numbers[f"effective_lr/group{index}"] = rate * self._share_of_group.get(index, 1.0)
        return numbers

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
            self._judge(self._step, loss=loss)
            if self._here.size > 1 and is_sampled(self._step):
                self._gather_losses(loss)

    # ── reports ───────────────────────────────────────────────────────────────────────────────────

    def _report(self, readings: Iterable[Reading]) -> None:
        """Log what is new of a tensor, and say what is new of a kind: once, and again when it is
        twice as far beyond its bound.
        """
        fresh = []
        for reading in readings:
            place = reading.what, reading.tensor
            if reading.what in self._ignored:
                continue
            if reading.excess > TWICE * self._logged.get(place, -1.0):
                self._logged[place] = reading.excess
                self._log(reading)
            is_note = reading.severity == "note"
            if not is_note and reading.excess > TWICE * self._told.get(reading.what, -1.0):
                fresh.append(reading)
        for reading in fresh:
            self._told[reading.what] = reading.excess
        if fresh:
            self._say(in_order(fresh))

    def _log(self, reading: Reading) -> None:
        """Write a reading. A watch without a folder writes nothing."""

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
        self._passes.evaluations.add(_trains(self._dropouts))
        self._passes.is_evaluated |= not self.watched_model.training

    def before_pass(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note the mode of a pass, and hash the first batch on several ranks."""
        self._num_passes += 1
        self._passes.modes.add(module.training or _trains(self._modal))
        self._passes.num_dropping = sum(dropout.training for dropout in self._dropouts)
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
        return self._step if self._step < SETTLED else self._step % SETTLED

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
        if self._here.size > 1 and is_sampled(self._step + 1):
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
        sampled = is_sampled(step) or self._goes_on
        self._report(self._written_readings(optimizer))
        if sampled or len(members_of(*self.optimizers)) != self._num_members:
            self._take_up()
        if optimizer is self.optimizers[0]:
            self._judge_passes(step)
        gradients = self._gradients(optimizer)
        self._see_repeated(optimizer, gradients)
        if self._split and step == 1 and optimizer is self.optimizers[0]:
            self._find_parts(gradients)
        self._step_count = None if self._goes_on else self._count()
        self._flag(optimizer, gradients)
        if sampled:
            self._judge(step, drifting=self._drifting())
            self._sample(optimizer)

    def _judge_passes(self, step: int) -> None:
        """Judge the passes since the last step, and what they left."""
        passes = self._passes
        self._judge(step, passes=passes, rates=self._rates())
        self._was_evaluated = passes.is_evaluated
        self._passes = Passes(num_dropping=passes.num_dropping)
        # After two steps with walks.
        if self._since_walk() == 2:
            self._report(self._leaf_readings(step))

    def _see_repeated(self, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor]) -> None:
        """Report a step with the gradients of the last one."""
        last = self._intervals[optimizer]
        signature = (0, 0)
        for first in [*gradients.values()][:1]:
            signature = id(first), first._version
        interval = _Interval(self._num_passes, self._num_backward, signature)
        self._intervals[optimizer] = interval
        if last.num_backward and interval == last:
            self._report([KINDS["repeated-step"].reading("", 1, 0, step=self._step + 1)])

    def _find_parts(self, gradients: dict[str, Tensor]) -> None:
        """Find which of the tensors that differ between ranks are parts of one.

        Gradients of parts differ. Equal ones are sums, and the weights were not sent.
        """
        parts = {name: x for name, x in gradients.items() if name in self._split and x.any()}
        of_ranks = self._sums_of_ranks(parts)
        self._split -= set[str]().union(*of_ranks) - unlike(of_ranks)

    def _flag(self, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor]) -> None:
        """Take the numbers of a step that go to the host."""
        self._flags = {f"output:{name}": x for name, x in self._sums.items()}
        self._sums = {}
        norms = _norms([*gradients.values()])
        # Of torch.amp.GradScaler, for fused optimizers.
        scale = getattr(optimizer, "grad_scale", None)
        for name, norm in zip(gradients, norms, strict=True):
            self._flags[f"grad:{name}"] = norm if scale is None else norm / scale
        probe = self._probes.get(optimizer)
        if probe in self._was_cleared and self._step > 0:
            is_cleared = self._was_cleared[probe]
            name = ""
            if len(self._probes) > 1:
                name = self._name(probe)
            self._flags[f"cleared:{name}"] = torch.as_tensor(is_cleared, device=probe.device)
        if probe is self._probe and self._after is not None:
            is_written = ((probe != self._after) & (self._after == self._after)).any()
            self._flags["swapped" if self._was_evaluated else "written"] = is_written

    def _sample(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what a sampled step may change, and what it must not change."""
        frozen = {plain_name(n): p for n, p in self.watched_model.named_parameters()}
        frozen |= {name: p for p, name in self._names.items()}
        self._frozen = {}
        for name, p in frozen.items():
            if not p.requires_grad:
                self._frozen[name] = p, evenly_spread(p).clone()
        self._twins[optimizer] = Twin(optimizer, self._names)
        members = {*members_of(*self.optimizers)}
        if self._is_sharded or self._step < 2:
            return
        for name, p in self.watched_model.named_parameters():
            if p.grad is not None and p not in members and not self._has_master(p):
                self._strays[plain_name(name)] = p, evenly_spread(p).clone()

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
            self._flags["clip"] = optimizer.last_control[0]
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
        self._unread.append((step, list(self._flags), HostCopy(vector), self._step_count))
        probe = self._probes.get(optimizer)
        if probe is not None:
            self._was_cleared.pop(probe, None)
            if probe is self._probe:
                self._after = probe.detach().clone()
        if optimizer in self._twins:
            self._twins[optimizer].complete()
            self._report(self._sampled_readings(optimizer, step))
        if device.type == "cpu":
            self._read()
        if optimizer is self.optimizers[-1]:
            self._step = step
            self._goes_on = False
            if is_sampled(step):
                self._report(self._replica_readings(step))
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

    def _stepped(self) -> set[torch.optim.Optimizer]:
        """Return the optimizers that have stepped since this watch began, its own ones among
        them. Those that stepped only before may belong to another loop.
        """
        return {optimizer for optimizer, last in _LAST_STEPS.items() if last > self._began}

    def _stepped_by_others(self) -> Iterator[list[str]]:
        """Yield the names of the parameters that each other optimizer steps too.

        One whose step calls a watched one's, or is called by it, is the same step.
        """
        ours = set(self.optimizers)
        callers = {caller for optimizer in ours for caller in _CALLERS.get(optimizer, ())}
        for unwatched in self._stepped() - ours - callers:
            names = [self._names[p] for p in members_of(unwatched) if p in self._names]
            if names and ours.isdisjoint(_CALLERS.get(unwatched, ())):
                yield names

    def _leaf_readings(self, step: int) -> Iterator[Reading]:
        """Read the leaves of the graph that no optimizer steps."""
        stepped = {*members_of(*self._stepped())}
        leaves = []
        for reference, values, steps in self._leaves.values():
            leaf = reference()
            if leaf is None or leaf.grad is None or leaf in stepped or len(steps) < 2:
                continue
            if torch.equal(evenly_spread(leaf), values) and not self._has_master(leaf):
                leaves.append(leaf)
        self._leaves = {}
        self._numbers["untrained_tensors"] = len(leaves)
        yield from KINDS["missing-parameters"].of(names_of(self.watched_model, leaves), step)
        for names in self._stepped_by_others():
            yield from KINDS["parameters-twice"].of(names, step)

    def _rates(self) -> dict[int, float]:
        """Return the learning rate of each group by its number, without those on a device."""
        rates = {}
        groups = itertools.chain.from_iterable(
            optimizer.param_groups for optimizer in self.optimizers
        )
        for number, group in enumerate(groups):
            if isinstance(group.get("lr"), (int, float)):
                rates[number] = float(group["lr"])
        return rates

    def _count(self) -> float | None:
        """Return the count of steps in the first trained parameter's state, on the host; ``None``
        where all its moments were reset too.
        """
        for p in list(self._trained.values())[:1]:
            state = self._optimizer_of[p].state.get(p, {})
            step = state.get("step")
            if isinstance(step, Tensor) and step.is_cuda:
                return None
            if isinstance(step, (int, float, Tensor)):
                moments = [x for x in state.values() if isinstance(x, Tensor) and x.ndim]
                if not step and not any(bool(x.any()) for x in moments):
                    return None
                return float(step)
        return None

    def _has_master(self, p: Tensor) -> bool:
        """Return whether an optimizer steps a master of a weight, which the loop writes back."""
        return master_of(p, self._trained.values()) is not None

    def _read(self) -> None:
        for step, keys, copied, count in self._unread:
            values = dict(zip(keys, copied.cpu().tolist(), strict=True))
            self._see_values(step, values, count)
        self._unread = []

    def _see_values(self, step: int, values: dict[str, float], count: float | None) -> None:
        """See the numbers of a step that have reached the host."""
        parts: dict[str, dict[str, float]] = {"grad": {}, "output": {}, "cleared": {}}
        for key, value in values.items():
            kind, _, name = key.partition(":")
            parts.setdefault(kind, {})[name] = value
        norms = parts["grad"]
        now = Snapshot(
            step,
            norms=norms,
            bad_outputs=[
                name for name, total in parts["output"].items() if not math.isfinite(total)
            ],
            kept=[name for name, is_cleared in parts["cleared"].items() if not is_cleared],
            clip=values.get("clip", 1.0),
            is_skipped=bool(values.get("skipped")),
            is_written=bool(values.get("written")),
            is_swapped=bool(values.get("swapped")),
            count=count,
        )
        self._report(self._laws.read(now))
        self._numbers["grad_norm"] = math.hypot(*norms.values())
        if now.is_skipped:
            return
        if not self._is_sharded:
            self._arrived = now.arrived
        least = _LEAST_SHARE * max(norms.values(), default=0.0)
        self._had_gradient.update(name for name, norm in norms.items() if 0 < norm < math.inf)
        self._had_more.update(name for name, norm in norms.items() if norm > least)

    # ── sampled steps ─────────────────────────────────────────────────────────────────────────────

    def _compared(self, readings: Callable[[], Iterable[Any]]) -> list[Any]:
        """Return what a comparison yields. Its error is a reason for what is not seen."""
        try:
            return list(readings())
        except Exception as error:
            self.unseen["the optimizer's step"] = words_of(error)
            return []

    def _step_readings(self, optimizer: torch.optim.Optimizer, step: int) -> Iterator[Reading]:
        """Read the differences between a step and its class's. A first step may make masters."""
        twin = self._twins[optimizer]
        if step == 1 and not self._goes_on:
            return
        found = self._compared(twin.readings)
        self.num_compared += twin.num_compared
        for reading in joined(found, len(twin.samples)):
            yield replace(reading, step=step)

    def _written_readings(self, optimizer: torch.optim.Optimizer) -> Iterator[Reading]:
        """Read what was written since a sampled step.

        A loop that writes a weight, or a state of its own optimizer, after each of its first two
        steps does so by its rule, as a projection: this is a note.
        """
        twin = self._twins.pop(optimizer, None)
        if twin is None or not twin.samples or not twin.samples[0].after:
            return
        step = self._step
        readings = []
        first_writes = self._first_writes if step != 1 else {}
        for reading, is_plain in self._compared(twin.written):
            place = reading.what, reading.tensor
            now = replace(reading, step=step)
            if is_plain and step == 1:
                self._first_writes[place] = now
            else:
                if is_plain and first_writes.pop(place, None) is not None:
                    self._projected.add(place)
                if place in self._projected:
                    now = replace(now, severity="note")
                readings.append(now)
        yield from joined([*first_writes.values(), *readings], len(twin.samples))
        first_writes.clear()
        still = [name for name, (p, x) in self._strays.items() if torch.equal(evenly_spread(p), x)]
        self._strays = {}
        yield from KINDS["missing-parameters"].of(still, step)

    def _drifting(self) -> list[str]:
        """Return the frozen tensors that changed by a few roundings since the last sampled step."""
        names = []
        flags = []
        for name, (p, before) in self._frozen.items():
            now = evenly_spread(p)
            if p.requires_grad or not p.is_floating_point() or now.shape != before.shape:
                continue
            ulps = (now - before).abs() / (before.abs() * torch.finfo(p.dtype).eps).clamp_min(1e-30)
            names.append(name)
            flags.append((ulps <= ROUNDINGS).all() & (ulps > 0).any())
        return list(itertools.compress(names, on_host(flags)))

    def _largest_moves(self, twin: Twin) -> dict[str, float]:
        """Return the largest change of each tensor in units of the learning rate, for rules whose
        steps are about one.
        """
        largest: dict[str, Tensor] = {}
        if "adam" not in type(twin.optimizer).__name__.lower():
            return {}
        for sample in twin.samples:
            rate = float(sample.group[1].get("lr") or 0.0)
            if rate and sample.parameter.numel() and sample.parameter.is_floating_point():
                change = sample.after["weight"].double() - sample.before["weight"].double()
                largest[sample.name] = change.abs().max() / rate
        return dict(zip(largest, on_host([*largest.values()]), strict=True))

    def _sampled_readings(self, optimizer: torch.optim.Optimizer, step: int) -> Iterator[Reading]:
        yield from self._step_readings(optimizer, step)
        moved = self._largest_moves(self._twins[optimizer])
        yield from self._laws.read(Snapshot(step, moved=moved))
        index = 0
        for earlier in self.optimizers[: self.optimizers.index(optimizer)]:
            index += len(earlier.param_groups)
        sums = self._sums_of(optimizer)
        for group in optimizer.param_groups:
            members = [p for p in group["params"] if p in sums and sums[p][0] > 0]
            if group.get("lr") is None:
                self.unseen["effective learning rate"] = "a group has no lr"
            elif members:
                yield from self._rate_readings(optimizer, step, index, group, members, sums)
            index += 1
        yield from self._moved_readings(optimizer, step)
        if optimizer is self.optimizers[-1]:
            if step == 1:  # an average may begin as a copy after it
                return
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
        self._share_of_group[index] = share
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
        if len(self.optimizers) > 1:
            area += f" of {type(optimizer).__name__}"
        sums: dict[Tensor, list[float]] = {}
        if isinstance(optimizer, Optimizer):
            optimizer.settle()
            if not optimizer.audit_every:
                self.unseen[area] = "audit_every is 0"
            for p, rows in optimizer.auditor.windows.items():
                sums[p] = [*rows[:, :2].sum(0).tolist(), 0.0]
            return sums
        twin = self._twins[optimizer]
        if self._step == 0 and not twin.is_torchs:
            return {}  # its first step may make masters
        sums, unrepeated = twin.sums()
        if twin.why_not:
            self.unseen[area] = twin.why_not
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
        for name, (p, values) in self._frozen.items():
            if not p.requires_grad:
                changes[name] = evenly_spread(p) != values
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
                if group.get("lr") == 0:
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

    def _gather_losses(self, loss: float) -> None:
        """Compare the losses and the gradients of the ranks."""
        norm = math.nan if self._probe is None else math.sqrt(float(self._square[1]))
        losses, norms = zip(*self._here.gather((loss, norm)), strict=True)
        for name, values in (("rank_loss", losses), ("rank_grad_norm", norms)):
            # Sharded gradients are not measured before their sum.
            if not any(map(math.isnan, values)):
                self._numbers[f"{name}/min"] = min(values)
                self._numbers[f"{name}/max"] = max(values)
        if len({*losses}) == len({*norms}) == 1 and 0 < norm < math.inf:
            self._report(self._same_batch(self._step))
        self._judge(self._step, rank_losses=losses)

    def _sums_of_ranks(self, tensors: dict[str, Tensor]) -> list[dict[str, float]]:
        """Return the sum of each tensor's elements on each rank; none for shards and one rank."""
        if self._here.size == 1 or self._is_sharded:
            return []
        sums = on_host([x.sum(dtype=torch.float64) for x in tensors.values()])
        # NaN is not equal to itself, and 0 stands for both.
        numbers = [math.inf if x != x else x for x in sums]
        return self._here.gather(dict(zip(tensors, numbers, strict=True)))

    def _replica_readings(self, step: int) -> Iterator[Reading]:
        """Compare the weights of the ranks. Those that differed before the first step are parts."""
        weights = {name: p.detach() for name, p in self._trained.items()}
        of_ranks = self._sums_of_ranks(weights)
        differing = unlike(of_ranks) - self._split
        parted = [name for name in weights if name in differing]
        if parted:
            sums = [row.get(parted[0], math.nan) for row in of_ranks]
            odd = next(rank for rank, x in enumerate(sums) if x != sums[0])
            values = f"{sums[0]:.9g} on rank 0 and {sums[odd]:.9g} on rank {odd}"
            message = f"The sum of its elements is {values} after step {step}."
            yield KINDS["ranks-differ"].reading(
                of_all(parted), sums[odd], sums[0], 0, step, message=message
            )

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
    callers = callers_of_step(optimizer)
    if callers:
        _CALLERS.setdefault(optimizer, weakref.WeakSet()).update(callers)
