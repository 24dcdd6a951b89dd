"""Signs in the settings: what the arithmetic alone loses, whatever the run's rows show.

They have no step, so that no sign in the rows counts as their consequence.
"""

from __future__ import annotations

from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.analysis.diagnosis.signs.sign import ABSENT, UNKNOWN, Observation, Sign, present
from narrowgauge.spec.formats import get_format
from narrowgauge.spec.models import usual_rate
from narrowgauge.spec.storages import WIDE
from narrowgauge.spec.sums import ACCUMULATIONS

HIGH_RATE, LOW_RATE = 10.0, 30.0
"""Factors above and below the usual rate for a model's size: healthy runs were made at 3.3 times it."""
MANY_RANKS = 8
"""Ranks from which a sum in bfloat16 loses more than a rounding of each addend (§C2: 1.8e-3 to 3.9e-3 up to here)."""


def _accumulates_narrowly(evidence: Evidence) -> Observation:
    count = evidence.number_of("gradient_accumulation_steps") or 1.0
    row = ACCUMULATIONS.get(str(evidence.setting("accumulation_dtype")))
    limit = row.most_micro_batches if row is not None else None
    if row is None or limit is None or count <= limit or not _is_narrow(evidence):
        return ABSENT
    said = f"{count:.0f} micro-batches are summed in {row.name}, which loses more than the storage from {limit + 1} on"
    return present(None, said, None, count, float(limit + 1))


def _is_narrow(evidence: Evidence) -> bool:
    """Whether gradients have 16 bits: wider ones are summed in their own format."""
    return evidence.recipe is None or evidence.recipe.storage.visible not in WIDE


def _reduces_narrowly(evidence: Evidence) -> Observation:
    if evidence.recipe is None:
        return ABSENT
    reduction = evidence.recipe.reduction
    coarse = reduction.wire in ("int4", "int8") or (reduction.name == "native" and _is_narrow(evidence))
    if not coarse or (reduction.wire not in ("int4", "int8") and evidence.num_ranks < MANY_RANKS):
        return ABSENT
    said = f"gradients of {evidence.num_ranks} ranks are summed by '{reduction.name}', whose error is {reduction.error}"
    return present(None, said, None, float(evidence.num_ranks), float(MANY_RANKS))


def _odd_average(evidence: Evidence) -> Observation:
    ranks = evidence.num_ranks
    if (
        evidence.recipe is None
        or evidence.recipe.reduction.name != "native"
        or not _is_narrow(evidence)
        or ranks & (ranks - 1) == 0
    ):
        return ABSENT
    return present(None, f"1 / {ranks} is no bfloat16, and gradients are averaged in theirs", None, float(ranks))


def _eps_is_zero(evidence: Evidence) -> Observation:
    """Where every operation is rounded to the visible format; in float32 our optimizers replace an epsilon of zero."""
    eps, storage = evidence.number_of("eps") or 0.0, evidence.recipe.storage if evidence.recipe is not None else None
    if storage is not None and storage.arithmetic != "expansion":
        return ABSENT
    held = get_format(storage.visible if storage is not None else "float32")
    least = (held.smallest_subnormal or 0.0) / 2
    if eps > least:
        return ABSENT
    said = f"eps = {eps:g} is zero in {held.name}, and a zero gradient divides by it"
    return present(None, said, None, eps, least)


def _usual_rate(evidence: Evidence, rate: float | None) -> tuple[float, float] | None:
    """A rate of the run, and the trainer's own for a model of its size that is trained from scratch."""
    if evidence.starts_trained:
        return None
    model = evidence.run.run.get("model")
    size = model.get("num_parameters") if isinstance(model, dict) else None
    if not isinstance(size, int) or rate is None or rate <= 0:
        return None
    is_unit = evidence.recipe is not None and evidence.recipe.compute.transform == "unit"
    factor = evidence.rule.rate if evidence.rule is not None else None
    if factor is None or (is_unit and factor != 1):
        return None  # the usual rates are AdamW's
    return rate, usual_rate(size, is_unit=is_unit) * factor


def _rate_is_high(evidence: Evidence) -> Observation:
    found = _usual_rate(evidence, evidence.peak_rate)
    if found is None:
        return UNKNOWN
    rate, usual = found
    said = f"lr = {rate:g} is {rate / usual:.0f} times the usual rate of a model of this size, {usual:g}"
    return present(None, said, None, rate, HIGH_RATE * usual) if rate >= HIGH_RATE * usual else ABSENT


def _rate_is_low(evidence: Evidence) -> Observation:
    found = _usual_rate(evidence, evidence.reached_rate)
    if found is None:
        return UNKNOWN
    rate, usual = found
    said = f"lr = {rate:g} is 1/{usual / rate:.0f} of the usual rate of a model of this size, {usual:g}"
    return present(None, said, None, rate, usual / LOW_RATE) if rate <= usual / LOW_RATE else ABSENT


SIGNS_OF_SETTINGS: tuple[Sign, ...] = (
    Sign(
        "accumulates-in-bfloat16", "many micro-batches are summed in few bits",
        ("config.accumulation_dtype", "config.gradient_accumulation_steps"), 0.002, _accumulates_narrowly,
    ),
    Sign("reduces-narrowly", "gradients of ranks are summed in few bits", ("run.recipe", "run.ranks"), 0.003, _reduces_narrowly),
    Sign(
        "averages-in-bfloat16", "gradients are averaged over a number of ranks that is no power of two",
        ("run.recipe", "run.ranks"), 0.02, _odd_average,
    ),
    Sign("rate-is-high", "the learning rate is ten times the usual one or more", ("run.rate",), 0.002, _rate_is_high),
    Sign("rate-is-low", "the learning rate is a thirtieth of the usual one or less", ("run.rate",), 0.03, _rate_is_low),
    Sign("eps-rounds-to-zero", "AdamW's epsilon is zero in its format", ("config.eps",), 0.001, _eps_is_zero),
)  # fmt: skip
