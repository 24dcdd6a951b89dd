"""Reading the board: from the marks of a sampled step to one row of ``gauges.jsonl``.

Samples of one shape are computed on together, so that a thousand tensors cost some dozens of operations, and every figure
goes into one vector that is copied to the host once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from narrowgauge.computes import Cast
from narrowgauge.gauges.board import Board, Watched
from narrowgauge.numerics import statistics
from narrowgauge.numerics.quantization import padded, quantize
from narrowgauge.runs.readings import FIRST_EXPONENT, KINDS, NUM_EXPONENTS, TENSOR_FIELDS, Row

COUNTED = 3
"""Of the sampled values every third is counted in a histogram: they are pooled over all tensors of a kind."""

CastOf = Callable[[Watched], tuple[Cast | None, Tensor | None]]
"""The cast by which a watched tensor enters its matmul, and the delayed scale's magnitude where it has one."""


@dataclass
class Packed:
    """Figures on their way to the host: tensors of any shape, joined into one vector.

    Attributes:
        parts: the tensors by name; on the device.
    """

    parts: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, values: Tensor) -> None:
        """Take one along."""
        self.parts[name] = values.detach().double()

    def fetch(self) -> dict[str, Tensor]:
        """All of them on the host: the one transfer, and the one wait."""
        if not self.parts:
            return {}
        vector = torch.cat([part.reshape(-1) for part in self.parts.values()]).cpu()
        sizes = [part.numel() for part in self.parts.values()]
        pieces = vector.split(sizes)
        return {name: piece.view(part.shape) for (name, part), piece in zip(self.parts.items(), pieces, strict=True)}


def measure(board: Board, cast_of: CastOf, packed: Packed) -> dict[str, list[int]]:
    """Compute all figures of a board's samples.

    Args:
        board: marked by a step.
        cast_of: see :data:`CastOf`.
        packed: figures are added to it.
    Returns:
        For each name of a group of tensors in ``packed`` the places it is about.
    """
    groups: dict[str, list[int]] = {}
    alike: dict[tuple[torch.Size, Cast | None], list[int]] = defaultdict(list)
    for index, sample in board.samples.items():
        alike[sample.shape, cast_of(board.watched[index])[0]].append(index)
    packed.add("figures", board.figures())
    for number, ((_, cast), places) in enumerate(alike.items()):
        name = f"group {number}"
        groups[name] = places
        samples = torch.stack([board.samples[index] for index in places])
        finite = torch.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0)
        packed.add(f"{name} shape", _shape_figures(finite))
        if cast is not None:
            scales = [_amax(board, index, cast_of) for index in places]
            packed.add(f"{name} cast", _cast_figures(finite, cast, torch.stack(scales)))
            if cast.block is not None:
                packed.add(f"{name} blocks", torch.stack([_block_exponents(one, cast) for one in finite]))
    for kind in KINDS:
        mine = [board.samples[i].reshape(-1)[::COUNTED] for i in board.samples if board.watched[i].kind == kind]
        if mine:
            packed.add(f"histogram {kind}", exponents(torch.cat(mine)))
    return groups


def exponents(values: Tensor) -> Tensor:
    """The histogram that rows hold."""
    return statistics.exponent_histogram(values, FIRST_EXPONENT, NUM_EXPONENTS)


def _shape_figures(samples: Tensor) -> Tensor:
    """``[samples, 3]``: outlier, kurtosis, strongest feature."""
    flat = samples.flatten(1)
    outlier = flat.abs().amax(1) / flat.square().mean(1).sqrt()
    return torch.stack([outlier, statistics.kurtosis(flat), statistics.feature_peak(samples)[0]], 1)


def _amax(board: Board, index: int, cast_of: CastOf) -> Tensor:
    """The magnitude that scales a whole tensor: the delayed one, else its own."""
    delayed = cast_of(board.watched[index])[1]
    return board.marks[index][0] if delayed is None else delayed.reshape(())


def _cast_figures(samples: Tensor, cast: Cast, amax: Tensor) -> Tensor:
    """``[samples, 6]``, as :data:`narrowgauge.numerics.statistics.CAST_SUMS`."""
    if cast.block is not None:  # blocks of several rows must not reach into the next tensor
        whole = amax.view(-1, 1, 1) if cast.scale == "float8_e4m3fn" else [None] * len(samples)
        sums = [statistics.cast_sums(x, cast, amax=own).sum(0) for x, own in zip(samples, whole, strict=True)]
        return torch.stack(sums)
    count, rows, columns = samples.shape
    scale = amax.view(-1, 1).repeat_interleave(rows, 0) if cast.granularity == "tensor" else None
    return statistics.cast_sums(samples.view(-1, columns), cast, amax=scale).view(count, rows, -1).sum(1)


def _block_exponents(sample: Tensor, cast: Cast) -> Tensor:
    """Lowest, median, highest exponent of the sample's block scales."""
    inner = quantize(padded(sample, cast, 1), replace(cast, rounding="nearest"), 1).inner
    return statistics.block_scale_exponents(inner if inner is not None else sample.new_zeros(1))


def row_of(board: Board, groups: Mapping[str, Sequence[int]], fetched: Mapping[str, Tensor]) -> Row:
    """The tables ``tensors``, ``attention``, ``block_scales`` and ``histograms`` of a row.

    Args:
        board: whose names.
        groups: from :func:`measure`.
        fetched: from :meth:`Packed.fetch`.
    """
    figures = fetched["figures"].tolist()
    tensors: Row = {}
    blocks: Row = {}
    for name, places in groups.items():
        shapes = fetched[f"{name} shape"].tolist()
        casts = fetched.get(f"{name} cast")
        exponent_rows = fetched.get(f"{name} blocks")
        for k, index in enumerate(places):
            watched = board.watched[index]
            lost = _shares(casts[k]) if casts is not None else [None, None, None]
            values = [*figures[index][:2], int(figures[index][2]), *lost, *shapes[k]]
            tensors[watched.key] = [rounded(value) for value in values]
            if exponent_rows is not None:
                blocks[watched.key] = [rounded(value) for value in exponent_rows[k].tolist()]
    assert all(len(values) == len(TENSOR_FIELDS) for values in tensors.values())
    attention = {
        watched.name: [rounded(value, keep_nan=True) for value in figures[index][:2]]
        for index, watched in enumerate(board.watched)
        if watched.kind == "attention" and index in board.marks
    }
    histograms = {
        name.removeprefix("histogram "): values.long().tolist()
        for name, values in fetched.items()
        if name.startswith("histogram ")
    }
    tables = {"tensors": tensors, "attention": attention, "block_scales": blocks, "histograms": histograms}
    return {name: table for name, table in tables.items() if table}


def _shares(sums: Tensor) -> list[float | None]:
    """Underflow, overflow and SQNR of one tensor's sums of a cast."""
    _, _, beyond, zeroed, nonzero, total = sums.tolist()
    sqnr = float(statistics.sqnr_of_sums(sums))
    return [zeroed / nonzero if nonzero else None, beyond / total, sqnr if nonzero else None]


def rounded(value: float | int | None, keep_nan: bool = False) -> float | int | None:
    """Four digits, which is more than a sample is worth; nothing for NaN, where that means that there was nothing.

    Example:
        >>> rounded(0.123456), rounded(float("nan")), rounded(3)
        (0.1235, None, 3)
    """
    if value is None or isinstance(value, int):
        return value
    if value != value:
        return value if keep_nan else None
    return float(f"{value:.4g}")
