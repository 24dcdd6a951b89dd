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
from torch import Tensor

from narrowgauge.matmul.experts import GroupedLinear
from narrowgauge.matmul.swapping import NarrowLayers
from narrowgauge.measuring.hooks import Hub, Listener, is_eager
from narrowgauge.numerics.exact_sums import largest_magnitude
from narrowgauge.numerics.quantization import padded, quantize, random_words, rotate, spread
from narrowgauge.runs.schema import Row
from narrowgauge.spec.computes import Cast
from narrowgauge.spec.formats import Format, dtype_name
from narrowgauge.torch_support.torch_hooks import OwnHook
from narrowgauge.torch_support.torch_names import plain_name

SAMPLE = 1 << 13
"""Values copied from each tensor: whole rows, evenly spaced."""


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
        self.layers = NarrowLayers(hub.model).layers
        self._hub = hub
        self._on_row = on_row
        self._row: Row = {}
        self._undo = ExitStack()
        for name, layer in self.layers.items():
            hook = OwnHook(partial(self._see, plain_name(name)))
            if every:
                self._undo.callback(layer.register_forward_hook(hook).remove)
        hub.listeners.append(self)

    def end(self) -> None:
        """Remove the gauges from the model."""
        self.every = 0
        self._undo.close()

    def _see(self, name: str, layer: Any, args: Any, output: Any) -> None:
        is_trained = torch.is_grad_enabled() and layer.training
        if not (is_eager() and is_trained and self._is_sampled(self.step + 1)):
            return
        record = partial(self._hub.guard, self, self._record, layer)
        casts = layer.compute.casts
        for x in args[:1]:
            record(f"input:{name}", casts["output.left"], x)
        # A hook does not change the tensor, so it may still be modified in place.
        if isinstance(output, Tensor) and output.requires_grad:
            cast = casts["grad_input.left"]
            output.register_hook(partial(record, f"output_grad:{name}", cast))

    @torch.no_grad()
    def _record(self, layer: Any, name: str, cast: Cast | None, x: Tensor) -> None:
        """Record a tensor. A later call for the same one replaces the earlier value."""
        if cast is None or not x.numel():
            return
        is_kept = cast.is_wide and cast.format == dtype_name(layer.weight.dtype)
        # A sample does not show what experts lose that scale their tokens alone.
        is_alone = isinstance(layer, GroupedLinear) and _has_one_scale(cast)
        if not is_kept and not is_alone:
            self._row.setdefault("tensors", {})[name] = _losses(x.detach(), cast)

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
    outlier = float(sample.abs().amax() / sample.square().mean().sqrt())
    return [*cast_loss(sample, cast, scale), outlier]


def cast_loss(x: Tensor, cast: Cast, amax: Tensor | None = None) -> list[float]:
    """Return what casting a matrix ``[rows, contraction]`` loses: the fraction of nonzero values that
    become zero, of values beyond the format's end, and the signal to quantization noise ratio in
    decibels, +inf if nothing is lost.

    Args:
        amax: ``[1, 1]``, replaces the matrix's own largest magnitude for the scale of a tensor.
    Example:
        >>> cast_loss(torch.tensor([[1.0, 1e-6]]), Cast("float8_e4m3fn", "row"))[:2]
        [0.5, 0.0]
    """
    values = padded(x, cast, 1).float()
    words = None
    if cast.rounding != "nearest":
        key = torch.zeros((), dtype=torch.int32, device=x.device)
        words = random_words(len(values), values.shape[1], key)
    quantized = quantize(values, cast, words=words, amax=amax)
    if cast.rotation != "none":
        values = rotate(values, 1)
    scaled = values
    if quantized.inner is not None:
        scaled = scaled / spread(quantized.inner, values.shape)
    if quantized.outer is not None:
        scaled = scaled / quantized.outer
    rounded = quantized.values().double()
    nonzero = values != 0
    zeroed = int((nonzero & (rounded == 0)).sum()) / max(int(nonzero.sum()), 1)
    beyond = int((scaled.abs() > _end(cast.element)).sum()) / x.numel()
    error = (values.double() - rounded).square().sum()
    ratio = torch.where(error == 0, torch.inf, values.double().square().sum() / error)
    return [zeroed, beyond, float(10 * ratio.log10())]


def _end(row: Format) -> float:
    """Return the largest magnitude that rounds to the format's largest: half an ulp beyond it."""
    if row.kind == "int":
        return row.max + 0.5
    return row.max + 2.0 ** (row.max_exponent - row.mantissa_bits - 1)
