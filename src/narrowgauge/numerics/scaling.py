"""Dynamic loss scaling: multiply the loss by a scale so that its gradients fit float16.

float16 reaches from 2^-24 to 65504. Most gradients of a language model are smaller. So the loss is
multiplied by a scale S. Every gradient comes out S times as large, and the step divides by S again.
The largest S that does not overflow is best, and it changes during training. A step that overflowed
is skipped.

S is a power of two. It moves a float's exponent and rounds nothing: two scales that both fit give
the same gradients bit for bit. The scale and its counters are 0-d tensors on the device. An update
is a few ``where`` on them, so the host does not wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError

State = dict[str, Tensor]
FLOOR = 1.0
CEILING = 2.0**24
"""The smallest and the largest scale. With 2^24 the smallest float16 stands for 2^-48."""
COUNTERS = ("lives", "good_steps", "num_overflows", "num_held")


class LossScaler:
    """Grow a loss scale while nothing overflows, and reduce it after repeated overflows.

    Invariant: the scale is a power of two from 1 to 2^24. The state depends only on the sequence of
    overflows, on which all ranks must agree:

    * From the ``hysteresis``-th overflow in a row on, each halves the scale, but never below 1.
    * ``growth_interval`` steps in a row without an overflow double it, but never above 2^24.

    Args:
        initial: the first scale.
        growth_interval: steps without an overflow until the scale grows.
        hysteresis: overflows in a row until the scale shrinks. With 1, every overflow halves it, as
            in ``torch.amp.GradScaler``.
    Raises:
        RecipeError: the scale is not a power of two from 1 to 2^24, or a count is below 1.
    Example:
        >>> scaler = LossScaler(growth_interval=2, hysteresis=1)
        >>> for overflowed in (True, False, False, False):
        ...     scaler.update_(torch.tensor(overflowed))
        >>> scaler.scale_tensor
        tensor(65536.)

    Source:
        Micikevicius et al. 2018, Mixed Precision Training (1710.03740); hysteresis as in
        Megatron-LM and DeepSpeed's ``consecutive_hysteresis``.
    """

    def __init__(
        self, initial: float = 2.0**16, *, growth_interval: int = 2000, hysteresis: int = 2
    ) -> None:
        _require_scale("initial", initial)
        for name, count in (("growth_interval", growth_interval), ("hysteresis", hysteresis)):
            if type(count) is not int or not 1 <= count < 1 << 31:
                raise RecipeError(
                    f"Cannot take {name} = {count!r}: it must be a whole number, at least 1."
                )
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self._waits_for_device = True
        self.request: object = None
        """Identifies the latest :meth:`scale`.

        An optimizer compares it to see whether a loss was scaled since its last step.
        """
        self.stepped: object = None
        """The request of the latest step."""
        self._state: State = {
            "scale": torch.full((), float(initial), dtype=torch.float32, device="cpu")
        }
        for name in COUNTERS:
            value = hysteresis if name == "lives" else 0
            self._state[name] = torch.full((), value, dtype=torch.int32, device="cpu")

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, for backward.

        A float16 loss can already overflow here: compute it in float32.
        """
        self.request = (
            object()
        )  # written, never read here, so a compiled loss is not recompiled for it
        return loss * self._on(loss.device)["scale"].to(loss.device, non_blocking=True)

    @property
    def scale_tensor(self) -> Tensor:
        """Return the scale, float32 0-d on the device. It is updated in place."""
        return self._state["scale"]

    @torch.no_grad()
    def update_(self, overflowed: Tensor) -> None:
        """Count a step, and set the scale for the next.

        Args:
            overflowed: one element of any dtype, not 0 if the step overflowed and was skipped.
        """
        state = self._on(overflowed.device)
        scale = state["scale"]
        overflowed = overflowed.to(scale.device, non_blocking=True).reshape(()) != 0
        lives = torch.where(overflowed, (state["lives"] - 1).clamp(min=0), self.hysteresis)
        good_steps = torch.where(overflowed, 0, state["good_steps"] + 1)
        lowers = overflowed & (lives == 0)
        # Do not use ==: a state may have been saved under a longer interval.
        grows = good_steps >= self.growth_interval
        lowered = (scale * 0.5).clamp(min=FLOOR)
        raised = (scale * 2.0).clamp(max=CEILING)
        state["num_overflows"] += overflowed
        state["num_held"] += lowers & (lowered == scale)
        state["lives"].copy_(lives)
        state["good_steps"].copy_(torch.where(grows, 0, good_steps))
        scale.copy_(torch.where(lowers, lowered, torch.where(grows, raised, scale)))

    def _on(self, device: torch.device) -> State:
        """Return the state, moved to ``device`` the first time."""
        if self._waits_for_device:
            self._waits_for_device = False
            self._state = {name: value.to(device) for name, value in self._state.items()}
        return self._state

    def report(self) -> str | None:
        """Return a line if steps overflow at the floor of the scale, else ``None``.

        Wait for the device.
        """
        count = int(self._state["num_held"])
        if not count or self._state["scale"] > FLOOR:
            return None
        steps = f"{count} step{'s' if count > 1 else ''} overflowed at"
        return (
            f"{steps} the floor of the loss scale, 1, and were skipped: the gradients are not "
            "finite at any scale, and "
            "training has probably diverged. Lower the learning rate, or train in bfloat16."
        )

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and the counters in plain numbers, without the settings; waits for the
        device.
        """
        return {name: value.item() for name, value in self._state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`. A refused state changes nothing.

        Raises:
            RecipeError: an entry is missing, or the saved scale is not a power of two from 1 to
                2^24.
        """
        missing = [name for name in self._state if name not in state_dict]
        if missing:
            raise RecipeError(
                f"Cannot load a loss scaler's state without '{missing[0]}': it holds "
                f"{sorted(state_dict)}."
            )
        _require_scale("the saved loss scale", float(state_dict["scale"]))
        for name, value in self._state.items():
            value.fill_(state_dict[name])


def _require_scale(name: str, value: float) -> None:
    if not (FLOOR <= value <= CEILING and math.frexp(value)[0] == 0.5):
        raise RecipeError(
            f"Cannot take {name} = {value!r}: it must be a power of two from 1 to 2^24, or it "
            "rounds every gradient.",
            f"Try {2.0 ** round(math.log2(value)):g}." if FLOOR <= value <= CEILING else "",
        )
