"""Metrics of the watched tensors: from the recorder of a sampled step to one record of ``gauges.jsonl``.

Samples of equal shape are batched, so that a thousand tensors take some dozens of operations. All metrics go into one vector
that is copied to the host once. Before that, metrics of shards become metrics of whole parameters: one maximum over the ranks
reduces every amax, one sum everything else. Every rank makes the same calls, even if it holds nothing of a parameter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.gauges.sampling import Recorder, WatchedTensor
from narrowgauge.matmul.delayed_scaling import delayed_amax
from narrowgauge.matmul.experts import GroupedLinear
from narrowgauge.matmul.linear import Linear
from narrowgauge.numerics import metrics
from narrowgauge.numerics.dtensor import add_up, is_sharded, is_split_over_ranks, local_of
from narrowgauge.numerics.quantization import padded, quantize
from narrowgauge.runs.schema import FIRST_EXPONENT, METRICS, NUM_EXPONENTS, TENSOR_KINDS, Row
from narrowgauge.spec.computes import SLOTS, Cast
from narrowgauge.spec.formats import dtype_name

COUNTED = 3
"""Every third sampled value is counted in the histograms, which pool all tensors of a kind."""

CastOf = Callable[[WatchedTensor], tuple[Cast | None, Tensor | None]]
"""From a watched tensor to the cast with which it enters its matmul, and the amax of its delayed scale, if any."""


@dataclass
class Packed:
    """Metrics on their way to the host: tensors of any shape by name, concatenated into one vector.

    ``sums`` are still to be summed over the ranks; those named in ``means`` hold a numerator and a denominator.
    """

    shards: Shards | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    means: set[str] = field(default_factory=set)

    def add(self, name: str, values: Tensor) -> None:
        self.parts[name] = values.detach().double()

    def add_sum(self, name: str, values: Tensor) -> None:
        """Add a tensor that is summed over all ranks."""
        (self.parts if self.shards is None else self.sums)[name] = values.detach().double()

    def add_mean(self, name: str, values: Tensor, parameters: Iterable[str]) -> None:
        """Add the mean over all shards of metrics ``[parameters, ...]``, weighted by the shards' sizes and ignoring NaN.

        The parameters are the same on every rank.
        """
        if self.shards is None:
            return self.add(name, values)
        shares = torch.tensor([self.shards.share[p] for p in parameters], dtype=torch.float64, device=values.device)
        shares = shares.view(-1, *[1] * (values.ndim - 1)).expand(values.shape)
        counts = (shares > 0) & ~values.isnan()
        self.means.add(name)
        self.add_sum(name, torch.stack([torch.where(counts, values * shares, 0.0), torch.where(counts, shares, 0.0)]))

    def add_histogram(self, kind: str, own: Sequence[Tensor], device: torch.device) -> None:
        """Add the histogram of these vectors; histograms of weights, gradients and states cover all ranks."""
        if self.shards is not None and kind not in ("input", "output_grad"):
            none = torch.zeros(0, dtype=torch.float32, device=device)
            self.add_sum(f"histogram {kind}", exponents(torch.cat([*own, none])))
        elif own:
            self.add(f"histogram {kind}", exponents(torch.cat(list(own))))

    def fetch(self) -> dict[str, Tensor]:
        """Copy all tensors to the host: the only transfer, and the only synchronization."""
        parts = self.parts | self._reduced()
        return _cut(_vector(parts).cpu(), parts) if parts else {}

    def _reduced(self) -> dict[str, Tensor]:
        if self.shards is None or not self.sums:
            return {}
        totals = _cut(self.shards.total(_vector(self.sums)), self.sums)
        return {name: total[0] / total[1] if name in self.means else total for name, total in totals.items()}


def _vector(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts.values()])


def _cut(vector: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split a vector into tensors with the names and shapes of ``parts``."""
    pieces = vector.split([part.numel() for part in parts.values()])
    return {name: piece.view(part.shape) for (name, part), piece in zip(parts.items(), pieces, strict=True)}


