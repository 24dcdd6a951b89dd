"""Recovery from a bad step: find where it went wrong, then do what ``--on-spike`` requests.

A *spike* is judged against the steps before it. Unless spikes are only reported, a step is judged before its update, so a step
that is skipped, rolled back or stopped at changes no weight. A value that is not finite is traced in a replay of
the step from the same weights and data, since such a step changes nothing. Every decision is an event in the run
folder, written before it takes effect, so that a resumed run decides the same. Once all rollbacks are used up the run stops as
with ``stop``: the step is saved as skipped, so that a resume continues behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from narrowgauge.analysis.spikes import StepJudgement
from narrowgauge.checkpoints.saving import go_back
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.gauges.nan_origin.replay import Replay, replay
from narrowgauge.gauges.recording.run_reporter import Reporter
from narrowgauge.gauges.recording.step_row import FailedSteps, is_rescaled, symptom, why_skipped
from narrowgauge.runs.events import Event
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.micro_batches import skipped_batches_of
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.step import differentiated

REPLAYS = 3
"""Failed steps per process that are replayed: each replay takes as long as some steps, and the first shows most."""

_BACK = "Lower --lr or look at the data of that step; narrowgauge resume continues from the last checkpoint."


class DivergenceError(NarrowgaugeError):
    """Training was stopped at a bad step, as requested."""


class Recovery:
    """Decides on each step of a run, and reports every decision as an event."""

    def __init__(self, session: Session, reporter: Reporter) -> None:
        self.session, self.reporter, self.action = session, reporter, session.config.on_spike
        self.replays, self.failures = 0, FailedSteps()
        self.stuck = ""  # why a step could not be rolled back
        session.skipped_batches = skipped_batches_of(reporter.rebuild().events)

    def judgement(self) -> StepJudgement | None:
        """Return what judges the next step before its update; ``None`` where spikes are only reported."""
        return None if self.action == "report" else StepJudgement(self.reporter.alarms.judge)

    def takes_over(self, row: Row) -> bool:
        """Investigate a failed step and roll back if requested, before its row is written.

        Returns:
            Whether the run was rolled back, so that the row must not be written.
        """
        self.stuck = ""
        scaler = self.session.optimizer.loss_scaler
        # What was applied although it failed has nothing to replay or to undo.
        failed = self.failures.take(row, scaler, self.session.loss_scale) and row["skipped"]
        if failed:
            self._investigate(row)
        if self.action == "rollback" and (failed or "spike" in row):
            return self._roll_back(row)
        return False

    def after(self, row: Row, save: Callable[[], None]) -> None:
        """Report a step that was not applied, or a divergence, once the row is written; stop if requested.

        Raises:
            DivergenceError: with ``--on-spike stop``, or where no rollback is left. The checkpoint has the step as skipped, so
                a resume continues behind it.
        """
        if row["skipped"]:
            self._tell_skip(row)
        if event := self.failures.divergence(row, _BACK):
            self.reporter.event(event, shown=True)
        if self.stuck or (self.action == "stop" and row["skipped"] and not self._is_rescaled(row)):
            save()
            self.session.saver.wait()
            message = f"{symptom(row)}{self.stuck}"
            self.reporter.event(Event("divergence", row["step"], message, advice=_BACK))
            raise DivergenceError(f"stopped after step {row['step']}: {message}.", _BACK)

    def _tell_skip(self, row: Row) -> None:
        spike = row.get("spike")
        if spike is None:
            self.reporter.event(Event("skip", row["step"], why_skipped(self.session.optimizer, self.session.here)))
        else:
            message = f"{symptom(row)}; the batch was skipped and no weight changed"
            values = {"value": spike["value"], "threshold": spike["threshold"]}
            self.reporter.event(Event("skip", row["step"], message, **values), shown=True)

    def _is_rescaled(self, row: Row) -> bool:
        """Return whether the loss scaler handles an overflow; it does not handle a spike."""
        return "spike" not in row and is_rescaled(row, self.session.optimizer.loss_scaler, self.session.loss_scale)

    def _roll_back(self, row: Row) -> bool:
        session, done = self.session, len(self.session.skipped_batches)
        if done >= session.config.max_rollbacks:
            self.stuck = f", and all {done} rollbacks are used up"
            return False
        # First: a run that is killed before the event is written comes to the same decision.
        session.saver.wait()
        to = go_back(session.folder, session.config.checkpoint_every, session.saver.ranks)
        spike = row.get("spike") or {}
        if to is None:
            self.stuck = ", and there is no good checkpoint to go back to"
            return False
        batches = row["step"] - to
        message = f"{symptom(row)}; the run goes back to step {to} and skips the data since"
        event = {"kind": "rollback", "step": row["step"], "message": message, "to_step": to, "batches": batches}
        event |= {name: spike[name] for name in ("value", "threshold") if name in spike}
        self.reporter.event(event, shown=True)
        session.skipped_batches = skipped_batches_of(self.reporter.go_back(to).events)
        session.restore(lambda path, reason: None)
        session.fingerprints.last = None  # of the step that was undone
        return True

    def _investigate(self, row: Row) -> None:
        """Replay the failed step, and report which operation made the first bad value."""
        self.replays += 1
        if self.replays > REPLAYS:
            return
        rank, result = replay_last_step(self.session, self.reporter.console.say)
        where = f"On rank {rank}: " if self.session.here.size > 1 and result.reproduced != "not" else ""
        bad = result.bad
        named: Any = (
            {} if bad is None else {"tensor": bad.tensor or None, "phase": bad.phase, "operation": bad.operation}
        )
        message = f"{where}{result.message}"
        self.reporter.event(Event("first_bad_value", row["step"], message, detector="replay", **named), shown=True)


def replay_last_step(session: Session, say: Callable[[str], object] = lambda _: None) -> tuple[int, Replay]:
    """Replay the step that was just taken and changed nothing, from the same weights, data and random bits.

    Returns:
        The rank at fault, and its result: the same on every rank.
    """
    gauges, linears = session.gauges, session.linears
    was_sampling, linears_step = gauges is not None and gauges.sampling, 0 if linears is None else linears.step
    losses: list[torch.Tensor] = []

    def scale(loss: torch.Tensor) -> torch.Tensor:
        # The scale of that step: the scaler has backed off since.
        return loss if session.optimizer.loss_scaler is None else loss * session.loss_scale

    def step() -> torch.Tensor:
        losses[:] = [torch.zeros((), dtype=torch.float32, device=session.device)]
        losses.extend(differentiated(session, scale))
        return torch.stack(losses).sum()

    session.step -= 1
    try:
        if gauges is not None:
            gauges.sampling = False
        result = replay(session.model, step, say=say, agree=lambda has_found: any(session.here.gather(has_found)))
    finally:
        session.step += 1
        session.reshard()
        if linears is not None:
            linears.step = linears_step
        if gauges is not None:
            gauges.sampling = was_sampling
    results = session.here.gather((all(math.isfinite(float(loss)) for loss in losses), result))
    rank = min(range(len(results)), key=lambda rank: _innocence(*results[rank]))
    return rank, results[rank][1]


def _innocence(is_finite: bool, result: Replay) -> tuple[bool, bool, bool]:
    """Order ranks: the one whose own step went wrong comes first; a sum carries its bad gradient to all others."""
    if result.bad is None:
        return True, is_finite, not result.found
    # A bad value that arrives in a sum is made by none of the model's modules.
    return False, is_finite, not result.bad.module
