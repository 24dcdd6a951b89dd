"""Narrow all-gathers: FSDP2 moves the weights of narrow layers as the codes that their matmuls take.

FSDP2 calls ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` of a sharded tensor that has them. Here the first casts this
rank's rows (see :mod:`narrowgauge.spec.computes`). The second passes the codes of all rows to the cast cache, where the layer's
matmuls find them. The gathered parameter has the right shape and dtype, but is filled with NaN, since no values were gathered.
Code that reads it fails visibly. The sharded parameter stays a plain DTensor for the optimizer, gradients and checkpoints.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge import torch_names
from narrowgauge.errors import RecipeError
from narrowgauge.matmul.cast_cache import give_casts
from narrowgauge.matmul.layer_matmuls import slot_dtype
from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.operand import Operand, cast_matrix
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.spec.computes import SLOTS, Compute, gathered_slots, why_gathered_wide


def gather_narrow(model: nn.Module) -> dict[str, str]:
    """Make FSDP2 gather weights as codes from now on, if the layer's compute allows it.

    Invariant: outputs and gradients have the same bits as without.

    Args:
        model: sharded by ``fully_shard``, after its layers were swapped (:func:`narrowgauge.prepare`). Computes must not
            change afterwards.
    Returns:
        The linear layers that are gathered as before: name and reason.
    Raises:
        RecipeError: no layer can be gathered as codes.
    Cost: sends 1 byte per weight and 4 bytes per row for scales, instead of the weight. If a scale covers several shards, also
    one all-reduce of amax values per gather. A gathered layer takes 1 byte per weight more memory than before.
    Source: torchao's float8 all-gather, for one scale per tensor.
    """
    groups = torch_names.fsdp_groups(model)
    for module, _ in groups:
        module.reshard()  # a forward pass leaves gathered parameters in the root
    left_wide: dict[str, str] = {}
    units: dict[nn.Module, _Unit] = {}
    users = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    is_checkpointed = bool(getattr(model, "is_gradient_checkpointing", False))
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        reason = _reason(module, users, is_checkpointed)
        if reason:
            left_wide[name] = reason
            continue
        unit = units.setdefault(_fsdp_module(model, name), _Unit())
        unit.weights.append(_GatheredWeight(name, module, unit))  # type: ignore[arg-type]
    if not units:
        first = next(iter(left_wide.items()), ("", "there are none"))
        raise RecipeError(
            f"narrow gathers were requested of a {type(model).__name__}, none of whose {len(left_wide)} linear layers can be "
            f"gathered as codes: '{first[0]}' is not since {first[1]}.",
            "Leave them out, or take a compute such as int8-row or float8-row (narrowgauge show computes).",
        )
    for _, group in groups:
        torch_names.renew_fsdp_group(group)
    return left_wide


def _reason(module: nn.Linear, users: Counter[int], is_checkpointed: bool) -> str:
    """Return why a layer's weight is not gathered as codes; empty if it is."""
    weight: Any = module.weight
    if not isinstance(module, Linear):
        return "it is PyTorch's own layer"
    if obstacle := why_gathered_wide(module.compute):
        return f"compute '{module.compute.name}' does not allow it: {obstacle}"
    forward, backward = gathered_slots(module.compute)
    if forward != backward and is_checkpointed:
        return f"activation checkpointing takes both casts of compute '{module.compute.name}' in its backward pass"
    if not is_sharded(weight):
        return "its weight is not sharded"
    if torch_names.local_shard(weight).device.type != weight.device_mesh.device_type:
        return "its shards are kept in the host's memory"
    if users[id(weight)] > 1:
        return "another module uses its weight"
    if module.is_transposed or not weight.placements[-1].is_shard(0):
        return "its shards are not whole rows of outputs"
    shards = weight.device_mesh.shape[-1]
    return f"its {weight.shape[0]} rows are not a multiple of {shards} shards" if weight.shape[0] % shards else ""


def _fsdp_module(model: nn.Module, name: str) -> nn.Module:
    from torch.distributed.fsdp import FSDPModule

    parts = name.split(".") if name else []
    around = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts), -1, -1)]
    return next(module for module in around if isinstance(module, FSDPModule))


