"""Compare two sets of weights, tensor by tensor: models, state_dicts, files. No code of a model runs.

Values are compared once both have the format of fewer bits. The format of codes has the scales that lie
beside them. A buffer is compared in the wider format: a buffer that was rounded computes something
else.
"""

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from narrowgauge.errors import DataError, RecordError
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Readings, measured
from narrowgauge.measuring.unit_roundoff import unit_of
from narrowgauge.numerics.dtensor import whole
from narrowgauge.numerics.rounding import power_below
from narrowgauge.runs.text import join_names, plural
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.tables import Row, Table
from narrowgauge.torch_support.torch_names import bare_name

CHUNK = 1 << 17
"""Elements that are compared at once: they stay in the cache."""
MOST_ROWS = 8
"""Printed tensors."""
SHOWN = {
    "weights": "name", "values": "values", "differ": "differ", "change": "change", "factor": "factor", "nonfinite": "nonfinite",
}  # fmt: skip
"""Printed columns."""
ROUNDINGS = 1.5
"""Units of its format by which a merge may change a tensor, relative to its length. DoRA's rounds three times:
1.07 units.
"""
SCALES = ("_scale", "_scale_inv")
"""Ends of the names of the scales of codes. Both multiply the codes."""
CODED = {
    r"narrow\.(\w+)_of_experts\.weight_codes$": r"\1", r"narrow\.(\w+)_of_experts\.weight_scales$": r"\1_scale",
    r"\bweight_codes$": "weight", r"\bweight_scales$": "weight_scale",
}  # fmt: skip
"""Names of codes and scales in our layers, and what they are in other programs' files."""
MODELS = {"model", "model_state_dict", "module", "state_dict"}
"""Keys under which checkpoints hold the weights of a model."""
ADAPTERS = r"\.(lora|ia3)_"
"""Names of adapters' own tensors."""
HALF_A_GAP = 17 / 32
"""Distance of a value from its code, over the gap between codes; a 32nd is of a product with an inverse
scale.
"""
Weights = str | Path | nn.Module | Mapping[str, Any]


