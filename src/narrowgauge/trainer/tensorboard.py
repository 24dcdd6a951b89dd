"""TensorBoard: scalars of every step, histograms and metrics of sampled steps, events as text.

The run folder holds the same and more; this is for those who compare runs of several tools in one place. The tags are in
:mod:`narrowgauge.runs.schema`.
"""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from narrowgauge.runs.events import Event
from narrowgauge.runs.schema import EVAL, FIRST_EXPONENT, GAUGE, METRICS, NUM_EXPONENTS, STEP, Column, Row, metric_of

_EDGES = [float(FIRST_EXPONENT + k) for k in range(NUM_EXPONENTS + 1)]


class TensorBoard:
    """Writes TensorBoard's event files.

    Args:
        folder: where they go; a resumed run adds a file to it.
        step: steps done; TensorBoard discards what earlier files hold of later steps.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self.folder = folder
        self.writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def go_back(self, step: int) -> None:
        """Discard what was written of the steps after ``step``."""
        self.writer.close()
        self.writer = SummaryWriter(str(self.folder), purge_step=step + 1)

    def step(self, row: Row) -> None:
        """Write the scalars of a step."""
        self._scalars(STEP, row)

    def evaluation(self, row: Row) -> None:
        """Write the validation loss."""
        self._scalars(EVAL, row)

    def gauge(self, row: Row) -> None:
        """Write histograms of binary exponents, tagged metrics of each tensor, and logits."""
        for kind, counts in row.get("histograms", {}).items():
            if total := sum(counts):
                middles = [_EDGES[k] + 0.5 for k in range(len(counts))]
                first = sum(m * c for m, c in zip(middles, counts, strict=True))
                second = sum(m * m * c for m, c in zip(middles, counts, strict=True))
                tag = GAUGE["histograms"].tag.format(kind)
                self.writer.add_histogram_raw(
                    tag, _EDGES[0], _EDGES[-1], total, first, second, _EDGES[1:], counts, row["step"]
                )
        for table, metrics in METRICS.items():
            for metric in filter(lambda column: column.tag, metrics.values()):
                for name in row.get(table, {}):
                    self._scalar(metric.tag.format(name), metric_of(row, table, name, metric.name), row["step"])
        for name, value in row.get("logits", {}).items():
            self._scalar(GAUGE["logits"].tag.format(name), value, row["step"])

    def event(self, event: Event) -> None:
        """Write an event as text."""
        advice = f" {event.advice}" if event.advice else ""
        self.writer.add_text(f"events/{event.kind}", event.message + advice, event.step)

    def close(self) -> None:
        """Flush and close the file."""
        self.writer.close()

    def _scalars(self, table: dict[str, Column], row: Row) -> None:
        for column in table.values():
            if column.tag:
                self._scalar(column.tag, row.get(column.name), row["step"])

    def _scalar(self, name: str, value: float | None, step: int) -> None:
        if value is not None:
            self.writer.add_scalar(name, value, step)
