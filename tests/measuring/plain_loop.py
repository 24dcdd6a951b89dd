"""A small language model and a plain training loop, with places for a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.measuring.reading import Reading

VOCABULARY = 48
WIDTH = 32
LENGTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def nothing(loop: Loop) -> None: ...


class Loop:
    """A training loop.

    Args:
        prepare: called before the watch is made, and may change the model and the optimizer.
        after: called after each update.
        options: of the watch.

    Attributes:
        number: of the step, from 1.
        readings: what the watch read, notes among it.
    """

    def __init__(
        self,
        prepare: Callable[[Loop], object] = nothing,
        after: Callable[[Loop], object] = nothing,
        *,
        kind: Callable[..., Any] = torch.optim.AdamW,
        dtype: torch.dtype = torch.float32,
        lr: float = 1e-3,
        is_watched: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        blocks = [Block() for _ in range(2)]
        embedding = nn.Embedding(VOCABULARY, WIDTH)
        head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.model = nn.Sequential(embedding, *blocks, nn.LayerNorm(WIDTH), head).to(dtype)
        self.make = lambda: kind((p for p in self.model.parameters() if p.requires_grad), lr=lr)
        self.optimizer = self.make()
        self.after = after
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.draw = torch.Generator().manual_seed(1)
        self.number = 0
        prepare(self)
        self.readings: list[Reading] = []
        self.watcher: Any = None
        if is_watched:
            self.watcher = ng.watch(self.model, self.optimizer, **options)
            read = self.watcher.laws.read

            def noted(step: Any) -> list[Reading]:
                readings: list[Reading] = read(step)
                self.readings += readings
                return readings

            self.watcher.laws.read = noted

    def step(self, scale: float = 1.0) -> None:
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=self.draw)
        logits = self.model(tokens[:, :-1]).float()
        loss = scale * F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.after(self)
        if self.watcher is not None:
            told = {"loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else {}
            self.watcher.step(loss.detach(), **told)

    def run(self, steps: int = 8) -> Loop:
        for self.number in range(1, steps + 1):
            self.step()
        return self
