"""The loop of the corpus beside a watch, with places for a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import narrowgauge as ng
from corpus.loop import Loop, Settings
from narrowgauge.measuring.reading import Reading


def nothing(loop: Watched) -> None: ...


class Watched(Loop):
    """A loop with one micro-batch, a constant rate, and no clip.

    Args:
        prepare: called before the watch is made, and may change the model and the optimizer.
        after: called after each step.
        options: of the watch.

    Attributes:
        factor: of the loss.
        readings: what the watch read, notes among it.
    """

    def __init__(
        self,
        prepare: Callable[[Watched], object] = nothing,
        after: Callable[[Watched], object] = nothing,
        *,
        kind: Callable[..., Any] = torch.optim.AdamW,
        dtype: torch.dtype = torch.float32,
        lr: float = 1e-3,
        is_watched: bool = True,
        **options: Any,
    ) -> None:
        self.make = lambda: kind([p for p in self.model.parameters() if p.requires_grad], lr=lr)
        super().__init__(
            Settings(lambda groups: self.make(), dtype=dtype, micro_batches=1), steps=0
        )
        self.after = after
        self.factor = 1.0
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

    def schedule(self, step: int) -> None: ...

    def clip(self) -> Any: ...

    def loss(self, *args: Any) -> Tensor:
        return self.factor * super().loss(*args)

    def one_step(self) -> Tensor:
        loss = super().one_step()
        self.after(self)
        if self.watcher is not None:
            told = {} if self.scaler is None else {"loss_scale": self.scaler.get_scale()}
            self.watcher.step(loss, **told)
        return loss

    def train(self, steps: int = 8) -> Watched:
        self.steps += steps
        self.run()
        return self
