"""The meter of a loop: it reads the hooks, and gives each step as plain numbers to one listener.

Numbers stay on their device until the step has ended, and go to the host in one vector. So a GPU is
waited for only where a sampled step finds a master for the first time.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowgauge.measuring.hooks import Hub, Listener
from narrowgauge.measuring.numbers import Numbers, norms_of, shortened
from narrowgauge.measuring.rank_sums import RankSums
from narrowgauge.measuring.reading import failure_of
from narrowgauge.measuring.samples import Sampler, StepSample, in_turn, samples_of
from narrowgauge.measuring.step import Step
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.torch_support.torch_hooks import members_of
from narrowgauge.torch_support.torch_names import plain_name

_ULPS = 4
"""Largest change of a frozen element that rounding explains."""


class Meter(Listener):
    """Measure each step of a loop.

    A step ends with :meth:`end_step`, or where the last optimizer steps again: a loop that does not
    tell of its steps is told of a fault one step later.

    Args:
        hub: the hooks.
        listen: called with each step; its errors are the user's, as of a full disk.
        limit: norm to which the loop clips gradients.

    Attributes:
        number: steps that are done.
        unseen: what is not measured, with the reason.
        shares: of each group of the optimizers, the share of its update that was stored in its last
            sample.
        last: the newest step.
    """

    title = "the watch"

    def __init__(self, hub: Hub, listen: Callable[[Step], Any], *, limit: float | None) -> None:
        self.hub = hub
        self.limit = limit
        self._listen = listen
        self.number = 0
        self.resumed = False
        self.unseen: dict[str, str] = {}
        self.shares: dict[str, float] = {}
        self.last: Step | None = None
        self._undo = ExitStack()
        self._sampler = Sampler()
        self._reached: set[str] = set()
        self._moved: set[str] = set()
        self._still: set[str] = set()
        self._frozen: dict[Tensor, Tensor] = {}
        self._seen: Tensor | None = None  # the gradient of the probe in the last step
        self.is_broken = False
        self._name_all()
        self._begin()
        names = {name for name, _ in hub.model.named_modules() if _is_block(name)}
        hub.follow_outputs(self, self._add_output, self._undo, names)
        self._follow_probe()
        self._undo.callback(register_optimizer_step_post_hook(_heard_by(weakref.ref(self))).remove)
        self._is_whole = not any(map(is_sharded, self.names))
        self._ranks: RankSums | None = None
        if hub.here.size > 1:
            self._ranks = RankSums(hub.here, self.names, self._sampler)
            self.unseen |= self._ranks.unseen
        hub.listeners.append(self)

    def _name_all(self) -> None:
        """Name the parameters of the model and of the optimizers."""
        self.names: dict[Tensor, str] = {}
        for name, p in self.hub.model.named_parameters():
            self.names[p] = plain_name(name)
        self._groups: dict[str, str] = {}
        number = 0
        for optimizer in self.hub.optimizers:
            for group in optimizer.param_groups:
                for place, p in enumerate(group["params"]):
                    name = self.names.setdefault(p, f"group {number}, parameter {place}")
                    self._groups[name] = str(number)
                number += 1
        self._members = len(members_of(*self.hub.optimizers))

    def _begin(self) -> None:
        self._began = time.perf_counter()
        self._numbers = Numbers()
        self._samples: dict[torch.optim.Optimizer, list[StepSample]] = {}
        self._stepped: set[torch.optim.Optimizer] = set()
        self._missing: set[str] = set()
        self._outputs: dict[str, Tensor] = {}
        self._bad_weight = ""
        self._kept: Tensor | None = None
        self._rate: float | None = None
        self._is_sent = False
        self._others_stepped = False

    def restart_clock(self) -> None:
        """Do not count the time since the step began."""
        self._began = time.perf_counter()

    def go_on_after(self, step: int) -> None:
        """Take the step that comes for the first after a checkpoint was loaded."""
        self.number = step
        self.resumed = True
        self._reached = set()
        self._frozen = {}
        self._seen = None
        self._sampler.homes.clear()
        self._begin()

    def end(self) -> None:
        """Remove the hooks of the meter."""
        self._undo.close()

    # ── what the hooks call ───────────────────────────────────────────────────────────────────────

    def _add_output(self, name: str, x: Tensor) -> None:
        """Add the sum of a block's output: not finite, if any element is not."""
        if torch.is_grad_enabled() and x.element_size() > 1:
            total = local_of(x).sum(dtype=torch.float32)
            before = self._outputs.get(name)
            self._outputs[name] = total if before is None else before + total

    def _follow_probe(self) -> None:
        """Hook the gradient of the smallest parameter, to see whether the last one was cleared before it.

        The gradient of an embedding is zero in most elements.
        """
        self._probe: Tensor | None = None
        probes = []
        for p in members_of(*self.hub.optimizers):
            if p.requires_grad and p.is_leaf and not is_sharded(p) and p.numel():
                probes.append(p)
        if probes:
            self._probe = min(probes, key=lambda p: p.numel())
            self.hub.follow_gradients(self, self._see_probe, self._undo, self._probe)
        else:
            self.unseen["gradients that were not cleared"] = "parameters are sharded"

    def _see_probe(self, gradient: Tensor) -> None:
        """Compare what is there before a gradient is added with the gradient of the last step."""
        if self._kept is not None or self._seen is None or self._probe is None:
            return
        before = gradient_of(self._probe)
        self._kept = torch.zeros((), dtype=torch.bool, device=gradient.device)
        if before is not None and not before.is_sparse:
            values = self._sampler.take(before)
            self._kept = (values == self._seen).all() & values.any()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the numbers of a step that has its gradients."""
        if self.has_stepped and optimizer in self._stepped:
            self.end_step()
        self._guard(self._before, optimizer)

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        if len(members_of(*self.hub.optimizers)) != self._members:
            self._name_all()  # parameters were added
        gradients = self._take_gradients(optimizer)
        self._take_outputs()
        self._samples[optimizer] = samples_of(self._sampler, optimizer, gradients, self.number)
        if optimizer is self.hub.optimizers[0]:
            self._take_frozen()
        if self._ranks is not None:
            self._ranks.add_gradients(gradients)

    def _guard(self, call: Callable[..., object], *args: Any) -> None:
        """Call a part of the meter. After an error nothing more is measured, and the loop goes on."""
        if self.is_broken:
            return
        try:
            call(*args)
        except Exception as error:
            if isinstance(error, UserWarning):
                raise
            self.is_broken = True
            self.hub.say(failure_of(self.title, error))

    def _take_gradients(self, optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
        """Take the norm of each gradient, in the order of a backward pass, and return all of them."""
        by_parameter: dict[Tensor, Tensor] = {}
        gradients = {}
        for p in dict.fromkeys(members_of(optimizer)):
            gradient = gradient_of(p)  # all ranks ask in one order
            name = self.names[p]
            if gradient is not None:
                by_parameter[p] = gradient
                part = local_of(gradient)
                gradients[name] = part.coalesce().values() if part.is_sparse else part
            elif p.requires_grad:
                self._missing.add(name)
        names = [name for name in reversed(gradients) if gradients[name].numel()]
        if names:
            norms = norms_of([*map(gradients.__getitem__, names)])
            scale = getattr(optimizer, "grad_scale", None)  # of torch.amp.GradScaler, if fused
            self._numbers.set("norm", names, norms if scale is None else norms / scale)
        return by_parameter

    def _take_outputs(self) -> None:
        if not self._outputs:
            return
        sums = torch.stack([*self._outputs.values()])
        self._numbers.set("output", [*self._outputs], sums)
        self._outputs = {}
        if sums.device.type == "cpu" and not bool(sums.isfinite().all()):
            for p, name in self.names.items():
                if not bool(local_of(p).isfinite().all()):
                    self._bad_weight = name
                    break

    def _take_frozen(self) -> None:
        """Look for frozen tensors that change by a few roundings."""
        frozen = [p for p in self.names if not p.requires_grad and p.is_floating_point()]
        for p in in_turn([p for p in frozen if local_of(p).numel()], self.number):
            now = self._sampler.take(p.detach())
            before = self._frozen.get(p)
            self._frozen[p] = now
            if before is not None:
                ulp = (before.abs() * torch.finfo(p.dtype).eps).clamp_min(1e-30)
                ulps = (now - before).abs() / ulp
                drifts = (ulps <= _ULPS).all() & (ulps > 0).any()
                self._numbers.set("drift", [self.names[p]], drifts)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the numbers of a step that is done."""
        self._guard(self._after, optimizer)
        self._stepped.add(optimizer)
        if self.has_stepped:
            if self._ranks is not None:
                self._guard(self._ranks.take_weights)
                for what, flags in self._ranks.compare(self.is_broken, self.number).items():
                    self._numbers.set(what, [*self._ranks.whole], flags)
            if not self._is_sent:
                self._numbers.send()
                self._is_sent = True

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        self._take_control(optimizer)
        for sample in self._samples.pop(optimizer, ()):
            sample.finish()
            names = [*map(self.names.__getitem__, sample.members)]
            self._numbers.set("move", names, sample.moves)
            self._numbers.set("size", names, sample.sizes)
            if sample.meant is not None:
                self._numbers.set("meant", names, sample.meant)
                self._numbers.set("share", names, sample.kept / sample.meant)
        if optimizer is not self.hub.optimizers[-1]:
            return
        rate = optimizer.param_groups[0].get("lr")
        if rate is not None:
            self._rate = float(rate)  # a schedule may step before the step is told
        self._seen = None
        gradient = None if self._probe is None else gradient_of(self._probe)
        if gradient is not None and not gradient.is_sparse:
            self._seen = self._sampler.take(gradient)
        if self._kept is not None:
            self._numbers.set("kept", [""], self._kept)

    def _take_control(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the factor of our optimizer's clip, and whether a step was skipped."""
        control = getattr(optimizer, "last_control", None)
        if isinstance(optimizer, Optimizer) and control is not None:
            self._numbers.set("control", ["clip", "skipped"], control[:2])
            return
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, Tensor):
            self._numbers.set("control", ["skipped"], found)

    def hear(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear of a step of any optimizer: one that is not watched may step the same weights."""
        if optimizer not in self.hub.optimizers:
            self._others_stepped |= not self.names.keys().isdisjoint(members_of(optimizer))

    # ── the end of a step ─────────────────────────────────────────────────────────────────────────

    @property
    def has_stepped(self) -> bool:
        """Return whether a step was taken that is not told yet."""
        return self.hub.optimizers[-1] in self._stepped

    def end_step(self, **told: Any) -> None:
        """End a step, and give it to the listener.

        Args:
            told: fields of :class:`Step` that the loop tells.
        """
        values = self._values() | told
        self.number += 1
        step = Step(self.number, **values)
        if self.has_stepped:
            self.resumed = False
        self.last = step
        self._begin()
        self._listen(step)

    def _values(self) -> dict[str, Any]:
        """Return the measured fields of the step."""
        values: dict[str, Any] = {
            "seconds": time.perf_counter() - self._began, "limit": self.limit, "resumed": self.resumed,
        }  # fmt: skip
        if not self._is_sent:
            # Another optimizer may have taken the step.
            values["skipped"] = None if self._others_stepped else True
        else:
            self._guard(lambda: values.update(self._measured(self._numbers.read())))
        return values

    def _measured(self, read: dict[str, dict[str, float]]) -> dict[str, Any]:
        empty: dict[str, float] = {}
        norms = read.get("norm", empty)
        control = read.get("control", empty)
        sizes = _finite(read.get("size", empty))
        shares = _finite(read.get("share", empty))
        with_gradient = {*_true(norms)}
        zero = (self._missing | {*norms}) - with_gradient
        zero &= self._reached
        self._reached |= with_gradient
        self._moved |= {*_true(read.get("move", empty))}
        self._still = (self._still | {*sizes}) - self._moved - {*shares}
        self._share_groups(shares, read.get("meant", empty))
        largest_in = max(sizes, key=sizes.__getitem__, default="")
        values: dict[str, Any] = {
            "lr": self._rate,
            "rate": self._largest_rate(),
            "skipped": bool(control.get("skipped", 0.0)),
            "zero": sorted(zero),
            "bad": [name for name in norms if not math.isfinite(norms[name])],
            "bad_output": _first(read.get("output", empty)),
            "bad_weight": self._bad_weight,
            "stored": shares,
            "still": sorted(self._still & with_gradient),
            "largest_in": largest_in,
        }
        if self._is_whole:
            values["arrived"] = shortened(math.hypot(*norms.values()) * control.get("clip", 1.0))
        if sizes:
            values["largest"] = shortened(sizes[largest_in])
        if "kept" in read:
            values["kept"] = bool(read["kept"][""])
        for what in ("drift", "apart", "unsummed"):
            values[what] = _true(read.get(what, empty))
        return values

    def _largest_rate(self) -> float:
        largest = 0.0
        for optimizer in self.hub.optimizers:
            for group in optimizer.param_groups:
                largest = max(largest, float(group.get("lr") or 0.0))
        return largest

    def _share_groups(self, shares: dict[str, float], meant: dict[str, float]) -> None:
        """Keep the share of each group, weighted by the updates that were meant."""
        totals: dict[str, list[float]] = {}
        for name, x in shares.items():
            total = totals.setdefault(self._groups.get(name, "0"), [0.0, 0.0])
            total[0] += x * meant[name]
            total[1] += meant[name]
        for group, (stored, size) in totals.items():
            self.shares[group] = stored / size if size else math.nan


def _heard_by(meter: weakref.ref[Meter]) -> Callable[..., None]:
    """Return a hook on every optimizer that keeps nothing alive."""

    def hear(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        alive = meter()
        if alive is not None:
            alive.hear(optimizer)

    return hear


def _is_block(name: str) -> bool:
    """Return whether a module is a block, a part of one, or outside of all blocks."""
    if not name:
        return False
    parts = plain_name(name).split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return not numbers or (len(numbers) == 1 and len(parts) - numbers[0] <= 2)


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {name: shortened(x) for name, x in values.items() if math.isfinite(x)}


def _first(outputs: dict[str, float]) -> str:
    """Return the first name whose value is not finite."""
    for name, x in outputs.items():
        if not math.isfinite(x):
            return name
    return ""


def _true(flags: dict[str, float]) -> list[str]:
    return [name for name, x in flags.items() if x]
