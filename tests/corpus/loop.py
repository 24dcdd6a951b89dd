"""A small language model, its loss, and a training loop in plain PyTorch: the text that the rows of the corpus edit.

The loop trains on a synthetic sequence. The last lines are a single step, without attention. Rows add lines where a comment
stands alone.
"""

# fmt: off
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LENGTH, BATCH, PADDING = 32, 16, 16, 8, 0
IGNORED = -100

Group = dict[str, Any]
Groups = list[Group]
BETAS = (0.9, 0.95)


class AdamW(torch.optim.AdamW):
    """AdamW. States are float32; bfloat16 and float16 weights have float32 masters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p: Tensor, group: Group) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            zeros = torch.zeros_like(p, dtype=torch.float32)
            state.update(step=torch.tensor(0.0), exp_avg=zeros, exp_avg_sq=zeros.clone())
            if p.dtype != torch.float32:
                state["master"] = p.detach().float()
        weight, gradient = state.get("master", p), p.grad.float()
        state["step"] += 1
        number = int(state["step"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first, second = state["exp_avg"] / (1 - beta1**number), state["exp_avg_sq"] / (1 - beta2**number)
        weight.sub_(group["lr"] * first / (second.sqrt() + group["eps"]))
        if weight is not p:
            p.copy_(weight)


torch_adamw: Callable[[Groups], torch.optim.Optimizer] = partial(torch.optim.AdamW, betas=BETAS)
adamw: Callable[[Groups], torch.optim.Optimizer] = partial(AdamW, betas=BETAS)
sgd: Callable[[Groups], torch.optim.Optimizer] = partial(torch.optim.SGD, momentum=0.9)
nesterov: Callable[[Groups], torch.optim.Optimizer] = partial(torch.optim.SGD, momentum=0.9, nesterov=True)
# more classes


def straight(x: Tensor, values: Tensor) -> Tensor:
    """Return values with the gradient of ``x``."""
    return x + (values - x).detach()


def float8(x: Tensor, largest: Tensor, dtype=torch.float8_e4m3fn) -> Tensor:
    scale = torch.finfo(dtype).max / largest.clamp_min(1e-12).float()
    return ((x.float() * scale).to(dtype).float() / scale).to(x.dtype)


def cast(x: Tensor) -> Tensor:
    return x  # no cast


class Linear(nn.Linear):
    """A layer that may cast its operands."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(cast(x), cast(self.weight), self.bias)


def attention(x: Tensor, mask: Tensor) -> Tensor:
    """Return what each position attends to. Its features, turned by the angle of the position, are its query and its key."""
    angles = torch.arange(len(mask))[:, None] * 1e4 ** (-torch.arange(8) / 8)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, -1)
    q = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return F.scaled_dot_product_attention(q, q, x, attn_mask=mask)


class Model(nn.Module):
    """An embedding, attention without weights, a projection that is used twice, and a head."""

    attended: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.shared = Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.attended is not None:
            x = x + attention(x, self.attended)
        h = self.shared(self.norm(x))
        x = x + self.shared(F.gelu(h))
        return self.head(self.dropout(x))


