"""What trains: a table of kinds of parameters without verdicts, and readings of parameters and
buffers that are surely wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.fit import fit
from narrowgauge.checks.set_up import NAIVE, NARROW, SetUp, SteppedParameter, inner_name
from narrowgauge.checks.shadow import is_integer
from narrowgauge.checks.step_samples import spread
from narrowgauge.numerics.dtensor import is_sharded, local_of
from narrowgauge.numerics.exact_sums import largest_magnitude
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.tables import Row, Table, number_columns, text_columns
from narrowgauge.torch_support.anatomy import moving_statistics, parts

_REPLACED = (
    "The optimizer steps other tensors than these {value} of the model. Change the model first, then make "
    "the optimizer; with PEFT load adapters with autocast_adapter_dtype=False. Copies that the loop writes "
    "back after each step are right."
)


def manifest(set_up: SetUp) -> list[str]:
    """Return the lines of the manifest: the table of parameters first."""
    stepped = {id(p.parameter): p for p in set_up.stepped}
    rows = dict[tuple[Any, ...], Row]()
    kinds = kinds_of(set_up.model)
    beside = [p.parameter for key, p in stepped.items() if key not in kinds]
    for p in (*set_up.model.parameters(), *beside):
        row = _row(kinds.get(id(p), "beside the model"), p, stepped.get(id(p)))
        if row["trains"] == "in no optimizer" and master_of(p, beside) is not None:
            row["trains"] = "by its master"
        total = rows.setdefault(tuple(row.values()), {"count": 0, "elements": 0, **row})
        total["count"] += 1
        total["elements"] += p.numel()
    columns = (
        *text_columns(kind="kind"), *number_columns(tensors="count", elements="elements"),
        *text_columns(dtype="dtype", trains="trains"), *number_columns(decay="decay", lr="lr"),
        *text_columns(optimizer_and_states="states"),
    )  # fmt: skip
    table = Table(columns, list(rows.values())).plain().splitlines()
    return [*table, *_lines(set_up, kinds)]


def _row(kind: str, p: Tensor, stepped: SteppedParameter | None) -> Row:
    row: Row = {"kind": kind, "dtype": dtype_name(p.dtype), "trains": "no"}
    row |= {"decay": None, "lr": None, "states": ""}
    if p.requires_grad and stepped is None:
        row["trains"] = "in no optimizer"
    elif p.requires_grad and stepped is not None:
        states = stepped.storage.name
        if not isinstance(stepped.optimizer, Optimizer):
            formats = dict[str, None]()
            for x in stepped.state.values():
                if isinstance(x, Tensor) and x.ndim:
                    formats[dtype_name(x.dtype)] = None
            states = ", ".join(formats)
        row["trains"] = "yes"
        row["decay"] = float(stepped.group.get("weight_decay") or 0.0)
        row["lr"] = stepped.rate
        row["states"] = f"{type(stepped.optimizer).__name__} {states}"
    return row


def kinds_of(model: nn.Module) -> dict[int, str]:
    """Return the kind of each parameter, by its id.

    An adapter is called so, or lies beside frozen weights of its module.
    """
    inside = parts(model).inside()
    tables = {len(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and module not in inside and module.out_features in tables:
            heads.append(module)
    kinds = {}
    for owner, module in model.named_modules():
        inner = set[bool]()
        for child in module.children():
            inner.update(q.requires_grad for q in child.parameters())
        is_beside = inner == {False}
        of_class = type(module).__name__.lower()
        for name, p in module.named_parameters(recurse=False):
            full = f"{owner}.{name}".lower()
            is_named = "lora" in full or "adapter" in full
            if p.requires_grad and (is_beside or is_named):
                kind = "adapter"
            elif isinstance(module, nn.Embedding):
                kind = "embedding"
            elif "norm" in of_class:
                kind = "norm"
            elif p.ndim < 2:
                kind = "bias" if "bias" in name else "vector"
            elif p.ndim == 2:
                kind = "head" if module in heads[-1:] else "matrix"
            else:
                kind = "convolution" if "conv" in of_class else "stack"
            kinds[id(p)] = kind
    return kinds


def _weights(model: nn.Module, kind: Any) -> dict[int, Tensor]:
    """Return the weights of modules of a kind, by id."""
    return {id(m.weight): m.weight for m in model.modules() if isinstance(m, kind)}


def tied_names(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of each tensor that has several, with signs of equality."""
    groups = dict[int, list[str]]()
    for name, x in named:
        groups.setdefault(id(x), []).append(inner_name(name))
    return [" = ".join(names) for names in groups.values() if len(names) > 1]


