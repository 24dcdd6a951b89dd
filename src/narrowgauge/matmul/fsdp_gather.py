"""All-gathers of codes: FSDP2 moves the weights of narrow layers as the codes that their matmuls
take, one byte a value.

FSDP2 calls ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` of a sharded tensor that has them.
Here the first casts this rank's rows. The second keeps the codes of all rows, where the layer's
matmuls find them. The gathered parameter is filled with NaN, so code that reads
it fails visibly. The sharded parameter stays a plain DTensor.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.operand import Operand, cast_matrix
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.spec.computes import Cast, Compute
from narrowgauge.torch_support import torch_names
from narrowgauge.torch_support.torch_names import is_traced

_SLOT = "output.right"
_gathered: dict[int, tuple[StorageWeakRef, Any, Operand]] = {}
"""By storage of a gathered parameter: what was cast, and the codes of all ranks."""


def gathered_cast(weight: Tensor, key: tuple[Any, ...]) -> Operand | None:
    """Return the cast of a weight that was gathered as codes; ``None`` for another weight."""
    if not _gathered:
        return None
    if is_traced():
        raise RecipeError(
            "Cannot compile a layer whose weight was gathered as codes because a graph cannot look "
            "them up.",
            "Leave out narrow_gather, or do not compile.",
        )
    storage, cast, operand = _gathered.get(weight.untyped_storage()._cdata, (None, None, None))
    if storage is None or storage.expired():
        return None
    if key != (cast, 1):
        raise RecipeError(
            "Cannot cast a weight because only the codes of another cast were gathered.",
            "Leave out narrow_gather, or do not call linears.set_compute.",
        )
    return operand


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
    users: Counter[int] = Counter()
    for module in model.modules():
        users.update(map(id, module._parameters.values()))
    layers: list[Any] = []
    for module in model.modules():
        has_own_weight = users[id(getattr(module, "weight", None))] == 1
        is_narrow = isinstance(getattr(module, "compute", None), Compute)
        if has_own_weight and is_narrow and _can_gather(module):
            layers.append(module)
    if not layers:
        raise RecipeError(
            f"Cannot gather weights of this {type(model).__name__} as codes: no linear layer has a "
            "weight of its own, sharded by equal numbers of rows on its device, and a compute with "
            "one cast of the weight.",
            "Leave out narrow_gather, or take a compute such as int8-row or float8-tensor.",
        )
    for layer in layers:
        _GatheredWeight(layer)
    for _, group in groups:
        torch_names.renew_fsdp_group(group)


def _can_gather(layer: Any) -> bool:
    """Return whether both matmuls take the same codes, made of the weight alone, and ranks hold
    equal numbers of its rows.
    """
    weight = layer.weight
    compute: Compute = layer.compute
    cast = compute.casts[_SLOT]
    has_own_scales = cast.scaling == "current" and cast.block is None and not cast.is_wide
    has_one_cast = compute.cast_slots["grad_input.right"] == _SLOT
    is_plain = not (compute.transform or compute.output.left.outliers or layer.is_transposed)
    if not (has_own_scales and has_one_cast and is_plain and is_sharded(weight)):
        return False
    mesh = weight.device_mesh
    is_on_device = torch_names.local_shard(weight).device.type == mesh.device_type
    has_equal_rows = weight.shape[0] % mesh.shape[-1] == 0
    return bool(is_on_device and weight.placements[-1].is_shard(0) and has_equal_rows)


class _GatheredWeight:
    """The methods of one weight that FSDP2 calls."""

    def __init__(self, layer: Any) -> None:
        self.cast: Cast = layer.compute.casts[_SLOT]
        self.shard = torch_names.local_shard(layer.weight)
        self.shard.fsdp_pre_all_gather = self.fsdp_pre_all_gather  # type: ignore[attr-defined]
        self.shard.fsdp_post_all_gather = self.fsdp_post_all_gather  # type: ignore[attr-defined]

    def fsdp_pre_all_gather(
        self, mesh: Any, size: torch.Size, stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return this rank's shard to send, and metadata for the other method."""
        weight = self.shard.to(mp_policy.param_dtype or self.shard.dtype)
        amax = None
        if self.cast.granularity == "tensor":
            amax = weight.abs().amax().float().view(1, 1)
            # A maximum may lose a NaN on its way. An infinity also makes the scale NaN.
            amax = torch.where(amax.isnan(), torch.inf, amax)
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
        dtype = getattr(torch, self.cast.format)
        codes, outer, _ = cast_matrix(weight, self.cast, 1, dtype, amax=amax)
        assert outer is not None
        if amax is not None:
            return (codes.view(torch.uint8),), (outer, size)
        return (codes.view(torch.uint8), outer.view(torch.uint8)), (None, size)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Keep the codes of all rows for :func:`gathered_cast`. The parameter gets no values."""
        outer, shape = metadata
        weight = out
        if weight is None:
            weight = torch.empty(shape, dtype=param_dtype, device=gathered[0].device)
        # .data: autograd must not count it, since backward refills a tensor that forward saved
        weight.data.fill_(torch.nan)
        codes = gathered[0].view(getattr(torch, self.cast.format))
        scales = gathered[1].view(torch.float32) if outer is None else outer
        for key in [key for key, (owner, *_) in _gathered.items() if owner.expired()]:
            del _gathered[key]
        storage = weight.untyped_storage()
        _gathered[storage._cdata] = StorageWeakRef(storage), self.cast, Operand(codes, scales)
        if out is None:
            return (weight, (weight,))
        return None
