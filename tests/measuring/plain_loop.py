"""A small language model and a plain training loop, with a place for a fault after each of its lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)


class Loop:
    """A training loop. Its methods are the places for a fault: replace one, or wrap it.

    Attributes:
        readings: what the watch read anew, notes among it.
    """

    dtype = torch.float32
    optimizer_class: Callable[..., Any] = torch.optim.AdamW
    clip: float | None = None
    lr = 1e-3
    told_clip: float | None = None

    def __init__(self, *, is_watched: bool = True) -> None:
        torch.manual_seed(0)
        self.model = Model().to(self.dtype)
        self.optimizer = self.make_optimizer()
        self.data = batches()
        self.number = 0
        self.prepare()
        self.readings: list[Reading] = []
        self.watcher: Any = None
        if is_watched:
            self.watcher = ng.watch(
                self.model, self.optimizer, max_grad_norm=self.told_clip or self.clip
            )
            read = self.watcher.laws.read

            def noted(step: Any) -> list[Reading]:
                readings: list[Reading] = read(step)
                self.readings += readings
                return readings

            self.watcher.laws.read = noted

    def make_optimizer(self) -> Any:
        return type(self).optimizer_class(self.model.parameters(), lr=self.lr)

    def prepare(self) -> None: ...

    def loss(self) -> Tensor:
        tokens = next(self.data)
        logits = self.model(tokens[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def after_backward(self) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)

    def update(self) -> None:
        self.optimizer.step()

    def after_update(self) -> None:
        self.optimizer.zero_grad()

    def run(self, steps: int = 8) -> Loop:
        for self.number in range(1, steps + 1):
            loss = self.loss()
            self.backward(loss)
            self.after_backward()
            self.update()
            self.after_update()
            if self.watcher is not None:
                self.watcher.step(loss.detach())
        return self
