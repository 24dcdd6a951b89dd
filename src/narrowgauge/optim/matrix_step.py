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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.chunks import PIECE
from narrowgauge.numerics.dtensor import gathered, is_sharded, local_of, own_part
from narrowgauge.optim import codes
from narrowgauge.optim.kernel import CONTROL, Numbers, average, lanes_of
from narrowgauge.optim.rules.matrix import MatrixRule, Options, matrix_shape
from narrowgauge.optim.state import ParameterState
from narrowgauge.torch_support.triton import runs_on

MOST_TOGETHER = 1 << 24
"""Elements of matrices that share launches on a GPU. A larger matrix keeps a GPU busy alone."""


def step_matrices(
    states: Iterable[ParameterState],
    options: Options,
    numbers_of: Callable[[ParameterState], Numbers],
    launch: Callable[[list[ParameterState], bool], list[ParameterState]],
) -> Iterator[tuple[ParameterState, Tensor]]:
    """Step the matrices of one param group. Yield those that were audited without a launch, each
    with its sums.

    ``numbers_of`` returns the scalars of a state's step. ``launch`` averages the gradients of
    states into their changes (``True``), or writes the changes, and returns the states that it
    cannot take.
    """
    for ranks, members in _by_ranks(states):
        members.sort(key=lambda state: (-state.owner.numel(), matrix_shape(state.owner.shape)))
        while members:
            count = 1
            room = _room(members[0].owner.device) - members[0].owner.numel()
            if ranks is not None and not ranks.has_stacks:
                count = ranks.count
            else:
                while count < len(members) and (room := room - members[count].owner.numel()) >= 0:
                    count += 1
            batch = members[:count]
            members = members[count:]
            yield from _step_batch(
                ranks, {s: MatrixStep(s, options, numbers_of(s)) for s in batch}, launch
            )


def _room(device: torch.device) -> int:
    """Return how many elements to step together.

    A CPU gains nothing: it does not wait for launches.
    """
    return MOST_TOGETHER if runs_on(device) else 0


def _step_batch(
    ranks: Ranks | None,
    batch: Mapping[ParameterState, MatrixStep],
    launch: Callable[..., list[ParameterState]],
) -> Iterator[tuple[ParameterState, Tensor]]:
    """Step one parameter per rank, or some of this process.

    All ranks compute between the last gather and the first scatter.
    """
    steps = list(batch.values())
    measures: list[list[Tensor] | None] = []
    for place, step in enumerate(steps):
        measure = step.rule.measure and step.rule.measure(step.options)
        weight = None if measure is None else _gather(ranks, place, step.owner, step.weight())
        measures.append(
            None if measure is None or weight is None else [measure(x) for x in _matrices(weight)]
        )
        del weight
    for state in batch:
        state.change = torch.empty(
            state.parameter.shape, dtype=torch.float32, device=state.parameter.device
        )
    for state in launch(list(batch), True):
        batch[state].average()
    gradients: list[Any] = []
    for place, state in enumerate(batch):
        gradients.append(_gather(ranks, place, state.owner, state.change))
        state.change = None
    changes: list[Tensor | None] = []
    for shape, group in itertools.groupby(steps, lambda step: matrix_shape(step.owner.shape)):
        equal = list(group)
        if ranks is None and len(equal) > 1 and len(shape) == 2 and equal[0].rule.stacks:
            changes += equal[0].direction(torch.stack([gradients.pop(0) for _ in equal]), None, 0)
            continue
        for step in equal:
            gradient = gradients.pop(0)
            first = (
                0
                if ranks is None or not ranks.has_stacks
                else ranks.rank * ranks.height(len(step.owner))
            )
            changes.append(
                None
                if gradient is None
                else step.direction(gradient, measures[len(changes)], first)
            )
            del gradient
    for place, step in enumerate(steps):
        change = changes[place]
        changes[place] = None
        step.state.change = _scatter(ranks, place, step.owner, change)
        del change
        if ranks is not None:
            for tensor in step.state.tensors_of_extras().values():
                parts = (
                    enumerate(tensor.split(ranks.height(len(tensor))))
                    if ranks.has_stacks
                    else [(place, tensor)]
                )
                for source, values in parts:
                    # Neither gloo nor NCCL sends integers of 16 bits.
                    torch.distributed.broadcast(
                        values.view(-1).view(torch.uint8), group=ranks.group, group_src=source
                    )
    for state in launch(list(batch), False):
        sums = batch[state].write()
        if sums is not None:
            yield state, sums
    for state in batch:
        state.change = None


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
    return values.unbind(0) if size == 1 or not len(values) else values.split(size)


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
    buffer = part.new_empty(height * ranks.count, columns) if place == ranks.rank else None
    into = None if buffer is None else list(buffer.split(height))
    dist.gather(
        _padded(part.reshape(len(part), columns), height), into, group=ranks.group, group_dst=place
    )
    return None if buffer is None else buffer[:rows]


def _scatter(ranks: Ranks | None, place: int, owner: Tensor, matrix: Tensor | None) -> Tensor:
    """Return this rank's part of what :func:`_gather` returned on the rank ``place``."""
    import torch.distributed as dist

    if ranks is None or ranks.has_stacks:
        assert matrix is not None
        return own_part(owner, matrix.view(owner.shape)) if ranks is None else matrix
    rows, columns = matrix_shape(owner.shape)
    height = ranks.height(rows)
    local = local_of(owner)
    part = torch.empty(height, columns, dtype=torch.float32, device=local.device)
    pieces = None if matrix is None else list(_padded(matrix, height * ranks.count).split(height))
    dist.scatter(part, pieces, group=ranks.group, group_src=place)
    return part[: len(local)].view(local.shape)


