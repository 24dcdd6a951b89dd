"""A small language model and a plain training loop, with a place for a fault after each of its lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.recompute.departures import findings_of
from narrowgauge.recompute.piece_results import PieceResult
from narrowgauge.recompute.step_watcher import StepWatcher
from narrowgauge.recompute.task import Task
from narrowgauge.runs.finding import Finding

VOCABULARY, WIDTH, LENGTH = 48, 32, 24


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.is_causal = True

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, 2, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.dropout(self.out(heads.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def batches(seed: int = 1) -> Iterable[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Loop:
    """A training loop. Its methods are the places for a fault: replace one, or wrap it.

    Args:
        every: steps between audited ones; 0 for no audit.
    """

    def __init__(
        self,
        *,
        every: int = 2,
        micro_batches: int = 2,
        clip: float = 0.0,
        dropout: float = 0.0,
        autocast: bool = False,
        dtype: torch.dtype = torch.float32,
        optimizer: Callable[..., Any] = torch.optim.AdamW,
        task: Task | None = None,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = Model(dropout).to(dtype)
        settings = {"lr": 1e-3, "weight_decay": 0.1} | settings
        self.optimizer = optimizer(self.model.parameters(), **settings)
        self.micro_batches, self.clip, self.autocast = micro_batches, clip, autocast
        self.results: dict[int, list[PieceResult]] = {}
        told = {"task": task, "is_told_losses": True}
        self.watcher = StepWatcher(self.model, self.optimizer, every, self.keep, **told) if every else None
        self.data = iter(batches())
        self.step = 0

    def keep(self, step: int, results: list[PieceResult]) -> None:
        self.results.setdefault(step, []).extend(results)

    def loss(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return next_token(self.model(tokens[:, :-1]), tokens) / self.micro_batches

    def backward(self, tokens: Tensor, number: int) -> None:
        self.loss(tokens).backward()

    def after_backward(self) -> None:
        pass

    def clip_gradients(self) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)

    def update(self) -> None:
        self.optimizer.step()

    def after_update(self) -> None:
        self.optimizer.zero_grad()

    def run(self, steps: int = 4) -> Loop:
        for _ in range(steps):
            self.step += 1
            for number in range(self.micro_batches):
                self.backward(next(self.data), number)
            self.after_backward()
            self.clip_gradients()
            self.update()
            self.after_update()
        return self

    # ── what the audit said ─────────────────────────────────────────────────────────────────────────────────────────

    def findings(self) -> list[Finding]:
        return [each for results in self.results.values() for each in findings_of(results)]

    def names(self) -> set[str]:
        return {each.name for each in self.findings()}

    def bits(self) -> Tensor:
        return torch.cat([p.detach().float().flatten() for p in self.model.parameters()])
