"""React to bad steps as ``--on-spike`` requests: report them, skip them, or stop.

A *spike* is judged against the steps before it. Unless spikes are only reported, a step is judged before its update. So a
spike changes no weight. Every decision is an event in the run folder. A stopped run has saved the step as skipped, so a
resume continues behind it.
"""

from __future__ import annotations

from collections.abc import Callable

from narrowgauge.analysis.spikes import SpikeJudge
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.gauges.recording.run_reporter import Reporter
from narrowgauge.gauges.recording.step_row import FailedSteps, is_rescaled, symptom, why_skipped
from narrowgauge.runs.events import Event
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.session import Session

_ADVICE = "Lower --lr or look at the data of that step; narrowgauge resume continues from the last checkpoint."


class DivergenceError(NarrowgaugeError):
    """Training was stopped at a bad step, as requested."""


class Recovery:
    """Decides on each step of a run, and reports every decision as an event."""

    def __init__(self, session: Session, reporter: Reporter) -> None:
        self.session, self.reporter, self.action = session, reporter, session.config.on_spike
        self.failures = FailedSteps()

    @property
    def judge(self) -> SpikeJudge | None:
        """Return the judge of each step before its update; ``None`` if spikes are only reported."""
        return None if self.action == "report" else self.reporter.alarms.judge

    def after(self, row: Row, save: Callable[[], None]) -> None:
        """Report a skipped step or a divergence, once the row is written. Stop if requested.

        Raises:
            DivergenceError: with ``--on-spike stop``.
        """
        session, spike, step = self.session, row.get("spike"), row["step"]
        # The loss scale of the step. The scaler itself may have changed it since.
        scaler, scale = session.optimizer.loss_scaler, session.reader.scale
        self.failures.take(row, scaler, scale)
        if row["skipped"] and spike is None:
            self.reporter.event(Event("skip", step, why_skipped(session.optimizer, session.here)))
        if row["skipped"] and spike is not None:
            message = f"{symptom(row)}; the batch was skipped and no weight changed"
            values = {"value": spike["value"], "threshold": spike["threshold"]}
            self.reporter.event(Event("skip", step, message, **values), shown=True)
        if event := self.failures.divergence(row, _ADVICE):
            self.reporter.event(event, shown=True)
        # An overflow is the loss scaler's to handle; a spike is not.
        is_overflow = spike is None and is_rescaled(row, scaler, scale)
        if self.action == "stop" and row["skipped"] and not is_overflow:
            save()
            session.saver.wait()
            self.reporter.event(Event("divergence", step, symptom(row), advice=_ADVICE))
            raise DivergenceError(f"stopped after step {step}: {symptom(row)}.", _ADVICE)
