"""``narrowgauge train``: begin a run, or go on with the one in ``out``.

Everything that decides the next step is in the checkpoint: step, weights and states. So a killed
run loses only the steps since its last checkpoint, and repeats them with the same bits on any
number of ranks. Rank 0 decides what depends on files or on a signal.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from narrowgauge.distributed.job import require_same, threads_of
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.replica_verification import verify_replicas
from narrowgauge.errors import RecordError, Terminated
from narrowgauge.measuring.hooks import RunNotice
from narrowgauge.measuring.recorder import RunRecorder
from narrowgauge.optim.audit import UpdateLossWarning
from narrowgauge.optim.export import kept_tensors
from narrowgauge.runs.atomic_io import write_whole
from narrowgauge.runs.record import read_settings
from narrowgauge.runs.schema import VERSION
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import checkpoints, session
from narrowgauge.trainer.entry import Entry, enter
from narrowgauge.trainer.progress import Progress
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.settings import Settings
from narrowgauge.trainer.tokens import Tokens, open_tokens

_ALONE = "torch.distributed is (disabled|unavailable)"
"""PyTorch's warning on checkpoints of one process."""


def train(named: Mapping[str, Any], *, is_verbose: bool = True) -> Path:
    """Train a model, and return the run folder. All ranks call it.

    Args:
        named: the settings that were named; others are those of the run in ``out``, or defaults.
        is_verbose: show the progress.
    Raises:
        NarrowgaugeError: an invalid setting. Nothing is written then.
        RecordError: the run is being written, or cannot be continued with these settings.
        KeyboardInterrupt: after Ctrl-C, once the checkpoint is saved. After SIGTERM
            :class:`~narrowgauge.errors.Terminated`.
    """
    ranks = all_ranks()
    entry = ranks.of_first(lambda: enter(named, ranks.size))
    if entry.is_finished:
        return entry.settings.folder
    settings = entry.settings
    is_order_invariant = parse(settings.recipe).reduction.order_invariant
    with threads_of(is_order_invariant), warnings.catch_warnings():
        for notice in (RunNotice, UpdateLossWarning):
            warnings.simplefilter("ignore", notice)  # the events are printed
        warnings.filterwarnings("ignore", _ALONE)
        tokens = ranks.together(lambda: open_tokens(settings.data))
        require_same({"tokens": tokens.fingerprint})
        run = session.build(settings, tokens)
        if entry.checkpoint is not None:
            load_into(run, entry.checkpoint)
        with closing(Progress(run.settings, is_verbose and ranks.is_first)) as progress:
            try:
                with _recorder_of(run, entry, progress) as recorder:
                    _run(run, recorder, progress)
            finally:
                if run.reduction is not None:
                    run.reduction.close()  # its hooks on parameters would keep the process group
    return settings.folder


def load_into(run: Session, checkpoint: Path) -> None:
    """Set weights, states and step of a session to those of a good checkpoint."""
    notes = checkpoints.load(checkpoint, run.model, run.optimizer)
    run.step = notes["step"]
    run.scaler.load_state_dict(notes["scaler"])


def save(run: Session) -> None:
    """Write a checkpoint of a session.

    Raises:
        CorruptionError: ranks hold different replicas; on all of them. The last checkpoint is from
            before the damage.
    """
    if run.here.size > 1:
        verify_replicas(kept_tensors(run.optimizer), run.step)
    settings = run.settings
    notes = {
        "step": run.step, "settings": vars(replace(settings, out="", stop_after=0)),
        "tokens": run.tokens.fingerprint, "vocab_size": run.tokens.vocab_size, "scaler": run.scaler.state_dict(),
    }  # fmt: skip
    checkpoints.save(settings.folder, run.model, run.optimizer, notes, settings.keep_checkpoints)


def _recorder_of(run: Session, entry: Entry, progress: Progress) -> RunRecorder:
    """Create the record of a run, or open it and go back to the step of the session.

    Must precede the first step, whose compiled code calls the gauges.
    """
    settings = run.settings
    goes_on = run.here.of_first(lambda: _has_record(entry))
    recorder = RunRecorder(
        settings.folder, run.model, run.optimizer, settings=vars(settings),
        gauges_every=settings.gauges_every, fingerprints_every=settings.fingerprints_every,
        on_row=progress.row, resume=goes_on, tables={"data": run.tokens.table()},
    )  # fmt: skip
    name = Path(settings.model).name
    progress.say(f"{name} · {settings.recipe} · {settings.folder}")
    if goes_on:
        recorder.go_back(run.step, tokens=run.step * settings.tokens_per_step)
    for what, words in entry.events:
        recorder.event(what, words)
    return recorder


def _has_record(entry: Entry) -> bool:
    """Return whether a run has a record. Write ``run.toml`` again if it cannot be read."""
    folder = entry.settings.folder
    try:
        read_settings(folder)
    except RecordError:
        if entry.checkpoint is None:
            return False
        table = {"schema_version": VERSION, "config": vars(entry.settings)}
        write_whole(folder / "run.toml", tomli_w.dumps(table).encode())
    return True


def _run(run: Session, recorder: RunRecorder, progress: Progress) -> None:
    """Train until the last step or a reason to stop, and end with a checkpoint."""
    settings = run.settings
    last = min(settings.steps, settings.stop_after or settings.steps)
    number = 0
    with _signals() as received:
        while run.step < last and not number:
            columns = session.train_step(run)
            recorder.step(tokens=settings.tokens_per_step, **columns)
            if run.step == settings.steps or _is_due(run.step, settings.eval_every):
                recorder.evaluate(session.evaluate(run))
            # A signal may reach the ranks in different steps. All stop after the same one.
            number = run.here.largest(max(received, default=0))
            if number or run.step == last or _is_due(run.step, settings.checkpoint_every):
                save(run)
                recorder.event("checkpoint", f"step-{run.step:08d} is complete")
    is_finished = run.step == settings.steps
    recorder.close(is_finished)
    if is_finished:
        return progress.say(f"Finished after {run.step} steps.")
    progress.say(f"Stopped after step {run.step}. The same command goes on.")
    if number:
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
    return None


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the first SIGINT and SIGTERM. A second one ends the process."""
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)
        # Past Python's buffers: the signal may have interrupted a print.
        os.write(2, b"Stopping after this step; press Ctrl-C again to stop at once.\n")

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
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
    checkpoint, _ = checkpoints.require(folder)
    notes = checkpoints.notes_of(checkpoint)
    none = np.zeros(0, np.uint16)
    settings = Settings.from_dict(notes["settings"], str(checkpoint))
    run = session.build(settings, Tokens(none, none, notes["vocab_size"]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ALONE)
        load_into(run, checkpoint)
    return run
