"""Predict the updates of each tensor that rounding will lose, from weights, states, learning rate
and storage.

Move each weight by the step of its rule and round it as its storage does. With Adam's moments in
the state, use their step. Otherwise draw from a normal distribution with the typical size of the
rule's steps, clamped to the learning rate. The sums and ratios are the audit's, so the prediction
compares directly with the audit during the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.set_up import NARROW, TYPICAL, SetUp, SteppedParameter
from narrowgauge.checks.step_samples import ELEMENTS, spread
from narrowgauge.numerics.dtensor import gradient_of
from narrowgauge.numerics.metrics import update_metrics, update_sums
from narrowgauge.numerics.rounding import round_to
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import counted
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.storages import STORAGES, Storage

STILL = 0.9
"""A tensor is frozen if the largest step leaves more than this fraction of its elements unchanged.
"""
NUM_UPDATES = 10
"""Updates that the forward pass may see.

Each moves a weight by about the learning rate, in one direction.
"""


def update_readings(set_up: SetUp) -> Iterator[Reading]:
    """Yield losses by rounding: frozen tensors, lost updates, lost decay, frozen moments, truncated
    settings.
    """
    trained = set_up.predicted
    still = [p for p in trained if _stands_still(p)]
    yield from _standing_still(still)
    yield from _lost_updates([p for p in trained if p.is_short and p not in still])
    yield from _swallowed_decay(set_up)
    yield from _frozen_second_moment(set_up)
    yield from _truncated(set_up)
    yield from _no_matrix(set_up)


# ── updates ───────────────────────────────────────────────────────────────────────────────────────


def change_of(stepped: SteppedParameter, weight: Tensor) -> Tensor | None:
    """Return the next step's change of sampled weights, float32.

    Return ``None`` if its size is unknown yet.
    """
    state = stepped.state
    rate = stepped.rate
    mean = state.get("exp_avg")
    square = state.get("exp_avg_sq")
    shape = stepped.parameter.shape
    if (
        isinstance(mean, Tensor)
        and isinstance(square, Tensor)
        and mean.shape == square.shape == shape
        and square.any()
    ):
        betas = stepped.group.get("betas", (0.9, 0.999))
        count = max(1.0, float(state.get("step", 1)))
        first = spread(mean).float() / (1 - betas[0] ** count)
        second = spread(square).float() / (1 - betas[1] ** count)
        step: Tensor = first / (second.sqrt() + float(stepped.group.get("eps", 1e-8)))
        return -rate * step
    if (size := stepped.size) is None:
        direction = state.get("momentum_buffer", gradient_of(stepped.parameter))
        return None if direction is None else -rate * spread(direction).float()
    share = (
        torch.arange(len(weight), dtype=torch.float64, device=weight.device) * 0.6180339887498949
        + 0.5
    ) % 1.0
    draw = (
        math.sqrt(2.0) * torch.erfinv(2 * share.clamp(1e-6, 1 - 1e-6) - 1)
        if size < 1
        else (share - 0.5).sign()
    )
    return (-rate * (size * draw).clamp(-1, 1)).float()


def predicted(stepped: SteppedParameter, change: Tensor, weight: Tensor) -> Tensor:
    """Return the audit's sums for a change of sampled weights, rounded to the visible format."""
    stored = round_to(weight.float() + change, stepped.storage.visible).float() - weight.float()
    return update_sums(change, stored, stored)


def _stands_still(stepped: SteppedParameter) -> bool:
    """Return whether the largest step moves nearly no element: Adam's is the learning rate, others'
    4 times their size.
    """
    if not (stepped.rate > 0 and stepped.size and stepped.keeps_nothing):
        return False
    weight = spread(stepped.parameter)
    if not weight.count_nonzero():
        return False
    largest = stepped.rate * (min(1.0, 4 * stepped.size) if stepped.size != TYPICAL else 1.0)
    # Test both directions: below a power of two the ulp is half as large.
    signs = 1 - 2 * (torch.arange(len(weight), device=weight.device) % 2).float()
    share = float(update_metrics(predicted(stepped, largest * signs, weight))["lost_fraction"])
    return share > STILL


