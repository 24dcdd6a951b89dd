"""Metrics of the watched tensors: from the recorder of a sampled step to one record of ``gauges.jsonl``.

Samples of equal shape are batched, so a thousand tensors take some dozens of operations. All metrics go into one vector
that is copied to the host once. Before that, metrics of shards become metrics of whole parameters. One maximum over the ranks
reduces every amax, one sum everything else. Every rank makes the same calls, even if it holds nothing of a parameter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.gauges.sampling import Recorder, WatchedTensor
from narrowgauge.matmul.experts import GroupedLinear
from narrowgauge.matmul.linear import Linear
from narrowgauge.numerics import metrics
from narrowgauge.numerics.dtensor import add_up, is_sharded, is_split_over_ranks, local_of
from narrowgauge.runs.schema import FIRST_EXPONENT, METRICS, NUM_EXPONENTS, TENSOR_KINDS, Row
from narrowgauge.spec.computes import Cast
from narrowgauge.spec.formats import dtype_name

COUNTED = 3
"""Every third sampled value is counted in the histograms, which pool all tensors of a kind."""

CastOf = Callable[[WatchedTensor], Cast | None]
"""Maps a watched tensor to the cast before its matmul, if any."""


@dataclass
class Packed:
    """Metrics on their way to the host: tensors of any shape by name, concatenated into one vector.

    ``sums`` are not yet summed over the ranks. Entries named in ``means`` hold a numerator and a denominator.
    """

    shards: Shards
    parts: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    means: set[str] = field(default_factory=set)

    def add(self, name: str, values: Tensor) -> None:
        self.parts[name] = values.detach().double()

    def add_sum(self, name: str, values: Tensor) -> None:
        """Add a tensor that is summed over all ranks."""
        self.sums[name] = values.detach().double()

    def add_mean(self, name: str, values: Tensor, parameters: Iterable[str]) -> None:
        """Add the mean over all shards of metrics ``[parameters, ...]``, weighted by the shards' sizes, ignoring NaN.

        The parameters are the same on every rank.
        """
        shares = torch.tensor([self.shards.share[p] for p in parameters], dtype=torch.float64, device=values.device)
        shares = shares.view(-1, *[1] * (values.ndim - 1)).expand(values.shape)
        counts = (shares > 0) & ~values.isnan()
        self.means.add(name)
        self.add_sum(name, torch.stack([torch.where(counts, values * shares, 0.0), torch.where(counts, shares, 0.0)]))

    def add_histogram(self, kind: str, vectors: Sequence[Tensor], device: torch.device) -> None:
        """Add the histogram of these vectors. Histograms of weights, gradients and states cover all ranks."""
        counts = exponents(torch.cat([*vectors, torch.zeros(0, dtype=torch.float32, device=device)]))
        (self.add if kind in ("input", "output_grad") else self.add_sum)(f"histogram {kind}", counts)

    def fetch(self) -> dict[str, Tensor]:
        """Copy all tensors to the host: the only transfer, and the only synchronization."""
        totals = _cut(self.shards.total(_vector(self.sums)), self.sums) if self.sums else {}
        reduced = {name: total[0] / total[1] if name in self.means else total for name, total in totals.items()}
        parts = self.parts | reduced
        return _cut(_vector(parts).cpu(), parts) if parts else {}


def _vector(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts.values()])


def _cut(vector: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split a vector into tensors with the names and shapes of ``parts``."""
    pieces = vector.split([part.numel() for part in parts.values()])
    return {name: chunk.view(part.shape) for (name, part), chunk in zip(parts.items(), pieces, strict=True)}


def measure(recorder: Recorder, cast_of: CastOf, packed: Packed) -> None:
    """Add all metrics of a recorder's samples to ``packed``: tables with a row for each watched tensor."""
    outliers: dict[int, Tensor] = {}
    losses: dict[int, Tensor] = {}
    groups: dict[tuple[torch.Size, Cast | None], list[int]] = defaultdict(list)
    for index, sample in recorder.samples.items():
        groups[sample.shape, cast_of(recorder.watched[index])].append(index)
    for (_, cast), entries in groups.items():
        samples = torch.stack([recorder.samples[index] for index in entries])
        finite = torch.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0)
        flat = finite.flatten(1)
        outliers |= zip(entries, flat.abs().amax(1) / flat.square().mean(1).sqrt(), strict=True)
        if cast is not None:
            amax = torch.stack([recorder.stats_of[index][0] for index in entries])
            losses |= zip(entries, cast_stats(finite, cast, amax).unbind(), strict=True)
    for kind in TENSOR_KINDS:
        indices = [i for i in recorder.samples if recorder.watched[i].kind == kind]
        sampled = [recorder.samples[i].reshape(-1)[::COUNTED] for i in indices]
        packed.add_histogram(kind, sampled, recorder.stats_device)
    _add_tables(recorder, outliers, losses, packed, "local")
    _add_tables(recorder, outliers, losses, packed, "whole")


