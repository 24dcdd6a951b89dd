"""Detect silent corruption (bits that flip in memory or in arithmetic), since several ranks hold or compute the same.

    replicas     tensors that several ranks hold (a replicated model, the replicas of a shard, vectors that stay whole)
                 must have equal hashes, compared every few steps. A difference stays until it is found.
    gradients    all ranks compute the same micro-batch. Its gradients must have equal bits.

The majority is right. If two ranks disagree, both compute the gradient again; the rank whose gradient changes is wrong. Every
check raises the same error on all ranks, before damage enters an update or a checkpoint. It names the rank and the tensor.

It cannot detect damage of a shard without a replica, or a wrong gradient in a step that is not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge import torch_names
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import GroupSum
from narrowgauge.errors import CorruptionError
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import tensor_hash


class Damage(NamedTuple):
    """Result of one check. ``rank`` is ``None`` if ranks only disagree."""

    check: str
    message: str
    rank: int | None
    tensor: str


class Verifier:
    """Verify that ranks hold and compute the same.

    Invariant: it changes no value and leaves no gradient behind. All ranks call each method at the same place.

    Args:
        list_tensors: returns name, tensor and parameter of everything that this rank holds between steps, in the same order on
            all ranks. A DTensor parameter determines which other ranks hold the same.
        every: steps between verifications, see :meth:`is_due`; 0 verifies nothing.
    Cost: a verification reads all replicated tensors once and computes one micro-batch. Other steps cost nothing.
    """

    def __init__(self, list_tensors: Callable[[], Iterable[tuple[str, Tensor, Tensor]]], every: int) -> None:
        self._list_tensors, self.every, self.size = list_tensors, every, all_ranks().size

    def is_due(self, step: int) -> bool:
        """Return whether to verify the step with this number, from 1."""
        return self.size > 1 and self.every > 0 and step % self.every == 0

    @torch.no_grad()
    def verify_state(self, step: int) -> None:
        """Compare replicas across ranks.

        Raises:
            CorruptionError: on all ranks.
        Cost: one read of the replicas, and 8 bytes for each tensor and rank.
        """
        if self.size == 1 or self.every == 0:
            return
        replicas: dict[Any, list[tuple[str, Tensor]]] = {}
        for name, tensor, owner in self._list_tensors():
            for group in replica_groups(owner):
                replicas.setdefault(group, []).append((name, memory_hash(tensor)))
        _agree([damage for group, hashes in replicas.items() for damage in _compare(group, dict(hashes), step)])

    def verify_gradients(self, step: int, model: nn.Module, backward: Callable[[], object]) -> None:
        """Compare the gradients of one micro-batch that all ranks compute. If they differ, compute them again.

        Args:
            step: optimizer steps done, for the message.
            model: without gradients.
            backward: computes and differentiates the loss of the same micro-batch on every rank. It runs twice if gradients
                differ. FSDP2's sum of sharded gradients over ranks is zero meanwhile.
        Raises:
            CorruptionError: on all ranks.
        """
        if self.size == 1:
            return
        first = _gradient_hashes(model, backward)
        if any(hashes != first[0] for hashes in first):
            _agree([_gradient_damage(first, _gradient_hashes(model, backward), step)])


def _agree(damages: Sequence[Damage]) -> None:
    """Raise the first damage of any rank on all ranks."""
    ranks = all_ranks()
    if not ranks.largest(len(damages)):
        return
    of_all = [damage for some in ranks.gather(list(damages)) for damage in some]
    worst = min(of_all, key=lambda damage: damage.rank is None)
    num_others = len({damage.tensor for damage in of_all} - {worst.tensor})
    more = f"; so do {num_others} more tensors" if num_others > 1 else "; so does one more tensor" if num_others else ""
    who = (
        "Test the memory of these machines"
        if worst.rank is None
        else f"Take the machine of rank {worst.rank} out of service"
    )
    advice = f"{who}, and resume: the last checkpoint was saved before the damage."
    raise CorruptionError(f"{worst.message}{more}.", advice, worst.rank, worst.tensor, worst.check)


def replica_groups(owner: Any) -> list[Any]:
    """Return the process groups of ranks that hold the same shard of a parameter as this rank. Empty without replicas."""
    if not is_sharded(owner):
        return [dist.group.WORLD]
    mesh = owner.device_mesh
    axes = [axis for axis, placement in enumerate(owner.placements) if placement.is_replicate()]
    return [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]


def memory_hash(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bytes, int64 0-d on its device, without waiting for the device."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(flat) % 8 or flat.storage_offset() % 8 or flat.data_ptr() % 8:
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)])
    return tensor_hash(flat.view(torch.int64))


def _compare(group: Any, hashes: dict[str, Tensor], step: int) -> list[Damage]:
    mine = torch.stack([number.to(all_ranks().device) for number in hashes.values()])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    damages = []
    for name, values in zip(hashes, torch.stack(rows, 1).tolist(), strict=True):
        if wrong := _minority(values):
            who = " and ".join(f"rank {ranks[place]}" for place in wrong)
            text = f"{name} of {who} differs from that of {len(ranks) - len(wrong)} other ranks after step {step}"
            damages.append(Damage("replicas", text, ranks[wrong[0]], name))
        elif len(set(values)) > 1:
            who = " and ".join(f"rank {rank}" for rank in ranks)
            damages.append(Damage("replicas", f"{name} differs between {who} after step {step}", None, name))
    return damages


def _minority(values: Sequence[Any]) -> list[int]:
    """Return the indices of values that differ from the majority. Empty without a majority."""
    most = max(values, key=values.count)
    return [k for k, value in enumerate(values) if value != most] if 2 * values.count(most) > len(values) else []


# ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Witness(GroupSum):
    """Show each parameter's gradient on this rank, and sum nothing."""

    def __init__(self, columns: Sequence[tuple[str, int]], seen: Callable[[str, Tensor], None]) -> None:
        self.columns, self.seen = columns, seen

    def sum(self, gradient: Tensor, output: Tensor, group: Any) -> None:
        rows = gradient.view(dist.get_world_size(group), -1)
        widths = [width for _, width in self.columns]
        if sum(widths) == rows.shape[1]:
            for (name, _), part in zip(self.columns, rows.split(widths, dim=1), strict=True):
                self.seen(name, part)
        else:  # some have no gradient and are not in the message
            self.seen(self.columns[0][0], rows)
        output.zero_()


