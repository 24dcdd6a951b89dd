"""Reading the board: from the marks of a sampled step to one row of ``gauges.jsonl``.

Samples of one shape are computed on together, so that a thousand tensors cost some dozens of operations, and every figure
goes into one vector that is copied to the host once.

Where ranks share parameters out, what is read of these is joined over the ranks before that
(:mod:`narrowgauge.gauges.aggregate`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowgauge.gauges.aggregate import SHARED, Shards, shared_places
from narrowgauge.gauges.casts import block_exponents, cast_figures, lost_shares
from narrowgauge.gauges.recorder import Board, Watched
from narrowgauge.numerics import tensor_stats
from narrowgauge.runs.schema import FIRST_EXPONENT, METRICS, NUM_EXPONENTS, TENSOR_KINDS, Row
from narrowgauge.spec.computes import Cast

COUNTED = 3
"""Of the sampled values every third is counted in a histogram: they are pooled over all tensors of a kind."""

CastOf = Callable[[Watched], tuple[Cast | None, Tensor | None]]
"""The cast by which a watched tensor enters its matmul, and the delayed scale's magnitude where it has one."""


@dataclass
class Packed:
    """Figures on their way to the host: tensors of any shape, joined into one vector.

    Args:
        shards: the ranks that share parameters out, if they are.

    Attributes:
        parts: the tensors by name; on the device.
        sums: those that are to be added up over the ranks; ``means`` are names of some that are a numerator and a denominator.
    """

    shards: Shards | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    means: set[str] = field(default_factory=set)

    def add(self, name: str, values: Tensor) -> None:
        """Take one along."""
        self.parts[name] = values.detach().double()

    def add_sum(self, name: str, values: Tensor) -> None:
        """Take one along that is the sum over all ranks."""
        (self.parts if self.shards is None else self.sums)[name] = values.detach().double()

    def add_mean(self, name: str, values: Tensor, parameters: Iterable[str]) -> None:
        """Take one along that is the mean over all shards, by their sizes; NaN counts for nothing.

        Args:
            name: of the figures.
            values: of each parameter's shard, ``[parameters, ...]``.
            parameters: their names, which are the same on every rank.
        """
        if self.shards is None:
            return self.add(name, values)
        shares = torch.tensor([self.shards.share[p] for p in parameters], dtype=torch.float64, device=values.device)
        shares = shares.view(-1, *[1] * (values.ndim - 1)).expand(values.shape)
        tells = (shares > 0) & ~values.isnan()
        self.means.add(name)
        self.add_sum(name, torch.stack([torch.where(tells, values * shares, 0.0), torch.where(tells, shares, 0.0)]))

    def add_histogram(self, kind: str, own: Sequence[Tensor], device: torch.device) -> None:
        """Take a histogram along, of these vectors; of weights, gradients and states it is that of all ranks."""
        if self.shards is not None and kind not in ("input", "output_grad"):
            none = torch.zeros(0, dtype=torch.float32, device=device)
            self.add_sum(f"histogram {kind}", exponents(torch.cat([*own, none])))
        elif own:
            self.add(f"histogram {kind}", exponents(torch.cat(list(own))))

    def fetch(self) -> dict[str, Tensor]:
        """All of them on the host: the one transfer, and the one wait."""
        parts = self.parts | self._joined()
        return _cut(_vector(parts).cpu(), parts) if parts else {}

    def _joined(self) -> dict[str, Tensor]:
        if self.shards is None or not self.sums:
            return {}
        totals = _cut(self.shards.total(_vector(self.sums)), self.sums)
        return {name: total[0] / total[1] if name in self.means else total for name, total in totals.items()}


def _vector(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts.values()])


