"""``narrowgauge.watch``: watch a training loop, and say nothing while all is well.

Hooks on the model and on the optimizer's step only read. The numbers of a step go to the host in
one vector: the norm of each gradient, the sum of each block's outputs, and some flags. A GPU's
vector is read one step later, so that nothing waits for it. On some *sampled* steps the intended
update is computed too (:mod:`narrowgauge.gauges.recording.intended_updates`).
"""

from __future__ import annotations

import math
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, in_order, of_all, words_of
from narrowgauge.analysis.thresholds import (
    EVALUATIONS_APART,
    LOSS_APART,
    SETTLED,
    TWICE,
    UNIFORM_STEPS,
    UNSTEPPED,
)
from narrowgauge.checks.gradients import has_own_batches, vocabulary_of
from narrowgauge.checks.set_up import SetUp, set_up_of
from narrowgauge.checks.step_samples import evenly_spread, weight_of
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.gauges import hooks
from narrowgauge.gauges.recording.intended_updates import IntendedStep, on_host
from narrowgauge.gauges.recording.leaves import copies_of, names_of
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of
from narrowgauge.numerics.hashing import fingerprint_all
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import counted
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.torch_hooks import Follower, OwnHook, after_every_step, members_of
from narrowgauge.torch_support.torch_names import (
    HostCopy,
    graph_nodes,
    is_compiled_model,
    is_transformed,
    plain_name,
    unwrapped_model,
)  # fmt: skip