def measure(recorder: Recorder, cast_of: CastOf, packed: Packed) -> dict[str, list[int]]:
    """Add all metrics of a recorder's samples to ``packed``; returns each group's entries by its name there."""
    groups: dict[str, list[int]] = {}
    groups_by_shape: dict[tuple[torch.Size, Cast | None], list[int]] = defaultdict(list)
    for index, sample in recorder.samples.items():
        groups_by_shape[sample.shape, cast_of(recorder.watched[index])[0]].append(index)
    packed.add("figures", recorder.stats())
    for number, ((_, cast), entries) in enumerate(groups_by_shape.items()):
        name = f"group {number}"
        groups[name] = entries
        samples = torch.stack([recorder.samples[index] for index in entries])
        finite = torch.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0)
        packed.add(f"{name} shape", _shape_stats(finite))
        if cast is not None:
            scales = [_amax(recorder, index, cast_of) for index in entries]
            packed.add(f"{name} cast", cast_stats(finite, cast, torch.stack(scales)))
            if cast.block is not None:
                packed.add(f"{name} blocks", torch.stack([block_exponents(one, cast) for one in finite]))
    for kind in TENSOR_KINDS:
        mine = [
            recorder.samples[i].reshape(-1)[::COUNTED] for i in recorder.samples if recorder.watched[i].kind == kind
        ]
        if mine or kind in SHARED:
            packed.add_histogram(kind, mine, recorder.stats_device)
    if packed.shards is not None:
        _measure_shards(recorder, groups, packed, packed.shards)
    return groups


def _measure_shards(recorder: Recorder, groups: Mapping[str, Sequence[int]], packed: Packed, shards: Shards) -> None:
    """Add the metrics of weights and gradients over all ranks, in the order of their entries: the groups differ between ranks."""
    entries = sharded_entries(recorder)
    names = [recorder.watched[index].name for index in entries]
    stats = packed.parts["figures"]
    sums = stats.new_zeros(len(recorder.watched), 6)
    shapes = torch.full_like(sums[:, :4], torch.nan)
    for name, members in groups.items():
        shapes[members] = packed.parts[f"{name} shape"]
        if f"{name} cast" in packed.parts:
            sums[members] = packed.parts[f"{name} cast"]
    shares = stats.new_tensor([shards.share[name] for name in names])
    recorded = stats.new_tensor([index in recorder.stats_of for index in entries])
    rows = torch.stack([recorded, shares * stats[entries, 1].square(), stats[entries, 2]], 1)
    nothing = torch.full_like(shares, torch.nan)
    packed.add("whole largest", nothing if shards.largest is None else shards.largest)
    packed.add_sum("whole sums", torch.cat([torch.where(recorded[:, None] > 0, rows, 0.0), sums[entries]], 1))
    packed.add_mean("whole shape", shapes[entries], names)


def exponents(values: Tensor) -> Tensor:
    """Return the histogram of binary exponents that a record holds."""
    return metrics.exponent_histogram(values, FIRST_EXPONENT, NUM_EXPONENTS)


def _shape_stats(samples: Tensor) -> Tensor:
    """``[samples, 4]``: outlier, kurtosis, strongest feature, ratio of its energy to that of all other features."""
    flat = samples.flatten(1)
    outlier = flat.abs().amax(1) / flat.square().mean(1).sqrt()
    peak = metrics.feature_peak(samples)[0]
    to_rest = peak.square() / (samples.shape[-1] - peak.square()).clamp_min(0.0)
    return torch.stack([outlier, metrics.kurtosis(flat), peak, to_rest], 1)


def _amax(recorder: Recorder, index: int, cast_of: CastOf) -> Tensor:
    """Return the amax that scales a whole tensor: the delayed one, or else its own."""
    delayed = cast_of(recorder.watched[index])[1]
    return recorder.stats_of[index][0] if delayed is None else delayed.reshape(())


def row_of(recorder: Recorder, groups: Mapping[str, Sequence[int]], fetched: Mapping[str, Tensor]) -> Row:
    """Return the tables of a record, from the groups of :func:`measure` and what :meth:`Packed.fetch` returned."""
    stats = fetched["figures"].tolist()
    tensors: Row = {}
    blocks: Row = {}
    for name, entries in groups.items():
        shapes = fetched[f"{name} shape"].tolist()
        casts = fetched.get(f"{name} cast")
        exponent_rows = fetched.get(f"{name} blocks")
        for k, index in enumerate(entries):
            watched = recorder.watched[index]
            tensors[watched.key] = _values(stats[index], None if casts is None else casts[k], shapes[k])
            if exponent_rows is not None:
                blocks[watched.key] = [rounded(value) for value in exponent_rows[k].tolist()]
    whole = _whole(recorder, fetched)
    tensors = {
        key: values for key, values in tensors.items() if key not in whole
    } | whole  # the same order on all ranks
    assert all(len(values) == len(METRICS["tensors"]) for values in tensors.values())
    attention = {
        watched.name: [rounded(value, keep_nan=True) for value in stats[index][:2]]
        for index, watched in enumerate(recorder.watched)
        if watched.kind == "attention" and index in recorder.stats_of
    }
    histograms = {
        name.removeprefix("histogram "): values.long().tolist()
        for name, values in fetched.items()
        if name.startswith("histogram ") and ("whole sums" not in fetched or values.any())
    }
    tables = {"tensors": tensors, "attention": attention, "block_scales": blocks, "histograms": histograms}
    return {name: table for name, table in tables.items() if table}


