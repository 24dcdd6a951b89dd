"""The data: rows that come again too early, rows that are sorted, tokens that change, ranks that have the same rows.

What a healthy loop does is not assumed, but taken from the loop: how often its rows come again at all, and how far the
frequencies of its tokens vary from step to step. A row may come again once every other one has come (an epoch), or as often
as chance brings it among those seen (draws with replacement, a small data set). What is named has odds below :data:`ODDS`
under both.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from narrowgauge.recompute.piece_results import DEPARTS, EQUAL, PieceResult, not_checked
from narrowgauge.recompute.seen_rows import KEYS, MOST_PENDING, Digest, SeenRows, StepRows, digest_of, read_rows
from narrowgauge.runs.finding import told

PIECE = "data"
ODDS = math.log(1e-9)
"""Logarithm of the odds under a healthy loop below which a count is named."""
_LEAST_STAYING = 0.05
"""Of a step's rows, that are in every step: fewer are short rows of a text in which the same words come often."""
_BY_ITSELF = 0.01
"""Share of rows that may come again for reasons of the text, such as a licence."""
_WINDOW = 32
"""Steps over which coincidences are counted."""
_SORTED = 40
"""Changes of a key in one direction without one in the other: a walk at random has so many once in 2^40."""
_ROWS_ANEW = 24
"""Rows that were seen before, and then rows that are new, between which a reader began anew."""
_ENTRIES = 256
"""Histograms that are kept; neighbours are joined where there are more."""
_BEFORE, _AFTER = 8, 4
_ABOVE = 16.0
"""How many times the distance of two parts of a run is that of the parts' own parts, at least."""

Named = tuple[str, dict[str, object]]


@dataclass(frozen=True)
class _Step:
    """Rows of a step, as far as they are in the sample, and what was known of them before.

    Args:
        number: of rows, those that come twice counted twice.
        rows: each once.
        lags: how many steps ago those that were seen before came last.
        seen: rows that were seen before this step.
        often: those of ``rows`` that came in two steps before.
        seen_often: rows that did.
    """

    step: int
    number: int
    rows: list[int]
    lags: list[int]
    seen: int
    often: frozenset[int]
    seen_often: int


def log_odds(count: float, mean: float) -> float:
    """An upper bound of the logarithm of the odds that a Poisson variable reaches a count.

    Example:
        >>> log_odds(2, 3), round(log_odds(10, 1), 2)
        (0.0, -14.03)
    """
    return min(0.0, count - mean - count * math.log(count / mean)) if count > mean > 0 else 0.0


class _Twice:
    """Rows that are in one step more than once, more often than rows of different steps let expect."""

    def __init__(self) -> None:
        self._steps: deque[tuple[_Step, int, float]] = deque(maxlen=_WINDOW)

    def take(self, now: _Step) -> Named | None:
        again = now.number - len(now.rows)
        by_chance = now.number * len(now.lags) / now.seen if now.seen else 0.0
        self._steps.append((now, again, by_chance + _BY_ITSELF * now.number))
        mean = sum(each for _, _, each in self._steps)
        if not now.seen or log_odds(sum(count for _, count, _ in self._steps), mean) > ODDS:
            return None
        having = [(step, count) for step, count, _ in self._steps if count]
        share = sum(count for _, count in having) / sum(step.number for step, _ in having)
        return "rows-twice", {"share": share, "since": having[0][0].step}


class _Again:
    """Rows that come again after the same few steps, where many others were seen."""

    def __init__(self) -> None:
        self._steps: deque[tuple[_Step, Counter[int], float]] = deque()
        self._total: Counter[int] = Counter()

    def take(self, now: _Step) -> Named | None:
        near = Counter(lag for lag in now.lags if 2 * lag * now.number <= now.seen)
        by_chance = now.number * (now.number / now.seen + _BY_ITSELF) if now.seen else 0.0
        self._steps.append((now, near, by_chance))
        self._total.update(near)
        if len(self._steps) > _WINDOW:
            self._total -= self._steps.popleft()[1]
        if not near:
            return None
        lag = max(near, key=lambda each: self._total[each])
        if log_odds(self._total[lag], sum(mean for _, _, mean in self._steps)) > ODDS:
            return None
        having = [(step, lags[lag]) for step, lags, _ in self._steps if lags[lag]]
        share = sum(number for _, number in having) / sum(step.number for step, _ in having)
        return "rows-again", {"share": share, "lag": lag, "since": having[0][0].step, "seen": now.seen}


