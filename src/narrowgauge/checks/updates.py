"""Predict the updates of each tensor that rounding will lose, from weights, states, learning rate and storage.

Move each weight by the step of its rule and round it as its storage does. With Adam's moments in the state, use
their step. Otherwise draw from a normal distribution with the typical size of the rule's steps, clamped to the learning
rate. The sums and ratios are the audit's, so the prediction compares directly with the audit during the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.set_up import NARROW, TYPICAL, SetUp, SteppedParameter
from narrowgauge.checks.step_samples import spread
from narrowgauge.numerics.metrics import update_metrics, update_sums
from narrowgauge.numerics.rounding import round_to
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import counted
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.storages import STORAGES, Storage

STILL = 0.9
"""A tensor is frozen if the largest step leaves more than this fraction of its elements unchanged."""


def update_readings(set_up: SetUp) -> Iterator[Reading]:
    """Yield losses by rounding: frozen tensors, lost updates, lost decay, frozen moments, truncated settings."""
    trained = set_up.predicted
    still = [p for p in trained if _stands_still(p)]
    yield from _standing_still(still)
    yield from _lost_updates([p for p in trained if p.is_short and p not in still])
    yield from _swallowed_decay(set_up)
    yield from _frozen_second_moment(set_up)
    yield from _truncated(set_up)
    yield from _no_matrix(set_up)


# ── updates ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def change_of(stepped: SteppedParameter, weight: Tensor) -> Tensor | None:
    """Return the next step's change of sampled weights, float32. Return ``None`` if its size is unknown yet."""
    state, rate = stepped.state, stepped.rate
    mean, square = state.get("exp_avg"), state.get("exp_avg_sq")
    shape = stepped.parameter.shape
    if isinstance(mean, Tensor) and isinstance(square, Tensor) and mean.shape == square.shape == shape and square.any():
        betas, count = stepped.group.get("betas", (0.9, 0.999)), max(1.0, float(state.get("step", 1)))
        first, second = spread(mean).float() / (1 - betas[0] ** count), spread(square).float() / (1 - betas[1] ** count)
        step: Tensor = first / (second.sqrt() + float(stepped.group.get("eps", 1e-8)))
        return -rate * step
    if (size := stepped.size) is None:
        direction = state.get("momentum_buffer", stepped.parameter.grad)
        return None if direction is None else -rate * spread(direction).float()
    share = (torch.arange(len(weight), dtype=torch.float64, device=weight.device) * 0.6180339887498949 + 0.5) % 1.0
    draw = math.sqrt(2.0) * torch.erfinv(2 * share.clamp(1e-6, 1 - 1e-6) - 1) if size < 1 else (share - 0.5).sign()
    return (-rate * (size * draw).clamp(-1, 1)).float()


def predicted(stepped: SteppedParameter, change: Tensor, weight: Tensor) -> Tensor:
    """Return the audit's sums for a change of sampled weights, rounded to the visible format."""
    stored = round_to(weight.float() + change, stepped.storage.visible).float() - weight.float()
    return update_sums(change, stored, stored)


def _stands_still(stepped: SteppedParameter) -> bool:
    """Return whether the largest step moves nearly no element: Adam's is the learning rate, others' 4 times their size."""
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
        groups.setdefault((p.rate, p.storage.visible, 2.0 ** (math.frexp(typical)[1] - 1)), []).append(p)
    for (rate, visible, typical), members in groups.items():
        members.sort(key=lambda p: p.parameter.ndim)  # norms first
        # Moving up needs 0.5 ulp. Moving down from a power of two needs 0.25 ulp.
        spacing = 2.0 ** (math.log2(typical) - members[0].storage.weight.mantissa_bits)
        are_ones = all(bool((spread(p.parameter) == typical).all()) for p in members)
        needed = spacing / 4 if are_ones else spacing / 2
        is_flat = all(p.parameter.ndim < 2 for p in members)
        things = counted(len(members), "norm weight" if are_ones else "vector" if is_flat else "tensor")
        things, them = (f"{things} stays", "it") if len(members) == 1 else (f"{things} stay", "them")
        yield KINDS["stands-still"].reading(
            of_all(p.name for p in members), rate, None, needed, things=things, them=them, typical=typical, rate=rate,
            format=visible, needed=needed, fallback=members[0].storage.fallback,
        )  # fmt: skip


def _lost_updates(short: Sequence[SteppedParameter]) -> Iterator[Reading]:
    """Check 16-bit weights without low bits, master copy or compensation. Skip SGD before its first gradient."""
    groups: dict[tuple[float, Storage], list[tuple[float, str, Tensor]]] = {}
    for p in short:
        weight = spread(p.parameter)
        if p.rate <= 0 or (change := change_of(p, weight)) is None or not weight.numel():
            continue
        total = predicted(p, change, weight) * (p.parameter.numel() / len(weight))
        if (quality := float(update_metrics(total)["edq"])) < MIN_EDQ:
            groups.setdefault((p.rate, p.storage), []).append((quality, p.name, total))
    for (rate, row), members in groups.items():
        worst, total = min(member[:2] for member in members), torch.stack([sums for *_, sums in members]).sum(0)
        value, lost = (float(update_metrics(total)[name]) for name in ("edq", "lost_fraction"))
        advice = (
            f"Rounding will lose {lost:.0%} of the changes of a step at lr {rate:g}; {value:.2f} of the update is stored, "
            f'least in {worst[1]} ({worst[0]:.2f}). Storage "{row.fallback}" keeps them in '
            f"{STORAGES[row.fallback].bytes_per_param:g} bytes a parameter; this takes {row.bytes_per_param:g}."
        )
        names = of_all(name for _, name, _ in members)
        yield Reading(0, "storage", names, "lost-updates", value, 1.0, 1.0 - MIN_EDQ, advice)


