"""``narrowgauge train``: begin a run, or go on with the one in ``out``.

Settings come from the newest good checkpoint, and those that are named replace them. Everything
that decides the next step is in the checkpoint: step, weights and states. So a killed run loses only
the steps since its last checkpoint, and repeats them with the same bits on any number of ranks.

On several ranks rank 0 decides everything that depends on files, on the clock or on a signal.
"""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import tomli_w

from narrowgauge.errors import CorruptionError, RecordError, Terminated
from narrowgauge.runs.atomic_io import disk_errors, write_whole
from narrowgauge.runs.finding import counted, sentences
from narrowgauge.runs.places import FolderLock, is_run, require_free
from narrowgauge.runs.record import read_settings as read_run_toml
from narrowgauge.runs.schema import VERSION, Row, short
from narrowgauge.runs.writer import toml_value
from narrowgauge.trainer import checkpoints
from narrowgauge.trainer.progress import Progress
from narrowgauge.trainer.settings import FIXED, Settings
from narrowgauge.trainer.tokens import Tokens, copy_tokenizer, open_tokens

if TYPE_CHECKING:
    from narrowgauge.measuring.recorder import RunRecorder
    from narrowgauge.trainer.session import Session

_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
_OF_A_SITTING = ("out", "data", "stop_after", "report_to")


class Entry(NamedTuple):
    """A run that may begin or go on: its checked settings, and its newest good checkpoint.

    ``notes`` are the checkpoint's, ``events`` say what differs from what was asked for.
    """

    settings: Settings
    checkpoint: Path | None = None
    notes: Mapping[str, Any] = {}
    events: tuple[Row, ...] = ()

    @property
    def folder(self) -> Path:
        return self.settings.folder

    @property
    def is_finished(self) -> bool:
        has_summary = (self.folder / "summary.json").is_file()
        return has_summary and self.notes.get("step", 0) >= self.settings.steps


# ── before PyTorch is loaded ──────────────────────────────────────────────────────────────────────


def enter(named: Mapping[str, Any], num_ranks: int = 1) -> Entry:
    """Return the run that settings ask for. Nothing is written.

    Args:
        named: the settings that were named; others are those of the run in ``out``, or defaults.
    Raises:
        NarrowgaugeError: an invalid setting, a folder with something else, or a run that has no
            good checkpoint left or cannot change a setting.
    """
    settings = Settings.from_dict(named)
    if settings.out is None:
        return Entry(settings.checked(num_ranks))
    folder = Path(settings.out)
    checkpoint, damaged = checkpoints.newest(folder)
    if checkpoint is None:
        if damaged:
            raise RecordError(
                f"Cannot go on with {folder}: {'; '.join(damaged)}.",
                "Restore its checkpoints, or name another --out.",
            )
        if not is_run(folder):
            require_free(folder)
            return Entry(settings.checked(num_ranks))
        _require_own(folder)
        words = "no checkpoint was saved yet, so the run begins again"
        return Entry(settings.checked(num_ranks), events=(_note(words),))
    notes = checkpoints.notes_of(checkpoint)
    before = notes["settings"]
    lasting = {name: value for name, value in before.items() if name not in ("out", "stop_after")}
    settings = Settings.from_dict({**lasting, **named}, str(checkpoint)).checked(num_ranks)
    entry = Entry(settings, checkpoint, notes)
    changes = changed_settings(Settings.from_dict(before), settings)
    _require_same_run(entry, changes)
    events = [_note(f"{damage} and was not loaded", "damaged-checkpoint") for damage in damaged]
    for name, words in changes.items():
        events.append(_note(f"{name} {words} at step {notes['step']}", "changed-settings"))
    return entry._replace(events=tuple(events))


def _note(words: str, what: str = "note") -> Row:
    severity = "note" if what == "note" else "warning"
    return {"what": what, "words": words, "severity": severity}


def _require_own(folder: Path) -> None:
    """Refuse the record of another program's loop, which has the model and its data."""
    try:
        recorder = read_run_toml(folder).get("recorder")
    except RecordError:  # damaged
        return
    if recorder:
        raise RecordError(
            f"{folder} records a loop of its own, in {recorder.get('program') or 'another program'}.",
            "Name another --out. A loop with RunRecorder(resume=True) continues when its program "
            "starts again.",
        )


def changed_settings(before: Settings, now: Settings) -> dict[str, str]:
    """Return the settings that differ, each with both values.

    Example:
        >>> changed_settings(Settings(lr=0.003, out="a"), Settings(lr=0.007, out="b"))
        {'lr': 'was 0.003 and is 0.007'}
    """
    first = before.to_dict()
    changes = {}
    for name, new in now.to_dict().items():
        old = first.get(name)
        if name not in _OF_A_SITTING and old != new:
            changes[name] = f"was {short(old)} and is {short(new)}"
    return changes


