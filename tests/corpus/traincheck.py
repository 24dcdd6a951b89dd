"""The silent faults of TrainCheck's public set that a CPU can run, each beside its right twin.

TrainCheck (OSDI 2025, https://www.arxiv.org/abs/2506.14813) publishes 18 silent faults. A program
here does what the thread of its fault says, with a small model. ``is_faulty=False`` gives the twin.
Three faults are not here: a hang, a wrong length of generated text, and lost data at inference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SIDE, CLASSES, BATCH, WIDTH, LENGTH, VOCABULARY = 12, 10, 8, 16, 12, 32
STEPS = 52
EVALUATE_EVERY = 13
Batch = tuple[Tensor, Tensor]


def images(step: int, rank: int = 0) -> Batch:
    """Return the images and labels of a step: a pattern for each class, and noise."""
    patterns = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1000 * rank + step + 10)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    noise = torch.randn(BATCH, 1, SIDE, SIDE, generator=generator)
    return patterns[labels] + noise, labels


def sequences(step: int, rank: int = 0) -> Batch:
    """Return tokens and the next tokens of a step: counts with a stride for each sequence."""
    generator = torch.Generator().manual_seed(1000 * rank + step + 10)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


class Loop:
    """A training loop. A subclass changes what its fault is about.

    Attributes:
        model: as the loop calls it.
        clip: the limit of the gradient norm, or none.
    """

    clip: float | None = None

    def __init__(self, is_faulty: bool) -> None:
        torch.manual_seed(0)
        self.is_faulty = is_faulty
        self.step = 0
        self.last_batch: Any = None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.model = self.new_model()
        self.optimizer = self.new_optimizer()
        self.prepare()

    def new_model(self) -> nn.Module:
        return Network()

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def prepare(self) -> None:
        """Do what the program does between the optimizer and the first step."""

    def batch(self, step: int) -> Any:
        return images(step, self.rank)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())

    def backward(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the gradients of a step."""
        loss = self.loss(model, batch)
        loss.backward()
        return loss.detach()

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def before_step(self) -> None:
        """Change the gradients."""

    def one_step(self) -> Tensor:
        self.step += 1
        self.zero()
        self.last_batch = self.batch(self.step)
        loss = self.backward(self.model, self.last_batch)
        self.before_step()
        self.optimizer.step()
        return loss

    def evaluate(self) -> float:
        """Return the loss of a held-out batch."""
        self.model.eval()
        with torch.no_grad():
            loss = float(self.loss(self.model, self.batch(10_000)))
        self.model.train()
        return loss


class Network(nn.Sequential):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.max_pool2d(functional.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


class Plain(nn.Module):
    """A network without state beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIDE * SIDE)
        self.up, self.fc = nn.Linear(SIDE * SIDE, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(functional.relu(self.up(self.norm(x.flatten(1)))))


class Attention(nn.Module):
    """A causal attention whose caller says how much dropout it has, as FlashAttention's does."""

    def __init__(self, dropout: float = 0.0, *, drops_always: bool = False) -> None:
        super().__init__()
        self.dropout = dropout
        self.drops_always = drops_always
        self.qkv, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        dropout = self.dropout if self.training or self.drops_always else 0.0
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), attention
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 32), "c_proj": nn.Linear(32, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.norm2(x))))


