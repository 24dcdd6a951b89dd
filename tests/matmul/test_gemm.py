"""Products of integers, bit for bit.

Against float64: ``test_linear``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from matmul.scenarios import DIMS, gaussian
from narrowgauge.matmul.gemm import multiply
from narrowgauge.matmul.operand import Operand
from narrowgauge.spec.computes import COMPUTES, PLACES
from oracles import linear as oracle
from tables import exhaustive
from tensors import bits_with_one_nan

every_place = pytest.mark.parametrize("place", PLACES)
# [rows, contraction, columns]: not whole blocks, and one of each side.
SHAPES = [(33, 65, 17), (1, 40, 3), (5, 1, 4), (4, 300, 1)]


def random_codes(*shape: int, seed: int) -> Tensor:
    return torch.randint(
        -127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8
    )


@every_place
@pytest.mark.parametrize("shape", [*SHAPES, (70, 513, 90)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "with_bias"), [(torch.bfloat16, True), (torch.float32, False)], ids=str
)
def test_integers_multiply_bit_for_bit(
    place: str, shape: tuple[int, int, int], dtype, with_bias: bool
) -> None:
    rows, contraction, columns = shape
    codes = random_codes(rows, contraction, seed=0), random_codes(columns, contraction, seed=1)
    scales = []
    for side in (rows, columns):
        scales.append(gaussian(side, 1, dtype=torch.float32, seed=side).abs())
    bias = gaussian(columns, dtype=dtype, seed=4) if with_bias else None
    lhs, rhs = (
        Operand(side, scale) if dim else Operand(side.t().contiguous(), scale.t()).turned()
        for side, scale, dim in zip(codes, scales, DIMS[place], strict=True)
    )
    result = multiply(lhs, rhs, COMPUTES["int8-row"].output, (rows, columns), dtype, bias)
    exactly = oracle.scaled_integers(
        oracle.integer_product(*codes), scales[0], scales[1].t(), bias, dtype
    )
    assert torch.equal(bits_with_one_nan(result), bits_with_one_nan(exactly))


@exhaustive("sign", [1, -1])
def test_integer_sums_hold_beyond_what_int32_does(sign: int) -> None:
    terms = (1 << 17) * 2 + 5
    lhs = torch.full((2, terms), 127, dtype=torch.int8)
    rhs = torch.full((3, terms), 127 * sign, dtype=torch.int8)
    lhs[1, ::2] = -127
    unit_scale = torch.ones((1, 1))
    result = multiply(
        Operand(lhs, unit_scale),
        Operand(rhs, unit_scale),
        COMPUTES["int8-row"].output,
        (2, 3),
        torch.float32,
    )
    assert abs(127 * 127 * terms) > 2**31
    assert torch.equal(result, oracle.integer_product(lhs, rhs).float())
