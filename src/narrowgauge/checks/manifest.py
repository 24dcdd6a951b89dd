"""What trains: a table of kinds of parameters without verdicts, and readings of parameters and
buffers that are surely wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.set_up import NAIVE, NARROW, SetUp, SteppedParameter, inner_name
from narrowgauge.checks.step_samples import spread
from narrowgauge.numerics.dtensor import is_sharded, local_of
from narrowgauge.numerics.exact_sums import largest_magnitude
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.matrix import MatrixRule, matrix_shape
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.tables import Row, Table, number_columns, text_columns


def manifest(set_up: SetUp) -> list[str]:
    """Return the lines of the manifest: the table of parameters first."""
    stepped = {id(p.parameter): p for p in set_up.stepped}
    rows = dict[tuple[Any, ...], Row]()
    kinds = {id(p): kind for p, kind in _kinds(set_up.model)}
    tensors = {
        id(p): p for p in (*set_up.model.parameters(), *(p.parameter for p in set_up.stepped))
    }
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
    return [
        *Table(columns, list(rows.values())).plain().splitlines(),
        *_stacks(set_up),
        *_lines(set_up, kinds),
    ]


def _row(kind: str, p: Tensor, stepped: SteppedParameter | None) -> Row:
    row: Row = {
        "kind": kind,
        "dtype": dtype_name(p.dtype),
        "trains": "no",
        "decay": None,
        "lr": None,
        "states": "",
    }
    if stepped is None:
        return row | {"trains": "in no optimizer" if p.requires_grad else "no"}
    if not p.requires_grad:
        return row
    formats = {
        dtype_name(x.dtype): None
        for x in stepped.state.values()
        if isinstance(x, Tensor) and x.ndim
    }
    states = (
        stepped.storage.name if isinstance(stepped.optimizer, Optimizer) else ", ".join(formats)
    )
    return row | {
        "trains": "yes", "decay": float(stepped.group.get("weight_decay") or 0.0), "lr": stepped.rate,
        "states": f"{type(stepped.optimizer).__name__} {states}",
    }  # fmt: skip


def _kinds(model: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """Yield each parameter with its kind.

    An adapter is called so, or lies beside frozen weights of its module.
    """
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
        rule = (
            p.optimizer.rule_in(p.group, p.parameter)
            if isinstance(p.optimizer, Optimizer)
            else None
        )
        if isinstance(rule, MatrixRule) and len(matrix_shape(p.parameter.shape)) == 3:
            stacks.setdefault(rule.name, []).append(p.name)
    for kind, names in stacks.items():
        yield f"{kind} steps each matrix of {of_all(names)} alone (3 dims)"
    weights = {
        f"{name}.weight"
        for name, module in set_up.model.named_modules()
        if isinstance(module, nn.Conv1d)
    }
    if convolutions := [name for names in stacks.values() for name in names if name in weights]:
        yield f'{of_all(convolutions)} belongs to a convolution: put it into a param group with "rule": "adamw"'


def _lines(set_up: SetUp, kinds: dict[int, str]) -> Iterator[str]:
    model = set_up.model
    trained = [p.parameter for p in set_up.stepped if p.parameter.requires_grad]
    if formats := Counter(
        dtype_name(buffer.dtype) for buffer in model.buffers() if buffer.is_floating_point()
    ):
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


# ── readings ──────────────────────────────────────────────────────────────────────────────────────


def parameter_readings(set_up: SetUp) -> Iterator[Reading]:
    """Yield parameters in no optimizer, listed twice, not finite, untied, or without a gradient;
    and rounded buffers.
    """
    yield from _missing(set_up)
    yield from _untied(set_up)
    if buffers := rounded_buffers(set_up.model):
        turns = next((f" {name} is {turns} then." for name, turns in buffers.items() if turns), "")
        yield from KINDS["rounded-buffers"].of(buffers, turns=turns)
    # A frozen mask may hold infinities.
    values = {
        name: p for name, p in set_up.parameters.items() if p.dtype in NAIVE and not p.is_meta
    }
    largest = {name: largest_magnitude(local_of(p)) for name, p in values.items()}
    bad = [
        name
        for name, x in largest.items()
        if x.isnan() or (values[name].requires_grad and x.isinf())
    ]
    yield from KINDS["nonfinite-weights"].of(bad)
    counts = Counter(id(p.parameter) for p in set_up.stepped)
    twice = dict.fromkeys(p.name for p in set_up.stepped if counts[id(p.parameter)] > 1)
    yield from KINDS["parameters-twice"].of(twice)
    trained = {p.name: p.parameter for p in set_up.trained}
    # TransformerEngine and Megatron store gradients elsewhere.
    places = ("grad", "main_grad", "decoupled_grad")
    lost = [
        name
        for name, p in trained.items()
        if all(getattr(p, place, None) is None for place in places)
    ]
    if len(lost) < len(trained):
        words = "; the others have one"
        yield from KINDS["no-gradient"].of(lost, count=len(trained), words=words)


def _missing(set_up: SetUp) -> Iterator[Reading]:
    """Yield trainable parameters without an optimizer.

    If the optimizer has others of that shape, they were replaced.
    """
    stepped = set_up.stepped
    in_model = {id(p) for p in set_up.model.parameters()}
    stepped_ids = {id(p.parameter) for p in stepped}
    if not in_model & stepped_ids and all(p.parameter.ndim == 1 for p in stepped):
        return  # flat partitions of the weights, as of DeepSpeed and Megatron
    lost = {
        name: p
        for name, p in set_up.parameters.items()
        if p.requires_grad and id(p) not in stepped_ids
    }
    beside = [p.parameter for p in stepped if id(p.parameter) not in in_model]
    lost = {name: p for name, p in lost.items() if not any(_is_master(q, p) for q in beside)}
    shapes = {q.shape for q in beside}
    replaced = [name for name, p in lost.items() if p.shape in shapes]
    yield from KINDS["replaced-parameters"].of(replaced)
    if not replaced:
        yield from KINDS["missing-parameters"].of(lost)


def _is_master(master: Tensor, p: Tensor) -> bool:
    """Return whether a wider tensor holds a parameter's values, as masters of a loop's own do."""
    if master.shape != p.shape or master.element_size() <= p.element_size() or p.is_meta:
        return False
    return torch.equal(spread(master).to(p.dtype), spread(p))


def _untied(set_up: SetUp) -> Iterator[Reading]:
    """Yield pairs of an embedding and another trained matrix with equal bits in two tensors."""
    for a, b in equal_pairs(set_up.model):
        modules = [set_up.model.get_submodule(name.rpartition(".")[0]) for name in (a, b)]
        both_train = all(set_up.model.get_parameter(name).requires_grad for name in (a, b))
        if both_train and sum(isinstance(module, nn.Embedding) for module in modules) == 1:
            yield KINDS["untied"].reading(inner_name(b), 1, 0, a=inner_name(a), b=inner_name(b))


def equal_pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of matrices that hold equal bits in two tensors.

    Constants, such as zeros, do not count.
    """
    first: dict[Any, str] = {}
    for name, p in model.named_parameters():
        if p.ndim < 2 or p.is_meta or is_sharded(p) or not p.numel():
            continue
        sample = spread(p).view(torch.uint8).view(-1, p.element_size())
        other = first.setdefault((p.shape, p.dtype, sample.numpy().tobytes()), name)
        if other != name and bool((sample != sample[0]).any()):
            a, b = (
                x.detach().contiguous().view(torch.uint8) for x in (p, model.get_parameter(other))
            )
            if torch.equal(a, b):
                yield other, name


