"""Compare two sets of weights, tensor by tensor: models, state_dicts, files. No code of a model runs.

Values are compared once both have the narrower of their formats. A buffer is compared in the wider
one: a buffer that was rounded computes something else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from narrowgauge.errors import RecordError
from narrowgauge.measuring.adapters import is_adapted, name_without_adapters, product_of
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Reading, measured
from narrowgauge.measuring.units import unit_of
from narrowgauge.numerics.dtensor import whole
from narrowgauge.runs.finding import counted, told
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.tables import Row, Table

CHUNK = 1 << 17
"""Elements that are compared at once: they stay in the cache."""
MOST_ROWS = 8
"""Printed tensors."""
Weights = str | Path | nn.Module | Mapping[str, Any]


@dataclass
class Tensors:
    """Hold the tensors of a model, a state_dict or files.

    Args:
        read: a function for each name that reads its tensor.
        tied: names that share one tensor, by each of these names.
        buffers: names of buffers.
        products: what adapters add to a weight, by its name; it is read with them.
    """

    read: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    products: dict[str, Tensor] = field(default_factory=dict)

    def lacking(self, other: Tensors) -> list[str]:
        """Return the names of another set that this one lacks, under each of their tied names.

        Buffers are left out, which no file may hold.
        """
        names = []
        for name in other.read:
            is_read = not self.read.keys().isdisjoint(other.tied.get(name, [name]))
            if not is_read and name not in other.buffers and ".lora_" not in name:
                names.append(name)
        return sorted(names)

    def ties(self) -> set[str]:
        """Return the names of each tensor that has several, with signs of equality."""
        return {" = ".join(names) for names in self.tied.values() if len(names) > 1}


def tensors_of(weights: Weights) -> Tensors:
    """Return the tensors of a model, a state_dict, a ``.safetensors`` file or a folder of them.

    Raises:
        RecordError: a path holds no safetensors file, a damaged one, or tensors in parts.
    """
    if isinstance(weights, nn.Module):
        return _of_module(weights)
    tensors = Tensors()
    if isinstance(weights, Mapping):
        for name, value in weights.items():
            if isinstance(value, Tensor):
                tensors.read[tensor_name(name)] = partial(whole, value.detach())
        return tensors
    try:
        _read_files(Path(weights), tensors)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise RecordError(
            f"Cannot read weights from {weights}: {error}.", "Name another file or folder."
        ) from error
    return tensors


def tensor_name(name: str) -> str:
    """Return the name that a tensor has without wrappers and adapters."""
    return name_without_adapters(name).replace(".base_layer.", ".")


def _of_module(model: nn.Module) -> Tensors:
    tensors = Tensors()
    names = dict[int, list[str]]()
    for name, x in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        name = tensor_name(name)
        tensors.read[name] = partial(whole, x.detach())
        tensors.tied[name] = names.setdefault(id(x), [])
        tensors.tied[name].append(name)
        if not isinstance(x, nn.Parameter):
            tensors.buffers.add(name)
    layers: dict[str, Any] = dict(model.named_modules())
    for name, layer in layers.items():
        if is_adapted(layer):
            weight = f"{name_without_adapters(name)}.weight"
            product = tensors.products[weight] = product_of(layer)
            if not layer.merged_adapters:
                x = layer.get_base_layer().weight.detach()
                tensors.read[weight] = partial(lambda x, y: (x + y).to(x.dtype), x, product)
    return tensors


def _read_files(path: Path, tensors: Tensors) -> None:
    files = {path}
    if path.is_dir():
        files = set(path.glob("*.safetensors"))
    for file in sorted(files):
        opened = safe_open(file, "pt")
        for name in opened.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
            if tensor_name(name) in tensors.read:
                raise ValueError("two of its files hold parts of one tensor")
            tensors.read[tensor_name(name)] = partial(opened.get_tensor, name)
    if not tensors.read:
        raise ValueError("it holds no safetensors file")


def compare_weights(first: Weights, second: Weights) -> tuple[list[Row], list[Reading], list[str]]:
    """Compare two sets of weights; return a row for each tensor of both, the farthest first, the
    readings, and the lines to print.

    Columns: ``name``, ``dtype``, ``values``; ``differ`` and ``nonfinite`` (numbers of values);
    ``change`` (‖second − first‖ / ‖first‖), ``factor`` (the
    multiple of the first that is nearest), ``is_one`` (a vector of ones), ``adapter_times`` (how many
    times more the second holds the adapters).
    """
    before = tensors_of(first)
    after = tensors_of(second)
    rows = list[Row]()
    names: dict[str, list[str]] = {
        "tied in the first alone": [],
        "tied in the second alone": [],
        "only in the first": after.lacking(before),
        "only in the second": before.lacking(after),
        "only in other shapes": [],
    }
    lone = list(names.values())[2:]
    if before.tied and after.tied:
        names["tied in the first alone"] = sorted(before.ties() - after.ties())
        names["tied in the second alone"] = sorted(after.ties() - before.ties())
    for name in before.read:  # in an order that all ranks share
        if name in after.read:
            row = _row(name, before, after)
            rows += row
            if not row:
                names["only in other shapes"].append(name)
    rows.sort(key=lambda row: (not row["differ"], -row["change"], row["name"]))
    lines = _lines(rows)
    lines += [f"{words}: {told(tensors)}" for words, tensors in names.items() if tensors]
    readings = list(_readings(rows))
    one_sided = list(chain.from_iterable(lone))
    if one_sided:
        readings.append(measured("one-sided-tensors", one_sided, len(one_sided), 0))
    return rows, readings, lines


def _row(name: str, before: Tensors, after: Tensors) -> list[Row]:
    """Return the row of a tensor; nothing if its shapes differ."""
    x = before.read[name]()
    y = after.read[name]()
    if x.shape != y.shape:
        return []
    dtypes = x.dtype, y.dtype
    dtype = max(dtypes, key=unit_of)
    if name in before.buffers | after.buffers or not y.is_floating_point():
        dtype = torch.promote_types(*dtypes)
    row: Row = {
        "name": name, "dtype": " → ".join(dict.fromkeys(map(dtype_name, dtypes))), "values": y.numel(),
        "is_one": y.ndim == 1 and bool((y == 1).all()), "adapter_times": None,
        **_difference(x.to(dtype), y.to(dtype)),
    }  # fmt: skip
    products = before.products | after.products
    if name in products:
        row["adapter_times"] = _difference(products[name], y.double() - x.double())["factor"]
        if row["change"] <= unit_of(dtype):
            row["differ"] = 0  # the merge rounded once
    return [row]


def _difference(x: Tensor, y: Tensor) -> Row:
    """Return how far a tensor is from another one, and the multiple of that which is nearest."""
    square = product = off = 0.0
    differ = nonfinite = 0
    for first, second in zip(x.flatten().split(CHUNK), y.flatten().split(CHUNK), strict=True):
        a = first.to(second.device).double()  # which holds values of every format
        b = second.double()
        square += float(a @ a)
        product += float(a @ b)
        off += float((b - a).square().sum())
        differ += int((a != b).sum())
        bad = int((~b.isfinite()).sum())
        if bad:
            nonfinite += bad
            differ -= int((a.isnan() & b.isnan()).sum())
    change = 0.0
    if off:
        change = math.sqrt(off / square) if square else math.inf
    factor = product / square if square else 0.0
    return {"differ": differ, "nonfinite": nonfinite, "change": change, "factor": factor}


def _readings(rows: list[Row]) -> Iterable[Reading]:
    adapted = [row for row in rows if row["adapter_times"] is not None]
    adapted.sort(key=lambda row: -abs(row["adapter_times"]))
    if adapted and abs(adapted[0]["adapter_times"]) > KINDS["adapter-times"].bound:
        names = [row["name"].removesuffix(".weight") for row in adapted]
        yield measured("adapter-times", names, adapted[0]["adapter_times"], 0.0)
    differing = [row["name"] for row in rows if row["differ"]]
    if differing:
        yield measured("other-weights", differing, rows[0]["change"], 0.0)
    bad = [row["name"] for row in rows if row["nonfinite"]]
    if bad:
        yield measured("nonfinite", bad, len(bad), 0, stage="start")


def _lines(rows: list[Row]) -> list[str]:
    lines = []
    for dtype, count in Counter(row["dtype"] for row in rows).items():
        lines.append(f"{counted(count, 'tensor')}: {dtype}")
    values = sum(row["values"] for row in rows)
    differing = [row for row in rows if row["differ"]]
    share = sum(row["differ"] for row in differing) / max(1, values)
    equal = f"{len(rows) - len(differing)} of {counted(len(rows), 'tensor')} are equal"
    lines.append(f"weights: {share:.2%} of {counted(values, 'value')} differ; {equal}")
    ones = [row["name"] for row in rows if row["is_one"]]
    if ones:
        lines.append(f"vectors that are exactly 1: {len(ones)}, {told(ones)}")
    if differing:
        keys = "values", "differ", "change", "factor", "nonfinite"
        shown = {"weights": "name", **dict(zip(keys, keys, strict=True))}
        lines += Table(differing[:MOST_ROWS], shown).plain().splitlines()
    return lines
