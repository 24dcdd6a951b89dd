"""Trained weights that end a loop as they began, to the bit.

A parameter that requires a gradient and stands in a group with a learning rate moves, if only by its decay. Where it does not,
its gradient never arrived: it was detached, computed without gradients, or belongs to a copy. No loss need show that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgauge.numerics.checksums import fingerprint
from narrowgauge.numerics.shards import is_sharded

LEAST_STEPS = 10
"""Steps after which a weight counts as standing still: gradients may be zero in the first, as of low-rank adapters."""


class StillWeights:
    """Follows which trained weights of a model have not moved.

    Weights of 16 bits are left out, whose steps may be rounded away, and parameters that are sharded.

    Args:
        model: whose parameters are trained.
        optimizer: that steps them.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> still = StillWeights(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> _ = model.weight.data.add_(1.0)
        >>> still.names()
        ['bias']
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad and _tells(p)}
        rates = {id(p): float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups for p in g["params"]}
        stepped = {name: p for name, p in trained.items() if rates.get(id(p), 0.0) > 0}
        # An optimizer that has none of them has those of another model.
        self._began = {name: fingerprint(p.detach()) for name, p in (stepped or trained).items()}
        self._all = trained

    def names(self) -> list[str]:
        """The weights that are as they were; none where those that are trained now are others, or were replaced."""
        now = dict(self._model.named_parameters())
        return [
            name
            for name, began in self._began.items()
            if (p := now.get(name)) is self._all[name] and p.requires_grad and fingerprint(p.detach()) == began
        ]


def _tells(parameter: Tensor) -> bool:
    return not is_sharded(parameter) and parameter.numel() > 0 and torch.finfo(parameter.dtype).bits >= 32
