"""TensorBoard: scalars of every step, histograms and metrics of sampled steps, events as text.

The run folder holds the same and more; this is for those who compare runs of several tools in one place. The tags are in
:mod:`narrowgauge.runs.schema`.
"""

from __future__ import annotations

import time
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from narrowgauge.runs.events import Event
from narrowgauge.runs.loggers.logger import gauge_numbers, numbers_of
from narrowgauge.runs.schema import EVAL, FIRST_EXPONENT, GAUGE, NUM_EXPONENTS, STEP, Row

_EDGES = [float(FIRST_EXPONENT + k) for k in range(NUM_EXPONENTS + 1)]


class TensorBoard:
    """Writes TensorBoard's event files to ``tensorboard/`` in the run folder.

    A resumed run adds a file, and TensorBoard discards the steps that come again.
    """

    def __init__(self, folder: Path, settings: Row, step: int = 0) -> None:
        self.folder = folder / "tensorboard"
        self.writer = self._next_file(step + 1 if step else None)

    def go_back(self, step: int) -> None:
        self.writer.close()
        self.writer = self._next_file(step + 1)

    def _next_file(self, purge_step: int | None) -> SummaryWriter:
        """A file that TensorBoard reads after the others of the folder.

        It reads them by name: the second in which a file was made, then host, process and a counter as text, in which 10 is
        before 9 and process 1000 before 999. So no two files are made in the same second.
        """
        now = time.time()
        if any(self.folder.glob(f"events.out.tfevents.{int(now):010d}.*")):
            time.sleep(1.01 - now % 1.0)
        return SummaryWriter(str(self.folder), purge_step=purge_step)

    def step(self, row: Row) -> None:
        self._scalars(numbers_of(STEP, row), row["step"])

    def evaluation(self, row: Row) -> None:
        self._scalars(numbers_of(EVAL, row), row["step"])

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
        self._scalars(gauge_numbers(row), row["step"])

    def event(self, event: Event) -> None:
        self.writer.add_text(f"events/{event.kind}", event.sentence, event.step)

    def close(self) -> None:
        self.writer.close()

    def _scalars(self, numbers: dict[str, float], step: int) -> None:
        for tag, value in numbers.items():
            self.writer.add_scalar(tag, value, step)
