"""Chunks of a state: some rows at a time, as the definition steps them.

Beside the launch of a kernel, only :func:`chunks_of` reads states. It yields views of memory, and
copies of what is not dense.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.numerics.chunks import chunk_size
from narrowgauge.numerics.hashing import signed
from narrowgauge.optim.step import codes
from narrowgauge.optim.step.bit_layout import BLOCK, INTEGER, planes_of
from narrowgauge.optim.step.codes import Fields, Lane, Scales
from narrowgauge.optim.step.state import LocalState
from narrowgauge.spec.storages import Storage


def integers_of(values: Tensor) -> Tensor:
    """View stored values as integers of their size."""
    return values.view(INTEGER[8 * values.dtype.itemsize])


def word_of(values: Tensor) -> Tensor:
    """Return the words of stored values: int32, of float64 int64. Upper bits may be anything."""
    integers = integers_of(values)
    if integers.dtype.itemsize < 4:
        return integers.to(torch.int32)
    return integers


def lane_of(
    storage: Storage,
    weight: Tensor,
    gradient: Tensor,
    planes: Iterable[Tensor],
    scales: Scales,
) -> Lane:
    """Return the inputs of a step from stored values, or from their integers."""
    words = [word_of(values) for values in planes]
    visible = codes.weight_bits(storage.visible, word_of(weight))
    return Lane(visible, gradient.float(), words, scales)


@dataclass(frozen=True, slots=True)
class StateChunk:
    """Hold some rows: views of the weight, of planes and block bounds by name, and of the arguments."""

    storage: Storage
    weight: Tensor
    planes: Mapping[str, Tensor]
    bounds: Mapping[str, Tensor]
    arguments: Sequence[Tensor]

    def lane(self, gradient: Tensor | None = None) -> Lane:
        """Return the inputs of a step. Without a ``gradient`` it is 0."""
        if gradient is None:
            gradient = torch.zeros_like(self.weight)
        scales = {}
        for name, bound in self.bounds.items():
            into, back = codes.multipliers(bound)
            scales[name] = self.expand_scales(into), self.expand_scales(back)
        return lane_of(self.storage, self.weight, gradient, self.planes.values(), scales)

    def expand_scales(self, of_blocks: Tensor) -> Tensor:
        """Return a value of each block for each of its elements."""
        columns = self.weight.shape[1]
        return of_blocks.repeat_interleave(min(BLOCK, columns), 1)[:, :columns]

    def store(self, fields: Fields) -> None:
        """Write fields in place. Other fields stay."""
        for plane in planes_of(self.storage):
            written = [field for field in plane.fields if field.name in fields]
            if not written:
                continue
            values = self.planes[plane.name]
            word = word_of(values)
            for field in written:
                mask = ((1 << field.bits) - 1) << field.shift
                word = word & signed(~mask, 32) | fields[field.name]
            integers_of(values).copy_(word)


def chunks_of(
    state: LocalState,
    *arguments: Tensor,
    writes: bool = False,
) -> Iterator[StateChunk]:
    """Yield a state in chunks of rows, ``[rows, columns]``.

    Args:
        arguments: tensors in the parameter's shape.
        writes: whether the weight is written. A copy of one that is not dense is then written back.
    """
    live = [state.parameter.detach()]
    names = [plane.name for plane in state.kernel.planes]
    for name in names:  # a step raises no version of them
        plane = state.tensors[name]
        live.append(plane.data if writes else plane)
    tensors = [state.in_rows(tensor) for tensor in (*live, *arguments)]
    rows, columns = state.row_shape
    at_once = chunk_size(live[0].device)
    if state.kernel.is_matrix:  # beside whole matrices, temporaries are to be few
        at_once //= 4
    most = max(1, at_once // max(1, columns))
    for start in range(0, rows if columns else 0, most):
        part = slice(start, start + most)
        weight, *others = [tensor[part] for tensor in tensors]
        planes = dict(zip(names, others, strict=False))
        bounds = {}
        for name in state.kernel.scaled:
            bounds[name] = state.tensors[f"{name}_bound"].view(rows, -1)[part]
        yield StateChunk(state.storage, weight, planes, bounds, others[len(names) :])
    first = 0 if writes else 1
    for tensor, memory in list(zip(live, tensors, strict=False))[first:]:
        if memory.data_ptr() != tensor.data_ptr():  # a copy of what is not dense
            tensor.copy_(memory.view(tensor.shape))
