"""Silent corruption: bits that flip in memory or in arithmetic, found because several ranks hold or compute the same.

    replicas     what several ranks hold (all of a replicated model; the replicas of a shard; vectors that stay whole) has
                 equal checksums every so many steps. A difference stays until it is found.
    rest         in a verified step, what a rank holds is summed after the update before it and again before its own; nothing
                 may change in between.
    gradients    all ranks compute the same micro-batch, whose gradients have equal bits.

The majority is right. Between two ranks that disagree, the one whose gradient changes when it is computed again is wrong; of two
differing values in memory, the one unlike its neighbours is probably damaged. Every check ends with the same error on all ranks,
before the damage is used for an update or saved, and names the rank, the tensor and the element.

What this does not see: a wrong update of a shard without a replica, and a wrong gradient in a step that is not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge import torch_names
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import GroupSum
from narrowgauge.errors import CorruptionError
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import tensor_hash

_ADVICE = "Take the machine of rank {rank} out of service and resume: the last checkpoint was saved before the damage."
_ADVICE_UNKNOWN = "Test the memory of both machines, and resume: the last checkpoint was saved before the damage."
_FAR, _NEAR = 16.0, 1e-4
"""A value is suspicious outside these multiples of the median magnitude of its neighbours."""
CHUNK_BYTES = 1 << 15
"""Where two ranks differ, they compare hashes of so many bytes to find the place."""


@dataclass(frozen=True)
class Held:
    """A tensor that this rank holds between steps.

    Args:
        name: for messages.
        tensor: this rank's shard, as it lies in memory.
        owner: the parameter that it belongs to; a DTensor says which other ranks hold the same.
    """

    name: str
    tensor: Tensor
    owner: Tensor


@dataclass(frozen=True)
class Damage:
    """What a check of :data:`narrowgauge.runs.events.RAISED_BY` found to be damaged.

    ``rank`` is a guess if ``is_guess``, and ``None`` where two ranks disagree and neither is suspicious.
    """

    check: str
    message: str
    rank: int | None
    tensor: str
    is_guess: bool = False


class Verifier:
    """Verifies what the ranks hold and compute.

    Invariant: it changes no value and leaves no gradient behind. All ranks call each method at the same place.

    Args:
        held: what this rank holds between steps, parameters and states; the same names in the same order on all ranks.
        every: steps between verifications, see :meth:`is_due`; 0 verifies nothing.
    Cost: a verification reads all that is held three times, 0.4 ns a byte on a CPU thread, and computes one micro-batch. Other
        steps cost nothing.
    """

    def __init__(self, held: Callable[[], Iterable[Held]], every: int) -> None:
        self._held, self.every, self.size = held, every, all_ranks().size
        self._resting: dict[str, tuple[int, int, Tensor]] = {}
        self._rests_since = 0

    def is_due(self, step: int) -> bool:
        """Return whether the step of this number, from 1, is verified."""
        return self.size > 1 and self.every > 0 and step % self.every == 0

    # ── at rest ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Before a verified step, remember what must not change until its update; ``step`` counts optimizer steps done."""
        self.forget()
        if self.is_due(step + 1):
            self._resting = {held.name: (*_whereabouts(held), memory_hash(held.tensor)) for held in self._held()}
            self._rests_since = step

    @torch.no_grad()
    def before_update(self) -> None:
        """Find what has changed since the last update without a recorded write.

        Raises:
            CorruptionError: on all ranks.
        """
        if self._resting:
            found = self._changed()
            self.forget()
            self._agree(found)

    def forget(self) -> None:
        """Forget the sums of what is held: it is about to change, or was set from elsewhere."""
        self._resting = {}

    def _changed(self) -> list[Damage]:
        found = []
        for held in self._held() if self._resting else ():
            *then, before = self._resting.get(held.name, (None,))
            # Whoever loads a checkpoint or sets a weight raises its version, or moves it.
            if before is not None and tuple(then) == _whereabouts(held):
                found.append((held, memory_hash(held.tensor) != before))
        flags = torch.stack([flag for _, flag in found]).tolist() if found else []
        rank = all_ranks().rank
        return [
            Damage(
                "rest", f"{held.name} of rank {rank} changed in memory after step {self._rests_since}", rank, held.name
            )
            for (held, _), flag in zip(found, flags, strict=True)
            if flag
        ]

    # ── replicas ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def verify_state(self, step: int) -> None:
        """Compare replicas across ranks, and memory that no step writes with its earlier checksum.

        Raises:
            CorruptionError: on all ranks.
        Cost: one read of it, one message of 16 bytes for each group of ranks, and one of 8.
        """
        if self.size == 1 or self.every == 0:
            return
        members: dict[Any, list[Held]] = {}
        for held in self._held():
            for group in replica_groups(held.owner):
                members.setdefault(group, []).append(held)
        differing = [finding for group, same in members.items() for finding in _compare_state(group, same, step)]
        self._agree([*self._changed(), *differing])

    # ── gradients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def verify_gradients(self, step: int, model: nn.Module, backward: Callable[[], object]) -> None:
        """Compare the gradients of one micro-batch, which all ranks compute; where they differ, compute them again.

        Args:
            step: optimizer steps done, for the message.
            model: without gradients yet.
            backward: computes the loss of the same micro-batch on every rank and differentiates it; the sum over ranks that it
                makes of gradients which FSDP2 shards is zero. Called twice where gradients differ.
        Raises:
            CorruptionError: on all ranks.
        """
        if self.size == 1:
            return
        first = _gathered_rows(_gradient_sums(model, backward))
        if all(row == first[0] for row in first):
            return
        second = _gathered_rows(_gradient_sums(model, backward))
        self._agree(_gradient_damage(first, second, step))

    def _agree(self, found: Sequence[Damage]) -> None:
        """Raise the first finding of any rank on all of them."""
        ranks = all_ranks()
        if not ranks.largest(len(found)):
            return
        of_all = [finding for findings in ranks.gather(list(found)) for finding in findings]
        # One that is sure of a rank first; replicas find each difference once on each side.
        worst = min(of_all, key=lambda finding: (finding.rank is None, finding.is_guess))
        others = len({finding.tensor for finding in of_all} - {worst.tensor})
        more = f"; so do {others} more tensors" if others > 1 else "; so does one more tensor" if others else ""
        advice = _ADVICE_UNKNOWN if worst.rank is None else _ADVICE.format(rank=worst.rank)
        raise CorruptionError(f"{worst.message}{more}.", advice, worst.rank, worst.tensor, worst.check)


