"""A small language model and a plain training loop, with a place for a fault after each of its
lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.analysis.reading import Reading
from narrowgauge.gauges.recording.watch import Watch

VOCABULARY = 48
WIDTH = 32
LENGTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def batches() -> Iterable[Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)


class Loop:
    """A training loop. Its methods are the places for a fault: replace one, or wrap it.

    Args:
        watch: options of the watcher; ``None`` for no watcher.
    """

    def __init__(
        self,
        *,
        clip: float = 0.0,
        dtype: torch.dtype = torch.float32,
        optimizer: Callable[..., Any] = torch.optim.AdamW,
        watch: dict[str, Any] | None = MappingProxyType({}),  # type: ignore[assignment]
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = Model().to(dtype)
        self.optimizer = optimizer(
            self.model.parameters(), **({"lr": 1e-3, "weight_decay": 0.1} | settings)
        )
        self.clip, self.data = clip, iter(batches())
        self.readings: list[Reading] = []
        if watch is not None:
            self.begin_watch(**watch)

    def begin_watch(self, **options: Any) -> None:
        self.watcher = Watch(self.model, self.optimizer, **options)
        self.watcher._log = self.readings.append  # type: ignore[method-assign]
        self.watcher._say = lambda readings: None  # type: ignore[method-assign]

    def loss(self) -> Tensor:
        tokens = next(self.data)
        return F.cross_entropy(
            self.model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()
        )

    def after_backward(self) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)

    def update(self) -> None:
        self.optimizer.step()

    def after_update(self) -> None:
        self.optimizer.zero_grad()

    def run(self, steps: int = 4) -> Loop:
        for _ in range(steps):
            self.loss().backward()
            self.after_backward()
            self.update()
            self.after_update()
        return self

    def numbers(self) -> dict[str, float]:
        """Return the first value of each kind of reading."""
        return {reading.what: reading.value for reading in reversed(self.readings)}
