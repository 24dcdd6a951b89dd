"""Shard a model's parameters over the ranks of a mesh by PyTorch's FSDP2, one group for each
block.

FSDP2 gathers a group's parameters before they are used, and reduce-scatters its gradients after
backward. A two-dimensional mesh is *hybrid*: replicas along its first axis, shards along its second.
"""

import itertools
from typing import Any

import torch
from torch import nn

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.torch_support import torch_names
from narrowgauge.torch_support.model_parts import parts


def shard(
    model: nn.Module, mesh: Any, *, offload: bool = False, wire: str = "", average: bool = True
) -> nn.Module:
    """Shard a model's parameters over a mesh with FSDP2: a group for each member of a run (see
    :mod:`narrowgauge.torch_support.model_parts`), and one for the rest.

    Args:
        model: whole on every rank, with equal values, of one dtype. Its parameters become DTensors,
            in place.
        mesh: a ``DeviceMesh`` of one axis, or of two: replicas, then shards. See :func:`require_mesh`.
        offload: keep parameters, gradients and states in the host's memory. A layer is copied to
            the device when it is used.
        wire: the format of FSDP2's sums; empty: the gradients' own.
        average: whether FSDP2 divides the sums by the number of ranks.
    Cost: per micro-batch two gathers of every layer and one reduction of its gradients. A rank holds its part of the model and
        two whole layers.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    options = {"mesh": mesh, "offload_policy": OffloadPolicy()}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    if wire:
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=getattr(torch, wire))
    layers: list[nn.Module] = []
    for run in parts(model).runs:
        layers.extend(layer for layer in run if _owns_its_parameters(layer, model))
    for module in (*reversed(layers), model):
        fully_shard(module, **options)
    for module in fsdp_modules(model):
        # NCCL's average multiplies by 1 / ranks in the gradient's format, which is biased unless
        # the ranks are a power of two.
        module.set_force_sum_reduction_for_comms(True)
        if not average:
            module.set_gradient_divide_factor(1.0)
    return model


def fsdp_modules(model: nn.Module) -> list[Any]:
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard_modules(model: nn.Module) -> None:
    """Let FSDP2 and the modules hold the same sharded parameters.

    A forward pass may leave gathered parameters in the modules. ``to_empty`` and
    ``load_state_dict(assign=True)`` replace sharded ones, which FSDP2 looks for only in its first
    forward pass.
    """
    for module, group in torch_names.fsdp_groups(model):
        module.reshard()
        torch_names.renew_fsdp_group(group)


def has_shards(model: nn.Module) -> bool:
    """Return whether any parameter is a DTensor, or FSDP2 has gathered it at the moment."""
    return any(map(is_sharded, model.parameters())) or bool(torch_names.fsdp_groups(model))


def make_equal(model: nn.Module, mesh: Any) -> None:
    """Broadcast the parameters and buffers of a mesh's first rank, so that replicas begin with
    equal bits.
    """
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        if group.size() > 1:
            for tensor in itertools.chain(model.parameters(), model.buffers()):
                values = tensor.detach().contiguous()
                torch.distributed.broadcast(values, group=group, group_src=0)
                tensor.detach().copy_(values)


def require_mesh(mesh: Any) -> None:
    """Refuse a mesh that FSDP2 cannot shard over, or that lacks this rank."""
    if mesh.ndim > 2 or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
        raise RecipeError(
            "Cannot shard over a mesh of more than two axes, or of two without names.",
            'Take a part of it, or init_device_mesh(…, mesh_dim_names=("replicate", "shard")).',
        )
    if mesh.get_coordinate() is None:
        raise RecipeError(
            "Cannot prepare a model on this rank because the mesh has only ranks "
            f"{mesh.mesh.flatten().tolist()}.",
            "Call prepare on the ranks of the mesh alone.",
        )


def _owns_its_parameters(layer: nn.Module, model: nn.Module) -> bool:
    """Return whether no module outside a layer uses its parameters.

    FSDP2 needs tied parameters in one group.
    """
    inner_params = set(layer.parameters())
    outer_modules = set(model.modules()) - set(layer.modules())
    return all(inner_params.isdisjoint(module.parameters(False)) for module in outer_modules)
