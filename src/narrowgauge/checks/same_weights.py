"""Compare the weights of a model that trains and of one that serves: values, formats, buffers,
ties, adapters, settings.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.adapters import is_adapted, name_without_adapters, product_of
from narrowgauge.checks.moved import moved, tensors_of
from narrowgauge.checks.outputs import names_of, unit_of
from narrowgauge.checks.set_up import inner_name
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import whole
from narrowgauge.runs.finding import counted, told
from narrowgauge.spec.formats import dtype_name

_NAMES = ("_name_or_path", "dtype", "torch_dtype", "architectures", "transformers_version")
"""Settings that change no output."""


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
    read = set[int]()
    for name in targets.keys() & tensors.keys():
        value = tensors[name]()
        if value.is_floating_point() and value.element_size() == 1:
            scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
            value = value.to(targets[name].dtype)
            if scale is not None and scale().numel() in (
                1,
                len(value),
            ):  # of the tensor, or of rows
                value = value * scale().to(value.dtype).view(-1, *[1] * (value.ndim - 1))
        if value.shape == targets[name].shape:
            targets[name].data = value.clone()
            read.add(id(targets[name]))
    saved = {inner_name(name) for name in trainer.state_dict()}
    lacking = [name for name, x in targets.items() if name in saved and id(x) not in read]
    return list(_one_sided(lacking, tensors.keys() - targets.keys())), twin


def compare_weights(trainer: nn.Module, server: nn.Module) -> tuple[list[Reading], list[str]]:
    """Return the readings of weights that differ, and the lines of the manifest."""
    first = _named(trainer)
    second = _named(server)
    effective, readings = _adapters(trainer, server)
    formats = Counter[str]()
    beyond = Counter[str]()
    before = dict[str, Tensor]()
    after = dict[str, Tensor]()
    for name in [name for name in first if name in second]:
        x, y = effective.get(name, (whole(first[name].detach()), whole(second[name].detach())))
        dtypes = (first[name].dtype, second[name].dtype)
        kinds = " → ".join(dict.fromkeys(map(dtype_name, dtypes)))
        formats[kinds] += 1
        is_parameter = isinstance(first[name], nn.Parameter)  # the wider one is rounded
        dtype = max(dtypes, key=unit_of) if is_parameter else torch.promote_types(*dtypes)
        beyond[kinds] += sum(int((z.to(dtype) != z).sum()) for z in (x, y))
        x = x.to(dtype)
        y = y.to(dtype)
        if x.shape == y.shape:
            before[name] = x
            after[name] = y
    result = moved(before, after)
    lines = list[str]()
    for kinds, count in formats.items():
        more = (
            f", {counted(beyond[kinds], 'value')} beyond the narrower one" if beyond[kinds] else ""
        )
        lines.append(f"{counted(count, 'tensor')}: {kinds}{more}")
    if effective:
        lines.append(f"adapters: in {counted(len(effective), 'weight')}, compared with them")
    lines.append(f"weights: {result.lines[0]}")
    names = {"other-weights": list[Any](), "other-buffers": list[Any]()}
    for row in sorted(result.rows, key=lambda row: -row["change"]):
        name = row["name"]
        is_merge_rounding = name in effective and row["change"] <= unit_of(after[name].dtype)
        if row["differ"] and not is_merge_rounding:
            is_parameter = isinstance(first[name], nn.Parameter)
            names["other-weights" if is_parameter else "other-buffers"].append(row)
    for kind, rows in names.items():
        if rows:
            name = rows[0]["name"]
            share = sum(row["differ"] for row in rows) / sum(row["values"] for row in rows)
            words = {"share": share, "factor": _factor(before[name], after[name])}
            tensor = of_all(row["name"] for row in rows)
            reading = KINDS[kind].reading(
                tensor, rows[0]["change"], 0.0, count=counted(len(rows), "tensor"), **words
            )
            readings.append(reading)
    sides = (first.keys() - after.keys(), second.keys() - after.keys())
    readings += _one_sided(*([n for n in side if ".lora_" not in n] for side in sides))
    readings += _ties(first, second)
    return readings, lines + _settings(trainer, server)


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, tied ones under each name, by the names that they have without
    adapters.
    """
    named = dict[str, Tensor]()
    for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers()):
        for name, x in tensors:
            named[name_without_adapters(name).replace(".base_layer.", ".")] = x
    return named


