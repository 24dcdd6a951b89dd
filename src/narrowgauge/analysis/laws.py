"""The table of laws: each reads the snapshots of a run so far, and yields readings.

A watch asks the table while its loop runs, and the diagnosis asks it of the record. A law counts
over the run what it must remember, in a value of its own. So a resumed run restores what its laws
remember from its own record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from narrowgauge.analysis.reading import Reading
from narrowgauge.analysis.row_laws import LOSS_LAWS, ROW_LAWS
from narrowgauge.analysis.snapshot import Facts, Snapshot
from narrowgauge.analysis.step_laws import STEP_LAWS, Counts, Law
from narrowgauge.analysis.thresholds import TWICE


class Laws:
    """Ask every law about each snapshot of a run.

    Invariant: the readings depend only on the facts and on the snapshots, in their order.

    Args:
        facts: what is the same in every step; of a record, ``Facts.of_run``.

    Example:
        >>> laws = Laws(Facts(limit=1.0))
        >>> [reading.what for reading in laws.read(Snapshot(1, norm=3.0))]
        ['clip-norm']
        >>> [reading.what for reading in laws.read(Snapshot(2, norm=3.0))]
        []
    """

    def __init__(self, facts: Facts | None = None) -> None:
        self.facts = facts or Facts()
        self.restart()

    def restart(self, snapshots: Iterable[Snapshot] = ()) -> None:
        """Forget all, and remember these snapshots of the same run."""
        self._counts: dict[Law, Counts] = {
            law: defaultdict(int) for law in (*STEP_LAWS, *LOSS_LAWS, *ROW_LAWS)
        }
        self._told: dict[tuple[str, ...], float] = {}
        for now in snapshots:
            for _ in self.read(now):
                pass

    def read(self, now: Snapshot) -> Iterator[Reading]:
        """Yield the new readings of a snapshot; pass snapshots in the order of their steps."""
        for law in (*STEP_LAWS, *LOSS_LAWS):
            yield from self.new(law(now, self.facts, self._counts[law]))
        for law in ROW_LAWS:
            yield from self._heeded(law(now, self.facts, self._counts[law]))

    def new(self, readings: Iterable[Reading]) -> Iterator[Reading]:
        """Yield what is new of a tensor: the first reading of a kind, and one that is twice as far
        beyond its bound.
        """
        for reading in self._heeded(readings):
            place = (*reading.cause, reading.tensor)
            if reading.excess > TWICE * self._told.get(place, -1.0):
                self._told[place] = reading.excess
                yield reading

    def _heeded(self, readings: Iterable[Reading]) -> Iterator[Reading]:
        for reading in readings:
            if reading.what not in self.facts.ignored:
                yield reading
