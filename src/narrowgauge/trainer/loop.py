"""The training loop, which can be interrupted at any moment and resumed with the same bits.

The loop contains no arithmetic and no format; it calls ``prepare`` like any training loop. Each step is recorded before the
next begins, and checkpoints are written atomically, so a killed run loses only the steps since its last checkpoint and
repeats them with the same bits.

Several ranks run this loop side by side. What depends on files, on the clock or on a signal is decided by the first, or agreed,
so that all take the same branches; the first alone writes the run folder and prints.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from narrowgauge._torch.inductor import graphs_announced, why_compiling_failed
from narrowgauge.distributed.launch.process_group import beat
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.traffic import Traffic
from narrowgauge.errors import ChipError, CorruptionError, RecordError
from narrowgauge.gauges.recording.provenance import differences
from narrowgauge.gauges.recording.run_reporter import NullScreen, Reporter, Screen, first_writer
from narrowgauge.machine.cpp_compiler import compiled_folder
from narrowgauge.optim import compilation
from narrowgauge.runs.atomic_io import AGAIN, disk_errors, held_folder
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import Run, is_run, read_run, read_settings
from narrowgauge.runs.writer import RunWriter, remove_leftovers, require_free
from narrowgauge.spec.models import MODELS
from narrowgauge.trainer import language_model
from narrowgauge.trainer.config import TrainConfig, left_by_a_kill
from narrowgauge.trainer.console import Console
from narrowgauge.trainer.counted_memory import CountedSteps
from narrowgauge.trainer.data.dataset import Dataset, open_data, prepare_data
from narrowgauge.trainer.interruption import interruptible, stopped_by
from narrowgauge.trainer.memory import require_batch
from narrowgauge.trainer.recovery import Recovery
from narrowgauge.trainer.resume_checks import accept, describe_changes, moved, unfinished_run, with_present_ranks
from narrowgauge.trainer.session import Session, build, describe
from narrowgauge.trainer.step import evaluate, summarize, train_step


def train(config: TrainConfig, *, lent: bool = False, screen: Screen | None = None) -> Path:
    """Train a model from the start, and return the run folder.

    Args:
        lent: the caller has placed the data in the folder.
        screen: displays the progress; ``None`` for standard output.
    Raises:
        NarrowgaugeError: an invalid setting; nothing is written then.
        KeyboardInterrupt: after Ctrl-C, once the checkpoint is saved; after SIGTERM :class:`~narrowgauge.errors.Terminated`.
    """
    config, absent = all_ranks().of_first(lambda: _begin(config))
    folder = Path(str(config.out))
    with _alone(folder, "make a run in", "choose another --out"), _shown(config, screen) as shown:
        return _train(config, folder, absent, lent, shown)


def _begin(config: TrainConfig) -> tuple[TrainConfig, list[Path]]:
    """Check the settings and make the run folder; returns them filled in, and the folders that it made."""
    config = config.validated().located()
    require_batch(config)
    folder = Path(str(config.out))
    require_free(folder, beside=left_by_a_kill(folder))
    absent = [place for place in (folder, *folder.parents) if not place.exists()]
    with disk_errors(folder, AGAIN):
        folder.mkdir(parents=True, exist_ok=True)
    return config, absent


@contextmanager
def _alone(folder: Path, doing: str, instead: str) -> Iterator[None]:
    """Lock a run folder for this job, from before anything is written to the end of the run."""

    def require(is_held: bool) -> None:
        if not is_held:
            raise RecordError(
                f"Cannot {doing} {folder}: another process is writing it.", f"Wait until it ends, or {instead}."
            )

    with held_folder(folder) if all_ranks().is_first else nullcontext(True) as is_held:
        all_ranks().of_first(lambda: require(is_held))
        yield


@contextmanager
def _shown(config: TrainConfig, screen: Screen | None) -> Iterator[Screen]:
    """The given screen, or standard output; on other ranks one that shows nothing."""
    if not all_ranks().is_first:
        yield NullScreen()
        return
    if screen is not None:
        yield screen
        return
    with Console(config.steps, config.log_every) as console:
        yield console


def _train(config: TrainConfig, folder: Path, absent: list[Path], lent: bool, screen: Screen) -> Path:
    """:func:`train` in a locked folder."""
    all_ranks().of_first(lambda: require_free(folder, beside=left_by_a_kill(folder)))
    prepared = (folder / "data").exists()
    try:
        all_ranks().of_first(lambda: remove_leftovers(folder))
        # Before the data are prepared, which may take long.
        weights = all_ranks().of_first(lambda: language_model.require_initial_weights(config.model))
        data = _prepared_data(config, folder, screen.stage)
        data.require(config.sequence_length)
        screen.stage("building the model")
        session = build(config, folder, data, weights)
        writer = first_writer(folder, lambda: RunWriter.create(folder, describe(session), beside=("data",)))
    except BaseException:
        if all_ranks().is_first:
            _forget(folder, absent, prepared)
        raise
    with writer:
        if prepared and not lent:
            writer.event(
                Event("note", 0, "the data were prepared by an earlier command that ended before its first step")
            )
        for note in [*data.notes, *session.notes]:
            writer.event(Event("note", 0, note))
        writer.event(Event("start", 0, f"{Path(config.model).name} in {session.config.title}"))
        _run(session, writer, screen)
    return folder


def resume(
    folder: str | Path,
    stop_after: int | None = None,
    accept_changes: bool = False,
    *,
    chosen: Mapping[str, Any] | None = None,
    screen: Screen | None = None,
) -> Path:
    """Resume a run from its latest good checkpoint, with the settings of its ``run.toml``, and return its folder.

    Args:
        stop_after: stop with a checkpoint after this step; ``None`` runs to the end.
        accept_changes: resume even if ``run.toml`` was changed or records are missing; events record what.
        chosen: changed settings, of ``CHANGEABLE_ON_RESUME``; ``run.toml`` then has them, and an event records the step.
        screen: displays the progress; ``None`` for standard output.
    Raises:
        RecordError: no such run, a finished one, one that another process is writing, or one whose data, settings or
            records do not match its checkpoint.
    """
    folder = Path(folder)
    read_settings(folder)
    with _alone(folder, "write the run", "stop it, then narrowgauge resume"):
        run = unfinished_run(folder)
        # Read before anything is written: a damaged record stays as it is.
        began_with, settings = run.data_fingerprint, {**run.config, **(chosen or {}), "stop_after": stop_after}
        given = {name: value for name, value in settings.items() if value is not None}
        config = TrainConfig.from_dict(given, str(folder / "run.toml"))
        config.require_agreement()
        with _shown(config, screen) as shown:
            return _go_on(run, config, began_with, accept_changes, shown)


def _go_on(run: Run, config: TrainConfig, began_with: str, accept_changes: bool, screen: Screen) -> Path:
    """:func:`resume` of a locked run."""
    folder, stop_after = run.path, config.stop_after
    screen.stage("checking the tokens")
    has_data = all_ranks().of_first(lambda: (folder / "data").exists())
    data = open_data(folder) if has_data else _prepared_data(config, folder, screen.stage)
    data.require_same(began_with)
    screen.stage("building the model")
    session = build(config, folder, data)
    noted: list[Event] = []

    def damaged(path: Path, reason: str) -> None:
        noted.append(Event("checkpoint_damaged", 0, f"{path.name} is damaged ({reason}) and was not loaded"))

    session.restore(damaged)
    if stop_after is not None and stop_after <= session.step:
        raise RecordError(
            f"{folder} has done {session.step} steps, and a stop after step {stop_after} was requested.",
            "Name a later step with --stop-after, or leave it out.",
        )
    standing = session.standing
    accepted = all_ranks().of_first(lambda: accept(run, session.config, session.step, standing, accept_changes))
    present = describe(session)
    changed = moved(run.run, present)
    since = describe_changes(changed, session.step)
    with first_writer(folder, lambda: _rewound(folder, session.step, accept_changes)) as writer:
        if changed:
            all_ranks().of_first(lambda: writer.amend(with_present_ranks(run.run, present)))
        noted += [Event("note", session.step, said) for said in how_it_ended(run)]
        others = {"changed-settings": (*accepted, *since), "changed-software": differences(run.run, present)}
        noted += [Event("note", session.step, said, detector=check) for check, all in others.items() for said in all]
        for event in noted:
            writer.event(event)
            _note(session, f"{event.message}.")
        writer.event(Event("resume", session.step, f"from step {session.step}"))
        _run(session, writer, screen)
    return folder


def how_it_ended(run: Run) -> list[str]:
    """At most one note on how a resumed run ended, where it did not stop by itself: a sentence without a full stop."""
    last = next((event for event in reversed(run.events) if event["kind"] in _BEGINNINGS + _ENDS), None)
    if last is None or (last["kind"] in _ENDS and last["kind"] != "lost"):
        return []
    if last["kind"] == "lost":
        return [f"the run was ended: {last.get('message')}"]
    step = run.steps[-1]["step"] if run.steps else 0
    return [f"the run ended after step {step} without a word: it was killed, an error ended it, or its machine failed"]


_BEGINNINGS, _ENDS = ("start", "resume"), ("stop", "finish", "lost", "divergence", "corruption")


def _rewound(folder: Path, step: int, accept_lost: bool) -> RunWriter:
    writer = RunWriter.open(folder)
    try:
        writer.rewind(step, accept_lost=accept_lost)
    except BaseException:
        writer.close()
        raise
    return writer


def _forget(folder: Path, absent: list[Path], prepared: bool) -> None:
    """Remove what a refused run created: its folder or the data in it, and parent folders that did not exist."""
    if is_run(folder):
        return
    if not prepared:
        shutil.rmtree(folder if folder in absent else folder / "data", ignore_errors=True)
    with suppress(OSError):  # another run may use it by now
        for parent in absent[1:]:
            parent.rmdir()


def _prepared_data(config: TrainConfig, folder: Path, stage: Callable[[str], None] = lambda what: None) -> Dataset:
    """The data of a run, which the first rank prepares while the others wait."""
    prepared: list[Dataset] = []

    def prepare() -> None:
        prepared.append(
            prepare_data(
                config.data,
                folder,
                vocab_size=language_model.vocabulary_size(config.model),
                tokenizer=config.tokenizer,
                held_out=config.held_out,
                seed=config.seed,
                stage=stage,
            )
        )

    all_ranks().of_first(prepare)
    return prepared[0] if prepared else open_data(folder)


def _run(session: Session, writer: RunWriter, console: Screen) -> None:
    config, began = session.config, time.perf_counter() - session.seconds
    shown, watched = compiling_shown(console), session.watched()
    with interruptible(console.stopping) as interrupted, shown, watched, Traffic() as session.traffic:
        loggers = config.loggers if session.here.is_first else ()
        reporter = Reporter(writer, console, config.recipe, loggers, config.to_dict(), session.step)
        _announce(session, console)
        session.optimizer.on_alarm = lambda alarms: reporter.lost_updates(alarms, session.step + 1)
        recovery, counted = Recovery(session, reporter), CountedSteps(session)
        console.start(config.title, session.step)

        def save() -> None:
            session.verifier.verify_state(session.step)
            writer.sync()
            session.seconds = time.perf_counter() - began
            session.save(writer.num_rows)

        session.fingerprints.before_first(session.step)
        reporter.fingerprint(session.fingerprints)
        if config.on_spike == "rollback" and session.step == 0:
            save()  # a checkpoint to roll back to
        try:
            while session.step < config.steps:
                judgement = recovery.judgement()
                row = counted.take(partial(train_step, session, judgement))
                if recovery.takes_over(row):
                    continue
                reporter.step(row, judgement, session.linears, session.gauges)
                reporter.fingerprint(session.fingerprints, must_agree=config.verify_every > 0)
                if _is_due(session.step, config.eval_every) and session.step < config.steps:
                    _evaluate(session, reporter)
                recovery.after(row, save)
                beat(session.step)
                last = session.step == config.steps
                # A signal may reach the ranks in different steps: all stop after the same one.
                signal = session.here.largest(interrupted[0] if interrupted else 0)
                stopping = bool(signal) or (session.step == config.stop_after and not last)
                if stopping or last or _is_due(session.step, config.checkpoint_every):
                    save()
                if stopping:
                    _stop(session, reporter, signal)
                    return
            _finish(session, reporter, time.perf_counter() - began)
        except CorruptionError as error:
            message, tensor, rank = error.message.rstrip("."), error.tensor, error.rank
            reporter.event(
                Event("corruption", session.step, message, tensor, rank=rank, advice=error.advice, detector=error.check)
            )
            raise
        except Exception as error:
            if session.config.compile and (reason := why_compiling_failed(error)):
                raise ChipError(
                    f"the model could not be compiled in step {session.step + 1}: {reason.rstrip('.')}.",
                    f"Fix that, or pass --no-compile. PyTorch compiles into {compiled_folder()}.",
                ) from error
            raise
        finally:
            session.saver.leave()
            reporter.close()
            reporter.advise()


def _announce(session: Session, console: Screen) -> None:
    console.say(f"{Path(session.config.model).name} · {session.config.title} · {session.folder}")
    if session.here.is_first and session.step == 0 and session.config.model.strip().lower() not in MODELS:
        weights = session.initial_weights
        drawn = f"drawn from seed {session.config.seed}; the model's folder holds none"
        console.say(f"initial weights: {drawn if weights is None else f'read from {weights}'}")
    for note in session.notes:
        _note(session, note)


@contextmanager
def compiling_shown(console: Screen) -> Iterator[None]:
    """Count on the screen what is compiled within the block."""
    numbers: Counter[str] = Counter()

    def tell(what: str) -> None:
        numbers[what] += 1
        console.compiling(what, numbers[what])

    kernels = partial(tell, "kernel")
    compilation.announce.append(kernels)
    try:
        with graphs_announced(partial(tell, "graph")):
            yield
    finally:
        compilation.announce.remove(kernels)


def _note(session: Session, said: str) -> None:
    if session.here.is_first:
        print(f"note: {said}", file=sys.stderr)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _stop(session: Session, reporter: Reporter, signal: int) -> None:
    session.saver.close()
    reporter.event(Event("stop", session.step, "interrupted" if signal else "as requested by stop_after"))
    reporter.console.say(f"Stopped after step {session.step}. Go on with: narrowgauge resume {session.folder}")
    if signal:
        raise stopped_by(signal)


def _finish(session: Session, reporter: Reporter, wall_seconds: float) -> None:
    done = all_ranks().of_first(
        lambda: [row["val_loss"] for row in read_run(session.folder).evals if row["step"] == session.step]
    )
    val_loss = done[-1] if done else _evaluate(session, reporter)
    summary = summarize(session, val_loss, wall_seconds)
    session.saver.close()
    reporter.finish(summary)


def _evaluate(session: Session, reporter: Reporter) -> float:
    began = time.perf_counter()
    row = {"step": session.step, "val_loss": evaluate(session), "tokens": session.tokens}
    row["evaluation_seconds"] = time.perf_counter() - began
    reporter.evaluation(row)
    return float(row["val_loss"])
