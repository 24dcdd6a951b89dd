"""A model, its optimizer and its tokens at some step; one step, and one evaluation.

The step contains no arithmetic and no format: it uses what ``prepare`` returns, like any training
loop. Micro-batch m of a step holds the same sequences for any number of ranks, and runs on rank
m % ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh

from narrowgauge.assembly.preparation import compute_scope, matrices_decay, prepare
from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.distributed.sharding import fsdp_modules
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.notation import parse
from narrowgauge.spec.tables import Row
from narrowgauge.torch_support.put_back import generators_put_back
from narrowgauge.trainer import language_model
from narrowgauge.trainer.settings import Settings
from narrowgauge.trainer.tokens import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Session:
    """A run in memory, after ``step`` optimizer steps."""

    settings: Settings
    tokens: Tokens
    model: PreTrainedModel
    optimizer: Optimizer
    here: Ranks
    scaler: GradScaler
    step: int = 0

    def loss_sum(self, tokens: Tensor) -> Tensor:
        """Return the summed cross entropy of some sequences."""
        tokens = tokens.to(self.model.device)
        with compute_scope(parse(self.settings.recipe), tokens.device):
            return language_model.loss_sum(self.model, tokens)

    def sum_over_ranks(self, shares: Sequence[Tensor]) -> float:
        """Return the exact sum of all ranks' shares: the same bits for any number of ranks."""
        return math.fsum(chain.from_iterable(self.here.gather([float(share) for share in shares])))


def build(settings: Settings, tokens: Tokens) -> Session:
    """Build a session at step 0."""
    model = language_model.build(settings.model, vocab_size=tokens.vocab_size, seed=settings.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nn.Module.to(model, device)
    here = all_ranks()
    mesh = init_device_mesh(device.type, (here.size,)) if here.size > 1 else None
    _, optimizer = prepare(
        model, settings.recipe, lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay,
        optimizer=matrices_decay, max_grad_norm=settings.max_grad_norm or None, seed=settings.seed, mesh=mesh, average=False,
    )  # fmt: skip
    if settings.gradient_accumulation_steps > 1 and mesh is None and optimizer.reduction is None:
        for parameter in model.parameters():
            if parameter.dtype.itemsize == 2:
                parameter.grad_dtype = torch.float32  # autograd sums in it
    scaler = GradScaler(device.type, enabled=optimizer.scales_loss)
    return Session(settings, tokens, model, optimizer, here, scaler)


def train_step(session: Session) -> Row:
    """Take one optimizer step, and return the columns of its row that a recorder does not read."""
    settings = session.settings
    reduction = session.optimizer.reduction
    for group in session.optimizer.param_groups:
        group["lr"] = settings.learning_rate(session.step + 1)
    shares = []
    batch = []
    here = session.here
    size = settings.micro_batch_size
    numbers = range(here.rank, settings.gradient_accumulation_steps, here.size)
    for number in numbers:
        first = session.step * settings.batch_size + number * size
        windows = session.tokens.batch(first, size, settings.sequence_length, settings.seed)
        tokens = torch.from_numpy(windows)
        batch.append(tokens)
        exchange: AbstractContextManager[Any] = nullcontext()
        if reduction is not None:
            exchange = reduction.micro_batch(number == numbers[-1])
        with exchange:
            with generators_put_back():
                # A function of these three, so that a repeated step draws the same numbers.
                torch.manual_seed(hash((settings.seed, session.step, number)))
                loss = session.loss_sum(tokens) / settings.tokens_per_step
            session.scaler.scale(loss).backward()
        shares.append(loss.detach())
    session.scaler.step(session.optimizer)
    session.scaler.update()
    session.optimizer.zero_grad()
    session.step += 1
    return {"loss": session.sum_over_ranks(shares), "batch": torch.cat(batch)}


@torch.no_grad()
def evaluate(session: Session) -> float:
    """Return the mean loss in nats per token over the validation sequences, of the model in
    evaluation mode.

    They are the same for every number of micro-batches and ranks.
    """
    settings = session.settings
    tokens = session.tokens.validation(settings.eval_sequences, settings.sequence_length)
    batches = torch.from_numpy(tokens).split(settings.micro_batch_size)
    session.model.eval()
    shares = []
    for first in range(0, len(batches), session.here.size):
        # All ranks take part in gathering weights. One without a batch repeats an earlier one.
        number = first + session.here.rank
        share = session.loss_sum(batches[number % len(batches)])
        shares.append(share * (number < len(batches)))
    session.model.train()
    for module in fsdp_modules(session.model):  # no backward pass frees the gathered parameters
        module.reshard()
    return session.sum_over_ranks(shares) / (len(tokens) * settings.sequence_length)
