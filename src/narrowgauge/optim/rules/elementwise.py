"""Elementwise rules: the step that an optimizer intends, as pure functions of float32 values.

A rule sees one weight, its gradient and its states, and returns the intended change and the new
states. It knows nothing of formats, layouts or devices. A state of either sign takes the storage's
code for first moments. One that is never negative (an average of squares) takes the code for second
moments.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import sqrt

Options = Mapping[str, Any]
"""The options of a param group."""
Numbers = tuple[float, ...]
"""The scalars of one step, in the order of their names."""
Scalars = Mapping[str, Tensor]
"""The same by name."""
Stepped = tuple[Any, ...]
"""The intended change, and the new states."""


@dataclass(frozen=True, slots=True)
class Rule:
    """An update rule.

    Args:
        states: names of the states, in the order in which ``update`` takes and returns them.
        scalars: names of the per-step float32 scalars that ``update`` reads.
        prepare: ``(options of a param group, number of this step from 1) -> scalars``; called at
            every step, so that a schedule may change any option.
        update: ``(weight, gradient, *states, scalars) -> (change, *new states)``, in float32
            tensors. :func:`narrowgauge.numerics.rounding.sqrt` is correctly rounded on every
            device.
        squares: the states that are never negative.
        monotone: whether larger magnitudes of gradient, weight and old states give larger
            magnitudes of new states. Then the largest of a block bound its new states: storages with
            a scale for each block of a state need it.
        decay: name of the scalar −lr · weight_decay of decoupled weight decay; empty without one. With
            it, no state depends on the weight.

    Example:
        >>> import torch
        >>> from narrowgauge import Optimizer
        >>> def prepare(group, step):
        ...     return (group["lr"],)
        >>> def update(weight, gradient, scalars):
        ...     return (-scalars["lr"] * gradient.sign(),)
        >>> signs = Rule("signs", (), ("lr",), prepare, update)
        >>> weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
        >>> optimizer = Optimizer([weight], signs, {"lr": 0.5}, storage="word", low_bits="zero")
        >>> weight.grad = torch.full_like(weight, 3.0)
        >>> optimizer.step()
        >>> weight[0, 0].item()
        0.5
    """

    name: str
    states: tuple[str, ...]
    scalars: tuple[str, ...]
    prepare: Callable[[Options, int], Numbers]
    update: Callable[..., Stepped]
    squares: tuple[str, ...] = ("exp_avg_sq",)
    decay: str = ""
    monotone: bool = False

    @property
    def stored_states(self) -> tuple[tuple[str, str], ...]:
        """Return the states, each with the code of a storage that it takes."""
        return tuple(
            (state, "exp_avg_sq" if state in self.squares else "exp_avg") for state in self.states
        )


TINY = 2.0**-126
"""The smallest normal float32."""


def moving_average(average: Any, value: Any, weight: Any) -> Any:
    """Return an average moved towards a value by the factor ``weight``.

    A ``weight`` of 1, where beta is 0, gives the value itself.

    In float32 ``average + (value - average)`` is not the value: a large average absorbs a small
    one.
    """
    return torch.where(weight != 1, average + (value - average) * weight, value)


def _adam_scalars(group: Options, step: int) -> Numbers:
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    correction1 = 1 - beta1**step
    correction2 = (1 - beta2**step) ** 0.5
    # Gradients up to this size vanish from the average of their squares, whose least value is 2^-149.
    # A much smaller eps, or 0, would divide them.
    least_eps = 2.0**-75 / math.sqrt(1 - beta2)
    eps = max(float(group["eps"]), least_eps)
    return 1 - beta1, 1 - beta2, -lr / correction1, 1 / correction2, eps


def _adamw_scalars(group: Options, step: int) -> Numbers:
    return *_adam_scalars(group, step), -float(group["lr"]) * group["weight_decay"]


def _adam_l2_scalars(group: Options, step: int) -> Numbers:
    return *_adam_scalars(group, step), float(group["weight_decay"])


def _without_decay(g: Any, m: Any, v: Any, s: Scalars) -> Stepped:
    m = moving_average(m, g, s["one_minus_beta1"])
    # The square of a finite gradient may be infinite. Such a weight is frozen, as torch's.
    v = torch.where(v < math.inf, moving_average(v, g * g, s["one_minus_beta2"]), v)
    return m / (sqrt(v) * s["inverse_root_correction2"] + s["eps"]) * s["negative_step_size"], m, v


def _adamw(w: Any, g: Any, m: Any, v: Any, s: Scalars) -> Stepped:
    change, m, v = _without_decay(g, m, v, s)
    return change + s["negative_decay"] * w, m, v


def _adam(w: Any, g: Any, m: Any, v: Any, s: Scalars) -> Stepped:
    return _without_decay(g + w * s["weight_decay"], m, v, s)


_ADAM_SCALARS = (
    "one_minus_beta1",
    "one_minus_beta2",
    "negative_step_size",
    "inverse_root_correction2",
    "eps",
)
_MOMENTS = ("exp_avg", "exp_avg_sq")
ADAMW = Rule(
    "adamw",
    _MOMENTS,
    (*_ADAM_SCALARS, "negative_decay"),
    _adamw_scalars,
    _adamw,
    decay="negative_decay",
    monotone=True,
)
ADAM = Rule(
    "adam", _MOMENTS, (*_ADAM_SCALARS, "weight_decay"), _adam_l2_scalars, _adam, monotone=True,
)  # fmt: skip


def _sgd_scalars(group: Options, step: int) -> Numbers:
    momentum = float(group["momentum"])
    nesterov = bool(group["nesterov"])
    decay = float(group["weight_decay"])
    rate = -float(group["lr"])
    if momentum == 0:  # as in torch, the buffer stays as it is, and steps go along the gradient
        return decay, 1.0, 0.0, 1.0, 0.0, rate
    gain = 1.0 if step == 1 else 1 - group["dampening"]
    return decay, momentum, gain, float(nesterov), momentum if nesterov else 1.0, rate


def _sgd(w: Any, g: Any, m: Any, s: Scalars) -> Stepped:
    g = g + w * s["weight_decay"]
    m = m * s["momentum"] + g * s["gain"]
    return (g * s["share_of_gradient"] + m * s["share_of_momentum"]) * s["negative_lr"], m


def _plain_sgd_scalars(group: Options, step: int) -> Numbers:
    return float(group["weight_decay"]), -float(group["lr"])


def _plain_sgd(w: Any, g: Any, s: Scalars) -> Stepped:
    return ((g + w * s["weight_decay"]) * s["negative_lr"],)


PLAIN_SGD = Rule("sgd", (), ("weight_decay", "negative_lr"), _plain_sgd_scalars, _plain_sgd)
"""SGD without momentum, which has no state."""
_SGD_SCALARS = (
    "weight_decay",
    "momentum",
    "gain",
    "share_of_gradient",
    "share_of_momentum",
    "negative_lr",
)
SGD = Rule("sgd", ("momentum_buffer",), _SGD_SCALARS, _sgd_scalars, _sgd, monotone=True)


def _lion_scalars(group: Options, step: int) -> Numbers:
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    return 1 - beta1, 1 - beta2, -lr, -lr * group["weight_decay"]


def _lion(w: Any, g: Any, m: Any, s: Scalars) -> Stepped:
    direction = moving_average(m, g, s["one_minus_beta1"]).sign()
    change = direction * s["negative_lr"] + w * s["negative_decay"]
    return change, moving_average(m, g, s["one_minus_beta2"])


_LION_SCALARS = ("one_minus_beta1", "one_minus_beta2", "negative_lr", "negative_decay")
LION = Rule(
    "lion", ("exp_avg",), _LION_SCALARS, _lion_scalars, _lion, decay="negative_decay", monotone=True,
)  # fmt: skip
