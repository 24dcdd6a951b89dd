"""Signs in what a step was trained on: repeated batches, unusual tokens, and a loss that is weighted wrongly.

A record holds a checksum of each step's tokens and their loss under the frequencies of single tokens, which no fault of the
model changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, pstdev

from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.analysis.diagnosis.signs.sign import ABSENT, UNKNOWN, Observation, Sign, present
from narrowgauge.analysis.diagnosis.signs.step_signs import BEFORE, FEWEST, finite, jitter

UNUSUAL, LEAST_UNUSUAL = 7.0, 0.1
"""Standard deviations, and nats, between a step's unigram loss and that of all steps, from which its tokens are unusual."""
FOLLOWS_SIGMAS = 4.0
"""Standard errors by which the loss of such steps exceeds that of the steps around them where it follows their tokens."""
TOGETHER = 0.5
"""Correlation of the changes of the loss and of the gradient norm; healthy runs reach 0.35, and nearly all stay below 0."""
SLOPES = (0.5, 2.0)
"""Change of the gradient norm's logarithm for one of the loss's: a factor on the loss is one on its gradient."""
LASTING, SETTLED = 15, 0.9
"""Steps on either side of a change of tokens at least, and the share of them that keep to their own level."""
LEAST_SPREAD = 0.02
"""Standard deviation of the loss's logarithm below which a factor on it is too small to be seen."""
LEARNED = 0.3
"""Nats above the unigram loss from which a model does not even know how often each token occurs."""


def _repeated(evidence: Evidence) -> list[tuple[int, int]]:
    """The steps whose batch came before, each with the first step that had it; a second epoch does not count."""
    if _is_shuffled_epochs([row.get("batch_crc") for row in evidence.run.steps]):
        return []
    seen: dict[str, int] = {}
    repeats = []
    epoch = evidence.run.run.get("data", {}).get("tokens", math.inf)
    for row in evidence.run.steps:
        crc = row.get("batch_crc")
        if (row.get("tokens") or 0) > epoch:
            break
        if isinstance(crc, str):
            if crc in seen:
                repeats.append((int(row["step"]), seen[crc]))
            seen.setdefault(crc, int(row["step"]))
    return repeats


def _is_shuffled_epochs(batches: Sequence[object]) -> bool:
    """Whether every batch comes once before any comes again, over and over, and not in one order: epochs of small data.

    The same order each time is left: a reader that never shuffles and one that begins anew look alike.
    """
    seen: dict[object, int] = {}
    length = next((place for place, batch in enumerate(batches) if seen.setdefault(batch, place) < place), len(batches))
    if not length:
        return False
    first, *others = (batches[start : start + length] for start in range(0, len(batches), length))
    is_whole = all(len(set(each)) == len(each) and set(each) <= set(first) for each in others)
    return bool(others) and is_whole and any(each != first[: len(each)] for each in others)


def _repeats(evidence: Evidence) -> Observation:
    repeats = _repeated(evidence)
    if len(repeats) < 2:
        return ABSENT
    step, before = repeats[0]
    said = f"{len(repeats)} batches came more than once; that of step {step} was step {before}'s"
    return present(step, said, value=float(len(repeats)), threshold=2.0)


