"""List what trains, without verdicts: a table of kinds of parameters, and lines about buffers and equal tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from narrowgauge.analysis.reading import of_all
from narrowgauge.checks.parameters import equal_pairs, rounded_buffers
from narrowgauge.checks.set_up import SetUp, SteppedParameter, inner_name
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.matrix import MatrixRule, matrix_shape
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.tables import Row, Table, number_columns, text_columns


def manifest(set_up: SetUp) -> list[str]:
    """Return the lines of the manifest: the table of parameters first."""
    stepped, rows = {id(p.parameter): p for p in set_up.stepped}, dict[tuple[Any, ...], Row]()
    kinds = {id(p): kind for p, kind in _kinds(set_up.model)}
    tensors = {id(p): p for p in (*set_up.model.parameters(), *(p.parameter for p in set_up.stepped))}
    for key, p in tensors.items():
        row = _row(kinds.get(key, "beside the model"), p, stepped.get(key))
        total = rows.setdefault(tuple(row.values()), {"count": 0, "elements": 0, **row})
        total["count"] += 1
        total["elements"] += p.numel()
    columns = (
        *text_columns(kind="kind"), *number_columns(tensors="count", elements="elements"),
        *text_columns(dtype="dtype", trains="trains"), *number_columns(decay="decay", lr="lr"),
        *text_columns(optimizer_and_states="states"),
    )  # fmt: skip
    return [*Table(columns, list(rows.values())).plain().splitlines(), *_stacks(set_up), *_lines(set_up, kinds)]


def _row(kind: str, p: Tensor, stepped: SteppedParameter | None) -> Row:
    row: Row = {"kind": kind, "dtype": dtype_name(p.dtype), "trains": "no", "decay": None, "lr": None, "states": ""}
    if stepped is None:
        return row | {"trains": "in no optimizer" if p.requires_grad else "no"}
    if not p.requires_grad:
        return row
    formats = {dtype_name(x.dtype): None for x in stepped.state.values() if isinstance(x, Tensor) and x.ndim}
    states = stepped.storage.name if isinstance(stepped.optimizer, Optimizer) else ", ".join(formats)
    return row | {
        "trains": "yes", "decay": float(stepped.group.get("weight_decay") or 0.0), "lr": stepped.rate,
        "states": f"{type(stepped.optimizer).__name__} {states}",
    }  # fmt: skip


def _kinds(model: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """Yield each parameter with its kind. An adapter is called so, or lies beside frozen weights of its module."""
    embeddings = {m.weight.shape for m in model.modules() if isinstance(m, nn.Embedding)}
    for owner, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            inner = [q for child in module.children() for q in child.parameters()]
            is_beside = bool(inner) and not any(q.requires_grad for q in inner)
            is_named = any(word in f"{owner}.{name}".lower() for word in ("lora", "adapter"))
            if p.requires_grad and (is_beside or is_named):
                kind = "adapter"
            elif isinstance(module, nn.Embedding):
                kind = "embedding"
            elif "norm" in type(module).__name__.lower():
                kind = "norm"
            elif p.ndim < 2:
                kind = "bias" if "bias" in name else "vector"
            elif p.ndim == 2:
                kind = "head" if p.shape in embeddings else "matrix"
            else:
                kind = "convolution" if "conv" in type(module).__name__.lower() else "stack"
            yield p, kind


def _stacks(set_up: SetUp) -> Iterator[str]:
    """Yield a line for the parameters that a matrix rule steps as stacks."""
    stacks: dict[str, list[str]] = {}
    for p in set_up.stepped:
        rule = p.optimizer.rule_in(p.group, p.parameter) if isinstance(p.optimizer, Optimizer) else None
        if isinstance(rule, MatrixRule) and len(matrix_shape(p.parameter.shape)) == 3:
            stacks.setdefault(rule.name, []).append(p.name)
    for kind, names in stacks.items():
        yield f"{kind} steps each matrix of {of_all(names)} alone (3 dims)"
    weights = {f"{name}.weight" for name, module in set_up.model.named_modules() if isinstance(module, nn.Conv1d)}
    if convolutions := [name for names in stacks.values() for name in names if name in weights]:
        yield f'{of_all(convolutions)} belongs to a convolution: put it into a param group with "rule": "adamw"'


def _lines(set_up: SetUp, kinds: dict[int, str]) -> Iterator[str]:
    model, trained = set_up.model, [p.parameter for p in set_up.stepped if p.parameter.requires_grad]
    if formats := Counter(dtype_name(buffer.dtype) for buffer in model.buffers() if buffer.is_floating_point()):
        rounded = [f"{name} {turns}".strip() for name, turns in rounded_buffers(model).items()]
        words = f"; rounded: {of_all(rounded)}" if rounded else ""
        yield f"buffers: {', '.join(f'{count} {name}' for name, count in formats.items())}{words}"
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(inner_name(name))
    if tied := [" = ".join(group) for group in names.values() if len(group) > 1]:
        yield f"tied: {of_all(tied)}"
    if pairs := [f"{inner_name(a)} and {inner_name(b)}" for a, b in equal_pairs(model)]:
        yield f"equal bits in two tensors: {of_all(pairs)}"
    if adapters := sum(p.numel() for p in trained if kinds.get(id(p)) == "adapter"):
        yield f"adapters: {adapters / sum(p.numel() for p in trained):.0%} of the elements that train"