class Transformer(nn.Module):
    """A small GPT."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(Attention(**options)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, prefix: Tensor | float = 0.0) -> Tensor:
        x = self.tokens(tokens) + self.places.weight + prefix
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ── gradients and the optimizer ───────────────────────────────────────────────────────────────────


class NeverZeroed(Loop):
    def zero(self) -> None:
        if not self.is_faulty:
            super().zero()


class FrozenButNorms(Loop):
    """Transfer learning. The optimizer has the head; the faulty loop freezes all but the norms."""

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.fc.parameters(), lr=1e-3)

    def prepare(self) -> None:
        for name, p in self.model.named_parameters():
            p.requires_grad = "bn" in name if self.is_faulty else "fc" in name


class ReplayedStep(Loop):
    """A traced step of the optimizer, which is traced anew where no tensor has a gradient.

    The faulty trace of such a step has no guard on the gradients, so all later steps replay it.
    """

    is_traced_empty = False

    def prepare(self) -> None:
        collect = self.optimizer._init_group

        def collect_traced(group: dict[str, Any], *lists: list[Tensor]) -> bool:
            """Fill the lists of what the step reads, as they were when it was traced."""
            self.is_traced_empty |= all(p.grad is None for p in group["params"])
            if self.is_faulty and self.is_traced_empty:
                return False
            return collect(group, *lists)

        self.optimizer._init_group = collect_traced

    def backward(self, model: nn.Module, batch: Any) -> Tensor:
        if 5 <= self.step < 7:  # the loop steps without gradients
            return self.loss(model, batch).detach()
        return super().backward(model, batch)


# ── modules ───────────────────────────────────────────────────────────────────────────────────────


class Stages(nn.Module):
    """A backbone that freezes its first stages when it is put into training mode."""

    def __init__(self, frozen_stages: int) -> None:
        super().__init__()
        self.frozen_stages = frozen_stages
        first = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.stages = nn.ModuleList([first, second])
        self.head = nn.Linear(8 * 64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.flatten(1))

    def train(self, mode: bool = True) -> Stages:
        super().train(mode)
        for stage in self.stages[: self.frozen_stages]:
            stage.eval().requires_grad_(False)
        return self


class NeverFrozen(Loop):
    """A new module is in training mode, so the faulty loop never calls ``train()``."""

    def new_model(self) -> nn.Module:
        return Stages(frozen_stages=1)

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    def prepare(self) -> None:
        if not self.is_faulty:
            self.model.train()

    def evaluate(self) -> float:
        return math.nan  # which would call train()


class Spectral(nn.Module):
    """A network of spectral norms, whose vectors are random until a pass in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (self._layer() for _ in range(2))
        self.act1, self.act2 = nn.PReLU(SIDE * SIDE), nn.PReLU(SIDE * SIDE)
        self.out = nn.Linear(SIDE * SIDE, CLASSES)

    def _layer(self) -> nn.Module:
        layer = nn.Linear(SIDE * SIDE, SIDE * SIDE)
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
        return nn.utils.spectral_norm(layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act2(self.second(self.act1(self.first(x.flatten(1))))))


class EvaluatedFirst(Loop):
    """The quality of the initial weights is measured before any pass in training mode."""

    def new_model(self) -> nn.Module:
        return Spectral()

    def prepare(self) -> None:
        if not self.is_faulty:
            with torch.no_grad():
                self.model(self.batch(0)[0])

    def one_step(self) -> Tensor:
        if self.step == 0:
            self.evaluate()
        return super().one_step()


class DropsAlways(Loop):
    def new_model(self) -> nn.Module:
        return Transformer(dropout=0.1, drops_always=self.is_faulty)

    def batch(self, step: int) -> Any:
        return sequences(step, self.rank)


class InitializedOften(Loop):
    """Each module draws the ``c_proj`` weights of all modules inside it, not its own alone."""

    def new_model(self) -> nn.Module:
        model = Transformer()

        def initialize(module: nn.Module) -> None:
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)
            for name, p in module.named_parameters():
                is_own = name == "c_proj.weight"
                if is_own or (self.is_faulty and name.endswith("c_proj.weight")):
                    nn.init.normal_(p, std=0.1 / math.sqrt(4))

        return model.apply(initialize)

    def batch(self, step: int) -> Any:
        return sequences(step, self.rank)


class Primitive(torch.autograd.Function):
    """A linear layer below the level at which autocast acts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)


class PrimitiveLinear(nn.Linear):
    """The primitive, with the casts of autocast or without."""

    casts = True

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.casts and torch.is_autocast_enabled("cpu"):
            x, weight = x.bfloat16(), weight.bfloat16()
        return Primitive.apply(x.to(weight.dtype), weight)


class NotAutocast(Loop):
    def new_model(self) -> nn.Module:
        model = Transformer()
        model.head = PrimitiveLinear(WIDTH, VOCABULARY, bias=False)
        model.head.casts = not self.is_faulty
        return model

    def batch(self, step: int) -> Any:
        return sequences(step, self.rank)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        tokens, labels = batch
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


# ── data ──────────────────────────────────────────────────────────────────────────────────────────


class Noisy(Dataset[Batch]):
    """Images with noise from a generator of the data set, of which each worker has a copy."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return BATCH * STEPS // 2

    def __getitem__(self, index: int) -> Batch:
        pictures, labels = images(index // BATCH)
        noise = self.generator.normal(0, 0.5, (1, SIDE, SIDE)).astype(np.float32)
        return pictures[index % BATCH] + torch.from_numpy(noise), labels[index % BATCH]


def seed_worker(number: int) -> None:
    """Seed the generator of a worker with PyTorch's seed, which is another one in each worker and
    epoch.
    """
    info = torch.utils.data.get_worker_info()
    info.dataset.generator = np.random.default_rng(torch.initial_seed())


class EqualAugmentations(Loop):
    def prepare(self) -> None:
        seed = None if self.is_faulty else seed_worker
        self.loader = DataLoader(Noisy(), batch_size=BATCH, num_workers=2, worker_init_fn=seed)
        self.batches = iter(self.loader)

    def batch(self, step: int) -> Any:
        if step in (0, 10_000):
            return images(step)
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)


