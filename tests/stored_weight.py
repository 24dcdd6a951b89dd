"""One weight under our AdamW, with the interface of the oracles that it is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

import narrowgauge as ng


class StoredWeight:
    """A weight in one of our storages, without decay, audit or compilation."""

    def __init__(self, storage: str, start: Tensor, lr: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.storage, self.lr = storage, lr
        self.parameter = torch.nn.Parameter(start.to(torch.bfloat16, copy=True))
        self.optimizer = ng.AdamW(
            [self.parameter], lr=lr, betas=betas, weight_decay=0.0, storage=storage, audit_every=0, compile=False
        )

    @property
    def weight(self) -> Tensor:
        """The weight that is kept, float32."""
        return self.optimizer.stored(self.parameter)

    @property
    def exp_avg(self) -> Tensor:
        """The first moment that is kept, float32."""
        return self.optimizer.stored(self.parameter, "exp_avg")

    @property
    def exp_avg_sq(self) -> Tensor:
        """The second moment that is kept, float32."""
        return self.optimizer.stored(self.parameter, "exp_avg_sq")

    def step(self, gradient: Tensor) -> None:
        """Take one step."""
        self.parameter.grad = gradient.clone()
        self.optimizer.step()
