"""Compare two sets of weights, tensor by tensor: models, state_dicts, files. No code of a model runs.

Values are compared once both have the narrower of their formats. A buffer is compared in the wider
one: a buffer that was rounded computes something else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from narrowgauge.errors import RecordError
from narrowgauge.measuring.adapters import (
    is_adapted,
    name_without_adapters,
    product_of,
    weight_with_adapters,
)
from narrowgauge.measuring.fit import fit
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Reading, measured, of_all
from narrowgauge.measuring.units import unit_of
from narrowgauge.numerics.dtensor import whole
from narrowgauge.runs.finding import counted, told
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.tables import Row, Table, name_columns, number_columns

MOST_ROWS = 8
"""Printed tensors."""
Weights = str | Path | nn.Module | Mapping[str, Any]


@dataclass
class Tensors:
    """Hold the tensors of a model, a state_dict or files.

    Args:
        read: a function for each name that reads its tensor.
        tied: names that share one tensor, by each of these names.
        unsaved: names that no state_dict holds.
        buffers: names of buffers.
    """

    read: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)
    unsaved: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)

    def lacking(self, other: Tensors) -> list[str]:
        """Return the names of another set that this one lacks, under each of their tied names."""
        names = []
        for name in other.read:
            is_read = not self.read.keys().isdisjoint(other.tied.get(name, [name]))
            if not is_read and name not in other.unsaved and ".lora_" not in name:
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
    else:
        path = Path(weights)
        try:
            _read_files(path, tensors)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise RecordError(
                f"Cannot read weights from {path}: {error}.", "Name another file or folder."
            ) from error
    return tensors


def tensor_name(name: str) -> str:
    """Return the name that a tensor has without wrappers and adapters."""
    return name_without_adapters(name).replace(".base_layer.", ".")


def _of_module(model: nn.Module) -> Tensors:
    tensors = Tensors()
    saved = set(map(tensor_name, model.state_dict()))
    names = dict[int, list[str]]()
    for name, x in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        name = tensor_name(name)
        tensors.read[name] = partial(whole, x.detach())
        tensors.tied[name] = names.setdefault(id(x), [])
        tensors.tied[name].append(name)
        if not isinstance(x, nn.Parameter):
            tensors.buffers.add(name)
    tensors.unsaved = tensors.read.keys() - saved
    return tensors


def _read_files(path: Path, tensors: Tensors) -> None:
    files = {path}
    if path.is_dir():
        files = set(path.glob("*.safetensors"))
    for index in path.glob("*.safetensors.index.json"):
        files = set(map(path.joinpath, json.loads(index.read_bytes())["weight_map"].values()))
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

    Columns: ``name``, ``dtype``, ``values``; ``differ``, ``rounded`` (by the narrower format) and
    ``nonfinite`` (numbers of values); ``change`` (‖second − first‖ / ‖first‖), ``factor`` (the
    multiple of the first that is nearest), ``is_one`` (a vector of ones).
    """
    before = tensors_of(first)
    after = tensors_of(second)
    effective: dict[str, tuple[Tensor, Tensor]] = {}
    readings = list[Reading]()
    if isinstance(first, nn.Module) and isinstance(second, nn.Module):
        effective, times = _adapters(first, second)
        wrong = sorted(times, key=lambda name: -abs(times[name]))
        if wrong and abs(times[wrong[0]]) > KINDS["adapter-times"].bound:
            readings.append(measured("adapter-times", wrong, times[wrong[0]], 0.0))
    rows, reshaped = _rows(before, after, effective)
    readings += _readings(rows)
    lines = _lines(rows)
    if effective:
        lines.append(f"adapters: in {counted(len(effective), 'weight')}, compared with them")
    if before.tied and after.tied:
        for side, ties in (
            ("first", before.ties() - after.ties()),
            ("second", after.ties() - before.ties()),
        ):
            if ties:
                lines.append(f"tied in the {side} alone: {of_all(sorted(ties))}")
    one_sided = {
        "in the first": after.lacking(before),
        "in the second": before.lacking(after),
        "in other shapes": reshaped,
    }
    for words, members in one_sided.items():
        if members:
            lines.append(f"only {words}: {told(members)}")
    readings += _one_sided(list(chain.from_iterable(one_sided.values())))
    return rows, readings, lines


def _one_sided(names: list[str]) -> Iterator[Reading]:
    if names:
        yield measured("one-sided-tensors", names, len(names), 0)


