"""The training loop. It can be interrupted at any moment and resumed with the same bits.

Each step is recorded before the next begins, and checkpoints are written atomically. So a killed run loses only the steps since
its last checkpoint and repeats them with the same bits.

Several ranks run this loop side by side. Rank 0 decides everything that depends on files, on the clock or on a signal, or the
ranks agree, so that all take the same branches. Only rank 0 writes the run folder and prints.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from narrowgauge.checkpoints.saving import latest_checkpoint
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import CorruptionError, NarrowgaugeError, RecordError, Terminated
from narrowgauge.gauges.recording.provenance import differences
from narrowgauge.gauges.recording.record import GO_BACK, Record
from narrowgauge.gauges.recording.step_row import symptom
from narrowgauge.runs.atomic_io import disk_errors
from narrowgauge.runs.events import Event
from narrowgauge.runs.finding import counted
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.models import MODELS, weights_file
from narrowgauge.trainer import resume_checks
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.console import Console
from narrowgauge.trainer.session import Session, build, describe, open_on_ranks
from narrowgauge.trainer.step import evaluate, train_step

_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class DivergenceError(NarrowgaugeError):
    """Training was stopped at a bad step, as requested."""

    status = 1


def train(config: TrainConfig, console: Console | None = None) -> Path:
    """Train a model from the start, and return the run folder. If the folder holds a run of these settings, continue it.

    Args:
        console: displays the progress; ``None`` for standard output.
    Raises:
        NarrowgaugeError: an invalid setting. Nothing is written then.
        KeyboardInterrupt: after Ctrl-C, once the checkpoint is saved. After SIGTERM and SIGHUP
            :class:`~narrowgauge.errors.Terminated`.
        OSError: progress could not be printed; the checkpoint is saved.
    """
    ranks = all_ranks()
    config = ranks.of_first(lambda: config.validated().on_ranks(ranks.size))
    folder, shown = Path(str(config.out)), console or _console(config)
    if (run := ranks.of_first(lambda: resume_checks.run_to_continue(config))) is not None:
        if run.summary is not None:
            shown.say(f"{folder} is finished: {counted(run.summary['steps'], 'step')}.")
            return folder
        if resume_checks.is_over(run):
            raise DivergenceError(f"{folder} stopped: {run.events[-1]['message']}.", GO_BACK)
        return resume(folder, config.stop_after, console=console)
    data = open_on_ranks(config)
    session = build(config, folder, data)

    def create() -> RunWriter:
        content = describe(session)
        content["data"]["unigram_loss"] = (
            data.unigram_loss()
        )  # of all tokens, so not again at each resume
        return RunWriter.create(folder, content)

    with Record(create, config.recipe, shown.event, shown.row) as record:
        if ranks.is_first and data.tokenizer_path is not None:
            with disk_errors(folder):
                shutil.copyfile(data.tokenizer_path, folder / "tokenizer.json")
        for note in [*data.notes, *session.notes]:
            record.event(Event("note", 0, note), shown=True)
        record.event(
            Event("start", 0, f"{Path(config.model).name} in {session.config.recipe.title}")
        )
        _watch(session, record, shown)
        _run(session, record, shown)
    return folder


def resume(
    folder: str | Path,
    stop_after: int | None = None,
    *,
    restart: bool = False,
    console: Console | None = None,
) -> Path:
    """Resume a run from its latest good checkpoint, with the settings of its ``run.toml``, and return its folder.

    Settings that were edited since the checkpoint hold from there on. Events record the changes. A run that was killed before
    its first checkpoint begins again at step 0.

    Args:
        stop_after: stop with a checkpoint after this step; ``None`` runs to the end.
        restart: begin again at step 0 if the run has lost its checkpoints.
        console: displays the progress; ``None`` for standard output.
    Raises:
        RecordError: the run is missing, finished, being written, or without its checkpoints; or its data or records do not match.
    """
    folder, ranks = Path(folder), all_ranks()
    run = resume_checks.unfinished_run(folder)
    config = replace(
        TrainConfig.from_dict(run.config, str(folder / "run.toml")), stop_after=stop_after
    )
    config.require_agreement(ranks.size)
    shown = console or _console(config)
    with Record(lambda: RunWriter.open(folder), config.recipe, shown.event, shown.row) as record:
        damaged: list[str] = []
        checkpoint = latest_checkpoint(
            folder, lambda path, reason: damaged.append(f"{path.name} is damaged ({reason})"), ranks
        )
        if checkpoint is not None:
            resume_checks.require_same_run(run, checkpoint.state()["settings"], config)
        elif not restart:
            resume_checks.require_restart(run, config, "; ".join(damaged))
        session = build(config, folder, open_on_ranks(config, run))
        present = describe(session)
        state = {} if checkpoint is None else session.load(checkpoint)
        step = session.step
        if stop_after is not None and stop_after <= step:
            raise RecordError(
                f"Cannot stop {folder} after step {stop_after} because it has done {counted(step, 'step')}.",
                "Name a later step with --stop-after, or leave it out.",
            )
        events = [
            Event("checkpoint_damaged", 0, f"{damage} and was not loaded") for damage in damaged
        ]
        for name, old, new in resume_checks.changed_settings(
            state.get("settings", present["config"]), present["config"]
        ):
            if name != "data":  # the token map may have moved; its tokens are those of the start
                note = f"{name} was {old} up to step {step} and is {new} from there on"
                events.append(Event("note", step, note, detector="changed-settings"))
        events += [
            Event("note", step, note, detector="changed-software")
            for note in differences(run.run, present)
        ]
        _watch(session, record, shown)
        record.go_back(step, digests=state.get("rows"))
        for event in events:
            record.event(event, shown=True)
        where = f" on {ranks.size} ranks" if ranks.size > 1 else ""
        record.event(Event("resume", step, f"from step {step}{where}"))
        _run(session, record, shown)
    return folder


def _console(config: TrainConfig) -> Console:
    return Console(config.steps, config.log_every, is_quiet=not all_ranks().is_first)


def _watch(session: Session, record: Record, console: Console) -> None:
    """Record the optimizer and the gauges. Must precede the first step, whose compiled code calls the gauges."""
    session.optimizer.on_alarm = lambda alarms: console.say(
        f"warning: {min(alarms, key=lambda alarm: alarm.reading.edq).message}"
    )
    record.watch(session.model, session.optimizer, every=session.config.gauges_every)
    record.reader.peak_tokens_per_second = session.peak_tokens_per_second()


class _End(Enum):
    """Why a run takes no further step."""

    LAST_STEP = "the last step"
    STOP_AFTER = "as requested by stop_after"
    INTERRUPTED = "interrupted"
    SPIKE = "a spike"


def _run(session: Session, record: Record, console: Console) -> None:
    config, here, row = session.config, session.here, Row()
    end = _End.LAST_STEP if session.step >= config.steps else None
    # Unless spikes are only reported, the step is judged before its update, so that a spike changes no weight.
    judged = config.on_spike != "report"
    console.say(f"{Path(config.model).name} · {config.recipe.title} · {session.folder}")
    if session.step == 0 and config.model not in MODELS:
        weights = weights_file(Path(config.model))
        console.say(
            f"initial weights: {f'read from {weights}' if weights else f'drawn from seed {config.seed}'}"
        )
    with _signals() as signals, _ended(session, record, console):
        session.fingerprints.before_first(session.step)
        record.fingerprint(session.fingerprints)
        while end is None:
            record.reader.begin()
            columns = train_step(session, record.alarms.judge if judged else None)
            row = record.step({**columns, "tokens": record.tokens + config.tokens_per_step})
            record.fingerprint(session.fingerprints)
            if _is_due(session.step, config.eval_every) and session.step < config.steps:
                record.eval({"val_loss": evaluate(session)})
            if config.on_spike == "stop" and record.is_bad:
                end = _End.SPIKE
            elif session.step >= config.steps:
                end = _End.LAST_STEP
            # A signal may reach the ranks in different steps. All stop after the same step.
            elif here.largest(len(signals) or console.failure is not None):
                end = _End.INTERRUPTED
            elif session.step == config.stop_after:
                end = _End.STOP_AFTER
            if end is not None or _is_due(session.step, config.checkpoint_every):
                _save(session, record)
        _finish(end, session, record, console, row, here.largest(signals[0] if signals else 0))


def _finish(
    end: _End, session: Session, record: Record, console: Console, row: Row, number: int
) -> None:
    """End a run whose last checkpoint is being written: write what its record lacks, and say how to continue.

    ``row`` is its last step's, ``number`` the signal that interrupted it, 0 if it was the console.
    """
    if end is _End.LAST_STEP:
        if record.evaluated != session.step:
            record.eval({"val_loss": evaluate(session)})
        summary = record.summary(
            recipe=session.config.recipe.to_value(),
            model=session.config.model,
            bytes_per_param=session.bytes_per_param(),
            weights_fingerprint=session.weights_fingerprint(),
        )
        session.saver.close()
        record.finish(summary)
        return console.summary(summary)
    session.saver.close()
    if end is _End.SPIKE:
        record.event(Event("divergence", session.step, symptom(row), advice=GO_BACK, stage="loss"))
        raise DivergenceError(f"stopped after step {session.step}: {symptom(row)}.", GO_BACK)
    record.stop(end.value)
    console.say(
        f"Stopped after step {session.step}. Continue with: narrowgauge resume {session.folder}"
    )
    if end is _End.INTERRUPTED and not number:
        raise console.failure or BrokenPipeError
    if end is _End.INTERRUPTED:
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _save(session: Session, record: Record) -> None:
    session.verify_replicas()
    if record.writer is not None:
        record.writer.sync()
    session.save({} if record.writer is None else record.writer.digests())


@contextmanager
def _ended(session: Session, record: Record, console: Console) -> Iterator[None]:
    """Record corruption, and release what a run holds, however it ends."""
    try:
        yield
    except CorruptionError as error:
        event = Event(
            "corruption",
            session.step,
            error.message.rstrip("."),
            advice=error.advice,
            detector="replicas",
        )
        record.event(replace(event, tensor=error.tensor, rank=error.rank))
        raise
    finally:
        session.saver.leave()
        if session.reduction is not None:
            session.reduction.close()  # its hooks on parameters would keep the process group
        if record.alarm_kinds:
            kinds = ", ".join(kind.replace("_", " ") for kind in record.alarm_kinds)
            console.say(f"{kinds}: narrowgauge diagnose {session.folder} shows where")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield a list that receives the first SIGINT, SIGTERM or SIGHUP. A second signal ends the process at once."""
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
