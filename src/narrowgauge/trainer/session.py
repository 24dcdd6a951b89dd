"""A model, its optimizer and its tokens at some step; one step, and one evaluation.

The step contains no arithmetic and no format: it uses what ``prepare`` returns, like any training
loop. Micro-batch m of a step holds the same sequences for any number of ranks, and runs on rank
m % ranks.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh

from narrowgauge.assembly.preparation import compute_scope, matrices_decay, prepare
from narrowgauge.distributed.exact_sum import all_gather
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.reduction import GradientReduction
from narrowgauge.distributed.sharding import fingerprint_whole, fsdp_modules
from narrowgauge.errors import RecipeError
from narrowgauge.matmul.cast_cache import cached_weights
from narrowgauge.matmul.swapping import linears_of
from narrowgauge.numerics.dtensor import gradient_of, is_sharded
from narrowgauge.numerics.widening import float32_attention
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.tables import Row
from narrowgauge.torch_support.put_back import generators_put_back
from narrowgauge.trainer import language_model
from narrowgauge.trainer.settings import Settings
from narrowgauge.trainer.tokens import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MicroBatch(NamedTuple):
    """One round of a rank in a step.

    A rank that has none left repeats its first and contributes nothing, since every rank takes part
    in every exchange.
    """

    number: int  # in the step, over all ranks
    is_absent: bool = False  # the rank has no micro-batch left and repeats this one
    is_last: bool = False  # the last round of the step


def micro_batches_of_rank(num_micro_batches: int, rank: int = 0, size: int = 1) -> list[MicroBatch]:
    """Return the rounds of one rank, in a step with at least one micro-batch for each rank.

    Example:
        >>> [(part.number, part.is_absent) for part in micro_batches_of_rank(5, rank=2, size=3)]
        [(2, False), (2, True)]
    """
    parts = [MicroBatch(number) for number in range(rank, num_micro_batches, size)]
    if len(parts) * size < num_micro_batches:  # another rank has one more
        parts.append(MicroBatch(rank, is_absent=True))
    parts[-1] = parts[-1]._replace(is_last=True)
    return parts


def sum_in_order(shares: Sequence[Tensor], num_micro_batches: int, size: int = 1) -> Tensor:
    """Sum the 0-d ``shares`` of all ranks' rounds in the order of the micro-batches: the same bits
    for any number of ranks.
    """
    table = torch.stack([share.detach() for share in shares])
    if size > 1:
        gathered = torch.empty(size * len(shares), dtype=table.dtype, device=table.device)
        all_gather(gathered, table)
        # Round by round, each by rank: the order of the micro-batches.
        table = gathered.view(size, -1).t().reshape(-1)
    total = table[0]
    for share in table[1:num_micro_batches].unbind():
        total = total + share
    return total


@dataclass
class Session:
    """A run in memory.

    Args:
        reduction: sums the gradients of micro-batches exactly; ``None`` where PyTorch sums them.
        schedule: gives the rate of a step; ``None`` for the settings'.
        step: optimizer steps done.
    """

    settings: Settings
    tokens: Tokens
    model: PreTrainedModel
    optimizer: Optimizer
    reduction: GradientReduction | None = None
    schedule: Callable[[int], float] | None = None
    step: int = 0

    def __post_init__(self) -> None:
        self.here = all_ranks()
        self.scaler: GradScaler | None = None
        if self.optimizer.scales_loss:
            self.scaler = GradScaler(self.model.device.type)
        self.linears = linears_of(self.model)

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the summed cross entropy of some sequences."""
        with compute_scope(self.settings.recipe, tokens.device):
            return language_model.loss_sum(self.model, tokens)

    def micro_batches(self) -> list[MicroBatch]:
        parts = self.settings.gradient_accumulation_steps
        return micro_batches_of_rank(parts, self.here.rank, self.here.size)

    def batch(self) -> list[Tensor]:
        """Return this rank's micro-batches of the next step: int64 ``[micro_batch_size,
        sequence_length + 1]`` each.
        """
        settings = self.settings
        size = settings.micro_batch_size
        batch = []
        for part in self.micro_batches():
            first = self.step * settings.batch_size + part.number * size
            windows = self.tokens.batch(first, size, settings.sequence_length, settings.seed)
            batch.append(torch.from_numpy(windows))
        return batch

    def weights_fingerprint(self) -> str:
        """Return a 64-bit fingerprint of the stored weights, as 16 hexadecimal digits."""
        stored = {name: self.optimizer.stored(p) for name, p in self.model.named_parameters()}
        return fingerprint_whole(stored)

    def bytes_per_param(self) -> float:
        """Return the bytes of weights, gradients, optimizer states and sums of micro-batches per
        parameter of this rank.
        """
        total = self.optimizer.bytes_per_param()
        if self.reduction is not None:
            total += self.reduction.bytes_per_param()
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
    settings = settings.filled(model.num_parameters())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nn.Module.to(model, device)
    size = all_ranks().size
    mesh = init_device_mesh(device.type, (size,)) if size > 1 else None
    _, optimizer = prepare(
        model, settings.recipe, lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay,
        optimizer=matrices_decay, max_grad_norm=settings.max_grad_norm, seed=settings.seed, mesh=mesh, average=False,
    )  # fmt: skip
    if settings.gradient_accumulation_steps > size and optimizer.reduction is None:
        for parameter in model.parameters():
            if parameter.dtype.itemsize == 2 and not is_sharded(parameter):
                parameter.grad_dtype = torch.float32  # autograd sums in it
    return Session(settings, tokens, model, optimizer, optimizer.reduction)


