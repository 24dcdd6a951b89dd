"""A tiny training loop in plain PyTorch, with an update rule by hand. A row of the corpus changes a line or a stage of it.

A two-layer transformer with rotary attention learns a synthetic sequence. Rows add lines where a comment stands alone.
"""

# fmt: off
from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, LENGTH, BATCH, IGNORED, PADDING = 64, 32, 16, 8, -100, 0

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


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of features by the angle of its position."""
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and with a residual."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm, self.mlp_norm = Norm(), Norm()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.query_key_norm: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k = (rotate(self.query_key_norm(split_heads(y)), angles) for y in (self.query(normed), self.key(normed)))
        heads = self.attend(q, k, split_heads(self.value(normed)), mask)
        x = x + functional.dropout(self.output(heads.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + self.mlp(self.mlp_norm(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    """The transformer."""

    def __init__(self, dropout: float, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.frequencies = 1e4 ** (-torch.arange(8) / 8)
        self.config = SimpleNamespace(pad_token_id=PADDING)
        if is_tied:
            self.head.weight = self.embedding.weight
            nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        angles = torch.arange(tokens.shape[1])[:, None] * self.frequencies
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles, mask)
        return self.head(self.norm(x))


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
    seed: int = 0
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    loss_scale: float = 0.0
    growth_interval: int = 20
    dropout: float = 0.0
    smoothing: float = 0.0
    is_tied: bool = False
    has_query_key_norm: bool = False
    has_adapters: bool = False
    frozen: tuple[str, ...] = ()
    is_padded: bool = False
    has_prompts: bool = False
    is_packed: bool = False
    has_average: bool = False
    evaluates: bool = False
    resumes: bool = False


class Loop:
    """A training loop. Each method is a place for a fault."""

    def __init__(self, settings: Settings, steps: int = 3) -> None:
        self.settings, self.steps, self.step, self.losses = settings, steps, 0, []
        self.resume_step, self.evaluate_every = steps // 2 + 1, max(1, steps // 3)
        torch.manual_seed(settings.seed)
        self.model = Model(settings.dropout, settings.is_tied).to(settings.dtype)
        if settings.has_query_key_norm:
            for block in self.model.blocks:
                block.query_key_norm = lambda x: functional.rms_norm(x.float(), x.shape[-1:], eps=1e-6).to(x.dtype)
                nn.init.normal_(block.query.weight, std=1e-5)
        if settings.has_adapters:
            self.model.requires_grad_(False)
            for block in self.model.blocks:
                block.query, block.value = Adapter(block.query), Adapter(block.value)
        for name in settings.frozen:
            self.model.get_submodule(name).requires_grad_(False)
        self.optimizer: Any = settings.optimizer(self.groups())
        self.others: list[torch.optim.Optimizer] = []
        self.average = copy.deepcopy(self.model) if settings.has_average else None
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
        tokens = torch.randint(1, VOCABULARY // 4, (BATCH, LENGTH), generator=generator).cumsum(1) % VOCABULARY
        if self.settings.is_padded:
            tokens = tokens.clamp_min(1)
            for row in range(BATCH):
                tokens[row, 4 + row % 12 :] = PADDING
        return tokens

    def split(self, tokens: Tensor) -> list[Tensor]:
        return list(tokens.chunk(self.settings.micro_batches))

    def labels(self, tokens: Tensor) -> Tensor:
        """Return the targets, not yet shifted."""
        labels = tokens.clone()
        if self.settings.is_padded:
            labels[tokens == PADDING] = IGNORED
        if self.settings.has_prompts:
            labels[:, : labels.shape[1] // 2] = IGNORED
        if self.settings.is_packed:
            labels[:, labels.shape[1] // 2] = IGNORED  # nothing predicts the first token of the second document
        return labels

    def mask(self, length: int) -> Tensor:
        """Return which positions each position attends to. A packed row holds two documents."""
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if self.settings.is_packed:
            mask[length // 2 :, : length // 2] = False
        return mask

    def logits(self, tokens: Tensor) -> Tensor:
        dtype = self.settings.autocast
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            return self.model(tokens, self.mask(tokens.shape[1]))

    def count(self, labels: Tensor) -> int:
        return int((labels[:, 1:] != IGNORED).sum())

    def summed(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the cross entropies of the next tokens."""
        # at loss
        return functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum",
            label_smoothing=self.settings.smoothing,
        )  # fmt: skip

    def loss(self, logits: Tensor, labels: Tensor, total: int) -> Tensor:
        """Return this micro-batch's part of the mean over the step's ``total`` tokens."""
        return self.summed(logits, labels) / total

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
        nn.utils.clip_grads_with_norm_(self.trained(), self.settings.clip or math.inf, norm)
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

    def update_average(self) -> None:
        for mean, p in self.averages():
            mean.lerp_(p, 0.05)

    def averages(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.average.parameters(), self.model.parameters(), strict=True) if self.average else iter(())

    def resume(self) -> None:
        """Continue from a checkpoint that holds everything."""
        self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        for p, state in self.optimizer.state.items():
            self.optimizer.state[p] = copy.deepcopy(state)
        # at resume

    def before_evaluation(self) -> None:
        self.model.eval()
        # before evaluation

    def evaluate(self) -> float:
        """Return the mean loss per held-out token."""
        tokens = [self.read(10_000 + place) for place in range(2)]
        total = sum(self.summed(self.logits(t), self.labels(t)) for t in tokens)
        return float(total) / sum(self.count(self.labels(t)) for t in tokens)

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
            self.losses.append(float(self.one_step()))
            if self.settings.evaluates and self.step % self.evaluate_every == 0:
                self.before_evaluation()
                with torch.no_grad():
                    self.evaluate()
                self.after_evaluation()
        return self.losses

    def one_step(self) -> Tensor:
        self.schedule(self.step)
        parts = self.split(self.read(self.step))
        labels = [self.labels(part) for part in parts]
        total = sum(self.count(part) for part in labels)
        losses = []
        for number, part in enumerate(parts):
            loss = self.loss(self.logits(part), labels[number], total)
            self.backward(loss, number)
            losses.append(loss.detach())
        self.before_clip()
        self.clip()
        self.update()
        self.zero()
        with torch.no_grad():
            self.update_average()
        return torch.stack(losses).sum()
