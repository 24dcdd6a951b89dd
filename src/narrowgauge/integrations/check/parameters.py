"""Checks of which parameters an optimizer has, and in which format. Each yields the values that fill its row's sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from narrowgauge.integrations.check.set_up import NARROW, SetUp, SteppedParameter, Values, tensors_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import told
from narrowgauge.spec.formats import dtype_name


def missing(set_up: SetUp) -> Iterator[Values]:
    """Trainable parameters that no optimizer has."""
    lost, strangers = _unmatched(set_up)
    if lost and not _replaced(lost, strangers):
        yield {"where": told(lost), "count": len(lost), "first": next(iter(lost))}


def replaced(set_up: SetUp) -> Iterator[Values]:
    """Parameters that were replaced after the optimizer was made: it has others of the same shapes."""
    lost, strangers = _unmatched(set_up)
    if gone := [name for name in _replaced(lost, strangers) if _recast(lost[name], strangers) is None]:
        yield {"where": told(gone), "count": len(gone)}


def recast(set_up: SetUp) -> Iterator[Values]:
    """Parameters that a cast replaced after the optimizer was made: it has others of the same shapes in another format."""
    lost, strangers = _unmatched(set_up)
    then = {name: dtype for name in _replaced(lost, strangers) if (dtype := _recast(lost[name], strangers)) is not None}
    if then:
        name, dtype = next(iter(then.items()))
        yield {"where": told(then), "count": len(then), "now": dtype_name(lost[name].dtype), "then": dtype_name(dtype)}


def _unmatched(set_up: SetUp) -> tuple[dict[str, Tensor], list[SteppedParameter]]:
    held, own = set_up.stepped, {id(p) for p in set_up.model.parameters()}
    known = {id(each.parameter) for each in held}
    if not own & known and all(each.parameter.ndim == 1 for each in held):
        return {}, []  # flat partitions of the weights, as of DeepSpeed and Megatron
    lost = {name: p for name, p in set_up.parameters.items() if p.requires_grad and id(p) not in known}
    return lost, [each for each in held if id(each.parameter) not in own]


def _replaced(lost: dict[str, Tensor], strangers: list[SteppedParameter]) -> list[str]:
    shapes = {each.parameter.shape for each in strangers}
    return [name for name, p in lost.items() if p.shape in shapes]


def _recast(now: Tensor, strangers: list[SteppedParameter]) -> torch.dtype | None:
    """The format that a replaced parameter has in its optimizer; ``None`` if the format has not changed."""
    formats = {each.parameter.dtype for each in strangers if each.parameter.shape == now.shape}
    return None if now.dtype in formats else next(iter(formats), None)


def twice(set_up: SetUp) -> Iterator[Values]:
    """Parameters that are stepped twice."""
    held = set_up.stepped
    counts = Counter(id(each.parameter) for each in held)
    if names := [each.name for each in held if counts[id(each.parameter)] > 1]:
        yield {"where": told(names)}


def frozen(set_up: SetUp) -> Iterator[Values]:
    """Frozen parameters in an optimizer."""
    if names := [each.name for each in set_up.stepped if not each.parameter.requires_grad]:
        yield {"where": told(names), "count": len(names)}


def cast_later(set_up: SetUp) -> Iterator[Values]:
    """Weights in another format than when their optimizer was made."""
    changes: dict[tuple[str, str], list[str]] = {}
    for each in set_up.stepped:
        before = _dtype_before(set_up, each)
        if before is not None and before != each.parameter.dtype:
            changes.setdefault((dtype_name(before), dtype_name(each.parameter.dtype)), []).append(each.name)
    for (then, now), names in changes.items():
        yield {"where": told(names), "then": then, "now": now}


def _dtype_before(set_up: SetUp, each: SteppedParameter) -> torch.dtype | None:
    seen = set_up.seen.dtypes.get(id(each.parameter))
    if seen is not None and seen != each.parameter.dtype:
        return seen
    if isinstance(each.optimizer, Optimizer):
        found: torch.dtype = getattr(torch, each.storage.visible)
        return found
    if not type(each.optimizer).__module__.startswith("torch.optim"):
        return None
    # torch makes its states in the format of the weight that it meets first.
    states = dict(each.optimizer.state.get(each.parameter, {}))
    kinds = [states[name].dtype for name in ("exp_avg", "momentum_buffer") if isinstance(states.get(name), Tensor)]
    return kinds[0] if kinds else None


def other_gradients(set_up: SetUp) -> Iterator[Values]:
    """Gradients in another format than their parameter's."""
    seen = set_up.seen.gradients
    found = {each.name: (each, seen[id(each.parameter)]) for each in set_up.stepped if id(each.parameter) in seen}
    if found:
        each, dtype = next(iter(found.values()))
        yield {"where": told(found), "dtype": dtype_name(dtype), "wanted": dtype_name(each.parameter.dtype)}


def narrow_average(set_up: SetUp) -> Iterator[Values]:
    """An average of the weights that is kept in 16 bits."""
    for average in set_up.averages:
        if narrow := {tensor.dtype for tensor in tensors_of(average) if tensor.dtype in NARROW}:
            dtype = dtype_name(next(iter(narrow)))
            yield {"where": type(average).__name__, "dtype": dtype, "bits": {"bfloat16": 9, "float16": 12}[dtype]}


def written(set_up: SetUp) -> Iterator[Values]:
    """Parameters that something other than their optimizer changed, in a way that it notices."""
    if names := _named(set_up, set_up.seen.written):
        yield {"where": told(names), "count": len(names)}


def written_silently(set_up: SetUp) -> Iterator[Values]:
    """Parameters that were changed through ``.data``, which their optimizer cannot notice."""
    if names := _named(set_up, set_up.seen.written_silently):
        yield {"where": told(names)}


def _named(set_up: SetUp, ids: set[int]) -> list[str]:
    # Only a tail can belong to another weight: a master copy is compared in every step.
    return [
        each.name
        for each in set_up.stepped
        if id(each.parameter) in ids and each.storage.beside and not each.storage.master
    ]
