"""What a run does about a step that went wrong: look where it began, and then what was asked for.

A *spike* is judged by the steps before it. Unless it is only to be reported, the judgement comes before the update: the
weights of a step that is skipped, rolled back or stopped at are those from before it. A value that is not finite is looked
for in a replay of the step, from the same weights and data, which is possible since such a step changed nothing. Every
decision is an event of the run folder, written before it is acted on, so that a resume decides alike. A run that may not go
back any more stops as one that is told to: the step is left out and saved as such, so that a resume gets further.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from narrowgauge.comparison.labels import counted
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.gauges.nan_origin.replay import replay
from narrowgauge.monitor.spikes import Spike, StepJudgement
from narrowgauge.runs.events import Event
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.checkpoint import go_back
from narrowgauge.trainer.detours import detours_of
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.sinks import Reporter
from narrowgauge.trainer.step import losses

FAILURES = 25
"""Failed steps in a row after which a run is said to go nowhere."""

REPLAYS = 3
"""Failed steps of one sitting that are done again: each costs some steps, and the first tells most."""

_BACK = "Lower --lr or look at the data of that step; narrowgauge resume goes on from the last checkpoint."


class DivergenceError(NarrowgaugeError):
    """Training was stopped, as asked, where it went wrong."""


class Recovery:
    """Decides on each step of a run.

    Args:
        session: the run.
        reporter: who writes decisions down.
    """

    def __init__(self, session: Session, reporter: Reporter) -> None:
        self.session, self.reporter, self.action = session, reporter, session.config.on_spike
        self.replays = self.failures = 0
        self.stuck = ""  # why a step that asked for a rollback got none
        session.detours = detours_of(reporter.rebuild().events)

    def judgement(self) -> StepJudgement | None:
        """What judges the next step before its update; ``None`` where spikes are only reported."""
        return None if self.action == "report" else StepJudgement(self.reporter.alarms.judge)

    def takes_over(self, row: Row) -> bool:
        """Do what is to be done about a step, before its row is written.

        Args:
            row: of the step that was just taken.
        Returns:
            Whether the run went back, and the row is not to be written.
        """
        self.stuck = ""
        failed = row["skipped"] and not _is_finite(row) and not self._is_rescaled(row)
        self.failures = self.failures + 1 if failed else 0
        if failed:
            self._investigate(row)
        if self.action == "rollback" and (failed or "spike" in row):
            return self._roll_back(row)
        return False

    def after(self, row: Row, save: Callable[[], None]) -> None:
        """Tell of a step that changed nothing, once its row is written; stop if that was asked for.

        Args:
            row: of the step.
            save: writes a checkpoint.
        Raises:
            DivergenceError: as asked with ``--on-spike stop``, or where no rollback is left. What is saved has left the
                step out, so a resume goes on behind it.
        """
        if not row["skipped"]:
            return
        spike = row.get("spike")
        if spike is None:
            self.reporter.event(Event("skip", row["step"], self._why_skipped()))
        else:
            told = f"{_told(row)}; the batch was left out and nothing was changed"
            figures = {"value": spike["value"], "threshold": spike["threshold"]}
            self.reporter.event(Event("skip", row["step"], told, **figures), shown=True)
        if self.failures == FAILURES:
            told = f"the last {FAILURES} steps changed nothing: {_told(row)}"
            self.reporter.event(Event("divergence", row["step"], told, advice=_BACK), shown=True)
        if self.stuck or (self.action == "stop" and (spike is not None or not self._is_rescaled(row))):
            save()
            told = f"{_told(row)}{self.stuck}"
            self.reporter.event(Event("divergence", row["step"], told, advice=_BACK))
            raise DivergenceError(f"stopped after step {row['step']}: {told}.", _BACK)

    def _is_rescaled(self, row: Row) -> bool:
        """Whether an overflow is what dynamic loss scaling is for, and costs no more than the step."""
        scaler = self.session.optimizer.loss_scaler
        return scaler is not None and math.isfinite(row["loss"]) and self.session.loss_scale > scaler.floor

    def _roll_back(self, row: Row) -> bool:
        session, done = self.session, len(self.session.detours)
        if done >= session.config.max_rollbacks:
            self.stuck = f", and {counted(done, 'rollback')} {'is' if done == 1 else 'are'} spent"
            return False
        # First of all: a run that is killed before the event is written comes to the same decision.
        to, spike = go_back(session.folder, session.config.checkpoint_every), row.get("spike") or {}
        if to is None:
            self.stuck = ", and there is no good checkpoint to go back to"
            return False
        batches = row["step"] - to
        event = {
            "kind": "rollback",
            "step": row["step"],
            "message": f"{_told(row)}; the run goes back to step {to} and round the {_batches(batches)} since",
            "to_step": to,
            "batches": batches,
            **{name: spike[name] for name in ("value", "threshold") if name in spike},
        }
        self.reporter.event(event, shown=True)
        session.detours = detours_of(self.reporter.go_back(to).events)
        session.restore(lambda path, reason: None)
        return True

    def _investigate(self, row: Row) -> None:
        """Do the failed step again, and say which operation made the first bad value."""
        if self.replays >= REPLAYS:
            return
        self.replays += 1
        found = replay_last_step(self.session, self.reporter.console.say)
        place = found.bad.tensor if found.bad is not None else None
        self.reporter.event(Event("first_bad_value", row["step"], found.message, tensor=place or None), shown=True)

    def _why_skipped(self) -> str:
        """What overflowed, and the scale that goes on."""
        optimizer = self.session.optimizer
        names, scaler = optimizer.last_overflow, optimizer.loss_scaler
        where = f" in '{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""
        scale = "" if scaler is None else f"; the loss scale is now {float(scaler.scale_tensor):g}"
        return f"gradients are not finite{where}; nothing was changed{scale}"


def replay_last_step(session: Session, say: Callable[[str], object] = lambda _: None) -> Any:
    """Do the step again that changed nothing, from the same weights, data and random bits.

    Args:
        session: just after the step.
        say: gets a sentence for each attempt.
    Returns:
        A :class:`narrowgauge.gauges.nan_origin.replay.Replay`.
    """
    gauges, linears, scaler = session.gauges, session.linears, session.optimizer.loss_scaler
    was_sampling = gauges is not None and gauges.sampling
    was_at = 0 if linears is None else linears.step

    def step() -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=session.device)
        for loss in losses(session):
            # The scale of that step: the scaler has backed off since.
            (loss if scaler is None else loss * session.loss_scale).backward()
            total = total + loss.detach()
        return total

    session.step -= 1
    try:
        if gauges is not None:
            gauges.sampling = False
        return replay(session.model, step, say=say)
    finally:
        session.step += 1
        if linears is not None:
            linears.step = was_at
        if gauges is not None:
            gauges.sampling = was_sampling


def _batches(number: int) -> str:
    return "batch" if number == 1 else f"{number} batches"


def _is_finite(row: Row) -> bool:
    norm = row["grad_norm"]
    return math.isfinite(row["loss"]) and (norm is None or math.isfinite(norm))


def _told(row: Row) -> str:
    """What was wrong with a step, without a full stop."""
    spike = row.get("spike")
    if spike is None:
        return f"the loss is {row['loss']:g} and the gradient norm {row['grad_norm']}"
    return Spike(**spike).message