class _Unit:
    """Weights that are gathered together. Their amax values over all shards are sent together, too."""

    def __init__(self) -> None:
        self.weights: list[_GatheredWeight] = []
        self.first: dict[bool, _GatheredWeight] = {}
        self.amaxes: dict[_GatheredWeight, Tensor] = {}

    def amax(self, weight: _GatheredWeight, in_backward: bool, dtype: torch.dtype | None, group: Any) -> Tensor:
        """Return the amax values for one weight's cast, over all ranks. The first call measures them for all weights."""
        if weight is self.first.setdefault(in_backward, weight):
            shared = [member for member in self.weights if member.spans_shards(in_backward)]
            local_amaxes = [member.own_amax(in_backward, dtype) for member in shared]
            total = torch.cat([amax.view(-1) for amax in local_amaxes])
            # A maximum may lose a NaN on its way. An infinity also makes the scale NaN.
            total = torch.where(total.isnan(), torch.inf, total)
            dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
            parts = total.split([amax.numel() for amax in local_amaxes])
            self.amaxes = {
                member: part.view(amax.shape) for member, part, amax in zip(shared, parts, local_amaxes, strict=True)
            }
        return self.amaxes.pop(weight)


class _GatheredWeight:
    """The methods of one weight that FSDP2 calls."""

    def __init__(self, name: str, layer: Linear, unit: _Unit) -> None:
        self.name, self.layer, self.unit, self.compute = name, layer, unit, layer.compute
        self.shard = torch_names.local_shard(layer.weight)
        self.shard.fsdp_pre_all_gather = self.fsdp_pre_all_gather  # type: ignore[attr-defined]
        self.shard.fsdp_post_all_gather = self.fsdp_post_all_gather  # type: ignore[attr-defined]

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return this rank's shard to send, and metadata for the other method."""
        if self.layer.compute != self.compute:
            raise RecipeError(
                f"layer '{self.name}' went from compute '{self.compute.name}' to '{self.layer.compute.name}', and its weight "
                "is gathered as the first one's codes.",
                "Leave out narrow_gather, or do not change computes.",
            )
        in_backward = torch_names.runs_backward()
        slot, amax, dtype = self.slot(in_backward), None, mp_policy.param_dtype
        if self.spans_shards(in_backward):
            amax = self.unit.amax(self, in_backward, dtype, mesh.get_group())
        cast, dim = self.compute.casts[slot], SLOTS[slot].dim
        codes, outer, _ = cast_matrix(
            self.shard.to(dtype or self.shard.dtype), cast, dim, getattr(torch, cast.format), amax=amax
        )
        parts = [codes.view(torch.uint8)]
        if _scales_rows(self.compute, self.slot(False)):
            # Send the same parts in both passes: FSDP2 reuses the memory that it gathered them into.
            scales = (
                outer if amax is None and outer is not None else codes.new_zeros(len(codes), 1, dtype=torch.float32)
            )
            parts.append(scales.view(torch.uint8))
        return tuple(parts), (slot, outer if amax is not None else None, outer_size)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Pass the codes of all rows to the cast cache. The parameter gets no values."""
        slot, outer, shape = metadata
        weight = out if out is not None else torch.empty(shape, dtype=param_dtype, device=gathered[0].device)
        weight.data.fill_(
            torch.nan
        )  # .data: autograd must not count it, since backward refills a tensor that forward saved
        codes = gathered[0].view(getattr(torch, self.compute.casts[slot].format))
        scales = gathered[1].view(torch.float32) if outer is None and len(gathered) > 1 else outer
        dtype = slot_dtype(self.compute, slot, codes.device)
        key = (self.compute.casts[slot], SLOTS[slot].dim)
        message = f"the weight of '{self.name}' was gathered as the codes of '{slot}' alone."
        give_casts(weight, {key: lambda: Operand(codes.to(dtype), scales)}, message)
        return (weight, (weight,)) if out is None else None

    def slot(self, in_backward: bool) -> str:
        return gathered_slots(self.compute)[in_backward]

    def spans_shards(self, in_backward: bool) -> bool:
        """Return whether a scale of the cast covers rows of several shards."""
        return not _scales_rows(self.compute, self.slot(in_backward))

    def own_amax(self, in_backward: bool, dtype: torch.dtype | None) -> Tensor:
        """Return the amax values of this rank's rows, in the shape that the cast takes."""
        along = (0, 1) if self.compute.casts[self.slot(in_backward)].granularity == "tensor" else (0,)
        return self.shard.to(dtype or self.shard.dtype).abs().amax(along, keepdim=True).float()


def _scales_rows(compute: Compute, slot: str) -> bool:
    """Return whether a cast of ``[out, in]`` has a scale for each of its rows."""
    return compute.casts[slot].granularity == ("row" if SLOTS[slot].dim == 1 else "column")
