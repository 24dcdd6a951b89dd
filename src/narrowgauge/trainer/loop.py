"""The training loop. It can be interrupted at any moment and resumed with the same bits.

The loop contains no arithmetic and no format. It calls ``prepare`` like any training loop. Each step is recorded before the
next begins, and checkpoints are written atomically. So a killed run loses only the steps since its last checkpoint and
repeats them with the same bits.

Several ranks run this loop side by side. Rank 0 decides everything that depends on files, on the clock or on a signal,
or the ranks agree, so that all take the same branches. Only rank 0 writes the run folder and prints.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import ChipError, CorruptionError, RecordError, Terminated
from narrowgauge.gauges.recording.provenance import differences
from narrowgauge.gauges.recording.run_reporter import NullScreen, Reporter, Screen, first_writer
from narrowgauge.gauges.recording.step_row import peak_memory_bytes, summary_of
from narrowgauge.inductor import why_compiling_failed
from narrowgauge.runs.atomic_io import AGAIN, disk_errors
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import read_run
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.models import MODELS
from narrowgauge.trainer import language_model
from narrowgauge.trainer.config import OF_RANKS, TrainConfig
from narrowgauge.trainer.console import Console
from narrowgauge.trainer.data.dataset import Dataset, open_data
from narrowgauge.trainer.recovery import Recovery
from narrowgauge.trainer.resume_checks import FIXED, changed_settings, unfinished_run
from narrowgauge.trainer.session import Session, build, data_of_run, describe, prepare_tokens
from narrowgauge.trainer.step import evaluate, train_step


def train(config: TrainConfig, screen: Screen | None = None) -> Path:
    """Train a model from the start, and return the run folder.

    Args:
        screen: displays the progress; ``None`` for standard output.
    Raises:
        NarrowgaugeError: an invalid setting. Nothing is written then.
        KeyboardInterrupt: after Ctrl-C, once the checkpoint is saved. After SIGTERM :class:`~narrowgauge.errors.Terminated`.
    """
    ranks = all_ranks()
    config = ranks.of_first(lambda: config.validated().located())
    folder = Path(str(config.out))
    with _shown(config, screen) as shown:
        # Before the data are prepared, which may take long.
        weights = ranks.of_first(lambda: language_model.require_initial_weights(config.model))
        shown.stage("preparing the data")
        data = _opened_by_all(lambda: prepare_tokens(config), config)
        data.require(config.sequence_length)
        shown.stage("building the model")
        session = build(config, folder, data)
        with first_writer(folder, lambda: RunWriter.create(folder, describe(session))) as writer:
            if ranks.is_first and data.tokenizer_path is not None:
                with disk_errors(folder, AGAIN):
                    shutil.copyfile(data.tokenizer_path, folder / "tokenizer.json")
            for note in [*data.notes, *session.notes]:
                writer.event(Event("note", 0, note))
            writer.event(Event("start", 0, f"{Path(config.model).name} in {session.config.title}"))
            shown.say(f"{Path(config.model).name} · {session.config.title} · {folder}")
            if config.model not in MODELS:
                drawn = f"drawn from seed {config.seed}; the model's folder holds none"
                shown.say(f"initial weights: {drawn if weights is None else f'read from {weights}'}")
            _run(session, writer, shown)
    return folder


def resume(
    folder: str | Path, stop_after: int | None = None, accept_changes: bool = False, screen: Screen | None = None
) -> Path:
    """Resume a run from its latest good checkpoint, with the settings of its ``run.toml``, and return its folder.

    Args:
        stop_after: stop with a checkpoint after this step; ``None`` runs to the end.
        accept_changes: resume even if ``run.toml`` was changed or records are missing. Events record the changes.
        screen: displays the progress; ``None`` for standard output.
    Raises:
        RecordError: the run is missing or finished, another process is writing it, or its data, settings or
            records do not match its checkpoint.
    """
    folder, ranks = Path(folder), all_ranks()
    run = unfinished_run(folder)
    config = replace(TrainConfig.from_dict(run.config, str(folder / "run.toml")), stop_after=stop_after)
    config.require_agreement()
    with first_writer(folder, lambda: RunWriter.open(folder)) as writer, _shown(config, screen) as shown:
        data = _opened_by_all(lambda: data_of_run(run, config), config)
        shown.stage("building the model")
        session = build(config, folder, data)
        events: list[Event] = []

        def report_damage(path: Path, reason: str) -> None:
            events.append(Event("checkpoint_damaged", 0, f"{path.name} is damaged ({reason}) and was not loaded"))

        present = describe(session)
        saved = session.restore(report_damage) or present["config"]
        step, changed = session.step, changed_settings(saved, present["config"], FIXED)
        if stop_after is not None and stop_after <= step:
            raise RecordError(
                f"{folder} has done {step} steps, and a stop after step {stop_after} was requested.",
                "Name a later step with --stop-after, or leave it out.",
            )
        if changed and not accept_changes:
            changes = "; ".join(f"{name} is {now}, and the run started with {before}" for name, before, now in changed)
            raise RecordError(
                f"{folder / 'run.toml'} was changed: {changes}.",
                f"Restore it, or accept the change: narrowgauge resume {folder} --accept-changes",
            )
        lost = ranks.of_first(lambda: writer.rewind(step, eval_every=config.eval_every, accept_lost=accept_changes))
        changed += changed_settings(saved, present["config"], OF_RANKS)
        notes = [f"{name} was {old} up to step {step} and is {new} from there on" for name, old, new in changed]
        notes += [lost] if lost else []
        events += [Event("note", step, note, detector="changed-settings") for note in notes]
        events += [Event("note", step, note, detector="changed-software") for note in differences(run.run, present)]
        for event in events:
            writer.event(event)
            _note(session, f"{event.message}.")
        where = f" on {ranks.size} ranks" if ranks.size > 1 else ""
        writer.event(Event("resume", step, f"from step {step}{where}"))
        shown.say(f"{Path(config.model).name} · {session.config.title} · {folder}")
        _run(session, writer, shown)
    return folder


def _shown(config: TrainConfig, screen: Screen | None) -> Any:
    """Return a context with the caller's screen, or standard output. Ranks other than 0 show nothing."""
    if not all_ranks().is_first:
        return nullcontext(NullScreen())
    return Console(config.steps, config.log_every) if screen is None else nullcontext(screen)


