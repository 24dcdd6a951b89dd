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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge.checkpoints.saving import latest_checkpoint
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import CorruptionError, NarrowgaugeError, RecordError, Terminated
from narrowgauge.gauges.recording.provenance import differences
from narrowgauge.gauges.recording.record import GO_BACK, Record
from narrowgauge.gauges.recording.step_row import symptom
from narrowgauge.runs.atomic_io import AGAIN, disk_errors
from narrowgauge.runs.events import Event
from narrowgauge.runs.finding import counted
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.models import MODELS, weights_file
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.console import Console
from narrowgauge.trainer.data.dataset import Dataset, open_data
from narrowgauge.trainer.resume_checks import changed_settings, unfinished_run
from narrowgauge.trainer.session import Session, build, data_of_run, describe, prepare_tokens
from narrowgauge.trainer.step import evaluate, train_step

_SIGPIPE = getattr(signal, "SIGPIPE", signal.SIGTERM)  # Windows has none


class DivergenceError(NarrowgaugeError):
    """Training was stopped at a bad step, as requested."""

    status = 1


def train(config: TrainConfig, console: Console | None = None) -> Path:
    """Train a model from the start, and return the run folder.

    Args:
        console: displays the progress; ``None`` for standard output.
    Raises:
        NarrowgaugeError: an invalid setting. Nothing is written then.
        KeyboardInterrupt: after Ctrl-C, once the checkpoint is saved. After SIGTERM :class:`~narrowgauge.errors.Terminated`.
    """
    ranks = all_ranks()
    config = ranks.of_first(lambda: config.validated().on_ranks(ranks.size))
    folder = Path(str(config.out))
    with console or _console(config) as shown:
        shown.stage("preparing the data")
        data = _opened_by_all(lambda: prepare_tokens(config), config)
        data.require(config.sequence_length)
        shown.stage("building the model")
        session = build(config, folder, data)

        def create() -> RunWriter:
            content = describe(session)
            content["data"]["unigram_loss"] = data.unigram_loss()  # of all tokens, so not again at each resume
            return RunWriter.create(folder, content)

        with _record(config, shown, create) as record:
            if ranks.is_first and data.tokenizer_path is not None:
                with disk_errors(folder, AGAIN):
                    shutil.copyfile(data.tokenizer_path, folder / "tokenizer.json")
            for note in [*data.notes, *session.notes]:
                record.event(Event("note", 0, note), shown=True)
            record.event(Event("start", 0, f"{Path(config.model).name} in {session.config.recipe.title}"))
            shown.say(f"{Path(config.model).name} · {session.config.recipe.title} · {folder}")
            if config.model not in MODELS:
                weights = weights_file(Path(config.model))
                shown.say(f"initial weights: {f'read from {weights}' if weights else f'drawn from seed {config.seed}'}")
            _watch(session, record, shown)
            _run(session, record, shown)
    return folder


def resume(folder: str | Path, stop_after: int | None = None, console: Console | None = None) -> Path:
    """Resume a run from its latest good checkpoint, with the settings of its ``run.toml``, and return its folder.

    Settings that were edited since the checkpoint hold from there on. Events record the changes. Without a good checkpoint, the
    run starts again at step 0 with the settings of ``run.toml``.

    Args:
        stop_after: stop with a checkpoint after this step; ``None`` runs to the end.
        console: displays the progress; ``None`` for standard output.
    Raises:
        RecordError: the run is missing or finished, another process is writing it, or its data or records do not match
            its checkpoint.
    """
    folder, ranks = Path(folder), all_ranks()
    run = unfinished_run(folder)
    config = replace(TrainConfig.from_dict(run.config, str(folder / "run.toml")), stop_after=stop_after)
    config.require_agreement()
    shown = console or _console(config)
    with _record(config, shown, lambda: RunWriter.open(folder)) as record, shown:
        events: list[Event] = []

        def report_damage(path: Path, reason: str) -> None:
            events.append(Event("checkpoint_damaged", 0, f"{path.name} is damaged ({reason}) and was not loaded"))

        checkpoint = latest_checkpoint(folder, report_damage, ranks)
        data = _opened_by_all(lambda: data_of_run(run, config, checkpoint), config)
        shown.stage("building the model")
        session = build(config, folder, data)
        present = describe(session)
        state = {} if checkpoint is None else session.load(checkpoint)
        step = session.step
        if stop_after is not None and stop_after <= step:
            raise RecordError(
                f"{folder} has done {counted(step, 'step')}, and a stop after step {stop_after} was requested.",
                "Name a later step with --stop-after, or leave it out.",
            )
        _watch(session, record, shown)
        record.go_back(step, digests=state.get("rows"))
        changed = changed_settings(state.get("settings", present["config"]), present["config"])
        # The text may have moved; its tokens are those of the start.
        notes = [
            f"{n} was {old} up to step {step} and is {new} from there on" for n, old, new in changed if n != "data"
        ]
        events += [Event("note", step, note, detector="changed-settings") for note in notes]
        events += [Event("note", step, note, detector="changed-software") for note in differences(run.run, present)]
        for event in events:
            record.event(event, shown=True)
        where = f" on {ranks.size} ranks" if ranks.size > 1 else ""
        record.event(Event("resume", step, f"from step {step}{where}"))
        shown.say(f"{Path(config.model).name} · {session.config.recipe.title} · {folder}")
        _run(session, record, shown)
    return folder


