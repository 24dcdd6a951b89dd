"""Statistics of one run for a comparison: final loss, divergence, and the last values of the audit.

The final loss is not enough. A recipe that loses its updates falls behind late, at small learning rates. The large first steps
dominate sums over a run, so we read the audit's last values instead.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import islice

import numpy as np

from narrowgauge.analysis.columns import column
from narrowgauge.analysis.comparison.labels import seed_of
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import finite_number, number

MAX_LOSS_RISE = 0.2
"""A run has diverged if its loss rises by more than this fraction from start to end."""


def divergence(run: Run) -> str:
    """Describe how a run diverged; empty if it did not."""
    for event in run.events:
        if event.get("kind") == "divergence":
            return f"at step {event.get('step')}: {event.get('message', '')}"
    first_losses, last_losses = (
        [float(row["loss"]) for row in islice((row for row in rows if row.get("loss") is not None), 5)]
        for rows in (run.steps, reversed(run.steps))
    )
    end = next(iter(last_losses), None) if run.summary is None else number(run.summary.get("val_loss"))
    if end is not None and not math.isfinite(end):
        return f"its {'loss' if run.summary is None else 'validation loss'} is {end}"
    if len(run.steps) >= 10 and first_losses:
        first, last = statistics.median(first_losses), statistics.median(last_losses)
        if last - first > MAX_LOSS_RISE * abs(first):
            return f"its loss began at {first:.2f} and ended at {last:.2f}"
    return ""


@dataclass(frozen=True)
class RunStats:
    """Hold a run of a comparison and its shared statistics.

    Args:
        label: label of its recipe, as printed.
        divergence: how the run diverged; empty if it did not.
        late_edq: median of the last tenth of audited values (at least three), else the summary's value.
    """

    label: str
    seed: int
    run: Run
    divergence: str
    late_edq: float | None

    @classmethod
    def of(cls, run: Run, label: str) -> RunStats:
        values = column(run, "steps", "edq").finite
        late = float(np.median(values[-max(3, len(values) // 10) :])) if len(values) else None
        late = finite_number((run.summary or {}).get("edq")) if late is None else late
        return cls(label, seed_of(run), run, divergence(run), late)

    @property
    def counts(self) -> bool:
        """Return whether averages may include this run."""
        return self.run.summary is not None and not self.divergence and self.run.summary.get("val_loss") is not None

    @property
    def data(self) -> str | None:
        """Return the fingerprint of the data and their split; ``None`` if it is not recorded."""
        return (self.run.run.get("data") or {}).get("fingerprint")

    @property
    def loss(self) -> float:
        """Return the last validation loss. Only a run that counts has one."""
        assert self.run.summary is not None
        return float(self.run.summary["val_loss"])