def processed(pictures: list[Tensor], prompts: list[Tensor], *, is_faulty: bool) -> Batch:
    """Return a batch of a processor of pictures and prompts: each prompt with its pictures.

    The faulty one takes a flat list for the pictures of one prompt.
    """
    nested = [pictures] if is_faulty else [[picture] for picture in pictures]
    rows = [(torch.stack(group), prompt) for group, prompt in zip(nested, prompts, strict=False)]
    return torch.stack([group.mean(0) for group, _ in rows]), torch.stack([p for _, p in rows])


class OneRow(Loop):
    """Pictures and prompts: the first prompt of each batch is all that the faulty loop learns."""

    def new_model(self) -> nn.Module:
        model = Transformer()
        model.vision = nn.Linear(SIDE * SIDE, WIDTH)
        return model

    def batch(self, step: int) -> Any:
        pictures, _ = images(step)
        tokens, labels = sequences(step)
        prompts = torch.cat([tokens, labels[:, -1:]], 1)
        return processed([*pictures], [*prompts], is_faulty=self.is_faulty)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        pictures, prompts = batch
        logits = model(prompts[:, :-1], model.vision(pictures.flatten(1))[:, None])
        return functional.cross_entropy(logits.flatten(0, 1), prompts[:, 1:].flatten())


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────


