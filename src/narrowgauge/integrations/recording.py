"""What the callbacks of frameworks share: a recorder that begins, continues and ends with a training."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from narrowgauge.measuring.watch.recorder import RunRecorder, folder_for


class RecordedCallback:
    """Hold the record of a training that a framework's callback follows.

    Args:
        folder: the run folder; ``None`` takes ``narrowgauge`` in the framework's own. A new
            training never overwrites a record: it takes ``folder-2``, ``folder-3`` …. A resumed one
            continues in the last of them.
    Attributes:
        recorder: the recorder, while a training runs.
        tokens: trained on since the last row.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder) if folder else None
        self.recorder: RunRecorder | None = None
        self.tokens = 0
        self._undo = ExitStack()

    def _open(self, home: Any, model: nn.Module, optimizer: Any, step: int, **options: Any) -> None:
        """Record a training from ``step`` on. End the record of one that was interrupted."""
        self._close(finished=False)
        self.tokens = 0
        goes_on = step > 0
        folder = folder_for(self.folder or Path(str(home), "narrowgauge"), goes_on=goes_on)
        self.recorder = RunRecorder(folder, model, optimizer, resume=goes_on, **options)
        if goes_on:
            self.recorder.go_back(step)

    def _step(self, loss: float | Tensor | None, **columns: Any) -> None:
        """Record a step, with the tokens since the last one."""
        if self.recorder is not None:
            self.recorder.step(loss, tokens=self.tokens or None, **columns)
        self.tokens = 0

    def _evaluate(self, loss: float | Tensor | None) -> None:
        if self.recorder is not None and loss is not None:
            self.recorder.evaluate(loss)

    def _close(self, finished: bool) -> None:
        self._undo.close()
        recorder = self.recorder
        self.recorder = None
        if recorder is not None:
            recorder.close(finished)