def _standing_still(still: Sequence[SteppedParameter]) -> Iterator[Reading]:
    groups: dict[tuple[float, str, float], list[SteppedParameter]] = {}
    for p in still:
        weight = spread(p.parameter).float().abs()
        typical = float(weight.median()) or float(weight.max())
        groups.setdefault(
            (p.rate, p.storage.visible, 2.0 ** (math.frexp(typical)[1] - 1)), []
        ).append(p)
    for (rate, visible, typical), members in groups.items():
        members.sort(key=lambda p: p.parameter.ndim)  # norms first
        # Moving up needs 0.5 ulp. Moving down from a power of two needs 0.25 ulp.
        spacing = 2.0 ** (math.log2(typical) - members[0].storage.weight.mantissa_bits)
        are_ones = all(bool((spread(p.parameter) == typical).all()) for p in members)
        needed = spacing / 4 if are_ones else spacing / 2
        is_flat = all(p.parameter.ndim < 2 for p in members)
        things = counted(
            len(members), "norm weight" if are_ones else "vector" if is_flat else "tensor"
        )
        things, them = (
            (f"{things} stays", "it") if len(members) == 1 else (f"{things} stay", "them")
        )
        yield KINDS["stands-still"].reading(
            of_all(p.name for p in members), rate, None, needed, things=things, them=them, typical=typical, rate=rate,
            format=visible, needed=needed, fallback=members[0].storage.fallback,
        )  # fmt: skip


def _lost_updates(short: Sequence[SteppedParameter]) -> Iterator[Reading]:
    """Check 16-bit weights without low bits, master copy or compensation.

    Skip SGD before its first gradient.
    """
    groups: dict[tuple[float, Storage], list[tuple[float, str, Tensor]]] = {}
    for p in short:
        weight = spread(p.parameter)
        if p.rate <= 0 or (change := change_of(p, weight)) is None or not weight.numel():
            continue
        total = predicted(p, change, weight) * (p.parameter.numel() / len(weight))
        if (quality := float(update_metrics(total)["edq"])) < MIN_EDQ:
            groups.setdefault((p.rate, p.storage), []).append((quality, p.name, total))
    for (rate, row), members in groups.items():
        worst = min(member[:2] for member in members)
        total = torch.stack([sums for *_, sums in members]).sum(0)
        value, lost = (float(update_metrics(total)[name]) for name in ("edq", "lost_fraction"))
        advice = (
            f"Rounding will lose {lost:.0%} of the changes of a step at lr {rate:g}; {value:.2f} "
            "of the update is stored, "
            f'least in {worst[1]} ({worst[0]:.2f}). Storage "{row.fallback}" keeps them in '
            f"{STORAGES[row.fallback].bytes_per_param:g} bytes a parameter; this takes "
            f"{row.bytes_per_param:g}."
        )
        names = of_all(name for _, name, _ in members)
        yield Reading(0, "storage", names, "lost-updates", value, 1.0, 1.0 - MIN_EDQ, advice)


def _swallowed_decay(set_up: SetUp) -> Iterator[Reading]:
    steps = [
        (p, p.rate * float(p.group.get("weight_decay") or 0.0))
        for p in set_up.trained
        if p.decays_alone
    ]
    if lost := [
        (p, step) for p, step in steps if 0 < step < 2.0 ** -(p.storage.weight.mantissa_bits + 2)
    ]:
        row = lost[0][0].storage
        step = lost[0][1]
        names = of_all(p.name for p, _ in lost)
        bits = row.weight.mantissa_bits + 2
        yield KINDS["swallowed-decay"].reading(
            names, step, None, 2.0**-bits, format=row.visible, bits=bits, fallback=row.fallback
        )


# ── what the forward pass sees ────────────────────────────────────────────────────────────────────


def grid_lines(set_up: SetUp) -> list[str]:
    """Return a line for each format on whose grid weights lie that are stored wider.

    The forward pass multiplies weights rounded to the format. A weight on the grid moves for it
    only when the sum of its updates reaches half an ulp, however wide the optimizer stores the
    weight (:mod:`narrowgauge.optim.low_bits`).
    """
    members: dict[torch.dtype, list[SteppedParameter]] = {}
    for p in set_up.trained:
        if p.size and p.rate and (dtype := _grid(p)) is not None:
            members.setdefault(dtype, []).append(p)
    lines = []
    for dtype, stepped in members.items():
        parts = [
            visible_part(spread(p.parameter), dtype, NUM_UPDATES * p.rate) * p.parameter.numel()
            for p in stepped
        ]
        share = sum(parts) / sum(p.parameter.numel() for p in stepped)
        is_narrow = any(p.parameter.dtype is dtype for p in set_up.trained)
        lines.append(
            f"forward pass in {dtype_name(dtype)}: {share:.2g} of the updates is visible after "
            f"{NUM_UPDATES} steps at lr "
            f"{stepped[-1].rate:.3g}, since the weights lie on its grid; 1 with "
            + ('low_bits="random"' if is_narrow else "ng.fill_low_bits(model)")
        )
    return lines


def visible_part(weights: Tensor, dtype: torch.dtype, update: float) -> float:
    """Return the mean visible change of weights on a format's grid, relative to ``update``: 0 if no
    weight moves.
    """
    magnitude = weights.double().abs()
    ulp = torch.finfo(dtype).eps * torch.exp2(
        magnitude.clamp(min=torch.finfo(dtype).tiny).log2().floor()
    )
    moved = torch.where(magnitude == 0, update, (update / ulp + 0.5).floor() * ulp)
    return float(moved.mean()) / update


