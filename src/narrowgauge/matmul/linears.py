"""A handle on a model's narrow layers: what changes with the step is told to all of them together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowgauge.matmul import rng
from narrowgauge.matmul.delayed_scaling import count_overflows
from narrowgauge.matmul.grouped import GroupedLinear
from narrowgauge.matmul.linear import SIBLINGS, Linear
from narrowgauge.spec.computes import Compute

Layer = Linear | GroupedLinear


class Linears:
    """The narrow layers of a model, told together what changes with the step.

    The step seeds stochastic casts and places delayed scales. It goes on with every step of any optimizer, or of the one
    that :meth:`follow` names (``prepare`` does); a loop that resumes sets it.

    Attributes:
        layers: the layers by name.
        seed: of the stochastic casts.
    """

    def __init__(self, layers: Mapping[str, Layer], seed: int) -> None:
        self.layers, self.seed = dict(layers), seed
        self._hook: Any = None
        self.step = self.step

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return next(iter(self.layers.values())).step

    @step.setter
    def step(self, step: int) -> None:
        for layer in self.layers.values():
            layer.set_step(step, self.seed)

    def set_first_sequence(self, index: int) -> None:
        """Say which sequence of the whole batch the next micro-batch begins with: its random bits are then the batch's."""
        for layer in self.layers.values():
            layer.state[rng.FIRST_SEQUENCE] = index

    def set_compute(self, choose: Callable[[str], Compute]) -> None:
        """Go on in other rows: ``choose`` gets each layer's name."""
        for name, layer in self.layers.items():
            layer.set_compute(choose(name))
        self.share_histories()

    def share_histories(self) -> None:
        """Siblings scale their common input alike: by the first one's history."""
        plain = {name: layer for name, layer in self.layers.items() if isinstance(layer, Linear)}
        for name, layer in plain.items():
            parent, _, own = name.rpartition(".")
            for first, *others in SIBLINGS:
                elder = plain.get(f"{parent}.{first}" if parent else first)
                if own in others and elder is not None and None not in (elder.amax_history, layer.amax_history):
                    layer.elder = (elder,)

    def follow_any(self) -> None:
        """Count the steps of whatever optimizer steps, until :meth:`follow` names one."""
        _LOOSE.update(self.layers.values())

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of this optimizer alone."""
        if self._hook is not None:
            self._hook.remove()

        _LOOSE.difference_update(self.layers.values())

        def advance(*_: Any) -> None:
            self.step += 1

        self._hook = optimizer.register_step_post_hook(advance)

    def overflows(self, step: int | None = None) -> dict[str, list[int]]:
        """Values beyond a delayed scale, of input, weight and gradient: in one step, or in all that the histories hold."""
        return {name: count_overflows(history, step).tolist() for name, history in self.histories().items()}

    def histories(self) -> dict[str, Tensor]:
        """The layers' delayed scales, which a checkpoint must hold to go on with the same bits."""
        return {name: layer.amax_history for name, layer in self.layers.items() if layer.amax_history is not None}

    def load_histories(self, histories: dict[str, Tensor]) -> None:
        """Take back what :meth:`histories` gave."""
        for name, history in self.histories().items():
            if name in histories:
                history.copy_(histories[name])


# Layers whose steps are those of whatever optimizer steps.
_LOOSE: weakref.WeakSet[Layer] = weakref.WeakSet()


def _advance(*_: Any) -> None:
    for layer in list(_LOOSE):
        layer.set_step(layer.step + 1, layer.seed)


register_optimizer_step_post_hook(_advance)
