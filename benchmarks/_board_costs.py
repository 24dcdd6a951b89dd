"""What the board's records show of each row: differences from its baseline, their intervals, and a verdict in a word.

Runs of one seed and cell share initial weights, batches and held-out text, so they are compared in pairs; only runs of the same
vector instructions and release of PyTorch are, since others round differently. A cell's interval is Student's t over seeds, that
of all cells :func:`~narrowgauge.analysis.comparison.intervals.interval`.

Claim and baseline: none of its own. Run: ``./dev docs`` makes the page.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from _board_records import MASTER, RULES, WORD, Cell, Record, Rules, RunRecord, StallRecord, over_word, runs_of
from _published_training import NAMES as PUBLISHED
from _published_training import published
from peers import PEERS as ALL_PEERS

from narrowgauge.analysis.comparison.intervals import PairedDifference, interval
from narrowgauge.analysis.comparison.resolution import read as read_difference
from narrowgauge.analysis.comparison.resolution import seeds_needed
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.notation import parse
from narrowgauge.spec.storages import STORAGES

NOT_RUN = "not run"

MOST_WRONG = 0.5
"""A stall error above which a lower loss does not stand alone: most of what small updates should have moved is wrong."""

PEERS = {peer.name: peer for peer in ALL_PEERS}
"""Rows whose optimizer is somebody else's, over bfloat16 parameters."""


def is_others(row: str) -> bool:
    """Whether a row is another package's optimizer, or states that others publish, by their formulas."""
    return row in PEERS or row in PUBLISHED


def baseline_of(row: str) -> str:
    """What a row is compared with: ``word`` for another compute over ``word``, else ``master``.

    Example:
        >>> [baseline_of(row) for row in ("word", "float8-row/word", "float8-row/states8", "torch AdamW bfloat16")]
        ['master', 'word', 'master', 'master']
    """
    return WORD if row.endswith(f"/{WORD}") else MASTER


def storage_of(row: str) -> str:
    """Whose stall error a row has: its storage's, or its own where it is others'."""
    if row in STORAGES or is_others(row):
        return row
    return parse(row).storage.name


def source_of(row: str) -> str:
    """The publication or library of a row: its storage's, that of its compute where that is not bfloat16, or the peer."""
    if row in PEERS:
        return PEERS[row].source
    if formulas := published(row):
        return formulas.source
    return STORAGES[row].source if row in STORAGES else parse(row).compute.source


def listed_rows(records: Iterable[Record] = ()) -> list[str]:
    """All rows of the page: storages, others' rows, computes over ``word``, and what else has records."""
    computes = [over_word(name) for name in COMPUTES if name != "bfloat16" and "+" not in name]
    known = [*STORAGES, *PEERS, *PUBLISHED, *computes]
    return list(dict.fromkeys([*known, *(record.row for record in runs_of(records))]))


@dataclass(frozen=True)
class Cost:
    """What the records show of one row.

    Args:
        runs: its own, of one kind of arithmetic: where several have some, the one with the most pairs.
        pairs: by cell, a difference of validation losses for each seed that the baseline has too.
    """

    row: str
    runs: tuple[RunRecord, ...]
    pairs: Mapping[Cell, tuple[float, ...]]
    stall: StallRecord | None
    rules: Rules = RULES

    @property
    def baseline(self) -> str:
        return baseline_of(self.row)

    @property
    def is_baseline(self) -> bool:
        """Whether others are compared with it, and it with nothing."""
        return self.row == self.baseline

    @property
    def num_wanted(self) -> int:
        """Runs that the rules ask for."""
        return len(self.rules.cells) * len(self.rules.seeds)

    @property
    def num_pairs(self) -> int:
        return sum(len(found) for found in self.pairs.values())

    @property
    def bytes_per_param(self) -> float:
        """As counted in its runs; where there is none, as the stall case or its table says."""
        if self.runs:
            return statistics.median(run.bytes_per_param for run in self.runs)
        if self.stall is not None:
            return self.stall.bytes_per_param
        if self.row in PEERS:
            return PEERS[self.row].bytes_per_param
        if formulas := published(self.row):
            return float(formulas.bytes_per_param(256, 256))
        return float(parse(_recipe(self.row)).storage.bytes_per_param)

    @property
    def num_diverged(self) -> int:
        return sum(bool(run.diverged) for run in self.runs)

    def of_cell(self, cell: Cell) -> PairedDifference | None:
        """The difference from the baseline in a cell, over its seeds."""
        found = self.pairs.get(cell, ())
        return PairedDifference(self.row, *interval([found]), len(found)) if found else None

    @cached_property
    def over_all(self) -> PairedDifference | None:
        """The difference over all cells, once each has all its seeds."""
        if self.num_pairs < self.num_wanted or self.num_diverged:
            return None
        return PairedDifference(self.row, *interval(list(self.pairs.values())), len(self.rules.seeds))

    @property
    def num_seeds_needed(self) -> int | None:
        """Seeds that would resolve the rules' difference over all cells, at most; ``None`` for more than a thousand."""
        # The spread of a seed's mean over cells. More degrees of freedom than (seeds - 1) are left out of account.
        variances = [statistics.variance(found) for found in self.pairs.values()]
        return seeds_needed(math.sqrt(sum(variances)) / len(variances), self.rules.resolve)

    @property
    def cells_worse(self) -> list[Cell]:
        """Cells whose whole interval lies above the difference to be resolved."""
        found = {cell: self.of_cell(cell) for cell in self.pairs}
        return [cell for cell, each in found.items() if each is not None and each.low > self.rules.resolve]

    @property
    def verdict(self) -> str:
        """In a word, by the interval over all cells and the difference ``d`` that is to be resolved.

        ``as BASELINE``: the interval lies within ± d. ``worse``: above 0. ``lower``: below 0, with ``small updates wrong``
        where the stall error exceeds :data:`MOST_WRONG`. ``no worse``: below d. ``not distinguishable``: none of these, with
        the seeds that would tell. ``diverged``: a run did.
        """
        if not self.runs:
            return NOT_RUN
        if self.num_diverged:
            return f"diverged ({self.num_diverged} of {len(self.runs)} runs)"
        if self.is_baseline:
            return "baseline"
        if self.over_all is None:
            return f"incomplete ({self.num_pairs} of {self.num_wanted} pairs)"
        return self._judged(self.over_all) + self._in_cells()

    @property
    def word(self) -> str:
        """The verdict without numbers and names of cells."""
        verdict = re.sub(r" \(.*?\)|(?<=^worse); worse at .*", "", self.verdict)
        return re.sub(r"; worse at .*", "; worse in a cell", verdict)

    def _judged(self, difference: PairedDifference) -> str:
        claim = claim_of(difference, self.baseline, self.rules.resolve)
        if claim == "lower" and self.stall is not None and float(self.stall.error) > MOST_WRONG:
            return f"{claim}; small updates wrong"
        if claim:
            return claim
        needed = self.num_seeds_needed
        told = "more than 1000 seeds" if needed is None else f"{max(needed, difference.num_pairs + 1)} seeds"
        return f"not distinguishable ({told} would tell)"

    def _in_cells(self) -> str:
        worse = self.cells_worse
        if not worse or len(worse) == len(self.pairs):
            return ""
        return f"; worse at {' and '.join(cell_name(cell) for cell in worse)}"


