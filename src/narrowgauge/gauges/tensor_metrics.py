"""Metrics of the watched tensors: from the recorder of a sampled step to one record of
``gauges.jsonl``.

Samples of equal shape are batched, so a thousand tensors take some dozens of operations. All
metrics go into one vector that is copied to the host once. For sharded weights and gradients, one
maximum and one sum over the ranks give amax, rms and counts of whole parameters. Every rank makes
the same calls, even if it holds nothing of a parameter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.gauges.sampling import Key, Recorder
from narrowgauge.matmul.experts import GroupedLinear
from narrowgauge.matmul.linear import Linear
from narrowgauge.numerics import metrics
from narrowgauge.numerics.dtensor import add_up, by_group, local_of
from narrowgauge.runs.schema import FIRST_EXPONENT, NUM_EXPONENTS, TENSOR_KINDS, Row
from narrowgauge.spec.computes import Cast
from narrowgauge.spec.formats import dtype_name

COUNTED = 3
"""Every third sampled value is counted in the histograms, which pool all tensors of a kind."""
SHARED = ("weight", "grad")
"""The kinds of tensors that may be sharded. Operands of matmuls come from each rank's own batch."""


def join_shards(recorder: Recorder, parameters: Mapping[str, Any]) -> None:
    """Replace amax, rms and counts of shards by those of whole parameters.

    All ranks make the call.
    """
    names = {p: name for name, p in parameters.items()}
    for groups, members in by_group(parameters.values()):
        if groups:
            _join_group(recorder, groups, members, names)


def _join_group(
    recorder: Recorder, groups: Any, members: list[Any], names: Mapping[Any, str]
) -> None:
    device = members[0].device_mesh.device_type
    nothing = torch.tensor([-1.0, 0.0, 0.0], dtype=torch.float32, device=device)
    keys = []
    here = []
    numels = []
    for p in members:
        for kind in SHARED:
            key = kind, names[p]
            stats = recorder.stats.get(key)
            keys.append(key)
            here.append(nothing if stats is None else torch.stack(stats).to(device))
            numels.append((local_of(p).numel(), p.numel()))
    table = torch.stack(here)
    counts = table.new_tensor(numels, dtype=torch.float64)
    # Magnitudes in the order of their bits: NaN is above all, and -1 (nothing recorded) below.
    bits = torch.where(table[:, 0].isnan(), torch.nan, table[:, 0]).view(torch.int32)
    largest = add_up(bits, groups, "max").view(torch.float32)
    squares = table[:, 1].double().square() * counts[:, 0]
    sums = add_up(torch.stack([squares, table[:, 2].double()], 1), groups, "sum")
    rms = (sums[:, 0] / counts[:, 1]).sqrt().float()
    for place, key in enumerate(keys):
        if key in recorder.stats or largest[place] != -1:
            recorder.stats[key] = largest[place], rms[place], sums[place, 1].float()


