"""The laws of a watched loop: a table of functions from the numbers of a step to readings.

A law reads a snapshot, and counts over the run what it must remember, in a value of its own.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.analysis.thresholds import (
    EVALUATIONS_APART,
    FEWEST_BATCHES,
    LEAST_SHARE_OF_STEPS,
    LOSS_APART,
    SETTLED,
    UNIFORM_STEPS,
    UNSTEPPED,
)
from narrowgauge.gauges.recording.snapshot import Facts, Snapshot, is_sampled
from narrowgauge.runs.finding import counted

_LEAST_SHARE = 1e-6
"""Of the norm of all gradients. A smaller gradient may be rounding alone, as that of a bias before a batch norm."""
Counts = defaultdict[Any, Any]
"""What one law remembers of a run, by name: a count, 0 at first, or the law's own numbers."""
Law = Callable[[Snapshot, Facts, Counts], Iterator[Reading]]


class Laws:
    """Ask every law about each snapshot of a run.

    Example:
        >>> laws = Laws(Facts(limit=1.0))
        >>> [reading.what for reading in laws.read(Snapshot(1, norms={"weight": 3.0}))]
        ['clip-norm']
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._counts: dict[Law, Counts] = {law: defaultdict(int) for law in LAWS}

    def read(self, now: Snapshot) -> Iterator[Reading]:
        """Yield the readings of a snapshot; pass them in the order of their steps."""
        for law, counts in self._counts.items():
            yield from law(now, self.facts, counts)


# ── passes and losses ─────────────────────────────────────────────────────────────────────────────


def wrong_mode(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read steps in evaluation mode, and evaluations in training mode.

    A loop with such evaluations in most steps means them.
    """
    passes = now.passes
    things = facts.mode_dependent
    kind = KINDS["wrong-mode"]
    dropped = counts["dropouts"]
    if passes.modes:
        counts["dropouts"] = passes.num_dropping
    counts["evaluations"] += bool(passes.evaluations)
    if things and passes.modes == {False}:
        words = f"the model trains in evaluation mode, without {things}: call model.train()"
        yield kind.reading("", 1, 0, step=now.step, words=words)
    elif passes.is_evaluated and 0 < passes.num_dropping < dropped:
        left = dropped - passes.num_dropping
        words = f"an evaluation left {left} of {counted(dropped, 'dropout')} in evaluation mode:"
        words += " call model.train() after it"
        yield kind.reading("", left, 0, step=now.step, words=words)
    is_rare = now.step >= EVALUATIONS_APART * counts["evaluations"]
    if passes.evaluations == {True} and is_rare:
        words = f"the evaluation ran in training mode, with {things}: call model.eval() before it"
        yield kind.reading("", 1, 0, step=now.step - 1, words=words)


