"""The step of matrix rules: one rank computes the step of a parameter, and every rank writes its
shard.

A batch has one parameter for each rank, or some of one process. The largest come first:

1. Every rank averages its shard of gradient and momentum (``MatrixRule.average``).
2. The parameter is gathered on its rank, which computes ``MatrixRule.direction`` of its matrix, or of each in its stack.
3. The result is scattered, unsharded states are broadcast, and every rank writes its shard.

A stack that is sharded by its first dim is not gathered: every rank steps its own matrices, and
broadcasts their states. The bits are the same as in one process. Weights and states are decoded
piece by piece. On a GPU one launch averages a batch, and one writes it. Equal shapes share each
product of Muon. DTensors that are not sharded by rows along the one axis of a mesh are gathered,
and stepped on every rank. Other parameters belong to this process alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import gathered, is_sharded, local_of, own_part
from narrowgauge.optim import codes
from narrowgauge.optim.kernel import Numbers
from narrowgauge.optim.rules.matrix import MatrixRule, Options, matrix_shape
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.values import extra_values, read, store_extra
from narrowgauge.torch_support.triton import runs_on

Batch = Mapping[LocalState, Numbers]
"""States with the numbers of their step."""
MOST_TOGETHER = 1 << 24
"""Elements of matrices that share launches on a GPU. A larger matrix keeps a GPU busy alone."""


def step_matrices(
    numbers: Batch,
    options: Options,
    average: Callable[[Batch], None],
    write: Callable[[Batch], None],
) -> None:
    """Step the matrices of one param group.

    ``average`` averages the gradients of states into their changes, ``write`` writes the changes.
    """
    for ranks, members in _by_ranks(numbers):
        members.sort(key=lambda state: (-state.owner.numel(), matrix_shape(state.owner.shape)))
        while members:
            count = 1
            total = members[0].owner.numel()
            if ranks is not None and not ranks.has_stacks:
                count = ranks.count
            else:
                for state in members[1:]:
                    total += state.owner.numel()
                    if total > _elements_at_once(state.owner.device):
                        break
                    count += 1
            batch = {state: numbers[state] for state in members[:count]}
            members = members[count:]
            changes = _changes(ranks, batch, options, average)
            _share(ranks, batch, changes)
            write(batch)
            for state in batch:
                state.change = None


def _elements_at_once(device: torch.device) -> int:
    """Return how many elements to step together.

    A CPU gains nothing: it does not wait for launches.
    """
    return MOST_TOGETHER if runs_on(device) else 0


def _changes(
    ranks: Ranks | None, batch: Batch, options: Options, average: Callable[[Batch], None]
) -> list[Tensor | None]:
    """Return the changes of one parameter per rank, or of some of this process.

    All ranks compute between the last gather and the first scatter.
    """
    measures = [_measures(ranks, place, state, options) for place, state in enumerate(batch)]
    for state in batch:
        state.change = state.parameter.new_empty(state.parameter.shape, dtype=torch.float32)
    average(batch)
    gradients: list[Any] = []
    for place, state in enumerate(batch):
        gradients.append(_gather(ranks, place, state.owner, state.change))
        state.change = None
    changes: list[Tensor | None] = []
    for shape, group in itertools.groupby(batch, lambda state: matrix_shape(state.owner.shape)):
        equal = list(group)
        if ranks is None and len(equal) > 1 and len(shape) == 2 and _rule(equal[0]).stacks:
            joined = torch.stack([gradients.pop(0) for _ in equal])
            changes += _direction(equal[0], joined, None, 0, options, batch[equal[0]])
            continue
        for state in equal:
            gradient = gradients.pop(0)
            first = 0
            if ranks is not None and ranks.has_stacks:
                first = ranks.rank * ranks.height(len(state.owner))
            measured = measures[len(changes)]
            changes.append(None)
            if gradient is not None:
                changes[-1] = _direction(state, gradient, measured, first, options, batch[state])
            del gradient
    return changes


def _measures(
    ranks: Ranks | None, place: int, state: LocalState, options: Options
) -> list[Tensor] | None:
    """Return what a rule reads of each matrix of a weight, on the rank ``place``."""
    rule = _rule(state)
    measure = rule.measure and rule.measure(options)
    if measure is None:
        return None
    weights = state.in_shape(read(state, partial(codes.read_weight, state.storage)))
    weight = _gather(ranks, place, state.owner, weights)
    del weights
    return None if weight is None else list(map(measure, _matrices(weight)))


def _share(ranks: Ranks | None, batch: Batch, changes: list[Tensor | None]) -> None:
    """Give every rank its shards of changes, and the new extras."""
    for place, state in enumerate(batch):
        change = changes[place]
        changes[place] = None
        state.change = _scatter(ranks, place, state.owner, change)
        del change
        if ranks is None:
            continue
        for tensor in (*state.extras.values(), *state.extra_bounds.values()):
            parts: list[tuple[int, Tensor]] = [(place, tensor)]
            if ranks.has_stacks:
                parts = list(enumerate(tensor.split(ranks.height(len(tensor)))))
            for source, values in parts:
                # Neither gloo nor NCCL sends integers of 16 bits.
                octets = values.view(-1).view(torch.uint8)
                torch.distributed.broadcast(octets, group=ranks.group, group_src=source)


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Ranks:
    """Describe the ranks of a mesh that share a parameter's rows, which are whole matrices with
    ``has_stacks``.
    """

    group: Any
    rank: int
    count: int
    has_stacks: bool

    def height(self, rows: int) -> int:
        """Return how many of the rows a rank has. The last ranks may have fewer."""
        return -(-rows // self.count)


def _matrices(values: Tensor, size: int = 1) -> Sequence[Tensor]:
    """Return a matrix, or those of a stack: alone, or ``size`` together."""
    if values.ndim == 2:
        return (values,)
    if size == 1 or not len(values):
        return values.unbind(0)
    batches: Sequence[Tensor] = values.split(size)
    return batches


def _gather(ranks: Ranks | None, place: int, owner: Tensor, part: Tensor) -> Tensor | None:
    """Return a whole tensor in the ``matrix_shape`` of ``owner`` on the rank ``place``, else
    ``None``. Stacks stay in parts.
    """
    import torch.distributed as dist

    if ranks is None:
        return gathered(owner, part).reshape(matrix_shape(owner.shape))
    if ranks.has_stacks:
        return part
    rows, columns = matrix_shape(owner.shape)
    height = ranks.height(rows)
    mine = _padded(part.reshape(len(part), columns), height)
    if place != ranks.rank:
        dist.gather(mine, None, group=ranks.group, group_dst=place)
        return None
    buffer = part.new_empty(height * ranks.count, columns)
    dist.gather(mine, list(buffer.split(height)), group=ranks.group, group_dst=place)
    return buffer[:rows]


def _scatter(ranks: Ranks | None, place: int, owner: Tensor, matrix: Tensor | None) -> Tensor:
    """Return this rank's part of what :func:`_gather` returned on the rank ``place``."""
    import torch.distributed as dist

    if ranks is None:
        assert matrix is not None
        return own_part(owner, matrix.view(owner.shape))
    if ranks.has_stacks:
        assert matrix is not None
        return matrix
    rows, columns = matrix_shape(owner.shape)
    height = ranks.height(rows)
    local = local_of(owner)
    part = torch.empty(height, columns, dtype=torch.float32, device=local.device)
    pieces = None
    if matrix is not None:
        pieces = list(_padded(matrix, height * ranks.count).split(height))
    dist.scatter(part, pieces, group=ranks.group, group_src=place)
    return part[: len(local)].view(local.shape)


