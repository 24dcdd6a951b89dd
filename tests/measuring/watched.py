"""The loop of the corpus beside a watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import narrowgauge as ng
from corpus.loop import Groups, Loop, Settings


class Watched(Loop):
    """A loop with one micro-batch, a constant rate, and no clip.

    Args:
        prepare: called before the watch is made, and may change the model and the loop.
        options: of the watch.

    Attributes:
        factor: of the loss.
    """

    def __init__(
        self,
        prepare: Callable[[Watched], object] = lambda loop: None,
        *,
        kind: Callable[..., Any] = torch.optim.AdamW,
        dtype: torch.dtype = torch.float32,
        lr: float = 1e-3,
        **options: Any,
    ) -> None:
        settings = Settings(
            kind, lr=lr, dtype=dtype, rate_factor=lambda step: 1.0, micro_batches=1, clip=0.0
        )
        super().__init__(settings, steps=0)
        self.factor = 1.0
        prepare(self)
        self.watcher = ng.watch(self.model, self.optimizer, **options)
        self.after_step = self.watcher.step

    def groups(self) -> Groups:
        return [{"params": [*self.model.parameters()], "lr": self.settings.lr}]

    def loss(self, *args: Any) -> Tensor:
        return self.factor * super().loss(*args)

    def train(self, steps: int = 8) -> Watched:
        self.steps += steps
        self.run()
        return self
