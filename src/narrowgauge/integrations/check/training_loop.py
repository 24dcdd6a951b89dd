"""Checks of the training loop, from the objects that the user passed and the steps that were watched."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from narrowgauge import _torch
from narrowgauge.integrations.check.set_up import NARROW, SetUp, Values
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import told
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.sums import naive_limit


def autocast_over_narrow(set_up: SetUp) -> Iterator[Values]:
    """Autocast over weights that are in 16 bits already."""
    # Over a frozen base it is right: adapters in float32 compute beside it.
    narrow = [each for each in set_up.trained if each.parameter.dtype in NARROW and each.parameter.ndim > 1]
    kinds = {each.parameter.device.type for each in narrow}
    now = {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    found = [dtype for dtype in now | set_up.seen.autocasts if dtype is not None]
    if narrow and found:
        weights = dtype_name(narrow[0].parameter.dtype)
        yield {"where": told(each.name for each in narrow), "autocast": dtype_name(found[0]), "format": weights}


def second_clipping(set_up: SetUp) -> Iterator[Values]:
    """Gradients that the loop scales down before an optimizer that clips them itself."""
    for optimizer in set_up.optimizers:
        own = optimizer.max_grad_norm if isinstance(optimizer, Optimizer) else None
        if own is None or math.isinf(own) or not set_up.seen.clips:
            continue
        norms = [norm for _, norm in set_up.seen.clips]
        # A division by the number of micro-batches leaves norms that differ; clipping leaves one.
        if all(abs(1 / factor - round(1 / factor)) < 0.01 for factor, _ in set_up.seen.clips):
            continue
        is_one_norm = len(norms) > 1 and max(norms) - min(norms) < 0.02 * max(norms)
        if is_one_norm or any(abs(norm - wanted) < 0.02 * wanted for norm in norms for wanted in (own, 1.0)):
            factor, norm = min(set_up.seen.clips)
            yield {"where": type(optimizer).__name__, "own": own, "factor": factor, "norm": norm}


def moved_on_skip(set_up: SetUp) -> Iterator[Values]:
    """A schedule that moves although the step was skipped."""
    if set_up.seen.moved_on_skip:
        yield {"where": told(type(each).__name__ for each in set_up.schedules), "count": set_up.seen.moved_on_skip}


def compiled_twice(set_up: SetUp) -> Iterator[Values]:
    """``torch.compile`` around the step of an optimizer whose kernels are compiled already."""
    for optimizer in set_up.optimizers:
        is_wrapped = hasattr(optimizer.__dict__.get("step"), "_torchdynamo_orig_callable")
        if isinstance(optimizer, Optimizer) and (is_wrapped or set_up.seen.is_compiled):
            yield {"where": type(optimizer).__name__}


# ── loss and its scale ──────────────────────────────────────────────────────────────────────────────────────────────


def _uses_float16(set_up: SetUp) -> bool:
    # Gradients pass through frozen weights too.
    used = {parameter.dtype for parameter in set_up.parameters.values()}
    return torch.float16 in used | set_up.seen.autocasts


def needless_scaler(set_up: SetUp) -> Iterator[Values]:
    """A loss scaler where nothing is computed in float16."""
    # Before a forward pass was seen, autocast may be to come over float32 weights.
    is_known = bool(set_up.seen.autocasts) or all(each.parameter.dtype is torch.bfloat16 for each in set_up.stepped)
    if is_known and not _uses_float16(set_up):
        for scaler in set_up.scalers():
            yield {"where": type(scaler).__name__}


def two_scalers(set_up: SetUp) -> Iterator[Values]:
    """Two loss scalers for one step."""
    found = set_up.scalers()
    ours = [scaler for scaler in found if isinstance(scaler, LossScaler)]
    if ours and len(found) > len(ours):
        yield {"where": told(type(scaler).__name__ for scaler in found)}


def unscaled_loss(set_up: SetUp) -> Iterator[Values]:
    """A step whose loss did not pass through the optimizer's scaler."""
    if set_up.seen.is_unscaled:
        yield {"where": "optimizer.loss_scaler"}


def missing_scaler(set_up: SetUp) -> Iterator[Values]:
    """Float16 without a loss scaler."""
    if set_up.seen.steps and _uses_float16(set_up) and not set_up.scalers():
        yield {"where": told(each.name for each in set_up.stepped)}


def narrow_loss(set_up: SetUp) -> Iterator[Values]:
    """A loss that is reduced in 16 bits."""
    given = set() if set_up.loss is None else _torch.scalar_dtypes(set_up.loss)
    for dtype in NARROW:
        if dtype in set_up.seen.losses | given:
            yield {"where": "loss", "dtype": dtype_name(dtype)}


# ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────────────


def narrow_accumulation(set_up: SetUp) -> Iterator[Values]:
    """More micro-batches than a sum in 16 bits holds."""
    narrow = [each.parameter.dtype for each in set_up.trained if each.parameter.dtype in NARROW]
    # float16 has three bits more than bfloat16.
    limit = naive_limit() * (8 if narrow and narrow[0] is torch.float16 else 1)
    if narrow and set_up.seen.micro_batches >= limit:
        yield {"where": "p.grad", "count": set_up.seen.micro_batches, "dtype": dtype_name(narrow[0])}


def stale_gradients(set_up: SetUp) -> Iterator[Values]:
    """Steps on gradients that still hold those of the step before."""
    if set_up.seen.stale:
        yield {"where": "p.grad", "count": set_up.seen.stale}


def zeroed_gradients(set_up: SetUp) -> Iterator[Values]:
    """Gradients that are set to zero instead of ``None``."""
    if set_up.seen.zeroed:
        yield {"where": "zero_grad(set_to_none=False)"}