def measure(recorder: Recorder, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return all metrics on the device: a row per recorded tensor, and the histogram of each kind.

    Args:
        layers: the watched linear layers by name, at any precision.
    """
    keys = recorder.recorded
    if not keys:
        return {}
    table = torch.stack([torch.stack(recorder.stats[key]) for key in keys]).double()
    table = F.pad(table, (0, 1 + len(metrics.CAST_SUMS)))
    table[:, 3] = torch.nan
    place_of = {key: place for place, key in enumerate(keys)}
    groups: dict[tuple[torch.Size, Cast | None], list[Key]] = defaultdict(list)
    pools: dict[str, list[Tensor]] = defaultdict(list)
    for key, sample in recorder.samples.items():
        groups[sample.shape, cast_of(key, layers)].append(key)
        pools[key[0]].append(sample.reshape(-1)[::COUNTED])
    for (_, cast), members in groups.items():
        samples = torch.stack([recorder.samples[key] for key in members])
        places = [place_of[key] for key in members]
        finite = torch.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0)
        flat = finite.flatten(1)
        table[places, 3] = (flat.abs().amax(1) / flat.square().mean(1).sqrt()).double()
        if cast is not None:
            amax = torch.stack([recorder.stats[key][0] for key in members])
            table[places, 4:] = cast_stats(finite, cast, amax).double()
    parts = {"tensors": table}
    for kind in TENSOR_KINDS:
        if kind in pools:
            parts[f"histogram {kind}"] = exponents(torch.cat(pools[kind]))
    return parts


def fetch(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy all metrics to the host: the only transfer, and the only synchronization."""
    if not parts:
        return {}
    vector = torch.cat([part.detach().double().reshape(-1) for part in parts.values()]).cpu()
    fetched = {}
    start = 0
    for name, part in parts.items():
        end = start + part.numel()
        fetched[name] = vector[start:end].view(part.shape)
        start = end
    return fetched


def exponents(values: Tensor) -> Tensor:
    """Return the histogram of binary exponents that a record holds."""
    return metrics.exponent_histogram(values, FIRST_EXPONENT, NUM_EXPONENTS)


def row_of(recorder: Recorder, fetched: Mapping[str, Tensor]) -> Row:
    """Return the tables of a record from the result of :func:`fetch`."""
    tensors: Row = {}
    norms: dict[str, list[float]] = defaultdict(list)
    for (kind, name), values in zip(recorder.recorded, fetched.get("tensors", ()), strict=True):
        amax, rms, bad, outlier = values[:4].tolist()
        if kind in ("query", "key"):
            norms[name].append(amax)
        else:
            numbers = (amax, rms, int(bad), *_lost(values[4:]), outlier)
            tensors[f"{kind}:{name}"] = list(map(rounded, numbers))
    histograms = {}
    for name, counts in fetched.items():
        if name.startswith("histogram ") and counts.any():
            histograms[name.removeprefix("histogram ")] = counts.long().tolist()
    attention = {}
    for name, pair in norms.items():
        if len(pair) == 2:
            largest = recorder.heads["query", name].scale * math.prod(pair)
            attention[name] = [rounded(largest, keep_nan=True)]
    row: Row = {"tensors": tensors, "attention": attention, "histograms": histograms}
    return {name: table for name, table in row.items() if table}


def _lost(sums: Tensor) -> list[float | None]:
    """Return the underflow, overflow and SQNR of a cast; ``None`` without a cast, whose sums are
    zero.
    """
    if not sums[-1]:
        return [None, None, None]
    loss = metrics.cast_loss(sums)
    if not sums[metrics.CAST_SUMS.index("nonzero")]:
        return [None, loss.overflow, None]
    return [loss.underflow, loss.overflow, loss.sqnr_db]


def rounded(value: float | int | None, keep_nan: bool = False) -> float | int | None:
    """Round to four digits, more than a sample can resolve; ``None`` for NaN unless ``keep_nan``.

    Example:
        >>> rounded(0.123456), rounded(float("nan")), rounded(3)
        (0.1235, None, 3)
    """
    if value is None or isinstance(value, int):
        return value
    if value != value:
        if not keep_nan:
            return None
        return value
    return float(f"{value:.4g}")


# ── the cast of a watched tensor ──────────────────────────────────────────────────────────────────

_SLOTS = {"input": "output.left", "weight": "output.right", "output_grad": "grad_input.left"}
"""The slot whose cast is measured, for each kind of tensor."""


def cast_of(key: Key, layers: Mapping[str, nn.Module]) -> Cast | None:
    """Return the cast before a tensor's matmul, if its sample shows what the cast loses.

    Experts that scale their tokens alone do not show in a sample of all.
    """
    kind, name = key
    layer: Any = layers.get(name.removesuffix(".weight") if kind == "weight" else name)
    if kind not in _SLOTS or not isinstance(layer, (Linear, GroupedLinear)):
        return None
    cast: Cast | None = layer.compute.casts[_SLOTS[kind]]
    if cast is None:
        return None
    is_unseen = cast.is_wide and cast.format == dtype_name(layer.weight.dtype)
    if isinstance(layer, GroupedLinear):
        scales_alone = cast.granularity == "tensor" or cast.scale == "float8_e4m3fn"
        is_unseen = kind == "weight" or scales_alone or cast.is_wide
    if is_unseen:
        return None
    return cast


def cast_stats(samples: Tensor, cast: Cast, amax: Tensor) -> Tensor:
    """Return ``[samples, 6]``, as :data:`narrowgauge.numerics.metrics.CAST_SUMS`."""
    # Blocks of several rows, and channels, must not reach into the next tensor.
    if cast.block is not None:
        sums = []
        for place, x in enumerate(samples):
            scale = amax[place].view(1, 1) if cast.scale == "float8_e4m3fn" else None
            sums.append(metrics.cast_sums(x, cast, amax=scale).sum(0))
        return torch.stack(sums)
    count, rows, columns = samples.shape
    scale = None
    if cast.granularity == "tensor":
        scale = amax.view(-1, 1).repeat_interleave(rows, 0)
    sums_of_rows = metrics.cast_sums(samples.view(-1, columns), cast, amax=scale)
    return sums_of_rows.view(count, rows, -1).sum(1)