def _one_sided(lacking: Iterable[str], more: Iterable[str]) -> Iterator[Reading]:
    only = (sorted(lacking), sorted(more))
    if names := [*only[0], *only[1]]:
        sides = f"in the trainer {told(only[0]) or 'none'}; in the server {told(only[1]) or 'none'}"
        yield KINDS["one-sided-tensors"].reading(of_all(names), len(names), 0, sides=sides)


def _factor(x: Tensor, y: Tensor) -> str:
    """Say by which factor a tensor is another one, if it is."""
    wide = x.double().flatten()
    other = y.double().flatten()
    factor = float(wide @ other / (wide @ wide))
    rest = float((other - factor * wide).norm())
    is_factor = rest < 0.05 * float(other.norm()) and abs(factor - 1) > 0.01
    return f" It is {factor:.4g} times the trainer's." if is_factor else ""


def _adapters(
    trainer: nn.Module, server: nn.Module
) -> tuple[dict[str, tuple[Tensor, Tensor]], list[Reading]]:
    """Return the weights of adapted layers with their adapters, on both sides, and a reading of how
    often they hold these.
    """
    sides: list[dict[str, Any]] = []
    for model in (trainer, server):
        sides.append({name: module for module, name in names_of(model).items()})
    effective = dict[str, tuple[Tensor, Tensor]]()
    times = dict[str, float]()
    for name in [name for name in sides[0] if name in sides[1]]:
        layers = [side[name] for side in sides]
        adapted = [layer for layer in layers if is_adapted(layer)]
        if adapted and all(hasattr(_base_of(layer), "weight") for layer in layers):
            product = product_of(adapted[0])
            x, y = map(_with_adapters, layers)
            effective[f"{name}.weight"] = (x, y)
            times[name] = float(((y - x) * product).sum() / product.square().sum())
    kind = KINDS["adapter-times"]
    wrong = [name for name, number in times.items() if abs(number) > kind.bound]
    wrong.sort(key=lambda name: -abs(times[name]))
    readings = []
    if wrong:
        count = counted(len(wrong), "layer")
        readings.append(kind.reading(of_all(wrong), times[wrong[0]], 0.0, count=count))
    return effective, readings


def _base_of(layer: Any) -> Any:
    return layer.get_base_layer() if is_adapted(layer) else layer


def _with_adapters(layer: Any) -> Tensor:
    weight = whole(_base_of(layer).weight.detach()).double()
    if is_adapted(layer) and not layer.merged_adapters:
        weight = weight + product_of(layer)
    return weight


def _ties(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Iterator[Reading]:
    """Yield a reading if one side alone ties tensors."""
    sides = []
    for named in (first, second):
        groups: dict[int, list[str]] = {}
        for name, x in named.items():
            groups.setdefault(id(x), []).append(name)
        sides.append({" = ".join(names) for names in groups.values() if len(names) > 1})
    if only := sides[0] ^ sides[1]:
        side = "trainer" if only & sides[0] else "server"
        yield KINDS["other-ties"].reading(of_all(sorted(only)), len(only), 0, side=side)


def _settings(trainer: Any, server: Any) -> list[str]:
    """Return a line of the settings that differ, of models with a configuration of transformers."""
    tables = []
    for model in (trainer, server):
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "to_dict"):
            return []
        tables.append({**config.to_dict(), "attention": config._attn_implementation})
    first, second = tables
    differ = [name for name in sorted(first | second) if first.get(name) != second.get(name)]
    words = [f"{n} {first.get(n)} → {second.get(n)}" for n in differ if n not in _NAMES]
    return [f"settings: {'; '.join(words)}"] if words else []