def _console(config: TrainConfig) -> Console:
    return Console(config.steps, config.log_every, is_quiet=not all_ranks().is_first)


def _record(config: TrainConfig, console: Console, open_folder: Callable[[], RunWriter]) -> Record:
    return Record(open_folder, config.recipe, console.event, console.row)


def _watch(session: Session, record: Record, console: Console) -> None:
    """Record the optimizer and the gauges. Must precede the first step, whose compiled code calls the gauges."""
    session.optimizer.on_alarm = lambda alarms: console.say(
        f"warning: {min(alarms, key=lambda alarm: alarm.reading.edq).message}"
    )
    record.watch(session.model, session.optimizer, every=session.config.gauges_every)
    record.reader.peak_tokens_per_second = session.peak_tokens_per_second()


def _opened_by_all(open_first: Callable[[], Dataset], config: TrainConfig) -> Dataset:
    """Open the data on rank 0, which may tokenize text. Then open it on the others."""
    ranks = all_ranks()
    data = ranks.together(lambda: open_first() if ranks.is_first else None)
    folder = ranks.gather(data and str(data.folder))[0]
    return data or open_data(str(folder), config.held_out, config.seed)


def _run(session: Session, record: Record, console: Console) -> None:
    """Take the steps that are left."""
    config, here = session.config, session.here
    with _signals() as signals:
        console.start(config.recipe.title, session.step)

        def save() -> None:
            session.verify_replicas()
            if record.writer is not None:
                record.writer.sync()
            session.save({} if record.writer is None else record.writer.digests())

        session.fingerprints.before_first(session.step)
        record.fingerprint(session.fingerprints)
        try:
            while session.step < config.steps:
                # Unless spikes are only reported, the step is judged before its update, so that a spike changes no weight.
                judge = None if config.on_spike == "report" else record.alarms.judge
                record.reader.begin()
                columns = train_step(session, judge)
                row = record.step({**columns, "tokens": record.tokens + config.tokens_per_step})
                record.fingerprint(session.fingerprints)
                is_last = session.step == config.steps
                if _is_due(session.step, config.eval_every) and not is_last:
                    record.eval({"val_loss": evaluate(session)})
                if config.on_spike == "stop" and record.is_bad:
                    save()  # the step as skipped, so that a resume continues behind it
                    session.saver.wait()
                    record.event(Event("divergence", session.step, symptom(row), advice=GO_BACK))
                    raise DivergenceError(f"stopped after step {session.step}: {symptom(row)}.", GO_BACK)
                # A signal may reach the ranks in different steps. All stop after the same step.
                left = _SIGPIPE if console.rich.reader_left else 0
                number = here.largest(signals[0] if signals else left)
                is_stopping = bool(number) or (session.step == config.stop_after and not is_last)
                if is_stopping or is_last or _is_due(session.step, config.checkpoint_every):
                    save()
                if is_stopping:
                    session.saver.close()
                    record.stop("interrupted" if number else "as requested by stop_after")
                    console.say(
                        f"Stopped after step {session.step}. Continue with: narrowgauge resume {session.folder}"
                    )
                    if number:
                        ends = {signal.SIGTERM: Terminated, _SIGPIPE: BrokenPipeError}
                        raise ends.get(signal.Signals(number), KeyboardInterrupt)()
                    return
            summary = _summary(session, record)
            session.saver.close()
            record.finish(summary)
            console.summary([summary])
        except CorruptionError as error:
            message, tensor, rank = error.message.rstrip("."), error.tensor, error.rank
            record.event(
                Event("corruption", session.step, message, tensor, rank=rank, advice=error.advice, detector="replicas")
            )
            raise
        finally:
            session.saver.leave()
            if session.reduction is not None:
                session.reduction.close()  # its hooks on parameters would keep the process group
            if record.alarm_kinds:
                kinds = ", ".join(kind.replace("_", " ") for kind in record.alarm_kinds)
                console.say(f"{kinds}: narrowgauge diagnose {session.folder} shows where")


def _summary(session: Session, record: Record) -> Row:
    """Return the content of ``summary.json``. Evaluate first if the last step has no evaluation yet."""
    if record.evaluated != session.step:
        record.eval({"val_loss": evaluate(session)})
    return record.summary(
        recipe=session.config.recipe.to_value(),
        model=session.config.model,
        bytes_per_param=session.bytes_per_param(),
        weights_fingerprint=session.weights_fingerprint(),
    )


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


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