def _lines(set_up: SetUp, kinds: dict[int, str]) -> Iterator[str]:
    model = set_up.model
    yield from _buffer_lines(model)
    tied = tied_names(model.named_parameters(remove_duplicate=False))
    if tied:
        yield f"tied: {of_all(tied)}"
    trained = {id(p.parameter): p.parameter.numel() for p in set_up.trained}
    total = sum({id(p): p.numel() for p in model.parameters()}.values())
    beside = [p.parameter for p in set_up.trained if id(p.parameter) not in kinds]
    inside = 0
    for p in model.parameters():
        if id(p) in trained or (p.requires_grad and master_of(p, beside) is not None):
            inside += p.numel()
    line = f"trains: {inside:,} of {total:,} values of the model ({inside / max(total, 1):.3g})"
    adapters = sum(count for key, count in trained.items() if kinds.get(key) == "adapter")
    if adapters:
        line += f", {adapters / sum(trained.values()):.0%} of them in adapters"
    yield line


def _buffer_lines(model: nn.Module) -> Iterator[str]:
    """Yield the formats of buffers, and the norms that move though their weights are frozen."""
    formats = Counter(dtype_name(b.dtype) for b in model.buffers() if b.is_floating_point())
    if formats:
        line = ", ".join(f"{count} {name}" for name, count in formats.items())
        rounded = []
        for name, turns in rounded_buffers(model).items():
            rounded.append(f"{name} {turns}".strip())
        if rounded:
            line += f"; rounded: {of_all(rounded)}"
        yield f"buffers: {line}"
    moving = list(map(inner_name, moving_statistics(model)))
    if moving:
        yield f"frozen, and statistics move in training mode: {of_all(moving)}"


# ── readings ──────────────────────────────────────────────────────────────────────────────────────


def parameter_readings(set_up: SetUp) -> Iterator[Reading]:
    """Yield parameters in no optimizer, listed twice, not finite, untied, or without a gradient;
    and rounded buffers.
    """
    yield from _missing(set_up)
    yield from _untied(set_up)
    buffers = rounded_buffers(set_up.model)
    turns = ""
    for name, angle in buffers.items():
        if angle and not turns:
            turns = f" {name} is {angle} then."
    yield from KINDS["rounded-buffers"].of(buffers, turns=turns)
    yield from KINDS["nonfinite"].case("weights").of(_not_finite(set_up))
    once = set()
    twice = dict[str, None]()
    for stepped in set_up.stepped:
        if id(stepped.parameter) in once:
            twice[stepped.name] = None
        once.add(id(stepped.parameter))
    yield from KINDS["parameters-twice"].of(twice)
    lost = dict[str, None]()
    count = len({p.name for p in set_up.trained})
    for stepped in set_up.trained:
        p = stepped.parameter
        # TransformerEngine and Megatron store gradients elsewhere.
        main = getattr(p, "main_grad", None)
        decoupled = getattr(p, "decoupled_grad", None)
        if p.grad is None and main is None and decoupled is None:
            lost[stepped.name] = None
    if len(lost) < count:
        words = "; the others have one"
        yield from KINDS["no-gradient"].of(lost, count=count, words=words)


def _not_finite(set_up: SetUp) -> list[str]:
    """Return the parameters that hold NaN, or infinity that is no frozen mask."""
    bad = []
    for name, p in set_up.parameters.items():
        if p.dtype in NAIVE and not p.is_meta:
            largest = largest_magnitude(local_of(p))
            if largest.isnan() or (p.requires_grad and largest.isinf()):
                bad.append(name)
    return bad


