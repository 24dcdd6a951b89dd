"""The training loop: micro-batches in, records out, interrupted and resumed at any moment without a trace.

The loop owns no arithmetic and no format; it calls ``prepare`` like any user's loop would. Each step is written down
whole before the next begins, and a checkpoint exists whole or not at all, so a killed run loses only the steps since
its last checkpoint, and takes them again with the same bits.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError, RecordError
from narrowgauge.models import MODELS, refuse_own_code
from narrowgauge.optim import compilation
from narrowgauge.runs.comparing.names import recipe_name
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import Row, Run, RunWriter, read_run, require_free
from narrowgauge.trainer.config import TrainConfig, left_by_a_kill
from narrowgauge.trainer.console import Console, Screen
from narrowgauge.trainer.data import Dataset, open_data, prepare_data
from narrowgauge.trainer.recovery import Recovery
from narrowgauge.trainer.refusals import require_resumable
from narrowgauge.trainer.reporting import Reporter
from narrowgauge.trainer.session import Session, build, describe, differences
from narrowgauge.trainer.steps import evaluate, summarize, train_step


def train(config: TrainConfig, *, lent: bool = False, screen: Screen | None = None) -> Path:
    """Train a model from the start.

    Args:
        config: the settings.
        lent: the caller put the data there itself.
        screen: who is shown how it goes; ``None`` for standard output.
    Returns:
        The run folder.
    Raises:
        NarrowgaugeError: any setting that cannot be; nothing is written then.
        KeyboardInterrupt: after Ctrl-C, once the checkpoint is saved.
    """
    with _shown(config, screen) as shown:
        return _train(config, lent, shown)


@contextmanager
def _shown(config: TrainConfig, screen: Screen | None) -> Iterator[Screen]:
    """The screen that was given, or standard output."""
    if screen is not None:
        yield screen
        return
    with Console(config.steps, config.log_every) as console:
        yield console


def _train(config: TrainConfig, lent: bool, screen: Screen) -> Path:
    config = config.validated().located()
    assert config.out is not None
    folder = Path(config.out)
    require_free(folder, beside=left_by_a_kill(folder))
    absent = [place for place in (folder, *folder.parents) if not place.exists()]
    prepared = (folder / "data").exists()
    try:
        data = _prepared_data(config, folder, screen.stage)
        data.require(config.sequence_length)
        screen.stage("building the model")
        session = build(config, folder, data)
        writer = RunWriter.create(folder, describe(session), beside=("data",))
    except BaseException:
        # With a run.toml it is a run, perhaps another process's; without one it is only tokens.
        if not (folder / "run.toml").exists():
            _forget(folder, absent, prepared)
        raise
    with writer:
        if prepared and not lent:
            writer.event(
                Event("note", 0, "the data were prepared by an earlier command that ended before its first step")
            )
        for note in [*data.notes, *session.notes]:
            writer.event(Event("note", 0, note))
        writer.event(Event("start", 0, f"{Path(config.model).name} in {recipe_name(session.config.recipe)}"))
        _run(session, writer, screen)
    return folder


def resume(folder: str | Path, stop_after: int | None = None, *, screen: Screen | None = None) -> Path:
    """Go on with a run from its latest good checkpoint; its own ``run.toml`` says everything else.

    Args:
        folder: the run folder.
        stop_after: stop with a checkpoint after this step; ``None`` runs to the end.
        screen: who is shown how it goes; ``None`` for standard output.
    Returns:
        The run folder.
    Raises:
        RecordError: no such run, a finished one, or one whose data changed.
    """
    folder = Path(folder)
    run = require_resumable(folder)
    # Both are asked for before anything is made: a damaged record is left as it is.
    began_with = run.data_fingerprint
    settings = {**run.config, **({"stop_after": stop_after} if stop_after is not None else {})}
    if stop_after is None:
        settings.pop("stop_after", None)
    config = TrainConfig.from_dict(settings, str(folder / "run.toml"))
    with _shown(config, screen) as shown:
        return _go_on(run, config, folder, began_with, shown)


def _go_on(run: Run, config: TrainConfig, folder: Path, began_with: str | None, screen: Screen) -> Path:
    stop_after = config.stop_after
    screen.stage("checking the tokens")
    data = open_data(folder) if (folder / "data").exists() else _prepared_data(config, folder, screen.stage)
    if data.fingerprint != began_with:
        raise RecordError(f"the tokens in {folder / 'data'} are not those the run began with.", "Restore that folder.")
    screen.stage("building the model")
    session = build(config, folder, data)
    with RunWriter.open(folder) as writer:

        def damaged(path: Path, reason: str) -> None:
            event = Event("checkpoint_damaged", session.step, f"{path.name} is damaged ({reason}) and was not loaded")
            writer.event(event)
            print(f"note: {event.message}.", file=sys.stderr)

        session.restore(damaged)
        if stop_after is not None and stop_after <= session.step:
            raise RecordError(
                f"{folder} has done {session.step} steps, and a stop after step {stop_after} was asked for.",
                "Name a later step with --stop-after, or leave it out.",
            )
        writer.rewind(session.step)
        for difference in differences(run.run, describe(session)):
            writer.event(Event("note", session.step, difference))
            print(f"note: {difference}.", file=sys.stderr)
        session.has_saturated = any(event.get("kind") == "warning" for event in run.events)
        writer.event(Event("resume", session.step, f"from step {session.step}"))
        _run(session, writer, screen)
    return folder


def _forget(folder: Path, absent: list[Path], prepared: bool) -> None:
    """Remove what a refused run made: its folder or what lies in it, and the folders above that were not there."""
    if not prepared:
        shutil.rmtree(folder if folder in absent else folder / "data", ignore_errors=True)
    with suppress(OSError):  # another run may have moved in
        for parent in absent[1:]:
            parent.rmdir()


def _prepared_data(config: TrainConfig, folder: Path, stage: Callable[[str], None]) -> Dataset:
    return prepare_data(
        config.data,
        folder,
        vocab_size=vocabulary_size(config),
        tokenizer=config.tokenizer,
        held_out=config.held_out,
        seed=config.seed,
        stage=stage,
    )


def vocabulary_size(config: TrainConfig) -> int | None:
    """The vocabulary that a tokenizer trained for the model must have."""
    if config.model in MODELS:
        return MODELS[config.model].vocab_size
    from transformers import AutoConfig

    refuse_own_code(Path(config.model))
    try:
        shape = AutoConfig.from_pretrained(config.model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = "It must be one that Hugging Face transformers can read."
        raise DataError(f"the config.json in {config.model} cannot be read: {reason}", advice) from error
    size: int | None = getattr(shape, "vocab_size", None)
    return size


def _run(session: Session, writer: RunWriter, console: Screen) -> None:
    config, began = session.config, time.perf_counter() - session.seconds
    with _interruptible(console.stopping) as interrupted, session.watched():
        reporter = Reporter(writer, console, config.to_dict(), config.tensorboard, session.step)
        _announce(session, console)
        session.optimizer.on_alarm = lambda alarms: reporter.stalls(alarms, session.step + 1)
        recovery = Recovery(session, reporter)
        console.start(recipe_name(config.recipe), session.step)

        def save() -> None:
            writer.sync()
            session.seconds = time.perf_counter() - began
            session.save()

        if config.on_spike == "rollback" and session.step == 0:
            save()  # somewhere to go back to
        try:
            while session.step < config.steps:
                row = train_step(session, recovery.judge)
                if recovery.takes_over(row):
                    continue
                _report(session, reporter, row)
                if _is_due(session.step, config.eval_every) and session.step < config.steps:
                    _evaluate(session, reporter)
                recovery.after(row, save)
                last = session.step == config.steps
                stopping = bool(interrupted) or (session.step == config.stop_after and not last)
                if stopping or last or _is_due(session.step, config.checkpoint_every):
                    save()
                if stopping:
                    _stop(session, reporter, bool(interrupted))
                    return
            _finish(session, reporter, time.perf_counter() - began)
        finally:
            reporter.close()


def _announce(session: Session, console: Screen) -> None:
    console.say(f"{Path(session.config.model).name} · {recipe_name(session.config.recipe)} · {session.folder}")
    for note in session.notes:
        print(f"note: {note}", file=sys.stderr)
    compilation.announce[:] = [console.say]


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _report(session: Session, reporter: Reporter, row: Row) -> None:
    """Write a step down, and what the gauges saw of it."""
    reporter.step(row)
    if row.get("saturated") and not session.has_saturated:
        session.has_saturated = True
        reporter.event(Event("warning", session.step, _what_saturated(session)))
    if session.gauges is not None and session.gauges.last is not None:
        reading, session.gauges.last = session.gauges.last, None
        reporter.gauge(reading)


def _stop(session: Session, reporter: Reporter, interrupted: bool) -> None:
    reporter.event(Event("stop", session.step, "interrupted" if interrupted else "as asked by stop_after"))
    reporter.console.say(f"Stopped after step {session.step}. Go on with: narrowgauge resume {session.folder}")
    if interrupted:
        raise KeyboardInterrupt


def _finish(session: Session, reporter: Reporter, wall_seconds: float) -> None:
    done = [row["val_loss"] for row in read_run(session.folder).evals if row["step"] == session.step]
    val_loss = done[-1] if done else _evaluate(session, reporter)
    summary = summarize(session, val_loss, wall_seconds)
    reporter.writer.summary(summary)
    reporter.event(Event("finish", session.step, f"validation loss {val_loss:.4f}"))
    reporter.console.summary([summary])


def _what_saturated(session: Session) -> str:
    """Where most values lay beyond their delayed scale."""
    assert session.linears is not None
    counts = session.linears.overflows(session.step - 1)
    name, worst = max(counts.items(), key=lambda item: sum(item[1]))
    operand = ("input", "weight", "gradient")[worst.index(max(worst))]
    return (
        f"{max(worst)} values of the {operand} of '{name}' lay beyond their delayed scale and were held at its end; every "
        "step's count is its 'saturated'"
    )


def _evaluate(session: Session, reporter: Reporter) -> float:
    row = {"step": session.step, "val_loss": evaluate(session), "tokens": session.tokens}
    reporter.evaluation(row)
    return float(row["val_loss"])


@contextmanager
def _interruptible(tell: Callable[[str], None]) -> Iterator[list[int]]:
    """A list that is no longer empty once Ctrl-C or a termination was asked for; a second one ends at once."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        if received:
            signal.default_int_handler(number, frame)
        received.append(number)
        tell("Stopping after this step; Ctrl-C again ends at once.")

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: signals are somebody else's
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
