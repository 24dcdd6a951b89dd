"""Laws of a watched loop: functions from the snapshot of a step to readings.

Each counts over the run what it must remember. While a fault lasts, a law may yield it in every
step: it is told once, and again when it is twice as far beyond its bound.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.analysis.snapshot import AT_ZERO, MOVED, Facts, Snapshot, is_sampled
from narrowgauge.analysis.thresholds import (
    EVALUATIONS_APART,
    FEWEST_BATCHES,
    FEWEST_SAMPLES,
    LEAST_SHARE_OF_STEPS,
    MOST_STATES,
    SETTLED,
    UNSTEPPED,
)
from narrowgauge.runs.finding import counted

_LEAST_SHARE = 1e-6
"""Of the norm of all gradients. A smaller gradient may be rounding alone, as that of a bias before a batch norm."""
_ALIKE = {
    "batch": "trained on the same batch: give each rank its share of the data (DistributedSampler)",
    "masks": "draw the same dropout masks for other batches: seed each rank with its number",
}
_WIDE = ("float32", "float64")
"""Formats whose rounding is no part of a step."""
Counts = defaultdict[Any, Any]
"""What one law remembers of a run, by name: a count, 0 at first, or the law's own numbers."""
Law = Callable[[Snapshot, Facts, Counts], Iterator[Reading]]


# ── passes ────────────────────────────────────────────────────────────────────────────────────────


