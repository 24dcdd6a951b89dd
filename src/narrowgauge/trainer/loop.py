"""The training loop. It can be interrupted at any moment and resumed with the same bits.

Each step is recorded before the next begins, and checkpoints are written atomically. So a killed
run loses only the steps since its last checkpoint and repeats them with the same bits.

Several ranks run this loop side by side. Rank 0 decides everything that depends on files, on the
clock or on a signal, or the ranks agree, so that all take the same branches. Only rank 0 writes the
run folder and prints.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

from narrowgauge.analysis.log import happened
from narrowgauge.checkpoints.saving import latest_checkpoint
from narrowgauge.distributed.job import require_same, threads_of
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import CorruptionError, Terminated
from narrowgauge.gauges.recording.provenance import describe_process, differences
from narrowgauge.gauges.recording.record import Record
from narrowgauge.runs.atomic_io import disk_errors
from narrowgauge.runs.finding import sentences
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.models import MODELS, weights_file
from narrowgauge.trainer import door
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.console import Console
from narrowgauge.trainer.session import Session, build, describe, open_on_ranks
from narrowgauge.trainer.step import evaluate, train_step

_MUST_STOP = 2
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


def train(
    settings: TrainConfig | Mapping[str, Any],
    *,
    restart: bool = False,
    console: Console | None = None,
) -> Path:
    """Train a model, and return the run folder.

    If the folder ``out`` holds a run, continue it with these settings.

    A run continues from its latest good checkpoint with its own settings, overlaid with those given
    here. Events record the changes. A run that was killed before its first checkpoint begins again
    at step 0.

    Args:
        settings: those that are named; a ``TrainConfig`` names all but those at ``None``.
        restart: begin again at step 0 if the run has lost its checkpoints.
        console: displays the progress; ``None`` for standard output.
    Raises:
        NarrowgaugeError: an invalid setting. Nothing is written then.
        RecordError: the run is being written, has no good checkpoint left, or cannot change a
            setting; or the model or data has changed.
        KeyboardInterrupt: after Ctrl-C, once the checkpoint is saved. After SIGTERM and SIGHUP
            :class:`~narrowgauge.errors.Terminated`.
        OSError: progress could not be printed; the checkpoint is saved.
    """
    named_settings = settings.to_dict() if isinstance(settings, TrainConfig) else dict(settings)
    ranks = all_ranks()
    config, run = ranks.of_first(lambda: door.enter(named_settings, ranks.size))
    shown = console or Console(config.steps, config.log_every, is_quiet=not ranks.is_first)
    line = door.nothing_left(run, config)
    if line:
        shown.say(line)
    else:
        with threads_of(config.threads, config.recipe.reduction.order_invariant):
            require_same(named_settings)
            if run is None:
                _begin(config, shown)
            else:
                _go_on(run, config, shown, restart)
    return Path(str(config.out))


def resume(folder: str | Path, stop_after: int | None = None, **options: Any) -> Path:
    """Continue the run in a folder, as :func:`train` with no other setting."""
    door.run_of_trainer(Path(folder))
    named_settings = {"out": str(folder), "stop_after": stop_after}
    return train(
        {name: value for name, value in named_settings.items() if value is not None}, **options
    )


def _begin(config: TrainConfig, console: Console) -> None:
    folder = Path(str(config.out))
    session = build(config, folder, open_on_ranks(config))
    with Record(
        lambda: RunWriter.create(folder, describe(session)),
        config.recipe,
        console.event,
        console.row,
    ) as record:
        tokenizer = session.data.tokenizer_path
        if record.writer is not None and tokenizer is not None:
            with disk_errors(folder):
                shutil.copyfile(tokenizer, folder / "tokenizer.json")
        for note in [*session.data.notes, *session.notes]:
            record.event(happened("note", 0, note), shown=True)
        title = f"{Path(config.model).name} in {config.recipe.title}"
        record.event(happened("start", 0, title))
        _watch(session, record, console)
        _run(session, record, console)


def _go_on(run: Run, config: TrainConfig, console: Console, restart: bool) -> None:
    """Continue a run from its latest good checkpoint."""
    folder = run.path
    with Record(
        lambda: RunWriter.open(folder), config.recipe, console.event, console.row
    ) as record:
        checkpoint, damaged = latest_checkpoint(folder, record.here)
        before = run.config
        if checkpoint is not None:
            before = checkpoint.state()["settings"]
        elif not restart:
            door.require_no_checkpoint(run, damaged)
        data = open_on_ranks(config)
        door.require_same_run(run, before, config, data.fingerprint)
        session = build(config, folder, data)
        if checkpoint is not None:
            session.load(checkpoint)
        step = session.step
        door.require_steps_left(folder, config, step)
        present = {
            "config": config.to_dict(),
            **describe_process(session.device, session.here.size),
        }
        _watch(session, record, console)
        if record.writer is not None:
            record.writer.amend({**run.run, "config": present["config"]})
        record.go_back(step)
        for damage in damaged:
            message = f"{damage} and was not loaded"
            record.event(happened("damaged-checkpoint", 0, message, severity="warning"), shown=True)
        for name, old, new in door.changed_settings(before, present["config"]):
            note = f"{name} was {old} up to step {step} and is {new} from there on"
            record.event(happened("changed-settings", step, note, severity="warning"), shown=True)
        for note in differences(run.run, present):
            record.event(happened("changed-software", step, note, severity="warning"), shown=True)
        where = f" on {record.here.size} ranks" if record.here.size > 1 else ""
        record.event(happened("resume", step, f"from step {step}{where}"))
        _run(session, record, console)


def _watch(session: Session, record: Record, console: Console) -> None:
    """Record the optimizer and the gauges.

    Must precede the first step, whose compiled code calls the gauges.
    """
    session.optimizer.on_alarm = lambda alarms: console.say(
        f"warning: {min(alarms, key=lambda alarm: alarm.reading.edq).message}"
    )
    record.watch(session.model, session.optimizer, every=session.config.gauges_every)


class _End(Enum):
    """Why a run takes no further step."""

    LAST_STEP = "the last step"
    STOP_AFTER = "as requested by stop_after"
    INTERRUPTED = "interrupted"


def _run(session: Session, record: Record, console: Console) -> None:
    config = session.config
    end = _End.LAST_STEP if session.step >= config.steps else None
    console.say(f"{Path(config.model).name} · {config.recipe.title} · {session.folder}")
    if session.step == 0 and config.model not in MODELS:
        weights = weights_file(Path(config.model))
        source = f"read from {weights}" if weights else f"drawn from seed {config.seed}"
        console.say(f"initial weights: {source}")
    with _signals() as signals, _ended(session, record, console):
        session.fingerprints.start(session.step)
        record.fingerprint(session.fingerprints)
        while end is None:
            record.reader.begin()
            columns = train_step(session)
            record.step({**columns, "tokens": record.tokens + config.tokens_per_step})
            record.fingerprint(session.fingerprints)
            if _is_due(session.step, config.eval_every) and session.step < config.steps:
                record.eval({"val_loss": evaluate(session)})
            # A signal, or the end of a save, may reach the ranks in different steps. All act after
            # the same step.
            must_stop = bool(signals) or console.failure is not None
            state = session.here.largest(_MUST_STOP if must_stop else int(session.saver.has_ended))
            if session.step >= config.steps:
                end = _End.LAST_STEP
            elif state == _MUST_STOP:
                end = _End.INTERRUPTED
            elif session.step == config.stop_after:
                end = _End.STOP_AFTER
            is_due = end is not None or _is_due(session.step, config.checkpoint_every)
            if state or is_due:
                _settle_save(session, record)
            if is_due:
                session.verify_replicas()
                if record.writer is not None:
                    record.writer.sync()
                session.save()
        _finish(end, session, record, console, session.here.largest(signals[0] if signals else 0))


def _finish(end: _End, session: Session, record: Record, console: Console, number: int) -> None:
    """End a run whose last checkpoint is being written: write what its record lacks, and say how to
    continue.

    ``number`` is the signal that interrupted it, 0 if it was the console.
    """
    summary = None
    if end is _End.LAST_STEP:
        if record.evaluated != session.step:
            record.eval({"val_loss": evaluate(session)})
        summary = record.summary(
            recipe=session.config.recipe.to_value(),
            model=session.config.model,
            bytes_per_param=session.bytes_per_param(),
            weights_fingerprint=session.weights_fingerprint(),
        )
    _settle_save(session, record)
    session.saver.close()
    if summary is not None:
        record.finish(summary)
        return console.summary(summary)
    record.stop(end.value)
    console.say(
        f"Stopped after step {session.step}. Continue with: narrowgauge resume {session.folder}"
    )
    if end is _End.INTERRUPTED and number == signal.SIGINT:
        raise KeyboardInterrupt
    if end is _End.INTERRUPTED:
        raise Terminated if number else console.failure or BrokenPipeError


def _settle_save(session: Session, record: Record) -> None:
    """Wait for the checkpoint in flight, and record it. A failed one ends the run here."""
    step = session.saver.wait()
    if step is not None:
        record.event(happened("checkpoint", step, f"step-{step:08d} is complete"))


@contextmanager
def _ended(session: Session, record: Record, console: Console) -> Iterator[None]:
    """Record corruption, and release what a run holds, however it ends."""
    try:
        yield
    except CorruptionError as error:
        words = sentences(error.message, error.advice)
        where: Row = {"tensor": error.tensor or "", "rank": error.rank}
        record.event(happened("corruption", session.step, words, severity="error", **where))
        raise
    finally:
        session.saver.leave()
        if session.reduction is not None:
            session.reduction.close()  # its hooks on parameters would keep the process group
        if record.alarm_kinds:
            kinds = ", ".join(kind.replace("-", " ") for kind in record.alarm_kinds)
            console.say(f"{kinds}: narrowgauge diagnose {session.folder} shows where")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield a list that receives the first SIGINT, SIGTERM or SIGHUP.

    A second signal ends the process at once.
    """
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        received.append(number)
        for handled in before:
            signal.signal(handled, signal.SIG_DFL)
        with suppress(OSError):  # its reader has left
            # Past Python's buffers: the signal may have interrupted a print.
            os.write(2, b"Stopping after this step; press Ctrl-C again to stop at once.\n")

    try:
        # An ignored signal stays ignored: nohup ignores SIGHUP.
        heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, receive) for number in heard}
    except ValueError:  # not in the main thread, which handles the signals
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
