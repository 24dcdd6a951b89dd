"""The classification of each recipe of a comparison: decided once here, read by the verdict, the tables and the page.

A recipe has a *rank*: how its losses compare with the baseline's, at the end and at equal time. It has *faults*, each a reason
not to use it, whatever its rank: it diverged, loses its updates, skipped steps, or ends worse by more than 1 %. And it is *best*
in the metrics in which it beats every other usable recipe beyond chance. The thresholds stand here; that of lost updates is the
audit's (:data:`~narrowgauge.spec.significance.MIN_EDQ`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from narrowgauge.analysis.comparison.intervals import PairedDifference, interval
from narrowgauge.analysis.comparison.run_stats import TIMING_NOISE, RunStats, late_median, requested_steps
from narrowgauge.runs.finding import counted
from narrowgauge.runs.schema import Row
from narrowgauge.spec.significance import MIN_EDQ

NEGLIGIBLE = 1e-3
"""A difference whose whole interval lies within this share of the baseline's loss does not matter, however certain."""
ACCEPTABLE = 0.01
"""A certain loss up to this share of the baseline's is reported as a price, a larger one as a fault."""
WIDE = 0.01
"""An interval whose half width exceeds this share of the baseline's loss is too wide to be useful."""
DWARFS = 5.0
"""At equal time, an interval whose half width exceeds every difference this many times is inconclusive."""
MAX_NOISE = 1.0
"""The relative rounding noise of late updates above which a recipe is noisy."""
MAX_SKIPPED = 0.05
"""The share of skipped steps above which a recipe has a fault; a loss scale settles within fewer."""
CLEAR_RATIO = 1.005
"""How many times as good a speed or a memory must be with every seed to be the better one."""

LATE = ("edq", "noise", "lost_fraction")


class Rank(Enum):
    """How a recipe's loss compares with the baseline's. ``BETTER`` and ``WORSE`` are statistically significant."""

    BASELINE = "the baseline"
    BETTER = "better"
    WITHIN_NOISE = "within the noise"
    NEGLIGIBLE = "within a thousandth"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"
    NO_INTERVAL = "no interval"
    NO_LOSS = "no loss"


def rank(
    difference: PairedDifference | None, negligible: float, *, max_high: float = math.inf, max_half: float = math.inf
) -> Rank:
    """Return the rank of a recipe other than the baseline, by its difference from the baseline's loss.

    Args:
        difference: ``None`` where the two have no seed in common.
        negligible: an interval that lies within ± this does not matter, however certain.
        max_high: inconclusive where the interval is not clearly better or worse and reaches higher.
        max_half: inconclusive where the interval's half width is larger.

    Example:
        >>> rank(PairedDifference("a", 0.1, 0.02, 3), 0.004), rank(PairedDifference("a", 0.01, 0.02, 3), 0.004)
        (<Rank.WORSE: 'worse'>, <Rank.WITHIN_NOISE: 'within the noise'>)
    """
    if difference is None or not math.isfinite(difference.half):
        return Rank.NO_INTERVAL
    if difference.half > max_half:
        return Rank.INCONCLUSIVE
    if difference.low > 0 and difference.high > negligible:
        return Rank.WORSE
    if difference.high < 0 and -difference.low > negligible:
        return Rank.BETTER
    if difference.high > max_high:
        return Rank.INCONCLUSIVE
    return Rank.WITHIN_NOISE if difference.low <= 0 <= difference.high else Rank.NEGLIGIBLE


@dataclass(frozen=True)
class Fault:
    """A reason not to use a recipe: in a few words, and with its numbers.

    Both continue a sentence that begins with the recipe's label.
    """

    name: str
    text: str


