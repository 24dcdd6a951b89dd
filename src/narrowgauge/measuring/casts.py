"""What the casts of low-precision layers lose, on sampled steps of a recorded loop.

Hooks read only tensors that are in memory anyway: inputs of linear layers and the gradients of their
outputs. So a watched run has the same bits. A sampled step is a row of ``gauges.jsonl``. Layers inside
code that the user compiled are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.matmul.experts import GroupedLinear
from narrowgauge.matmul.swapping import NarrowLayers
from narrowgauge.measuring.hooks import Hub, Listener, is_eager
from narrowgauge.numerics import metrics
from narrowgauge.numerics.exact_sums import largest_magnitude
from narrowgauge.runs.schema import Row
from narrowgauge.spec.computes import Cast
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.torch_hooks import OwnHook
from narrowgauge.torch_support.torch_names import plain_name

SAMPLE = 1 << 13
"""Values copied from each tensor: whole rows, evenly spaced."""
_SLOTS = {"input": "output.left", "output_grad": "grad_input.left"}
"""The slot whose cast is measured, for each kind of tensor."""


class Gauges(Listener):
    """Measure a model on sampled steps; ``ng.RunRecorder(…, gauges_every=20)`` makes them.

    On several ranks, all of them make all calls. Samples are of each rank's own batch.

    Args:
        hub: of the loop. The low-precision layers and experts of its model are watched.
        optimizer: whose steps are counted.
        every: number of steps between samples; 0 for none.
        on_row: called with each row of ``gauges.jsonl``.

    Attributes:
        step: number of optimizer steps done; set it when a loop resumes.

    Cost: a cast of ``SAMPLE`` values of each tensor on sampled steps, where the host waits for the
    device.
    """

    title = "the gauges"

    def __init__(
        self,
        hub: Hub,
        optimizer: torch.optim.Optimizer,
        every: int,
        on_row: Callable[[Row], object],
    ) -> None:
        self.optimizer = optimizer
        self.every = every
        self.step = 0
        self._hub = hub
        self._on_row = on_row
        self._row: Row = {}
        self._undo = ExitStack()
        self.layers: dict[str, Any] = {}
        for name, layer in NarrowLayers(hub.model).layers.items():
            self.layers[plain_name(name)] = layer
            self._hook(layer, partial(self._see_layer, plain_name(name)))
        hub.listeners.append(self)

    def end(self) -> None:
        """Remove the gauges from the model."""
        self.every = 0
        self._undo.close()

    def _hook(self, module: nn.Module, see: Callable[[Any, Any], None]) -> None:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            is_trained = torch.is_grad_enabled() and module.training
            if is_eager() and is_trained and self._is_sampled(self.step + 1):
                self._hub.guard(self, see, args, output)

        if self.every:
            self._undo.callback(module.register_forward_hook(OwnHook(hook)).remove)

    def _see_layer(self, name: str, args: Any, output: Any) -> None:
        if args:
            self._record("input", name, args[0])
        # A hook does not change the tensor, so it may still be modified in place.
        if isinstance(output, Tensor) and output.requires_grad:
            see = partial(self._hub.guard, self, self._record, "output_grad", name)
            output.register_hook(see)

    @torch.no_grad()
    def _record(self, kind: str, name: str, x: Tensor) -> None:
        """Record a tensor. A later call for the same one replaces the earlier value."""
        cast = cast_of(kind, self.layers[name])
        if cast is not None and x.numel():
            self._row.setdefault("tensors", {})[f"{kind}:{name}"] = _losses(x.detach(), cast)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the row of a sampled step."""
        if optimizer is self.optimizer:
            self.step += 1
            row = {"step": self.step, **self._row}
            self._row = {}
            if self._is_sampled(self.step):
                self._on_row(row)

    def _is_sampled(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0


# ── the numbers ───────────────────────────────────────────────────────────────────────────────────


def cast_of(kind: str, layer: Any) -> Cast | None:
    """Return the cast before a tensor's matmul, if its sample shows what the cast loses.

    Not shown are experts that scale their tokens alone.
    """
    cast: Cast | None = layer.compute.casts[_SLOTS[kind]]
    if cast is None or (cast.is_wide and cast.format == dtype_name(layer.weight.dtype)):
        return None
    if isinstance(layer, GroupedLinear) and _has_one_scale(cast):
        return None
    return cast


def _has_one_scale(cast: Cast) -> bool:
    return cast.granularity == "tensor" or cast.scale == "float8_e4m3fn"


def _losses(x: Tensor, cast: Cast) -> list[float]:
    """Return what a cast loses of evenly spaced rows, about ``SAMPLE`` values, and their largest
    magnitude over the rms.
    """
    matrix = x.reshape(-1, x.shape[-1])[:, :SAMPLE]
    rows, columns = matrix.shape
    count = max(1, min(rows, SAMPLE // columns))
    sample = matrix[:: rows // count][:count].float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    scale = None
    if _has_one_scale(cast):
        scale = largest_magnitude(x).view(1, 1)
    loss = metrics.cast_loss(metrics.cast_sums(sample, cast, amax=scale).sum(0))
    outlier = float(sample.abs().amax() / sample.square().mean().sqrt())
    return [loss.underflow, loss.overflow, loss.sqnr_db, outlier]
