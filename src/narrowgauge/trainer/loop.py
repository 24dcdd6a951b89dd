"""``narrowgauge train``: begin a run, or continue the one in ``out``.

Everything that decides the next step is in the checkpoint: step, weights and states. So a killed
run loses only the steps since its last checkpoint, and repeats them with the same bits on any
number of ranks. Rank 0 decides what depends on files or on a signal.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.distributed.job import require_same, threads_of
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RecordError
from narrowgauge.measuring.hooks import RunNotice
from narrowgauge.measuring.recorder import RunRecorder
from narrowgauge.optim.audit import UpdateLossWarning
from narrowgauge.runs.record import read_settings
from narrowgauge.runs.writer import Record
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import checkpoints, session
from narrowgauge.trainer.entry import Entry, enter
from narrowgauge.trainer.progress import Progress
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.settings import Settings
from narrowgauge.trainer.tokens import Tokens, open_tokens


def train(named: Mapping[str, Any], *, is_verbose: bool = True) -> Path:
    """Train a model, and return the run folder. All ranks call it.

    Args:
        named: the settings that were named; others are those of the run in ``out``, or defaults.
        is_verbose: show the progress, and warn of what the record shows.
    Raises:
        NarrowgaugeError: an invalid setting. Nothing is written then.
        RecordError: the run is being written, or cannot be continued with these settings.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the checkpoint is saved.
    """
    ranks = all_ranks()
    entry = ranks.of_first(lambda: enter(named, ranks.size))
    settings = entry.settings
    if entry.is_finished:
        return settings.folder
    with threads_of(parse(settings.recipe).reduction.order_invariant), warnings.catch_warnings():
        if not is_verbose:
            warnings.simplefilter("ignore", RunNotice)
            warnings.simplefilter("ignore", UpdateLossWarning)
        tokens = ranks.together(lambda: open_tokens(settings.data))
        require_same({"tokens": tokens.fingerprint})
        run = session.build(settings, tokens)
        if entry.checkpoint is not None:
            load_into(run, entry.checkpoint)
        progress = Progress(run.settings, is_verbose and ranks.is_first)
        try:
            with _recorder_of(run, entry, progress) as recorder:
                _run(run, recorder, progress)
        finally:
            progress.bar.stop()
            if run.optimizer.reduction is not None:
                run.optimizer.reduction.close()  # its hooks would keep the process group
    return settings.folder


def load_into(run: Session, checkpoint: Path) -> None:
    """Set weights, states and step of a session to those of a good checkpoint."""
    notes = checkpoints.load(checkpoint, run.model, run.optimizer)
    run.step = notes["step"]
    run.scaler.load_state_dict(notes["scaler"])


def save(run: Session) -> None:
    """Write a checkpoint of a session."""
    settings = run.settings
    notes = {
        "step": run.step, "settings": vars(replace(settings, stop_after=0)),
        "tokens": run.tokens.fingerprint, "vocab_size": run.tokens.vocab_size, "scaler": run.scaler.state_dict(),
    }  # fmt: skip
    checkpoints.save(settings.folder, run.model, run.optimizer, notes, settings.keep_checkpoints)


def _recorder_of(run: Session, entry: Entry, progress: Progress) -> RunRecorder:
    """Create the record of a run, or open it and go back to the step of the session.

    Must precede the first step, whose compiled code calls the gauges.
    """
    settings = run.settings
    if entry.checkpoint is not None:
        run.here.of_first(lambda: _mend_settings(settings))
    data = {"fingerprint": run.tokens.fingerprint, "unigram_loss": run.tokens.unigram_loss()}
    recorder = RunRecorder(
        settings.folder, run.model, run.optimizer, settings=vars(settings),
        gauges_every=settings.gauges_every, fingerprints_every=settings.fingerprints_every,
        on_row=progress.row, resume=True, tables={"data": data},
    )  # fmt: skip
    recorder.go_back(run.step, tokens=run.step * settings.tokens_per_step)
    for kind, words in entry.events:
        recorder.event(kind, words)
        progress.say(f"{kind}: {words}")
    return recorder


def _mend_settings(settings: Settings) -> None:
    """Write ``run.toml`` again if it cannot be read."""
    try:
        read_settings(settings.folder)
    except RecordError:
        with Record(settings.folder) as record:
            record.amend({"config": vars(settings)})


def _run(run: Session, recorder: RunRecorder, progress: Progress) -> None:
    """Train until the last step or a reason to stop, and end with a checkpoint."""
    settings = run.settings
    last = min(settings.steps, settings.stop_after or settings.steps)
    is_stopped = False
    with _signals() as received:
        while run.step < last and not is_stopped:
            columns = session.train_step(run)
            recorder.step(tokens=settings.tokens_per_step, **columns)
            if run.step == settings.steps or _is_due(run.step, settings.eval_every):
                recorder.evaluate(session.evaluate(run))
            # A signal may reach the ranks in different steps. All stop after the same one.
            is_stopped = run.here.largest(len(received)) > 0
            if is_stopped or run.step == last or _is_due(run.step, settings.checkpoint_every):
                save(run)
                recorder.event("checkpoint", f"step-{run.step:08d} is complete")
    is_finished = run.step == settings.steps
    recorder.close(is_finished)
    if is_finished:
        return progress.say(f"Finished after {run.step} steps.")
    progress.say(f"Stopped after step {run.step}. The same command continues.")
    if is_stopped:
        raise KeyboardInterrupt
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

    with ExitStack() as undo:
        for number in (signal.SIGINT, signal.SIGTERM):
            undo.callback(signal.signal, number, signal.signal(number, receive))
        yield received


def load(folder: Path) -> Session:
    """Load a run's session at its newest good checkpoint, for export or sampling.

    Raises:
        RecordError: it has no good checkpoint.
    """
    checkpoint, _ = checkpoints.require(folder)
    notes = checkpoints.notes_of(checkpoint)
    none = np.zeros(0, np.uint16)
    settings = Settings(**notes["settings"])
    run = session.build(settings, Tokens(none, none, notes["vocab_size"]))
    load_into(run, checkpoint)
    return run