def _swallowed_decay(set_up: SetUp) -> Iterator[Reading]:
    members = []
    for p in set_up.trained:
        step = p.rate * float(p.group.get("weight_decay") or 0.0)
        if p.decays_alone and 0 < step < 2.0 ** -(p.storage.weight.mantissa_bits + 2):
            members.append(p)
    if members:
        bits = members[0].storage.weight.mantissa_bits + 2
        step = members[0].rate * float(members[0].group["weight_decay"])
        yield KINDS["swallowed-decay"].reading(
            of_all(p.name for p in members), step, None, 2.0**-bits, format=members[0].storage.visible, bits=bits,
            fallback=members[0].storage.fallback,
        )  # fmt: skip


# ── states and settings ─────────────────────────────────────────────────────────────────────────────────────────────────


def _frozen_second_moment(set_up: SetUp) -> Iterator[Reading]:
    """Report the first group whose second moment has too few bits, so that its decay is rounded away."""
    for p in set_up.trained:
        betas, bits = p.group.get("betas"), _second_moment_bits(p)
        if bits is None or not isinstance(betas, (tuple, list)) or len(betas) < 2:
            continue
        least = 2.0 ** -(bits + 1)
        if 0 < 1 - float(betas[1]) < least:
            fallback = "float32-states8" if p.storage.visible == "float32" else p.storage.fallback
            advice = (
                f"beta2 = {float(betas[1]):g} never lowers a second moment of {bits} mantissa bits: 1 − beta2 is less than half "
                f'the gap between two values. Take beta2 below {1 - least:.4g}, or storage "{fallback}".'
            )
            name = f"{p.name} and all of its group" if len(p.group["params"]) > 1 else p.name
            yield Reading(0, "storage", name, "frozen-moments", 1 - float(betas[1]), None, least, advice)
            return


def _second_moment_bits(stepped: SteppedParameter) -> int | None:
    """Return the mantissa bits of a second moment rounded to nearest; ``None`` for a wider one or an unknown rounding."""
    code, state = stepped.storage.exp_avg_sq, stepped.state.get("exp_avg_sq")
    if isinstance(stepped.optimizer, Optimizer):
        is_near = "exp_avg_sq" in dict(stepped.storage.states) and code.parts == 1 and code.rounding == "nearest"
        return code.mantissa_bits if is_near else None
    dtype = state.dtype if isinstance(state, Tensor) else None
    if dtype is None and type(stepped.optimizer).__module__.startswith("torch.optim"):
        dtype = stepped.parameter.dtype
    return {torch.bfloat16: 7, torch.float16: 10}.get(dtype) if dtype is not None else None


def _truncated(set_up: SetUp) -> Iterator[Reading]:
    """Report epsilons that the denominator's format rounds to zero, and betas that a tensor's format rounds to 1."""
    settings: dict[str, tuple[str, float, float, torch.dtype, str]] = {}
    for p in set_up.trained:
        if isinstance(p.optimizer, Optimizer):
            continue
        eps, betas, dtype = p.group.get("eps"), p.group.get("betas"), p.parameter.dtype
        # Fused kernels compute in float32.
        computes_short = dtype in NARROW and p.is_short and not p.group.get("fused")
        if computes_short and isinstance(eps, float) and eps > 0 and not torch.tensor(eps, dtype=dtype, device="cpu"):
            cure = "Where the second moment is zero too, the step divides by zero. Take eps=1e-4, or fused=True."
            settings.setdefault("eps", (p.name, 0.0, eps, dtype, cure))
        for place, beta in enumerate(betas if isinstance(betas, (tuple, list)) else ()):
            # The tensor holds the truncated value already. The intended beta was 0.9 or 0.999.
            if isinstance(beta, Tensor) and beta.dtype in NARROW and float(beta) >= 1:
                cure = "Its moment keeps what it holds. Pass betas as floats."
                settings.setdefault(f"beta{place + 1}", (p.name, 1.0, (0.9, 0.999)[place], beta.dtype, cure))
    for setting, (name, now, value, dtype, cure) in settings.items():
        yield KINDS["truncated-setting"].reading(name, now, value, setting=setting, format=dtype_name(dtype), cure=cure)


def _no_matrix(set_up: SetUp) -> Iterator[Reading]:
    """Report rules for matrices whose parameters are all flat."""
    for optimizer in set_up.optimizers:
        kind, stepped = type(optimizer).__name__, [p for p in set_up.trained if p.optimizer is optimizer]
        is_for_matrices = any(name in kind.lower() for name in ("muon", "shampoo", "soap", "dion"))
        if is_for_matrices and stepped and max(p.parameter.ndim for p in stepped) < 2:
            yield KINDS["no-matrix"].reading(of_all(p.name for p in stepped), 0, None, 1, rule=kind)
