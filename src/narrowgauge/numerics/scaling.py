"""Dynamic loss scaling: the loss is multiplied by a scale so that its gradients fit float16.

float16 reaches from 2^-24 to 65504, and most gradients of a language model are smaller. So the loss is multiplied by a
scale S, every gradient comes out S times as large, and the step divides by S again. The largest S that does not overflow
is best, and it changes during training. So S is raised after many steps without an overflow and lowered after
overflows. A step that overflowed is skipped.

S is always a power of two. Multiplying by one moves a float's exponent and rounds nothing (down to float16's subnormals,
which are what S is there to avoid), so two scales that both fit give the same gradients to the bit.

Whether a step overflowed is known on the device, and the host should not wait for it. Hence the scale and its counters
are 0-d tensors there, and an update is a few `where`s on them, without a branch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.rounding import bits_of, float_of

State = dict[str, Tensor]
COUNTERS = ("lives", "good_steps", "num_overflows", "num_held")
Losses = TypeVar("Losses", list[Tensor], tuple[Tensor, ...])


class LossScaler:
    """A loss scale that grows while nothing overflows and backs off when overflows follow one another.

    Invariant: the scale is a power of two in ``[floor, ceiling]``, and the state depends on the sequence of overflows alone:

    * A step that overflows spends one of ``hysteresis`` lives and starts the count of good steps again. While no life
      is left, it multiplies the scale by ``backoff_factor``, but never below ``floor``.
    * A step that does not overflow brings all lives back: only ``hysteresis`` overflows *in a row* lower the scale, and
      a single odd batch never does. If a share p of steps overflows, two in a row come after about 1/p² steps.
    * After ``growth_interval`` steps in a row without an overflow the scale is multiplied by ``growth_factor``, but
      never above ``ceiling``, and the count starts again.

    At the floor the scale stays, and :meth:`report` warns that it is still too high; it never becomes zero.
    Processes that train together must agree on what overflowed, as they do on a norm over all of them; then their
    scales are equal too. All micro-batches of a step have the same scale if the update follows the step.

    Args:
        initial: the scale at first.
        growth_factor: at least 1.
        backoff_factor: at most 1.
        growth_interval: steps without an overflow until the scale grows.
        hysteresis: lives; 1 backs off at every overflow, as ``torch.amp.GradScaler`` does.
        floor, ceiling: the least and the largest scale; with 2^24 the smallest float16 stands for 2^-48.
        device: where the scale lives; ``None``: where the first loss or overflow that it meets does.
    Raises:
        RecipeError: a scale or a factor that is no power of two (it would round every gradient), or limits that
            contradict each other.

    Cost: a dozen operations on 0-d tensors per update; only methods whose docstring says so wait for the device.

    Example:
        >>> scaler = LossScaler(growth_interval=2, hysteresis=1)
        >>> for overflowed in (True, False, False, False):
        ...     scaler.update_(torch.tensor(overflowed))
        ...     print(scaler.scale_tensor.item())
        32768.0
        32768.0
        65536.0
        65536.0

    Source:
        Micikevicius et al. 2018, Mixed Precision Training, arXiv:1710.03740. Hysteresis is Megatron-LM's, whose words
        ("consecutive") are obeyed here; its code brings lives back only when the scale grows. Lives that come back after
        every step without an overflow are DeepSpeed's ``consecutive_hysteresis``, off there by default.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        floor: float = 1.0,
        ceiling: float = 2.0**24,
        device: torch.device | str | None = None,
    ) -> None:
        powers = {
            "initial": initial,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "floor": floor,
            "ceiling": ceiling,
        }
        for name, value in powers.items():
            _require_power_of_two(name, value)
        for name, count in {"growth_interval": growth_interval, "hysteresis": hysteresis}.items():
            if type(count) is not int or not 1 <= count < 1 << 31:
                raise RecipeError(f"{name} = {count!r} was requested; it must be a whole number, at least 1.")
        if growth_factor < 1 or backoff_factor > 1:
            raise RecipeError(
                f"growth_factor = {growth_factor:g} and backoff_factor = {backoff_factor:g} were requested; growth "
                "multiplies by at least 1 and backing off by at most 1.",
                "For instance 2 and 0.5.",
            )
        if not floor <= initial <= ceiling:
            raise RecipeError(
                f"an initial loss scale of {initial:g} was requested, outside of {floor:g} … {ceiling:g}.",
                "Change initial, floor or ceiling.",
            )
        self.growth_factor, self.backoff_factor = float(growth_factor), float(backoff_factor)
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.floor, self.ceiling = float(floor), float(ceiling)
        self._waits_for_device = device is None
        self.request: object = None
        """Identifies the latest :meth:`scale`, so that an optimizer knows whether there was one since its last step."""
        # Filled rather than copied from the host: on a device that does not wait either.
        self._state: State = {"scale": torch.full((), float(initial), dtype=torch.float32, device=device)}
        for name in COUNTERS:
            value = hysteresis if name == "lives" else 0
            self._state[name] = torch.full((), value, dtype=torch.int32, device=device)

    @classmethod
    def static(cls, scale: float, *, device: torch.device | str | None = None) -> LossScaler:
        """A scaler whose scale never moves; overflows are still counted and reported.

        Args:
            scale: a power of two, else :class:`RecipeError`.
            device: as of the class.
        """
        return cls(scale, growth_factor=1.0, backoff_factor=1.0, floor=scale, ceiling=scale, device=device)

    @overload
    def scale(self, loss: Tensor) -> Tensor: ...

    @overload
    def scale(self, loss: Losses) -> Losses: ...

    def scale(self, loss: Any) -> Any:
        """The loss, or each of a list or tuple of them, times the scale, to be differentiated; the loss itself stays as it is.

        A loss in float16 can overflow here already: compute it in float32.
        """
        self.request = object()  # written and never read here: a compiled loss is not recompiled for it
        if isinstance(loss, Tensor):
            return loss * self._on(loss.device)["scale"].to(loss.device, non_blocking=True)
        return type(loss)(self.scale(each) for each in loss)

    @property
    def scale_tensor(self) -> Tensor:
        """The scale, float32 0-d on the device; updated in place."""
        return self._state["scale"]

    @property
    def inverse(self) -> Tensor:
        """One over the scale, exactly; float32 0-d on the device."""
        # The exponent field of 2^e is 127 + e; no division, which a GPU's compiler may approximate.
        return float_of((254 << 23) - bits_of(self._state["scale"]))

    @torch.no_grad()
    def update_(self, overflowed: Tensor) -> None:
        """Take note of a step, and move the scale for the next.

        Args:
            overflowed: one element of any dtype, not 0 where the step overflowed and was skipped.
        """
        state = self._on(overflowed.device)
        flag = overflowed.to(state["scale"].device, non_blocking=True).reshape(()) != 0
        for name, value in self._next(state, flag).items():
            state[name].copy_(value)

    def _next(self, state: State, overflowed: Tensor) -> State:
        """The state after a step: the rule of the class, as arithmetic."""
        scale = state["scale"]
        lives = torch.where(overflowed, (state["lives"] - 1).clamp(min=0), self.hysteresis)
        good_steps = torch.where(overflowed, 0, state["good_steps"] + 1)
        lowers = overflowed & (lives == 0)
        # Not ==: a state may have been saved under a longer interval.
        grows = good_steps >= self.growth_interval
        lowered = (scale * self.backoff_factor).clamp(min=self.floor)
        raised = (scale * self.growth_factor).clamp(max=self.ceiling)
        return {
            "scale": torch.where(lowers, lowered, torch.where(grows, raised, scale)),
            "lives": lives,
            "good_steps": torch.where(grows, 0, good_steps),
            "num_overflows": state["num_overflows"] + overflowed,
            "num_held": state["num_held"] + (lowers & (lowered == scale)),
        }

    def _on(self, device: torch.device) -> State:
        """The state, moved to ``device`` if it has been waiting for one."""
        if self._waits_for_device:
            self._waits_for_device = False
            self._state = {name: value.to(device) for name, value in self._state.items()}
        return self._state

    # ── what the host may read ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def at_floor(self) -> bool:
        """Whether the scale is as low as it may get; waits for the device."""
        return bool(self._state["scale"] <= self.floor)

    @property
    def num_overflows(self) -> int:
        """How many steps have overflowed; waits for the device."""
        return int(self._state["num_overflows"])

    def report(self) -> str | None:
        """What is wrong, in a line: the scale may not get lower, and steps overflow nevertheless. ``None`` where all is well.

        Waits for the device.
        """
        held = int(self._state["num_held"])
        if not held or not self.at_floor:
            return None
        steps = f"{held} step{'s' if held > 1 else ''} overflowed at"
        if self.floor == self.ceiling:
            return f"{steps} the static loss scale {self.floor:g}: take a smaller one, or one that moves."
        return (
            f"{steps} the floor of the loss scale, {self.floor:g}, and were skipped: the gradients are not finite at "
            "any scale, and training has probably diverged. Lower the learning rate, or train in bfloat16."
        )

    def state_dict(self) -> dict[str, float | int]:
        """The scale and the counters in plain numbers, which JSON can hold; waits for the device.

        The factors and limits are not in it: they are settings.
        """
        return {name: value.item() for name, value in self._state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; a state that is refused changes nothing.

        Raises:
            RecipeError: an entry is missing, or the saved scale is one that this scaler may not take.
        """
        missing = [name for name in self._state if name not in state_dict]
        if missing:
            raise RecipeError(f"the loss scaler's state to load holds {sorted(state_dict)}, and no '{missing[0]}'.")
        scale = float(state_dict["scale"])
        _require_power_of_two("the saved loss scale", scale)
        if not self.floor <= scale <= self.ceiling:
            raise RecipeError(
                f"a state with loss scale {scale:g} was given to a scaler of {self.floor:g} … {self.ceiling:g}.",
                "Build the scaler with the limits the state was saved under.",
            )
        for name, value in self._state.items():
            value.fill_(state_dict[name])


def _require_power_of_two(name: str, value: float) -> None:
    # 2^±126 and no further, so that the inverse is a normal float32 too.
    if not (0 < value < math.inf and math.frexp(value)[0] == 0.5 and 2.0**-126 <= value <= 2.0**126):
        raise RecipeError(
            f"{name} = {value!r} was requested, and it must be a power of two from 2^-126 to 2^126: any other would "
            "round every gradient.",
            f"Take {2.0 ** round(math.log2(value)):g}." if 2.0**-126 <= value <= 2.0**126 else "",
        )