def _grid(p: SteppedParameter) -> torch.dtype | None:
    """Return the 16-bit format on whose grid a parameter's stored weight lies; ``None`` if it has
    bits below, or stores none.
    """
    if p.parameter.ndim < 2:
        return None  # gains of 1 and biases of 0 lie on every grid
    if p.parameter.dtype is torch.float32:
        weights = spread(p.parameter)
        fits = (dtype for dtype in NARROW if torch.equal(weights.to(dtype).float(), weights))
        return next(fits, None) if bool(weights.any()) else None
    if (
        p.parameter.dtype not in NARROW
        or not p.storage.beside
        or p.group.get("low_bits") == "random"
    ):
        return None
    if (
        isinstance(p.optimizer, Optimizer)
        and (state := p.optimizer.state_of(p.parameter)) is not None
    ):
        stored = state.leading(ELEMENTS, "weight")
        weight = state.parameter.detach().reshape(-1)
        if stored is not None and not torch.equal(stored, weight[: len(stored)].to(stored.dtype)):
            return None
    return p.parameter.dtype


# ── states and settings ───────────────────────────────────────────────────────────────────────────


def _frozen_second_moment(set_up: SetUp) -> Iterator[Reading]:
    """Report the first group whose second moment has too few bits, so that its decay is rounded
    away.
    """
    for p in set_up.trained:
        betas = p.group.get("betas")
        bits = _second_moment_bits(p)
        if bits is None or not isinstance(betas, (tuple, list)) or len(betas) < 2:
            continue
        least = 2.0 ** -(bits + 1)
        if 0 < 1 - float(betas[1]) < least:
            fallback = "float32-states8" if p.storage.visible == "float32" else p.storage.fallback
            advice = (
                f"beta2 = {float(betas[1]):g} never lowers a second moment of {bits} mantissa "
                "bits: 1 − beta2 is less than half "
                f'the gap between two values. Take beta2 below {1 - least:.4g}, or storage "{fallback}".'
            )
            name = f"{p.name} and all of its group" if len(p.group["params"]) > 1 else p.name
            yield Reading(
                0, "storage", name, "frozen-moments", 1 - float(betas[1]), None, least, advice
            )
            return


def _second_moment_bits(stepped: SteppedParameter) -> int | None:
    """Return the mantissa bits of a second moment rounded to nearest; ``None`` for a wider one or
    an unknown rounding.
    """
    code = stepped.storage.exp_avg_sq
    state = stepped.state.get("exp_avg_sq")
    if isinstance(stepped.optimizer, Optimizer):
        is_near = (
            "exp_avg_sq" in dict(stepped.storage.states)
            and code.parts == 1
            and code.rounding == "nearest"
        )
        return code.mantissa_bits if is_near else None
    is_torch = type(stepped.optimizer).__module__.startswith("torch.optim")
    dtype = (
        state.dtype
        if isinstance(state, Tensor)
        else stepped.parameter.dtype
        if is_torch
        else torch.float32
    )
    return {torch.bfloat16: 7, torch.float16: 10}.get(dtype)


def _truncated(set_up: SetUp) -> Iterator[Reading]:
    """Report the first epsilon that the denominator's format rounds to zero.

    Fused kernels and ours compute in float32.
    """
    for p in set_up.trained:
        eps = p.group.get("eps")
        dtype = p.parameter.dtype
        is_narrow = (
            p.is_short and not p.group.get("fused") and not isinstance(p.optimizer, Optimizer)
        )
        if (
            is_narrow
            and isinstance(eps, float)
            and eps > 0
            and not torch.tensor(eps, dtype=dtype, device="cpu")
        ):
            cure = "Where the second moment is zero too, the step divides by zero. Take eps=1e-4, or fused=True."
            yield KINDS["truncated-setting"].reading(
                p.name, 0.0, eps, setting="eps", format=dtype_name(dtype), cure=cure
            )
            return


def _no_matrix(set_up: SetUp) -> Iterator[Reading]:
    """Report rules for matrices whose parameters are all flat."""
    for optimizer in set_up.optimizers:
        kind = type(optimizer).__name__
        stepped = [p for p in set_up.trained if p.optimizer is optimizer]
        is_for_matrices = any(name in kind.lower() for name in ("muon", "shampoo", "soap", "dion"))
        if is_for_matrices and stepped and max(p.parameter.ndim for p in stepped) < 2:
            yield KINDS["no-matrix"].reading(of_all(p.name for p in stepped), 0, None, 1, rule=kind)
