"""The record of a loop that is not the trainer's: its rows, numbered and timed, with what the optimizers tell of each step.

:class:`narrowgauge.RunRecorder` and the log of :func:`narrowgauge.compare` are two ways to call it. It has nothing of its own to
record: it reads after each step what the trainer reads (the audit, skipped steps, the loss scale, the gauges), and hands the row
to the trainer's :class:`~narrowgauge.trainer.sinks.Reporter`, which writes it, runs the detectors and feeds the loggers.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.distributed.ranks import Ranks
from narrowgauge.gauges.attach import Gauges, attach_gauges
from narrowgauge.matmul.swapping import linears_of
from narrowgauge.numerics.shards import local_of
from narrowgauge.numerics.update_metrics import UPDATE_SUMS
from narrowgauge.optim.audit import Alarm, figures_of, joined_over_ranks, unwrapped
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import read_run
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.failed_steps import FailedSteps
from narrowgauge.trainer.readings import columns_of_step, summary_of, why_skipped
from narrowgauge.trainer.silence import SilentScreen
from narrowgauge.trainer.sinks import Reporter

_GO_BACK = "Lower the learning rate or look at the data of that step, and go on from the last good checkpoint."


class RunNotice(UserWarning):
    """Something in a recorded loop that its user should look at; it is in ``events.jsonl`` too."""


class Notices(SilentScreen):
    """Shows events as warnings, and nothing else: the loop has its own display."""

    def say(self, line: str) -> None:
        """Warn."""
        warnings.warn(line, RunNotice, stacklevel=6)


class Watched:
    """An optimizer of a loop, read after each of its steps.

    Args:
        model: that it trains.
        optimizer: one of Narrowgauge's, or any of ``torch.optim``'s, also inside a framework's; only ours has an audit.
        is_known: another one reads this optimizer, so that this one has gauges alone.
    """

    def __init__(self, model: nn.Module, optimizer: Any, is_known: bool = False) -> None:
        self.optimizer, self.linears, self._is_known = unwrapped(optimizer), linears_of(model), is_known
        self.gauges: Gauges | None = None
        self.was_skipped = False
        self.scale = 1.0
        """The loss scale in the last step."""
        self.restart()

    @property
    def ours(self) -> Optimizer | None:
        """The optimizer, if it is one of Narrowgauge's that is read here."""
        return self.optimizer if isinstance(self.optimizer, Optimizer) and not self._is_known else None

    def restart(self, step: int | None = None) -> None:
        """Read on from the optimizer's present state, which is that after ``step`` steps."""
        self._num_skipped = 0 if self.ours is None else self.ours.num_skipped
        self._scale = self._scale_now()
        if self.gauges is not None and step is not None:
            self.gauges.restart(step)

    def read(self, step: int) -> tuple[Row, Tensor | None]:
        """The columns that the optimizer and the narrow layers tell of the last step, and the audit's sums.

        Args:
            step: number of that step, for a model without narrow layers.
        """
        group = self.optimizer.param_groups[0]
        row: Row = {"lr": float(group["lr"]) / float(group.get("lr_factor", 1.0))}
        if self.ours is None:
            return row, None
        self.ours.settle()
        self.was_skipped, self._num_skipped = self.ours.num_skipped > self._num_skipped, self.ours.num_skipped
        self.scale, self._scale = self._scale, self._scale_now()
        row["skipped"] = self.was_skipped
        if self.ours.grad_norm is not None:
            row["grad_norm"] = float(self.ours.grad_norm)
        columns, sums = columns_of_step(self.ours, self.linears, self.linears.step if self.linears else step)
        return row | columns, sums

    def _scale_now(self) -> float:
        scaler = None if self.ours is None else self.ours.loss_scaler
        return 1.0 if scaler is None else float(scaler.scale_tensor)

    def bytes_per_param(self) -> float:
        """Bytes of weights, gradients and states per parameter, of any optimizer as ours counts them."""
        if self.ours is not None:
            return self.ours.bytes_per_param()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = [t for p in parameters for t in self.optimizer.state.get(p, {}).values() if isinstance(t, Tensor)]
        held = [local_of(t) for t in (*parameters, *parameters, *states)]
        total: int = sum(t.numel() * t.element_size() for t in held)
        number: int = sum(local_of(p).numel() for p in parameters)
        return total / max(1, number)


