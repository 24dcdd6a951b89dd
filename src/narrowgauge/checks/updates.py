"""Predict the updates of each tensor that rounding will lose, from weights, states, learning rate
and storage.

Move each weight by the step of its rule and round it as its storage does. With Adam's moments in
the state, use their step. Otherwise draw from a normal distribution with the typical size of the
rule's steps, clamped to the learning rate. The sums and ratios are the audit's, so the prediction
compares directly with the audit during the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.findings import Findings
from narrowgauge.checks.set_up import KNOWN, TYPICAL, SetUp, SteppedParameter
from narrowgauge.checks.step_samples import spread
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


def updates_of(set_up: SetUp, gradients: Mapping[str, Tensor] | None = None) -> Findings:
    """Judge losses by rounding: frozen tensors, lost updates, lost decay, frozen moments, truncated
    settings.

    Args:
        gradients: of a step, by name, for rules whose step is as large as the gradient.
    """
    still = []
    changes = list[tuple[SteppedParameter, Tensor]]()
    judged = []
    reasons = dict[str, list[str]]()
    for p in set_up.stepped:
        if p.parameter.is_meta or not p.parameter.requires_grad:
            continue
        reason = p.unpredicted
        change = None
        if not reason:
            change = change_of(p, spread(p.parameter), (gradients or {}).get(p.name))
            if change is None and p.keeps_nothing:
                reason = f"{type(p.optimizer).__name__} steps as far as the gradient; pass batch="
        if reason:
            reasons.setdefault(reason, []).append(p.name)
            continue
        judged.append(p)
        if _stands_still(p):
            still.append(p)
        elif p.is_short and change is not None:
            changes.append((p, change))
    readings = [*_standing_still(still), *_lost_updates(changes)]
    for rule in (_swallowed_decay, _frozen_second_moment, _truncated):
        readings += rule(set_up)
    unseen = {f"updates of {of_all(names)}": reason for reason, names in reasons.items()}
    done = []
    if judged:
        kinds = sorted({type(p.optimizer).__name__ for p in judged})
        done.append(f"updates of {counted(len(judged), 'tensor')} by {', '.join(kinds)}")
    return Findings(readings, judged=done, unseen=unseen)


def _all(members: Iterable[SteppedParameter]) -> str:
    """Return the first name and the number of others."""
    return of_all(p.name for p in members)


# ── updates ───────────────────────────────────────────────────────────────────────────────────────


def change_of(
    stepped: SteppedParameter, weight: Tensor, gradient: Tensor | None = None
) -> Tensor | None:
    """Return the next step's change of sampled weights, float32.

    Return ``None`` if its size is unknown yet.
    """
    state = stepped.state
    rate = stepped.rate
    group = stepped.group
    mean: Any = state.get("exp_avg")
    square: Any = state.get("exp_avg_sq")
    shape = stepped.parameter.shape
    are_tensors = isinstance(mean, Tensor) and isinstance(square, Tensor)
    if are_tensors and mean.shape == square.shape == shape and square.any():
        beta1, beta2 = group.get("betas", (0.9, 0.999))
        count = max(1.0, float(state.get("step", 1)))
        first = spread(mean).float() / (1 - beta1**count)
        second = spread(square).float() / (1 - beta2**count)
        step: Tensor = first / (second.sqrt() + float(group.get("eps", 1e-8)))
        return -rate * step
    size = stepped.size
    if size is None:
        direction = state.get("momentum_buffer")
        if direction is None:
            direction = gradient_of(stepped.parameter) if gradient is None else gradient
        if direction is None:
            return None
        return -rate * spread(direction).float()
    return (-rate * (size * _draws(weight, size)).clamp(-1, 1)).float()


def _draws(like: Tensor, size: float) -> Tensor:
    """Return a fixed normal distribution; signs alone for steps as large as the learning rate."""
    places = torch.arange(len(like), dtype=torch.float64, device=like.device)
    share = (places * 0.6180339887498949 + 0.5) % 1.0
    if size < 1:
        return math.sqrt(2.0) * torch.erfinv(2 * share.clamp(1e-6, 1 - 1e-6) - 1)
    return (share - 0.5).sign()


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
    largest = stepped.rate
    if stepped.size != TYPICAL:
        largest *= min(1.0, 4 * stepped.size)
    # Test both directions: below a power of two the ulp is half as large.
    signs = 1 - 2 * (torch.arange(len(weight), device=weight.device) % 2).float()
    metrics = update_metrics(predicted(stepped, largest * signs, weight))
    return float(metrics["lost_fraction"]) > STILL


def _standing_still(still: Sequence[SteppedParameter]) -> Iterator[Reading]:
    groups = dict[tuple[float, str, float], list[SteppedParameter]]()
    for p in still:
        weight = spread(p.parameter).float().abs()
        exponent = math.frexp(float(weight.median()) or float(weight.max()))[1] - 1
        groups.setdefault((p.rate, p.storage.visible, 2.0**exponent), []).append(p)
    for (rate, visible, typical), members in groups.items():
        members.sort(key=lambda p: p.parameter.ndim)  # norms first
        # Moving up needs 0.5 ulp. Moving down from a power of two needs 0.25 ulp.
        needed = typical * 2.0 ** -(members[0].storage.weight.mantissa_bits + 1)
        if all(bool((spread(p.parameter) == typical).all()) for p in members):
            needed /= 2
        yield KINDS["stands-still"].reading(
            _all(members), rate, None, needed, count=counted(len(members), "tensor"), typical=typical, rate=rate,
            format=visible, needed=needed, fallback=members[0].storage.fallback,
        )  # fmt: skip


def _lost_updates(changes: Sequence[tuple[SteppedParameter, Tensor]]) -> Iterator[Reading]:
    """Check 16-bit weights without low bits, master copy or compensation."""
    groups = dict[tuple[float, Storage], dict[str, Tensor]]()
    for p, change in changes:
        weight = spread(p.parameter)
        if p.rate <= 0 or not weight.numel() or not change.any():
            continue
        sums = predicted(p, change, weight) * (p.parameter.numel() / len(weight))
        if _stored(sums) < MIN_EDQ:
            groups.setdefault((p.rate, p.storage), {})[p.name] = sums
    for (rate, row), members in groups.items():
        worst = min(members, key=lambda name: _stored(members[name]))
        total = torch.stack(list(members.values())).sum(0)
        lost = float(update_metrics(total)["lost_fraction"])
        advice = (
            f"Rounding will lose {lost:.0%} of the changes of a step at lr {rate:g}; "
            f"{_stored(total):.2f} of the update is stored, least in {worst} "
            f'({_stored(members[worst]):.2f}). Storage "{row.fallback}" keeps them in '
            f"{STORAGES[row.fallback].bytes_per_param:g} bytes a parameter; this takes "
            f"{row.bytes_per_param:g}."
        )
        yield Reading(
            0, "storage", of_all(members), "lost-updates", _stored(total), 1.0, 1.0 - MIN_EDQ, advice
        )  # fmt: skip


def _stored(sums: Tensor) -> float:
    """Return the stored share of an update."""
    return float(update_metrics(sums)["edq"])


def _swallowed_decay(set_up: SetUp) -> Iterator[Reading]:
    lost = []
    steps = []
    for p in set_up.trained:
        step = p.rate * float(p.group.get("weight_decay") or 0.0)
        if p.group.get("decouple_lr"):  # optimi's decay, of another size
            continue
        if p.decays_alone and 0 < step < 2.0 ** -(p.storage.weight.mantissa_bits + 2):
            lost.append(p)
            steps.append(step)
    if lost:
        row = lost[0].storage
        bits = row.weight.mantissa_bits + 2
        fused = ""
        if "fused" in lost[0].group:
            fused = ", or fused=True"
        yield KINDS["lost-decay"].case("predicted").reading(
            _all(lost), steps[0], None, 2.0**-bits, format=row.visible, bits=bits,
            fallback=row.fallback, fused=fused,
        )  # fmt: skip


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
        beta2 = float(betas[1])
        least = 2.0 ** -(bits + 1)
        if 0 < 1 - beta2 < least:
            fallback = p.storage.fallback
            if p.storage.visible == "float32":
                fallback = "float32-states8"
            advice = (
                f"beta2 = {beta2:g} never lowers a second moment of {bits} mantissa bits: 1 − beta2 "
                "is less than half the gap between two values. Take beta2 below "
                f'{1 - least:.4g}, or storage "{fallback}".'
            )
            more = " and all of its group" if len(p.group["params"]) > 1 else ""
            yield Reading(
                0, "storage", p.name + more, "frozen-moments", 1 - beta2, None, least, advice,
                side="below",
            )  # fmt: skip
            return


def _second_moment_bits(stepped: SteppedParameter) -> int | None:
    """Return the mantissa bits of a second moment rounded to nearest; ``None`` for a wider one or
    an unknown rounding.
    """
    if isinstance(stepped.optimizer, Optimizer):
        code = stepped.storage.exp_avg_sq
        has_state = "exp_avg_sq" in dict(stepped.storage.states)
        is_near = has_state and code.parts == 1 and code.rounding == "nearest"
        if is_near:
            return code.mantissa_bits
        return None
    if stepped.library not in KNOWN:
        return None  # its own code may round at random
    state = stepped.state.get("exp_avg_sq")
    dtype = torch.float32
    if isinstance(state, Tensor):
        dtype = state.dtype
    elif type(stepped.optimizer).__module__.startswith("torch.optim"):
        dtype = stepped.parameter.dtype
    return {torch.bfloat16: 7, torch.float16: 10}.get(dtype)


def _truncated(set_up: SetUp) -> Iterator[Reading]:
    """Report the first epsilon that the denominator's format rounds to zero.

    Fused kernels and ours compute in float32.
    """
    for p in set_up.trained:
        eps = p.group.get("eps")
        dtype = p.parameter.dtype
        is_wide = p.group.get("fused") or isinstance(p.optimizer, Optimizer)
        if is_wide or not p.is_short or not isinstance(eps, float) or eps <= 0:
            continue
        if not torch.tensor(eps, dtype=dtype, device="cpu"):
            cure = "Where the second moment is zero too, the step divides by zero. Take eps=1e-4, or fused=True."
            yield KINDS["truncated-setting"].reading(
                p.name, 0.0, eps, setting="eps", format=dtype_name(dtype), cure=cure
            )
            return