@dataclass(frozen=True)
class Classification:
    """What a comparison found out about one recipe.

    Args:
        row: of ``compare.json``.
        rank: of its final loss.
        difference: its final loss minus the baseline's; ``None`` where the two have no seed in common.
        equal_time, rank_at_equal_time: the row and the rank of its loss at equal time, where it has one.
        late: the audit's last values of ``edq``, ``noise`` and ``lost_fraction``.
        best: the columns of ``compare.json`` in which it beats every other usable recipe beyond chance.
    """

    label: str
    runs: tuple[RunStats, ...]
    row: Row
    rank: Rank
    difference: PairedDifference | None = None
    equal_time: Row | None = None
    rank_at_equal_time: Rank = Rank.NO_LOSS
    faults: tuple[Fault, ...] = ()
    late: Mapping[str, float | None] = field(default_factory=dict)
    best: frozenset[str] = frozenset()

    @property
    def has_price(self) -> bool:
        """Return whether it is certainly worse, by an acceptable share of the loss."""
        return self.rank is Rank.WORSE and not self.faults

    @property
    def is_open(self) -> bool:
        """Return whether these seeds do not rule out that it is worse by more than an acceptable share of the loss."""
        return self.rank is Rank.INCONCLUSIVE and not self.faults

    @property
    def is_unranked(self) -> bool:
        """Return whether it has a loss and no fault, and no interval."""
        return self.rank is Rank.NO_INTERVAL and not self.faults

    @property
    def is_fit(self) -> bool:
        """Return whether it is known to be usable and no worse than is acceptable; the baseline is, if it has no fault."""
        return not self.faults and self.rank in _NO_WORSE

    @property
    def is_noisy(self) -> bool:
        """Return whether the storage's noise in late updates exceeds the updates."""
        return self.late_noise > MAX_NOISE

    @property
    def late_noise(self) -> float:
        """Return the relative rounding noise of late updates; 0 where it is not known."""
        return self.late.get("noise") or 0.0

    @property
    def is_audited(self) -> bool:
        """Return whether any step of a run that counts was audited."""
        return self.late.get("edq") is not None

    @property
    def bytes_per_param(self) -> float | None:
        """Of weight, gradient and optimizer state."""
        size: float | None = self.row["bytes_per_param"]
        return size

    @property
    def cost(self) -> tuple[float, float]:
        """Return what recipes are ordered by: bytes per parameter, then time."""
        return _rounded_size(self.row), -(self.row["tokens_per_second"] or 0.0)


_NO_WORSE = (Rank.BASELINE, Rank.BETTER, Rank.WITHIN_NOISE, Rank.NEGLIGIBLE)


@dataclass(frozen=True)
class Classes(Mapping[str, Classification]):
    """The classification of every recipe of a comparison, by label.

    Args:
        baseline: ``None`` where no run counts.
        loss: the baseline's; 0 where it has none.
        resolve: the difference of losses that the comparison was to resolve; ``None`` for a share of the loss.
        has_equal_steps: whether every recipe was to take the same number of steps.
    """

    by_label: Mapping[str, Classification]
    baseline: str | None
    loss: float
    has_equal_steps: bool
    resolve: float | None = None

    @property
    def acceptable(self) -> float:
        """Return by how much a recipe may be worse with certainty, and still be as good as the baseline."""
        return acceptable(self.loss, self.resolve)

    def __getitem__(self, label: str) -> Classification:
        return self.by_label[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_label)

    def __len__(self) -> int:
        return len(self.by_label)

    @property
    def cheapest(self) -> Classification | None:
        """Return the fit recipe of the lowest known cost."""
        fit = [one for one in self.values() if one.is_fit and one.bytes_per_param is not None]
        return min(fit, key=lambda one: one.cost, default=None)

    @property
    def cheaper_open(self) -> list[Classification]:
        """Recipes that cost less than the cheapest and might be as good: these seeds do not show it."""
        best = self.cheapest
        return [one for one in self.values() if one.is_open and (best is None or one.cost < best.cost)]

    @property
    def groups(self) -> dict[str, Sequence[RunStats]]:
        return {one.label: one.runs for one in self.values()}

    @property
    def reference(self) -> Classification:
        """Return the baseline's, where there is one."""
        assert self.baseline is not None
        return self[self.baseline]

    @property
    def has_intervals(self) -> bool:
        """Return whether any recipe has two seeds in common with the baseline."""
        return any(one.difference is not None and one.difference.num_pairs > 1 for one in self.values())

    @property
    def at_equal_time(self) -> list[Classification]:
        """Return those with a loss at equal time, the lowest loss first."""
        losses = {label: float(one.equal_time["val_loss"]) for label, one in self.items() if one.equal_time}
        return [self[label] for label in sorted(losses, key=losses.__getitem__)]


