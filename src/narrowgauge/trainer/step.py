"""One optimizer step and its record, and one evaluation.

The step contains no arithmetic and no format. It uses the results of ``prepare`` like any training loop. With ``--on-spike``
the step is judged before the update, and a spike changes nothing.

On several ranks, the states of all ranks are compared every ``verify_every`` steps and before a checkpoint is written. So the
last checkpoint is always from before the damage.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from narrowgauge.analysis.spikes import StepJudgement
from narrowgauge.distributed.sharding import fsdp_modules
from narrowgauge.gauges.attach import Gauges
from narrowgauge.gauges.recording.step_row import peak_memory_bytes
from narrowgauge.matmul.cast_cache import cached_weights
from narrowgauge.numerics.widening import float32_attention
from narrowgauge.optim.accumulation import backward_in_parts
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.counted_memory import FORWARD
from narrowgauge.trainer.micro_batches import MicroBatch, micro_batches_of_rank, sum_in_order
from narrowgauge.trainer.random_numbers import random_numbers
from narrowgauge.trainer.session import Session


class StepClock:
    """Moments within a step. On CUDA they are events on the stream, so nothing waits for the device before ``seconds``."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._moments: list[Any] = []

    def mark(self) -> None:
        """Note this moment."""
        self._moments.append(torch.cuda.Event(enable_timing=True) if self._on_gpu else time.perf_counter())
        if self._on_gpu:
            self._moments[-1].record()

    def seconds(self) -> list[float]:
        """Return the time between each moment and the next."""
        pairs = itertools.pairwise(self._moments)
        if not self._on_gpu:
            return [after - before for before, after in pairs]
        self._moments[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


def train_step(session: Session, judgement: StepJudgement | None = None) -> Row:
    """Take one optimizer step, and return its row of ``steps.jsonl``.

    ``judgement`` judges the step before the update. A spike gets no update.
    """
    config, optimizer, clock = session.config, session.optimizer, StepClock(session.device)
    session.reader.begin()
    rate = config.learning_rate(session.step + 1)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)
    if session.accumulator is not None:
        session.accumulator.step = session.step
    if session.verifier.is_due(session.step + 1):
        session.verifier.verify_state(session.step)

    session.fingerprints.begin(session.step + 1)
    clock.mark()
    with session.fingerprints.sending(session.reduction):
        total = differentiate(session)
    clock.mark()
    session.fingerprints.gradients()
    if judgement is not None:
        optimizer.skip_above = judgement.judge_loss(float(total))
    clock.mark()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    # Reading the loss synchronizes anyway. Settling here puts a skip and an audit into the record of this step.
    optimizer.settle()
    clock.mark()
    session.step += 1
    session.fingerprints.states(session.step)

    gradient_seconds, _, update_seconds = clock.seconds()
    norm, embedding_norm = optimizer.grad_norm, optimizer.watched_grad_norm
    tokens_before, session.tokens = session.tokens, session.tokens + config.tokens_per_step
    columns: Row = {
        "loss": float(total),
        "lr": rate,
        "grad_norm": None if norm is None else float(norm),
        "tokens": session.tokens,
        "peak_memory_bytes": peak_memory_bytes(),
        "data_seconds": session.data_seconds,
        "gradient_seconds": max(0.0, gradient_seconds - session.data_seconds),
        "update_seconds": update_seconds,
        "batch_crc": session.batch_crc,
        "embedding_grad_norm": None if embedding_norm is None else float(embedding_norm),
    }
    if judgement is not None and (spike := judgement.judge_norm(columns["grad_norm"])) is not None:
        columns["spike"] = asdict(spike)
    row = session.reader.row(session.step, columns, tokens_before)
    if session.reader.audit_sums is not None:
        session.audit_total += session.reader.audit_sums
    return row


def differentiate(session: Session) -> Tensor:
    """Compute the step's loss. Leave the sum of all its micro-batches' gradients in ``p.grad``, over all ranks.

    Returns:
        The loss, 0-d, with the same bits on every rank and for every number of ranks.
    """
    scaler = session.optimizer.loss_scaler
    # A cache of casts of sharded weights would keep the whole model on each rank.
    is_cached = len(session.micro_batches) > 1 and not fsdp_modules(session.model)
    with float32_attention(), cached_weights() if is_cached else nullcontext():
        if session.reduction is None:
            return backward_in_parts((loss for _, loss in losses(session)), session.accumulator, scaler)
        shares = list(differentiated(session, scaler.scale if scaler is not None else lambda loss: loss))
    return sum_in_order(shares, session.config.gradient_accumulation_steps, session.here.size)


def differentiated(session: Session, scale: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Differentiate this rank's micro-batches, each loss multiplied by ``scale``. Yield the unscaled losses, detached."""
    reduction = session.reduction
    if reduction is not None:
        reduction.set_step(session.step)
    for part, loss in losses(session):
        if reduction is None:
            scale(loss).backward()
        else:
            with reduction.micro_batch(is_last=part.is_last, is_absent=part.is_absent):
                scale(loss).backward()
        yield loss.detach()


def losses(session: Session, loss: Callable[[Tensor], Tensor] | None = None) -> Iterator[tuple[MicroBatch, Tensor]]:
    """Yield this rank's micro-batches of the next step, each with its fraction of the step's loss.

    ``loss`` replaces the session's own.
    """
    began = time.perf_counter()
    batch = session.batch()
    session.data_seconds = time.perf_counter() - began
    session.set_compute()
    for part, tokens in zip(session.micro_batches, batch, strict=True):
        yield part, loss_of(session, part, tokens, loss or session.loss)


def loss_of(session: Session, part: MicroBatch, tokens: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a micro-batch's fraction of the loss of the next step."""
    config, reduction = session.config, session.reduction
    first = part.number * config.micro_batch_size
    if session.linears is not None:
        session.linears.step = session.step
        session.linears.set_first_sequence(first)
    with (
        random_numbers(config.seed, session.step, part.number, session.device),
        session.fingerprints.micro_batch(tokens, first, is_absent=part.is_absent),
        reduction.forward_pass() if reduction is not None else nullcontext(),
        record_function(FORWARD),
    ):
        total = loss(tokens)
    return total / config.tokens_per_step


@torch.no_grad()
def evaluate(session: Session) -> float:
    """Return the mean loss in nats per token over the validation batches, of the model in evaluation mode."""
    config, here = session.config, session.here
    batches = list(session.data.valid_batches(config.micro_batch_size, config.sequence_length, config.eval_batches))
    session.model.eval()
    session.set_compute(evaluating=True)
    sums = []
    try:
        # Ranks without a batch left repeat one: all take part in gathering weights.
        for part in micro_batches_of_rank(len(batches), here.rank % len(batches), here.size):
            tokens = torch.from_numpy(batches[part.number]).to(session.device)
            with random_numbers(config.seed, session.step, part.number, session.device):  # some models draw here too
                sums.append(session.loss(tokens).double())
    finally:
        session.model.train()
    session.reshard()
    num_tokens: int = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in batches)
    return float(sum_in_order(sums, len(batches), here.size)) / num_tokens


@contextmanager
def unsampled(gauges: Gauges | None) -> Iterator[None]:
    """Let gauges sample nothing within the block."""
    was_sampling = gauges is not None and gauges.sampling
    if gauges is not None:
        gauges.sampling = False
    try:
        yield
    finally:
        if gauges is not None:
            gauges.sampling = was_sampling