def train_step(session: Session) -> Row:
    """Take one optimizer step, and return the columns of its row that a recorder does not read."""
    optimizer = session.optimizer
    schedule = session.schedule or session.settings.learning_rate
    for group in optimizer.param_groups:
        group["lr"] = schedule(session.step + 1)
    began = time.perf_counter()
    batch = session.batch()
    waited = session.here.largest(int(1e9 * (time.perf_counter() - began)))
    total = differentiate(session, batch)
    if session.scaler is None:
        optimizer.step()
    else:
        session.scaler.step(optimizer)
        session.scaler.update()
    optimizer.zero_grad(set_to_none=True)
    session.step += 1
    present = []
    for part, tokens in zip(session.micro_batches(), batch, strict=True):
        if not part.is_absent:
            present.append(tokens)
    return {"loss": float(total), "batch": torch.cat(present), "loader_seconds": waited / 1e9}


def differentiate(session: Session, batch: Sequence[Tensor]) -> Tensor:
    """Compute the step's loss.

    Leave the sum of all its micro-batches' gradients in ``p.grad``, over all ranks.

    Returns:
        The loss, 0-d, with the same bits on every rank and for every number of ranks.
    """
    settings = session.settings
    reduction = session.reduction
    shares = []
    sums: dict[Tensor, Tensor] = {}
    if reduction is None:
        session.optimizer.zero_grad()  # half a batch of a step that failed
    # A cache of casts of sharded weights would keep the whole model on each rank.
    is_cached = len(batch) > 1 and not fsdp_modules(session.model)
    with float32_attention(), cached_weights() if is_cached else nullcontext():
        for part, tokens in zip(session.micro_batches(), batch, strict=True):
            exchange: AbstractContextManager[Any] = nullcontext()
            if reduction is not None:
                exchange = reduction.micro_batch(part.is_last, part.is_absent)
            with exchange:
                with random_numbers(settings.seed, session.step, part.number):
                    loss = session.loss(tokens.to(session.model.device)) / settings.tokens_per_step
                scaled = loss if session.scaler is None else session.scaler.scale(loss)
                if part.is_absent and reduction is None:
                    scaled = 0 * scaled
                scaled.backward()
            if reduction is None and session.here.size > 1:
                add_shards(session.model, sums, part.is_last)
            shares.append(loss.detach())
    return sum_in_order(shares, settings.gradient_accumulation_steps, session.here.size)


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


@contextmanager
def random_numbers(seed: int, step: int, micro_batch: int) -> Iterator[None]:
    """Make the random numbers of a forward pass, such as router jitter, a function of these three.

    No generator state is saved: a resumed or repeated step draws the same numbers again, on any
    number of ranks.
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
    settings = session.settings
    here = session.here
    tokens = session.tokens.validation(settings.eval_sequences, settings.sequence_length)
    batches = torch.from_numpy(tokens).split(settings.micro_batch_size)
    session.model.eval()
    sums = []
    try:
        # Ranks without a batch left repeat one: all take part in gathering weights.
        for part in micro_batches_of_rank(len(batches), here.rank % len(batches), here.size):
            batch = batches[part.number].to(session.model.device)
            with random_numbers(settings.seed, session.step, part.number):
                sums.append(session.loss(batch).double())
    finally:
        session.model.train()
    for module in fsdp_modules(session.model):  # no backward pass frees the gathered parameters
        module.reshard()
    total = float(sum_in_order(sums, len(batches), here.size))
    return total / (len(tokens) * settings.sequence_length)
