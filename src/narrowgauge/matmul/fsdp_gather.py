"""All-gathers of codes: FSDP2 moves the weights of narrow layers as the codes that their matmuls
take, one byte a value.

FSDP2 calls ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` of a sharded tensor that has them.
Here the first casts this rank's rows. The second passes the codes of all rows to the cast cache,
where the layer's matmuls find them. The gathered parameter is filled with NaN, so code that reads
it fails visibly. The sharded parameter stays a plain DTensor.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.cast_cache import give_cast
from narrowgauge.matmul.gemm import operand_dtype
from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.operand import Operand, cast_matrix
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.torch_support import torch_names

_SLOT = "output.right"


def gather_codes(model: nn.Module) -> None:
    """Make FSDP2 gather weights as codes from now on. Layers that cannot are gathered as before.

    Invariant: outputs and gradients have the same bits as without.

    Args:
        model: sharded by ``fully_shard``, after its layers were swapped
            (:func:`narrowgauge.prepare`). Computes must not change afterwards.
    Raises:
        RecipeError: no layer can be gathered as codes.
    Cost: sends 1 byte per weight and 4 bytes per row for scales, instead of the weight; with a scale per tensor, one all-reduce
    of its amax per gather. A gathered layer takes 1 byte per weight more memory than before.
    Source: torchao's float8 all-gather, for one scale per tensor.
    """
    groups = torch_names.fsdp_groups(model)
    for module, _ in groups:
        module.reshard()  # a forward pass leaves gathered parameters in the root
    users = Counter(
        id(parameter) for module in model.modules() for parameter in module._parameters.values()
    )
    layers = [
        m
        for m in model.modules()
        if isinstance(m, Linear) and users[id(m.weight)] == 1 and _can_gather(m)
    ]
    if not layers:
        raise RecipeError(
            f"Cannot gather weights of this {type(model).__name__} as codes: no linear layer has a "
            "weight of its own, sharded by "
            "equal numbers of rows on its device, and a compute with one cast of the weight.",
            "Leave out narrow_gather, or take a compute such as int8-row or float8-tensor.",
        )
    for layer in layers:
        _GatheredWeight(layer)
    for _, group in groups:
        torch_names.renew_fsdp_group(group)


def _can_gather(layer: Linear) -> bool:
    """Return whether both matmuls take the same codes, made of the weight alone, and ranks hold
    equal numbers of its rows.
    """
    weight: Any = layer.weight
    compute = layer.compute
    cast = layer.compute.casts[_SLOT]
    is_plain = cast.scaling == "current" and cast.block is None and not cast.is_wide
    has_other_weights = compute.transform or compute.output.left.outliers or layer.is_transposed
    has_one_cast = (
        is_plain and compute.cast_slots["grad_input.right"] == _SLOT and not has_other_weights
    )
    if not has_one_cast or not is_sharded(weight):
        return False
    is_on_device = torch_names.local_shard(weight).device.type == weight.device_mesh.device_type
    has_equal_rows = (
        weight.placements[-1].is_shard(0) and weight.shape[0] % weight.device_mesh.shape[-1] == 0
    )
    return bool(is_on_device and has_equal_rows)


class _GatheredWeight:
    """The methods of one weight that FSDP2 calls."""

    def __init__(self, layer: Linear) -> None:
        self.compute, self.cast = layer.compute, layer.compute.casts[_SLOT]
        self.shard = torch_names.local_shard(layer.weight)
        self.shard.fsdp_pre_all_gather = self.fsdp_pre_all_gather  # type: ignore[attr-defined]
        self.shard.fsdp_post_all_gather = self.fsdp_post_all_gather  # type: ignore[attr-defined]

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: Any,
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return this rank's shard to send, and metadata for the other method."""
        weight = self.shard.to(mp_policy.param_dtype or self.shard.dtype)
        amax = None
        if self.cast.granularity == "tensor":
            amax = weight.abs().amax().float().view(1, 1)
            # A maximum may lose a NaN on its way. An infinity also makes the scale NaN.
            amax = torch.where(amax.isnan(), torch.inf, amax)
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
        codes, outer, _ = cast_matrix(
            weight, self.cast, 1, getattr(torch, self.cast.format), amax=amax
        )
        assert outer is not None
        if amax is not None:
            parts = [codes]
        else:
            parts = [codes, outer]
        return tuple(part.view(torch.uint8) for part in parts), (
            None if amax is None else outer,
            outer_size,
        )

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Pass the codes of all rows to the cast cache. The parameter gets no values."""
        outer, shape = metadata
        if out is not None:
            weight = out
        else:
            weight = torch.empty(shape, dtype=param_dtype, device=gathered[0].device)
        # .data: autograd must not count it, since backward refills a tensor that forward saved
        weight.data.fill_(torch.nan)
        codes = gathered[0].view(getattr(torch, self.cast.format))
        if outer is None:
            scales = gathered[1].view(torch.float32)
        else:
            scales = outer
        dtype = operand_dtype(self.cast, self.compute.output, codes.device)
        give_cast(weight, (self.cast, 1), lambda: Operand(codes.to(dtype), scales))
        if out is None:
            return (weight, (weight,))
        return None
