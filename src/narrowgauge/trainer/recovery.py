"""Recovery from a bad step: find where it went wrong, then do what ``--on-spike`` requests.

A *spike* is judged against the steps before it. Unless spikes are only reported, a step is judged before its update. So a
skipped, rolled back or stopped step changes no weight. A non-finite value is traced in a replay of
the step from the same weights and data, since such a step changes nothing. Every decision is an event in the run
folder. It is written before it takes effect, so that a resumed run decides the same. After the last rollback the run stops as
with ``stop``. The step is saved as skipped, so that a resume continues behind it.

A spike caused by the data recurs when the same batches are trained on again. So a rollback returns to the last checkpoint and
skips the batches between it and the spike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from narrowgauge.analysis.spikes import StepJudgement
from narrowgauge.checkpoints.saving import go_back
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.gauges.nan_origin.bad_value import BadValue
from narrowgauge.gauges.nan_origin.tracing import first_bad_value
from narrowgauge.gauges.recording.run_reporter import Reporter
from narrowgauge.gauges.recording.step_row import FailedSteps, is_rescaled, symptom, why_skipped
from narrowgauge.runs.events import Event
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.step import differentiated, unsampled

REPLAYS = 3
"""Failed steps per process that are replayed. A replay takes as long as some steps, and the first shows most."""

_NOT_REPRODUCED = (
    "The step is finite when repeated eagerly: a compiled kernel, a nondeterministic one or a hardware fault made the value. "
    "Resume from the last checkpoint, with --no-compile if it recurs; then test the machine."
)
_ADVICE = "Lower --lr or look at the data of that step; narrowgauge resume continues from the last checkpoint."


class DivergenceError(NarrowgaugeError):
    """Training was stopped at a bad step, as requested."""


def skipped_batches(events: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the rollbacks of a run, by its events: the step to which it went back, and the number of skipped batches.

    Example:
        >>> skipped_batches([{"kind": "rollback", "step": 108, "to_step": 100, "batches": 8}])
        [(100, 8)]
    """
    return [(event["to_step"], event["batches"]) for event in events if event.get("kind") == "rollback"]


class Recovery:
    """Decides on each step of a run, and reports every decision as an event."""

    def __init__(self, session: Session, reporter: Reporter) -> None:
        self.session, self.reporter, self.action = session, reporter, session.config.on_spike
        self.num_replays, self.failures = 0, FailedSteps()
        self.why_not_back = ""
        session.skipped = skipped_batches(reporter.rebuild().events)

    def judgement(self) -> StepJudgement | None:
        """Return the judgement of the next step before its update; ``None`` if spikes are only reported."""
        return None if self.action == "report" else StepJudgement(self.reporter.alarms.judge)

    def rolls_back(self, row: Row) -> bool:
        """Replay a failed step, and roll back if requested. An undone step is not recorded."""
        self.why_not_back = ""
        # A step applied despite its failure has nothing to replay or to undo.
        failed = self.failures.take(row, self.session.optimizer.loss_scaler, self._loss_scale()) and row["skipped"]
        if failed and self.num_replays < REPLAYS:
            self.num_replays += 1
            self._report_replay(row)
        return self.action == "rollback" and (failed or "spike" in row) and self._roll_back(row)

    def after(self, row: Row, save: Callable[[], None]) -> None:
        """Report a skipped step or a divergence, once the row is written. Stop if requested.

        Raises:
            DivergenceError: with ``--on-spike stop``, or without a rollback left. The checkpoint has the step as skipped, so
                a resume continues behind it.
        """
        session, spike = self.session, row.get("spike")
        if row["skipped"] and spike is None:
            self.reporter.event(Event("skip", row["step"], why_skipped(session.optimizer, session.here)))
        if row["skipped"] and spike is not None:
            message = f"{symptom(row)}; the batch was skipped and no weight changed"
            values = {"value": spike["value"], "threshold": spike["threshold"]}
            self.reporter.event(Event("skip", row["step"], message, **values), shown=True)
        if event := self.failures.divergence(row, _ADVICE):
            self.reporter.event(event, shown=True)
        # An overflow is the loss scaler's to handle; a spike is not.
        rescaled = spike is None and is_rescaled(row, session.optimizer.loss_scaler, self._loss_scale())
        if self.why_not_back or (self.action == "stop" and row["skipped"] and not rescaled):
            save()
            session.saver.wait()
            message = f"{symptom(row)}{self.why_not_back}"
            self.reporter.event(Event("divergence", row["step"], message, advice=_ADVICE))
            raise DivergenceError(f"stopped after step {row['step']}: {message}.", _ADVICE)

    def _loss_scale(self) -> float:
        """Return the loss scale of the last step. The scaler itself may have changed it since."""
        return self.session.reader.scale

    def _roll_back(self, row: Row) -> bool:
        session, num_done = self.session, len(self.session.skipped)
        if num_done >= session.config.max_rollbacks:
            self.why_not_back = f", and all {num_done} rollbacks are used up"
            return False
        # Do this first: a run killed before the event is written comes to the same decision.
        session.saver.wait()
        to = go_back(session.folder, session.config.checkpoint_every, session.saver.ranks)
        if to is None:
            self.why_not_back = ", and there is no good checkpoint to go back to"
            return False
        spike = row.get("spike") or {}
        message = f"{symptom(row)}; the run goes back to step {to} and skips the data since"
        event = {
            "kind": "rollback",
            "step": row["step"],
            "message": message,
            "to_step": to,
            "batches": row["step"] - to,
        }
        self.reporter.event(event | {name: spike[name] for name in ("value", "threshold") if name in spike}, shown=True)
        session.skipped = skipped_batches(self.reporter.go_back(to).events)
        session.restore(lambda path, reason: None)
        session.fingerprints.last = None  # of the step that was undone
        return True

    def _report_replay(self, row: Row) -> None:
        """Replay the failed step, and report which operation made the first bad value."""
        self.reporter.console.say("Repeating the step eagerly with every operation traced.")
        rank, bad = replay_last_step(self.session, self._loss_scale())
        event = Event("first_bad_value", row["step"], _NOT_REPRODUCED, detector="replay")
        if bad is not None:
            where = f"On rank {rank}: " if self.session.here.size > 1 else ""
            event = replace(event, message=f"{where}{bad.message}", tensor=bad.tensor or None)
            event = replace(event, phase=bad.phase, operation=bad.operation)
        self.reporter.event(event, shown=True)


def replay_last_step(session: Session, loss_scale: float) -> tuple[int, BadValue | None]:
    """Replay the last step, which changed nothing, from the same weights, data, random bits and loss scale.

    Returns:
        The rank at fault, and its first bad value, if the eager step has one. Both are the same on every rank.
    """
    losses: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        losses[:] = [torch.zeros((), dtype=torch.float32, device=session.device)]
        losses.extend(differentiated(session, lambda loss: loss * loss_scale))
        return torch.stack(losses).sum()

    linears_step = 0 if session.linears is None else session.linears.step
    session.step -= 1
    try:
        with unsampled(session.gauges):
            bad = first_bad_value(session.model, step)
    finally:
        session.step += 1
        session.reshard()
        if session.linears is not None:
            session.linears.step = linears_step

    is_finite = all(math.isfinite(float(loss)) for loss in losses)
    # A sum carries one rank's bad gradient to all. So prefer a rank whose own loss failed, and a value made in a module.
    is_elsewhere = bad is not None and not bad.module
    results = session.here.gather((bad is None, is_finite, is_elsewhere, bad))
    rank = min(range(len(results)), key=lambda rank: results[rank][:3])
    return rank, results[rank][3]