def _opened_by_all(open_first: Callable[[], Dataset], config: TrainConfig) -> Dataset:
    """Open the data on rank 0, which may tokenize text. Then open it on the others."""
    ranks = all_ranks()
    data = ranks.together(lambda: open_first() if ranks.is_first else None)
    folder = ranks.gather(data and str(data.folder))[0]
    return data or open_data(str(folder), config.held_out, config.seed)


def _run(session: Session, writer: RunWriter, console: Screen) -> None:
    """Take the steps that are left."""
    config, here = session.config, session.here
    began = time.perf_counter() - session.seconds
    with _signals() as signals, session.watched():
        reporter = Reporter(writer, console, config.recipe)
        reporter.rebuild()
        recovery = Recovery(session, reporter)
        session.optimizer.on_alarm = lambda alarms: reporter.lost_updates(alarms, session.step + 1)
        for note in session.notes:
            _note(session, note)
        console.start(config.title, session.step)

        def save() -> None:
            session.verify_replicas()
            writer.sync()
            session.seconds = time.perf_counter() - began
            session.save()

        session.fingerprints.before_first(session.step)
        reporter.fingerprint(session.fingerprints)
        try:
            while session.step < config.steps:
                row = train_step(session, recovery.judge)
                reporter.step(row, session.gauges)
                reporter.fingerprint(session.fingerprints)
                is_last = session.step == config.steps
                if _is_due(session.step, config.eval_every) and not is_last:
                    _evaluate(session, reporter)
                recovery.after(row, save)
                # A signal may reach the ranks in different steps. All stop after the same step.
                number = here.largest(signals[0] if signals else 0)
                is_stopping = bool(number) or (session.step == config.stop_after and not is_last)
                if is_stopping or is_last or _is_due(session.step, config.checkpoint_every):
                    save()
                if is_stopping:
                    session.saver.close()
                    reporter.event(
                        Event("stop", session.step, "interrupted" if number else "as requested by stop_after")
                    )
                    console.say(
                        f"Stopped after step {session.step}. Continue with: narrowgauge resume {session.folder}"
                    )
                    if number:
                        raise Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
                    return
            summary = _summary(session, reporter, time.perf_counter() - began)
            session.saver.close()
            reporter.finish(summary)
        except CorruptionError as error:
            message, tensor, rank = error.message.rstrip("."), error.tensor, error.rank
            reporter.event(
                Event("corruption", session.step, message, tensor, rank=rank, advice=error.advice, detector="replicas")
            )
            raise
        except Exception as error:
            if config.compile and (reason := why_compiling_failed(error)):
                raise ChipError(
                    f"the model could not be compiled in step {session.step + 1}: {reason.rstrip('.')}.",
                    "Fix that, or pass --no-compile.",
                ) from error
            raise
        finally:
            session.saver.leave()
            if session.reduction is not None:
                session.reduction.close()  # its hooks on parameters would keep the process group
            reporter.advise()


def _summary(session: Session, reporter: Reporter, wall_seconds: float) -> Row:
    """Return the content of ``summary.json``. Evaluate first if the last step has no evaluation yet."""
    run = session.here.of_first(lambda: read_run(session.folder))
    losses = [row["val_loss"] for row in run.evals if row["step"] == session.step]
    return summary_of(
        run.steps,
        session.audit_total,
        recipe=session.config.recipe.to_value(),
        model=session.config.model,
        val_loss=losses[-1] if losses else _evaluate(session, reporter),
        steps=session.step,
        tokens=session.tokens,
        peak_memory_bytes=peak_memory_bytes(),
        bytes_per_param=session.bytes_per_param(),
        num_skipped=session.optimizer.num_skipped,
        weights_fingerprint=session.weights_fingerprint(),
        wall_seconds=wall_seconds,
    )


def _evaluate(session: Session, reporter: Reporter) -> float:
    loss = evaluate(session)
    reporter.evaluation({"step": session.step, "val_loss": loss, "tokens": session.tokens})
    return loss


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield a list that receives the first SIGINT or SIGTERM. A second signal ends the process at once.

    The files on the disk are consistent at any moment.
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
        before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, which handles the signals
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _note(session: Session, text: str) -> None:
    if session.here.is_first:
        print(f"note: {text}", file=sys.stderr)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
