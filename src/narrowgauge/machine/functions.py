"""Last bits of elementwise functions: their error in units in the last place, and a hash of their bits.

No standard says how exp or tanh are rounded, so libraries differ, and so do the kernels of one library: a vector's lanes use
another polynomial than the loop over the elements that are left over. Every processor rounds division and square root correctly,
but not every kernel does. The reference is the float64 function on the CPU, whose own error is 2^-29 of what is measured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.machine.sample_values import across_exponents, between, bits_of

_NUM_VALUES = 4099  # not a multiple of a vector's width: the elements left over are measured too
_NUM_ALONE = 256


def _interval(low: float, high: float) -> Callable[[], Tensor]:
    return lambda: between(low, high, _NUM_VALUES)


def _exponents(low: int, high: int) -> Callable[[], Tensor]:
    return lambda: across_exponents(low, high, _NUM_VALUES)


def _divide(values: Tensor) -> Tensor:
    """By a number between 3/4 and 5/4, which is exact: the values are multiples of 2^-19."""
    return values / values.abs().mul(0.5).add(0.75)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]] = {
    "division": (_divide, _interval(-1.0, 1.0)),
    "sqrt": (torch.sqrt, _exponents(-40, 40)),
    "rsqrt": (torch.rsqrt, _exponents(-40, 40)),
    "exp": (torch.exp, _interval(-80.0, 80.0)),
    "log": (torch.log, _exponents(-60, 60)),
    "tanh": (torch.tanh, _interval(-6.0, 6.0)),
    "sigmoid": (torch.sigmoid, _interval(-20.0, 20.0)),
    "silu": (F.silu, _interval(-20.0, 20.0)),
    "erf": (torch.erf, _interval(-4.0, 4.0)),
    "gelu": (F.gelu, _interval(-2.0, 8.0)),
    "sin": (torch.sin, _interval(-2048.0, 2048.0)),
    "cos": (torch.cos, _interval(-2048.0, 2048.0)),
}
"""By name: the function and the float32 values on which it is measured."""


def measure_function(name: str, device: torch.device) -> str:
    """The largest error of a function, how many results differ outside of a vector, and the hash of its bits.

    Args:
        name: a key of :data:`FUNCTIONS`.
        device: to measure.
    Example:
        >>> measure_function("division", torch.device("cpu"))
        'correctly rounded #57bf11a4'
    """
    function, sample = FUNCTIONS[name]
    values = sample()
    here = values.to(device)
    found = function(here)
    exact = function(values.double())
    is_correct = bool((found.cpu() == exact.float()).all())
    error = "correctly rounded" if is_correct else f"{max_error(found.cpu(), exact):.2f} ulp"
    alone = torch.stack([function(value) for value in here[:_NUM_ALONE, None].unbind()])[:, 0]
    apart = int((alone != found[:_NUM_ALONE]).sum())
    return error + (f", {apart} of {_NUM_ALONE} differ alone" if apart else "") + f" #{bits_of(found)}"


def max_error(found: Tensor, exact: Tensor) -> float:
    """The largest distance from the exact result, in units in the last place of float32.

    Args:
        found: float32.
        exact: float64, of the same shape.
    Example:
        >>> max_error(torch.tensor([1.0]), torch.tensor([1 + 2.0**-24], dtype=torch.float64))
        0.5
    """
    _, exponents = torch.frexp(exact)
    spacing = torch.ldexp(torch.ones_like(exact), exponents.clamp(min=-125) - 24)
    return float(((found.double() - exact).abs() / spacing).max())
