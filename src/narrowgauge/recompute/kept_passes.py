"""The forward passes of an audited step, as far as they are kept, and whether they can be taken again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from narrowgauge.recompute.capture import CALL_BYTES, ForwardCall
from narrowgauge.recompute.inputs_and_outputs import copied, float_outputs
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
        self._num_watched, self._keeps = 0, ""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the passes of the step before."""
        self.calls: list[ForwardCall] = []
        self.why_dropped, self._why_once = "", ""
        self._written: dict[int, int] = {}
        self._watch = None

    def drop(self, why: str) -> None:
        """Keep none of this step."""
        self.why_dropped, self.calls = why, []

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A pass begins: keep its inputs, and watch what it changes."""
        if self.calls and self._is_written:  # at other weights, as of a search for sharp directions
            self.calls = []
        is_first = not self.calls
        self._num_watched += is_first
        # In the steps 1, 2, 4, 8, … of those that are kept: it takes longest, and what a model does once it mostly does always.
        asks = is_first and not self._keeps and self._num_watched.bit_count() == 1
        self._watch = PassWatch(self._model, (args, kwargs), is_first, asks_collector=asks)
        device = next(self._model.parameters()).device
        is_cast = torch.is_autocast_enabled(device.type)
        autocast = torch.get_autocast_dtype(device.type) if is_cast else None
        self.calls.append(ForwardCall(copied(args), copied(kwargs), RandomStates.now(), device, autocast))

    def end(self, output: Any) -> None:
        """The pass ends: keep its outputs, and by hooks the gradients that will arrive there."""
        watch, self._watch = self._watch, None
        call = self.calls[-1]
        self._written = {id(p): p._version for p in self._model.parameters()}
        if watch is not None:
            call.before, why = watch.end(output)
            self._keeps = self._keeps or watch.keeps
            self._why_once = self._why_once or why or self._keeps
        outputs = {place: t for place, t in float_outputs(output).items() if t.requires_grad}
        if any(t.is_leaf for t in outputs.values()):
            self.drop("an output of the model is a parameter")
            return
        room = CALL_BYTES - sum(each.nbytes for each in self.calls)
        if room < 0:
            self.drop(f"the inputs of a step exceed {CALL_BYTES >> 20} MiB")
        else:
            call.keep(outputs, room)

    def settle(self) -> None:
        """A backward pass left a gradient in a parameter, so what arrived at outputs before is of it."""
        for call in self.calls:
            call.settle()

    @property
    def _is_written(self) -> bool:
        """Whether a parameter was written to since the last pass."""
        return any(self._written.get(id(p), p._version) != p._version for p in self._model.parameters())

    @property
    def why_not_again(self) -> str:
        """Why they cannot be taken again, or empty."""
        if self._why_once:
            return self._why_once
        if self._is_written:
            return "weights were written to since the forward pass, as by another optimizer"
        return ""
