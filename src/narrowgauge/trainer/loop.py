"""The training loop: micro-batches in, records out, interrupted and resumed at any moment without a trace.

The loop owns no arithmetic and no format; it calls ``prepare`` like any user's loop would. Each step is written down
whole before the next begins, and a checkpoint exists whole or not at all, so a killed run loses only the steps since
its last checkpoint, and takes them again with the same bits.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from narrowgauge.errors import DataError, RecordError
from narrowgauge.matmul.weights import cached_weights
from narrowgauge.models import MODELS
from narrowgauge.numerics import measures
from narrowgauge.optim import compilation
from narrowgauge.optim.accumulation import backward_in_parts
from narrowgauge.optim.auditing import Alarm
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import RunWriter, read_run, require_free
from narrowgauge.trainer.config import TrainConfig, left_by_a_kill
from narrowgauge.trainer.console import Console
from narrowgauge.trainer.data import Dataset, open_data, prepare_data
from narrowgauge.trainer.session import Session, build, describe, differences

Row = dict[str, Any]


def train(config: TrainConfig) -> Path:
    """Train a model from the start.

    Args:
        config: the settings.
    Returns:
        The run folder.
    Raises:
        NarrowgaugeError: any setting that cannot be; nothing is written then.
        KeyboardInterrupt: after Ctrl-C, once the checkpoint is saved.
    """
    config = _located(config.validated())
    assert config.out is not None
    folder = Path(config.out)
    require_free(folder, beside=left_by_a_kill(folder))
    absent = [place for place in (folder, *folder.parents) if not place.exists()]
    prepared = (folder / "data").exists()
    try:
        data = _prepared_data(config, folder)
        data.require(config.sequence_length)
        session = build(config, folder, data)
        writer = RunWriter.create(folder, describe(session), beside=("data",))
    except BaseException:
        # With a run.toml it is a run, perhaps another process's; without one it is only tokens.
        if not (folder / "run.toml").exists():
            _forget(folder, absent, prepared)
        raise
    with writer:
        if prepared:
            writer.event(
                Event("note", 0, "the data were prepared by an earlier command that ended before its first step")
            )
        for note in [*data.notes, *session.notes]:
            writer.event(Event("note", 0, note))
        writer.event(Event("start", 0, f"{Path(config.model).name} in {session.config.to_dict()['recipe']}"))
        _run(session, writer)
    return folder


def resume(folder: str | Path, stop_after: int | None = None) -> Path:
    """Go on with a run from its latest good checkpoint; its own ``run.toml`` says everything else.

    Args:
        folder: the run folder.
        stop_after: stop with a checkpoint after this step; ``None`` runs to the end.
    Returns:
        The run folder.
    Raises:
        RecordError: no such run, a finished one, or one whose data changed.
    """
    folder = Path(folder)
    run = read_run(folder)
    if run.summary is not None:
        raise RecordError(
            f"{folder} is finished: {run.summary['steps']} steps, validation loss {run.summary['val_loss']:.4f}.",
            "Start another run with narrowgauge train.",
        )
    # Both are asked for before anything is made: a damaged record is left as it is.
    began_with = run.data_fingerprint
    settings = {**run.config, **({"stop_after": stop_after} if stop_after is not None else {})}
    if stop_after is None:
        settings.pop("stop_after", None)
    config = TrainConfig.from_dict(settings, str(folder / "run.toml"))
    data = open_data(folder) if (folder / "data").exists() else _prepared_data(config, folder)
    if data.fingerprint != began_with:
        raise RecordError(f"the tokens in {folder / 'data'} are not those the run began with.", "Restore that folder.")
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
        writer.event(Event("resume", session.step, f"from step {session.step}"))
        _run(session, writer)
    return folder


def _forget(folder: Path, absent: list[Path], prepared: bool) -> None:
    """Remove what a refused run made: its folder or what lies in it, and the folders above that were not there."""
    if not prepared:
        shutil.rmtree(folder if folder in absent else folder / "data", ignore_errors=True)
    with suppress(OSError):  # another run may have moved in
        for parent in absent[1:]:
            parent.rmdir()


def _located(config: TrainConfig) -> TrainConfig:
    """The same settings with full paths, so that a run can be resumed from any folder."""

    def full(name: str) -> str:
        path = Path(name).expanduser()
        return str(path.resolve()) if path.exists() else name

    model = config.model if config.model in MODELS else full(config.model)
    data = config.data if config.data == "stdlib" else full(config.data)
    return replace(config, model=model, data=data, tokenizer=config.tokenizer and full(config.tokenizer))


def _prepared_data(config: TrainConfig, folder: Path) -> Dataset:
    return prepare_data(
        config.data,
        folder,
        vocab_size=vocabulary_size(config),
        tokenizer=config.tokenizer,
        held_out=config.held_out,
        seed=config.seed,
    )


def vocabulary_size(config: TrainConfig) -> int | None:
    """The vocabulary that a tokenizer trained for the model must have."""
    if config.model in MODELS:
        return MODELS[config.model].vocab_size
    from transformers import AutoConfig

    try:
        shape = AutoConfig.from_pretrained(config.model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = "It must be one that Hugging Face transformers can read."
        raise DataError(f"the config.json in {config.model} cannot be read: {reason}", advice) from error
    size: int | None = getattr(shape, "vocab_size", None)
    return size


def _run(session: Session, writer: RunWriter) -> None:
    config, began = session.config, time.perf_counter() - session.seconds
    with Console(config.steps, config.log_every) as console, _interruptible() as interrupted:
        console.say(f"{Path(config.model).name} · {config.to_dict()['recipe']} · {session.folder}")
        for note in session.notes:
            print(f"note: {note}", file=sys.stderr)
        session.optimizer.on_alarm = lambda alarms: _report_alarms(alarms, session, writer, console)
        compilation.announce[:] = [console.say]
        console.start(str(config.to_dict()["recipe"]), session.step)
        saturated = False
        while session.step < config.steps:
            row = train_step(session)
            writer.step(row)
            console.step(row)
            if row.get("saturated") and not saturated:
                saturated = True
                writer.event(Event("warning", session.step, _what_saturated(session)))
            if row["skipped"]:
                writer.event(Event("skip", session.step, _why_skipped(session)))
            if config.eval_every and session.step % config.eval_every == 0 and session.step < config.steps:
                _evaluate(session, writer, console)
            last = session.step == config.steps
            stopping = bool(interrupted) or (session.step == config.stop_after and not last)
            if stopping or last or (config.checkpoint_every and session.step % config.checkpoint_every == 0):
                writer.sync()
                session.seconds = time.perf_counter() - began
                session.save()
            if stopping:
                writer.event(Event("stop", session.step, "interrupted" if interrupted else "as asked by stop_after"))
                console.say(f"Stopped after step {session.step}. Go on with: narrowgauge resume {session.folder}")
                if interrupted:
                    raise KeyboardInterrupt
                return
        done = [row["val_loss"] for row in read_run(session.folder).evals if row["step"] == session.step]
        val_loss = done[-1] if done else _evaluate(session, writer, console)
        summary = summarize(session, val_loss, time.perf_counter() - began)
        writer.summary(summary)
        writer.event(Event("finish", session.step, f"validation loss {val_loss:.4f}"))
        console.summary([summary])


def train_step(session: Session) -> Row:
    """One optimizer step.

    Args:
        session: the run; it moves on by one step.
    Returns:
        The row of ``steps.jsonl``.
    """
    began = time.perf_counter()
    config, optimizer = session.config, session.optimizer
    rate = config.learning_rate(session.step + 1)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)
    if session.accumulator is not None:
        session.accumulator.step = session.step
    with cached_weights() if session.accumulator is not None else nullcontext():
        total = backward_in_parts(_losses(session), session.accumulator, optimizer.loss_scaler)
    skipped = optimizer.num_skipped
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    # The loss waits for the device in any case; settled now, a skip and an audit belong to this step's row.
    optimizer.settle()
    session.step += 1
    session.tokens += config.tokens_per_step
    value = float(total)
    seconds = time.perf_counter() - began
    row: Row = {
        "step": session.step,
        "loss": value,
        "lr": rate,
        "grad_norm": float(optimizer.grad_norm) if optimizer.grad_norm is not None else None,
        "tokens": session.tokens,
        "tokens_per_second": config.tokens_per_step / seconds,
        "seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "skipped": optimizer.num_skipped > skipped,
    }
    if session.linears is not None and (overflows := session.linears.overflows(session.step - 1)):
        row["saturated"] = sum(sum(counts) for counts in overflows.values())
    if optimizer.last_audit is not None:
        session.audit_total += optimizer.last_audit
        row |= audit_figures(optimizer.last_audit)
        optimizer.last_audit = None
    return row


def _losses(session: Session) -> Iterator[torch.Tensor]:
    """The loss of each micro-batch, as its share of the step's; the narrow layers are told which one it is."""
    linears, first = session.linears, 0
    if linears is not None:
        session.set_compute()
        linears.step = session.step
    for tokens in session.batch():
        if linears is not None:
            linears.set_first_sequence(first)
        first += len(tokens)
        yield session.loss(tokens) / session.config.tokens_per_step


