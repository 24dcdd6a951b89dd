"""Products of integers, bit for bit, and on a processor that multiplies float32 alone.

Against float64: ``test_linear``.
"""

import warnings
from collections.abc import Iterator
from contextlib import nullcontext

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

# [rows, contraction, columns]: not whole blocks, one of each side, several parts of a sum in float32,
# and sums beyond what int32 holds.
SHAPES = [(33, 65, 17), (1, 40, 3), (5, 1, 4), (4, 300, 1), (16, 5000, 16), (2, (1 << 18) + 5, 3)]
ROW = COMPUTES["int8-row"].output
TOKENS = torch.arange(18).reshape(2, 9) % 32


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_multiply_bit_for_bit(place, shape):
    rows, contraction, columns = shape
    codes, scales, operands = [], [], []
    for side, dim in zip((rows, columns), DIMS[place], strict=True):
        draw = torch.Generator().manual_seed(side)
        values = torch.randint(-127, 128, (side, contraction), generator=draw, dtype=torch.int8)
        if contraction > 1 << 18:
            values.fill_(127)[1] = -127
        scale = gaussian(side, 1, dtype=torch.float32, seed=side).abs()
        operand = Operand(values, scale)
        if not dim:
            operand = Operand(values.t().contiguous(), scale.t()).transposed()
        codes.append(values)
        scales.append(scale)
        operands.append(operand)
    product = oracle.integer_product(*codes)
    for dtype, bias in ((torch.bfloat16, gaussian(columns, seed=4)), (torch.float32, None)):
        exactly = oracle.scaled_integers(product, scales[0], scales[1].t(), bias, dtype)
        for sets in (None, ("avx2",)):
            with nullcontext() if sets is None else pretending(*sets):
                result = multiply(*operands, ROW, (rows, columns), dtype, bias)
            assert torch.equal(bits_with_one_nan(result), bits_with_one_nan(exactly))


# ── AVX2 alone ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def laptop() -> Iterator[None]:
    """AVX2 alone, in a process that has not warned yet."""
    gemm.warn_if_emulated.cache_clear()
    with pretending("avx2"):
        yield


def test_a_prepared_model_trains_by_float32_products_and_says_so_once(laptop):
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
