"""Compare the weights of a model that trains and of one that serves: values, formats, buffers,
ties, adapters.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.adapters import is_adapted, name_without_adapters, product_of
from narrowgauge.checks.fit import fit
from narrowgauge.checks.manifest import tied_names
from narrowgauge.checks.moved import dtypes_of, moved, share_of, tensors_of
from narrowgauge.checks.outputs import names_of
from narrowgauge.checks.set_up import inner_name
from narrowgauge.checks.units import unit_of
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import whole
from narrowgauge.runs.finding import counted, told
from narrowgauge.spec.tables import Row

_CURES = {
    "Weights": "Send the weights again, and look at their step.",
    "Buffers": "A cast such as model.bfloat16() rounds them; cast with ng.cast_parameters(model, dtype).",
}


def loaded(trainer: Any, server: Any) -> tuple[list[Reading], nn.Module]:
    """Return a copy of the trainer with a server's weights, and readings of names that one side
    lacks.
    """
    if not isinstance(trainer, nn.Module):
        raise RecipeError(
            "Cannot load the server's weights because the trainer is not a module.",
            "Pass the module that trains.",
        )
    kind: Any = type(trainer)
    is_folder = not isinstance(server, Mapping) and (Path(server) / "config.json").is_file()
    if is_folder and hasattr(kind, "from_pretrained"):
        config: Any = trainer.config
        attention = config._attn_implementation
        return [], kind.from_pretrained(server, dtype="auto", attn_implementation=attention)
    tensors = tensors_of(server)
    twin = copy.deepcopy(trainer)
    targets = _named(twin)
    read = set()
    for name in targets.keys() & tensors.keys():
        value = tensors[name]()
        scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
        if value.is_floating_point() and value.element_size() == 1:
            value = _dequantized(value.to(targets[name].dtype), scale)
        if value.shape == targets[name].shape:
            targets[name].data = value.clone()
            read.add(id(targets[name]))
    saved = set(map(inner_name, trainer.state_dict()))
    lacking = [name for name, x in targets.items() if name in saved and id(x) not in read]
    return list(_one_sided(lacking, tensors.keys() - targets.keys())), twin


def _dequantized(value: Tensor, scale: Callable[[], Tensor] | None) -> Tensor:
    """Return float8 values times the scale of their tensor, or of its rows."""
    if scale is None:
        return value
    factors = scale().to(value.dtype)
    if factors.numel() not in (1, len(value)):
        return value
    return value * factors.view(-1, *[1] * (value.ndim - 1))


def compare_weights(trainer: nn.Module, server: nn.Module) -> tuple[list[Reading], list[str]]:
    """Return the readings of weights that differ, and the lines of the manifest."""
    first = _named(trainer)
    second = _named(server)
    effective, readings = _adapters(trainer, server)
    formats = Counter[str]()
    beyond = Counter[str]()
    before = {}
    after = {}
    for name in [name for name in first if name in second]:
        kinds = dtypes_of(first[name], second[name])
        dtype = _narrower(first[name], second[name])
        pair = effective.get(name) or (whole(first[name].detach()), whole(second[name].detach()))
        narrow = [x.to(dtype) for x in pair]
        formats[kinds] += 1
        for x, rounded in zip(pair, narrow, strict=True):
            beyond[kinds] += int((rounded != x).sum())
        if pair[0].shape == pair[1].shape:
            before[name], after[name] = narrow
    result = moved(before, after)
    lines = _format_lines(formats, beyond)
    if effective:
        lines.append(f"adapters: in {counted(len(effective), 'weight')}, compared with them")
    lines.append(f"weights: {result.lines[0]}")
    differing: dict[str, list[Row]] = {things: [] for things in _CURES}
    for row in result.rows:
        name = row["name"]
        is_merge_rounding = name in effective and row["change"] <= unit_of(after[name].dtype)
        if row["differ"] and not is_merge_rounding:
            things = "Weights" if isinstance(first[name], nn.Parameter) else "Buffers"
            differing[things].append(row)
    for things, rows in differing.items():
        readings += _differing(things, rows, before, after)
    readings += _one_sided(first.keys() - after.keys(), second.keys() - after.keys())
    lines += _ties(first, second)
    return readings, lines


def _format_lines(formats: Counter[str], beyond: Counter[str]) -> list[str]:
    """Return a line for each pair of formats: tensors, and values that the narrower one rounds."""
    lines = []
    for kinds, count in formats.items():
        more = ""
        if beyond[kinds]:
            more = f", {counted(beyond[kinds], 'value')} beyond the narrower one"
        lines.append(f"{counted(count, 'tensor')}: {kinds}{more}")
    return lines


def _narrower(x: Tensor, y: Tensor) -> torch.dtype:
    """Return the format in which two tensors are compared: of parameters the wider one is rounded."""
    if isinstance(x, nn.Parameter):
        return max(x.dtype, y.dtype, key=unit_of)
    return torch.promote_types(x.dtype, y.dtype)


def _differing(
    things: str, rows: list[Row], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> Iterator[Reading]:
    """Yield a reading of weights or buffers that differ, of the largest difference."""
    rows.sort(key=lambda row: -row["change"])
    for row in rows[:1]:
        name = row["name"]
        yield KINDS["other-weights"].reading(
            of_all(row["name"] for row in rows), row["change"], 0.0,
            count=counted(len(rows), "tensor"), share=share_of(rows),
            factor=_factor(before[name], after[name]), things=things, cure=_CURES[things],
        )  # fmt: skip


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, tied ones under each name, by the names that they have without
    adapters.
    """
    named = {}
    for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers()):
        for name, x in tensors:
            named[name_without_adapters(name).replace(".base_layer.", ".")] = x
    return named


