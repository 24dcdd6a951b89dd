"""One optimizer step, one evaluation, and the record of each.

The step contains no arithmetic and no format; it uses what ``prepare`` returns like any training loop. With
``--on-spike`` the step is judged before the update, and a spike changes nothing.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict

import torch

from narrowgauge.matmul.cast_cache import cached_weights
from narrowgauge.monitor.spikes import StepJudgement
from narrowgauge.optim.accumulation import backward_in_parts
from narrowgauge.optim.audit import figures_of
from narrowgauge.runs.record import read_run
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.session import Session


def train_step(session: Session, judgement: StepJudgement | None = None) -> Row:
    """One optimizer step.

    Args:
        session: the run; it moves on by one step.
        judgement: judges the step before the update, which is left out where the step is a spike.
    Returns:
        The record of ``steps.jsonl``.
    """
    began = time.perf_counter()
    config, optimizer = session.config, session.optimizer
    rate = config.learning_rate(session.step + 1)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)
    if session.accumulator is not None:
        session.accumulator.step = session.step
    with cached_weights() if session.accumulator is not None else nullcontext():
        total = backward_in_parts(losses(session), session.accumulator, optimizer.loss_scaler)
    skipped, value = optimizer.num_skipped, None
    if optimizer.loss_scaler is not None:
        session.loss_scale = float(optimizer.loss_scaler.scale_tensor)
    if judgement is not None:
        value = float(total)
        optimizer.skip_above = judgement.judge_loss(value)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    # Reading the loss synchronizes anyway; settling here puts a skip and an audit into the record of this step.
    optimizer.settle()
    session.step += 1
    session.tokens += config.tokens_per_step
    value = float(total) if value is None else value
    row: Row = {
        "step": session.step,
        "loss": value,
        "lr": rate,
        "grad_norm": float(optimizer.grad_norm) if optimizer.grad_norm is not None else None,
        "tokens": session.tokens,
    }
    seconds = time.perf_counter() - began
    row |= {
        "tokens_per_second": config.tokens_per_step / seconds,
        "seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "skipped": optimizer.num_skipped > skipped,
    }
    return row | _also(session, row, judgement)


def _also(session: Session, row: Row, judgement: StepJudgement | None) -> Row:
    """Columns of some steps only."""
    also: Row = {}
    if judgement is not None and (spike := judgement.judge_norm(row["grad_norm"])) is not None:
        also["spike"] = asdict(spike)
    if session.optimizer.loss_scaler is not None:
        also["loss_scale"] = float(session.optimizer.loss_scaler.scale_tensor)
    if session.linears is not None and (overflows := session.linears.overflows(session.step - 1)):
        also["saturated"] = sum(sum(counts) for counts in overflows.values())
    if session.optimizer.last_audit is not None:
        session.audit_total += session.optimizer.last_audit
        also |= figures_of(session.optimizer.last_audit)
        session.optimizer.last_audit = None
    return also


def losses(session: Session) -> Iterator[torch.Tensor]:
    """The loss of each micro-batch, as its share of the step's; sets the position of each micro-batch in the narrow layers."""
    linears, first = session.linears, 0
    if linears is not None:
        session.set_compute()
        linears.step = session.step
    for tokens in session.batch():
        if linears is not None:
            linears.set_first_sequence(first)
        first += len(tokens)
        yield session.loss(tokens) / session.config.tokens_per_step


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
    """The record of ``summary.json``."""
    rates = sorted(row["tokens_per_second"] for row in read_run(session.folder).steps)
    summed = 0.0 if session.accumulator is None else session.accumulator.bytes_per_param()
    return {
        "recipe": session.config.recipe.to_value(),
        "model": session.config.model,
        "val_loss": val_loss,
        "steps": session.step,
        "tokens": session.tokens,
        "tokens_per_second": rates[len(rates) // 2],
        "bytes_per_param": session.optimizer.bytes_per_param() + summed,
        "peak_memory_bytes": peak_memory_bytes(),
        **figures_of(session.audit_total),
        "num_skipped": session.optimizer.num_skipped,
        "weights_fingerprint": session.fingerprint(),
        "wall_seconds": wall_seconds,
    }


def peak_memory_bytes() -> int:
    """Peak memory so far: of the device's tensors on CUDA, of the process elsewhere."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
