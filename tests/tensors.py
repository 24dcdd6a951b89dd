"""Tensors that tests draw, and comparisons of tensors: one definition of each."""

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from narrowgauge.numerics.chunks import flat_chunks
from narrowgauge.numerics.metrics import UPDATE_SUMS, change_terms

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gaussian(
    *shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normal values from a generator of their own, scaled in float32 and rounded to ``dtype``."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def random_tokens(batch: int = 3, length: int = 10, vocabulary: int = 48, seed: int = 0) -> Tensor:
    """Uniform token indices ``[batch, length]``."""
    return torch.randint(
        0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def bits(x: Tensor) -> Tensor:
    """The bits of each value as an integer of the same width: -0 differs from 0, and NaNs from each
    other.
    """
    return x.detach().view(_INTEGERS[x.element_size()])


def scalar_bits(x: Tensor) -> int:
    """The bits of a tensor without dimensions."""
    assert x.shape == ()
    return int(bits(x))


def bits_with_one_nan(x: Tensor) -> Tensor:
    """Like :func:`bits`, with the same bits for every NaN; formats of one byte are left alone."""
    return bits(torch.where(x.isnan(), torch.nan, x) if x.element_size() > 1 else x)


def unsigned(x: Tensor) -> NDArray[np.int64]:
    """32-bit words as numbers from 0 to 2^32 - 1."""
    return x.numpy().astype(np.int64) % 2**32


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal dtypes, shapes and bits."""
    return first.dtype is second.dtype and torch.equal(bits(first), bits(second))


def assert_same_bits(computed: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Equal names, dtypes, shapes and bits."""
    assert computed.keys() == expected.keys()
    for name, value in computed.items():
        assert (value.dtype, value.shape) == (expected[name].dtype, expected[name].shape), name
        differing = int((bits(value) != bits(expected[name])).sum())
        assert differing == 0, f"{differing} of {value.numel()} values of {name} differ"


def rms(x: Tensor) -> float:
    """Root mean square, summed in float64."""
    return x.detach().double().square().mean().sqrt().item()


def relative_error(computed: Tensor, expected: Tensor) -> float:
    """``‖computed - expected‖ / ‖expected‖``, in float64."""
    computed = computed.double()
    expected = expected.double()
    return ((computed - expected).norm() / expected.norm()).item()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of a loss with respect to each parameter, by name; earlier gradients do not
    count.
    """
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer, in the order of its groups."""
    params = []
    for group in optimizer.param_groups:
        params.extend(group["params"])
    return params


def step_gradients(params: Sequence[Tensor], step: int, scale: float = 1.0) -> list[Tensor]:
    """Gaussian gradients of one step: bfloat16 values, in each parameter's dtype."""
    generator = torch.Generator().manual_seed(1000 + step)
    gradients = []
    for p in params:
        gradients.append((torch.randn(p.shape, generator=generator) * scale).bfloat16().to(p.dtype))
    return gradients


def set_gradients(params: Sequence[Tensor], step: int, scale: float = 1.0) -> None:
    """Set :func:`step_gradients`."""
    for p, gradient in zip(params, step_gradients(params, step, scale), strict=True):
        p.grad = gradient


def take_steps(optimizer: torch.optim.Optimizer, steps: range, scale: float = 1.0) -> None:
    """Step an optimizer with :func:`step_gradients`."""
    for step in steps:
        set_gradients(parameters_of(optimizer), step, scale)
        optimizer.step()


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes at once of what a call allocates."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call()
    changes = []
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append(event)
    return max(
        itertools.accumulate(
            event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())
        )
    )


def update_sums(intended: Tensor, stored: Tensor, visible: Tensor) -> Tensor:
    """Return the sums of one tensor's update, float64 ``[8]``.

    Products are exact in float64 and summed there, chunk by chunk. Counts are exact.
    """
    total = torch.zeros(len(UPDATE_SUMS), dtype=torch.float64, device=intended.device)
    for parts in flat_chunks(intended, stored, visible):
        total[:7] += torch.stack([term.sum() for term in change_terms(*parts)])
    return total