class _Stays:
    """Rows that are in every step, where many others were seen."""

    def __init__(self) -> None:
        self._since: dict[int, int] = {}

    def take(self, now: _Step) -> Named | None:
        self._since = {row: self._since.get(row, now.step) for row in now.rows}
        if not 0 < 2 * now.number < now.seen:
            return None
        steps = (math.log(now.seen) - ODDS) / math.log(now.seen / now.number)
        stay = [since for since in self._since.values() if now.step - since >= steps]
        share = len(stay) / len(now.rows)
        if share < _LEAST_STAYING:
            return None
        return "rows-again", {"share": share, "lag": 1, "since": min(stay), "seen": now.seen}


class _Few:
    """Steps all of whose rows were seen before, and are few of those that were.

    Rows that came more often than the others already are a small set among others, of which a mixture has some.
    """

    def __init__(self) -> None:
        self._rows: set[int] = set()
        self._drawn, self._still, self._since, self._often, self._share = 0, 0, 0, 0, 0.0

    def take(self, now: _Step) -> Named | None:
        if len(now.lags) < 0.9 * len(now.rows) or not now.rows:
            self._rows, self._drawn = set(), 0
            return None
        if not self._drawn:
            self._since, self._still, self._often, self._share = now.step, 0, 0, now.seen_often / now.seen
        self._often += len(now.often - self._rows)
        self._rows.update(now.rows)
        self._drawn += len(now.rows)
        self._still += sum(lag == 1 for lag in now.lags)
        if 2 * self._still > self._drawn:  # one step's rows once more, which is no set of them
            return None
        few, seen = len(self._rows), max(now.seen, len(self._rows))
        if 2 * few > seen or self._often > (2 * self._share + 0.2) * few:
            return None
        sets = math.lgamma(seen + 1) - math.lgamma(few + 1) - math.lgamma(seen - few + 1)
        if sets + self._drawn * math.log(few / seen) > ODDS:
            return None
        return "rows-few", {"rows": few, "seen": seen, "since": self._since}


class _Anew:
    """Steps all of whose rows were seen before, and then some whose rows are all new: it was no whole pass."""

    def __init__(self) -> None:
        self._old, self._new, self._since, self._until = 0, 0, 0, 0

    def take(self, now: _Step) -> Named | None:
        if len(now.lags) >= 0.9 * len(now.rows) > 0:
            if self._new or not self._old:
                self._old, self._new, self._since = 0, 0, now.step
            self._old, self._until = self._old + len(now.rows), now.step
        elif self._old and len(now.lags) <= 0.1 * len(now.rows):
            self._new += len(now.rows)
        else:
            self._old = 0
        if self._old < _ROWS_ANEW or self._new < _ROWS_ANEW:
            return None
        return "rows-anew", {"since": self._since, "until": self._until}