def _entries(recorder: Recorder, part: str) -> list[int]:
    """Return the entries of a part: ``whole`` tensors are joined over ranks, ``local`` ones are of this rank alone."""
    return [index for index, watched in enumerate(recorder.watched) if (watched.kind in SHARED) == (part == "whole")]


def _add_tables(
    recorder: Recorder, outliers: Mapping[int, Tensor], losses: Mapping[int, Tensor], packed: Packed, part: str
) -> None:
    """Add the tables of a part's entries, in the same order on all ranks: amax; sums; outliers."""
    if not (entries := _entries(recorder, part)):
        return
    stats, is_whole = recorder.stats(entries).double(), part == "whole"
    names = [recorder.watched[index].name for index in entries]
    shares = [packed.shards.share[name] if is_whole else 1.0 for name in names]
    recorded = stats.new_tensor([index in recorder.stats_of for index in entries])
    sums = torch.stack([recorded, stats.new_tensor(shares) * stats[:, 1].square(), stats[:, 2]], 1)
    sums = torch.where(recorded[:, None] > 0, sums, 0.0)
    casts = _stacked(losses, entries, stats.new_zeros(len(metrics.CAST_SUMS)))
    outlier = _stacked(outliers, entries, stats.new_full((), torch.nan))
    largest = packed.shards.largest if is_whole else None
    packed.add(f"{part} largest", stats[:, 0] if largest is None else largest)
    (packed.add_sum if is_whole else packed.add)(f"{part} sums", torch.cat([sums, casts], 1))
    if is_whole:
        packed.add_mean(f"{part} outlier", outlier, names)
    else:
        packed.add(f"{part} outlier", outlier)


def _stacked(rows: Mapping[int, Tensor], entries: Sequence[int], absent: Tensor) -> Tensor:
    return torch.stack([rows[index].double() if index in rows else absent for index in entries])


def exponents(values: Tensor) -> Tensor:
    """Return the histogram of binary exponents that a record holds."""
    return metrics.exponent_histogram(values, FIRST_EXPONENT, NUM_EXPONENTS)


def row_of(recorder: Recorder, fetched: Mapping[str, Tensor]) -> Row:
    """Return the tables of a record from the result of :meth:`Packed.fetch`."""
    tensors: Row = {}
    attention: Row = {}
    for part in ("local", "whole"):
        tables = [fetched[f"{part} {name}"] for name in ("largest", "sums", "outlier") if f"{part} sums" in fetched]
        entries = _entries(recorder, part) if tables else []
        for index, largest, sums, outlier in zip(entries, *tables, strict=True):
            watched, (recorded, square, bad) = recorder.watched[index], sums[:3].tolist()
            stats = (float(largest), math.sqrt(square))
            if recorded and watched.kind == "attention":
                attention[watched.name] = [rounded(value, keep_nan=True) for value in stats]
            elif recorded:
                lost = lost_shares(sums[3:]) if sums[-1] else [None] * 3  # without a cast all of its sums are zero
                tensors[watched.key] = [rounded(value) for value in (*stats, int(bad), *lost, float(outlier))]
    assert all(len(values) == len(METRICS["tensors"]) for values in tensors.values())
    histograms = {
        name.removeprefix("histogram "): values.long().tolist()
        for name, values in fetched.items()
        if name.startswith("histogram ") and values.any()
    }
    tables_of_row = {"tensors": tensors, "attention": attention, "histograms": histograms}
    return {name: table for name, table in tables_of_row.items() if table}


def rounded(value: float | int | None, keep_nan: bool = False) -> float | int | None:
    """Round to four digits, more than a sample can resolve; ``None`` for NaN unless ``keep_nan``.

    Example:
        >>> rounded(0.123456), rounded(float("nan")), rounded(3)
        (0.1235, None, 3)
    """
    if value is None or isinstance(value, int):
        return value
    if value != value:
        return value if keep_nan else None
    return float(f"{value:.4g}")


# ── the cast of a watched tensor ──────────────────────────────────────────────────────────────────────────────────────

_SLOTS = {"input": "output.left", "weight": "output.right", "output_grad": "grad_input.left"}
"""The slot whose cast is measured, for each kind of tensor."""


