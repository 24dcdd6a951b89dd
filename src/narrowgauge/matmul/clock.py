"""The clock of a model's random bits: the step and the seed of its optimizer, and the place of a
micro-batch in the step.

There is one clock: the optimizer's. A Narrowgauge optimizer is found when it is made, by the
parameters that it shares with the model. Another one is found at its first step, or by
:meth:`Clock.follow`. The number of its steps is in its first param group, so it is saved and loaded
with the optimizer. An optimizer that steps none of the model's parameters is not heard.

The place of a micro-batch is an index that the training loop sets. Where it sets none, a hash of
the gradient itself takes its part, see ``operand.draw``. So no two micro-batches of a step round
alike, on one rank or on several. A recomputed forward pass, a compiled one, and ranks that compute
the same gradient have the same bits. Nothing counts calls, and nothing knows ranks.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.torch_support.torch_hooks import (
    OwnHook,
    after_every_step,
    announced_optimizers,
    hear_of_optimizers,
)
from narrowgauge.torch_support.torch_names import calls_of_step

KEY = "matmul_step"
"""The entry of an optimizer's first param group that counts its steps."""


class Clock:
    """The seed, the step and the place of a micro-batch in the batch, shared by the narrow layers
    of a model.

    A change is written to each device once for all layers, and only if a layer reads it.

    Attributes:
        seed, step: of the optimizer that is followed.
        first_sequence, first_token: the index in the step's batch of the micro-batch's first
            sequence or token; one is 0.
        is_placed: whether the training loop sets these indices. Otherwise the gradient's own bits
            tell micro-batches apart.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.step = 0
        self.first_sequence = 0
        self.first_token = 0
        self.is_placed = False
        self._begin()

    def _begin(self) -> None:
        self._words: dict[torch.device, Tensor] = {}
        self._model: Any = None
        self._layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizer: Any = None
        self._last_other: Any = None
        self._strangers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._has_stepped = False
        self._hook: Any = None

    def __getstate__(self) -> dict[str, Any]:
        numbers = ("seed", "step", "first_sequence", "first_token", "is_placed")
        return {name: getattr(self, name) for name in numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()  # the layers of a copy ask for their words again, and its optimizer is another one
        _listen(self)

    def set(self, **numbers: Any) -> None:
        """Set some of the attributes."""
        before = self._numbers()
        vars(self).update(numbers)
        if self._words and self._numbers() != before:
            with torch.inference_mode(False):
                for words in self._words.values():
                    words.copy_(
                        torch.tensor(self._numbers(), dtype=torch.int32, device="cpu"),
                        non_blocking=True,
                    )

    def words(self, device: torch.device) -> Tensor:
        """Return the tensor on a device that always holds these numbers, see ``operand.Keys``."""
        if device not in self._words:
            with torch.inference_mode(False):
                self._words[device] = torch.tensor(
                    self._numbers(), dtype=torch.int32, device=device
                )
        return self._words[device]

    def _numbers(self) -> list[int]:
        seed = step_seed(self.seed, self.step)
        return [seed, self.first_sequence, self.first_token, int(self.is_placed)]

    # ── whose clock, and which optimizer's ────────────────────────────────────────────────────────

    def serve(self, layer: nn.Module) -> None:
        """Count a layer among those whose optimizer is followed."""
        self._layers.add(layer)

    def serve_model(self, model: nn.Module) -> None:
        """Follow the optimizer of any parameter of a model.

        Look among those that were made before.
        """
        self._model = weakref.ref(model)
        _listen(self)
        for optimizer in announced_optimizers():
            self.hear(optimizer)

    def hear(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the first optimizer that was made for this model."""
        if self.followed is None and self._shares_parameters(optimizer):
            self.follow(optimizer)

    @property
    def followed(self) -> torch.optim.Optimizer | None:
        """Return the optimizer whose steps count; ``None`` if it is gone, or none was found yet."""
        optimizer: torch.optim.Optimizer | None = (
            None if self._optimizer is None else self._optimizer()
        )
        return optimizer

    @property
    def _is_keyed(self) -> bool:
        return any(getattr(layer, "is_keyed", False) for layer in self._layers)

    def _parameters(self) -> Iterable[Tensor]:
        model = None
        if self._model is not None:
            model = self._model()
        if model is None:
            modules = list(self._layers)
        else:
            modules = [model]
        return (parameter for module in modules for parameter in module.parameters())

    def _shares_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return any(id(parameter) in stepped for parameter in self._parameters())

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Take seed and step from an optimizer from now on, and from its loaded state."""
        if self._hook is not None:
            self._hook.remove()
        before = self.followed
        if before is not None and before is not optimizer:
            before.param_groups[0].pop(KEY, None)  # it counts no longer
        self._optimizer, clock = weakref.ref(optimizer), weakref.ref(self)
        self._hook = optimizer.register_load_state_dict_post_hook(
            OwnHook(lambda optimizer: _after_load(clock(), optimizer))
        )
        self.read(optimizer)

    def read(self, optimizer: torch.optim.Optimizer) -> None:
        """Take seed and step from the optimizer's first group.

        One that has no count gets this clock's.
        """
        group = optimizer.param_groups[0]
        self.set(step=group.get(KEY, self.step), seed=group.get("seed", self.seed))
        self.write()

    def write(self) -> None:
        """Give the count of steps to the optimizer's first group, if random bits depend on it."""
        optimizer = self.followed
        if optimizer is not None and self._is_keyed:
            optimizer.param_groups[0][KEY] = self.step

    def after_load(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the loaded count of steps. Return whether there was one, if bits depend on it."""
        is_complete = KEY in optimizer.param_groups[0] or not self._is_keyed
        self.read(optimizer)
        return is_complete

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of this model's optimizer, one alone if its ``step`` calls that of its base
        class.
        """
        if calls_of_step(optimizer) > 1:
            return
        if self.followed is not optimizer and not self._takes_over(optimizer):
            return
        self._last_other = None
        self._has_stepped = True
        self.set(step=self.step + 1)
        self.write()

    def _takes_over(self, optimizer: torch.optim.Optimizer) -> bool:
        """Follow another optimizer of this model that stepped: at once, or the second time if the
        followed one may step too.
        """
        if optimizer in self._strangers:
            return False
        if not self._shares_parameters(optimizer):
            self._strangers.add(optimizer)
            return False
        is_again = self._last_other is not None and self._last_other() is optimizer
        if self.followed is not None and self._has_stepped and not is_again:
            self._last_other = weakref.ref(optimizer)
            return False
        count = optimizer.param_groups[0].get(KEY, self.step)
        if self._is_keyed and count != self.step:
            raise RecipeError(
                f"Cannot continue at step {count} of a loaded {type(optimizer).__name__} because "
                "the random bits of this step "
                f"were those of step {self.step}.",
                "Call linears.follow(optimizer) before the first forward pass: swap_linears "
                "returns linears.",
            )
        self.follow(optimizer)
        return True


_CLOCKS: weakref.WeakSet[Clock] = weakref.WeakSet()


def _listen(clock: Clock) -> None:
    after_every_step(_step_all)
    _CLOCKS.add(clock)


def _step_all(optimizer: Any, *_: Any) -> None:
    for clock in list(_CLOCKS):
        clock.after_step(optimizer)


def _hear_all(optimizer: torch.optim.Optimizer) -> None:
    for clock in list(_CLOCKS):
        clock.hear(optimizer)


hear_of_optimizers(_hear_all)


def _after_load(clock: Clock | None, optimizer: torch.optim.Optimizer) -> None:
    if clock is not None and not clock.after_load(optimizer):
        warnings.warn(
            f"the loaded optimizer state lacks {KEY}, so training continues with other bits. Save "
            "optimizer.state_dict() "
            "unedited.",
            stacklevel=5,
        )