@dataclass
class StoredWeight:
    """Hold a tensor of a set of weights.

    Args:
        tensor: as it is stored.
        is_buffer: it is a buffer of a module, and no codes.
        scale: of codes: one for all, or for each row or block.
        layer: the layer of PEFT that adds to it.
    """

    tensor: Tensor
    is_buffer: bool = False
    scale: Tensor | None = None
    layer: Any = None

    def read(self) -> Tensor:
        """Return the whole tensor: codes times their scales, with what its adapters add."""
        x = whole(self.tensor.detach())
        if self.scale is not None:
            x = x.float() * self.scales()
        if self.layer is not None and not self.layer.merged_adapters:
            x = x.double() + self.added()
        return x

    def added(self) -> Tensor:
        """Return how the active adapters change the weight, in float64."""
        layer = copy.deepcopy(self.layer).double()
        if self.scale is not None:  # adapters are not merged into codes
            deltas = list(map(layer.get_delta_weight, layer.active_adapters))
            return torch.stack(deltas).sum(0).detach()
        if layer.merged_adapters:
            layer.unmerge()
        base = layer.get_base_layer()
        before = base.weight.detach().clone()
        layer.merge()
        return whole(base.weight.detach() - before)

    def scales(self) -> Tensor:
        """Return the scale of each code."""
        scale = whole(self.scale)
        if scale.dtype is torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        scale = scale.float()
        while scale.ndim < self.tensor.ndim:
            scale = scale.unsqueeze(-1)
        for dim, size in enumerate(self.tensor.shape):
            repeats = -(-size // scale.shape[dim])
            scale = scale.repeat_interleave(repeats, dim).narrow(dim, 0, size)
        return scale

    def gap(self) -> Tensor:
        """Return the distance of each code to the next one, times its scale."""
        codes = whole(self.tensor)
        if not codes.is_floating_point():
            return self.scales()
        row = torch.finfo(codes.dtype)
        power = power_below(codes.float().abs().clamp_min(row.smallest_normal))
        return power * row.eps * self.scales()


def weights_in(source: Weights) -> dict[str, StoredWeight]:
    """Return the tensors of a model, a state_dict, a ``.safetensors`` file or a folder of them, or a
    checkpoint of ``torch.distributed``, by their names without the prefixes of wrappers and adapters.

    Raises:
        RecordError: a path holds no weights, damaged ones, or tensors in parts.
    """
    buffers = {}
    tensors: Any = source
    if isinstance(source, nn.Module):
        buffers = dict(source.named_buffers())
        tensors = dict(source.named_parameters(remove_duplicate=False)) | buffers
    elif not isinstance(source, Mapping):
        tensors = _read_files(Path(source))
    weights = {}
    for name, x in tensors.items():
        codes = getattr(x, "qdata", None)
        if codes is not None and codes.shape == x.shape:  # of torchao
            weights[_plain(name)] = StoredWeight(codes, scale=x.scale)
        elif isinstance(x, Tensor):
            weights[_plain(name)] = StoredWeight(x, name in buffers)
    for name, weight in [*weights.items()]:
        for end in SCALES:
            if weight.tensor.element_size() == 1 and name + end in weights:
                weight.scale = weights.pop(name + end).tensor
                weight.is_buffer = False
    if isinstance(source, nn.Module):
        for name, layer in source.named_modules():
            key = _plain(f"{name}.weight")
            if key in weights and hasattr(layer, "merged_adapters"):
                weights[key].layer = layer
    return weights


def _plain(name: str) -> str:
    name = bare_name(name).replace(".base_layer.", ".")
    for ours, others in CODED.items():
        name = re.sub(ours, others, name)
    return name


def _read_files(path: Path) -> dict[str, Tensor]:
    """Read a file, a folder of files, or a checkpoint, each whole or not at all."""
    from torch.distributed.checkpoint.api import CheckpointException

    tensors = {}
    try:
        if (path / ".metadata").exists():
            tensors = _distributed(path)
        else:
            for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
                part = load_file(file)
                if not tensors.keys().isdisjoint(part):
                    raise ValueError("two of its files hold parts of one tensor")
                tensors |= part
            for index in path.glob("*.safetensors.index.json"):
                missing = json.loads(index.read_bytes())["weight_map"].keys() - tensors.keys()
                if missing:
                    raise ValueError(f"no file holds {join_names(missing)} of {index.name}")
        if not tensors:
            raise ValueError("no safetensors file or checkpoint in it holds weights")
    except (Exception, CheckpointException) as error:
        failures = getattr(error, "failures", {0: (error, None)})
        reason = re.split(r"\.?\s*\n|\. ", str(failures[min(failures)][0]))[0]
        raise RecordError(
            f"Cannot read weights from {path}: {reason}.",
            "Name a .safetensors file, a folder of them, or a checkpoint of torch.distributed.",
        ) from error
    return tensors


def _distributed(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint of ``torch.distributed``, without a process group."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    tensors = {}
    paths = {}
    metadata: Any = FileSystemReader(folder).read_metadata()
    for key, entry in metadata.state_dict_metadata.items():
        path = list(map(str, (metadata.planner_data or {}).get(key, [key])))
        if hasattr(entry, "size") and not any(part.startswith("optim") for part in path[:-1]):
            tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
            paths[key] = path
    load(tensors, checkpoint_id=folder, no_dist=True)
    values: dict[str, Tensor] = {}
    # Others may have the same names, such as an average of the weights.
    for key in sorted(paths, key=lambda key: (MODELS.isdisjoint(paths[key]), len(paths[key]), key)):
        name = paths[key][-1]
        values[key if name in values else name] = tensors[key]
    return values


@torch.no_grad()
def with_weights(model: Any, source: Weights) -> Any:
    """Return a copy of a model with other weights of its names, in its formats, but beside adapters.

    Raises:
        DataError: it is no module, or a tensor of it is of codes, and the weight is not.
    """
    if not isinstance(model, nn.Module):
        raise DataError(
            "Cannot run the batch because weights alone have no forward pass.",
            "Pass a module on one side.",
        )
    model = copy.deepcopy(model)
    weights = weights_in(source)
    for name, p in model.state_dict(keep_vars=True).items():
        weight = weights.get(_plain(name))
        if weight is None or weight.tensor.shape != p.shape or ".base_layer." in name:
            continue
        is_alike = weight.tensor.dtype == p.dtype
        if hasattr(p, "qdata") or (p.element_size() == 1 and not is_alike):
            raise DataError(
                f"Cannot run the batch because {name} takes codes, and the other side has values.",
                "Pass a module on both sides.",
            )
        p.copy_(weight.tensor if is_alike and weight.layer is None else weight.read())
    return model


class Same(Readings):
    """Hold the differences of two models; ``print`` shows them.

    Attributes:
        rows: a dict for each tensor of both, the farthest first: ``name``, ``dtype``, ``values``;
            ``differ`` and ``nonfinite`` (numbers of values); ``change`` (‖second − first‖ /
            ‖first‖), ``factor`` (the multiple of the first that is nearest), ``adapter_times`` (how
            many times more the second holds the adapters), ``codes`` (``first`` or ``second``, which
            alone holds codes).
    """

    also = ("rows",)
    rows: Sequence[Row] = ()


def compare_weights(first: Weights, second: Weights) -> Same:
    """Compare two sets of weights."""
    before = weights_in(first)
    after = weights_in(second)
    rows = []
    for name, weight in before.items():  # in an order that all ranks share
        if name in after and weight.tensor.shape == after[name].tensor.shape:
            rows.append(_row(name, weight, after[name]))
    rows.sort(key=lambda row: (not row["differ"], -row["change"], row["name"]))
    result = Same([], _lines(rows))
    result.rows = rows
    times = {row["name"]: row["adapter_times"] for row in rows if _is_beyond(row)}
    unlike = [row["name"] for row in rows if row["differ"] and row["name"] not in times]
    bad = {row["name"]: row["nonfinite"] for row in rows if row["nonfinite"]}
    for side, weights in (("first", before), ("second", after)):
        lone = _alone(weights, rows)
        if lone:
            unlike += lone
            result.lines.append(f"only in the {side}, or in another shape: {join_names(lone)}")
    if unlike:
        result.add("other-weights", unlike, len(set(unlike)))
    if times:
        result.add("adapter-times", [*times], next(iter(times.values())))
    if bad:
        reading = measured("nonfinite", bad, sum(bad.values()), 0, stage="start")
        result.readings.append(reading)
    return result


def _alone(weights: Mapping[str, StoredWeight], rows: list[Row]) -> list[str]:
    """Return the names that another set lacks in their shape, under each of their tied names. Buffers
    are left out, which no file may hold.
    """
    compared = {id(weights[row["name"]].tensor) for row in rows}
    lone = []
    for name, weight in weights.items():
        is_own = weight.is_buffer or re.search(ADAPTERS, name)
        if not is_own and id(weight.tensor) not in compared:
            lone.append(name)
    return sorted(lone)


def _row(name: str, one: StoredWeight, other: StoredWeight) -> Row:
    x = one.read()
    y = other.read()
    dtypes = one.tensor.dtype, other.tensor.dtype
    dtype = max(dtypes, key=unit_of)
    if one.is_buffer or other.is_buffer or not y.is_floating_point():
        dtype = torch.float64
    coded = [weight for weight in (one, other) if weight.scale is not None]
    codes = ""
    if coded:
        dtype = torch.float32
    if len(coded) == 1:
        codes = "first" if coded[0] is one else "second"
        is_near = (x.float() - y.float()).abs() <= HALF_A_GAP * coded[0].gap()
        y = torch.where(is_near, x.float(), y.float())
    row = {
        "name": name, "dtype": " → ".join(dict.fromkeys(map(dtype_name, dtypes))), "values": y.numel(),
        "adapter_times": None, "codes": codes, **_difference(x.to(dtype), y.to(dtype)),
    }  # fmt: skip
    for weight in (one, other):
        if weight.layer is not None and row["adapter_times"] is None:
            added = weight.added()
            times = _difference(added, y.double() - x.double())["factor"]
            rest = y.double() - x.double() - times * added
            size = max(x.norm(), y.norm())  # a merge rounds the larger one
            if rest.norm() > ROUNDINGS * unit_of(dtype) * size:  # other weights
                continue
            row["adapter_times"] = times
            if row["change"] <= ROUNDINGS * unit_of(dtype) and not _is_beyond(row):
                row["differ"] = 0
    return row


def _is_beyond(row: Row) -> bool:
    """Return whether the second side holds adapters another number of times."""
    return abs(row["adapter_times"] or 0.0) > KINDS["adapter-times"].bound


def _difference(x: Tensor, y: Tensor) -> Row:
    """Return how far a tensor is from another one, and the multiple of that which is nearest."""
    sums = torch.zeros(3, dtype=torch.float64)
    differ = nonfinite = 0
    for first, second in zip(x.flatten().split(CHUNK), y.flatten().split(CHUNK), strict=True):
        a = first.to(second.device).double()  # which holds values of every format
        b = second.double()
        off = b - a
        sums += torch.stack([a @ a, a @ b, off @ off]).cpu()
        differ += int(((a != b) & ~(a.isnan() & b.isnan())).sum())
        nonfinite += int((~b.isfinite()).sum())
    square, product, distance = sums.tolist()
    change = math.inf if distance else 0.0
    factor = 0.0
    if square:
        change = math.sqrt(distance / square)
        factor = product / square
    return {"differ": differ, "nonfinite": nonfinite, "change": change, "factor": factor}


def _lines(rows: list[Row]) -> Iterator[str]:
    """Yield the formats, and how many values differ and where."""
    for dtype, count in Counter(row["dtype"] for row in rows).items():
        yield f"{plural(count, 'tensor')}: {dtype}"
    values = sum(row["values"] for row in rows)
    differing = [row for row in rows if row["differ"]]
    share = sum(row["differ"] for row in differing) / max(1, values)
    equal = f"{len(rows) - len(differing)} of {plural(len(rows), 'tensor')} are equal"
    yield f"weights: {share:.2%} of {plural(values, 'value')} differ; {equal}"
    if differing:
        yield from Table(differing[:MOST_ROWS], SHOWN).plain().splitlines()
