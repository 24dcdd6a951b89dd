"""DTensors, such as parameters that FSDP2 shards, their gradients, and the local tensors of this
rank.

Arithmetic runs on local tensors: every stored bit depends only on its element's own history. Ranks
communicate only for numbers that they share, such as the norm of the gradients. States are returned
as DTensors placed like their parameter. So other ranks can load a checkpoint.

A gradient may be placed unlike its parameter: under sequence parallelism each rank has a part of a
norm's gradient, and the sum over ranks is the gradient. :func:`gradient_of` is the one reader of
``p.grad``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, also a replicated one."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def _splits(placement: Any) -> bool:
    # Not `is_shard()`, which is false for a dimension that two mesh axes split together.
    return not (placement.is_replicate() or placement.is_partial())


def local_of(tensor: Any) -> Tensor:
    """Return the local tensor of a DTensor, with partial sums added up over ranks.

    Return other tensors unchanged.
    """
    if not is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    placements = []
    for placement in tensor.placements:
        placements.append(Replicate() if placement.is_partial() else placement)
    return _placed(tensor, tuple(placements)).to_local()


def _placed(tensor: Any, placements: tuple[Any, ...]) -> Any:
    """Return a DTensor with these placements. Ranks communicate only if it has others."""
    if tensor.placements == placements:
        return tensor
    return tensor.redistribute(tensor.device_mesh, placements)


def gradient_of(parameter: Any) -> Tensor | None:
    """Return a parameter's gradient, placed like the parameter, or ``None``.

    A gradient with other placements is redistributed: partial sums are added up over ranks. The
    result replaces ``p.grad``, so ranks communicate once. All ranks of a mesh call this for the
    same parameters in the same order.
    """
    gradient = parameter.grad
    if is_sharded(gradient) and is_sharded(parameter):
        placed = _placed(gradient, parameter.placements)
        if placed is not gradient:
            with torch.no_grad():
                parameter.grad = placed
            gradient = placed
    return gradient


def named_gradients(parameters: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the gradients of the named parameters that have one, as :func:`gradient_of`."""
    gradients = {}
    for name, parameter in parameters.items():
        gradient = gradient_of(parameter)
        if gradient is not None:
            gradients[name] = gradient
    return gradients


def split_groups(tensor: Any) -> list[Any]:
    """Return the process groups of the mesh axes that split a tensor's elements."""
    groups = []
    for axis, placement in enumerate(tensor.placements if is_sharded(tensor) else ()):
        if _splits(placement):
            groups.append(tensor.device_mesh.get_group(axis))
    return groups


def part_of_row(tensor: Any, row_dims: int) -> int:
    """Return the elements of a row in a shard (the last shard may hold fewer). 0: rows are whole.

    A row is the last ``row_dims`` dimensions. If another than the first of these is sharded, its
    parts are not adjacent in memory: they count as single elements.
    """
    first = tensor.ndim - row_dims
    shape = list(tensor.shape[first:])
    for axis, placement in enumerate(tensor.placements if is_sharded(tensor) else ()):
        num_ranks = tensor.device_mesh.size(axis)
        if not _splits(placement) or num_ranks == 1 or placement.dim < first:
            continue
        if placement.dim > first:
            return 1
        shape[0] = -(-shape[0] // num_ranks)
    return 0 if shape == list(tensor.shape[first:]) else math.prod(shape)


def placed_like(owner: Any, part: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return this rank's part of a state as a DTensor placed like its parameter ``owner``.

    Keep it for a plain parameter. A distributed checkpoint can save and reshard the result.

    Args:
        part: parameter-shaped, or a part of a state of another ``shape``.
    """
    if not is_sharded(owner) or part.ndim != owner.ndim:
        return part
    from torch.distributed.tensor import DTensor

    shape = torch.Size(shape or owner.shape)
    stride = torch.empty(shape, dtype=part.dtype, device="meta").stride()
    return DTensor.from_local(
        part, owner.device_mesh, owner.placements, run_check=False, shape=shape, stride=stride
    )


def sendable(owner: Any, part: Tensor) -> Tensor:
    """Convert int16 states of a sharded parameter to int32: neither gloo nor NCCL sends integers of
    16 bits.
    """
    if part.dtype is torch.int16 and is_sharded(owner):
        return part.to(torch.int32)
    return part


def by_group(tensors: Iterable[Any]) -> list[tuple[list[Any], list[Any]]]:
    """Return pairs of process groups and tensors: the groups must add up the sums of these tensors.

    There is one group for each mesh axis that splits elements. The first pair has no groups, and
    perhaps no tensors. All ranks pass the tensors, DTensors and others, in the same order.
    """
    pairs: dict[tuple[str, ...], tuple[list[Any], list[Any]]] = {(): ([], [])}
    for tensor in tensors:
        groups = split_groups(tensor)
        names = tuple([group.group_name for group in groups])
        pairs.setdefault(names, (groups, []))[1].append(tensor)
    return list(pairs.values())


def add_up(value: Tensor, groups: Iterable[Any], how: str) -> Tensor:
    """Return the sum or maximum of ``value`` over all ranks of the groups.

    ``how`` is ``"sum"`` or ``"max"``.
    """
    import torch.distributed as dist

    operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how]
    for group in groups:
        value = value.clone()
        dist.all_reduce(value, operation, group=group)
    return value


def whole(tensor: Any) -> Tensor:
    """Return a tensor with the parts of all ranks. Return other tensors unchanged."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gathered(owner: Any, part: Tensor) -> Tensor:
    """Return a whole parameter-shaped tensor from the parts of all ranks."""
    return whole(placed_like(owner, sendable(owner, part)))


def own_part(owner: Any, tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that every rank has in full."""
    if not is_sharded(owner):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return local_of(
        distribute_tensor(tensor, owner.device_mesh, owner.placements, src_data_rank=None)
    )


def place_along(owner: Any, dim: int) -> Tensor:
    """Return where this rank's part of a tensor lies along a dimension of the whole: int32 indices."""
    index = torch.arange(owner.shape[dim], dtype=torch.int32, device=owner.device)
    if not is_sharded(owner):
        return index
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = []
    for placement in owner.placements:
        is_along = _splits(placement) and placement.dim == dim
        placements.append(placement if is_along else Replicate())
    shape = [1] * owner.ndim
    shape[dim] = -1
    whole_index = index.view(shape)
    mesh = owner.device_mesh
    return local_of(distribute_tensor(whole_index, mesh, placements, src_data_rank=None)).view(-1)