@contextmanager
def _witnessed(model: nn.Module, seen: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call ``seen`` with this rank's own gradient of every parameter during a backward pass."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    undo: list[Callable[[], object]] = []
    sharded = set()
    for _, group in torch_names.fsdp_groups(model):
        columns = [(names[p], width) for p, width in torch_names.fsdp_columns(group)]
        sharded |= {name for name, _ in columns}
        old = torch_names.swap_reduce_scatter(group, _Witness(columns, seen))
        undo.append(lambda group=group, old=old: torch_names.swap_reduce_scatter(group, old))  # type: ignore[misc]
    for parameter, name in names.items():
        if parameter.requires_grad and name not in sharded:
            undo.append(parameter.register_hook(lambda gradient, name=name: seen(name, gradient)).remove)
    try:
        yield
    finally:
        for restore in undo:
            restore()


def _gradient_hashes(model: nn.Module, backward: Callable[[], object]) -> list[dict[str, int]]:
    """Return the hashes of every rank's gradients, by name in the model's order. Leave no gradient behind."""
    hashes: dict[str, Tensor] = {}

    def see(name: str, gradient: Tensor) -> None:
        hashes[name] = memory_hash(gradient)

    with _witnessed(model, see):
        backward()
    for parameter in model.parameters():
        parameter.grad = None
    return all_ranks().gather({name: int(hashes[name]) for name, _ in model.named_parameters() if name in hashes})


def _gradient_damage(first: Sequence[dict[str, int]], second: Sequence[dict[str, int]], step: int) -> Damage:
    """Return which rank's gradients are wrong, for a micro-batch that all ranks computed twice."""
    after = f"from the same micro-batch after step {step}"
    # Backward begins at the end of the model, so the last difference in its order came first in time.
    for rank, (before, again) in enumerate(zip(first, second, strict=True)):
        if changed := [name for name, number in before.items() if again.get(name) != number]:
            text = f"rank {rank} computes another gradient of {changed[-1]} each time, {after}"
            return Damage("recomputation", text, rank, changed[-1])
    name = [n for n, number in first[0].items() if any(row.get(n) != number for row in first)][-1]
    if wrong := _minority([row.get(name) for row in first]):
        text = (
            f"rank {wrong[0]} computes another gradient of {name} than {len(first) - len(wrong)} other ranks, {after}"
        )
        return Damage("recomputation", text, wrong[0], name)
    ranks = " and ".join(f"rank {rank}" for rank in range(len(first)))
    return Damage(
        "recomputation", f"{ranks} compute different gradients of {name}, each the same again, {after}", None, name
    )