def wrong_mode(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read steps in evaluation mode, and evaluations in training mode.

    A loop with such evaluations in most steps means them.
    """
    things = facts.mode_dependent
    kind = KINDS["wrong-mode"]
    dropped = counts["dropouts"]
    if now.modes:
        counts["dropouts"] = now.num_dropping
    counts["evaluations"] += bool(now.evaluations)
    if things and now.modes == [False]:
        words = f"the model trains in evaluation mode, without {things}: call model.train()"
        yield kind.reading("", 1, 0, step=now.step, words=words)
    elif now.is_evaluated and 0 < now.num_dropping < dropped:
        left = dropped - now.num_dropping
        words = f"an evaluation left {left} of {counted(dropped, 'dropout')} in evaluation mode:"
        words += " call model.train() after it"
        yield kind.reading("", left, 0, step=now.step, words=words)
    is_rare = now.step >= EVALUATIONS_APART * counts["evaluations"]
    if now.evaluations == [True] and is_rare:
        words = f"the evaluation ran in training mode, with {things}: call model.eval() before it"
        yield kind.reading("", 1, 0, step=now.step - 1, words=words)


def repeated_noise(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a random generator that moved, and is again where it was in an earlier step."""
    if now.is_resumed:
        counts.clear()
    if not now.generator:
        return
    steps: dict[str, int] = counts.setdefault("steps", {})
    has_moved = counts["last"] != now.generator
    counts["last"] = now.generator
    earlier = steps.get(now.generator)
    if earlier is not None and has_moved:
        counts["repeated"] += 1
        kind = KINDS["equal-batches"].case("noise")
        yield kind.reading("", counts["repeated"], 0, step=now.step, earlier=earlier)
    elif len(steps) < MOST_STATES:
        steps.setdefault(now.generator, now.step)


# ── gradients ─────────────────────────────────────────────────────────────────────────────────────


def not_restored(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read weights that differ after an evaluation, in a loop that writes none in other steps."""
    counts["written"] += now.is_written
    if now.is_swapped and not counts["written"]:
        yield KINDS["weights-written"].case("evaluation").reading("", 1, 0, step=now.step - 1)


def gradients_kept(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read gradients that were added to those of the last step."""
    for name in now.kept:
        yield KINDS["gradients-kept"].reading(name, 1, 0, step=now.step)


def gradients_cleared(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a few steps whose gradients were cleared between their backward passes, where they have
    no more passes than the others.

    A batch that is left out adds its passes. A loop that clears in most steps means it.
    """
    if now.num_backward < 2:
        return
    usual: Counter[int] = counts.setdefault("usual", Counter())
    if not now.num_cleared:
        usual[now.num_backward] += 1
        return
    number = usual.most_common(1)[0][0] if usual else 0
    counts["cleared"] += now.num_backward == number
    if now.num_backward == number and 2 * counts["cleared"] <= usual.total():
        words = {"count": usual.total() + counts["cleared"], "passes": number}
        yield (
            KINDS["gradients-kept"]
            .case("cleared")
            .reading("", counts["cleared"], 0, step=now.step, **words)
        )


def equal_passes(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read backward passes of a step that have one gradient, in every sampled step."""
    if now.num_backward < 2 or not is_sampled(now.step) or not now.num_equal:
        return
    counts["steps"] += 1
    counts["equal"] += now.num_equal == now.num_backward and not now.num_cleared
    if counts["steps"] == counts["equal"] >= FEWEST_SAMPLES:
        words = {"passes": now.num_backward}
        yield (
            KINDS["equal-batches"]
            .case("passes")
            .reading("", counts["equal"], 0, step=now.step, **words)
        )


def first_nonfinite(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read the first place that is not finite, once: it makes all later ones so."""
    is_overflow = bool(now.bad and now.is_skipped)
    counts["overflows"] += is_overflow
    if counts["bad"]:
        return
    counts["bad"] += bool(now.bad_output or (now.bad and not is_overflow))
    kind = KINDS["nonfinite"]
    if now.bad_output:
        words = ", at finite weights"
        if now.bad_weight:
            words = f", at weights that are not finite ({now.bad_weight})"
        yield (
            KINDS["nonfinite"]
            .case("output")
            .reading(now.bad_output, math.nan, step=now.step, words=words)
        )
    if is_overflow and counts["overflows"] >= max(kind.bound, now.step / 3):
        number = counts["overflows"]
        words = f", in {number} skipped steps of {now.step}"
        yield kind.reading(now.bad, number, step=now.step, words=words)
    elif now.bad and not is_overflow and not now.bad_output:
        words = f", of {counted(now.num_bad, 'tensor')}, and the optimizer took the step"
        yield kind.reading(now.bad, now.num_bad, 0, 0, now.step, words=words)


def zero_gradients(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read steps without any gradient, counted over the run."""
    if now.norm is None:
        return
    counts["zero"] += now.norm == 0
    kind = KINDS["zero-gradients"]
    if counts["zero"] >= max(kind.bound, LEAST_SHARE_OF_STEPS * now.step):
        yield kind.reading("", counts["zero"], step=now.step, count=now.step)


def zero_gradient(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a tensor whose gradient is exactly zero or missing in a few of its steps.

    Steps in which all are zero do not count.
    """
    if not now.norm:
        return
    for name in now.first:
        counts.setdefault(name, (now.step, 0))
    for name in now.zero:
        if name in counts:
            first, number = counts[name]
            counts[name] = first, number + 1
    if not is_sampled(now.step) or now.step < UNSTEPPED or facts.num_optimizers > 1:
        return
    kind = KINDS["zero-gradients"].case("tensor")
    few = []
    for name, (first, number) in counts.items():
        if 0 < number <= kind.bound * (now.step - first):
            few.append(name)
    if few:
        name = max(few, key=lambda name: counts[name][1])
        first, number = counts[name]
        steps = now.step - first
        words = {"count": number, "of": steps}
        yield kind.reading(of_all([name, *few]), number / steps, step=now.step, **words)


def clip_norm(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Compare the norm of the gradients that reach the step with the declared limit, and with what
    clipping leaves of the norm that the loop tells.

    Clipping leaves the limit, to a part in a million. A later division by a loss scale leaves
    limit / 2^power.
    """
    limit = facts.limit
    kind = KINDS["clip-norm"]
    norm = now.arrived
    unclipped = now.unclipped
    if unclipped is not None and limit is not None and "arrived" in counts:
        arrived = counts.pop("arrived")
        expected = min(limit, unclipped)
        bound = (kind.bound + 2.0**-7) * expected
        if math.isfinite(unclipped) and abs(arrived - expected) > bound:
            cause = f", of {unclipped:.4g} before the clip"
            yield kind.reading("", arrived, expected, bound, step=now.step, cause=cause)
    is_whole = facts.is_whole or now.whole_norm is not None
    if now.norm is None or now.is_skipped or not is_whole:
        return
    counts["arrived"] = norm
    if limit is None or not 0 < norm < math.inf:
        return
    bound = (kind.bound + 2 * facts.epsilon) * limit
    power = round(math.log2(limit / norm))
    cause = ""
    if power >= 3 and abs(norm * 2.0**power / limit - 1) < 1e-5:
        cause = f", 2^{power} times as large: they were clipped before they were unscaled"
    if cause or norm > limit + bound:
        yield kind.reading("", norm, limit, bound, step=now.step, cause=cause)


# ── sampled steps ─────────────────────────────────────────────────────────────────────────────────


def weights_jump(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read sampled steps that are far larger than the others in units of the learning rate."""
    if not now.moved:
        return
    counts[now.step] = max((size, name) for name, size in now.moved.items())
    usual = statistics.median(size for size, _ in counts.values())
    kind = KINDS["weights-jump"]
    bound = kind.bound * max(1.0, usual)
    for step, (size, name) in counts.items():
        if len(counts) > 3 and size > bound:
            yield kind.reading(name, size, None, bound, step=step, usual=usual)


def frozen_moves(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read frozen tensors that the step changed."""
    yield from KINDS["frozen-moves"].of(now.frozen, now.step)


def _largest_shares(now: Snapshot, counts: Counts) -> dict[str, float]:
    """Return the largest share of the norm of all gradients that each has had."""
    shares: dict[str, float] = counts.setdefault("shares", {})
    whole = now.arrived
    if not now.is_skipped and 0 < whole < math.inf:
        for name, norm in now.norms.items():
            if norm:
                shares[name] = max(shares.get(name, 0.0), norm / whole)
    return shares


def still_weights(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read the weights that never moved, those without a gradient, and those that move without
    one.
    """
    if now.is_resumed:
        counts.clear()
    shares = _largest_shares(now, counts)
    counts["passes"] += len(now.modes)
    for name in now.first:
        shares.setdefault(name, 0.0)
    idle: list[str] = []
    lost: list[str] = []
    still: dict[str, list[str]] = defaultdict(list)
    for name, state in now.weights.items():
        if now.step - counts.setdefault(("since", name), now.step - 1) < SETTLED:
            continue
        if name not in shares:
            unreached = idle if state == MOVED else lost
            unreached.append(name)
        elif state == AT_ZERO:
            still["the learning rate of the group is 0"].append(name)
        elif state != MOVED and shares[name] > _LEAST_SHARE:
            still[f"{state} rounds the updates away"].append(name)
    yield from KINDS["frozen-moves"].case("idle").of(idle, now.step)
    words: dict[str, Any] = {"count": len(now.weights), "words": f" in {now.step} steps"}
    if counts["passes"] and len(lost) < len(now.weights):
        yield from KINDS["no-gradient"].of(lost, now.step, **words)
    for cause, names in still.items():
        yield from KINDS["never-moved"].of(names, now.step, cause=cause, **words)


def zero_rate(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a group whose learning rate fell to zero, after steps or before the first, while another
    group trains on.
    """
    highest = max(now.rates.values(), default=0.0)
    if not highest:
        return
    for group, rate in now.rates.items():
        counts["trained", group] += rate > 0 or facts.rates.get(group, 0.0) > 0
        if counts["trained", group]:
            counts["still", group] += rate == 0
        number = counts["still", group]
        if number >= FEWEST_BATCHES and rate == 0:
            words = f" in group {group}, while others train at up to {highest:.3g}"
            yield KINDS["learning-rate"].reading("", number, 0, step=now.step, words=words)


def one_rate(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read groups that began with different learning rates, and have trained at one rate since."""
    began = {rate for rate in facts.rates.values() if rate}
    present = {*now.rates.values()}
    if len(began) < 2 or not any(present) or counts["apart"]:
        return
    counts["apart"] += len(present) > 1
    counts["equal"] += 1
    if len(present) == 1 and counts["equal"] >= FEWEST_SAMPLES:
        words = {"least": min(began), "most": max(began), "rate": max(present)}
        yield (
            KINDS["learning-rate"]
            .case("one")
            .reading("", counts["equal"], 0, step=now.step, **words)
        )


def falling_count(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a count of steps that falls, where neither weights nor moments go back with it."""
    if now.norm is None:
        return
    before = counts["count"]
    counts["count"] = now.count or 0
    is_back = now.is_written or now.is_swapped or now.count is None
    if not is_back and counts["count"] < before:
        more = ", and the moments are as before"
        yield KINDS["step-count"].reading("", counts["count"], before, step=now.step, more=more)


def frozen_statistics(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read batch norms whose weights are frozen and whose statistics move, in three sampled steps
    in a row.
    """
    if now.frozen_norms is None:
        return
    for name in {*counts}.difference(now.frozen_norms):
        del counts[name]
    for name in now.frozen_norms:
        counts[name] += 1
    often = [name for name, count in counts.items() if count >= 3]
    yield from KINDS["frozen-statistics"].of(often, now.step)


def frozen_drifts(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read frozen tensors that change by a few roundings between many sampled steps, as a base does
    into which adapters are merged and out of which they are taken.
    """
    if now.drifting is None:
        return
    counts[""] += 1
    for name in now.drifting:
        counts[name] += 1
    number = counts[""]
    least = max(3, number / 4)
    often = [name for name, count in counts.items() if name and count >= least]
    yield from KINDS["weights-written"].case("drift").of(often, now.step, steps=number)


# ── the optimizers, the ranks and the averages ────────────────────────────────────────────────────


def repeated_step(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a step with the gradients of the last one."""
    if now.is_repeated:
        yield KINDS["step-order"].reading("", 1, 0, step=now.step)


def missing_parameters(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read tensors with a gradient and no optimizer, or with two."""
    yield from KINDS["missing-parameters"].of(now.untrained, now.step)
    for names in now.twice:
        yield from KINDS["parameters-twice"].of(names, now.step)


def effective_rate(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read lr times the stored share of the update, of each group."""
    kind = KINDS["effective-rate"]
    for rate, share, error, *named in now.shares.values():
        if share + error < kind.bound:
            words = dict(zip(("format", "worst", "least"), named, strict=True))
            yield kind.reading(
                "", rate * share, None, kind.bound * rate, now.step, rate=rate, share=share, **words
            )


def ranks_differ(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read weights that differ between ranks."""
    if not now.ranks_apart:
        return
    first, odd, rank = next(iter(now.ranks_apart.values()))
    values = f"{first:.9g} on rank 0 and {odd:.9g} on rank {rank:.0f}"
    message = f"The sum of its elements is {values} after step {now.step}."
    kind = KINDS["ranks-differ"]
    if now.step == 1 and len(now.ranks_apart) == len(now.weights):
        kind = kind.case("unsummed")
    yield kind.reading(of_all(now.ranks_apart), odd, first, 0, now.step, message=message)


def equal_ranks(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read ranks that train on one batch, or draw the same dropout masks."""
    if now.alike:
        words = _ALIKE.get(now.alike, now.alike)
        yield (
            KINDS["equal-batches"]
            .case("ranks")
            .reading("", facts.num_ranks, 1, 0, now.step, words=words)
        )


def average_moves(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read an average that ran away, averages that do not move, and those that keep nearly nothing
    of themselves.
    """
    kind = KINDS["average"]
    close = KINDS["average"].case("follows")
    still = {}
    runaways = []
    for name, (change, size, largest, format, has_settled, lag) in now.averages.items():
        if largest < math.inf and not size <= kind.bound * largest:
            runaways.append((name, size, largest))
        if change == 0 and has_settled:
            still[name] = format
        # A copy, which lies at no distance, is not meant to be an average.
        counts[name] = counts[name] + 1 if 0 < lag < close.bound and format in _WIDE else 0
        if counts[name] >= FEWEST_SAMPLES:
            yield close.reading(name, lag, step=now.step)
    for name, size, largest in runaways[:1]:
        yield kind.reading(name, size / largest, step=now.step, size=size, largest=largest)
    formats = of_all(still.values())
    yield from KINDS["average"].case("unmoved").of(still, now.step, formats=formats)


STEP_LAWS: tuple[Law, ...] = (
    wrong_mode, repeated_noise, not_restored, gradients_kept,
    gradients_cleared, equal_passes, first_nonfinite, zero_gradients, zero_gradient, clip_norm, weights_jump, frozen_moves,
    frozen_statistics, frozen_drifts, still_weights, zero_rate, one_rate, falling_count, repeated_step,
    missing_parameters, effective_rate, ranks_differ, equal_ranks, average_moves,
)  # fmt: skip