def _cut(vector: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A vector into tensors of the names and shapes of ``parts``."""
    pieces = vector.split([part.numel() for part in parts.values()])
    return {name: piece.view(part.shape) for (name, part), piece in zip(parts.items(), pieces, strict=True)}


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
            packed.add(f"{name} cast", cast_figures(finite, cast, torch.stack(scales)))
            if cast.block is not None:
                packed.add(f"{name} blocks", torch.stack([block_exponents(one, cast) for one in finite]))
    for kind in TENSOR_KINDS:
        mine = [board.samples[i].reshape(-1)[::COUNTED] for i in board.samples if board.watched[i].kind == kind]
        if mine or kind in SHARED:
            packed.add_histogram(kind, mine, board.marked_on)
    if packed.shards is not None:
        _measure_shards(board, groups, packed, packed.shards)
    return groups


def _measure_shards(board: Board, groups: Mapping[str, Sequence[int]], packed: Packed, shards: Shards) -> None:
    """What all ranks have of weights and gradients, in the order of their places: groups are not the same on all ranks."""
    places = shared_places(board)
    names = [board.watched[index].name for index in places]
    figures = packed.parts["figures"]
    sums = figures.new_zeros(len(board.watched), 6)
    shapes = torch.full_like(sums[:, :4], torch.nan)
    for name, members in groups.items():
        shapes[members] = packed.parts[f"{name} shape"]
        if f"{name} cast" in packed.parts:
            sums[members] = packed.parts[f"{name} cast"]
    shares = figures.new_tensor([shards.share[name] for name in names])
    marked = figures.new_tensor([index in board.marks for index in places])
    rows = torch.stack([marked, shares * figures[places, 1].square(), figures[places, 2]], 1)
    nothing = torch.full_like(shares, torch.nan)
    packed.add("whole largest", nothing if shards.largest is None else shards.largest)
    packed.add_sum("whole sums", torch.cat([torch.where(marked[:, None] > 0, rows, 0.0), sums[places]], 1))
    packed.add_mean("whole shape", shapes[places], names)


def exponents(values: Tensor) -> Tensor:
    """The histogram that rows hold."""
    return tensor_stats.exponent_histogram(values, FIRST_EXPONENT, NUM_EXPONENTS)


def _shape_figures(samples: Tensor) -> Tensor:
    """``[samples, 4]``: outlier, kurtosis, strongest feature, its energy over that of all others."""
    flat = samples.flatten(1)
    outlier = flat.abs().amax(1) / flat.square().mean(1).sqrt()
    peak = tensor_stats.feature_peak(samples)[0]
    to_rest = peak.square() / (samples.shape[-1] - peak.square()).clamp_min(0.0)
    return torch.stack([outlier, tensor_stats.kurtosis(flat), peak, to_rest], 1)


def _amax(board: Board, index: int, cast_of: CastOf) -> Tensor:
    """The magnitude that scales a whole tensor: the delayed one, else its own."""
    delayed = cast_of(board.watched[index])[1]
    return board.marks[index][0] if delayed is None else delayed.reshape(())


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
            tensors[watched.key] = _values(figures[index], None if casts is None else casts[k], shapes[k])
            if exponent_rows is not None:
                blocks[watched.key] = [rounded(value) for value in exponent_rows[k].tolist()]
    whole = _whole(board, fetched)
    tensors = {key: values for key, values in tensors.items() if key not in whole} | whole  # in one order on all ranks
    assert all(len(values) == len(METRICS["tensors"]) for values in tensors.values())
    attention = {
        watched.name: [rounded(value, keep_nan=True) for value in figures[index][:2]]
        for index, watched in enumerate(board.watched)
        if watched.kind == "attention" and index in board.marks
    }
    histograms = {
        name.removeprefix("histogram "): values.long().tolist()
        for name, values in fetched.items()
        if name.startswith("histogram ") and ("whole sums" not in fetched or values.any())
    }
    tables = {"tensors": tensors, "attention": attention, "block_scales": blocks, "histograms": histograms}
    return {name: table for name, table in tables.items() if table}


def _whole(board: Board, fetched: Mapping[str, Tensor]) -> Row:
    """The rows of weights and gradients of which other ranks have other shards."""
    if "whole sums" not in fetched:
        return {}
    columns = (fetched[f"whole {part}"].tolist() for part in ("largest", "sums", "shape"))
    rows: Row = {}
    for k, (index, amax, sums, shape) in enumerate(zip(shared_places(board), *columns, strict=True)):
        marked, square, bad, *cast = sums
        if marked:  # by some rank
            lost = fetched["whole sums"][k, 3:] if cast[-1] else None
            rows[board.watched[index].key] = _values([amax, math.sqrt(square), bad], lost, shape)
    return rows


def _values(figures: Sequence[float], cast: Tensor | None, shape: Sequence[float]) -> list[float | int | None]:
    """The figures of one tensor as a row has them."""
    lost = [None, None, None] if cast is None else lost_shares(cast)
    return [rounded(value) for value in (*figures[:2], int(figures[2]), *lost, *shape)]


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