def _padded(part: Tensor, rows: int) -> Tensor:
    """Return a contiguous matrix with this many rows. Added rows are zero."""
    if len(part) == rows:
        return part.contiguous()
    return torch.cat([part, part.new_zeros(rows - len(part), part.shape[1])])


def _by_ranks(states: Iterable[LocalState]) -> list[tuple[Ranks | None, list[LocalState]]]:
    """Group states by the mesh that shards their rows. Stacks are groups of their own.

    Unsharded states have ``None``. Every rank sees the same order.
    """
    batches: dict[Any, tuple[Ranks | None, list[LocalState]]] = {}
    for state in states:
        owner: Any = state.owner
        if not owner.numel():
            continue
        ranks = None
        key = None
        if is_sharded(owner) and owner.device_mesh.ndim == 1 and owner.placements[0].is_shard(0):
            mesh = owner.device_mesh
            has_stacks = len(matrix_shape(owner.shape)) == 3
            ranks = Ranks(mesh.get_group(), mesh.get_local_rank(), mesh.size(), has_stacks)
            key = mesh, has_stacks
        batches.setdefault(key, (ranks, []))[1].append(state)
    return list(batches.values())


# ── one parameter ─────────────────────────────────────────────────────────────────────────────────


def _rule(state: LocalState) -> MatrixRule:
    assert isinstance(state.kernel.rule, MatrixRule)
    return state.kernel.rule


def _direction(
    state: LocalState,
    gradient: Tensor,
    measures: Sequence[Tensor] | None,
    first: int,
    options: Options,
    numbers: Numbers,
) -> Tensor:
    """Return the step of whole matrices in the gradient's memory, and store extras.

    ``first`` numbers the first matrix.
    """
    rule = _rule(state)
    skip = numbers.values[1] != 0
    size = 1
    if rule.stacks:
        size = max(1, _elements_at_once(gradient.device) // math.prod(gradient.shape[-2:]))
    for place, matrix in enumerate(_matrices(gradient, size)):
        index = (first + place,) if gradient.ndim == 3 else ()
        measure = None if measures is None else measures[place]
        extras = {name: extra_values(state, name, index) for name in state.extras}
        change, new = rule.direction(matrix, measure, extras, options, state.step + 1)
        for name, values in new.items():
            store_extra(state, name, values, numbers.seed, skip, index)
        matrix.copy_(change)
    return gradient