def _repeats_since_resume(evidence: Evidence) -> Observation:
    step, before = _repeated(evidence)[0]
    at = next((resumed for resumed in evidence.resumes if 0 < step - resumed <= FEWEST), None)
    if at is None:
        return ABSENT
    return present(step, f"the run resumed at step {at} and went on with the batch of step {before}")


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The unigram losses of a run's steps.

    Args:
        levels: what is usual before and from ``change`` on; equal without a change.
        change: the row from which other tokens came for good, if they did.
        unusual: the rows that are unlike those of their own part.
    """

    levels: tuple[float, float]
    change: int | None
    unusual: list[int]


def _tokens_of(evidence: Evidence) -> _Tokens | None:
    """What tokens are usual; ``None`` where too few steps say what they had."""
    losses = evidence.column("unigram_loss")
    known = [(row, loss) for row, loss in enumerate(losses) if loss is not None and math.isfinite(loss)]
    if len(known) < BEFORE:
        return None
    values = [loss for _, loss in known]
    spread = 1.05 * jitter(values)  # of neighbours, where a third of all steps is unusual too
    limit = max(UNUSUAL * spread, LEAST_UNUSUAL)
    place = _change_point(values, limit)
    if place is None:
        levels, change = (median(values),) * 2, None
    else:
        levels, change = (median(values[:place]), median(values[place:])), known[place][0]
    unusual = [row for row, loss in known if abs(loss - levels[change is not None and row >= change]) > limit]
    return _Tokens(levels, change, unusual)


def _change_point(values: Sequence[float], limit: float) -> int | None:
    """Where values move to another level for good: the split that explains most of them, if either side keeps to its own."""
    total, before, best, place = sum(values), 0.0, 0.0, 0
    for k in range(1, len(values)):
        before += values[k - 1]
        gain = (before / k - (total - before) / (len(values) - k)) ** 2 * k * (len(values) - k)
        if gain > best:
            best, place = gain, k
    first, second = values[:place], values[place:]
    if min(len(first), len(second)) < LASTING or abs(median(first) - median(second)) <= limit:
        return None
    own = [sum(abs(value - median(part)) <= limit for value in part) for part in (first, second)]
    return place if own[0] >= SETTLED * len(first) and own[1] >= SETTLED * len(second) else None


def _unusual_rows(evidence: Evidence) -> tuple[list[int], float]:
    """The rows whose tokens are unusual among those of their part of the run, and the unigram loss of the usual ones."""
    tokens = _tokens_of(evidence)
    return ([], math.nan) if tokens is None else (tokens.unusual, tokens.levels[0])


def _tokens_change(evidence: Evidence) -> Observation:
    tokens = _tokens_of(evidence)
    if tokens is None:
        return UNKNOWN
    if tokens.change is None:
        return ABSENT
    step, (was, now) = evidence.steps[tokens.change], tokens.levels
    said = f"from step {step} on the tokens are others: their unigram loss is {now:.2f}, and was {was:.2f}"
    return present(step, said, None, now, was)


def _loss_moves_with_tokens(evidence: Evidence) -> Observation:
    tokens, losses = _tokens_of(evidence), evidence.column("loss")
    row = tokens.change if tokens is not None else None
    if row is None:
        return UNKNOWN
    before, after = finite(losses[max(0, row - LASTING) : row]), finite(losses[row : row + LASTING])
    if min(len(before), len(after)) < FEWEST:
        return UNKNOWN
    noise = jitter([*before, *after]) * math.sqrt(1 / len(before) + 1 / len(after))
    more = median(after) - median(before)
    if more <= max(FOLLOWS_SIGMAS * noise, 0.05):
        return ABSENT
    step = evidence.steps[row]
    return present(step, f"the loss is {more:.2f} nats higher from step {step} on, where the tokens change", None, more)


def _unusual(evidence: Evidence) -> Observation:
    rows, level = _unusual_rows(evidence)
    if not rows:
        return UNKNOWN if math.isnan(level) else ABSENT
    step, loss = evidence.steps[rows[0]], evidence.column("unigram_loss")[rows[0]]
    more = f", as those of {len(rows) - 1} more steps" if len(rows) > 1 else ""
    said = f"the tokens of step {step} are unusual{more}: their unigram loss is {loss:.2f}, and usually {level:.2f}"
    return present(step, said, None, loss, level)


def _loss_follows(evidence: Evidence) -> Observation:
    """Whether the loss is higher where the tokens are unusual than in the steps around them."""
    rows, _ = _unusual_rows(evidence)
    losses, unusual = evidence.column("loss"), set(rows)
    inside = finite(losses[row] for row in rows)
    near = range(max(0, rows[0] - BEFORE), min(len(losses), rows[-1] + 10))
    beside = finite(losses[row] for row in near if row not in unusual)
    if not inside or len(beside) < FEWEST:
        return UNKNOWN
    noise = jitter(beside) * math.sqrt(1 / len(inside) + 1 / len(beside))
    more = median(inside) - median(beside)
    if more <= max(FOLLOWS_SIGMAS * noise, 0.05):
        return ABSENT
    step = evidence.steps[rows[0]]
    return present(step, f"the loss is {more:.2f} nats higher at the steps whose tokens are unusual", None, more)


def _changes(values: Sequence[float | None]) -> list[float | None]:
    good = [value if value is not None and 0 < value < math.inf else None for value in values]
    return [None if a is None or b is None else math.log(b / a) for a, b in pairwise(good)]


def _fit(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The correlation of pairs, and the slope of the second over the first."""
    ones, others = zip(*pairs, strict=True)
    a, b = fmean(ones), fmean(others)
    joint = fmean((x - a) * (y - b) for x, y in pairs)
    spreads = pstdev(ones), pstdev(others)
    return (joint / (spreads[0] * spreads[1]), joint / spreads[0] ** 2) if min(spreads) > 0 else (0.0, 0.0)