def _require_same_run(entry: Entry, changes: Mapping[str, str]) -> None:
    """Refuse to go on with settings that decide a run's numbers from its start, or too early an end."""
    settings = entry.settings
    step = entry.notes["step"]
    problem = ""
    fixed = [name for name in FIXED if name in changes]
    if fixed:
        problem = f"its {fixed[0]} {changes[fixed[0]]}"
    elif entry.is_finished and settings.steps == step and changes:
        problem = f"it is finished, and {'; '.join(changes)} would change"
    elif settings.steps < step or (settings.stop_after or math.inf) <= step < settings.steps:
        problem = f"it has done {counted(step, 'step')}"
    elif open_tokens(str(settings.data)).fingerprint != entry.notes["tokens"]:
        problem = f"the tokens in {settings.data} are not those that it started with"
    if problem:
        raise RecordError(
            f"Cannot go on with {entry.folder} because {problem}.",
            "Leave the setting as it was, or start another run with another --out.",
        )


# ── training ──────────────────────────────────────────────────────────────────────────────────────


def train(
    settings: Settings | Mapping[str, Any],
    *,
    stream: TextIO | None = None,
    is_verbose: bool = True,
) -> Path:
    """Train a model, and return the run folder. All ranks call it.

    Args:
        settings: those that are named; ``Settings`` names all but those at ``None``.
        stream: for the progress; ``None`` for standard output.
        is_verbose: show steps and evaluations, not only notes.
    Raises:
        NarrowgaugeError: an invalid setting. Nothing is written then.
        RecordError: the run is being written, or cannot be continued with these settings.
        KeyboardInterrupt: after Ctrl-C, once the checkpoint is saved. After SIGTERM and SIGHUP
            :class:`~narrowgauge.errors.Terminated`.
        OSError: progress could not be shown; the checkpoint is saved.
    """
    from narrowgauge.distributed.ranks import all_ranks

    named = settings.to_dict() if isinstance(settings, Settings) else settings
    ranks = all_ranks()
    entry = ranks.of_first(lambda: enter(named, ranks.size))
    if entry.is_finished:
        if is_verbose and ranks.is_first:
            print(finished(entry), file=stream, flush=True)
        return entry.folder
    return train_entry(entry, stream=stream, is_verbose=is_verbose)


def finished(entry: Entry) -> str:
    return f"{entry.folder} is finished: {counted(entry.notes['step'], 'step')}."


def train_entry(entry: Entry, *, stream: TextIO | None = None, is_verbose: bool = True) -> Path:
    """Train the run of an entry, as :func:`train`."""
    # Imported late: what is refused is refused before PyTorch is loaded.
    from narrowgauge.distributed.job import require_same, threads_of
    from narrowgauge.distributed.ranks import all_ranks
    from narrowgauge.measuring.hooks import RunNotice
    from narrowgauge.optim.audit import UpdateLossWarning
    from narrowgauge.trainer.session import build

    settings = entry.settings
    with threads_of(None, settings.recipe.reduction.order_invariant), warnings.catch_warnings():
        for notice in (RunNotice, UpdateLossWarning):
            warnings.simplefilter("ignore", notice)  # the events are printed
        tokens = all_ranks().together(lambda: open_tokens(str(settings.data)))
        require_same({**settings.to_dict(), "tokens": tokens.fingerprint})
        session = build(settings, tokens)
        if entry.checkpoint is not None:
            load_into(session, entry.checkpoint)
        progress = Progress(session.settings, stream, is_verbose and all_ranks().is_first)
        try:
            with _recorder_of(session, entry, progress) as recorder:
                progress.say(
                    f"{Path(settings.model).name} · {settings.recipe.name} · {entry.folder}"
                )
                _run(session, recorder, progress)
        finally:
            progress.close()
            if session.reduction is not None:
                session.reduction.close()  # its hooks on parameters would keep the process group
        if progress.alarms:
            kinds = ", ".join(progress.alarms)
            progress.say(f"{kinds}: narrowgauge diagnose {entry.folder} shows where")
    return entry.folder


def load_into(session: Session, checkpoint: Path) -> None:
    """Set weights, states and step of a session to those of a good checkpoint."""
    notes = checkpoints.load(checkpoint, session.model, session.optimizer)
    session.step = notes["step"]
    session.optimizer.num_skipped = notes["num_skipped"]
    if session.scaler is not None:
        session.scaler.load_state_dict(notes["scaler"])


def save(session: Session) -> None:
    """Write a checkpoint of a session.

    Raises:
        CorruptionError: ranks hold different replicas; on all of them. The last checkpoint is from
            before the damage.
    """
    from narrowgauge.distributed.replica_verification import verify_replicas
    from narrowgauge.optim.loading import kept_tensors

    if session.here.size > 1:
        verify_replicas(kept_tensors(session.optimizer), session.step)
    settings = session.settings
    notes: Row = {
        "step": session.step, "settings": settings.to_dict(), "tokens": session.tokens.fingerprint,
        "vocab_size": session.tokens.vocab_size, "num_skipped": session.optimizer.num_skipped,
    }  # fmt: skip
    if session.scaler is not None:
        notes["scaler"] = session.scaler.state_dict()
    checkpoints.save(
        settings.folder, session.model, session.optimizer, notes, settings.keep_checkpoints
    )


