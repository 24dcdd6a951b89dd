"""The meter of a loop: it reads the hooks, and gives each step as plain numbers to one listener.

Numbers stay on their device until the step has ended, and go to the host in one vector. A GPU is
waited for only where an optimizer holds states that may be masters.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer as AnyOptimizer

from narrowgauge.measuring.check.training_setup import NARROW_WEIGHTS, TrainingSetup
from narrowgauge.measuring.optimizer_copy import low_bits_kept
from narrowgauge.measuring.reading import failure_of, words_of
from narrowgauge.measuring.samples import Sample, in_turn, samples_of, shares_of, take
from narrowgauge.measuring.watch.device_scalars import DeviceScalars, norms_of
from narrowgauge.measuring.watch.hooks import LoopHooks
from narrowgauge.measuring.watch.rank_sums import RankSums
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.schema import STEP
from narrowgauge.spec.tables import Row
from narrowgauge.torch_support.torch_hooks import OwnHook, members_of

STEPS = "steps of the optimizer"
STORED = STEP["stored"].area
CLEARED = "gradients that were not cleared"


class Meter:
    """Measure each step of a loop.

    A step ends with :meth:`end_step`, or where the last optimizer steps again: a loop that does not
    pass its steps learns of a fault one step later.

    Args:
        hooks: the hooks.
        listen: called with the row of each step; its errors are the user's, as of a full disk.
        limit: norm to which the loop clips gradients.

    Attributes:
        number: steps that are done.
        names: of all parameters.
        unseen: what is not measured, with the reason.
        last: the newest row.
    """

    title = "the watch"
    compares_ranks = False

    def __init__(
        self, hooks: LoopHooks, listen: Callable[[Row], Any], *, limit: float | None
    ) -> None:
        self.hooks = hooks
        self.limit = limit
        self._listen = listen
        self.unseen: dict[str, str] = {}
        self.last: Row = {}
        self._ended: set[Any] = set()  # measures
        self._measures: dict[str, Any] = {}  # of stored shares, by tensor
        self._undo = ExitStack()
        self._control: Tensor | None = None  # of our optimizer's last step
        self._name_all()
        self.go_on_after(0)
        self._is_whole = not any(map(is_sharded, self.names))
        if not self._is_whole:
            self.unseen["norms and weights over ranks"] = "parameters are sharded"
        self._ranks = None
        if hooks.ranks.size > 1:
            self._ranks = RankSums(hooks.ranks, self.names)
            if not self._ranks.whole:
                self._ranks = None
                self.unseen["weights of ranks"] = "ranks hold other tensors"
        self._follow_probe()
        hooks.listeners.append(self)

    def _name_all(self) -> None:
        """Name the parameters of the model, and of the optimizers: masters as what they stand for."""
        setup = TrainingSetup(self.hooks.model, self.hooks.optimizers)
        self.names = {p: name for name, p in setup.parameters.items()}
        self._masters: dict[Tensor, Tensor] = {}
        members = {*members_of(*self.hooks.optimizers)}
        if setup.missing and self.limit:
            self.limit = None  # the norm that reaches it is of another optimizer, too
            self.unseen["the clip"] = "the optimizers passed hold a part of the model"
        for stepped in setup.stepped:
            weight = setup.parameters.get(stepped.name)
            self.names[stepped.parameter] = stepped.name
            if weight is not None and weight not in members:
                self._masters[weight] = stepped.parameter
        if all(weight.ndim < 2 for weight in self._masters):
            self._masters.clear()  # vectors of ones may equal another model's

    def go_on_after(self, step: int) -> None:
        """Take the step that comes for the first after a checkpoint was loaded."""
        self.number = step
        self._first: dict[Tensor, Tensor] = {}  # samples of weights that have masters
        self._seen: Tensor | None = None  # the gradient of the probe in the last step
        self._kept: Tensor | None = None
        self._begin()

    def _begin(self) -> None:
        self.restart_clock()
        self._numbers = DeviceScalars()
        self._samples: list[Sample] = []
        self._stepped: set[AnyOptimizer] = set()
        self._row: Row = {"missing": []}

    def restart_clock(self) -> None:
        """Do not count the time since the step began."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """Remove the hooks of the meter."""
        self._undo.close()

    def _measure(self, what: str, call: Callable[..., Any], *args: Any, part: Any = None) -> Any:
        """Return the result of a measure. An error ends this measure, or its part, alone; the loop and all
        else continue.
        """
        if (what, part) in self._ended:
            return None
        try:
            return call(*args)
        except Exception as error:
            self._ended.add((what, part))
            words = words_of(error)
            if not isinstance(error, ArithmeticError):  # that is no fault of ours
                words = f"from step {self.number + 1} on: {words}"
                self.hooks.say(failure_of(f"{self.title} of {what}", error), what)
            self.unseen[what] = words

    # ── whether gradients were cleared ────────────────────────────────────────────────────────────

    def _follow_probe(self) -> None:
        """Hook the gradient of the smallest parameter, to see whether the last one was cleared before it.

        The gradient of an embedding is zero in most elements.
        """
        members = members_of(*self.hooks.optimizers)
        probes = [p for p in members if p.requires_grad and p.numel() and not is_sharded(p)]
        self._probe = min(probes, key=torch.numel, default=None)
        if self._probe is None:
            self.unseen[CLEARED] = "parameters are sharded"
            return

        def hook(gradient: Tensor) -> None:
            if not torch.compiler.is_compiling():
                self._measure(CLEARED, self._see_probe)

        self._weight = take(self._probe)
        self._undo.callback(self._probe.register_hook(OwnHook(hook)).remove)

    def _see_probe(self) -> None:
        """Compare what is there before a gradient is added with the gradient of the last step."""
        if self._seen is None:
            return
        before = self._gradient_of_probe()
        # A later pass from nothing follows a zero_grad(), as after torch.autograd.grad in a loss.
        if before is None:
            self._kept = torch.zeros_like(self._seen[0])
        elif self._kept is None:
            self._kept = (before == self._seen).all() & before.any()
        else:
            self._kept = (self._kept != 0) & before.any()

    def _gradient_of_probe(self) -> Tensor | None:
        gradient = getattr(self._probe, "grad", None)
        return None if gradient is None or gradient.is_sparse else take(gradient)

    # ── before a step ─────────────────────────────────────────────────────────────────────────────

    def before_pass(self, inputs: tuple[Any, ...]) -> None:
        """Take the inputs of the model, if ranks are replicas: shards of a tensor may need the same."""
        if self._ranks is not None and self._is_whole:
            self._measure("data of ranks", self._ranks.add_data, inputs)

    def before_step(self, optimizer: AnyOptimizer) -> None:
        """Take the numbers of a step that has its gradients."""
        if self.has_stepped and optimizer in self._stepped:
            self.end_step({})
        gradients = self._measure("gradients", self._take_gradients, optimizer) or {}
        args = optimizer, gradients, self.number
        self._samples = self._measure("samples of weights", samples_of, *args) or []
        if optimizer is self.hooks.optimizers[0]:
            self._measure("masters", self._take_masters)
        if self._ranks is not None:
            self._measure("ranks", self._ranks.add_gradients, gradients)

    def _take_gradients(self, optimizer: AnyOptimizer) -> dict[Tensor, Tensor]:
        """Take the norm of each gradient, in the order of a backward pass, and return the dense ones."""
        if not self.names.keys() >= {*members_of(optimizer)}:
            self._name_all()
        dense = {}
        parts = {}
        for p in dict.fromkeys(reversed(members_of(optimizer))):
            gradient = gradient_of(p)  # all ranks ask in one order
            if gradient is None:
                if p.requires_grad:
                    self._row["missing"].append(self.names[p])
                continue
            part = local_of(gradient)
            part = part.coalesce().values() if part.is_sparse else part
            if part.numel():
                parts[self.names[p]] = part
                if not gradient.is_sparse:
                    dense[p] = gradient
        if parts:
            norms = norms_of([*parts.values()])
            # A GPU is not waited for.
            if norms.device.type == "cpu" and not norms.isfinite().all():
                self._count_bad(parts)
            scale = getattr(optimizer, "grad_scale", None)  # of torch.amp.GradScaler, if fused
            self._numbers.set("norm", parts, norms if scale is None else norms / scale)
        return dense

    def _count_bad(self, gradients: Mapping[str, Tensor]) -> None:
        """Count the values that are not finite of the first weight that has any, or else gradient."""
        weights = {name: local_of(p) for p, name in self.names.items()}
        for tensors in (weights, gradients):
            for name, x in tensors.items():
                count = int((~x.isfinite()).sum())
                if count:
                    self._row["bad_values"] = count
                    self._row["bad_weight"] = name if tensors is weights else None
                    return

    def _take_masters(self) -> None:
        """Look for frozen weights whose master moves by more than their rounding."""
        for weight, master in in_turn([*self._masters.items()], self.number):
            now = take(weight)
            has_stood = (now == self._first.setdefault(weight, now)).all()
            is_behind = (now != take(master).to(now.dtype)).any()
            self._numbers.set("behind", [self.names[weight]], has_stood & is_behind)

    # ── after a step ──────────────────────────────────────────────────────────────────────────────

    @property
    def has_stepped(self) -> bool:
        """Return whether a step was taken that is not yet reported."""
        return self.hooks.optimizers[-1] in self._stepped

    def after_step(self, optimizer: AnyOptimizer) -> None:
        """Take the numbers of a step that is done."""
        self._measure("steps", self._after, optimizer)
        for sample in self._samples:
            names = [self.names[p] for p in sample.members]
            self._measure("jumps of weights", self._take_size, sample, names)
            # Ours have an audit. Masters may be made in a first step, so it is not repeated.
            if self.number and not isinstance(optimizer, Optimizer):
                kind = type(optimizer)
                what = f"{STORED} by {kind.__module__}.{kind.__qualname__}"
                args = what, optimizer, sample, names
                self._measure(what, self._take_stored, *args, part=sample.kind)
        self._samples = []
        self._stepped.add(optimizer)
        if not self.has_stepped:
            return
        if self._ranks is not None:
            self._measure("ranks", self._ranks.take_weights)
            is_broken = ("ranks", None) in self._ended
            self._ranks.compare(is_broken, self.number, self._numbers)
        self._numbers.send()

    def _after(self, optimizer: AnyOptimizer) -> None:
        control = getattr(optimizer, "last_control", None)
        overflow = getattr(optimizer, "found_inf", None)
        if control is not None and control is not self._control:  # else it had no gradients
            self._numbers.set("control", ["clip", "skipped"], control[:2])
            self._control = control
        elif isinstance(overflow, Tensor):
            self._numbers.set("control", ["skipped"], overflow)
        if optimizer is self.hooks.optimizers[-1]:
            # A schedule may step before the row is written.
            groups = chain.from_iterable(o.param_groups for o in self.hooks.optimizers)
            rates = [float(group["lr"]) for group in groups if group.get("lr") is not None]
            self._row["lr"] = max(rates, default=None)
            self._seen = self._gradient_of_probe()
            if self._kept is not None:
                self._numbers.set("kept", [""], self._kept)
                self._kept = None

    def _take_size(self, sample: Sample, names: list[str]) -> None:
        self._numbers.set("size", names, sample.beyond(sample.change()).amax(1))

    def _take_stored(
        self, what: str, optimizer: AnyOptimizer, sample: Sample, names: list[str]
    ) -> None:
        """Step a copy of a sample, if the class does not keep what rounding cuts."""
        measure = what, sample.kind
        is_new = measure not in self._measures.values() and sample.weights.dtype in NARROW_WEIGHTS
        if is_new and low_bits_kept(optimizer, sample.group, sample.weights):
            raise ArithmeticError(f"{type(optimizer).__name__} keeps what rounding cuts")
        self._measures |= dict.fromkeys(names, measure)
        for what, values in shares_of(optimizer, sample).items():
            self._numbers.set(what, names, values)

    # ── the end of a step ─────────────────────────────────────────────────────────────────────────

    def end_step(self, given_row: Row) -> None:
        """End a step, and give its row to the listener. Numbers from the loop come first."""
        self.number += 1
        row = {
            "step": self.number,
            "seconds": time.perf_counter() - self._began,
            "limit": self.limit,
            **self._row,
        }
        if self.has_stepped:
            self._measure("steps", lambda: row.update(self._measured(self._numbers.read())))
        elif not self._stepped:
            self._measure("steps", self._add_skipped, row)
        row |= given_row
        self.last = {name: x for name, x in row.items() if x is not None}
        self._begin()
        if self._probe is not None:
            self._weight = take(self._probe)
        self._listen(self.last)

    def _add_skipped(self, row: Row) -> None:
        """Take a step that was not seen for one that was skipped, or for a micro-batch, if a weight stands
        still. A wrapper may step by other means.
        """
        if self._probe is None or STEPS in self.unseen:
            return
        if torch.equal(take(self._probe), self._weight):
            row["skipped"] = True
        else:
            self.unseen[STEPS] = "optimizer.step() was not seen, and weights move"

    def _stored(self, read: Mapping[str, dict[str, float]]) -> Row:
        """Return the stored shares; 0 of weights that stand still while their masters move."""
        behind = [name for name, is_behind in read["behind"].items() if is_behind]
        shares = dict.fromkeys(behind, 0.0)
        for name, meant in read["meant"].items():
            if meant < 0:  # so its class does not step element by element
                measure = self._measures[name]
                self.unseen[measure[0]] = f"a copy does not repeat the step of {name}"
                self._ended.add(measure)
        for name, meant in read["meant"].items():
            if 0 < meant < math.inf and self._measures[name] not in self._ended:
                shares.setdefault(name, read["stored"][name] / meant)
        return {"stored": shares or None, "behind": behind or None}

    def _measured(self, read: Mapping[str, dict[str, float]]) -> Row:
        norms = read["norm"]
        row = {
            "skipped": bool(read["control"].get("skipped", 0.0)),
            "bad": [name for name, x in norms.items() if not math.isfinite(x)],
            "zero": sorted(name for name, x in norms.items() if not x),
            **self._stored(read),
        }
        for what in ("kept", "same_data"):
            row[what] = read[what].get("")
        if self._ranks is not None:
            for what in ("apart", "unsummed"):
                row[what] = _on_ranks(read[what])
        sizes = read["size"]
        if sizes:
            row["largest_in"] = max(sizes, key=sizes.__getitem__)
            row["largest"] = sizes[row["largest_in"]]
        if self._is_whole and ("gradients", None) not in self._ended:
            if not norms and not self._row["missing"]:
                row["missing"] = [""]
            row["arrived"] = math.hypot(*norms.values()) * read["control"].get("clip", 1.0)
        return row


def _on_ranks(numbers: Mapping[str, float]) -> list[str]:
    """Return the tensors that differ between ranks, each with the only rank that has another one."""
    names = []
    for name, number in numbers.items():
        if number:
            names.append(f"{name} on rank {number - 1:.0f}" if number > 0 else name)
    return names