def _rows(
    before: Tensors, after: Tensors, effective: Mapping[str, tuple[Tensor, Tensor]]
) -> tuple[list[Row], list[str]]:
    """Compare the tensors of both sets, in an order that all ranks share; return their rows, and
    the names of those in other shapes.
    """
    rows = list[Row]()
    reshaped = []
    for name in before.read:
        if name not in after.read:
            continue
        x = before.read[name]()
        y = after.read[name]()
        if x.shape != y.shape:
            reshaped.append(name)
            continue
        dtype = max(x.dtype, y.dtype, key=unit_of)
        if name in before.buffers | after.buffers or not y.is_floating_point():
            dtype = torch.promote_types(x.dtype, y.dtype)
        dtypes = dict.fromkeys((dtype_name(x.dtype), dtype_name(y.dtype)))
        row: Row = {"name": name, "dtype": " → ".join(dtypes), "values": y.numel()}
        row |= _distance(*effective.get(name, (x, y)), dtype)
        if name in effective and row["change"] <= unit_of(dtype):
            row["differ"] = 0  # the merge rounded once
        rows.append(row)
    rows.sort(key=lambda row: (not row["differ"], -row["change"], row["name"]))
    return rows, reshaped


def _distance(x: Tensor, y: Tensor, dtype: torch.dtype) -> Row:
    a = x.to(dtype)
    b = y.to(dtype)
    result = fit(a, b)
    rounded = 0
    for wide, narrow in ((x, a), (y, b)):
        if wide.dtype != dtype:
            rounded += fit(narrow, wide).differing
    return {
        "differ": result.differing, "rounded": rounded, "nonfinite": result.nonfinite,
        "change": result.relative, "factor": result.factor,
        "is_one": b.ndim == 1 and bool((b == 1).all()),
    }  # fmt: skip


def _readings(rows: list[Row]) -> Iterator[Reading]:
    differing = _names(rows, "differ")
    if differing:
        yield measured("other-weights", differing, rows[0]["change"], 0.0)
    bad = _names(rows, "nonfinite")
    if bad:
        yield measured("nonfinite", bad, len(bad), 0, stage="start")


def _names(rows: list[Row], key: str) -> list[str]:
    """Return the names of the tensors with a value other than zero."""
    return [row["name"] for row in rows if row[key]]


def _lines(rows: list[Row]) -> list[str]:
    formats = Counter[str]()
    rounded = Counter[str]()
    for row in rows:
        formats[row["dtype"]] += 1
        rounded[row["dtype"]] += row["rounded"]
    lines = []
    for dtype, count in formats.items():
        more = ""
        if rounded[dtype]:
            more = f", {counted(rounded[dtype], 'value')} beyond the narrower one"
        lines.append(f"{counted(count, 'tensor')}: {dtype}{more}")
    values = sum(map(itemgetter("values"), rows))
    share = sum(map(itemgetter("differ"), rows)) / max(1, values)
    num_differing = len(_names(rows, "differ"))
    equal = f"{len(rows) - num_differing} of {counted(len(rows), 'tensor')} are equal"
    lines.append(f"weights: {share:.2%} of {counted(values, 'value')} differ; {equal}")
    ones = _names(rows, "is_one")
    if ones:
        lines.append(f"vectors that are exactly 1: {len(ones)}, {told(ones)}")
    if num_differing:
        columns = number_columns(
            values="values", differ="differ", change="change", factor="factor",
            nonfinite="nonfinite",
        )  # fmt: skip
        columns = (*name_columns(weights="name"), *columns)
        lines += Table(columns, rows[: min(num_differing, MOST_ROWS)]).plain().splitlines()
    return lines


def _adapters(
    first: nn.Module, second: nn.Module
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, float]]:
    """Return the weights of adapted layers with their adapters, on both sides, and how many times
    more the second holds these.
    """
    modules = {}
    for name, module in second.named_modules():
        modules[name_without_adapters(name)] = module
    weights = {}
    times = {}
    for name, layer in first.named_modules():
        name = name_without_adapters(name)
        other = modules.get(name)
        adapted = next(filter(is_adapted, (layer, other)), None)
        if adapted is None or other is None:
            continue
        x = weight_with_adapters(layer)
        y = weight_with_adapters(other)
        weights[f"{name}.weight"] = x, y
        times[name] = fit(product_of(adapted), y - x).factor
    return weights, times