def classify(
    groups: Mapping[str, Sequence[RunStats]],
    rows: Mapping[str, Row],
    baseline: str | None,
    equal_time: Sequence[Row] = (),
    resolve: float | None = None,
) -> Classes:
    """Classify every recipe of a comparison.

    Args:
        rows: of ``compare.json``, by recipe.
        baseline: ``None`` where no run counts.
        equal_time: losses at equal time, a row per recipe.
        resolve: a difference of losses; where it is given, a recipe is as good as the baseline only if it is certainly no
            worse than by this, and equal where it is certainly closer.
    """
    loss = 0.0 if baseline is None else float(rows[baseline]["val_loss"] or 0.0)
    has_equal_steps = len(set(requested_steps(groups).values())) == 1
    differences = {label: paired_difference(label, groups, baseline) for label in groups}
    rank_at_equal_time = _ranks_at_equal_time(equal_time, baseline)
    at_time = {row["recipe"]: row for row in equal_time}
    found = {}
    for label, group in groups.items():
        difference, row, why = differences[label], rows[label], run_faults(group)
        if not row["num_seeds"]:
            ranked = Rank.NO_LOSS
        elif label == baseline:
            ranked = Rank.BASELINE
        else:
            ranked = rank(difference, _negligible(loss, resolve), max_high=acceptable(loss, resolve))
        if difference is not None and ranked is Rank.WORSE and difference.mean > ACCEPTABLE * abs(loss):
            shares = [f"{difference.mean / abs(loss):+.1%}"] if loss else []
            more = ", ".join([*shares, *([] if has_equal_steps else ["after another number of steps"])])
            name = f"ends worse than {baseline}"
            why = [*why, Fault(name, f"{name} by {difference.text}{f' ({more})' if more else ''}")]
        late = {metric: late_median(group, metric) for metric in LATE}
        found[label] = Classification(
            label, tuple(group), row, ranked, difference, at_time.get(label),
            rank_at_equal_time.get(label, Rank.NO_LOSS), tuple(why), late,
        )  # fmt: skip
    found = {label: replace(one, best=_best_columns(one, found.values())) for label, one in found.items()}
    return Classes(found, baseline, loss, has_equal_steps, resolve)


def acceptable(loss: float, resolve: float | None) -> float:
    """Return how much worse than a baseline's loss a recipe may be, and still be as good."""
    return ACCEPTABLE * abs(loss) if resolve is None else resolve


def _negligible(loss: float, resolve: float | None) -> float:
    return NEGLIGIBLE * abs(loss) if resolve is None else min(NEGLIGIBLE * abs(loss), resolve)


def paired_difference(
    label: str, groups: Mapping[str, Sequence[RunStats]], baseline: str | None
) -> PairedDifference | None:
    """A recipe's loss minus another's, over the seeds that both have; ``None`` without any, and of a recipe minus itself."""
    if baseline is None or label == baseline:
        return None
    base = {run.seed: run.loss for run in groups[baseline] if run.counts}
    pairs = [run.loss - base[run.seed] for run in groups[label] if run.counts and run.seed in base]
    return PairedDifference(label, *interval([pairs]), len(pairs)) if pairs else None


def _ranks_at_equal_time(rows: Sequence[Row], baseline: str | None) -> dict[str, Rank]:
    loss = next((float(row["val_loss"]) for row in rows if row["recipe"] == baseline), 0.0)
    # An interval that dwarfs every difference, and is not small either, is inconclusive.
    most, negligible = max(DWARFS * largest_difference(rows), WIDE * abs(loss)), _negligible(loss, None)
    found = {}
    for row in rows:
        difference = None
        if row["half"] is not None:
            difference = PairedDifference(row["recipe"], row["difference"], row["half"], row["num_seeds"])
        is_baseline = row["recipe"] == baseline
        found[row["recipe"]] = Rank.BASELINE if is_baseline else rank(difference, negligible, max_half=most)
    return found


def largest_difference(rows: Sequence[Row]) -> float:
    """Return the largest difference of a loss at equal time from the baseline's."""
    return max((abs(row["difference"]) for row in rows if row["difference"] is not None), default=0.0)


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_faults(group: Sequence[RunStats]) -> list[Fault]:
    """Return the reasons not to use a recipe that its own runs show, without any other recipe."""
    return [fault for of_group in (_divergence, _lost_updates, _skipped_steps) for fault in of_group(group)]