class LoopRecord:
    """The record of a loop that is not the trainer's.

    On several ranks all of them make all calls, and the first one writes. The audit is that of all of them, also where each
    holds a part of the parameters; a loss is the first rank's.

    Args:
        reporter: takes the rows; of a silent writer on all ranks but the first.
        here: the ranks.

    Attributes:
        num_steps: steps recorded so far.
        tokens: trained on so far.
        trained_seconds: of all steps so far.
    """

    def __init__(self, reporter: Reporter, here: Ranks) -> None:
        self.reporter, self.here = reporter, here
        self.num_steps, self.tokens, self.trained_seconds = 0, 0, 0.0
        self.watched: list[Watched] = []
        self._failed = FailedSteps()
        self._handlers: list[tuple[Optimizer, Callable[[list[Alarm]], None]]] = []
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._wall = self.trained_seconds
        self._began = self._since = time.perf_counter()
        self._computed = time.process_time()

    def watch(self, model: nn.Module, optimizer: Any, gauges_every: int = 0) -> Watched:
        """Read an optimizer after each step from now on, record its alarms, and attach gauges.

        Args:
            model, optimizer: as of :class:`Watched`.
            gauges_every: steps between samples of the gauges; 0 for none.
        """
        is_known = any(each.optimizer is unwrapped(optimizer) for each in self.watched)
        found = Watched(model, optimizer, is_known)
        if is_known and isinstance(found.optimizer, Optimizer):
            found.optimizer.name_parameters(model)
        if gauges_every:
            found.gauges = attach_gauges(model, optimizer, every=gauges_every, on_row=self.reporter.gauge, alarms=False)
        ours = found.ours
        if ours is not None:
            ours.name_parameters(model)
            if self.here.size > 1:
                ours.auditor.join = joined_over_ranks(list(ours.parameter_names()))
            before = ours.on_alarm

            def alarmed(alarms: list[Alarm]) -> None:
                before(alarms)
                self.reporter.lost_updates(alarms, self.num_steps + 1, shown=False)

            ours.on_alarm = alarmed
            self._handlers.append((ours, before))
            if not self.reporter.is_audited:
                self.reporter.is_audited = True
                self.reporter.rebuild()
        self.watched.append(found)
        return found

    def step(self, given: Row) -> None:
        """Record an optimizer step.

        Args:
            given: columns of the row, which take the place of those that are read; ``tokens`` are all so far.
        """
        now = time.perf_counter()
        row: Row = {"step": self.num_steps + 1, "seconds": now - self._since, **self._read(), **given}
        if "seconds" not in given:
            row["cpu_seconds"] = time.process_time() - self._computed
        if row.get("tokens") is not None:
            if row["seconds"]:
                row.setdefault("tokens_per_second", (row["tokens"] - self.tokens) / row["seconds"])
            self.tokens = row["tokens"]
        self.num_steps = int(row["step"])
        self.trained_seconds += row["seconds"] or 0.0
        self.reporter.step(row, linears=next((one.linears for one in self.watched if one.linears is not None), None))
        self._judge(row)
        self._since, self._computed = time.perf_counter(), time.process_time()

    def _read(self) -> Row:
        """What the watched optimizers tell of the last step, all together."""
        columns: Row = {}
        found: list[Tensor] = []
        for watched in reversed(self.watched):  # the first one's columns count
            row, sums = watched.read(self.num_steps + 1)
            columns |= row
            found += [sums.to("cpu", torch.float64)] if sums is not None else []
        if self.watched and "skipped" in columns:
            columns["skipped"] = any(watched.was_skipped for watched in self.watched)
        if found:
            total = torch.stack(found).sum(0)
            columns |= figures_of(total)
            columns["audit_sums"] = dict(zip(UPDATE_SUMS, total.tolist(), strict=True))
        return columns

    def _judge(self, row: Row) -> None:
        """Write the events of a step that was skipped, and of the one with which the run has diverged."""
        for watched in self.watched:
            if watched.was_skipped and watched.ours is not None:
                self.reporter.event(Event("skip", self.num_steps, why_skipped(watched.ours, self.here)))
        scaled = next((one for one in self.watched if one.ours is not None and one.ours.loss_scaler is not None), None)
        if scaled is not None and scaled.ours is not None:
            self._failed.take(row, scaled.ours.loss_scaler, scaled.scale)
        else:
            self._failed.take(row)
        if event := self._failed.divergence(row, _GO_BACK):
            self.reporter.event(event, shown=True)

    def evaluate(self, given: Row) -> None:
        """Record an evaluation; its time is not counted as that of a step.

        Args:
            given: columns of the row.
        """
        tokens = {"tokens": self.tokens} if self.tokens else {}
        self.reporter.evaluation({"step": self.num_steps, "seconds": self.trained_seconds, **tokens, **given})
        self._since = time.perf_counter()

    def go_back(self, step: int) -> None:
        """Go on after ``step``: later rows are deleted, since they come again."""
        run = self.reporter.go_back(step, accept_lost=True)
        self.num_steps, self._failed = step, FailedSteps()
        self.tokens = next((row["tokens"] for row in reversed(run.steps) if row.get("tokens") is not None), 0)
        self.trained_seconds = sum(row.get("seconds") or 0.0 for row in run.steps)
        for watched in self.watched:
            watched.restart(step)
        self._restart_clock()

    def summary(self, **known: Any) -> Row:
        """``summary.json``, from the rows of the folder, so that it is the same however often the loop was resumed.

        Args:
            known: further columns; those that are ``None`` are left out.
        """
        run = self.here.of_first(lambda: read_run(self.reporter.folder))
        total = torch.zeros(len(UPDATE_SUMS), dtype=torch.float64)
        for row in run.steps:
            if sums := row.get("audit_sums"):
                total += torch.tensor([sums[name] for name in UPDATE_SUMS], dtype=torch.float64)
        losses = [row["val_loss"] for row in run.evals if row.get("val_loss") is not None]
        return summary_of(
            run.steps,
            total,
            val_loss=losses[-1] if losses else None,
            steps=self.num_steps,
            tokens=self.tokens or None,
            bytes_per_param=self.watched[0].bytes_per_param() if len(self.watched) == 1 else None,
            num_skipped=sum(bool(row.get("skipped")) for row in run.steps),
            wall_seconds=self._wall + time.perf_counter() - self._began,
            **known,
        )

    def close(self, summary: Callable[[], Row] | None, *, is_known: bool = True) -> None:
        """End the record, and leave the models and optimizers as they were.

        Args:
            summary: of the finished run; ``None``: the loop ended before its last step.
            is_known: where the loop stands; else nothing is written.
        """
        try:
            if is_known and summary is not None:
                self.reporter.finish(summary())
            elif is_known:
                self.reporter.event(Event("stop", self.num_steps, "the loop ended before its last step"))
        finally:
            self.reporter.close()
            self.reporter.writer.close()
            for watched in self.watched:
                if watched.gauges is not None:
                    watched.gauges.detach()
            for optimizer, handler in reversed(self._handlers):
                optimizer.on_alarm = handler
            self._handlers.clear()
            self.watched.clear()