def _recorder_of(session: Session, entry: Entry, progress: Progress) -> RunRecorder:
    """Create the record of a run, or open it and go back to the step of the session.

    Must precede the first step, whose compiled code calls the gauges.
    """
    from narrowgauge.measuring.recorder import RunRecorder

    settings = session.settings
    folder = entry.folder
    goes_on = session.here.of_first(lambda: _mend(session) if is_run(folder) else False)
    tables: dict[str, Any] = {} if goes_on else {"data": session.tokens.table()}
    recorder = RunRecorder(
        folder, session.model, session.optimizer, recipe=settings.recipe, settings=settings.to_dict(),
        gauges_every=settings.gauges_every, fingerprints_every=settings.fingerprints_every,
        on_row=progress.row, resume=goes_on, tables={**tables, "recorder": None},
    )  # fmt: skip
    if goes_on:
        recorder.go_back(session.step, tokens=session.step * settings.tokens_per_step)
    for event in entry.events:
        recorder.event(**event)
    if session.here.is_first and session.tokens.folder is not None:
        with disk_errors(folder):
            copy_tokenizer(session.tokens.folder, folder)
    return recorder


def _mend(session: Session) -> bool:
    """Write ``run.toml`` again if it cannot be read: it is a log, and the settings are known."""
    from narrowgauge.measuring.provenance import describe_run

    settings = session.settings
    file = settings.folder / "run.toml"
    tables: Row = {}
    with suppress(RecordError):
        tables = read_run_toml(settings.folder)
    if not tables.keys() >= {"model", "data", "versions", "machine"}:
        tables = describe_run(session.model, session.optimizer, settings.recipe, settings.to_dict())
        tables |= {"data": session.tokens.table(), "recorder": None}
        content = {**toml_value(tables), "schema_version": VERSION}
        lock = FolderLock(settings.folder)
        write_whole(file, tomli_w.dumps(content).encode())
        lock.release()
    return True


def _run(session: Session, recorder: RunRecorder, progress: Progress) -> None:
    """Train until the last step or a reason to stop, and end with a checkpoint."""
    from narrowgauge.trainer.session import evaluate, train_step

    settings = session.settings
    is_stopped = False
    with _signals() as received, _corruption_recorded(recorder):
        while session.step < settings.steps and not is_stopped:
            columns = train_step(session)
            recorder.step(tokens=settings.tokens_per_step, **columns)
            is_last = session.step == settings.steps
            if is_last or _is_due(session.step, settings.eval_every):
                recorder.evaluate(evaluate(session))
            # A signal may reach the ranks in different steps. All stop after the same one.
            must_stop = session.here.largest(int(bool(received or progress.failure)))
            is_stopped = not is_last and (bool(must_stop) or session.step == settings.stop_after)
            if is_last or is_stopped or _is_due(session.step, settings.checkpoint_every):
                save(session)
                recorder.event("checkpoint", f"step-{session.step:08d} is complete")
        recorder.close(not is_stopped, bytes_per_param=session.bytes_per_param())
        number = session.here.largest(max(received, default=0))
    if not is_stopped:
        return progress.say(f"Finished after {session.step} steps.")
    progress.say(
        f"Stopped after step {session.step}. Continue with: narrowgauge train --out {settings.out}"
    )
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number:
        raise Terminated
    if progress.failure is not None:
        raise progress.failure
    return None


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _corruption_recorded(recorder: RunRecorder) -> Iterator[None]:
    try:
        yield
    except CorruptionError as error:
        words = sentences(error.message, error.advice)
        where: Row = {"tensor": error.tensor or "", "rank": error.rank}
        recorder.event("corruption", words, severity="error", **where)
        raise


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the first SIGINT, SIGTERM or SIGHUP. A second one ends the process."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def receive(number: int, frame: Any) -> None:
        received.append(number)
        for handled in before:
            signal.signal(handled, signal.SIG_DFL)
        with suppress(OSError):  # its reader has left
            # Past Python's buffers: the signal may have interrupted a print.
            os.write(2, b"Stopping after this step; press Ctrl-C again to stop at once.\n")

    with suppress(ValueError):  # not in the main thread, which handles the signals
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                before[number] = signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def load(folder: Path) -> Session:
    """Load a run's session at its newest good checkpoint, for export or sampling.

    Raises:
        RecordError: it has no good checkpoint.
    """
    import numpy as np

    from narrowgauge.trainer.session import build

    checkpoint = checkpoints.require_checkpoint(folder)
    notes = checkpoints.notes_of(checkpoint)
    none = np.zeros(0, np.uint16)
    tokens = Tokens(none, none, notes["vocab_size"])
    session = build(Settings.from_dict(notes["settings"], str(checkpoint)), tokens)
    load_into(session, checkpoint)
    return session
