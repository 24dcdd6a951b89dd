"""The elementwise rules in Python's own floats, which are IEEE float64: no tensor library computes anything here.

Each is the published formula in the order in which the package documents it, one number at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

State = dict[str, float]
Update = Callable[[float, float, State, int], tuple[float, State]]
"""``(weight, gradient, state, step) -> (new weight, new state)``; the first step is 1, and a state begins empty."""


def adamw(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, *, is_coupled: bool = False
) -> Update:
    """Loshchilov and Hutter 2019, algorithm 2; with ``is_coupled`` Adam, whose decay is part of the gradient."""
    beta1, beta2 = betas

    def update(w: float, g: float, state: State, step: int) -> tuple[float, State]:
        if is_coupled:
            g = g + w * weight_decay
        m, v = state.get("exp_avg", 0.0), state.get("exp_avg_sq", 0.0)
        m = m + (g - m) * (1 - beta1)
        v = v + (g * g - v) * (1 - beta2)
        denominator = math.sqrt(v) * (1 / math.sqrt(1 - beta2**step)) + eps
        change = m / denominator * (-lr / (1 - beta1**step))
        if not is_coupled:
            change = change + -lr * weight_decay * w
        return w + change, {"exp_avg": m, "exp_avg_sq": v}

    return update


def sgd(lr: float, momentum: float, weight_decay: float, *, nesterov: bool = False) -> Update:
    """As ``torch.optim.SGD`` without dampening; the first gradient is the first momentum."""

    def update(w: float, g: float, state: State, step: int) -> tuple[float, State]:
        g = g + w * weight_decay
        if not momentum:
            return w + g * -lr, {}
        m = state.get("momentum_buffer", 0.0) * momentum + g
        direction = g + m * momentum if nesterov else m
        return w + direction * -lr, {"momentum_buffer": m}

    return update


def lion(lr: float, betas: tuple[float, float], weight_decay: float) -> Update:
    """Chen et al. 2023 (2302.06675), algorithm 2."""
    beta1, beta2 = betas

    def update(w: float, g: float, state: State, step: int) -> tuple[float, State]:
        m = state.get("exp_avg", 0.0)
        mixed = m + (g - m) * (1 - beta1)
        sign = math.copysign(1.0, mixed) if mixed else 0.0
        return w + (sign * -lr + w * (-lr * weight_decay)), {"exp_avg": m + (g - m) * (1 - beta2)}

    return update


def steps(
    update: Update, weights: Sequence[float], gradients: Sequence[Sequence[float]]
) -> tuple[list[float], list[State]]:
    """The weights and states after one step for each row of gradients."""
    values, states = list(weights), [State() for _ in weights]
    for step, row in enumerate(gradients, 1):
        for k, gradient in enumerate(row):
            values[k], states[k] = update(values[k], gradient, states[k], step)
    return values, states