def _padded(part: Tensor, rows: int) -> Tensor:
    """Return a contiguous matrix with this many rows. Added rows are zero."""
    if len(part) == rows:
        return part.contiguous()
    return torch.cat([part, part.new_zeros(rows - len(part), part.shape[1])])


def _by_ranks(states: Iterable[ParameterState]) -> list[tuple[Ranks | None, list[ParameterState]]]:
    """Group states by the mesh that shards their rows, stacks apart.

    Others have ``None``. Every rank sees the same order.
    """
    batches: dict[Any, tuple[Ranks | None, list[ParameterState]]] = {}
    for state in states:
        owner: Any = state.owner
        if not owner.numel():
            continue
        is_by_rows = (
            is_sharded(owner) and owner.device_mesh.ndim == 1 and owner.placements[0].is_shard(0)
        )
        mesh = owner.device_mesh if is_by_rows else None
        key = mesh, is_by_rows and len(matrix_shape(owner.shape)) == 3
        if key not in batches:
            ranks = (
                None
                if mesh is None
                else Ranks(mesh.get_group(), mesh.get_local_rank(), mesh.size(), key[1])
            )
            batches[key] = ranks, []
        batches[key][1].append(state)
    return list(batches.values())


# ── one parameter ─────────────────────────────────────────────────────────────────────────────────


class MatrixStep:
    """Step this rank's shard of one parameter."""

    def __init__(self, state: ParameterState, options: Options, numbers: Numbers) -> None:
        assert isinstance(state.kernel.rule, MatrixRule)
        self.state = state
        self.options = options
        self.numbers = numbers
        self.owner = state.owner
        self.storage = state.storage
        self.kernel, self.rule = state.kernel, state.kernel.rule

    def weight(self) -> Tensor:
        """Return the stored weight of this rank's shard."""
        weight = torch.empty(
            self.state.parameter.shape, dtype=torch.float32, device=self.state.parameter.device
        )
        for tensors, targets in self._pieces(weight):
            for lane, target in zip(lanes_of(self.storage, tensors, ()), targets, strict=True):
                target.copy_(codes.read_weight(self.storage, lane))
        return weight

    def average(self) -> None:
        """Write the direction's gradient for this rank's shard into ``state.change``."""
        scalars = dict(zip((*CONTROL, *self.rule.scalars), self.numbers.values, strict=True))
        for tensors, targets in self._pieces(self.state.change):
            for lane, target in zip(lanes_of(self.storage, tensors, ()), targets, strict=True):
                target.copy_(average(self.rule, self.storage, lane, scalars)[0])

    def direction(self, gradient: Tensor, measures: Sequence[Tensor] | None, first: int) -> Tensor:
        """Return the step of whole matrices in the gradient's memory, and store extras.

        ``first`` numbers the first matrix.
        """
        skip = self.numbers.values[1] != 0
        size = (
            max(1, _room(gradient.device) // math.prod(gradient.shape[-2:]))
            if self.rule.stacks
            else 1
        )
        for place, matrix in enumerate(_matrices(gradient, size)):
            index = (first + place,) if gradient.ndim == 3 else ()
            measure = None if measures is None else measures[place]
            states = {name: self.state.extra(name, index) for name in self.state.extras}
            change, new = self.rule.direction(
                matrix, measure, states, self.options, self.state.step + 1
            )
            for name, values in new.items():
                self.state.put_extra(name, values, self.numbers.seed, skip, index)
            matrix.copy_(change)
        return gradient

    def write(self) -> Tensor | None:
        """Write ``state.change``.

        Return the sums of the audit, if it is audited and this rank has elements.
        """
        totals = []
        numbers = self.numbers
        for words, changes in self._pieces(self.state.change):
            tensors = [
                *words,
                *(change.clone(memory_format=torch.contiguous_format) for change in changes),
            ]
            sums = self.kernel.run(tensors, numbers.values, numbers.seed, audited=numbers.audited)
            if sums is not None:
                totals.append(sums)
        return torch.stack(totals).sum(0) if totals and self.state.parameter.numel() else None

    def _pieces(self, values: Tensor) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield some words of the shard at a time, and the lanes of ``values`` there, a contiguous
        float32 tensor in its shape.

        The rule and the kernel make many temporaries of each piece. What is written into the lanes
        ends up in ``values``.
        """
        state = self.state
        if not state.parameter.numel():
            return
        tensors, weight = state.kernel_tensors()
        in_form = values.view(state.form)
        matrix, lanes = state.layout.lanes(in_form)
        length = len(tensors[0])
        row = tensors[0][0].numel()
        # A GPU needs large pieces, since each costs some hundred launches. Its kernel reads 16
        # bytes at a time.
        least, most = (PIECE // 4, 128) if state.parameter.is_cpu else (64 * PIECE, 32)
        unit = 4 // math.gcd(row, 4)
        size = max(least // (row * state.layout.num_lanes), -(-length // most), 1)
        size = -(-size // unit) * unit
        for start in range(0, length, size):
            words, piece = (
                [x[start : start + size] for x in several] for several in (tensors, lanes)
            )
            yield words, piece
        if matrix is not in_form:
            values.copy_(matrix.reshape(values.shape))
        state.write_back(weight)
