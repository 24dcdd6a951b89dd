"""What a verdict rests on, and the classes that its sentences are about.

A recipe is *out* for what can be shown of it: it diverged, its updates get lost, it skipped steps, or it ends worse by more
than a hundredth. Of the others one ends *worse* or *better* where its whole interval lies on one side of zero, it is *open*
where these seeds rule out neither a harmless loss nor one of more than a hundredth, and *within the noise* otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from narrowgauge.comparison.caveats import steps_asked
from narrowgauge.comparison.intervals import Difference
from narrowgauge.comparison.labels import counted
from narrowgauge.comparison.run_stats import Trial, late_reading
from narrowgauge.runs.schema import Row
from narrowgauge.spec.significance import MIN_EDQ

MOST_NOISE = 1.0
"""Above it more arrives beside an update than the update itself."""
MOST_SKIPPED = 0.05
"""The share of skipped steps above which a recipe is not to be used; a loss scale finds its place in fewer."""
BEARABLE = 0.01
"""A certain loss up to this share of the yardstick's is a price that may be worth paying, and is told as one."""
WIDE = 0.01
"""An interval whose half is more than this share of the yardstick's loss says little."""


@dataclass(frozen=True)
class Evidence:
    """What a verdict rests on.

    Args:
        groups: the runs of each recipe.
        rows: of the comparison, by recipe.
        yardstick: the recipe that the others are held against, if any run counts.
        differences: from it, by recipe.
        at_time: losses at equal time, a row per recipe.
    """

    groups: Mapping[str, Sequence[Trial]]
    rows: Mapping[str, Row]
    yardstick: str | None
    differences: Mapping[str, Difference]
    at_time: Sequence[Row]

    @cached_property
    def faults(self) -> dict[str, list[str]]:
        """Why recipes are not to be used: ends of sentences that begin with a recipe's name."""
        found = {recipe: faults(group) for recipe, group in self.groups.items()}
        after = "" if self.has_equal_steps else ", after another number of steps"
        for recipe, difference in self.worse.items():
            if difference.mean > BEARABLE * abs(self.loss):
                share = f"{difference.mean / abs(self.loss):+.1%}" if self.loss else ""
                found[recipe].append(f"ends worse than {self.yardstick} by {difference.text} ({share}{after})")
        return found

    @cached_property
    def worse(self) -> dict[str, Difference]:
        """Recipes whose whole interval lies above the yardstick's loss."""
        return {recipe: d for recipe, d in self._told_apart.items() if d.is_worse(self.loss)}

    @cached_property
    def better(self) -> dict[str, Difference]:
        """Recipes whose whole interval lies below the yardstick's loss."""
        return {recipe: d for recipe, d in self._told_apart.items() if d.is_better(self.loss)}

    @cached_property
    def open(self) -> dict[str, Difference]:
        """Recipes of which so few seeds do not say whether they end worse by more than is bearable."""
        bound = BEARABLE * abs(self.loss)
        return {r: d for r, d in self._told_apart.items() if r in self.sound and d.may_be_worse(bound)}

    @property
    def _told_apart(self) -> dict[str, Difference]:
        return {recipe: d for recipe, d in self.differences.items() if math.isfinite(d.half)}

    @cached_property
    def sound(self) -> list[str]:
        """Recipes with a loss, without a fault, and not certainly worse."""
        fine = [recipe for recipe in self.groups if not self.faults[recipe] and recipe not in self.worse]
        return [recipe for recipe in fine if self.rows[recipe]["num_seeds"]]

    @property
    def fit(self) -> list[str]:
        """Sound recipes that are known to end no worse than is bearable; the yardstick, if it is sound."""
        known = {self.yardstick, *(recipe for recipe, d in self.differences.items() if d.num_pairs > 1)}
        return [recipe for recipe in self.sound if recipe in known and recipe not in self.open]

    @property
    def loss(self) -> float:
        """The yardstick's."""
        return float(self.rows[self.yardstick]["val_loss"] or 0.0) if self.yardstick is not None else 0.0

    @property
    def has_equal_steps(self) -> bool:
        """Whether each recipe was asked for as many steps as the others."""
        return len(set(steps_asked(self.groups).values())) == 1

    @property
    def has_intervals(self) -> bool:
        """Whether any recipe has two seeds in common with the yardstick."""
        return any(difference.num_pairs > 1 for difference in self.differences.values())

    def price(self, recipe: str) -> tuple[float, float]:
        """What recipes are ordered by: bytes per parameter, then time."""
        row = self.rows[recipe]
        # Less than a tenth of a byte is a few vectors, not a saving.
        size = math.inf if row["bytes_per_param"] is None else round(row["bytes_per_param"], 1)
        return size, -(row["tokens_per_second"] or 0.0)

    def has_size(self, recipe: str) -> bool:
        """Whether its bytes are known."""
        return self.rows[recipe]["bytes_per_param"] is not None

    def size(self, recipe: str) -> str:
        """Its bytes in words."""
        known = self.rows[recipe]["bytes_per_param"]
        return "an unknown number of bytes per parameter" if known is None else f"{known:.2f} bytes per parameter"

    def noise(self, recipe: str) -> float:
        """The late noise of its updates; 0 where it is not known."""
        return late_reading(self.groups[recipe], "noise") or 0.0


def faults(group: Sequence[Trial]) -> list[str]:
    """Why a recipe is not to be used, whatever its loss: the ends of a sentence that begins with its name."""
    found = []
    if diverged := [t for t in group if t.diverged]:
        where = f"diverged in {len(diverged)} of {counted(len(group), 'run')}"
        found.append(f"{where} (seed {diverged[0].seed}, {diverged[0].diverged.strip().rstrip('.')})")
    edq, lost = late_reading(group, "edq"), late_reading(group, "lost_fraction")
    if edq is not None and edq < MIN_EDQ:
        more = "" if lost is None else f"; {lost:.0%} of the changes never arrived"
        found.append(f"loses its updates (a late EDQ of {edq:.2f}, where 1 loses nothing{more})")
    ended = [(t.run.summary, len(t.run.steps)) for t in group if t.counts and t.run.summary is not None]
    taken = sum(int(summary.get("steps") or length) for summary, length in ended)
    skipped = sum(int(summary.get("num_skipped") or 0) for summary, _ in ended)
    if taken and skipped > MOST_SKIPPED * taken:
        found.append(f"skipped {skipped:,} of its {taken:,} steps")
    return found
