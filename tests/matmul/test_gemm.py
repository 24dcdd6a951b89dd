"""Products of integers, bit for bit, and on a processor that multiplies float32 alone.

Against float64: ``test_linear``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import narrowgauge as ng
from equivalence.ways import llama
from matmul.scenarios import DIMS, gaussian
from narrowgauge.matmul import gemm
from narrowgauge.matmul.gemm import EmulationNotice, multiply
from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.operand import Operand
from narrowgauge.spec.computes import COMPUTES, PLACES
from narrowgauge.trainer.language_model import loss_sum
from oracles import linear as oracle
from processors import pretending
from tensors import bits_with_one_nan

# [rows, contraction, columns]: not whole blocks, and one of each side.
SHAPES = [(33, 65, 17), (1, 40, 3), (5, 1, 4), (4, 300, 1), (70, 513, 90)]
ROW = COMPUTES["int8-row"].output
TOKENS = torch.arange(18).reshape(2, 9) % 32


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_integers_multiply_bit_for_bit(
    place: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rows, contraction, columns = shape
    codes, scales, operands = [], [], []
    for side, dim in zip((rows, columns), DIMS[place], strict=True):
        draw = torch.Generator().manual_seed(side)
        codes.append(
            torch.randint(-127, 128, (side, contraction), generator=draw, dtype=torch.int8)
        )
        scales.append(gaussian(side, 1, dtype=torch.float32, seed=side).abs())
        operand = Operand(codes[-1], scales[-1])
        if not dim:
            operand = Operand(codes[-1].t().contiguous(), scales[-1].t()).turned()
        operands.append(operand)
    bias = gaussian(columns, dtype=dtype, seed=4) if dtype is torch.bfloat16 else None
    result = multiply(*operands, ROW, (rows, columns), dtype, bias)
    exactly = oracle.scaled_integers(
        oracle.integer_product(*codes), scales[0], scales[1].t(), bias, dtype
    )
    assert torch.equal(bits_with_one_nan(result), bits_with_one_nan(exactly))


@pytest.mark.parametrize("sign", [1, -1])
def test_integer_sums_hold_beyond_what_int32_does(sign: int) -> None:
    terms = (1 << 17) * 2 + 5
    lhs = torch.full((2, terms), 127, dtype=torch.int8)
    rhs = torch.full((3, terms), 127 * sign, dtype=torch.int8)
    lhs[1, ::2] = -127
    unit_scale = torch.ones((1, 1))
    operands = Operand(lhs, unit_scale), Operand(rhs, unit_scale)
    result = multiply(*operands, ROW, (2, 3), torch.float32)
    assert abs(127 * 127 * terms) > 2**31
    assert torch.equal(result, oracle.integer_product(lhs, rhs).float())


# ── AVX2 alone ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def laptop() -> Iterator[None]:
    """AVX2 alone, in a process that has not warned yet."""
    gemm.warn_if_emulated.cache_clear()
    with pretending("avx2"):
        yield


def test_a_long_product_of_integers_is_rounded_once(laptop: None) -> None:
    codes = torch.randint(64, 128, (16, 5000), dtype=torch.int8)
    exact = codes.long() @ codes.long().t()
    assert torch.equal(gemm._multiply_integers(codes, codes.t()), exact.float())


def test_a_prepared_model_trains_by_float32_products_and_says_so_once(laptop: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = ng.prepare(llama(), "bfloat16/word", lr=0.01)
        ng.prepare(llama(), "bfloat16/word")
        losses = []
        for _ in range(2):
            losses.append(loss_sum(model, TOKENS))
            losses[-1].backward()
            optimizer.step()
    assert losses[1] < losses[0]
    assert [str(warning.message) for warning in caught if warning.category is EmulationNotice] == [
        "bfloat16 multiplies bfloat16, for which there is no kernel on this cpu; it is emulated here with the same "
        "values, and no faster than a plain layer."
    ]
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert {type(module) for module in linears} == {Linear} and len(linears) == 15
