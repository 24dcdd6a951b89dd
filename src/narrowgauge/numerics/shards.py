"""DTensors, such as parameters that FSDP2 shards over ranks, and the parts of them that ranks hold.

Arithmetic is done on parts: every stored bit is a function of its element's own history. So ranks communicate only for numbers
that belong to all of them, such as the norm of the gradients, whose exact sum knows no order. States are handed out as
DTensors placed like their parameter, so that other ranks can load a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics import summation


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def is_shared_out(tensor: Any) -> bool:
    """Whether other ranks hold other elements of a tensor."""
    return is_sharded(tensor) and any(map(_cuts, tensor.placements))


def _cuts(placement: Any) -> bool:
    """Whether ranks hold different elements along an axis; ``is_shard()`` is false for what two axes cut together."""
    return not (placement.is_replicate() or placement.is_partial())


def is_unsummed(tensor: Any) -> bool:
    """Whether ranks hold terms of a tensor, whose sum it is."""
    return is_sharded(tensor) and any(placement.is_partial() for placement in tensor.placements)


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: all of it where it is no DTensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def ranks_of_parts(tensor: Any) -> list[int]:
    """The ranks whose parts make up a tensor, each element once: of several that hold the same part, this one's neighbours.

    A tensor that no axis cuts is this rank's own, so a process group must exist only where one is.
    """
    if not is_shared_out(tensor):
        import torch.distributed as dist

        return [dist.get_rank() if dist.is_initialized() else 0]
    mesh = tensor.device_mesh
    places = zip(tensor.placements, mesh.get_coordinate(), strict=True)
    ranks: list[int] = mesh.mesh[tuple(slice(None) if _cuts(each) else at for each, at in places)].flatten().tolist()
    return ranks


def copied_to_cpu(tensor: Tensor) -> Tensor:
    """A copy of the part of a tensor that this rank holds."""
    own = local_of(tensor.detach())
    return torch.empty(own.shape, dtype=own.dtype).copy_(own)


def placed_like(owner: Any, part: Tensor) -> Tensor:
    """This rank's part of a state as a DTensor placed like ``owner``, its parameter; untouched where that is no DTensor.

    A distributed checkpoint can save the result and shard it again; int16 becomes int32. ``part`` is parameter-shaped, or has
    a last dimension of 1.
    """
    if not is_sharded(owner) or part.ndim != owner.ndim:
        return part
    from torch.distributed.tensor import DTensor

    part = sendable(owner, part)
    shape = owner.shape if part.shape[-1] == local_of(owner).shape[-1] else (*owner.shape[:-1], 1)
    stride = torch.empty(shape, dtype=part.dtype, device="meta").stride()
    result: Tensor = DTensor.from_local(
        part, owner.device_mesh, owner.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return result


def sendable(owner: Any, part: Tensor) -> Tensor:
    """A state of a sharded parameter in a dtype that ranks can exchange; neither gloo nor NCCL sends integers of 16 bits."""
    return part.to(torch.int32) if part.dtype is torch.int16 and is_sharded(owner) else part


def by_reduction(tensors: Iterable[Any]) -> list[tuple[list[Any], list[Tensor]]]:
    """Tensors by the process groups over which sums over all their elements must be added up.

    Args:
        tensors: DTensors and others, on any meshes; all ranks give them in the same order.
    Returns:
        Pairs of groups, one for each mesh axis that shards elements, and this rank's parts of the tensors that they are for.
        What no axis shards has no groups, and comes first, perhaps without a tensor.
    """
    return [(groups, [local_of(tensor) for tensor in members]) for groups, members in by_group(tensors)]


def by_group(tensors: Iterable[Any]) -> list[tuple[list[Any], list[Any]]]:
    """:func:`by_reduction` with the tensors themselves."""
    found: dict[tuple[str, ...], tuple[list[Any], list[Any]]] = {(): ([], [])}
    for tensor in tensors:
        groups = []
        if is_shared_out(tensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            groups = [mesh.get_group(axis) for axis, placement in enumerate(placements) if _cuts(placement)]
        found.setdefault(tuple(group.group_name for group in groups), (groups, []))[1].append(tensor)
    return list(found.values())


def add_up(value: Tensor, groups: Iterable[Any], how: str) -> Tensor:
    """``value`` summed, or its maximum taken, over all ranks of the groups: ``how`` is ``"sum"`` or ``"max"``."""
    import torch.distributed as dist

    operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how]
    for group in groups:
        value = value.clone()
        dist.all_reduce(value, operation, group=group)
    return value


def norm_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors taken as one vector, at least one tensor, some of them DTensors: float32, 0-d.

    Every rank of their meshes calls it, with the same tensors in the same order, and gets the bits of one process that holds all.

    Cost: two reads of what this rank holds, and two small messages.
    """
    device = local_of(tensors[0]).device

    def peak_of(members: Sequence[Tensor]) -> Tensor:
        peaks = map(summation.largest_magnitude, summation.chunks_of(members))
        return torch.stack([torch.zeros((), dtype=torch.float32, device=device), *peaks]).amax()

    def steps_of(members: Sequence[Tensor], scales: Tensor) -> Tensor:
        steps = torch.zeros(2, dtype=torch.int64, device=device)
        for chunk in summation.chunks_of(members):
            steps += summation.grid_sum_of_squares(chunk, scales)
        return steps

    parts = by_reduction(tensors)
    largest = torch.stack([add_up(peak_of(members), groups, "max") for groups, members in parts]).amax()
    scales = summation.grid_scales(largest, max(1, sum(tensor.numel() for tensor in tensors)))
    steps = torch.stack([add_up(steps_of(members, scales), groups, "sum") for groups, members in parts])
    return summation.root(summation.from_grid(steps.sum(0), scales, largest))


def gathered(owner: Any, part: Tensor) -> Tensor:
    """The whole of a parameter-shaped tensor, of which each rank has a part."""
    whole: Any = placed_like(owner, part)
    return whole.full_tensor() if is_sharded(whole) else part


def own_part(owner: Any, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has the whole of."""
    if not is_sharded(owner):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return local_of(distribute_tensor(whole, owner.device_mesh, owner.placements, src_data_rank=None))
