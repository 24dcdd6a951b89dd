"""A model, its optimizer and its tokens at some step; one step, and one evaluation.

The step contains no arithmetic and no format: it uses what ``prepare`` returns, like any training
loop. Micro-batch m of a step holds the same sequences for any number of ranks, and runs on rank
m % ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh

from narrowgauge.assembly.preparation import compute_scope, matrices_decay, prepare
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import fsdp_modules
from narrowgauge.errors import RecipeError
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.models import usual_rate
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
    step: int = 0

    def __post_init__(self) -> None:
        self.here = all_ranks()
        self.reduction = self.optimizer.reduction
        self.scaler = GradScaler(self.model.device.type, enabled=self.optimizer.scales_loss)

    def rounds(self, count: int) -> range:
        """Return the numbers of this rank's micro-batches, of ``count`` over all ranks.

        Every rank has as many, since all take part in every exchange. A number of ``count`` or more
        repeats an earlier one and contributes nothing.
        """
        size = self.here.size
        return range(self.here.rank, -(-count // size) * size, size)

    def micro_batch(self, number: int) -> Tensor:
        """Return a micro-batch of the next step: int64 ``[micro_batch_size, sequence_length + 1]``."""
        settings = self.settings
        size = settings.micro_batch_size
        place = self.step * settings.batch_size + number * size % settings.batch_size
        windows = self.tokens.batch(place, size, settings.sequence_length, settings.seed)
        return torch.from_numpy(windows)

    def loss_sum(self, tokens: Tensor) -> Tensor:
        """Return the summed cross entropy of some sequences."""
        tokens = tokens.to(self.model.device)
        with compute_scope(parse(self.settings.recipe), tokens.device):
            return language_model.loss_sum(self.model, tokens)

    def sum_over_ranks(self, shares: Sequence[Tensor]) -> float:
        """Return the exact sum of all ranks' shares: the same bits for any number of ranks."""
        return math.fsum(chain.from_iterable(self.here.gather([float(share) for share in shares])))


def build(settings: Settings, tokens: Tokens) -> Session:
    """Build a session at step 0, with the settings filled in for the model."""
    model = language_model.build(settings.model, vocab_size=tokens.vocab_size, seed=settings.seed)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    if settings.sequence_length > positions:
        raise RecipeError(
            f"Cannot train: {settings.model} has {positions} positions, and sequences have "
            f"{settings.sequence_length} tokens.",
            f"Use --sequence-length {positions} or less, or another --model.",
        )
    settings = replace(settings, lr=settings.lr or usual_rate(model.num_parameters()))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nn.Module.to(model, device)
    size = all_ranks().size
    mesh = init_device_mesh(device.type, (size,)) if size > 1 else None
    _, optimizer = prepare(
        model, settings.recipe, lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay,
        optimizer=matrices_decay, max_grad_norm=settings.max_grad_norm or None, seed=settings.seed, mesh=mesh, average=False,
    )  # fmt: skip
    if settings.gradient_accumulation_steps > 1 and mesh is None and optimizer.reduction is None:
        for parameter in model.parameters():
            if parameter.dtype.itemsize == 2:
                parameter.grad_dtype = torch.float32  # autograd sums in it
    return Session(settings, tokens, model, optimizer)


def train_step(session: Session) -> Row:
    """Take one optimizer step, and return the columns of its row that a recorder does not read."""
    settings = session.settings
    count = settings.gradient_accumulation_steps
    for group in session.optimizer.param_groups:
        group["lr"] = settings.learning_rate(session.step + 1)
    shares = []
    batch = []
    numbers = session.rounds(count)
    for number in numbers:
        is_absent = number >= count
        tokens = session.micro_batch(number)
        if not is_absent:
            batch.append(tokens)
        exchange: AbstractContextManager[Any] = nullcontext()
        if session.reduction is not None:
            exchange = session.reduction.micro_batch(number == numbers[-1], is_absent)
        with exchange:
            with generators_put_back():
                # A function of these three, so that a repeated step draws the same numbers.
                torch.manual_seed(hash((settings.seed, session.step, number)))
                loss = session.loss_sum(tokens) / settings.tokens_per_step
            if is_absent:
                loss = 0 * loss
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
    for number in session.rounds(len(batches)):
        # All ranks take part in gathering weights.
        share = session.loss_sum(batches[number % len(batches)])
        shares.append(share * (number < len(batches)))
    session.model.train()
    for module in fsdp_modules(session.model):  # no backward pass frees the gathered parameters
        module.reshard()
    return session.sum_over_ranks(shares) / (len(tokens) * settings.sequence_length)