def _why_skipped(session: Session) -> str:
    """What overflowed, and the scale that goes on."""
    names, scaler = session.optimizer.last_overflow, session.optimizer.loss_scaler
    where = f" in '{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""
    scale = "" if scaler is None else f"; the loss scale is now {float(scaler.scale_tensor):g}"
    return f"gradients are not finite{where}; nothing was changed{scale}"


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


def audit_figures(sums: torch.Tensor) -> Row:
    """The audit's readings of a vector of sums, ``None`` where nothing was intended."""
    readings = {
        "edq": measures.edq(sums),
        "noise": measures.noise(sums),
        "lost_fraction": measures.lost_fraction(sums),
        "unseen_fraction": measures.unseen_fraction(sums),
    }
    return {name: None if bool(torch.isnan(value)) else float(value) for name, value in readings.items()}


@torch.no_grad()
def evaluate(session: Session) -> float:
    """The mean loss in nats per token over the validation batches."""
    config = session.config
    total, count = 0.0, 0
    session.set_compute(evaluating=True)
    for batch in session.data.valid_batches(config.micro_batch_size, config.sequence_length, config.eval_batches):
        tokens = torch.from_numpy(batch).to(session.device)
        total += float(session.loss(tokens))
        count += tokens.shape[0] * (tokens.shape[1] - 1)
    return total / count


