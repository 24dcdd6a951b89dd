"""One optimizer step and one evaluation, what ranks verify between steps, and the record of each.

The step contains no arithmetic and no format; it uses what ``prepare`` returns like any training loop. With
``--on-spike`` the step is judged before the update, and a spike changes nothing.

On several ranks, every ``verify_every`` steps, the states of all ranks are compared and one micro-batch is computed by all of
them. States are also compared before a checkpoint is written, so that the last checkpoint is always from before the damage.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch.profiler import record_function

from narrowgauge.analysis.spikes import StepJudgement
from narrowgauge.distributed.sharding import fsdp_modules
from narrowgauge.gauges.recording.step_row import peak_memory_bytes, summary_of
from narrowgauge.matmul.cast_cache import cached_weights
from narrowgauge.numerics.widening import float32_attention
from narrowgauge.optim.accumulation import backward_in_parts
from narrowgauge.runs.record import read_run
from narrowgauge.runs.schema import Row
from narrowgauge.trainer import counted_memory
from narrowgauge.trainer.micro_batches import batch_index, gather_in_order, micro_batches_of_rank, sum_in_order
from narrowgauge.trainer.random_numbers import random_numbers
from narrowgauge.trainer.session import Session


class StepClock:
    """Moments within a step. On CUDA they are events on the stream, so nothing waits for the device before ``seconds``."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._moments: list[Any] = []

    def mark(self) -> None:
        """Note this moment."""
        if self._on_gpu:
            self._moments.append(torch.cuda.Event(enable_timing=True))
            self._moments[-1].record()
        else:
            self._moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the time between each moment and the next."""
        if self._on_gpu:
            self._moments[-1].synchronize()
        pairs = itertools.pairwise(self._moments)
        return [a.elapsed_time(b) / 1000 if self._on_gpu else b - a for a, b in pairs]


def train_step(session: Session, judgement: StepJudgement | None = None) -> Row:
    """Take one optimizer step, and return its row of ``steps.jsonl``.

    ``judgement`` judges the step before the update, which is left out where the step is a spike.
    """
    optimizer = session.optimizer
    session.reader.begin()
    rate = session.set_learning_rate()
    if session.accumulator is not None:
        session.accumulator.step = session.step
    if session.verifier.is_due(session.step + 1):
        verify(session)
    session.fingerprints.begin(session.step + 1)
    clock = StepClock(session.device)
    clock.mark()
    with session.fingerprints.sending(session.reduction):
        total = differentiate(session)
    clock.mark()
    session.fingerprints.gradients()
    loss = None
    if judgement is not None:
        loss = float(total)
        optimizer.skip_above = judgement.judge_loss(loss)
    clock.mark()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    # Reading the loss synchronizes anyway; settling here puts a skip and an audit into the record of this step.
    optimizer.settle()
    clock.mark()
    session.step += 1
    session.fingerprints.states(session.step)
    return _row(session, float(total) if loss is None else loss, rate, judgement, clock)


def _row(session: Session, loss: float, rate: float, judgement: StepJudgement | None, clock: StepClock) -> Row:
    in_gradients, _, in_update = clock.seconds()
    norm, own, before = session.optimizer.grad_norm, session.optimizer.watched_grad_norm, session.tokens
    session.tokens += session.config.tokens_per_step
    known: Row = {
        "loss": loss,
        "lr": rate,
        "grad_norm": None if norm is None else float(norm),
        "tokens": session.tokens,
        "peak_memory_bytes": peak_memory_bytes(),
        "data_seconds": session.data_seconds,
        "gradient_seconds": max(0.0, in_gradients - session.data_seconds),
        "update_seconds": in_update,
        "batch_crc": session.batch_crc,
        "embedding_grad_norm": None if own is None else float(own),
    }
    if judgement is not None and (spike := judgement.judge_norm(known["grad_norm"])) is not None:
        known["spike"] = asdict(spike)
    row = session.reader.row(session.step, known, tokens_before=before)
    if session.reader.audit_sums is not None:
        session.audit_total += session.reader.audit_sums
    return row


def differentiate(session: Session) -> torch.Tensor:
    """Compute the step's loss and leave the sum of all its micro-batches' gradients in ``p.grad``, over all ranks.

    Returns:
        The loss, 0-d; the same bits on every rank, and for every number of them.
    """
    scaler = session.optimizer.loss_scaler
    # Casts of weights that are sharded would keep the whole model on each rank.
    is_cached = len(session.micro_batches) > 1 and not fsdp_modules(session.model)
    with float32_attention(), cached_weights() if is_cached else nullcontext():
        if session.reduction is None:
            return backward_in_parts(losses(session), session.accumulator, scaler)
        shares = list(differentiated(session, scaler.scale if scaler is not None else lambda loss: loss))
    return sum_in_order(shares, session.config.gradient_accumulation_steps, session.here.size)


def differentiated(session: Session, scale: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[torch.Tensor]:
    """Differentiate this rank's micro-batches, each loss multiplied by ``scale``; yields the losses as they were, detached."""
    reduction = session.reduction
    if reduction is not None:
        reduction.set_step(session.step)
    for each, loss in zip(session.micro_batches, losses(session), strict=True):
        if reduction is None:
            scale(loss).backward()
        else:
            with reduction.micro_batch(is_last=each.is_last, is_absent=each.is_absent):
                scale(loss).backward()
        yield loss.detach()