def _vary_together(evidence: Evidence) -> Observation:
    """A factor on the loss of a step is one on its gradient too; in a healthy run the two have little in common.

    Both thirds after the warm-up must show it, so that no single spike does.
    """
    changes = zip(*(_changes(evidence.column(name)) for name in ("loss", "grad_norm")), strict=True)
    pairs = [(x, y) for x, y in changes if x is not None and y is not None]
    parts = [pairs[k * len(pairs) // 3 : (k + 1) * len(pairs) // 3] for k in (1, 2)]
    if evidence.is_sparse or min(map(len, parts)) < 15:
        return UNKNOWN
    fits = [_fit(part) for part in parts]
    spread = min(pstdev(x for x, _ in part) for part in parts)
    if spread < LEAST_SPREAD or not all(r >= TOGETHER and SLOPES[0] <= slope <= SLOPES[1] for r, slope in fits):
        return ABSENT
    lowest = min(r for r, _ in fits)
    said = f"loss and gradient norm vary by the same factors from step to step (correlation {lowest:.2f})"
    return present(None, said, None, lowest, TOGETHER)


def _still_warms_up(evidence: Evidence) -> bool:
    rates = [rate for rate in evidence.column("lr") if rate is not None]
    return len(rates) > 1 and rates[-1] == max(rates) and rates[-1] > rates[-2]


def _learns_nothing(evidence: Evidence) -> Observation:
    rows = [
        (loss, unigram)
        for loss, unigram in zip(evidence.column("loss"), evidence.column("unigram_loss"), strict=True)
        if loss is not None and unigram is not None and math.isfinite(loss)
    ]
    if len(rows) < 2 * BEFORE or _still_warms_up(evidence):
        return UNKNOWN
    tens = [rows[k : k + 10] for k in range(0, len(rows) - 9, 10)]
    levels = [tuple(median(part) for part in zip(*ten, strict=True)) for ten in tens]
    if any(loss < unigram + LEARNED for loss, unigram in levels):  # losing what was learned is another matter
        return ABSENT
    loss, unigram = levels[-1]
    said = f"the loss ends at {loss:.2f}; knowing how often each token occurs gives {unigram:.2f}"
    return present(evidence.steps[-1], said, None, loss, unigram + LEARNED)


_TOKENS, _LOSS = ("steps.unigram_loss",), ("steps.loss",)

SIGNS_OF_BATCHES: tuple[Sign, ...] = (
    Sign(
        "batches-repeat", "batches come more than once", ("steps.batch_crc",), 0.002, _repeats,
        "{batches}",
    ),
    Sign(
        "repeats-begin-at-resume", "batches come again from a resume on", ("steps.batch_crc",), 0.05, _repeats_since_resume,
        given="batches-repeat",
    ),
    Sign(
        "tokens-are-unusual", "the tokens of some steps are unlike those of all others", _TOKENS, 0.01, _unusual,
        "{unigram_loss}", per_step=1e-5,
    ),
    Sign(
        "loss-follows-tokens", "the loss is higher where the tokens are unusual", _TOKENS + _LOSS, 0.3, _loss_follows,
        given="tokens-are-unusual",
    ),
    Sign(
        "tokens-change", "from one step on the tokens are others, for good", _TOKENS, 0.02, _tokens_change,
        "{unigram_loss}",
    ),
    Sign(
        "loss-moves-with-tokens", "the loss rises where the tokens change for good", _TOKENS + _LOSS, 0.2,
        _loss_moves_with_tokens, given="tokens-change",
    ),
    Sign(
        "loss-and-gradient-vary-together", "loss and gradient norm vary by the same factors from step to step",
        (*_LOSS, "steps.grad_norm"), 0.006, _vary_together,
    ),
    Sign(
        "learns-nothing", "the loss stays above that of a model that knows how often each token occurs", _TOKENS + _LOSS, 0.01,
        _learns_nothing, "{unigram_loss}",
    ),
)  # fmt: skip
