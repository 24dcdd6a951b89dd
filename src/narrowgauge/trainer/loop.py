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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from narrowgauge.checkpoints.saving import latest_checkpoint
from narrowgauge.distributed.job import require_same, threads_of
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import CorruptionError, Terminated
from narrowgauge.gauges.hub import RunNotice
from narrowgauge.gauges.recording.run_recorder import RunRecorder
from narrowgauge.optim.audit import UpdateLossWarning
from narrowgauge.runs.atomic_io import disk_errors
from narrowgauge.runs.finding import counted, sentences
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import EVAL, STEP, Row
from narrowgauge.spec.models import MODELS, weights_file
from narrowgauge.spec.toml import load_toml
from narrowgauge.trainer import door
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.session import Session, build, data_of, emulated, open_on_ranks
from narrowgauge.trainer.step import evaluate, train_step

_MUST_STOP = 2
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Progress:
    """Print the progress of a run on rank 0: notes always, other lines if ``is_verbose``.

    Attributes:
        failure: why a line could not be written: its reader has left, or the disk is full. No line
            follows.
        alarms: the kinds of alarms so far, and the last step of each.
    """

    def __init__(self, config: TrainConfig, stream: TextIO | None, is_verbose: bool) -> None:
        self.config = config
        self.stream = stream
        self.is_verbose = is_verbose
        self.is_quiet = not all_ranks().is_first
        self.failure: OSError | None = None
        self.alarms: dict[str, int] = {}

    def say(self, line: str, always: bool = False) -> None:
        if self.is_quiet or self.failure is not None or not (self.is_verbose or always):
            return
        try:
            print(line, file=self.stream or sys.stdout, flush=True)
        except OSError as error:
            self.failure = error

    def row(self, kind: str, row: Row) -> None:
        """Print a row that was written."""
        step = row["step"]
        place = f"step {step:>6}/{self.config.steps}"
        is_due = step % self.config.log_every == 0 or step in (1, self.config.steps)
        if kind == "events" and row["what"] not in _ROUTINE:
            what = row["what"].replace("-", " ")
            is_asked = what.startswith(("note", "changed"))
            if row.get("severity") != "note" and not is_asked:
                if self.alarms.get(what) == step:
                    return  # told of another tensor
                self.alarms[what] = step
            self.say(f"{what}: {sentences(row['advice'])}", always=is_asked)
        elif kind == "evals":
            self.say(f"{place}  {EVAL['val_loss'].text(row)}")
        elif kind == "steps" and is_due:
            columns = ("loss", "tokens_per_second", "lr", "edq")
            words = [STEP[name].text(row) for name in columns if row.get(name) is not None]
            self.say("  ".join([place, *words]))


_ROUTINE = {"start", "resume", "stop", "checkpoint", "finish", "skip", "unseen"}


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
    named_settings = settings.to_dict() if isinstance(settings, TrainConfig) else dict(settings)
    ranks = all_ranks()
    config, run = ranks.of_first(lambda: door.enter(named_settings, ranks.size))
    progress = Progress(config, stream, is_verbose)
    folder = Path(str(config.out))
    line = door.nothing_left(run, config)
    if line:
        progress.say(line)
        return folder
    with (
        threads_of(config.threads, config.recipe.reduction.order_invariant),
        warnings.catch_warnings(),
    ):
        for notice in (RunNotice, UpdateLossWarning):
            warnings.simplefilter("ignore", notice)  # the events are printed
        require_same(named_settings)
        session, events = _open(config, run)
        with _recorder_of(session, progress, run is not None) as recorder:
            for event in events:
                recorder.event(**event)
            progress.say(f"{Path(config.model).name} · {config.recipe.title} · {folder}")
            if session.step == 0 and config.model not in MODELS:
                source = weights_file(Path(config.model)) or f"drawn from seed {config.seed}"
                progress.say(f"initial weights: {source}")
            _run(session, recorder, progress)
    return folder


def resume(folder: str | Path, stop_after: int | None = None, **options: Any) -> Path:
    """Continue the run in a folder, as :func:`train` with no other setting."""
    door.run_of_trainer(Path(folder))
    return train({"out": str(folder), "stop_after": stop_after}, **options)