class _Sorted:
    """A key of rows, or its mean over a step, that only rises or only falls."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], float] = {}
        self._runs: dict[tuple[str, str, int], tuple[int, int]] = {}

    def take(self, now: StepRows) -> Named | None:
        for place, key in enumerate(KEYS):
            values = [row[place] for row in now.keys]
            for what, series in (("rows", values), ("steps", [sum(values) / max(1, len(values))])):
                before = self._last.get((what, key))
                series = series if before is None else [before, *series]
                self._last[what, key] = series[-1]
                for sign in (1, -1):
                    number, since = self._run(now.step, (what, key, sign), series)
                    if number >= _SORTED and now.step - since >= _AFTER:
                        return "rows-sorted", {"key": key, "what": what, "since": since}
        return None

    def _run(self, step: int, of: tuple[str, str, int], series: Sequence[float]) -> tuple[int, int]:
        """Changes in one direction since the last one in the other, and the step of that."""
        number, is_whole = 0, True
        for before, after in pairwise(reversed(series)):  # from the end, since nearly all runs are short
            if (before - after) * of[2] < 0:
                is_whole = False
                break
            number += before != after
        earlier, since = self._runs.get(of, (0, step))
        self._runs[of] = (earlier + number, since) if is_whole else (number, step)
        return self._runs[of]


class _Frequencies:
    """Tokens that come in other frequencies from one step on, for good: one change, not a drift."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._shares: list[Tensor] = []
        self._span, self._open = 1, 0

    def take(self, now: StepRows) -> Named | None:
        """Keep a step; what it shows is asked for by :meth:`judged`."""
        total = float(now.counts.sum())
        if not total:
            return None
        share = (now.counts / total).sqrt()
        if self._open and self._open < self._span:
            self._shares[-1] = (self._shares[-1] * self._open + share) / (self._open + 1)
            self._open += 1
        else:
            self._steps.append(now.step)
            self._shares.append(share)
            self._open = 1
        if len(self._shares) > _ENTRIES:
            self._shares = [(a + b) / 2 for a, b in zip(self._shares[0:-1:2], self._shares[1::2], strict=False)]
            self._steps, self._span = self._steps[0:-1:2], 2 * self._span
            self._open = self._span
        return None

    def judged(self) -> Named | None:
        if len(self._shares) < _BEFORE + _AFTER:
            return None
        shares = torch.stack(self._shares)
        jumps = (shares[1:] - shares[:-1]).square().sum(1) / 2
        if not jumps.any():
            return None
        own_variance = float(jumps[jumps > 0].median())  # steps that are all alike do not vary
        place, ratio = change_of(shares, own_variance, _AFTER)
        if place < _BEFORE:
            return None
        own = max(change_of(part, own_variance, 2)[1] for part in (shares[:place], shares[place:]))
        if ratio < _ABOVE * max(1.0, own):
            return None
        apart = float((shares[:place].mean(0) - shares[place:].mean(0)).norm())
        since = self._steps[place]
        self._steps, self._shares = self._steps[place:], self._shares[place:]
        return "tokens-change", {"since": since, "apart": apart, "ratio": ratio}


def change_of(values: Tensor, variance: float, least: int) -> tuple[int, float]:
    """Where a series changes most, and the square of that change over what values that only vary would give.

    Args:
        values: ``[time, dims]``.
        variance: of one value around its level, summed over dims.
        least: values on either side.
    """
    number = len(values)
    if number < 2 * least or variance <= 0:
        return 0, 0.0
    before = torch.arange(least, number - least + 1, dtype=values.dtype)
    sums = values.cumsum(0)
    first = sums[least - 1 : number - least] / before[:, None]
    second = (sums[-1] - sums[least - 1 : number - least]) / (number - before)[:, None]
    ratio = (first - second).square().sum(1) / (variance * (1 / before + 1 / (number - before)))
    best = int(ratio.argmax())
    return best + least, float(ratio[best])


