"""Records of block-scaled codes: unbiased by enumeration, within their bound, NaN where the input is not finite."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from narrowgauge.distributed import block_codes
from narrowgauge.distributed.block_codes import BLOCK_CODES, RECORD_VALUES, BlockCode
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.numerics.quantization import uniform

CODES = pytest.mark.parametrize("code", BLOCK_CODES.values(), ids=BLOCK_CODES)


def drawn(count: int, spread: int = 20, seed: int = 0) -> Tensor:
    """Values whose magnitudes spread over ``2**spread``, block by block."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(-spread, 1, (-(-count // 16), 1), generator=generator)
    return torch.ldexp(torch.randn(len(blocks), 16, generator=generator), blocks).view(-1)[:count]


def steps_of(code: BlockCode, x: Tensor) -> Tensor:
    """The documented bound of each value's error: its block's step, from the block's and the record's magnitude alone."""
    records = x.view(-1, RECORD_VALUES)
    powers = torch.ldexp(torch.ones(len(records)), torch.frexp(records.abs().amax(1)).exponent - 1)
    blocks = records.view(len(records), -1, code.block).abs().amax(2)
    steps = torch.maximum(blocks / code.cast.element.max * 1.125, powers[:, None] * 2.0**-17)
    return steps.repeat_interleave(code.block, 1).view(-1)


@CODES
def test_every_value_is_within_a_step(code: BlockCode) -> None:
    """For any key."""
    x = drawn(4 * RECORD_VALUES)
    for key in (1, 2, 3):
        error = (code.decode(code.encode(x, step_seed(5, key))) - x).abs()
        assert (error <= steps_of(code, x)).all()


@CODES
@pytest.mark.parametrize("small", [0.003, 0.3337, -0.56])
def test_expectation_by_enumeration(code: BlockCode, small: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all 65,536 random numbers that a place can get, the mean of what is decoded is the value, to 2^-16 of a step."""
    place = torch.arange(RECORD_VALUES)
    x = torch.where(place % 2 == 0, small, 1.0).repeat(RECORD_VALUES)
    found, numbers = [], []
    for swapped in (0, 1):
        # Each place of each record gets a number of its own; swapped, the neighbour's.
        words = (place[:, None] / RECORD_VALUES, (place ^ swapped)[None] / 65_536 + 2.0**-17)
        monkeypatch.setattr(block_codes, "_words", lambda *_, words=words: words)
        found.append(code.decode(code.encode(x, 0)).view(-1, RECORD_VALUES)[:, ::2])
        numbers.append(uniform(words)[:, ::2])
    assert torch.equal(torch.cat(numbers).flatten().sort().values * 65_536, torch.arange(65_536) + 0.5)
    bias = torch.cat(found).double().mean() - float(torch.tensor(small))
    assert abs(bias) <= float(steps_of(code, x)[0]) * 2.0**-16


@CODES
def test_decoded_values_are_exact_products(code: BlockCode) -> None:
    """The sum of decoded values is that of fractions, rounded once: the decoder itself rounds nothing."""
    x = drawn(RECORD_VALUES)
    record = code.encode(x, 9)[0]
    numbers = record[: code.code_bytes].tolist()
    if code.cast.element.bits == 4:
        numbers = [n & 15 for n in numbers] + [n >> 4 for n in numbers]
    half = 1 << (code.cast.element.bits - 1)
    signed = [n - 2 * half if n >= half else n for n in numbers]
    scales = [Fraction(v) for v in record[code.code_bytes : -1].view(torch.float8_e4m3fn).float().tolist()]
    power = Fraction(2) ** (int(record[-1]) - 127) / {8: 2**14, 4: 2**10}[code.cast.element.bits]
    exact = [n * scales[i // code.block] * power for i, n in enumerate(signed)]
    assert [Fraction(v) for v in code.decode(record[None]).tolist()] == exact


@CODES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**127])
def test_what_is_not_finite_spoils_its_record(code: BlockCode, bad: float) -> None:
    """All of it becomes NaN, and nothing else."""
    x = drawn(3 * RECORD_VALUES)
    x[300] = bad
    decoded = code.decode(code.encode(x, 3)).view(3, -1)
    assert decoded[1].isnan().all() and decoded[[0, 2]].isfinite().all()


# On some processors the compiler gives other bits; then the definition runs.
@pytest.mark.filterwarnings("default:.*to code that gives other bits")
def test_compiled_code_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And sums: one kernel for float32 and one for bfloat16."""
    code, x = next(iter(BLOCK_CODES.values())), drawn(8 * RECORD_VALUES)
    for values in (x, x.bfloat16()):
        eager = code.encode(values, 11)
        total = code.add_decoded(x, eager)
        with monkeypatch.context() as patch:
            patch.setattr("narrowgauge.compile.COMPILE_ELEMENTS", 0)
            assert torch.equal(code.encode(values, 11), eager)
            assert torch.equal(code.add_decoded(x, eager), total)