def _missing(set_up: SetUp) -> Iterator[Reading]:
    """Yield trainable parameters without an optimizer.

    If the optimizer has others of that shape, they were replaced.
    """
    stepped = {id(p.parameter): p.parameter for p in set_up.stepped}
    in_model = set(map(id, set_up.model.parameters()))
    beside = [p for key, p in stepped.items() if key not in in_model]
    if len(beside) == len(stepped) and all(p.ndim == 1 for p in beside):
        return  # flat partitions of the weights, as of DeepSpeed and Megatron
    lost = []
    replaced = []
    for name, p in set_up.parameters.items():
        if not p.requires_grad or id(p) in stepped or master_of(p, beside) is not None:
            continue
        lost.append(name)
        if any(q.shape == p.shape for q in beside):
            replaced.append(name)
    kind = KINDS["missing-parameters"]
    if replaced:
        kind = replace(kind, advice=_REPLACED)
    yield from kind.of(replaced or lost)


def master_of(p: Tensor, candidates: Iterable[Tensor]) -> Tensor | None:
    """Return the wider tensor that holds a parameter's values, as a master of a loop's own does."""
    for master in candidates:
        is_wider = master.element_size() > p.element_size() and not p.is_meta
        if not is_wider or master.shape != p.shape:
            continue
        if torch.equal(spread(master).to(p.dtype), spread(p)):
            return master
    return None


def _untied(set_up: SetUp) -> Iterator[Reading]:
    """Yield pairs of an embedding and another trained matrix that are two tensors with equal bits, or
    with others where the model declares one.
    """
    model = set_up.model
    embeddings = _weights(model, nn.Embedding)
    for a, b in {*equal_pairs(model), *declared_ties(model)}:
        first = model.get_parameter(a)
        second = model.get_parameter(b)
        both_train = first.requires_grad and second.requires_grad
        if first is second or not both_train:
            continue
        if (id(first) in embeddings) == (id(second) in embeddings):
            continue
        distance = fit(first.detach(), second.detach()).relative
        words = "hold equal bits in two tensors"
        if distance:
            words = (
                f"are declared as tied, and are two tensors, {distance:.2g} of their length apart"
            )
        yield KINDS["untied"].reading(
            inner_name(b), 1, 0, a=inner_name(a), b=inner_name(b), words=words
        )


def declared_ties(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of an embedding's and a head's weight that a model of transformers ties."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        config = getattr(module, "config", None)
        if not getattr(config, "tie_word_embeddings", False):
            continue
        embedding = getattr(module, "get_input_embeddings", lambda: None)()
        head = getattr(module, "get_output_embeddings", lambda: None)()
        if not (isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)):
            continue
        if embedding.weight.shape == head.weight.shape and id(head) in names:
            yield f"{names[id(embedding)]}.weight", f"{names[id(head)]}.weight"


def equal_pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of matrices that hold equal bits in two tensors.

    Constants, such as zeros, do not count.
    """
    first = dict[Any, tuple[str, Tensor]]()
    for name, p in model.named_parameters():
        if p.ndim < 2 or p.is_meta or is_sharded(p) or not p.numel():
            continue
        sample = spread(p).view(torch.uint8).view(-1, p.element_size())
        key = (p.shape, p.dtype, sample.numpy().tobytes())
        first_name, q = first.setdefault(key, (name, p))
        if first_name != name and bool((sample != sample[0]).any()) and _bits_are_equal(p, q):
            yield first_name, name


def _bits_are_equal(p: Tensor, q: Tensor) -> bool:
    first = p.detach().contiguous().view(torch.uint8)
    return torch.equal(first, q.detach().contiguous().view(torch.uint8))


def rounded_buffers(model: nn.Module) -> dict[str, str]:
    """Return the buffers of 16 bits that were probably rounded, with the angle by which rotary
    positions may turn.
    """
    names = {}
    for owner, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if any(map(is_integer, buffers.values())):
            continue  # statistics of a batch norm beside their count; scales beside their codes
        for name, buffer in buffers.items():
            if buffer.dtype not in NARROW or buffer.is_meta:
                continue
            values = spread(buffer)
            if not _is_rounded(values):
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
