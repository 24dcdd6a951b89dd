"""Compare two sets of weights, tensor by tensor: models, state_dicts, files. No code of a model runs.

Values are compared once both have the format of fewer bits. The format of codes has the scales that lie
beside them. A buffer is compared in the wider format: a buffer that was rounded computes something
else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from narrowgauge.errors import RecordError
from narrowgauge.measuring.adapters import is_adapted, name_without_adapters, product_of
from narrowgauge.measuring.reading import Readings, measured
from narrowgauge.measuring.units import unit_of
from narrowgauge.numerics.dtensor import whole
from narrowgauge.numerics.rounding import power_below
from narrowgauge.runs.finding import counted, told
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.tables import Row, Table

CHUNK = 1 << 17
"""Elements that are compared at once: they stay in the cache."""
MOST_ROWS = 8
"""Printed tensors."""
MOST_TIMES = 0.05
"""Distance from the adapters' own product that roundings of a merge may give."""
SCALES = ("_scale", "_scale_inv")
"""Ends of the names of the scales of codes. Both multiply the codes."""
HALF_A_GAP = 17 / 32
"""Distance of a value from its code, over the gap between codes; a 32nd is of a product with an inverse
scale.
"""
MODELS = ("model", "model_state_dict", "module", "state_dict", "app")
"""Keys under which checkpoints hold the weights of a model."""
Weights = str | Path | nn.Module | Mapping[str, Any]


