"""One optimizer step and its record, and one evaluation.

The step contains no arithmetic and no format. It uses the results of ``prepare`` like any training
loop.

On several ranks, the states of all ranks are compared before a checkpoint is written. So the last
checkpoint is always from before the damage.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.distributed.sharding import fsdp_modules
from narrowgauge.matmul.cast_cache import cached_weights
from narrowgauge.numerics.widening import float32_attention
from narrowgauge.runs.schema import Row
from narrowgauge.torch_support.put_back import generators_put_back
from narrowgauge.trainer.session import Session, micro_batches_of_rank, sum_in_order


def train_step(session: Session) -> Row:
    """Take one optimizer step, and return the columns of its row that a recorder does not read."""
    optimizer = session.optimizer
    rate = session.config.learning_rate(session.step + 1)
    for group in optimizer.param_groups:
        group["lr"] = rate
    total = differentiate(session)
    if session.scaler is None:
        optimizer.step()
    else:
        session.scaler.step(optimizer)
        session.scaler.update()
    optimizer.zero_grad(set_to_none=True)
    session.end_step()
    return {
        "loss": float(total),
        "batch": session.tokens,
        "loader_seconds": session.loader_seconds,
    }


def differentiate(session: Session) -> Tensor:
    """Compute the step's loss.

    Leave the sum of all its micro-batches' gradients in ``p.grad``, over all ranks.

    Returns:
        The loss, 0-d, with the same bits on every rank and for every number of ranks.
    """
    config = session.config
    linears = session.linears
    reduction = session.reduction
    scaler = session.scaler
    parts = session.micro_batches
    shares = []
    if reduction is None:
        session.optimizer.zero_grad()  # half a batch of a step that failed
    # A cache of casts of sharded weights would keep the whole model on each rank.
    is_cached = len(parts) > 1 and not fsdp_modules(session.model)
    with float32_attention(), cached_weights() if is_cached else nullcontext():
        for part, tokens in zip(parts, session.batch(), strict=True):
            first = part.number * config.micro_batch_size
            if linears is not None:
                linears.step = session.step
                linears.set_first_token(first * config.sequence_length)
            exchange: AbstractContextManager[Any] = nullcontext()
            if reduction is not None:
                exchange = reduction.micro_batch(part.is_last, part.is_absent)
            with exchange:
                with random_numbers(config.seed, session.step, part.number):
                    loss = session.loss(tokens) / config.tokens_per_step
                scaled = loss if scaler is None else scaler.scale(loss)
                scaled.backward()
            shares.append(loss.detach())
    return sum_in_order(shares, config.gradient_accumulation_steps, session.here.size)


@contextmanager
def random_numbers(seed: int, step: int, micro_batch: int) -> Iterator[None]:
    """Make the random numbers of a forward pass, such as dropout and router jitter, a function of
    these three.

    No generator state is saved. A resumed, repeated or replayed step draws the same numbers again,
    on any number of ranks. A backward pass draws nothing: masks are saved, and activation
    checkpointing saves the forward pass's state.
    """
    key = hashlib.blake2b(f"{seed} {step} {micro_batch}".encode(), digest_size=8).digest()
    with generators_put_back():
        torch.manual_seed(int.from_bytes(key, "little"))
        random.seed(key)
        np.random.seed(int.from_bytes(key[:4], "little"))
        yield


@torch.no_grad()
def evaluate(session: Session) -> float:
    """Return the mean loss in nats per token over the validation sequences, of the model in
    evaluation mode.

    They are the same for every number of micro-batches and ranks.
    """
    config = session.config
    here = session.here
    size = config.micro_batch_size
    num_sequences = session.data.num_validation(config.eval_sequences, config.sequence_length)
    num_batches = -(-num_sequences // size)
    session.model.eval()
    sums = []
    try:
        # Ranks without a batch left repeat one: all take part in gathering weights.
        for part in micro_batches_of_rank(num_batches, here.rank % num_batches, here.size):
            rows = slice(part.number * size, (part.number + 1) * size)
            batch = session.data.validation(config.eval_sequences, config.sequence_length, rows)
            tokens = torch.from_numpy(batch).to(session.model.device)
            # Some models draw here too. Without float32_attention(): the kernel's forward in
            # bfloat16 is fast, only its backward is slow.
            with random_numbers(config.seed, session.step, part.number):
                sums.append(session.loss(tokens).double())
    finally:
        session.model.train()
    for module in fsdp_modules(session.model):  # no backward pass frees the gathered parameters
        module.reshard()
    total = float(sum_in_order(sums, num_batches, here.size))
    return total / (num_sequences * config.sequence_length)
