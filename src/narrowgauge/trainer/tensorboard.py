"""The run in TensorBoard: scalars of every step, histograms and figures of sampled ones, events as text.

The run folder holds the same and more; this is for those who look at many tools' runs in one place.
"""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from narrowgauge.runs.events import Event
from narrowgauge.runs.readings import FIRST_EXPONENT, NUM_EXPONENTS, UPDATE_FIELDS, Row

_STEP = ("loss", "lr", "grad_norm", "tokens_per_second", "loss_scale", "saturated", "edq", "noise", "lost_fraction")
_EDGES = [float(FIRST_EXPONENT + k) for k in range(NUM_EXPONENTS + 1)]


class TensorBoard:
    """A writer of TensorBoard's event files.

    Args:
        folder: where they go; a run that goes on adds a file to it.
        step: steps done; what earlier files say of later ones is taken back.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self.folder = folder
        self.writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def go_back(self, step: int) -> None:
        """Take back what was written of the steps after ``step``."""
        self.writer.close()
        self.writer = SummaryWriter(str(self.folder), purge_step=step + 1)

    def step(self, row: Row) -> None:
        """The scalars of a step."""
        for name in _STEP:
            self._scalar(f"train/{name}", row.get(name), row["step"])

    def evaluation(self, row: Row) -> None:
        """The loss of an evaluation."""
        self._scalar("validation/loss", row["val_loss"], row["step"])

    def gauge(self, row: Row) -> None:
        """Histograms of binary exponents, EDQ by parameter, logits."""
        for kind, counts in row.get("histograms", {}).items():
            if total := sum(counts):
                middles = [_EDGES[k] + 0.5 for k in range(len(counts))]
                first = sum(m * c for m, c in zip(middles, counts, strict=True))
                second = sum(m * m * c for m, c in zip(middles, counts, strict=True))
                self.writer.add_histogram_raw(
                    f"exponents/{kind}", _EDGES[0], _EDGES[-1], total, first, second, _EDGES[1:], counts, row["step"]
                )
        place = list(UPDATE_FIELDS).index("edq")
        for name, values in row.get("updates", {}).items():
            self._scalar(f"edq/{name}", values[place], row["step"])
        for name, value in row.get("logits", {}).items():
            self._scalar(f"logits/{name}", value, row["step"])

    def event(self, event: Event) -> None:
        """An event as text."""
        advice = f" {event.advice}" if event.advice else ""
        self.writer.add_text(f"events/{event.kind}", event.message + advice, event.step)

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()

    def _scalar(self, name: str, value: float | None, step: int) -> None:
        if value is not None:
            self.writer.add_scalar(name, value, step)