def _batch(session: Session) -> list[torch.Tensor]:
    """This rank's micro-batches; the session notes how long reading them took."""
    began = time.perf_counter()
    batch = session.batch()
    session.data_seconds = time.perf_counter() - began
    return batch


def losses(session: Session) -> Iterator[torch.Tensor]:
    """The loss of each of this rank's micro-batches, as its share of the step's; narrow layers are told which sequences come."""
    linears, config = session.linears, session.config
    if linears is not None:
        session.set_compute()
        linears.step = session.step
    for each, tokens in zip(session.micro_batches, _batch(session), strict=True):
        first = each.number * config.micro_batch_size
        if linears is not None:
            linears.set_first_sequence(first)
        forward = session.reduction.forward_pass() if session.reduction is not None else nullcontext()
        named = record_function(counted_memory.FORWARD)
        drawn = random_numbers(config.seed, session.step, each.number, session.device)
        with drawn, session.fingerprints.micro_batch(tokens, first, is_absent=each.is_absent), forward, named:
            loss = session.loss(tokens)
        yield loss / config.tokens_per_step


@torch.no_grad()
def evaluate(session: Session) -> float:
    """Return the mean loss in nats per token over the validation batches, of the model in evaluation mode."""
    session.model.eval()
    try:
        return _evaluated(session)
    finally:
        session.model.train()


def _evaluated(session: Session) -> float:
    config, here = session.config, session.here
    session.set_compute(evaluating=True)
    batches = list(session.data.valid_batches(config.micro_batch_size, config.sequence_length, config.eval_batches))
    found = []
    # Ranks without a batch left repeat one: all take part in gathering weights.
    for each in micro_batches_of_rank(len(batches), here.rank % max(1, len(batches)), here.size) if batches else ():
        tokens = torch.from_numpy(batches[each.number]).to(session.device)
        with random_numbers(config.seed, session.step, each.number, session.device):  # some models draw here too
            found.append(float(session.loss(tokens)))
    session.reshard()
    total = 0.0
    for loss in gather_in_order(found, len(batches), here):  # from Python 3.12 on sum() rounds otherwise
        total += loss
    count: int = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in batches)
    return total / count


def summarize(session: Session, val_loss: float, wall_seconds: float) -> Row:
    """Return the record of ``summary.json``."""
    rows = session.here.of_first(lambda: read_run(session.folder).steps)
    return summary_of(
        rows,
        session.audit_total,
        recipe=session.config.recipe.to_value(),
        model=session.config.model,
        val_loss=val_loss,
        steps=session.step,
        tokens=session.tokens,
        peak_memory_bytes=peak_memory_bytes(),
        bytes_per_param=counted_memory.bytes_per_param(session),
        state_bytes=counted_memory.state_bytes(session),
        **counted_memory.of_run(rows),
        num_skipped=session.optimizer.num_skipped,
        weights_fingerprint=session.weights_fingerprint(),
        wall_seconds=wall_seconds,
    )


# ── verification on ranks ───────────────────────────────────────────────────────────────────────────────────────────


def verify(session: Session) -> None:
    """Compare what the ranks hold, and what they compute from one micro-batch of the next step; another one each time.

    A difference raises CorruptionError on all ranks.
    """
    config, verifier = session.config, session.verifier
    verifier.verify_state(session.step)
    if session.reduction is None:
        return
    number = (session.step // config.verify_every) % config.gradient_accumulation_steps
    is_sampled = session.gauges is not None and session.gauges.sampling
    if session.gauges is not None:
        session.gauges.sampling = False  # this micro-batch is counted when its turn comes
    verifier.verify_gradients(session.step, session.model, lambda: _differentiate(session, number))
    if session.gauges is not None:
        session.gauges.sampling = is_sampled


def _differentiate(session: Session, number: int) -> None:
    """Compute the gradients of one micro-batch, and discard them."""
    config, reduction, linears = session.config, session.reduction, session.linears
    assert reduction is not None
    place = batch_index(session.step, session.skipped_batches)
    batch = session.data.batch(place, config.batch_size, config.sequence_length, config.seed)
    tokens = torch.from_numpy(batch).split(config.micro_batch_size)[number].to(session.device)
    if linears is not None:
        session.set_compute()
        linears.step = session.step
        linears.set_first_sequence(number * config.micro_batch_size)
    drawn = random_numbers(config.seed, session.step, number, session.device)
    with drawn, reduction.micro_batch(is_last=False):
        (session.loss(tokens) / config.tokens_per_step).backward()
    reduction.discard()