def uniform_loss(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read losses that stay at that of a uniform guess."""
    if now.loss is None or facts.vocabulary <= 1:
        return
    expected = math.log(facts.vocabulary)
    kind = KINDS["constant-loss"].case("uniform")
    is_uniform = abs(now.loss / expected - 1) < kind.bound
    counts["losses"] += 1
    counts["uniform"] += is_uniform
    if is_uniform and counts["uniform"] >= max(UNIFORM_STEPS, counts["losses"] / 2):
        words = {"steps": counts["uniform"], "count": counts["losses"]}
        words["vocabulary"] = facts.vocabulary
        yield kind.reading("", now.loss, expected, kind.bound * expected, now.step, **words)


def constant_loss(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a loss that has had one value in all steps.

    A loss of four decimals was rounded, as transformers logs it, or is zero, as GRPO's at first.
    """
    if now.loss is None:
        return
    counts["first"] = counts.get("first", now.loss)
    counts["losses"] += 1
    counts["equal"] += now.loss == counts["first"] != round(now.loss, 4)
    kind = KINDS["constant-loss"]
    if counts["equal"] == counts["losses"] and counts["equal"] >= kind.bound:
        yield kind.reading("", counts["equal"], step=now.step, loss=now.loss)


def rank_loss(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a rank whose loss is far above the others'."""
    losses = list(now.rank_losses)
    if not losses:
        return
    worst = max(losses, key=lambda x: (not math.isfinite(x), x))
    middle = sorted(losses)[(len(losses) - 1) // 2]
    kind = KINDS["ranks-differ"].case("loss")
    bound = kind.bound * max(middle, 0.0) + LOSS_APART
    if not math.isfinite(worst) or worst > middle + bound:
        yield kind.reading("", worst, middle, bound, now.step, rank=losses.index(worst))


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


def first_nonfinite(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read the first place that is not finite, once: it makes all later ones so."""
    bad = [name for name, norm in (now.norms or {}).items() if not math.isfinite(norm)]
    is_overflow = bool(bad) and now.is_skipped
    counts["overflows"] += is_overflow
    if counts["bad"]:
        return
    counts["bad"] += bool(now.bad_outputs or (bad and not is_overflow))
    for name in list(now.bad_outputs)[:1]:
        words = ", at finite weights"
        weight = facts.nonfinite_weight(name)
        if weight:
            words = f", at weights that are not finite ({weight})"
        yield KINDS["nonfinite"].case("output").reading(name, math.nan, step=now.step, words=words)
    kind = KINDS["nonfinite"]
    if is_overflow and counts["overflows"] >= max(kind.bound, now.step / 3):
        number = counts["overflows"]
        words = f", in {number} skipped steps of {now.step}"
        yield kind.reading(bad[0], number, step=now.step, words=words)
    elif bad and not is_overflow and not now.bad_outputs:
        words = f", of {counted(len(bad), 'tensor')}, and the optimizer took the step"
        yield kind.reading(bad[0], len(bad), 0, 0, now.step, words=words)


def zero_gradients(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read steps without any gradient, counted over the run."""
    if now.norms is None:
        return
    counts["zero"] += not any(now.norms.values())
    kind = KINDS["zero-gradients"]
    if counts["zero"] >= max(kind.bound, LEAST_SHARE_OF_STEPS * now.step):
        yield kind.reading("", counts["zero"], step=now.step, count=now.step)


def zero_gradient(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a tensor whose gradient is exactly zero or missing in a few of its steps.

    Steps in which all are zero do not count.
    """
    norms = now.norms or {}
    if not any(norms.values()):
        return
    for name in dict.fromkeys([*counts, *norms]):
        if norms.get(name):
            counts.setdefault(name, (now.step, 0))
        elif name in counts:
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
    if now.norms is None or now.is_skipped or not is_whole:
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
        for name, norm in (now.norms or {}).items():
            shares[name] = max(shares.get(name, 0.0), norm / whole)
    return shares


def still_weights(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read the weights that never moved, those without a gradient, and those that move without
    one.
    """
    shares = _largest_shares(now, counts)
    counts["passes"] += len(now.passes.modes)
    if now.weights is None:
        return
    idle = []
    lost = []
    still: dict[str, list[str]] = defaultdict(list)
    for name, weight in now.weights.items():
        share = shares.get(name, 0.0)
        if now.step - counts.setdefault(("since", name), now.step - 1) < SETTLED:
            continue
        if weight.has_moved and not share:
            idle.append(name)
        elif not share:
            lost.append(name)
        elif weight.is_at_zero and not weight.has_moved:
            still["the learning rate of the group is 0"].append(name)
        elif share > _LEAST_SHARE and not weight.has_moved:
            still[f"{weight.format} rounds the updates away"].append(name)
    yield from KINDS["frozen-moves"].case("idle").of(idle, now.step)
    words: dict[str, Any] = {"count": len(now.weights), "words": f" in {now.step} steps"}
    if counts["passes"] and len(lost) < len(now.weights):
        yield from KINDS["no-gradient"].of(lost, now.step, **words)
    for cause, names in still.items():
        yield from KINDS["never-moved"].of(names, now.step, cause=cause, **words)


def zero_rate(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a group whose learning rate has fallen to zero while another group trains on."""
    highest = max(now.rates.values(), default=0.0)
    if not highest:
        return
    for group, rate in now.rates.items():
        counts["trained", group] += rate > 0
        if counts["trained", group]:
            counts["still", group] += rate == 0
        number = counts["still", group]
        if number >= FEWEST_BATCHES and rate == 0:
            words = f" in group {group}, while others train at up to {highest:.3g}"
            yield KINDS["learning-rate"].reading("", number, 0, step=now.step, words=words)


def falling_count(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a count of steps that falls, where neither weights nor moments go back with it."""
    if now.norms is None:
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


LAWS: tuple[Law, ...] = (
    wrong_mode, uniform_loss, constant_loss, rank_loss, not_restored, gradients_kept,
    first_nonfinite, zero_gradients, zero_gradient, clip_norm, weights_jump, frozen_moves,
    frozen_statistics, frozen_drifts, still_weights, zero_rate, falling_count,
)  # fmt: skip
