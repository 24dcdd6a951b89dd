"""A handle on a model's narrow layers: it sets what changes with the step in all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowgauge._torch import plain_name
from narrowgauge.matmul import rng
from narrowgauge.matmul.delayed_scaling import count_overflows, join_histories
from narrowgauge.matmul.grouped import GroupedLinear
from narrowgauge.matmul.linear import Linear
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.slots import first_of_input

Layer = Linear | GroupedLinear


class Linears:
    """The narrow layers of a model, and the step that they are at.

    The step seeds stochastic casts and orders delayed scales. It advances with every step of any optimizer, or only of the one
    given to :meth:`follow` (``prepare`` does that). A training loop that resumes sets it.

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
        """Set the index of the next micro-batch's first sequence in the whole batch, which keys its random bits."""
        for layer in self.layers.values():
            layer.state[rng.FIRST_SEQUENCE] = index

    def set_compute(self, choose: Callable[[str], Compute]) -> None:
        """Continue in other computes: ``choose`` gets each layer's name."""
        for name, layer in self.layers.items():
            layer.set_compute(choose(name))
        self.share_histories()

    def share_histories(self) -> None:
        """Let layers with the same input scale it alike: by the amax history of the first of them."""
        plain = {name: layer for name, layer in self.layers.items() if isinstance(layer, Linear)}
        for name, layer in plain.items():
            owner = plain.get(first_of_input(name), layer)
            if owner is not layer and None not in (owner.amax_history, layer.amax_history):
                layer.scale_owner = (owner,)

    def follow_any(self) -> None:
        """Count the steps of every optimizer, until :meth:`follow` gets one."""
        _FOLLOW_ANY.update(self.layers.values())

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Count only this optimizer's steps."""
        if self._hook is not None:
            self._hook.remove()
        _FOLLOW_ANY.difference_update(self.layers.values())

        def advance(*_: Any) -> None:
            self.step += 1

        self._hook = optimizer.register_step_post_hook(advance)

    def overflows(self, step: int | None = None) -> dict[str, list[int]]:
        """How many values of input, weight and gradient exceeded a delayed scale: in a step, or in all steps that are held."""
        return {name: count_overflows(history, step).tolist() for name, history in self.histories().items()}

    def histories(self) -> dict[str, Tensor]:
        """The layers' amax histories, which a checkpoint must hold to continue with the same bits."""
        return {name: layer.amax_history for name, layer in self.layers.items() if layer.amax_history is not None}

    def join_histories(self, largest: Callable[[Tensor], Tensor]) -> None:
        """Join the histories of the ranks that train together; ``largest`` is the elementwise maximum over them."""
        if histories := list(self.histories().values()):
            join_histories(histories, largest)

    def state_dict(self) -> dict[str, Any]:
        """What the same bits need after a resume: the step that random bits are keyed by, and copies of the amax histories."""
        histories = {name: history.clone() for name, history in self.histories().items()}
        return {"matmul_step": self.step, "amax_histories": histories}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self.step = state["matmul_step"]
        self.load_histories(state["amax_histories"])

    def load_histories(self, histories: dict[str, Tensor]) -> None:
        """Load what :meth:`histories` returned, also where the compute in force delays no scale: a later one may."""
        saved = {plain_name(name): history for name, history in histories.items()}
        for name, layer in self.layers.items():
            if (history := saved.get(plain_name(name))) is not None:
                layer.load_history(history)
        self.share_histories()


# Layers that count the steps of every optimizer.
_FOLLOW_ANY: weakref.WeakSet[Layer] = weakref.WeakSet()


def _advance(*_: Any) -> None:
    for layer in list(_FOLLOW_ANY):
        layer.set_step(layer.step + 1, layer.seed)


register_optimizer_step_post_hook(_advance)