_BLOCK = re.compile(r"\D*(\d+(\.[^.]+)?)?")
"""Names of the modules whose outputs are summed: blocks and their parts, not the layers in these
parts.
"""
_STEPPED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""All optimizers that have stepped since the first watch of this process."""


class RunNotice(UserWarning):
    """Warn about a watched or recorded loop.

    A recorder writes the warning to ``events.jsonl`` too.
    """


class _Interval(NamedTuple):
    """Counts of passes and of backward passes up to an optimizer's last step, and the first
    gradient of that step.
    """

    num_passes: int = 0
    num_backward: int = 0
    gradient: tuple[int, int] = (0, 0)


class Watch:
    """Hold the hooks and the numbers of a watched loop; created by :func:`watch`.

    Attributes:
        unseen: what is not watched, and why.
        is_ended: the hooks are removed.
    """

    is_ended = False

    def __init__(
        self, model: nn.Module, optimizer: Any, *, every: int = 50, called: nn.Module | None = None
    ) -> None:
        set_up = set_up_of(model, optimizer)
        self.watched_model = unwrapped_model(model)
        self.optimizers = set_up.optimizers
        self.every = every
        self._is_sharded = any(is_sharded(p) for p in self.watched_model.parameters())
        self.unseen: dict[str, str] = {}
        if self._is_sharded:
            parts = "tensors without an optimizer", "gradients that were not cleared"
            self.unseen |= dict.fromkeys(parts, "parameters are sharded")
        self._set_up = set_up
        self._names = dict[Tensor, str]()
        self._trained = dict[str, Tensor]()
        self._optimizer_of = dict[Tensor, torch.optim.Optimizer]()
        self._since = dict[str, int]()
        self._start = dict[str, Tensor]()
        self._moved = dict[str, Tensor]()
        self._shares = dict[Tensor, list[float]]()
        self._num_members = 0
        self._step = 0
        self._numbers = dict[str, float]()
        self._told = dict[str, float]()
        self._has_moved = set[str]()
        self._is_bad = False
        self._had_gradient = set[str]()
        self._num_zero = 0
        self._num_uniform = 0
        self._num_overflows = 0
        self._take_up()
        # Of the current step:
        self._num_passes = self._num_backward = 0
        self._intervals = dict.fromkeys(self.optimizers, _Interval())
        self._sums: dict[str, Tensor] = {}
        self._square: tuple[int, Tensor | float] = -1, 0.0
        self._flags: dict[str, Tensor] = {}
        self._modes = set[bool]()
        self._evaluations = set[bool]()
        self._was_cleared: bool | Tensor = True
        self._intended: IntendedStep | None = None
        self._frozen: dict[Tensor, Tensor] = {}
        # Between steps:
        self._unread: list[tuple[int, list[str], HostCopy]] = []
        self._was_evaluated = False
        self._has_own_writes = False
        self._num_evaluated = 0
        self._after: Tensor | None = None
        self._leaves: dict[int, tuple[weakref.ref[Tensor], Tensor, set[int]]] = {}
        self._hashes: tuple[str, str] | None = None
        self._copies: list[tuple[str, int, weakref.ref[Tensor], int, Tensor]] | None = None
        self._undo = ExitStack()
        self._here = all_ranks()
        if self._here.size > 1:
            self.unseen["losses of ranks"] = "watch.step(loss) was not called"
        # A compiler skips hooks inside the model that it compiles.
        self._hook(
            self.watched_model,
            called or (model if is_compiled_model(model) else self.watched_model),
        )

    def _start_samples(self) -> None:
        """Compare with the weights of now from here on."""
        for name, p in self._trained.items():
            self._start[name] = self._elements(p)
            self._moved[name] = torch.zeros_like(self._start[name], dtype=torch.bool)

    def _take_up(self) -> None:
        """Watch what the optimizers step now: parameters may be added, or thawed, while the loop
        runs.
        """
        self._set_up = SetUp(self._set_up.model, self.optimizers)
        self._num_members = len(members_of(*self.optimizers))
        for stepped in self._set_up.stepped:
            self._names[stepped.parameter] = stepped.name
            self._optimizer_of[stepped.parameter] = stepped.optimizer
        trained = {p.name: p.parameter for p in self._set_up.trained}
        for name, p in trained.items():
            if self._trained.get(name) is not p:
                self._trained[name] = p
                self._since[name] = self._step
                self._start[name] = self._elements(p)
                self._moved[name] = torch.zeros_like(self._start[name], dtype=torch.bool)
        for name in self._trained.keys() - trained.keys():
            del self._trained[name], self._start[name], self._moved[name]

    def _elements(self, p: Tensor) -> Tensor:
        """Copy spread elements of the stored weight, on its device."""
        return evenly_spread(weight_of(self._optimizer_of[p], p)).clone()

    def _hook(self, model: nn.Module, called: nn.Module) -> None:
        """Hook the called model, the blocks, the smallest trained parameter, and the optimizers."""
        after_every_step(_remember)
        self._undo.callback(
            called.register_forward_pre_hook(OwnHook(self._before_pass), with_kwargs=True).remove
        )
        self._undo.callback(called.register_forward_hook(OwnHook(self._after_pass)).remove)
        blocks = {
            name for name, _ in model.named_modules() if name and _BLOCK.fullmatch(plain_name(name))
        }
        hooks.follow_outputs(self._undo, model, self._add_sum, blocks)
        dense = [p for p in self._trained.values() if p.is_leaf and not is_sharded(p) and p.numel()]
        self._probe = min(dense, key=lambda p: p.numel(), default=None)
        if self._probe is not None:
            self._undo.callback(self._probe.register_hook(OwnHook(self._before_gradient)).remove)
        self._dropouts = [
            m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0
        ]
        self._modal = [
            *self._dropouts,
            *(m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)),
        ]
        self._vocabulary = vocabulary_of(model)
        for optimizer in self.optimizers:
            follower = Follower(
                optimizer,
                partial(self._guarded, self._before_step),
                partial(self._guarded, self._after_step),
            )
            self._undo.callback(follower.remove)

    def _guarded(
        self, function: Callable[[torch.optim.Optimizer], None], optimizer: torch.optim.Optimizer
    ) -> None:
        """End the watch instead of the loop.

        Ranks wait for each other, so there the error ends the loop.
        """
        try:
            function(optimizer)
        except Exception as error:
            if self._here.size > 1 or isinstance(error, UserWarning):
                raise
            self.remove()
            warnings.warn(f"the watch ended: {words_of(error)}", RunNotice, stacklevel=2)

    def remove(self) -> None:
        """Remove every hook."""
        self.is_ended = True
        self._undo.close()

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
        if loss is not None:
            self.unseen.pop("losses of ranks", None)
            self._report(
                self._loss_readings(float(loss.detach() if isinstance(loss, Tensor) else loss))
            )

    # ── reports ───────────────────────────────────────────────────────────────────────────────────

    def _report(self, readings: Iterable[Reading]) -> None:
        """Say what is new: each kind once, and again when it is twice as far beyond its bound."""
        fresh = [
            r for r in readings if r.what not in self._told or r.excess > TWICE * self._told[r.what]
        ]
        self._told |= {r.what: r.excess for r in fresh}
        if fresh:
            self._say(in_order(fresh))

    def _say(self, readings: list[Reading]) -> None:
        """Show the readings of one step in a sentence."""
        parts = [
            (r.advice if r.tensor in r.advice else f"{r.tensor}: {r.advice}").rstrip(".")
            for r in readings
        ]
        # No line of the loop is at fault, so none is shown.
        warnings.warn_explicit(
            f"step {readings[0].step}: {'; '.join(parts)}",
            RunNotice,
            "narrowgauge.watch",
            readings[0].step,
        )

    # ── forward and backward ──────────────────────────────────────────────────────────────────────

    def _before_pass(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or is_transformed():
            return
        if not torch.is_grad_enabled():
            self._evaluations.add(any(m.training for m in self._dropouts))
            return
        self._num_passes += 1
        self._modes.add(module.training or any(m.training for m in self._modal))
        if self._here.size > 1 and self._step == 1 and self._hashes is None:
            inputs = enumerate(tree_leaves((args, kwargs)))
            batch = {
                str(k): x for k, x in inputs if isinstance(x, Tensor) and x.element_size() <= 8
            }
            device = next(module.parameters()).device
            draws = any(m.training for m in self._dropouts)
            state = (
                torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
            )
            self._hashes = (
                fingerprint_all(batch) if batch else "",
                fingerprint_all({"": state}) if draws else "",
            )

    def _after_pass(self, module: nn.Module, args: Any, output: Any) -> None:
        """Walk the graph of the first two steps to its leaves, and remember those that the
        optimizers do not step.
        """
        is_seen = (
            torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_transformed()
        )
        # The leaves of sharded parameters are gathered copies.
        for node in (
            graph_nodes(output) if is_seen and self._step < 2 and not self._is_sharded else ()
        ):
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaf not in self._names:
                reference, values, steps = self._leaves.get(id(leaf), (None, None, set[int]()))
                if reference is None or reference() is not leaf or values is None:
                    values = evenly_spread(leaf).clone()
                    steps = set()
                self._leaves[id(leaf)] = weakref.ref(leaf), values, steps | {self._step}

    def _add_sum(self, name: str, x: Tensor) -> None:
        if torch.is_grad_enabled() and x.element_size() > 1 and not is_transformed():
            total = x.sum(dtype=torch.float32)
            self._sums[name] = total if name not in self._sums else self._sums[name] + total

    def _before_gradient(self, gradient: Tensor) -> None:
        """See one backward pass, before its gradient is added to the last one."""
        if torch.compiler.is_compiling() or self._probe is None:
            return
        self._num_backward += 1
        if self._num_backward == UNSTEPPED and self._step == 0:
            # Several micro-batches make one step, so another optimizer must have stepped.
            others = of_all(type(o).__name__ for o in _STEPPED.difference(self.optimizers))
            if others and not _STEPPED & {*self.optimizers}:
                self._report([KINDS["never-steps"].reading("", UNSTEPPED, others=others)])
        if self._here.size > 1 and self._is_sampled(
            self._step + 1
        ):  # the ranks' gradients are not summed yet
            step, square = self._square
            self._square = (
                self._step,
                gradient.detach().float().square().sum() + (square if step == self._step else 0.0),
            )
        last = self._probe.grad
        self._was_cleared |= (
            True if last is None or last.layout is not torch.strided else ~last.any()
        )

    # ── the step ──────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._read()
        step = self._step + 1
        last = self._intervals[optimizer]
        probe = self._probe
        if self._is_sampled(step) or len(members_of(*self.optimizers)) != self._num_members:
            self._take_up()
        if optimizer is self.optimizers[0]:
            self._report(self._pass_readings(step))
        gradients = self._gradients(optimizer)
        first = next(iter(gradients.values()), None)
        signature = (0, 0) if first is None else (id(first), first._version)
        interval = _Interval(self._num_passes, self._num_backward, signature)
        if last.num_backward and interval == last:
            self._report([KINDS["repeated-step"].reading("", 1, 0, step=step)])
        self._intervals[optimizer] = interval
        # In float16 squares overflow.
        values = list(gradients.values())
        norms = torch._foreach_norm(values, 2, dtype=torch.float32) if values else []
        scale = getattr(
            optimizer, "grad_scale", None
        )  # of torch.amp.GradScaler, for fused optimizers
        self._flags = {f"output:{name}": x for name, x in self._sums.items()}
        self._flags |= {
            f"grad:{n}": x if scale is None else x / scale
            for n, x in zip(gradients, norms, strict=True)
        }
        self._sums = {}
        if probe is not None and optimizer is self._optimizer_of[probe]:
            if self._num_backward > last.num_backward and step > 1:
                self._flags["cleared"] = torch.as_tensor(self._was_cleared, device=probe.device)
            if self._after is not None:
                is_written = ((probe != self._after) & (self._after == self._after)).any()
                self._flags["swapped" if self._was_evaluated else "written"] = is_written
        if self._is_sampled(step):
            self._frozen = {p: evenly_spread(p).clone() for p in self._names if not p.requires_grad}
            self._intended = None if isinstance(optimizer, Optimizer) else IntendedStep(optimizer)

    def _gradients(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return this rank's gradients by name, in the order of a backward pass; of sparse ones the
        values.
        """
        members = members_of(optimizer)
        placed = {p: gradient_of(p) for p in members}  # the ranks' common order
        named = {
            self._names.get(p, "a new tensor"): local_of(g)
            for p, g in reversed(placed.items())
            if g is not None
        }
        return {
            n: g if g.layout is torch.strided else g.coalesce().values()
            for n, g in named.items()
            if g.numel()
        }

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        step = self._step + 1
        probe = self._probe
        skipped = getattr(optimizer, "found_inf", None)
        if isinstance(optimizer, Optimizer) and optimizer.last_control is not None:
            skipped = optimizer.last_control[1]
        if skipped is not None:
            self._flags["skipped"] = skipped.reshape(())
        device = next(iter(self._names)).device
        values = [  # a cast costs more than a test
            x if x.dtype is torch.float32 and x.device == device else x.to(device, torch.float32)
            for x in self._flags.values()
        ]
        vector = torch.stack(values) if values else torch.zeros(0, device=device)
        self._unread.append((step, list(self._flags), HostCopy(vector)))
        if probe is not None and optimizer is self._optimizer_of[probe]:
            self._was_cleared = False
            self._after = probe.detach().clone()
        if self._is_sampled(step):
            self._report(self._sampled_readings(optimizer, step))
        if vector.device.type == "cpu":
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
        areas = ["rate", "gradients"] + ["modes"] * bool(self._num_passes)
        line = f"watch: {counted(len(self._trained), 'tensor')}, {', '.join(areas)}"
        missing = [f"{area} ({why})" for area, why in self.unseen.items()]
        return f"{line}; not: {', '.join(missing)}" if missing else line

    def _is_sampled(self, step: int) -> bool:
        return self.every > 0 and (step == 2 or step % self.every == 0)

    def _pass_readings(self, step: int) -> Iterator[Reading]:
        """Read the modes of the passes since the last step, and once the leaves that no optimizer
        steps.
        """
        things = of_all(f"dropout {m.p:g}" for m in self._dropouts) or "batch statistics"
        self._was_evaluated = bool(self._evaluations)
        self._num_evaluated += self._was_evaluated
        if self._modal and self._modes == {False}:
            words = f"the model trains in evaluation mode, without {things}: call model.train()"
            yield KINDS["wrong-mode"].reading("", 1, 0, step=step, words=words)
        # A loop with such passes in most steps means them.
        if self._evaluations == {True} and step >= EVALUATIONS_APART * self._num_evaluated:
            words = (
                f"the evaluation ran in training mode, with {things}: call model.eval() before it"
            )
            yield KINDS["wrong-mode"].reading("", 1, 0, step=step - 1, words=words)
        self._modes = set()
        self._evaluations = set()
        if step == 3:
            yield from self._leaf_readings(step)

    def _stepped_by_others(self) -> Iterator[list[str]]:
        """Yield the names of the parameters that each other optimizer steps too.

        Wrappers are left out.
        """
        groups = [group for o in self.optimizers for group in o.param_groups]
        for other in _STEPPED.difference(self.optimizers):
            is_same = any(group is g for group in other.param_groups for g in groups)
            inner = {x for x in vars(other).values() if isinstance(x, torch.optim.Optimizer)}
            members = members_of(other)
            names = [self._names[p] for p in members if p in self._names]
            if names and not is_same and not inner & {*self.optimizers}:
                yield names

    def _leaf_readings(self, step: int) -> Iterator[Reading]:
        stepped = {*members_of(*_STEPPED)}
        leaves = [
            leaf
            for reference, values, steps in self._leaves.values()
            if (leaf := reference()) is not None and steps == {0, 1} and leaf.grad is not None and leaf not in stepped
            and torch.equal(evenly_spread(leaf), values)
        ]  # fmt: skip
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
        if not values.pop("cleared", 1.0):
            yield KINDS["gradients-kept"].reading("", 1, 0, step=step)
        is_skipped = bool(values.pop("skipped", 0.0))
        norms = {key[5:]: x for key, x in values.items() if key.startswith("grad:")}
        bad = [
            key[7:]
            for key, x in values.items()
            if key.startswith("output:") and not math.isfinite(x)
        ]
        names = [n for n, x in norms.items() if not math.isfinite(x)]
        # One value that is not finite makes all later ones so: only the first place is told.
        was_bad = self._is_bad
        self._is_bad = self._is_bad or bool(bad or (names and not is_skipped))
        if was_bad:
            bad = []
            names = []
        self._num_overflows = self._num_overflows + 1 if names and is_skipped else 0
        if bad:
            held = _nonfinite_weights(self.watched_model, bad[0])
            words = f", at weights that are not finite ({held})" if held else ", at finite weights"
            yield KINDS["nonfinite-output"].reading(bad[0], math.nan, step=step, words=words)
        if self._num_overflows == KINDS["first-nonfinite"].bound:
            words = f", in {self._num_overflows} skipped steps in a row"
            yield KINDS["first-nonfinite"].reading(
                names[0], self._num_overflows, step=step, words=words
            )
        elif names and not is_skipped and not bad:
            words = f", of {counted(len(names), 'tensor')}, and the optimizer took the step"
            yield KINDS["first-nonfinite"].reading(names[0], len(names), 0, 0, step, words=words)
        if not is_skipped:
            self._had_gradient |= {name for name, x in norms.items() if 0 < x < math.inf}
        self._num_zero = 0 if any(norms.values()) else self._num_zero + 1
        if self._num_zero == (kind := KINDS["zero-gradients"]).bound:
            yield kind.reading("", self._num_zero, step=step)
        self._numbers["grad_norm"] = math.hypot(*norms.values())

    # ── sampled steps ─────────────────────────────────────────────────────────────────────────────

    def _sampled_readings(self, optimizer: torch.optim.Optimizer, step: int) -> Iterator[Reading]:
        first = sum(
            len(o.param_groups) for o in self.optimizers[: self.optimizers.index(optimizer)]
        )
        sums = self._sums_of(optimizer)
        for index, group in enumerate(optimizer.param_groups):
            members = [p for p in group["params"] if p in sums and sums[p][0] > 0]
            if group["lr"] is None:
                self.unseen["effective learning rate"] = "a group has no lr"
                continue
            if not members:
                continue
            rate = float(group["lr"])
            edqs = {p: sums[p][1] / sums[p][0] for p in members}
            intended, stored, variance = (sum(sums[p][k] for p in members) for k in range(3))
            edq = stored / intended
            worst = min(edqs, key=lambda p: edqs[p])
            error = 3 * math.sqrt(variance) / intended
            self._numbers |= {
                f"lr/group{first + index}": rate,
                f"effective_lr/group{first + index}": rate * edq,
            }
            kind = KINDS["effective-rate"]
            # Our audit has alarms of its own.
            if edq + error < kind.bound and not isinstance(optimizer, Optimizer):
                yield kind.reading(
                    "", rate * edq, None, kind.bound * rate, step, rate=rate, format=dtype_name(worst.dtype), share=edq,
                    worst=self._names.get(worst, "a new tensor"), least=edqs[worst],
                )  # fmt: skip
        yield from self._moved_readings(optimizer, step)
        if optimizer is self.optimizers[-1]:
            yield from self._copy_readings(step)

    def _copy_readings(self, step: int) -> Iterator[Reading]:
        """Read copies of the model that the loop writes, such as an average of its weights."""
        stepped = {*members_of(*_STEPPED)}
        if self._copies is None:
            tensors = [
                (n, p)
                for copy in copies_of(self.watched_model)
                for n, p in copy.items()
                if n in self._trained
            ]
            self._copies = [
                (n, step, weakref.ref(p), p._version, evenly_spread(p).clone())
                for n, p in tensors
                if not p.is_meta and p not in stepped
            ]
        written = list[tuple[str, int, Tensor]]()
        norms = list[Tensor]()
        for name, first, reference, version, start in self._copies:
            # An average is written in every step. A copy of the best weights is not, and another
            # model has an optimizer.
            if (
                (p := reference()) is not None
                and p._version - version >= SETTLED
                and p not in stepped
            ):
                now = evenly_spread(p)
                values = now - start, now, self._start[name], self._elements(self._trained[name])
                device = start.device  # an average may be on the CPU
                norms.append(torch.stack([x.double().norm().to(device) for x in values]))
                written.append((name, first, p))
        rows = [*zip(written, on_host(norms), strict=True)]
        kind = KINDS["average-apart"]
        for (name, _, _), (_, size, *sizes) in rows:
            if max(sizes) < math.inf and not size <= kind.bound * max(sizes):
                yield kind.reading(
                    name, size / max(sizes), step=step, size=size, largest=max(sizes)
                )
                break
        still = {
            name: dtype_name(p.dtype)
            for (name, first, p), (change, *_) in rows
            if change == 0 and name in self._has_moved and step >= first + SETTLED
        }
        formats = of_all(dict.fromkeys(still.values()))
        yield from KINDS["average-unmoved"].of(still, step, formats=formats)

    def _sums_of(self, optimizer: torch.optim.Optimizer) -> dict[Tensor, list[float]]:
        """Return ⟨D,D⟩ and ⟨D,E⟩ of each tensor, from our audit or from the repeated step."""
        if isinstance(optimizer, Optimizer):
            optimizer.settle()
            if not optimizer.audit_every:
                self.unseen["effective learning rate"] = "audit_every is 0"
            windows = optimizer.auditor.windows
            return {p: [*rows[:, :2].sum(0).tolist(), 0.0] for p, rows in windows.items()}
        assert self._intended is not None
        sums, unrepeated = self._intended.sums()
        if self._intended.why_not:
            self.unseen["effective learning rate"] = self._intended.why_not
        elif unrepeated:
            names = of_all(self._names.get(p, "a new tensor") for p in unrepeated)
            self.unseen["effective learning rate"] = (
                f"the step of {names} is not repeated by a copy"
            )
        for p, values in sums.items():
            if values[2]:  # one sample of stochastic rounding is noise: take all
                before = self._shares.get(p, [0.0, 0.0, 0.0])
                self._shares[p] = [a + b for a, b in zip(before, values, strict=True)]
        return sums | {p: self._shares[p] for p in sums if p in self._shares}

    def _moved_readings(self, optimizer: torch.optim.Optimizer, step: int) -> Iterator[Reading]:
        for name, p in self._trained.items():
            if self._optimizer_of[p] is optimizer:
                now = self._elements(p)
                if now.shape == self._start[name].shape:
                    self._moved[name] |= now != self._start[name]
        changes = {
            self._names[p]: evenly_spread(p) != values
            for p, values in self._frozen.items()
            if not p.requires_grad
        }
        tensors = self._moved | changes
        flags = dict(zip(tensors, on_host([x.any() for x in tensors.values()]), strict=True))
        yield from KINDS["frozen-moves"].of([n for n in changes if flags[n]], step)
        still = [n for n, x in self._moved.items() if x.numel() and not flags[n]]
        without = [name for name in self._trained if name not in self._had_gradient]
        self._has_moved = self._trained.keys() - {*still}
        self._numbers |= {"frozen_tensors": len(still), "tensors_without_gradient": len(without)}
        if optimizer is not self.optimizers[-1]:
            return
        settled = {name for name, since in self._since.items() if step - since >= SETTLED}
        idle = [name for name in without if name in self._has_moved and name in settled]
        without = [name for name in without if name in settled and name not in idle]
        still = [name for name in still if name in settled]
        yield from KINDS["idle-moves"].of(idle, step)
        count = len(self._trained)
        if self._num_passes and len(without) < count:
            yield from KINDS["no-gradient"].of(
                without, step, count=count, words=f" in {step} steps"
            )
        still = [name for name in still if name not in without]
        groups = [group for o in self.optimizers for group in o.param_groups if group["lr"] == 0]
        unmoving = {p for group in groups for p in group["params"]}
        at_zero = [name for name in still if self._trained[name] in unmoving]
        cause = "the learning rate of the group is 0"
        yield from KINDS["never-moved"].of(at_zero, step, count=count, cause=cause)
        rounded = [name for name in still if name not in at_zero]
        formats = of_all(dtype_name(self._trained[name].dtype) for name in rounded)
        cause = f"{formats} rounds the updates away"
        yield from KINDS["never-moved"].of(rounded, step, count=count, cause=cause)

    # ── losses and ranks ──────────────────────────────────────────────────────────────────────────

    def _loss_readings(self, loss: float) -> Iterator[Reading]:
        expected = math.log(self._vocabulary) if self._vocabulary > 1 else math.nan
        kind = KINDS["uniform-loss"]
        self._num_uniform = self._num_uniform + 1 if abs(loss / expected - 1) < kind.bound else 0
        if self._num_uniform == UNIFORM_STEPS:
            yield kind.reading(
                "",
                loss,
                expected,
                kind.bound * expected,
                self._step,
                vocabulary=self._vocabulary,
                steps=UNIFORM_STEPS,
            )
        if self._here.size == 1 or not self._is_sampled(self._step):
            return
        norm = math.sqrt(float(self._square[1])) if self._probe is not None else math.nan
        losses, norms = zip(*self._here.gather((loss, norm)), strict=True)
        for name, values in (("rank_loss", losses), ("rank_grad_norm", norms)):
            if not any(
                map(math.isnan, values)
            ):  # sharded gradients are not measured before their sum
                self._numbers |= {f"{name}/min": min(values), f"{name}/max": max(values)}
        if len({*losses}) == len({*norms}) == 1 and 0 < norm < math.inf:
            yield from self._same_batch(self._step)
        worst = max(losses, key=lambda x: (not math.isfinite(x), x))
        middle = sorted(losses)[(len(losses) - 1) // 2]
        bound = KINDS["rank-loss"].bound * max(middle, 0.0) + LOSS_APART
        if not math.isfinite(worst) or worst > middle + bound:
            rank = losses.index(worst)
            yield KINDS["rank-loss"].reading("", worst, middle, bound, self._step, rank=rank)

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
            words = "trained on the same batch: give each rank its share of the data (DistributedSampler)"
            yield KINDS["equal-ranks"].reading("", self._here.size, 1, 0, step, words=words)

    def _has_own_data(self) -> bool:
        is_own = has_own_batches(self.watched_model)
        if not is_own:
            self.unseen["batches of ranks"] = "parameters are sharded, not by FSDP"
        return is_own


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
    _STEPPED.add(optimizer)


def watch(
    model: nn.Module, optimizer: Any, *, every: int = 50, called: nn.Module | None = None
) -> Watch:
    """Watch a training loop.

    Print at the third step what is watched and what is not, and a sentence at a step that is not
    well.

    Each kind of fault is told once, and again when it is twice as large:

    * the learning rate at which the weights really train, for any optimizer; tensors that never moved or never had a gradient;
    * tensors with a gradient and no optimizer, or with two optimizers; frozen tensors that the optimizer changes;
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
