"""The cast by which a watched tensor enters its matmul, its delayed scale, and what the cast loses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from narrowgauge.gauges.recorder import Recorder, WatchedTensor
from narrowgauge.matmul.delayed_scaling import delayed_amax
from narrowgauge.matmul.grouped import GroupedLinear
from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.rng import STEP
from narrowgauge.numerics import tensor_stats
from narrowgauge.numerics.quantization import padded, quantize
from narrowgauge.spec.computes import Cast
from narrowgauge.spec.slots import SLOTS

_SLOTS = {"input": "output.left", "weight": "output.right", "output_grad": "grad_input.left"}
"""The slot whose cast is measured, for each kind of tensor."""


class Casts:
    """The casts of a model's narrow layers, as the step that runs makes them.

    Args:
        layers: the watched linear layers by name, narrow or not.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = layers
        self._delayed: dict[WatchedTensor, Tensor] = {}

    def note(self, recorder: Recorder) -> None:
        """Save the delayed scales of the step that has just run, before the layers advance to the next one."""
        self._delayed.clear()
        for index, watched in enumerate(recorder.watched):
            used = self._used(watched)
            if used is None or used[0].amax_history is None:
                continue
            layer, cast = used
            # Where no earlier step saw anything it is the tensor's own.
            mark = recorder.stats_of.get(index)
            own = torch.ones(1, dtype=torch.float32, device=layer.weight.device) if mark is None else mark[0].reshape(1)
            operand = SLOTS[_SLOTS[watched.kind]].history_index
            amax = delayed_amax(own, cast, layer.amax_history, operand, layer.state[STEP], record=False)
            if amax is not None:
                self._delayed[watched] = amax

    def of(self, watched: WatchedTensor) -> tuple[Cast | None, Tensor | None]:
        """The cast of a tensor, and its delayed scale's magnitude; nothing where it enters as it is."""
        used = self._used(watched)
        if used is None:
            return self._of_experts(watched), None
        layer, cast = used
        if cast.is_wide and cast.format == str(layer.weight.dtype).removeprefix("torch."):
            return None, None
        return cast, self._delayed.get(watched)

    def _used(self, watched: WatchedTensor) -> tuple[Linear, Cast] | None:
        """The narrow layer that takes a tensor, and its cast of it."""
        name = watched.name.removesuffix(".weight") if watched.kind == "weight" else watched.name
        layer = self.layers.get(name)
        if watched.kind not in _SLOTS or not isinstance(layer, Linear):
            return None
        return layer, layer.compute.casts[_SLOTS[watched.kind]]

    def _of_experts(self, watched: WatchedTensor) -> Cast | None:
        """The cast by which tokens enter their experts, where no expert has a scale of its own for all of its tokens."""
        layer = self.layers.get(watched.name)
        if not isinstance(layer, GroupedLinear) or watched.kind not in ("input", "output_grad"):
            return None
        cast = layer.compute.casts[_SLOTS[watched.kind]]
        whole = cast.granularity == "tensor" or cast.scale == "float8_e4m3fn"
        return None if whole or cast.is_wide else cast


def cast_stats(samples: Tensor, cast: Cast, amax: Tensor) -> Tensor:
    """``[samples, 6]``, as :data:`narrowgauge.numerics.tensor_stats.CAST_SUMS`."""
    # Blocks of several rows, and channels, must not reach into the next tensor.
    if cast.block is not None or cast.smooth:
        whole = amax.view(-1, 1, 1) if cast.scale == "float8_e4m3fn" else [None] * len(samples)
        sums = [tensor_stats.cast_sums(x, cast, amax=own).sum(0) for x, own in zip(samples, whole, strict=True)]
        return torch.stack(sums)
    count, rows, columns = samples.shape
    scale = amax.view(-1, 1).repeat_interleave(rows, 0) if cast.granularity == "tensor" else None
    return tensor_stats.cast_sums(samples.view(-1, columns), cast, amax=scale).view(count, rows, -1).sum(1)


def block_exponents(sample: Tensor, cast: Cast) -> Tensor:
    """Lowest, median, highest exponent of the sample's block scales."""
    inner = quantize(padded(sample, cast, 1), replace(cast, rounding="nearest"), 1).inner
    return tensor_stats.block_scale_exponents(inner if inner is not None else sample.new_zeros(1))


def lost_shares(sums: Tensor) -> list[float | None]:
    """Underflow, overflow and SQNR of one tensor's sums of a cast; ``None`` where it has only zeros."""
    loss = tensor_stats.cast_loss(sums)
    has_values = bool(sums[tensor_stats.CAST_SUMS.index("nonzero")])
    return [loss.underflow if has_values else None, loss.overflow, loss.sqnr_db if has_values else None]
