"""Check the parameters of an optimizer: missing, listed twice, in another format, or without a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.set_up import SetUp, SteppedParameter
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.formats import dtype_name


def parameter_readings(set_up: SetUp) -> Iterator[Reading]:
    """Yield parameters that are in no optimizer, listed twice, in another format, or without a gradient."""
    yield from _missing(set_up)
    counts = Counter(id(p.parameter) for p in set_up.stepped)
    if names := [p.name for p in set_up.stepped if counts[id(p.parameter)] > 1]:
        yield KINDS["parameters-twice"].reading(of_all(names), len(set(names)), 0)
    yield from _cast_later(set_up)
    yield from without_gradient(set_up)


def _missing(set_up: SetUp) -> Iterator[Reading]:
    """Yield trainable parameters without an optimizer. If the optimizer has others of that shape, they were replaced."""
    stepped, in_model = set_up.stepped, {id(p) for p in set_up.model.parameters()}
    stepped_ids = {id(p.parameter) for p in stepped}
    if not in_model & stepped_ids and all(p.parameter.ndim == 1 for p in stepped):
        return  # flat partitions of the weights, as of DeepSpeed and Megatron
    lost = {name: p for name, p in set_up.parameters.items() if p.requires_grad and id(p) not in stepped_ids}
    strangers = [p.parameter for p in stepped if id(p.parameter) not in in_model]
    replaced = {name: p for name, p in lost.items() if any(stranger.shape == p.shape for stranger in strangers)}
    if replaced:
        then = {
            dtype_name(stranger.dtype)
            for stranger in strangers
            if any(stranger.shape == p.shape for p in replaced.values())
        }
        now = {dtype_name(p.dtype) for p in replaced.values()}
        yield KINDS["replaced-parameters"].reading(
            of_all(replaced), len(replaced), 0, then=", ".join(sorted(then)), now=", ".join(sorted(now))
        )
    elif lost:
        yield KINDS["missing-parameters"].reading(of_all(lost), len(lost), 0)


def _cast_later(set_up: SetUp) -> Iterator[Reading]:
    """Weights in another format than when their optimizer was made."""
    changes: dict[tuple[str, str], list[str]] = {}
    for p in set_up.stepped:
        before = _dtype_before(p)
        if before is not None and before != p.parameter.dtype:
            changes.setdefault((dtype_name(before), dtype_name(p.parameter.dtype)), []).append(p.name)
    for (then, now), names in changes.items():
        yield KINDS["cast-weights"].reading(of_all(names), len(names), 0, then=then, now=now)


def _dtype_before(stepped: SteppedParameter) -> torch.dtype | None:
    if isinstance(stepped.optimizer, Optimizer):
        dtype: torch.dtype = getattr(torch, stepped.storage.visible)
        return dtype
    if not type(stepped.optimizer).__module__.startswith("torch.optim"):
        return None
    # torch makes its states in the format that the weight has at its first step.
    states = [stepped.state.get(name) for name in ("exp_avg", "momentum_buffer")]
    return next((state.dtype for state in states if isinstance(state, Tensor)), None)


def without_gradient(set_up: SetUp) -> Iterator[Reading]:
    """Yield trainable parameters without a gradient, if others have one. TransformerEngine and Megatron store it elsewhere."""
    trained = {p.name: p.parameter for p in set_up.trained}
    lost = [
        name
        for name, p in trained.items()
        if p.grad is None and all(getattr(p, attribute, None) is None for attribute in ("main_grad", "decoupled_grad"))
    ]
    if lost and len(lost) < len(trained):
        yield KINDS["no-gradient"].reading(of_all(lost), len(lost), 0, count=len(trained))