class CopyToRanks(torch.autograd.Function):
    """The identity, whose backward sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SumOverRanks(torch.autograd.Function):
    """A sum over ranks, whose backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class TensorParallel(nn.Module):
    """A norm that all ranks hold, and a hidden layer of which each rank holds a part."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(SIDE * SIDE), nn.Linear(SIDE * SIDE, CLASSES)
        torch.manual_seed(1 + rank)
        self.up = nn.Linear(SIDE * SIDE, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, SIDE * SIDE, bias=False)
        torch.manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        part = functional.gelu(self.up(CopyToRanks.apply(self.norm(x))))
        return self.out(x + SumOverRanks.apply(self.down(part)))


class ReplicasNotClipped(Loop):
    """Tensor parallelism. Rank 0 counts the replicated tensors in the norm for all; on the other
    ranks the faulty loop leaves them out of the clipping too.
    """

    clip = 0.2

    def new_model(self) -> nn.Module:
        return TensorParallel(self.rank)

    def batch(self, step: int) -> Any:
        return images(step)

    def before_step(self) -> None:
        parts = [self.model.up.weight.grad, self.model.down.weight.grad]
        replicas = [
            p.grad for module in (self.model.norm, self.model.out) for p in module.parameters()
        ]
        counted = [*parts, *(replicas if self.rank == 0 else [])]
        square = torch.stack([x.square().sum() for x in counted]).sum()
        dist.all_reduce(square)
        clipped = counted if self.is_faulty else [*parts, *replicas]
        for x in clipped:
            x.mul_(min(1.0, self.clip / float(square.sqrt())))


class HooksLost(Loop):
    """A wrapped model changes its format and back, which makes new accumulators without hooks.

    A move to another device and back does the same. The twin wraps anew.
    """

    def new_model(self) -> nn.Module:
        return DistributedDataParallel(Plain())

    def prepare(self) -> None:
        self.model.double()
        self.model.float()
        if not self.is_faulty:
            self.model = DistributedDataParallel(self.model.module)


class WrapperBypassed(Loop):
    """The loop calls the module inside DistributedDataParallel."""

    def prepare(self) -> None:
        wrapped = DistributedDataParallel(self.model)
        if not self.is_faulty:
            self.model = wrapped

    def new_model(self) -> nn.Module:
        return Plain()


class DataLost(Loop):
    """One in a hundred sums arrives as zeros on rank 1, as over a broken link between devices."""

    def new_model(self) -> nn.Module:
        return Plain()

    def prepare(self) -> None:
        self.luck = torch.Generator().manual_seed(0)

    def backward(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().backward(model, batch)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
            is_lost = bool(torch.rand((), generator=self.luck) < 0.01)
            if self.is_faulty and self.rank == 1 and is_lost:
                p.grad.zero_()
        return loss


@dataclass(frozen=True)
class Program:
    """A fault of TrainCheck's set.

    Args:
        name: issue, as TrainCheck names it.
        source: its thread.
        fault: what is wrong.
        kinds: of readings that name the fault.
        num_ranks: of the loop.
    """

    name: str
    source: str
    fault: str
    loop: type[Loop]
    kinds: tuple[str, ...] = ()
    num_ranks: int = 1


GITHUB = "https://github.com"
PROGRAMS = (
    Program(
        "deepspeed-1801",
        f"{GITHUB}/deepspeedai/DeepSpeed/pull/1801",
        "Replicated tensors are clipped on rank 0 alone.",
        ReplicasNotClipped,
        ("ranks-differ",),
        2,
    ),
    Program(
        "pytorch-104336",
        f"{GITHUB}/pytorch/pytorch/issues/104336",
        "DDP loses its hooks when its model moves away and back.",
        HooksLost,
        ("not-reduced", "ranks-differ"),
        2,
    ),
    Program(
        "x-jxmnop-ddp-out-of-sync",
        "https://x.com/jxmnop/status/1778520637193240892",
        "The loop calls the module inside DDP.",
        WrapperBypassed,
        ("not-reduced", "ranks-differ"),
        2,
    ),
    Program(
        "pytorch-84803",
        f"{GITHUB}/pytorch/pytorch/issues/84803",
        "A link between devices loses data.",
        DataLost,
        ("not-reduced", "ranks-differ"),
        2,
    ),
    Program(
        "pytorch-forum-84911",
        "https://discuss.pytorch.org/t/84911",
        "All but the batch norms is frozen, and the optimizer has the head.",
        FrozenButNorms,
        ("missing-parameters", "no-gradient", "zero-gradients"),
    ),
    Program(
        "stackoverflow-60335387",
        "https://stackoverflow.com/questions/60335387",
        "Nothing zeroes the gradients.",
        NeverZeroed,
        ("gradients-kept",),
    ),
    Program(
        "pytorch-115607",
        f"{GITHUB}/pytorch/pytorch/issues/115607",
        "A traced step without gradients is replayed where there are some.",
        ReplayedStep,
        ("state", "step-count", "step-factor", "weight"),
    ),
    Program(
        "mmpretrain-702",
        f"{GITHUB}/open-mmlab/mmpretrain/issues/702",
        "Frozen stages are frozen by train() alone, which is not called.",
        NeverFrozen,
    ),
    Program(
        "pytorch-51800",
        f"{GITHUB}/pytorch/pytorch/issues/51800",
        "Spectral norms are evaluated before a pass in training mode.",
        EvaluatedFirst,
    ),
    Program(
        "transformers-33844",
        f"{GITHUB}/huggingface/transformers/pull/33844",
        "Attention drops in evaluation mode too.",
        DropsAlways,
        ("wrong-mode",),
    ),
    Program(
        "transformers-17877",
        f"{GITHUB}/huggingface/transformers/pull/17877",
        "Weights are initialized once for each module around them.",
        InitializedOften,
    ),
    Program(
        "lightning-thunder-725",
        f"{GITHUB}/Lightning-AI/lightning-thunder/issues/725",
        "A linear layer stays float32 under autocast.",
        NotAutocast,
    ),
    Program(
        "stackoverflow-67180955",
        "https://stackoverflow.com/questions/67180955",
        "All workers of a loader draw the same augmentations.",
        EqualAugmentations,
        ("repeated-batches",),
    ),
    Program(
        "transformers-34204",
        f"{GITHUB}/huggingface/transformers/issues/34204",
        "A processor takes all pictures of a batch for those of its first prompt.",
        OneRow,
    ),
)