def _one_sided(lacking: Iterable[str], more: Iterable[str]) -> Iterator[Reading]:
    ours = [name for name in sorted(lacking) if ".lora_" not in name]
    theirs = [name for name in sorted(more) if ".lora_" not in name]
    sides = f"in the trainer {told(ours) or 'none'}; in the server {told(theirs) or 'none'}"
    yield from KINDS["one-sided-tensors"].of(ours + theirs, sides=sides)


def _factor(x: Tensor, y: Tensor) -> str:
    """Say by which factor a tensor is another one, if it is."""
    multiple = fit(x, y)
    factor = multiple.factor
    if multiple.rest < 0.05 * multiple.other_length and abs(factor - 1) > 0.01:
        return f" It is {factor:.4g} times the trainer's."
    return ""


def _adapters(
    trainer: nn.Module, server: nn.Module
) -> tuple[dict[str, tuple[Tensor, Tensor]], list[Reading]]:
    """Return the weights of adapted layers with their adapters, on both sides, and a reading of how
    often they hold these.
    """
    servers = {name: module for module, name in names_of(server).items()}
    effective = {}
    times = {}
    for layer, name in names_of(trainer).items():
        server_layer = servers.get(name)
        adapted = next(filter(is_adapted, (layer, server_layer)), None)
        if adapted is None or not hasattr(_base_of(layer), "weight") or server_layer is None:
            continue
        product = product_of(adapted)
        x = _with_adapters(layer)
        y = _with_adapters(server_layer)
        effective[f"{name}.weight"] = (x, y)
        number = fit(product, y - x).factor
        if abs(number) > KINDS["adapter-times"].bound:
            times[name] = number
    wrong = sorted(times, key=lambda name: -abs(times[name]))
    if not wrong:
        return effective, []
    count = counted(len(wrong), "layer")
    tensor = of_all(wrong)
    return effective, [KINDS["adapter-times"].reading(tensor, times[wrong[0]], 0.0, count=count)]


def _base_of(layer: Any) -> Any:
    if is_adapted(layer):
        return layer.get_base_layer()
    return layer


def _with_adapters(layer: Any) -> Tensor:
    weight = whole(_base_of(layer).weight.detach()).double()
    if is_adapted(layer) and not layer.merged_adapters:
        weight = weight + product_of(layer)
    return weight


def _ties(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a line if one side alone ties tensors."""
    ours = set(tied_names(first.items()))
    only = ours.symmetric_difference(tied_names(second.items()))
    if only:
        side = "trainer" if only & ours else "server"
        yield f"tied in the {side} alone: {of_all(sorted(only))}"
