"""Lion in the format of its parameters: torch has none."""

from typing import Any

import torch


class Lion64(torch.optim.Optimizer):
    """Lion as its paper's algorithm 2 writes it (arXiv 2302.06675)."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].get("momentum", torch.zeros_like(p))
                direction = torch.sign(beta1 * momentum + (1 - beta1) * p.grad)
                p.data -= group["lr"] * (direction + group["weight_decay"] * p.data)
                self.state[p]["momentum"] = beta2 * momentum + (1 - beta2) * p.grad