def claim_of(difference: PairedDifference, baseline: str, resolve: float) -> str:
    """What an interval shows at the difference that is to be resolved; empty where it shows nothing.

    A loss below the baseline's is *lower*, and not better: at rates below the best one, whatever makes steps larger ends lower.

    Example:
        >>> [claim_of(PairedDifference("a", mean, 0.001, 3), "master", 0.005) for mean in (0.001, 0.006, -0.006)]
        ['as master', 'worse', 'lower']
    """
    if max(difference.high, -difference.low) <= resolve:
        return f"as {baseline}"
    claim = read_difference(difference, resolve).claim
    return "lower" if claim == "better" else claim


def _recipe(row: str) -> str:
    return row if "/" in row else f"bfloat16/{row}"


def cell_name(cell: Cell) -> str:
    """A cell in a heading.

    Example:
        >>> cell_name((0.999, 1e-4))
        'beta2 0.999, lr 0.0001'
    """
    return f"beta2 {cell[0]:g}, lr {cell[1]:g}"


def costs(records: Sequence[Record], rules: Rules = RULES, rows: Iterable[str] | None = None) -> list[Cost]:
    """What the records show of these rows, by default of all :func:`listed_rows`."""
    runs = runs_of(records)
    stalls = {record.row: record for record in records if isinstance(record, StallRecord)}
    return [
        _cost(row, runs, stalls.get(storage_of(row)), rules) for row in (listed_rows(records) if rows is None else rows)
    ]


def _cost(row: str, runs: Sequence[RunRecord], stall: StallRecord | None, rules: Rules) -> Cost:
    found = [
        (tuple(run for run in runs if run.row == row and run.arithmetic == arithmetic), arithmetic)
        for arithmetic in sorted({run.arithmetic for run in runs if run.row == row})
    ]
    paired = [(own, _pairs(own, runs, baseline_of(row))) for own, _ in found]
    if not paired:
        return Cost(row, (), {}, stall, rules)
    own, pairs = max(paired, key=lambda each: (sum(len(cell) for cell in each[1].values()), len(each[0])))
    return Cost(row, own, {cell: pairs[cell] for cell in rules.cells if cell in pairs}, stall, rules)


def _pairs(own: Iterable[RunRecord], runs: Iterable[RunRecord], baseline: str) -> dict[Cell, tuple[float, ...]]:
    """Differences from the baseline's losses by cell, seed by seed."""
    base = {(run.cell, run.seed, run.arithmetic): run for run in runs if run.row == baseline}
    pairs: dict[Cell, tuple[float, ...]] = {}
    for run in sorted(own, key=lambda run: run.seed):
        other = base.get((run.cell, run.seed, run.arithmetic))
        if other is not None and run.row != baseline and not run.diverged and not other.diverged:
            pairs[run.cell] = (*pairs.get(run.cell, ()), run.loss - other.loss)
    return pairs