class Tensors:
    """Hold the tensors of a model, a state_dict, a ``.safetensors`` file or a folder of them, or a
    checkpoint of ``torch.distributed``.

    Attributes:
        values: tensors by name, without the prefixes of wrappers and adapters.
        scales: of the tensors that are codes.
        names: names that share the tensor of a name, of models alone.
        buffers: names of buffers.
        adapted: layers with adapters, by the name of their weight.

    Raises:
        RecordError: a path holds no weights, damaged ones, or tensors in parts.
    """

    def __init__(self, weights: Weights) -> None:
        self.values: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}
        self.names: dict[str, list[str]] = {}
        self.buffers: set[str] = set()
        self.adapted: dict[str, Any] = {}
        if isinstance(weights, nn.Module):
            self._add_module(weights)
        elif isinstance(weights, Mapping):
            self._add(weights)
        else:
            try:
                self._add_files(Path(weights))
            except (OSError, SafetensorError, ValueError, KeyError) as error:
                raise RecordError(
                    f"Cannot read weights from {weights}: {error}.", "Name another file or folder."
                ) from error
        for name, x in self.values.items():
            for end in SCALES:
                if x.element_size() == 1 and name + end in self.values:
                    self.scales[name] = self.values[name + end]

    def _add(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Tensor):
                self.values[_plain(name)] = value.detach()

    def _add_module(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers())
        self._add(parameters | buffers)
        self.buffers = set(map(_plain, buffers))
        names: dict[int, list[str]] = {}
        for name, x in parameters.items():
            self.names[_plain(name)] = names.setdefault(id(x), [])
            self.names[_plain(name)].append(_plain(name))
        for name, layer in model.named_modules():
            if is_adapted(layer):
                self.adapted[f"{name_without_adapters(name)}.weight"] = layer

    def _add_files(self, path: Path) -> None:
        files = [path]
        if path.is_dir():
            files = sorted(path.glob("*.safetensors"))
        if (path / ".metadata").exists():
            self._add(_distributed(path))
        for file in files:
            values = load_file(file)
            if not self.values.keys().isdisjoint(map(_plain, values)):
                raise ValueError("two of its files hold parts of one tensor")
            self._add(values)
        if not self.values:
            raise ValueError("it holds no safetensors file, and no checkpoint of torch.distributed")

    def read(self, name: str) -> Tensor:
        """Return a whole tensor: codes times their scales, with what its adapters add."""
        x = whole(self.values[name])
        if name in self.scales:
            x = x.float() * self._scale(name)
        layer = self.adapted.get(name)
        if layer is not None and not layer.merged_adapters:
            x = x.double() + product_of(layer)
        return x

    def _scale(self, name: str) -> Tensor:
        """Return the scale of each code: one is of all, of a row, or of a block."""
        shape = self.values[name].shape
        scale = whole(self.scales[name])
        if scale.dtype is torch.uint8:  # exponents, as of E8M0
            scale = torch.exp2(scale.float() - 127)
        while scale.ndim < len(shape):
            scale = scale.unsqueeze(-1)
        for dim, size in enumerate(shape):
            repeats = -(-size // scale.shape[dim])
            scale = scale.repeat_interleave(repeats, dim).narrow(dim, 0, size)
        return scale.float()

    def gap(self, name: str) -> Tensor:
        """Return the distance of each code to the next one, times its scale."""
        codes = whole(self.values[name])
        if not codes.is_floating_point():
            return self._scale(name)
        row = torch.finfo(codes.dtype)
        power = power_below(codes.float().abs().clamp_min(row.smallest_normal))
        return power * row.eps * self._scale(name)

    @torch.no_grad()
    def write_to(self, model: nn.Module) -> None:
        """Write the values into the tensors of a model that have their names, but beside adapters."""
        for name, p in model.state_dict(keep_vars=True).items():
            plain = _plain(name)
            is_there = plain in self.values and self.values[plain].shape == p.shape
            if is_there and ".base_layer." not in name:
                p.copy_(self.read(plain))

    def alone(self, other: Tensors) -> list[str]:
        """Return the names that another set lacks in their shape, under each of their tied names.

        Scales are left out, and buffers, which no file may hold.
        """
        left_out = self.buffers | {name + end for name in self.scales for end in SCALES}
        names = []
        for name, x in self.values.items():
            tied = self.names.get(name, [name])
            shapes = [other.values[key].shape for key in tied if key in other.values]
            if x.shape not in shapes and name not in left_out and ".lora_" not in name:
                names.append(name)
        return sorted(names)


def _plain(name: str) -> str:
    return name_without_adapters(name).replace(".base_layer.", ".")


def _distributed(path: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint of ``torch.distributed``, without a process group."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    tensors: dict[str, Tensor] = {}
    metadata: Any = FileSystemReader(path).read_metadata()
    for key, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "size") and not key.startswith("optim"):
            tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load(tensors, checkpoint_id=path, no_dist=True)
    values = {}
    for key, x in tensors.items():
        owner, _, name = key.partition(".")
        values[name if owner in MODELS else key] = x
    return values


class Same(Readings):
    """Hold the differences of two models; ``print`` shows them.

    Attributes:
        rows: a dict for each tensor of both, the farthest first: ``name``, ``dtype``, ``values``;
            ``differ`` and ``nonfinite`` (numbers of values); ``change`` (‖second − first‖ /
            ‖first‖), ``factor`` (the multiple of the first that is nearest), ``adapter_times`` (how
            many times more the second holds the adapters), ``codes`` (``first`` or ``second``, which
            alone holds codes).
    """

    rows: Sequence[Row] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the readings and rows as values for JSON."""
        return super().to_dict() | {"rows": self.rows}


def compare_weights(first: Weights, second: Weights) -> Same:
    """Compare two sets of weights."""
    before = Tensors(first)
    after = Tensors(second)
    rows = []
    for name, x in before.values.items():  # in an order that all ranks share
        if name in after.values and x.shape == after.values[name].shape:
            rows.append(_row(name, before, after))
    rows.sort(key=lambda row: (not row["differ"], -row["change"], row["name"]))
    result = Same([], [*_lines(rows), *_of_adapters(rows)])
    result.rows = rows
    unlike = [row["name"] for row in rows if row["differ"]]
    for side, here, there in (("first", before, after), ("second", after, before)):
        lone = here.alone(there)
        unlike += lone
        if lone:
            result.lines.append(f"only in the {side}, or in another shape: {told(lone)}")
    bad = [row["name"] for row in rows if row["nonfinite"]]
    if unlike:
        result.add("other-weights", unlike, len(set(unlike)))
    if bad:
        number = sum(row["nonfinite"] for row in rows)
        result.readings.append(measured("nonfinite", bad, number, 0, stage="start"))
    return result


def _row(name: str, before: Tensors, after: Tensors) -> Row:
    x = before.read(name)
    y = after.read(name)
    dtypes = before.values[name].dtype, after.values[name].dtype
    dtype = max(dtypes, key=unit_of)
    if name in before.buffers | after.buffers or not y.is_floating_point():
        dtype = torch.promote_types(*dtypes)
    codes = ""
    if name in before.scales | after.scales:
        dtype = torch.float32
        if name not in after.scales:
            codes = "first"
            y = _nearest(y.float(), x, before.gap(name))
        elif name not in before.scales:
            codes = "second"
            y = _nearest(y, x.float(), after.gap(name))
    row: Row = {
        "name": name, "dtype": " → ".join(dict.fromkeys(map(dtype_name, dtypes))), "values": y.numel(),
        "adapter_times": None, "codes": codes, **_difference(x.to(dtype), y.to(dtype)),
    }  # fmt: skip
    layer = (after.adapted | before.adapted).get(name)
    if layer is not None:
        added = y.double() - x.double()
        row["adapter_times"] = times = _difference(product_of(layer), added)["factor"]
        if row["change"] <= unit_of(dtype) and abs(times) <= MOST_TIMES:
            row["differ"] = 0  # the merge rounded once
    return row


def _nearest(y: Tensor, x: Tensor, gap: Tensor) -> Tensor:
    """Return ``y``, but ``x`` where the two are within half a gap between codes."""
    return torch.where((x - y).abs() <= HALF_A_GAP * gap, x, y)


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
    change = 0.0
    if distance:
        change = math.sqrt(distance / square) if square else math.inf
    factor = product / square if square else 0.0
    return {"differ": differ, "nonfinite": nonfinite, "change": change, "factor": factor}


def _lines(rows: list[Row]) -> Iterator[str]:
    for dtype, count in Counter(row["dtype"] for row in rows).items():
        yield f"{counted(count, 'tensor')}: {dtype}"
    values = sum(row["values"] for row in rows)
    differing = [row for row in rows if row["differ"]]
    share = sum(row["differ"] for row in differing) / max(1, values)
    equal = f"{len(rows) - len(differing)} of {counted(len(rows), 'tensor')} are equal"
    yield f"weights: {share:.2%} of {counted(values, 'value')} differ; {equal}"
    if differing:
        keys = "values", "differ", "change", "factor", "nonfinite"
        shown = {"weights": "name", **dict(zip(keys, keys, strict=True))}
        yield from Table(differing[:MOST_ROWS], shown).plain().splitlines()


def _of_adapters(rows: list[Row]) -> Iterator[str]:
    """Yield how often the second model holds adapters more than the first."""
    for row in rows:
        times = row["adapter_times"] or 0.0
        if abs(times) > MOST_TIMES:
            words = f"adapters of {row['name']}: {times:+.3f} times more in the second"
            yield f"{words} (+1: merged twice, -1: missing)"
            return