def _whole(recorder: Recorder, fetched: Mapping[str, Tensor]) -> Row:
    """Return the entries of sharded weights and gradients."""
    if "whole sums" not in fetched:
        return {}
    columns = (fetched[f"whole {part}"].tolist() for part in ("largest", "sums", "shape"))
    rows: Row = {}
    for k, (index, amax, sums, shape) in enumerate(zip(sharded_entries(recorder), *columns, strict=True)):
        recorded, square, bad, *cast = sums
        if recorded:  # by some rank
            lost = fetched["whole sums"][k, 3:] if cast[-1] else None
            rows[recorder.watched[index].key] = _values([amax, math.sqrt(square), bad], lost, shape)
    return rows


def _values(stats: Sequence[float], cast: Tensor | None, shape: Sequence[float]) -> list[float | int | None]:
    """Return the entry of one tensor in a record."""
    lost = [None, None, None] if cast is None else lost_shares(cast)
    return [rounded(value) for value in (*stats[:2], int(stats[2]), *lost, *shape)]


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
    """The casts of the watched linear layers, narrow or not, as the current step makes them."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = layers
        self._delayed: dict[WatchedTensor, Tensor] = {}

    def note(self, recorder: Recorder) -> None:
        """Save the delayed scales of the step that has just run, before the layers advance to the next one."""
        self._delayed.clear()
        for index, watched in enumerate(recorder.watched):
            used = self._used(watched)
            if used is None or used[0].amax_history is None:
                continue
            layer, cast = used
            # Without an earlier step the delayed amax is the tensor's own.
            mark = recorder.stats_of.get(index)
            own = torch.ones(1, dtype=torch.float32, device=layer.weight.device) if mark is None else mark[0].reshape(1)
            operand = SLOTS[_SLOTS[watched.kind]].history_index
            amax = delayed_amax(own, cast, layer.amax_history, operand, layer.clock.words(own.device)[1], record=False)
            if amax is not None:
                self._delayed[watched] = amax

    def of(self, watched: WatchedTensor) -> tuple[Cast | None, Tensor | None]:
        """Return the cast of a tensor, and its delayed scale's magnitude; nothing where it enters as it is."""
        used = self._used(watched)
        if used is None:
            return self._of_experts(watched), None
        layer, cast = used
        if cast.is_wide and cast.format == dtype_name(layer.weight.dtype):
            return None, None
        return cast, self._delayed.get(watched)

    def _used(self, watched: WatchedTensor) -> tuple[Linear, Cast] | None:
        """Return the narrow layer that takes a tensor, and its cast of it."""
        name = watched.name.removesuffix(".weight") if watched.kind == "weight" else watched.name
        layer = self.layers.get(name)
        if watched.kind not in _SLOTS or not isinstance(layer, Linear):
            return None
        return layer, layer.compute.casts[_SLOTS[watched.kind]]

    def _of_experts(self, watched: WatchedTensor) -> Cast | None:
        """Return the cast by which tokens enter their experts, where no expert has a scale of its own for all of its tokens."""
        layer = self.layers.get(watched.name)
        if not isinstance(layer, GroupedLinear) or watched.kind not in ("input", "output_grad"):
            return None
        cast = layer.compute.casts[_SLOTS[watched.kind]]
        whole = cast.granularity == "tensor" or cast.scale == "float8_e4m3fn"
        return None if whole or cast.is_wide else cast


