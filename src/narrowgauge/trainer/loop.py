"""The training loop: a client of :class:`narrowgauge.RunRecorder`, as a user could write it.

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
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from narrowgauge.checkpoints.saving import latest_checkpoint
from narrowgauge.distributed.job import require_same, threads_of
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import CorruptionError, Terminated
from narrowgauge.measuring.hooks import RunNotice
from narrowgauge.measuring.recorder import RunRecorder
from narrowgauge.optim.audit import UpdateLossWarning
from narrowgauge.runs.atomic_io import disk_errors
from narrowgauge.runs.finding import sentences
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import EVAL, STEP, Row
from narrowgauge.spec.models import MODELS, weights_file
from narrowgauge.spec.toml import load_toml
from narrowgauge.trainer import door
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.door import Entry
from narrowgauge.trainer.session import Session, build, data_of, emulated, open_on_ranks
from narrowgauge.trainer.step import evaluate, train_step

_MUST_STOP = 2
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
_ROUTINE = {"start", "resume", "stop", "checkpoint", "finish", "skip", "unseen"}
_COLUMNS = ("loss", "tokens_per_second", "lr", "edq")
Reasons = list[int | OSError]
"""Why a run must stop: signals, and a line that could not be printed. The first one counts."""


def train(
    settings: TrainConfig | Mapping[str, Any],
    *,
    stream: TextIO | None = None,
    is_verbose: bool = True,
) -> Path:
    """Train a model, and return the run folder.

    If the folder ``out`` holds a run, continue it with these settings.

    A run continues from its latest good checkpoint with its own settings, overlaid with those given
    here. Events record the changes. A run that was killed before its first checkpoint begins again
    at step 0.

    Args:
        settings: those that are named; a ``TrainConfig`` names all but those at ``None``.
        stream: for the progress; ``None`` for standard output.
        is_verbose: print steps and evaluations, not only notes.
    Raises:
        NarrowgaugeError: an invalid setting. Nothing is written then.
        RecordError: the run is being written, has no good checkpoint left, or cannot change a
            setting; or the model or data has changed.
        KeyboardInterrupt: after Ctrl-C, once the checkpoint is saved. After SIGTERM and SIGHUP
            :class:`~narrowgauge.errors.Terminated`.
        OSError: progress could not be printed; the checkpoint is saved.
    """
    named = settings.to_dict() if isinstance(settings, TrainConfig) else settings
    return train_entry(enter(named), stream=stream, is_verbose=is_verbose)


def resume(folder: str | Path, stop_after: int | None = None, **options: Any) -> Path:
    """Continue the run in a folder, as :func:`train` with no other setting."""
    named = {"out": str(folder), "stop_after": stop_after}
    return train_entry(enter(named, goes_on=True), **options)


def enter(named: Mapping[str, Any], *, goes_on: bool = False) -> Entry:
    """Return the run that settings ask for, the same on all ranks. All call it."""
    ranks = all_ranks()
    entry = ranks.of_first(lambda: door.enter(named, ranks.size, goes_on=goes_on))
    with _threads_of(entry.config):
        require_same(named)
    return entry


def train_entry(entry: Entry, *, stream: TextIO | None = None, is_verbose: bool = True) -> Path:
    """Train the run of an entry, as :func:`train`."""
    config = entry.config
    reasons: Reasons = []
    console = Console(config, stream, is_verbose, reasons)
    line = entry.nothing_left()
    if line:
        console.say(line)
        return entry.folder
    with _threads_of(config), warnings.catch_warnings():
        for notice in (RunNotice, UpdateLossWarning):
            warnings.simplefilter("ignore", notice)  # the events are printed
        session, events = _open(entry)
        with _recorder_of(session, console, entry.run is not None) as recorder:
            for event in events:
                recorder.event(**event)
            console.say(f"{Path(config.model).name} · {config.recipe.title} · {entry.folder}")
            if session.step == 0 and config.model not in MODELS:
                source = weights_file(Path(config.model)) or f"drawn from seed {config.seed}"
                console.say(f"initial weights: {source}")
            _run(session, recorder, console, reasons)
    return entry.folder


def _threads_of(config: TrainConfig) -> AbstractContextManager[None]:
    return threads_of(config.threads, config.recipe.reduction.order_invariant)


def _open(entry: Entry) -> tuple[Session, list[Row]]:
    """Return the session of a new run, or of its latest good checkpoint, and events: what differs
    from what was asked for, what has changed, and which checkpoints are damaged.
    """
    config, run = entry
    data = open_on_ranks(config)
    if run is None:
        session = build(config, entry.folder, data)
        notes = [*data.notes, *emulated(session)]
        return session, [{"what": "note", "words": note} for note in notes]
    checkpoint, damaged = latest_checkpoint(entry.folder, all_ranks())
    before = run
    state: Row = {}
    if checkpoint is not None:
        state = checkpoint.state()
        before = Run(entry.folder, load_toml(state["run"]))
    else:
        door.require_no_checkpoint(run, damaged)
    door.require_same_run(before, config, data.fingerprint)
    session = build(config, entry.folder, data)
    if checkpoint is not None:
        session.load(checkpoint)
    door.require_steps_left(config, session.step)
    events = door.changes(before.config, session.config, session.step)
    events += door.lost_rows(run, state.get("rows", {}), session.step)
    for damage in damaged:
        message = f"{damage} and was not loaded"
        events.append({"what": "damaged-checkpoint", "words": message, "severity": "warning"})
    return session, events


def _recorder_of(session: Session, console: Console, goes_on: bool) -> RunRecorder:
    """Create the record of a run, or open it and go back to the step of the session.

    Must precede the first step, whose compiled code calls the gauges.
    """
    config = session.config
    folder = session.folder
    tables = {} if goes_on else {"data": data_of(session)}
    recorder = RunRecorder(
        folder, session.model, session.optimizer, recipe=config.recipe, settings=config.to_dict(),
        gauges_every=config.gauges_every, fingerprints_every=config.fingerprints_every,
        on_row=console.row, resume=goes_on, tables={**tables, "recorder": None},
    )  # fmt: skip
    if goes_on:
        recorder.go_back(session.step, tokens=session.sequences * config.sequence_length)
    tokenizer = session.data.tokenizer_path
    if session.here.is_first and tokenizer is not None:
        with disk_errors(folder):
            shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return recorder


def _run(session: Session, recorder: RunRecorder, console: Console, reasons: Reasons) -> None:
    """Train until the last step or a reason to stop, and end with a checkpoint."""
    config = session.config
    is_stopped = False
    with _signals(reasons), _ended(session, recorder, console):
        while session.step < config.steps and not is_stopped:
            recorder.step(tokens=config.tokens_per_step, **train_step(session))
            is_last = session.step == config.steps
            if is_last or _is_due(session.step, config.eval_every):
                recorder.evaluate(evaluate(session))
            # A signal, or the end of a save, may reach the ranks in different steps. All act after
            # the same step.
            state = session.here.largest(_MUST_STOP if reasons else int(session.saver.has_ended))
            is_stopped = not is_last and (state == _MUST_STOP or session.step == config.stop_after)
            is_due = is_last or is_stopped or _is_due(session.step, config.checkpoint_every)
            if state or is_due:
                _settle_save(session, recorder)
            if is_due:
                session.save()
        _settle_save(session, recorder)
        session.saver.close()
        recorder.close(not is_stopped, bytes_per_param=session.bytes_per_param())
    if not is_stopped:
        return console.say(f"Finished after {session.step} steps.")
    console.say(
        f"Stopped after step {session.step}. Continue with: narrowgauge resume {session.folder}"
    )
    failures = [reason for reason in reasons if isinstance(reason, OSError)]
    signals = [reason for reason in reasons if isinstance(reason, int)]
    number = session.here.largest(max(signals, default=0))
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number:
        raise Terminated
    if failures:
        raise failures[0]


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _settle_save(session: Session, recorder: RunRecorder) -> None:
    """Wait for the checkpoint in flight, and record it. A failed one ends the run here."""
    step = session.saver.wait()
    if step is not None:
        recorder.event("checkpoint", f"step-{step:08d} is complete", at=step)


@contextmanager
def _ended(session: Session, recorder: RunRecorder, console: Console) -> Iterator[None]:
    """Record corruption, and release what a run holds, however it ends."""
    try:
        yield
    except CorruptionError as error:
        words = sentences(error.message, error.advice)
        where: Row = {"tensor": error.tensor or "", "rank": error.rank}
        recorder.event("corruption", words, severity="error", **where)
        raise
    finally:
        session.saver.leave()
        if session.reduction is not None:
            session.reduction.close()  # its hooks on parameters would keep the process group
        if console.alarms:
            kinds = ", ".join(console.alarms)
            console.say(f"{kinds}: narrowgauge diagnose {session.folder} shows where")


@contextmanager
def _signals(reasons: Reasons) -> Iterator[None]:
    """Add the first SIGINT, SIGTERM or SIGHUP to the reasons. A second one ends the process."""
    before: dict[int, Any] = {}

    def receive(number: int, frame: Any) -> None:
        reasons.append(number)
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
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Console:
    """Print the progress of a run on rank 0: notes always, other lines if ``is_verbose``.

    No line follows one that could not be written, whose error is a reason to stop.

    Attributes:
        alarms: the kinds of alarms so far, and the last step of each.
    """

    def __init__(
        self, config: TrainConfig, stream: TextIO | None, is_verbose: bool, reasons: Reasons
    ) -> None:
        self.config = config
        self.stream = stream
        self.is_verbose = is_verbose
        self.reasons = reasons
        self.alarms: dict[str, int] = {}

    def say(self, line: str) -> None:
        if self.is_verbose:
            self.note(line)

    def note(self, line: str) -> None:
        has_failed = any(isinstance(reason, OSError) for reason in self.reasons)
        if has_failed or not all_ranks().is_first:
            return
        try:
            print(line, file=self.stream or sys.stdout, flush=True)
        except OSError as error:
            self.reasons.append(error)

    def row(self, kind: str, row: Row) -> None:
        """Print a row that was written."""
        step = row["step"]
        place = f"step {step:>6}/{self.config.steps}"
        is_due = _is_due(step, self.config.log_every) or step in (1, self.config.steps)
        if kind == "evals":
            self.say(f"{place}  {EVAL['val_loss'].text(row)}")
        elif kind == "events":
            self.event(row)
        elif kind == "steps" and is_due:
            words = [STEP[name].text(row) for name in _COLUMNS if row.get(name) is not None]
            self.say("  ".join([place, *words]))

    def event(self, row: Row) -> None:
        """Print an event that needs attention. Of the alarms of a step print one tensor's."""
        what = row["what"].replace("-", " ")
        tensor = f"{row['tensor']}: " if row.get("tensor") else ""
        line = f"{what}: {tensor}{sentences(row['text'])}"
        if row["what"] in _ROUTINE:
            return
        if what.startswith(("note", "changed")):
            self.note(line)
        elif row.get("severity") == "note":
            self.say(line)
        elif self.alarms.get(what) != row["step"]:
            self.alarms[what] = row["step"]
            self.say(line)
