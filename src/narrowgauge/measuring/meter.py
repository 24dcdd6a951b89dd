"""The meter of a loop: it reads the hooks, and gives each step as plain numbers to one listener.

Numbers stay on their device until the step has ended, and go to the host in one vector. A GPU is
waited for only where an optimizer holds states that may be masters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from narrowgauge.measuring.hooks import Hub, Listener
from narrowgauge.measuring.numbers import Numbers, norms_of, shortened
from narrowgauge.measuring.rank_sums import RankSums
from narrowgauge.measuring.reading import failure_of
from narrowgauge.measuring.samples import Sample, measured, samples_of, take
from narrowgauge.measuring.set_up import SetUp
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.schema import Row
from narrowgauge.torch_support.torch_hooks import OwnHook, members_of
from narrowgauge.torch_support.torch_names import plain_name

_NOTHING: tuple[Any, ...] = (None, "", [], {})


class Meter(Listener):
    """Measure each step of a loop.

    A step ends with :meth:`end_step`, or where the last optimizer steps again: a loop that does not
    tell of its steps is told of a fault one step later.

    Args:
        hub: the hooks.
        listen: called with the row of each step; its errors are the user's, as of a full disk.
        limit: norm to which the loop clips gradients.

    Attributes:
        number: steps that are done.
        names: of all parameters.
        unseen: what is not measured, with the reason.
        share: of the update, that was stored in the last sample; ``None`` before the first.
        last: the newest row.
        is_broken: after an error of ours nothing more is measured.
    """

    title = "the watch"

    def __init__(self, hub: Hub, listen: Callable[[Row], Any], *, limit: float | None) -> None:
        self.hub = hub
        self.limit = limit
        self._listen = listen
        self.unseen: dict[str, str] = {}
        self.share: float | None = None
        self.last: Row = {}
        self.is_broken = False
        self._undo = ExitStack()
        self._control: Tensor | None = None  # of our optimizer's last step
        self._name_all()
        self.go_on_after(0)
        blocks = {name for name, _ in hub.model.named_modules() if _is_block(name)}
        hub.follow_outputs(self, self._add_output, self._undo, blocks)
        self._is_whole = not any(map(is_sharded, self.names))
        self._ranks: RankSums | None = None
        if not self._is_whole:
            self.unseen["norms and weights over ranks"] = "parameters are sharded"
        if hub.here.size > 1:
            self._ranks = RankSums(hub.here, self.names)
            if self._is_whole and not self._ranks.whole:
                self.unseen["weights of ranks"] = "ranks hold other tensors"
        self._follow_probe()
        hub.listeners.append(self)

    def _name_all(self) -> None:
        """Name the parameters of the model, and of the optimizers: masters as what they stand for."""
        set_up = SetUp(self.hub.model, self.hub.optimizers)
        self.names = {p: name for name, p in set_up.parameters.items()}
        self.names |= {p.parameter: p.name for p in set_up.stepped}
        self.unseen |= set_up.unseen

    def go_on_after(self, step: int) -> None:
        """Take the step that comes for the first after a checkpoint was loaded."""
        self.number = step
        self._seen: Tensor | None = None  # the gradient of the probe in the last step
        self._begin()

    def _begin(self) -> None:
        self.restart_clock()
        self._numbers = Numbers()
        self._samples: dict[torch.optim.Optimizer, list[Sample]] = {}
        self._stepped: set[torch.optim.Optimizer] = set()
        self._missing: set[str] = set()
        self._outputs: dict[str, Tensor] = {}
        self._row: Row = {}
        self._kept: Tensor | None = None
        self._version = self._version_of_weights()

    def _version_of_weights(self) -> int:
        """Return a number that every step of any optimizer increases."""
        return sum(p._version for p in self.names)

    def restart_clock(self) -> None:
        """Do not count the time since the step began."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """Remove the hooks of the meter."""
        self._undo.close()

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

    # ── whether gradients were cleared ────────────────────────────────────────────────────────────

    def _follow_probe(self) -> None:
        """Hook the gradient of the smallest parameter, to see whether the last one was cleared before it.

        The gradient of an embedding is zero in most elements.
        """
        probes = []
        for p in members_of(*self.hub.optimizers):
            if p.requires_grad and p.is_leaf and not is_sharded(p) and p.numel():
                probes.append(p)
        self._probe = min(probes, key=lambda p: p.numel(), default=None)
        if self._probe is None:
            self.unseen["gradients that were not cleared"] = "parameters are sharded"
            return

        def hook(gradient: Tensor) -> None:
            if not torch.compiler.is_compiling():
                self._guard(self._see_probe)

        self._undo.callback(self._probe.register_hook(OwnHook(hook)).remove)

    def _see_probe(self) -> None:
        """Compare what is there before a gradient is added with the gradient of the last step."""
        if self._kept is None and self._seen is not None:
            before = self._gradient_of_probe()
            self._kept = torch.zeros((), device=self._seen.device)
            if before is not None:
                self._kept = (before == self._seen).all() & before.any()

    def _gradient_of_probe(self) -> Tensor | None:
        gradient = None if self._probe is None else gradient_of(self._probe)
        return None if gradient is None or gradient.is_sparse else take(gradient)

    # ── before a step ─────────────────────────────────────────────────────────────────────────────

    def _add_output(self, name: str, x: Tensor) -> None:
        """Add the sum of a block's output: not finite, if any element is not."""
        if torch.is_grad_enabled() and x.element_size() > 1:
            self._outputs[name] = x.sum(dtype=torch.float32) + self._outputs.get(name, 0.0)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the numbers of a step that has its gradients."""
        if self.has_stepped and optimizer in self._stepped:
            self.end_step({})
        self._guard(self._before, optimizer)

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.names.keys() >= {*members_of(optimizer)}:
            self._name_all()
        gradients = self._take_gradients(optimizer)
        self._take_outputs()
        self._samples[optimizer] = samples_of(optimizer, gradients, self.number)
        if self._ranks is not None:
            self._ranks.add_gradients(gradients)

    def _take_gradients(self, optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
        """Take the norm of each gradient, in the order of a backward pass, and return all of them."""
        by_parameter: dict[Tensor, Tensor] = {}
        parts = {}
        for p in dict.fromkeys(members_of(optimizer)):
            gradient = gradient_of(p)  # all ranks ask in one order
            if gradient is not None:
                by_parameter[p] = gradient
                part = local_of(gradient)
                parts[self.names[p]] = part.coalesce().values() if part.is_sparse else part
            elif p.requires_grad:
                self._missing.add(self.names[p])
        names = [name for name in reversed(parts) if parts[name].numel()]
        if names:
            norms = norms_of([*map(parts.__getitem__, names)])
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
                    self._row["bad_weight"] = name
                    break

    # ── after a step ──────────────────────────────────────────────────────────────────────────────

    @property
    def has_stepped(self) -> bool:
        """Return whether a step was taken that is not told yet."""
        return self.hub.optimizers[-1] in self._stepped

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the numbers of a step that is done."""
        had_stepped = self.has_stepped
        self._guard(self._after, optimizer)
        self._stepped.add(optimizer)
        if self.has_stepped:
            if self._ranks is not None and self._ranks.whole:
                self._guard(self._ranks.take_weights)
                for what, flags in self._ranks.compare(self.is_broken, self.number).items():
                    self._numbers.set(what, [*self._ranks.whole], flags)
            if not had_stepped:
                self._numbers.send()

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        control = getattr(optimizer, "last_control", None)
        overflow = getattr(optimizer, "found_inf", None)
        if isinstance(optimizer, Optimizer):
            if control is not None and control is not self._control:  # else it had no gradients
                self._numbers.set("control", ["clip", "skipped"], control[:2])
            self._control = control
        elif isinstance(overflow, Tensor):
            self._numbers.set("control", ["skipped"], overflow)
        for sample in self._samples.pop(optimizer, ()):
            names = [*map(self.names.__getitem__, sample.members)]
            for what, values in measured(optimizer, sample).items():
                self._numbers.set(what, names, values)
        if optimizer is self.hub.optimizers[-1]:
            rate = optimizer.param_groups[0].get("lr")
            if rate is not None:
                self._row["lr"] = float(rate)  # a schedule may step before the step is told
            self._seen = self._gradient_of_probe()
            if self._kept is not None:
                self._numbers.set("kept", [""], self._kept)

    # ── the end of a step ─────────────────────────────────────────────────────────────────────────

    def end_step(self, told: Row) -> None:
        """End a step, and give its row to the listener. What the loop tells comes first."""
        self.number += 1
        row: Row = {"step": self.number, "seconds": time.perf_counter() - self._began, **self._row}
        row["limit"] = self.limit
        if self.has_stepped:
            self._guard(lambda: row.update(self._measured(self._numbers.read())))
        elif not self._stepped and self._version == self._version_of_weights():
            row["skipped"] = True  # or the row is of a micro-batch
        row |= {**told, "step": self.number}
        self.last = {name: x for name, x in row.items() if x not in _NOTHING}
        self._begin()
        self._listen(self.last)

    def _measured(self, read: dict[str, dict[str, float]]) -> Row:
        empty: dict[str, float] = {}
        norms = read.get("norm", empty)
        outputs = read.get("output", empty)
        control = read.get("control", empty)
        sizes = {name: shortened(x) for name, x in read.get("size", empty).items() if x == x}
        row: Row = {
            "rate": self._largest_rate(),
            "skipped": bool(control.get("skipped", 0.0)),
            "bad": [name for name in norms if not math.isfinite(norms[name])],
            "bad_output": next((name for name in outputs if not math.isfinite(outputs[name])), ""),
            "stored": self._shares(read.get("meant", empty), read.get("stored", empty)),
        }
        with_gradient = {*_true(norms)}
        if with_gradient:
            row["zero"] = sorted((self._missing | {*norms}) - with_gradient)
        if self._is_whole:
            row["arrived"] = shortened(math.hypot(*norms.values()) * control.get("clip", 1.0))
        if sizes:
            row["largest_in"] = max(sizes, key=sizes.__getitem__)
            row["largest"] = sizes[row["largest_in"]]
        if "kept" in read:
            row["kept"] = bool(read["kept"][""])
        for what in ("apart", "unsummed"):
            row[what] = _true(read.get(what, empty))
        return row

    def _largest_rate(self) -> float:
        rates = [0.0]
        for optimizer in self.hub.optimizers:
            rates += [float(group.get("lr") or 0.0) for group in optimizer.param_groups]
        return max(rates)

    def _shares(self, meant: dict[str, float], stored: dict[str, float]) -> dict[str, float]:
        """Return the share of each tensor's update that was stored, and keep that of all."""
        shares = {}
        for name, x in meant.items():
            if 0 < x < math.inf:
                shares[name] = shortened(stored[name] / x)
        if shares:
            total = sum(map(stored.__getitem__, shares))
            self.share = total / sum(map(meant.__getitem__, shares))
        return shares


def _is_block(name: str) -> bool:
    """Return whether a module is a block, a part of one, or outside of all blocks."""
    parts = plain_name(name).split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return bool(name) and (not numbers or (len(numbers) == 1 and len(parts) - numbers[0] <= 2))


def _true(flags: dict[str, float]) -> list[str]:
    return [name for name, x in flags.items() if x]