def rounded_buffers(model: nn.Module) -> dict[str, str]:
    """Return the buffers of 16 bits that were probably rounded, with the angle by which rotary
    positions may turn.
    """
    names = dict[str, str]()
    for owner, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if any(not b.is_floating_point() and b.dtype is not torch.bool for b in buffers.values()):
            continue  # statistics of a batch norm beside their count; scales beside their codes
        for name, buffer in buffers.items():
            if (
                buffer.dtype not in NARROW
                or buffer.is_meta
                or not _is_rounded(values := spread(buffer))
            ):
                continue
            turns = ""
            if name == "inv_freq":
                position = getattr(getattr(module, "config", None), "max_position_embeddings", 4096)
                # The first frequency, 1, is exact. Half an ulp of the next is the largest error.
                exponent = math.frexp(float(values[values != 1].abs().max()))[1]
                angle = position * math.ldexp(torch.finfo(buffer.dtype).eps / 4, exponent)
                turns = f"off by up to {angle:.2g} rad at position {position:,}"
            names[inner_name(f"{owner}.{name}".lstrip("."))] = turns
    return names


def _is_rounded(x: Tensor) -> bool:
    """Return whether a value needs the last bit of its 16-bit format.

    Masks and small integers do not: they are exact.
    """
    is_exact = (x.view(torch.int16) % 2 == 0) | (x == x.round()) & (x.abs() <= 256)
    return bool((~is_exact & x.isfinite() & (x.abs() < torch.finfo(x.dtype).max)).any())