def _divergence(group: Sequence[RunStats]) -> list[Fault]:
    diverged = [run for run in group if run.divergence]
    if not diverged:
        return []
    name = f"diverged in {len(diverged)} of {counted(len(group), 'run')}"
    return [Fault(name, f"{name} (seed {diverged[0].seed}, {diverged[0].divergence.strip().rstrip('.')})")]


def _lost_updates(group: Sequence[RunStats]) -> list[Fault]:
    edq, lost = late_median(group, "edq"), late_median(group, "lost_fraction")
    if edq is None or edq >= MIN_EDQ:
        return []
    more = "" if lost is None else f"; {lost:.0%} of the changes were lost"
    name = "loses its updates"
    return [Fault(name, f"{name} (a late EDQ of {edq:.2f}, where 1 loses nothing{more})")]


def _skipped_steps(group: Sequence[RunStats]) -> list[Fault]:
    ended = [(run.run.summary, len(run.run.steps)) for run in group if run.counts and run.run.summary is not None]
    taken = sum(int(summary.get("steps") or length) for summary, length in ended)
    skipped = sum(int(summary.get("num_skipped") or 0) for summary, _ in ended)
    if not taken or skipped <= MAX_SKIPPED * taken:
        return []
    name = f"skipped {skipped:,} of its {taken:,} steps"
    return [Fault(name, name)]


# ── best beyond chance ──────────────────────────────────────────────────────────────────────────────────────────────

LOWER_IS_BETTER = {
    "val_loss": True, "tokens_per_second": False, "bytes_per_param": True, "activation_bytes": True, "peak_tensor_bytes": True,
    "peak_memory_bytes": True,
}  # fmt: skip
"""The columns of ``compare.json`` in which a recipe may be the best."""


def _best_columns(one: Classification, all_recipes: Iterable[Classification]) -> frozenset[str]:
    """Return the columns in which a recipe beats every other usable one beyond chance; several share the fewest bytes."""
    if one.faults:
        return frozenset()
    usable = [other for other in all_recipes if not other.faults]
    found = set()
    for column, is_lower_better in LOWER_IS_BETTER.items():
        others = [other for other in usable if other is not one and other.row[column] is not None]
        if one.row[column] is None or not others:
            continue
        if column == "bytes_per_param":
            # Bytes do not vary from run to run.
            sizes = {_rounded_size(other.row) for other in others}
            is_best = _rounded_size(one.row) <= min(sizes) and _rounded_size(one.row) < max(sizes)
        else:
            first = (min if is_lower_better else max)(one.row[column], *(other.row[column] for other in others))
            is_best = one.row[column] == first and all(beats(one, other, column) for other in others)
        found |= {column} if is_best else set()
    return frozenset(found)


def _rounded_size(row: Row) -> float:
    # Less than a tenth of a byte is a few vectors, not a saving.
    return math.inf if row["bytes_per_param"] is None else round(row["bytes_per_param"], 1)


def beats(one: Classification, other: Classification, column: str) -> bool:
    """Return whether a recipe is better in a metric beyond chance, over the seeds that both have.

    The interval of a loss decides. A speed or a memory must be better with every seed, and a single pair by more than chance.
    """
    if column == "val_loss":
        losses = [{run.seed: run.loss for run in recipe.runs if run.counts} for recipe in (one, other)]
        pairs = [losses[0][seed] - losses[1][seed] for seed in losses[0] if seed in losses[1]]
        return bool(pairs) and sum(interval([pairs])) < 0
    ratios = ratios_by_seed(one, other, column) or [_ratio(one.row[column], other.row[column], column)]
    return min(ratios) > (CLEAR_RATIO if len(ratios) > 1 else TIMING_NOISE)


def ratios_by_seed(one: Classification, other: Classification, column: str) -> list[float]:
    """Return how many times as good a recipe's speed or memory is, for each seed that both have."""
    mine, theirs = (
        {run.seed: float((run.run.summary or {}).get(column) or 0.0) for run in recipe.runs} for recipe in (one, other)
    )
    pairs = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
    return [_ratio(*pair, column) for pair in pairs if min(pair) > 0 and math.isfinite(sum(pair))]


def _ratio(mine: float, theirs: float, column: str) -> float:
    return theirs / mine if LOWER_IS_BETTER[column] else mine / theirs
