"""What the callbacks of frameworks share that compute steps again: a watcher for the length of a training, and its findings."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from narrowgauge.gauges.recording.run_recorder import RunNotice
from narrowgauge.optim.audit import unwrapped
from narrowgauge.recompute.departures import findings_of, unchecked
from narrowgauge.recompute.piece_results import PieceResult
from narrowgauge.recompute.step_watcher import StepWatcher
from narrowgauge.recompute.task import Task
from narrowgauge.runs.finding import Finding
from narrowgauge.spec.update_rules import Range


class AuditedSteps:
    """Computes some steps of a framework's training again.

    Args:
        every: steps between audited ones; the second is one too.
        task: what the training means to do; ``None`` takes what the framework's settings declare.

    Attributes:
        findings: what departed, each once; a :class:`narrowgauge.RunNotice` is warned of each that is no note.
        unchecked: why pieces were not checked, by piece.
    """

    def __init__(self, every: int = 100, task: Task | None = None) -> None:
        Range(above=True).check("every", every)
        self.every, self.task = every, task
        self.findings: list[Finding] = []
        self.unchecked: dict[str, str] = {}
        self._watcher: StepWatcher | None = None

    def begin(self, model: nn.Module, optimizer: Any, declared: Task, done: int = 0) -> None:
        """Watch a training; ``declared`` is what the framework's settings say, ``done`` the steps of a loaded checkpoint."""
        self.end()
        self._watcher = StepWatcher(model, unwrapped(optimizer), self.every, self._take, self.task or declared)
        if done:
            self._watcher.go_on_from(done)

    def end(self) -> None:
        """Remove every hook."""
        if self._watcher is not None:
            self._watcher.remove()
            self._watcher = None

    def _take(self, step: int, results: list[PieceResult]) -> None:
        self.unchecked.update(unchecked(results))
        for each in findings_of(results):
            if all((each.name, each.where) != (known.name, known.where) for known in self.findings):
                self.findings.append(each)
                if each.severity != "note":
                    where = f" {each.where}" if each.where else ""
                    warnings.warn(f"step {each.step}: {each.name}{where}: {each.message}", RunNotice, stacklevel=2)