@dataclass
class DataHistory:
    """Follows the rows of a loop's steps in bounded memory.

    Args:
        declared: a key of :data:`narrowgauge.recompute.task.DATA`: what of it is meant.

    Attributes:
        seen: the rows that were trained on, up to the last step that was read.
        own: rows that came again, and all rows, of the steps that were no second pass.
        recent: the share of rows of the last steps that came before.
    """

    declared: str = ""
    seen: SeenRows = field(default_factory=SeenRows)
    own: tuple[int, int] = (0, 0)
    recent: float = 0.0
    _passes: list[Digest] = field(default_factory=list)
    _pending: list[tuple[int, list[Digest]]] = field(default_factory=list)
    _found: list[PieceResult] = field(default_factory=list)
    _named: set[str] = field(default_factory=set)
    _was_read: bool = False
    _last: StepRows | None = None

    def __post_init__(self) -> None:
        self._of_rows: tuple[Callable[[_Step], Named | None], ...] = (
            _Twice().take, _Again().take, _Stays().take, _Few().take, _Anew().take,
        )  # fmt: skip
        self._frequencies = _Frequencies()
        self._of_steps: tuple[Callable[[StepRows], Named | None], ...] = (_Sorted().take, self._frequencies.take)

    def add(self, tokens: Tensor) -> None:
        """Take the batch of one forward pass of the step."""
        if self.declared != "own" and tokens.numel():
            self._passes.append(digest_of(tokens))

    def begin_step(self) -> None:
        """Leave out the batches that were added since the last step."""
        self._passes = []

    def end_step(self, step: int) -> None:
        """Close the step whose batches were added."""
        if self._passes:
            self._pending.append((step, self._passes))
            self._passes = []
            if sum(len(each.rows) for _, digests in self._pending for each in digests) > MOST_PENDING:
                self.read()

    def read(self) -> None:
        """Read what is still on the device."""
        pending, self._pending = self._pending, []
        for step, digests in pending:
            self._last = read_rows(step, digests)
            self._take(self._last)

    def _take(self, rows: StepRows) -> None:
        self._was_read = True
        chosen = self.seen.chosen(rows.hashes)
        each = list(dict.fromkeys(chosen))
        lags = [rows.step - self.seen.last[h] for h in each if h in self.seen.last]
        often = frozenset(self.seen.often.intersection(each))
        now = _Step(rows.step, len(chosen), each, lags, len(self.seen), often, len(self.seen.often))
        if each:
            share = len(lags) / len(each)
            self.recent += (share - self.recent) / 8
            if share < 0.9:
                self.own = (self.own[0] + len(lags), self.own[1] + len(each))
        self.seen.add(rows.step, each)
        for take in self._of_rows:
            self._name(take(now), rows.step)
        if self.declared != "curriculum":
            for judge in self._of_steps:
                self._name(judge(rows), rows.step)

    def _name(self, named: Named | None, step: int) -> None:
        """Keep what is named for the first time; rows that come again are named once, whichever way it is seen."""
        if named is None:
            return
        cause, values = named
        kind = "again" if cause in ("rows-again", "rows-few", "rows-anew") else cause
        if kind not in self._named or cause == "tokens-change":
            self._named.add(kind)
            self._found.append(PieceResult(PIECE, DEPARTS, (), 1.0, 0.0, cause, values, step))

    def results(self, step: int) -> list[PieceResult]:
        """What was found since the last call."""
        if self.declared == "own":
            return [not_checked(PIECE, "declared as its own", step)]
        self.read()
        if not self._was_read:
            return [not_checked(PIECE, "the model has no input of integers with dims (batch, sequence)", step)]
        if self.declared != "curriculum":
            self._name(self._frequencies.judged(), step)
        found, self._found = self._found, []
        return found or [PieceResult(PIECE, EQUAL, step=step)]

    def batch_hash(self) -> int | None:
        """A hash of the rows of the last step, in any order; ``None`` where the loop has had no others."""
        last = self._last
        if last is None or not last.hashes or len(self.seen) <= len(set(self.seen.chosen(last.hashes))):
            return None
        return sum(last.hashes) & ((1 << 64) - 1)


def check_ranks(step: int, told_by_rank: Sequence[tuple[int | None, bytes]]) -> list[PieceResult]:
    """Compare the rows that ranks had in one step.

    Ranks with other weights are parts of one model, and have the same rows by design.

    Args:
        told_by_rank: for each rank a hash of its rows, or ``None``, and of some of its weights.
    """
    groups: dict[tuple[int, bytes], list[int]] = {}
    for rank, (rows, weights) in enumerate(told_by_rank):
        if rows is not None:
            groups.setdefault((rows, weights), []).append(rank)
    alike = [ranks for ranks in groups.values() if len(ranks) > 1]
    if not alike:
        return []
    values: dict[str, object] = {"ranks": told(map(str, alike[0]), 8)}
    return [PieceResult(PIECE, DEPARTS, (), 1.0, 0.0, "ranks-same-rows", values, step)]
