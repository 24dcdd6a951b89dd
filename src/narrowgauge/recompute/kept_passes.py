"""The forward passes of an audited step, as far as they are kept, and whether they can be taken again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from narrowgauge.recompute.capture import CALL_BYTES, ForwardCall, copied, float_outputs
from narrowgauge.recompute.random_states import RandomStates
from narrowgauge.recompute.side_effects import PassWatch


class KeptPasses:
    """Keeps inputs and outputs of the passes of one step after the other.

    Args:
        model: unwrapped.

    Attributes:
        calls: the passes of this step; empty where :attr:`why_dropped` says why they are not kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._watch: PassWatch | None = None
        self._has_asked, self._keeps = False, ""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the passes of the step before."""
        self.calls: list[ForwardCall] = []
        self.why_dropped, self._why_once = "", ""
        self._written: dict[int, int] = {}
        self.end_watch()

    def drop(self, why: str) -> None:
        """Keep none of this step."""
        self.why_dropped, self.calls = why, []

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A pass begins: keep its inputs, and watch what it changes."""
        written = {id(p): p._version for p in self._model.parameters()}
        if self.calls and written != self._written:  # at other weights, as of a search for sharp directions
            self.calls = []
        self._written = written
        is_first = not self.calls
        self.end_watch()
        self._watch = PassWatch(self._model, is_first, asks_collector=is_first and not self._has_asked)
        self._has_asked = True
        device = next(self._model.parameters()).device
        is_cast = torch.is_autocast_enabled(device.type)
        autocast = torch.get_autocast_dtype(device.type) if is_cast else None
        self.calls.append(ForwardCall(copied(args), copied(kwargs), RandomStates.now(), device, autocast))

    def end(self, output: Any) -> None:
        """The pass ends: keep its outputs, and by hooks the gradients that will arrive there."""
        watch, self._watch = self._watch, None
        call = self.calls[-1]
        if watch is not None:
            call.before, why = watch.end(output)
            self._keeps = self._keeps or watch.keeps
            self._why_once = self._why_once or why or self._keeps
        room = CALL_BYTES - sum(each.nbytes for each in self.calls)
        if room < 0:
            self.drop(f"the inputs of a step exceed {CALL_BYTES >> 20} MiB")
        else:
            call.keep({place: t for place, t in float_outputs(output).items() if t.requires_grad}, room)

    def end_watch(self) -> None:
        """End the watch over a pass, also of one that ended in an error."""
        if self._watch is not None:
            self._watch.cancel()
        self._watch = None

    @property
    def why_not_again(self) -> str:
        """Why they cannot be taken again, or empty."""
        if self._why_once:
            return self._why_once
        if any(self._written.get(id(p), p._version) != p._version for p in self._model.parameters()):
            return "weights were written to since the forward pass, as by another optimizer"
        return ""