def replica_groups(owner: Any) -> list[Any]:
    """Return the process groups of ranks that hold the same shard of a parameter as this one; none where it is alone."""
    if not is_sharded(owner):
        return [dist.group.WORLD]
    mesh = owner.device_mesh
    axes = [axis for axis, placement in enumerate(owner.placements) if placement.is_replicate()]
    return [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order as int64, padded with zeros."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(flat) % 8 or flat.storage_offset() % 8 or flat.data_ptr() % 8:
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)])
    return flat.view(torch.int64)


def memory_hash(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bytes, int64 0-d on its device; nothing waits for the device."""
    return tensor_hash(_words(tensor))


def _whereabouts(held: Held) -> tuple[int, int]:
    """Where a tensor lies, and how often it or its parameter was written to."""
    return held.tensor.data_ptr(), held.owner._version + held.tensor._version


def _all_gather(mine: Tensor, group: Any) -> Tensor:
    device = all_ranks().device
    parts = [torch.empty_like(mine, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine.to(device), group=group)
    return torch.stack(parts).cpu()


def _compare_state(group: Any, same: Sequence[Held], step: int) -> list[Damage]:
    sums = torch.stack([memory_hash(held.tensor).to(same[0].tensor.device) for held in same])
    digest = tensor_hash(sums).to(all_ranks().device)
    ends = torch.stack([digest, ~digest])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    largest, smallest = int(ends[0]), ~int(ends[1])
    if largest == smallest:
        return []
    table = _all_gather(sums, group)
    places = (table != table[0]).any(0).nonzero().flatten().tolist()
    ranks = dist.get_process_group_ranks(group)
    # The element is looked up for the first only: the others are named.
    return [
        _state_damage(same[place], table[:, place], ranks, group if place == places[0] else None, step)
        for place in places
    ]


def _state_damage(held: Held, sums: Tensor, ranks: Sequence[int], group: Any, step: int) -> Damage:
    place, values, neighbours = _first_difference(held.tensor, group) if group is not None else (-1, sums, sums)
    where = "" if group is None else f" in element {place} ({', '.join(map(_shown, values))})"
    wrong = _minority(sums.tolist())
    if wrong:
        who = " and ".join(f"rank {ranks[k]}" for k in wrong)
        text = (
            f"{held.name} of {who} differs from that of {len(ranks) - len(wrong)} other ranks{where} after step {step}"
        )
        return Damage("replicas", text, ranks[wrong[0]], held.name)
    likelier = _likelier(values, neighbours) if group is not None else None
    names = " and ".join(f"rank {rank}" for rank in ranks)
    text = f"{held.name} differs between {names}{where} after step {step}"
    if likelier is None:
        return Damage("replicas", f"{text}; the values do not say which is right", None, held.name)
    said = f"{text}; rank {ranks[likelier]} is the likelier to be wrong"
    return Damage("replicas", said, ranks[likelier], held.name, True)


def _minority(values: Sequence[Any]) -> list[int]:
    """Return the indices of the values that a majority of the others outvotes; none where there is no majority."""
    most = max(values, key=values.count)
    return [k for k, value in enumerate(values) if value != most] if 2 * values.count(most) > len(values) else []


def _first_difference(tensor: Tensor, group: Any) -> tuple[int, Tensor, Tensor]:
    """Return the first element that differs between ranks, its value on each, and this rank's values around it."""
    hashes = [tensor_hash(chunk) for chunk in _words(tensor).split(CHUNK_BYTES // 8)]
    chunks = _all_gather(torch.stack(hashes), group)
    chunk = int((chunks != chunks[0]).any(0).nonzero()[0])
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    around = raw[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
    bytes_of_all = _all_gather(around, group)
    byte = int((bytes_of_all != bytes_of_all[0]).any(0).nonzero()[0])
    size = tensor.element_size()
    element = byte // size
    values = bytes_of_all[:, element * size : (element + 1) * size].contiguous().view(tensor.dtype).flatten()
    return chunk * CHUNK_BYTES // size + element, values, around.cpu().clone().view(tensor.dtype)


def _shown(value: Tensor) -> str:
    return f"{value.item():.4g}" if value.is_floating_point() else f"{int(value) % (1 << 8 * value.element_size()):#x}"


def _likelier(values: Tensor, neighbours: Tensor) -> int | None:
    """Which one of two values is out of place among its neighbours; ``None`` where neither is, or both."""
    if not values.is_floating_point() or len(values) != 2:
        return None
    usual = neighbours.double().abs().median()
    sizes = values.double().abs() / usual
    odd = (~sizes.isfinite() | (sizes > _FAR) | (sizes < _NEAR)).tolist()
    return odd.index(True) if sum(odd) == 1 else None


# ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Witness(GroupSum):
    """Shows each parameter's gradient on this rank, and sums nothing."""

    def __init__(self, columns: Sequence[tuple[str, int]], seen: Callable[[str, Tensor], None]) -> None:
        self.columns, self.seen = columns, seen

    def sum(self, gradient: Tensor, output: Tensor, group: Any) -> None:
        rows = gradient.view(dist.get_world_size(group), -1)
        widths = [width for _, width in self.columns]
        if sum(widths) == rows.shape[1]:
            for (name, _), part in zip(self.columns, rows.split(widths, dim=1), strict=True):
                self.seen(name, part)
        else:  # some have no gradient: they are not in the message
            self.seen(f"{self.columns[0][0]} and its group", rows)
        output.zero_()


@contextmanager
def _witnessed(model: nn.Module, seen: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Let ``seen`` look at this rank's own gradient of every parameter during a backward pass."""
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


def _gradient_sums(model: nn.Module, backward: Callable[[], object]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}

    def see(name: str, gradient: Tensor) -> None:
        sums[name] = memory_hash(gradient)

    with _witnessed(model, see):
        backward()
    for parameter in model.parameters():
        parameter.grad = None
    # In the model's order, whichever came first.
    return {name: sums[name] for name in sorted(sums, key=[n for n, _ in model.named_parameters()].index)}


def _gathered_rows(sums: dict[str, Tensor]) -> list[dict[str, int]]:
    numbers = torch.stack(list(sums.values())).tolist() if sums else []
    return all_ranks().gather(dict(zip(sums, numbers, strict=True)))


def _gradient_damage(first: Sequence[dict[str, int]], second: Sequence[dict[str, int]], step: int) -> list[Damage]:
    """Which rank's gradients are wrong, of a micro-batch that all ranks computed twice."""
    after = f"from the same micro-batch after step {step}"
    unstable = [rank for rank, rows in enumerate(zip(first, second, strict=True)) if rows[0] != rows[1]]
    if unstable:
        rank = unstable[0]
        # Backward begins at the end of the model: what differs last in its order differed first in time.
        name = [n for n, number in first[rank].items() if second[rank].get(n) != number][-1]
        text = f"rank {rank} computes another gradient of {name} each time, {after}"
        return [Damage("recomputation", text, rank, name)]
    name = [n for n, number in first[0].items() if any(row.get(n) != number for row in first)][-1]
    wrong = _minority([row.get(name) for row in first])
    if not wrong:
        ranks = " and ".join(f"rank {rank}" for rank in range(len(first)))
        text = f"{ranks} compute different gradients of {name}, each the same again, {after}"
        return [Damage("recomputation", text, None, name)]
    text = f"rank {wrong[0]} computes another gradient of {name} than {len(first) - len(wrong)} other ranks, {after}"
    return [Damage("recomputation", text, wrong[0], name)]
