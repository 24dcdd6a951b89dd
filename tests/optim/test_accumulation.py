"""Sums of micro-batch gradients: each row's bits, its bound, its bytes, and what no sum may do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.optim.accumulation import GradientAccumulator
from oracles import accumulation as oracle
from tensors import bits

SHAPES = [(), (0,), (7,), (3, 4, 6)]


def gradients(
    shape: tuple[int, ...], k: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """``k`` gradients whose magnitudes spread over twelve binades."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-6, 6, (k, *shape), generator=generator)
    return list((torch.randn((k, *shape), generator=generator) * 2.0**spread).to(dtype).unbind(0))


def summed(parts: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """The finished gradient of one parameter whose micro-batch gradients are ``parts``."""
    parameter = torch.nn.Parameter(torch.zeros_like(parts[0]))
    accumulator = GradientAccumulator([parameter], dtype=dtype)
    for part in parts:
        parameter.grad = part.clone(memory_format=torch.preserve_format)
        accumulator.accumulate()
    accumulator.finish()
    return parameter.grad


def singles(parts: Sequence[Tensor]) -> list[oracle.Singles]:
    return [part.float().reshape(-1).numpy() for part in parts]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("k", [1, 2, 9])
def test_sums_are_those_written_down(shape: tuple[int, ...], k: int) -> None:
    parts = gradients(shape, k)
    expected = oracle.nearest(oracle.float32_sum(singles(parts)))
    assert torch.equal(summed(parts).float(), torch.from_numpy(expected).reshape(shape))
    turned = [
        part.movedim(0, -1).contiguous().movedim(-1, 0) if shape else part for part in parts
    ]  # other strides
    assert torch.equal(summed(turned), summed(parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_a_gradient_that_others_hold_stays_theirs(
    dtype: torch.dtype, grad_dtype: torch.dtype | None
) -> None:
    """One memory for each micro-batch's gradient, as a bucket is."""
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    parameter.grad_dtype = grad_dtype
    bucket = torch.zeros(4, dtype=grad_dtype or torch.bfloat16)
    accumulator = GradientAccumulator([parameter], dtype=dtype)
    for value in (1.0, 2.0, 4.0):
        parameter.grad = bucket.fill_(value)
        accumulator.accumulate()
        assert torch.equal(bucket, torch.full_like(bucket, value))
    accumulator.finish()
    assert torch.equal(parameter.grad, torch.full_like(bucket, 7.0))


@pytest.mark.parametrize(
    ("dtype", "dropped"), [(torch.float32, 0), (torch.bfloat16, 16), (torch.float16, 13)]
)
def test_sums_in_float64_are_the_exact_sums_rounded(dtype: torch.dtype, dropped: int) -> None:
    parts = gradients((600,), 50, dtype=dtype)
    exact = oracle.nearest(
        torch.stack(parts).double().sum(0).float().numpy(), dropped
    )  # no float64 sum of these rounds
    assert torch.equal(summed(parts, torch.float64).float(), torch.from_numpy(exact))
    # float32 sums lose the small addend: 2^24 + 1 rounds back.
    assert summed(
        [torch.tensor([v]) for v in (2.0**24, 1.0, -(2.0**24))], torch.float64
    ).tolist() == [1.0]
    with pytest.raises(RecipeError, match=r"torch\.float64"):
        GradientAccumulator([], dtype=torch.bfloat16)


def test_float16_sums_are_rounded_once() -> None:
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[torch.isfinite(every)]
    assert torch.equal(bits(summed([finite])), bits(finite))  # subnormals and -0 included
    assert torch.equal(bits(summed([-finite])), bits(-finite))
    parts = gradients((3000,), 7, dtype=torch.float16)
    total = oracle.float32_sum(singles(parts))
    expected = torch.from_numpy(oracle.nearest(total, dropped=13).astype(np.float16))
    assert torch.equal(bits(summed(parts)), bits(expected))
    # What autograd's float16 sum loses on the way, the float32 sum keeps.
    back = []
    for v in (60000.0, 60000.0, -60000.0):
        back.append(torch.tensor([v], dtype=torch.float16))
    assert summed(back).tolist() == [60000.0]


@pytest.mark.parametrize(("place", "value"), [(0, math.nan), (6, -math.inf)])
def test_what_is_not_finite_stays_so_in_its_element_alone(place: int, value: float) -> None:
    parts = gradients((11,), 7)
    parts[place][5] = value
    result = summed(parts)
    assert not result[5].isfinite() and result.isfinite().sum() == 10
    assert bool(result[5].isnan()) == math.isnan(value)
    opposite = []
    for v in (math.inf, 1.0, -math.inf, 1.0):
        opposite.append(torch.tensor([v]).bfloat16())
    assert summed(opposite).isnan().all()
    largest = torch.tensor([3.38e38]).bfloat16()
    assert summed([largest] * 3).tolist() == [math.inf]


def test_missing_frozen_and_tied() -> None:
    sometimes, always, never, frozen = (
        torch.nn.Parameter(torch.ones(3).bfloat16()) for _ in range(4)
    )
    frozen.requires_grad_(False)
    accumulator = GradientAccumulator([sometimes, always, never, frozen, always])
    for j in range(4):
        loss = (always + always * frozen).sum() + (sometimes.sum() if j % 2 else 0.0)
        loss.backward()
        accumulator.accumulate()
    accumulator.finish()
    gradients = []
    for p in (sometimes, always, never, frozen):
        gradients.append(None if p.grad is None else p.grad.tolist())
    assert gradients == [[2.0] * 3, [8.0] * 3, None, None]
    accumulator.discard()
    accumulator.finish()
    assert all(p.grad is None for p in (sometimes, always, never, frozen))


def test_a_gradient_left_at_the_end_counts_and_a_discarded_sum_does_not() -> None:
    weight = torch.nn.Parameter(torch.zeros(3).bfloat16())
    gradient = torch.ones(3).bfloat16()
    accumulator = GradientAccumulator([weight])
    for is_discarded, expected in ((False, 3.0), (True, 2.0)):
        weight.grad = gradient
        accumulator.accumulate()
        if is_discarded:
            accumulator.discard()
        weight.grad = 2 * gradient
        accumulator.finish()
        assert weight.grad.tolist() == [expected] * 3
        weight.grad = None


def test_bytes_are_counted() -> None:
    parameters = []
    for shape in ((64, 3), (5,), ()):
        parameters.append(torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))
    assert GradientAccumulator(parameters).bytes_per_param() == 4
    assert GradientAccumulator(parameters, dtype=torch.float64).bytes_per_param() == 8
    parameters[1].requires_grad_(False)
    assert GradientAccumulator(parameters[:2]).bytes_per_param() == pytest.approx(4 * 192 / 197)
