"""Run the plain loss of a set-up in one process: of the whole batch, and of each micro-batch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.checks.passes import Gradients, Pass, Passes, concatenated
from narrowgauge.checks.shadow import Shadow

MOST_TERMS = 16
"""Fit the weight of each micro-batch in a gradient up to this number of micro-batches of all ranks.
"""


class PlainLoss:
    """The loss of batches without the loop's own passes.

    Args:
        alone: makes the passes of one process.

    Attributes:
        whole: the micro-batches as one batch.
        times: how many times a mean the loss is; gradients are divided by it.
    """

    def __init__(self, alone: Passes) -> None:
        self.alone = alone
        self.whole = concatenated(alone.parts)
        self.times = 1
        self._terms: list[Gradients] | None = None

    def run(self, batch: Any, seed: int | None = None) -> Pass:
        """Return a plain pass of a batch, perhaps with other draws."""

        def call() -> Tensor:
            if seed is not None:
                torch.manual_seed(seed)
                random.seed(seed)
            return self.alone.plain(batch)()

        return self.divided(self.alone.run(call, Shadow()))

    def divided(self, plain: Pass) -> Pass:
        """Return a pass of the loss divided by ``times``."""
        if self.times == 1:
            return plain
        gradients = {name: g / self.times for name, g in plain.gradients.items()}
        shadows = {name: g / self.times for name, g in plain.shadows.items()}
        return plain._replace(gradients=gradients, shadows=shadows)

    def repeats(self, plain: Pass, seed: int | None = None) -> bool:
        """Return whether another plain pass, perhaps with other draws, gives the same gradients."""
        again = self.run(self.whole, seed)
        return all(torch.equal(x, again.gradients[n]) for n, x in plain.gradients.items())

    def terms(self, exact: Mapping[str, Tensor]) -> list[Gradients]:
        """Return the plain gradients of each micro-batch, if there are several and not too many."""
        if self._terms is None:
            self._terms = []
            for part in self.alone.parts if 1 < len(self.alone.parts) <= MOST_TERMS else []:
                term = self.run(part)
                gradients = {}
                for name, r in exact.items():
                    g = term.gradients.get(name, torch.zeros_like(r))
                    gradients[name] = term.shadows.get(name, g)
                self._terms.append(gradients)
        return self._terms
