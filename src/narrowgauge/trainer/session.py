"""A model, its optimizer and its tokens at some step; one step, and one evaluation.

The step contains no arithmetic and no format: it uses what ``prepare`` returns, like any training
loop. Micro-batch m of a step holds the same sequences for any number of ranks, and runs on rank
m % ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh

from narrowgauge.assembly.preparation import compute_scope, matrices_decay, prepare
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import fsdp_modules
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import gradient_of, is_sharded
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

    def rounds(self, count: int) -> list[int]:
        """Return the numbers of this rank's micro-batches, of ``count`` over all ranks.

        Every rank has as many, since all take part in every exchange. A number of ``count`` or more
        stands for one that contributes nothing.
        """
        num_rounds = -(-count // self.here.size)
        return [self.here.rank + k * self.here.size for k in range(num_rounds)]

    def batch(self) -> list[Tensor]:
        """Return this rank's micro-batches of the next step: int64 ``[micro_batch_size,
        sequence_length + 1]`` each.
        """
        settings = self.settings
        size = settings.micro_batch_size
        batch = []
        for number in self.rounds(settings.gradient_accumulation_steps):
            # A rank that has none left repeats one, which contributes nothing.
            place = self.step * settings.batch_size + number * size % settings.batch_size
            windows = self.tokens.batch(place, size, settings.sequence_length, settings.seed)
            batch.append(torch.from_numpy(windows))
        return batch

    def loss_sum(self, tokens: Tensor) -> Tensor:
        """Return the summed cross entropy of some sequences."""
        tokens = tokens.to(self.model.device)
        with compute_scope(parse(self.settings.recipe), tokens.device):
            return language_model.loss_sum(self.model, tokens)

    def sum_in_order(self, shares: Sequence[Tensor], count: int) -> float:
        """Sum the shares of all ranks' rounds in the order of the micro-batches: the same bits for
        any number of ranks.
        """
        by_rank = self.here.gather([float(share) for share in shares])
        total = 0.0
        for number in range(count):
            total += by_rank[number % self.here.size][number // self.here.size]
        return total


def build(settings: Settings, tokens: Tokens) -> Session:
    """Build a session at step 0, with the settings filled in for the model."""
    model = language_model.build(settings.model, vocab_size=tokens.vocab_size, seed=settings.seed)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and settings.sequence_length > positions:
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
    if settings.gradient_accumulation_steps > size and optimizer.reduction is None:
        for parameter in model.parameters():
            if parameter.dtype.itemsize == 2 and not is_sharded(parameter):
                parameter.grad_dtype = torch.float32  # autograd sums in it
    return Session(settings, tokens, model, optimizer)


def train_step(session: Session) -> Row:
    """Take one optimizer step, and return the columns of its row that a recorder does not read."""
    settings = session.settings
    count = settings.gradient_accumulation_steps
    optimizer = session.optimizer
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate(session.step + 1)
    shares = []
    present = []
    sums: dict[Tensor, Tensor] = {}
    numbers = session.rounds(count)
    for number, tokens in zip(numbers, session.batch(), strict=True):
        is_absent = number >= count
        if not is_absent:
            present.append(tokens)
        exchange: AbstractContextManager[Any] = nullcontext()
        if session.reduction is not None:
            exchange = session.reduction.micro_batch(number == numbers[-1], is_absent)
        with exchange:
            with generators_put_back():
                # A function of these three, so that a repeated step draws the same numbers.
                torch.manual_seed(hash((settings.seed, session.step, number)))
                total = session.loss_sum(tokens)
            loss = total / settings.tokens_per_step
            scaled = session.scaler.scale(loss)
            if is_absent and session.reduction is None:
                scaled = 0 * scaled
            scaled.backward()
        if session.reduction is None and session.here.size > 1:
            add_shards(session.model, sums, number == numbers[-1])
        shares.append(loss.detach())
    session.scaler.step(optimizer)
    session.scaler.update()
    optimizer.zero_grad()
    session.step += 1
    return {"loss": session.sum_in_order(shares, count), "batch": torch.cat(present)}


def add_shards(model: nn.Module, sums: dict[Tensor, Tensor], is_last: bool) -> None:
    """Add a micro-batch's gradients of 16 bits, which FSDP2 has summed over ranks, in float32.

    After the last micro-batch, round their sums to ``p.grad``.
    """
    for parameter in model.parameters():
        gradient = gradient_of(parameter)
        if gradient is None or gradient.dtype.itemsize != 2:
            continue
        total = gradient.float()
        if parameter in sums:
            total += sums[parameter]
        sums[parameter] = total
        parameter.grad = total.to(parameter.dtype) if is_last else None


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
        # Ranks without a batch left repeat one: all take part in gathering weights.
        shares.append(session.loss_sum(batches[number % len(batches)]))
    session.model.train()
    for module in fsdp_modules(session.model):  # no backward pass frees the gathered parameters
        module.reshard()
    return session.sum_in_order(shares, len(batches)) / (len(tokens) * settings.sequence_length)