def summarize(session: Session, val_loss: float, wall_seconds: float) -> Row:
    """The row of ``summary.json``."""
    rates = sorted(row["tokens_per_second"] for row in read_run(session.folder).steps)
    summed = 0.0 if session.accumulator is None else session.accumulator.bytes_per_param()
    return {
        "recipe": session.config.to_dict()["recipe"],
        "model": session.config.model,
        "val_loss": val_loss,
        "steps": session.step,
        "tokens": session.tokens,
        "tokens_per_second": rates[len(rates) // 2],
        "bytes_per_param": session.optimizer.bytes_per_param() + summed,
        "peak_memory_bytes": peak_memory_bytes(),
        **audit_figures(session.audit_total),
        "num_skipped": session.optimizer.num_skipped,
        "weights_fingerprint": session.fingerprint(),
        "wall_seconds": wall_seconds,
    }


def peak_memory_bytes() -> int:
    """The most memory in use so far: of the device's tensors on CUDA, of the process elsewhere."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _evaluate(session: Session, writer: RunWriter, console: Console) -> float:
    row = {"step": session.step, "val_loss": evaluate(session), "tokens": session.tokens}
    writer.eval(row)
    console.evaluation(row)
    return float(row["val_loss"])


def _report_alarms(alarms: list[Alarm], session: Session, writer: RunWriter, console: Console) -> None:
    for alarm in alarms:
        writer.event(
            Event(
                "warning",
                session.step + 1,
                alarm.message,
                tensor=alarm.tensor,
                value=alarm.reading.edq,
                advice=f"storage '{alarm.cure}'",
            )
        )
    worst = min(alarms, key=lambda a: a.reading.edq)
    more = f" (and {len(alarms) - 1} more tensors, see events.jsonl)" if len(alarms) > 1 else ""
    console.say(f"warning: {worst.message}{more}")


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """A list that is no longer empty once Ctrl-C or a termination was asked for; a second one ends at once."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        if received:
            signal.default_int_handler(number, frame)
        received.append(number)
        # Past every buffer: a signal may arrive in the middle of a print.
        os.write(2, b"Stopping after this step; Ctrl-C again ends at once.\n")

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