def _open(config: TrainConfig, run: Run | None) -> tuple[Session, list[dict[str, Any]]]:
    """Return the session of a new run, or of its latest good checkpoint, and events: what differs
    from what was asked for, what has changed, and which checkpoints are damaged.
    """
    folder = Path(str(config.out))
    if run is None:
        session = build(config, folder, open_on_ranks(config))
        notes = [*session.data.notes, *emulated(session)]
        return session, [{"what": "note", "words": note} for note in notes]
    checkpoint, damaged = latest_checkpoint(folder, all_ranks())
    before = run
    if checkpoint is not None:
        before = Run(folder, load_toml(checkpoint.state()["run"]))
    else:
        door.require_no_checkpoint(run, damaged)
    data = open_on_ranks(config)
    door.require_same_run(before, config, data.fingerprint)
    session = build(config, folder, data)
    if checkpoint is not None:
        session.load(checkpoint)
    door.require_steps_left(folder, config, session.step)
    events = door.changes(before.config, session.config, session.step)
    first = run.steps[0]["step"] if run.steps else session.step + 1
    if first > 1 and session.step > 0:
        message = f"steps.jsonl lacks the first {counted(first - 1, 'step')}"
        events.append({"what": "note", "words": message})
    for damage in damaged:
        message = f"{damage} and was not loaded"
        events.append({"what": "damaged-checkpoint", "words": message, "severity": "warning"})
    return session, events


def _recorder_of(session: Session, progress: Progress, goes_on: bool) -> RunRecorder:
    """Create the record of a run, or open it and go back to the step of the session.

    Must precede the first step, whose compiled code calls the gauges.
    """
    config = session.config
    folder = session.folder
    tables = {} if goes_on else {"data": data_of(session)}
    recorder = RunRecorder(
        folder, session.model, session.optimizer, recipe=config.recipe, settings=config.to_dict(),
        gauges_every=config.gauges_every, fingerprints_every=config.fingerprints_every,
        on_row=progress.row, resume=goes_on, tables={**tables, "recorder": None},
    )  # fmt: skip
    if goes_on:
        recorder.go_back(session.step)
    tokenizer = session.data.tokenizer_path
    if session.here.is_first and tokenizer is not None:
        with disk_errors(folder):
            shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return recorder


def _run(session: Session, recorder: RunRecorder, progress: Progress) -> None:
    """Train until the last step, a requested stop or a signal, and end with a checkpoint."""
    config = session.config
    is_stopped = False
    with _signals() as signals, _ended(session, recorder, progress):
        while session.step < config.steps and not is_stopped:
            columns = train_step(session)
            recorder.step(columns.pop("loss"), tokens=config.tokens_per_step, **columns)
            is_last = session.step == config.steps
            if is_last or _is_due(session.step, config.eval_every):
                recorder.evaluate(evaluate(session))
            # A signal, or the end of a save, may reach the ranks in different steps. All act after
            # the same step.
            must_stop = bool(signals) or progress.failure is not None
            state = session.here.largest(_MUST_STOP if must_stop else int(session.saver.has_ended))
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
        return progress.say(f"Finished after {session.step} steps.")
    progress.say(
        f"Stopped after step {session.step}. Continue with: narrowgauge resume {session.folder}"
    )
    number = session.here.largest(signals[0] if signals else 0)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number:
        raise Terminated
    if progress.failure is not None:
        raise progress.failure


def _settle_save(session: Session, recorder: RunRecorder) -> None:
    """Wait for the checkpoint in flight, and record it. A failed one ends the run here."""
    step = session.saver.wait()
    if step is not None:
        recorder.event("checkpoint", f"step-{step:08d} is complete", at=step)


@contextmanager
def _ended(session: Session, recorder: RunRecorder, progress: Progress) -> Iterator[None]:
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
        if progress.alarms:
            kinds = ", ".join(progress.alarms)
            progress.say(f"{kinds}: narrowgauge diagnose {session.folder} shows where")


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