def cast_stats(samples: Tensor, cast: Cast, amax: Tensor) -> Tensor:
    """``[samples, 6]``, as :data:`narrowgauge.numerics.metrics.CAST_SUMS`."""
    # Blocks of several rows, and channels, must not reach into the next tensor.
    if cast.block is not None or cast.smooth:
        whole = amax.view(-1, 1, 1) if cast.scale == "float8_e4m3fn" else [None] * len(samples)
        sums = [metrics.cast_sums(x, cast, amax=own).sum(0) for x, own in zip(samples, whole, strict=True)]
        return torch.stack(sums)
    count, rows, columns = samples.shape
    scale = amax.view(-1, 1).repeat_interleave(rows, 0) if cast.granularity == "tensor" else None
    return metrics.cast_sums(samples.view(-1, columns), cast, amax=scale).view(count, rows, -1).sum(1)


def block_exponents(sample: Tensor, cast: Cast) -> Tensor:
    """Lowest, median, highest exponent of the sample's block scales."""
    inner = quantize(padded(sample, cast, 1), replace(cast, rounding="nearest"), 1).inner
    return metrics.block_scale_exponents(inner if inner is not None else sample.new_zeros(1))


def lost_shares(sums: Tensor) -> list[float | None]:
    """Underflow, overflow and SQNR of one tensor's sums of a cast; ``None`` where it has only zeros."""
    loss = metrics.cast_loss(sums)
    has_values = bool(sums[metrics.CAST_SUMS.index("nonzero")])
    return [loss.underflow if has_values else None, loss.overflow, loss.sqnr_db if has_values else None]


# ── ranks that shard a model ──────────────────────────────────────────────────────────────────────────────────────────

SHARED = ("weight", "grad")
"""The kinds of tensors that may be sharded. Operands of matmuls come from each rank's own batch."""


@dataclass(eq=False)
class Shards:
    """The ranks that shard the parameters.

    ``share`` is the fraction of each parameter's elements that this rank reports; over all ranks the fractions add up to 1, and a
    shard with replicas is reported by the first of them. ``largest`` is the amax over all ranks of the weights and gradients
    recorded last.
    """

    mesh: Any
    share: dict[str, float]
    largest: Tensor | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Shards | None:
        """From parameters by name; ``None`` if nothing is sharded or the shards lie on several meshes."""
        meshes = {p.device_mesh for p in parameters.values() if is_sharded(p)}
        if len(meshes) != 1 or not any(map(is_split_over_ranks, parameters.values())):
            return None
        mesh = meshes.pop()
        return cls(mesh, {name: _share(p, mesh.get_coordinate()) for name, p in parameters.items()})

    def join_amax(self, recorder: Recorder) -> None:
        """Replace the recorded amax of weights and gradients by the amax over all shards."""
        entries = sharded_entries(recorder)
        # Below all magnitudes, and NaN above: the integer order of their bits.
        nothing = torch.full((), -1.0, dtype=torch.float32, device=recorder.stats_device)
        own = torch.stack(
            [recorder.stats_of[k][0].to(nothing.device) if k in recorder.stats_of else nothing for k in entries]
        )
        bits = torch.where(own.isnan(), torch.nan, own).view(torch.int32)
        self.largest = self._over_ranks(bits, "max").view(torch.float32)
        for index, largest in zip(entries, self.largest.unbind(), strict=True):
            if index in recorder.stats_of:
                recorder.stats_of[index] = (largest, *recorder.stats_of[index][1:])

    def total(self, values: Tensor) -> Tensor:
        """Sum over all ranks."""
        return self._over_ranks(values, "sum")

    def _over_ranks(self, values: Tensor, op: str) -> Tensor:
        groups = [self.mesh.get_group(axis) for axis in range(self.mesh.ndim)]
        return add_up(values.to(self.mesh.device_type), groups, op).to(values.device)


def _share(parameter: Any, coordinate: Sequence[int]) -> float:
    """Return the share of a parameter that the rank at a coordinate of the mesh reports."""
    is_whole = [p.is_replicate() for p in parameter.placements] if is_sharded(parameter) else [True] * len(coordinate)
    # Along a mesh axis that does not shard, all ranks are replicas. (``is_shard()`` is false for two sharding axes.)
    if any(index and whole for index, whole in zip(coordinate, is_whole, strict=True)):
        return 0.0
    return float(local_of(parameter).numel() / max(1, parameter.numel()))


def sharded_entries(recorder: Recorder) -> list[int]:
    """Return the entries of tensors that may be sharded."""
    return [index for index, watched in enumerate(recorder.watched) if watched.kind in SHARED]
