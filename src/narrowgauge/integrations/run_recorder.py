"""A run folder for any training loop: what ``narrowgauge train`` records of its own runs.

The recorder has nothing of its own to record. It reads after each step what the trainer reads (the audit, skipped steps, the
loss scale, the gauges) and hands the row to the trainer's :class:`~narrowgauge.trainer.sinks.Reporter`, which writes it, runs the
detectors and feeds the loggers. All that a resumed loop needs is in the rows: nothing of the recorder belongs in a checkpoint.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import fingerprint_whole
from narrowgauge.errors import RecipeError, RecordError
from narrowgauge.gauges.attach import attach_gauges, recipe_in_use
from narrowgauge.loggers.available import names_in, require_loggers
from narrowgauge.matmul.swapping import linears_of
from narrowgauge.numerics.shards import local_of
from narrowgauge.numerics.update_metrics import UPDATE_SUMS
from narrowgauge.optim.audit import Alarm, unwrapped
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import Run, is_run, read_run
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.notation import parse_value
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.changes import differences
from narrowgauge.trainer.description import describe_process
from narrowgauge.trainer.readings import columns_of_step, peak_memory_bytes, summary_of, why_skipped
from narrowgauge.trainer.silence import SilentScreen, SilentWriter
from narrowgauge.trainer.sinks import Reporter


class RunNotice(UserWarning):
    """Something in a recorded loop that its user should look at; it is in ``events.jsonl`` too."""


class RunRecorder:
    """Record a training loop of your own in a run folder, as ``narrowgauge train`` records its runs.

    The folder is one for ``narrowgauge report``, ``ng.compare_runs`` and ``ng.read_run``, beside runs of the trainer. A loop
    computes the same bits with and without a recorder. What the detectors find becomes an event, a :class:`RunNotice` and a call
    of ``ng.on_event``'s callbacks.

    On several ranks, all of them make all calls, and the first one writes; the losses are the first one's.

    Args:
        folder: the run folder; absent or empty, unless ``resume``.
        model: as it is trained, before ``torch.compile`` if gauges are to see it.
        optimizer: one of Narrowgauge's, or any of ``torch.optim``'s, also inside a framework's; only ours has an audit.
        recipe: what the model was prepared with. ``None``: as the model and the optimizer have it, as far as they do.
        settings: of your loop, such as ``{"lr": 1e-3, "steps": 400}``. Comparisons tell the settings in which runs differ, and
            pair runs of one ``seed``.
        gauges_every: steps between samples of the gauges; 0 for none.
        loggers: where rows and events also go: names such as ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, ``"aim"``.
        resume: go on with the run in the folder, if there is one; then :meth:`go_back` comes before the first step.

    Attributes:
        num_steps: steps recorded so far.
        gauges: the gauges, if there are any.

    Raises:
        RecordError: the folder is in use.
        RecipeError: the optimizer's storage is not the recipe's.
        NarrowgaugeError: an unknown logger, or one whose package is missing.

    Cost: about 0.1 ms per step, and reading the loss from the device.

    Example:
        >>> import tempfile, torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "bfloat16/word", lr=1e-3)
        >>> folder = Path(tempfile.mkdtemp(), "mine")
        >>> with RunRecorder(folder, model, optimizer, recipe="bfloat16/word", settings={"steps": 3}) as recorder:
        ...     for _ in range(3):
        ...         loss = model(torch.ones(8, 16, dtype=torch.bfloat16)).float().square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         recorder.step(loss, tokens=8)
        ...     recorder.evaluate(loss)
        >>> run = ng.read_run(folder)
        >>> [row["tokens"] for row in run.steps], run.summary["steps"]
        ([8, 16, 24], 3)
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Any,
        *,
        recipe: str | Path | Recipe | None = None,
        settings: Mapping[str, Any] | None = None,
        gauges_every: int = 0,
        loggers: str | Iterable[str] = (),
        resume: bool = False,
    ) -> None:
        self.model, self.optimizer = model, unwrapped(optimizer)
        self.num_steps = self.tokens = 0
        names = names_in(loggers)
        require_loggers(names)
        policy = recipe_in_use(model, self.optimizer) if recipe is None else parse_value(recipe)
        _require_storage(policy, self.optimizer)
        content = self._description(policy, dict(settings or {}))
        self.linears = linears_of(model)
        self._here = all_ranks()
        writer, found = self._open(Path(folder), content, resume)
        self.folder = writer.path
        self.gauges = attach_gauges(model, optimizer, every=gauges_every, alarms=False) if gauges_every else None
        self.reporter = Reporter(
            writer,
            _Notices() if self._here.is_first else SilentScreen(),
            policy,
            names if self._here.is_first else (),
            content["config"],
            is_audited=self._ours is not None,
        )
        self._began = self._since = time.perf_counter()
        self._seconds = 0.0
        self._skipped = self._ours.num_skipped if self._ours is not None else 0
        self._must_go_back = found is not None and bool(found.steps)
        self._is_open = True
        if self._ours is not None:
            self._on_alarm, self._ours.on_alarm = self._ours.on_alarm, self._alarmed
        if found is None:
            self.reporter.event(Event("start", 0, f"{content['config']['model']} in a loop of its own"))
        for change in differences(found.run, content) if found is not None else ():
            self.reporter.event(Event("note", 0, change))

    # ── the loop calls these ────────────────────────────────────────────────────────────────────────────────────────

    def step(
        self,
        loss: float | Tensor,
        *,
        tokens: int | None = None,
        lr: float | None = None,
        grad_norm: float | Tensor | None = None,
        seconds: float | None = None,
        **columns: Any,
    ) -> None:
        """Record an optimizer step; call it after ``optimizer.step()`` and before the schedule's.

        Args:
            loss: of the step, in nats per token; a tensor is read here, which waits for its device.
            tokens: that were trained on in this step; the row holds their sum so far.
            lr: learning rate of this step; ``None``: the optimizer's first group's.
            grad_norm: gradient norm before clipping; ``None``: where our optimizer clips, its own.
            seconds: of the step; ``None``: since the last call.
            columns: further columns of the row.
        Raises:
            RecordError: the run is resumed, and :meth:`go_back` was not called.
        """
        if self._must_go_back:
            raise RecordError(
                f"{self.folder} holds steps already, and where the loop goes on from was not said.",
                "Call recorder.go_back(step) with the step of the checkpoint that was loaded, or 0.",
            )
        self.num_steps += 1
        duration = time.perf_counter() - self._since if seconds is None else seconds
        row: Row = {"step": self.num_steps, "loss": _number(loss), "lr": self._rate() if lr is None else lr}
        if grad_norm is not None:
            row["grad_norm"] = _number(grad_norm)
        if tokens is not None:
            self.tokens += tokens
            row |= {"tokens": self.tokens, "tokens_per_second": tokens / max(duration, 1e-9)}
        row |= {"seconds": duration, "peak_memory_bytes": peak_memory_bytes()}
        row = {**self._read_optimizer(), **row, **columns}
        self.reporter.step(row, None, self.linears, self.gauges)
        if row.get("skipped") and self._ours is not None:
            self.reporter.event(Event("skip", self.num_steps, why_skipped(self._ours, self._here)))
        self._since = time.perf_counter()

    def evaluate(self, loss: float | Tensor, **columns: Any) -> None:
        """Record an evaluation at the current step.

        Args:
            loss: validation loss in nats per token.
            columns: further columns of the row.
        """
        row = {"step": self.num_steps, "val_loss": _number(loss), **({"tokens": self.tokens} if self.tokens else {})}
        self.reporter.evaluation({**row, **columns})
        self._since = time.perf_counter()

    def event(self, kind: str, message: str, **fields: Any) -> None:
        """Record an event of the loop's own at the current step.

        Args:
            kind: a kind of :class:`narrowgauge.Event`, such as ``"note"``.
            message: one sentence.
            fields: ``tensor``, ``value``, ``threshold``, ``advice``.
        """
        self.reporter.event(Event(kind, self.num_steps, message, **fields))

    def go_back(self, step: int) -> None:
        """Go on after ``step``, because the loop does: rows of later steps are deleted, since they come again.

        Call it once a checkpoint has been loaded, in a resumed loop or after a rollback; in an empty folder too, where a loop
        goes on with a checkpoint from elsewhere.

        Args:
            step: steps that the loaded checkpoint has done.
        Raises:
            RecordError: rows up to that step are missing.
        """
        began, goes_on = self.num_steps, self._must_go_back or step > 0
        self._here.of_first(lambda: _make_room(self.folder, step))
        run = self.reporter.go_back(step, accept_lost=True)
        self.num_steps, self._must_go_back = step, False
        self.tokens = int(next((row["tokens"] for row in reversed(run.steps) if row.get("tokens") is not None), 0))
        self._seconds = sum(row.get("seconds") or 0.0 for row in run.steps)
        if self.gauges is not None:
            self.gauges.restart(step)
        if self._ours is not None:
            self._skipped = self._ours.num_skipped
        message = f"from step {step}" + (f", after {began} were done" if began else "")
        if goes_on or began:
            self.reporter.event(Event("resume", step, message))
        self._began = self._since = time.perf_counter()

    def close(self, finished: bool = True) -> None:
        """End the record; a second call does nothing.

        Args:
            finished: the loop has done its last step, so ``summary.json`` is written; else the run stays one to be resumed.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            if finished and not self._must_go_back:
                self.reporter.finish(self._summary())
            elif not self._must_go_back:
                self.reporter.event(Event("stop", self.num_steps, "the loop ended before its last step"))
        finally:
            self.reporter.close()
            self.reporter.writer.close()
            if self.gauges is not None:
                self.gauges.detach()
            if self._ours is not None:
                self._ours.on_alarm = self._on_alarm

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finished=kind is None)

    # ── what is read ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _ours(self) -> Optimizer | None:
        return self.optimizer if isinstance(self.optimizer, Optimizer) else None

    def _rate(self) -> float:
        group = self.optimizer.param_groups[0]
        return float(group["lr"]) / float(group.get("lr_factor", 1.0))

    def _read_optimizer(self) -> Row:
        """What the optimizer and the narrow layers tell of the step."""
        ours = self._ours
        if ours is None:
            return {}
        ours.settle()
        row: Row = {"skipped": ours.num_skipped > self._skipped}
        if ours.grad_norm is not None:
            row["grad_norm"] = float(ours.grad_norm)
        self._skipped = ours.num_skipped
        columns, sums = columns_of_step(ours, self.linears, self.linears.step if self.linears else self.num_steps)
        if sums is not None:
            row["audit_sums"] = dict(zip(UPDATE_SUMS, sums.tolist(), strict=True))
        return row | columns

    def _alarmed(self, alarms: list[Alarm]) -> None:
        self._on_alarm(alarms)
        self.reporter.lost_updates(alarms, self.num_steps + 1, shown=False)

    def _summary(self) -> Row:
        """``summary.json``, from the rows of the folder, so that it is the same however often the loop was resumed."""
        run = self._here.of_first(lambda: read_run(self.folder))
        config, total = run.config, torch.zeros(len(UPDATE_SUMS), dtype=torch.float64)
        for row in run.steps:
            if sums := row.get("audit_sums"):
                total += torch.tensor([sums[name] for name in UPDATE_SUMS], dtype=torch.float64)
        ours, losses = self._ours, [row["val_loss"] for row in run.evals if row.get("val_loss") is not None]
        stepped = {p for group in self.optimizer.param_groups for p in group["params"]}
        stored = {
            name: parameter if ours is None else ours.stored(parameter)
            for name, parameter in self.model.named_parameters()
            if parameter in stepped
        }
        return summary_of(
            run.steps,
            total,
            recipe=config.get("recipe"),
            model=config["model"],
            val_loss=losses[-1] if losses else None,
            steps=self.num_steps,
            tokens=self.tokens or None,
            bytes_per_param=_bytes_per_param(self.optimizer) if ours is None else ours.bytes_per_param(),
            num_skipped=sum(bool(row.get("skipped")) for row in run.steps),
            weights_fingerprint=fingerprint_whole(stored),
            wall_seconds=self._seconds + time.perf_counter() - self._began,
        )

    # ── the folder ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _description(self, policy: Recipe | None, settings: dict[str, Any]) -> dict[str, Any]:
        """The content of ``run.toml``."""
        parameters = list(self.model.parameters())
        group = self.optimizer.param_groups[0]
        config = {
            **({"recipe": policy.to_value()} if policy is not None else {}),
            "model": type(self.model).__name__,
            "seed": group.get("seed", 0),
        }
        plain = {name: value for name, value in group.items() if isinstance(value, (bool, int, float, str, tuple))}
        return {
            "config": {**config, **settings},
            **describe_process(parameters[0].device, all_ranks().size),
            "optimizer": {"class": type(self.optimizer).__name__, **plain},
            "model": {"num_parameters": sum(p.numel() for p in parameters)},
            "recorder": {"program": Path(sys.argv[0]).name},
        }

    def _open(self, folder: Path, content: Row, resume: bool) -> tuple[RunWriter, Run | None]:
        """The writer on the first rank, one that writes nothing on the others; and the run that goes on."""
        made: list[RunWriter] = []

        def open_or_create() -> Run | None:
            goes_on = resume and is_run(folder)
            made.append(RunWriter.open(folder) if goes_on else RunWriter.create(folder, content))
            return read_run(folder) if goes_on else None

        found = self._here.of_first(open_or_create)
        return made[0] if made else cast(RunWriter, SilentWriter(folder)), found


class _Notices(SilentScreen):
    """Shows events as warnings, and nothing else: the loop has its own display."""

    def say(self, line: str) -> None:
        """Warn."""
        warnings.warn(line, RunNotice, stacklevel=6)


def _require_storage(recipe: Recipe | None, optimizer: Any) -> None:
    """Refuse a recipe that the optimizer does not store: the record would be of another run."""
    if recipe is None or not isinstance(optimizer, Optimizer):
        return
    names = [group["storage"].rpartition("/")[2] for group in optimizer.param_groups]
    wanted = recipe.storage.name.rpartition("/")[2]
    if wanted not in names:
        raise RecipeError(
            f"a record of recipe '{recipe.name}' was requested, and the optimizer's storage is '{names[0]}'.",
            "Name the recipe that was given to prepare, or leave it out.",
        )


def _make_room(folder: Path, step: int) -> None:
    """Require the rows up to a step, from the first that there is; the run is no longer finished."""
    steps = {row["step"] for row in read_run(folder).steps}
    absent = [number for number in range(min(steps, default=step + 1), step + 1) if number not in steps]
    if absent:
        raise RecordError(
            f"{folder} lacks step {absent[0]}, and the loop goes on after step {step}.",
            "Go back to a checkpoint from before, or record into a new folder.",
        )
    (folder / "summary.json").unlink(missing_ok=True)


def _bytes_per_param(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of weights, gradients and states per parameter, as :meth:`Optimizer.bytes_per_param` counts ours."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for p in parameters for t in optimizer.state.get(p, {}).values() if isinstance(t, Tensor)]
    held = [local_of(t) for t in (*parameters, *parameters, *states)]
    total: int = sum(t.numel() * t.element_size() for t in held)
    number: int = sum(local_of(p).numel() for p in parameters)
    return total / max(1, number)


def _number(value: float | Tensor) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
