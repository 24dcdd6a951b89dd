"""The recorder of a framework's callback: opened, continued and closed with its training."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from narrowgauge.gauges.recording.run_recorder import RunRecorder, folder_for


class RecordedCallback:
    """Hold the record of a training that a framework's callback follows.

    Attributes:
        recorder: the recorder, while a training runs.
    """

    def __init__(self, folder: str | Path | None = None, *, gauges_every: int = 0) -> None:
        self.folder = Path(folder) if folder else None
        self.recorder: RunRecorder | None = None
        self._options: dict[str, Any] = {"gauges_every": gauges_every}

    def _open(self, home: Any, model: nn.Module, optimizer: Any, step: int, **options: Any) -> None:
        """Record a training from ``step`` on, in the callback's folder or ``narrowgauge`` in
        ``home``.

        Warn if the ``max_grad_norm`` of the options and the optimizer's both clip.
        """
        limits = [options.get("max_grad_norm"), getattr(optimizer, "max_grad_norm", None)]
        if all(limits):
            text = (
                "Gradients are clipped twice: to {:g} by the Trainer and to {:g} by the optimizer."
            )
            warnings.warn(f"{text.format(*limits)} Leave the Trainer's limit out.", stacklevel=3)
        goes_on = step > 0
        folder = folder_for(self.folder or Path(str(home), "narrowgauge"), goes_on=goes_on)
        names = {"program": Path(sys.argv[0]).name, "callback": type(self).__name__}
        options |= {"resume": goes_on, "tables": {"recorder": names}, **self._options}
        self.recorder = RunRecorder(folder, model, optimizer, **options)
        if goes_on:
            self.recorder.go_back(step)

    def _close(self, finished: bool) -> None:
        recorder = self.recorder
        self.recorder = None
        if recorder is not None:
            recorder.close(finished)