def tokens_of(part: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels. Later micro-batches have more ignored labels."""
    generator = torch.Generator().manual_seed(part)
    tokens = torch.randint(0, 32, (4, 17), generator=generator)
    labels = tokens[:, 1:].clone()
    if part:
        labels[:, 3 * part :] = IGNORED
    return tokens[:, :-1], labels


def count(batch) -> Tensor:
    return (batch[1] != IGNORED).sum()


def summed(model, batch) -> Tensor:
    logits = model(batch[0]).float().flatten(0, 1)
    # at loss
    return F.cross_entropy(logits, batch[1].flatten(), ignore_index=IGNORED, reduction="sum")


def loss(model, batch) -> Tensor:
    return summed(model, batch) / count(batch)


def optimizer_of(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank update that can be merged into it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(4, WIDTH, dtype=linear.weight.dtype) / WIDTH**0.5)
        self.lora_b = nn.Parameter(0.05 * torch.randn(WIDTH, 4, dtype=linear.weight.dtype))
        self.is_merged = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if self.is_merged else y + x @ self.lora_a.T @ self.lora_b.T


@dataclass(frozen=True)
class Settings:
    """What the healthy loop does. A fault is compared with the healthy loop of the same settings."""

    optimizer: Callable[[Groups], torch.optim.Optimizer] = torch_adamw
    lr: float = 3e-3
    rate_factor: Callable[[int], float] = lambda step: min(1.0, step / 8)
    micro_batches: int = 4
    clip: float = 0.25
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    loss_scale: float = 0.0
    growth_interval: int = 20
    dropout: float = 0.0
    is_tied: bool = False
    has_adapters: bool = False
    frozen: tuple[str, ...] = ()
    is_padded: bool = False
    is_packed: bool = False
    evaluates: bool = False
    resumes: bool = False


class Loop:
    """A training loop. Each method is a place for a fault."""

    def __init__(self, settings: Settings, steps: int = 3) -> None:
        self.settings, self.steps, self.step, self.losses = settings, steps, 0, []
        self.resume_step, self.evaluate_every = steps // 2 + 1, max(1, steps // 3)
        torch.random.manual_seed(0)
        self.model: Any = Model().to(settings.dtype)
        self.model.dropout.p = settings.dropout
        self.model.attended = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        if settings.is_packed:  # a row holds two documents
            self.model.attended[LENGTH // 2 :, : LENGTH // 2] = False
        if settings.is_tied:
            self.model.head.weight = self.model.embed.weight
            nn.init.normal_(self.model.embed.weight, std=0.1)
        if settings.has_adapters:
            self.model.requires_grad_(False)
            self.model.shared = Adapter(self.model.shared)
        for name in settings.frozen:
            self.model.get_submodule(name).requires_grad_(False)
        self.optimizer: Any = settings.optimizer(self.groups())
        self.others: list[torch.optim.Optimizer] = []
        self.after_step: Callable[[Tensor], object] = lambda loss: None
        self.scaler = self.new_scaler(settings.loss_scale) if settings.loss_scale else None
        # at start

    def new_scaler(self, scale: float) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=self.settings.growth_interval)

    def groups(self) -> Groups:
        """Decay matrices, not vectors."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        matrices, vectors = ([p for p in trained if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
        groups = [(matrices, 0.1), (vectors, 0.0)]
        return [{"params": params, "weight_decay": decay, "lr": self.settings.lr} for params, decay in groups if params]

    def trained(self) -> list[Any]:
        return [p for p in self.model.parameters() if p.grad is not None]

    def schedule(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * self.settings.rate_factor(step)
        # at schedule

    def read(self, place: int) -> Tensor:
        generator = torch.Generator().manual_seed(place)
        tokens = torch.randint(1, VOCABULARY // 4, (BATCH, LENGTH + 1), generator=generator).cumsum(1) % VOCABULARY
        if self.settings.is_padded:
            tokens = tokens.clamp_min(1)
            for row in range(BATCH):
                tokens[row, 4 + row % 12 :] = PADDING
        return tokens

    def labels(self, tokens: Tensor) -> Tensor:
        """Return the targets, not yet shifted."""
        labels = tokens.clone()
        if self.settings.is_padded:
            labels[tokens == PADDING] = IGNORED
        if self.settings.is_packed:
            labels[:, LENGTH // 2] = IGNORED  # nothing predicts the first token of the second document
        # at labels
        return labels

    def batches(self, place: int) -> list[tuple[Tensor, Tensor]]:
        """Return the micro-batches of a step: tokens, and their labels."""
        tokens = self.read(place)
        parts = self.settings.micro_batches
        return [*zip(tokens[:, :-1].chunk(parts), self.labels(tokens)[:, 1:].chunk(parts), strict=True)]

    def logits(self, tokens: Tensor) -> Tensor:
        dtype = self.settings.autocast
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            return self.model(tokens)

    def summed(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return summed(self.logits, batch)

    def loss(self, batch: tuple[Tensor, Tensor], total: Tensor) -> Tensor:
        """Return this micro-batch's part of the mean over the step's ``total`` tokens."""
        return self.summed(batch) / total

    def backward(self, loss: Tensor, number: int) -> None:
        # before backward
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        # after backward

    def before_clip(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        # before clip

    def clip(self) -> Tensor:
        norm = nn.utils.get_total_norm([p.grad for p in self.trained()])
        if self.settings.clip:
            nn.utils.clip_grads_with_norm_(self.trained(), self.settings.clip, norm)
        return norm

    def update(self) -> None:
        # before update
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        # after update

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def resume(self) -> None:
        """Continue from a checkpoint that holds everything."""
        self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        for p, state in self.optimizer.state.items():
            self.optimizer.state[p] = copy.deepcopy(state)
        # at resume

    def before_evaluation(self) -> None:
        self.model.eval()
        # before evaluation

    def after_evaluation(self) -> None:
        self.model.train()
        # after evaluation

    def run(self) -> list[float]:
        """Train, and return the loss of each step."""
        while self.step < self.steps:
            self.step += 1
            if self.settings.resumes and self.step == self.resume_step:
                with torch.no_grad():
                    self.resume()
            loss = self.one_step()
            self.after_step(loss)
            self.losses.append(float(loss))
            if self.settings.evaluates and self.step % self.evaluate_every == 0:
                self.before_evaluation()
                with torch.no_grad():
                    self.summed(self.batches(10_000)[0])
                self.after_evaluation()
        return self.losses

    def one_step(self) -> Tensor:
        self.schedule(self.step)
        loss = self.passes(self.batches(self.step))
        self.before_clip()
        self.clip()
        self.update()
        self.zero()
        return loss

    def passes(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Add the gradients of all micro-batches, and return the loss of the step."""
        total = sum(count(batch) for batch in batches)
        losses = []
        for number, batch in enumerate(batches):
            loss = self.loss(batch, total)
            self.backward(loss, number)
            losses.append(loss.detach())
        return torch.stack(losses).sum()


torch.manual_seed(0)
model = Model()
optimizer = optimizer_of(model)
batch = tokens_of(0)
backward = None