class Casts:
    """The current step's casts of the watched linear layers, at any precision."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = layers

    def of(self, watched: WatchedTensor) -> Cast | None:
        """Return the cast of a tensor whose loss its sample shows.

        Delayed scales come from earlier steps; the column ``saturated`` of a step counts what they lose. Experts that scale
        their tokens alone do not show in a sample of all.
        """
        layer: Any = self.layers.get(watched.name.removesuffix(".weight") if watched.kind == "weight" else watched.name)
        if watched.kind not in _SLOTS or not isinstance(layer, (Linear, GroupedLinear)):
            return None
        cast: Cast | None = layer.compute.casts[_SLOTS[watched.kind]]
        if cast is None or cast.scaling == "delayed":
            return None
        if isinstance(layer, GroupedLinear):
            scales_alone = cast.granularity == "tensor" or cast.scale == "float8_e4m3fn"
            return None if watched.kind == "weight" or scales_alone or cast.is_wide else cast
        return None if cast.is_wide and cast.format == dtype_name(layer.weight.dtype) else cast


def cast_stats(samples: Tensor, cast: Cast, amax: Tensor) -> Tensor:
    """``[samples, 6]``, as :data:`narrowgauge.numerics.metrics.CAST_SUMS`."""
    # Blocks of several rows, and channels, must not reach into the next tensor.
    if cast.block is not None:
        scales = amax.view(-1, 1, 1) if cast.scale == "float8_e4m3fn" else [None] * len(samples)
        sums = [metrics.cast_sums(x, cast, amax=scale).sum(0) for x, scale in zip(samples, scales, strict=True)]
        return torch.stack(sums)
    count, rows, columns = samples.shape
    scale = amax.view(-1, 1).repeat_interleave(rows, 0) if cast.granularity == "tensor" else None
    return metrics.cast_sums(samples.view(-1, columns), cast, amax=scale).view(count, rows, -1).sum(1)


def lost_shares(sums: Tensor) -> list[float | None]:
    """Return underflow, overflow and SQNR from one tensor's sums of a cast; ``None`` if all are zero."""
    loss = metrics.cast_loss(sums)
    has_values = bool(sums[metrics.CAST_SUMS.index("nonzero")])
    return [loss.underflow if has_values else None, loss.overflow, loss.sqnr_db if has_values else None]


# ── ranks that shard a model ──────────────────────────────────────────────────────────────────────────────────────────

SHARED = ("weight", "grad")
"""The kinds of tensors that may be sharded. Operands of matmuls come from each rank's own batch."""


@dataclass(eq=False)
class Shards:
    """The ranks that shard the parameters.

    ``share`` is the fraction of each parameter's elements that this rank reports. Over all ranks the fractions add up to 1.
    The first replica of a shard reports it. ``largest`` is the amax over all ranks of the last recorded weights and gradients.
    """

    mesh: Any
    share: dict[str, float]
    largest: Tensor | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Shards:
        """Make from parameters by name. Without shards, or with shards on several meshes, each rank is alone."""
        meshes = {p.device_mesh for p in parameters.values() if is_sharded(p)}
        if len(meshes) != 1 or not any(map(is_split_over_ranks, parameters.values())):
            return cls(None, dict.fromkeys(parameters, 1.0))
        mesh = meshes.pop()
        return cls(mesh, {name: _share(p, mesh.get_coordinate()) for name, p in parameters.items()})

    def join_amax(self, recorder: Recorder) -> None:
        """Replace the recorded amax of weights and gradients by the amax over all shards."""
        if self.mesh is None:
            return
        entries = _entries(recorder, "whole")
        # Below all magnitudes, and NaN above: the integer order of their bits.
        nothing = torch.full((), -1.0, dtype=torch.float32, device=recorder.stats_device)
        largest_here = torch.stack(
            [recorder.stats_of[k][0].to(nothing.device) if k in recorder.stats_of else nothing for k in entries]
        )
        bits = torch.where(largest_here.isnan(), torch.nan, largest_here).view(torch.int32)
        self.largest = self._over_ranks(bits, "max").view(torch.float32)
        for index, largest in zip(entries, self.largest.unbind(), strict=True):
            if index in recorder.stats_of:
                recorder.stats_of[index] = (largest, *recorder.stats_of[index][1:])

    def total(self, values: Tensor) -> Tensor:
        """Sum over all ranks."""
        return values if self.mesh is None else self._over_ranks(values, "sum")

    def _over_ranks(self, values: Tensor, op: str) -> Tensor:
        groups = [self.mesh.get_group(axis) for axis in range(self.mesh.ndim)]
        return add_up(values.to(self.mesh.device_type), groups, op).to(values.device)


def _share(parameter: Any, coordinate: Sequence[int]) -> float:
    """Return the fraction of a parameter that the rank at a coordinate of the mesh reports."""
    is_whole = [p.is_replicate() for p in parameter.placements] if is_sharded(parameter) else [True] * len(coordinate)
    # Along a mesh axis that does not shard, all ranks are replicas. (``is_shard()`` is false for two sharding axes.)
    if any(index and is_replicated for index, is_replicated in zip(coordinate, is_whole, strict=True)):
        return 0.0
    return float(local_of(parameter).numel() / max(1, parameter.numel()))
