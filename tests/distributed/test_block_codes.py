"""Records of block-scaled 8-bit codes: unbiased by enumeration, within their bound, NaN where the input is not finite."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from narrowgauge.distributed import block_codes
from narrowgauge.distributed.block_codes import BLOCK, RECORD_VALUES, add_decoded, decode, encode
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.numerics.quantization import uniform


def drawn(count: int, spread: int = 20, seed: int = 0) -> Tensor:
    """Values whose magnitudes spread over ``2**spread``, block by block."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(-spread, 1, (-(-count // 16), 1), generator=generator)
    return torch.ldexp(torch.randn(len(blocks), 16, generator=generator), blocks).view(-1)[:count]


def steps_of(x: Tensor) -> Tensor:
    """The documented bound of each value's error: its block's step, from the block's and the record's magnitude alone."""
    records = x.view(-1, RECORD_VALUES)
    powers = torch.ldexp(torch.ones(len(records)), torch.frexp(records.abs().amax(1)).exponent - 1)
    blocks = records.view(len(records), -1, BLOCK).abs().amax(2)
    steps = torch.maximum(blocks / 127 * 1.125, powers[:, None] * 2.0**-17)
    return steps.repeat_interleave(BLOCK, 1).view(-1)


def test_every_value_is_within_a_step() -> None:
    """For any key."""
    x = drawn(4 * RECORD_VALUES)
    for key in (1, 2, 3):
        error = (decode(encode(x, step_seed(5, key))) - x).abs()
        assert (error <= steps_of(x)).all()


@pytest.mark.parametrize("small", [0.003, 0.3337, -0.56])
def test_expectation_by_enumeration(small: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all 65,536 random numbers that a place can get, the mean of what is decoded is the value, to 2^-16 of a step."""
    place = torch.arange(RECORD_VALUES)
    x = torch.where(place % 2 == 0, small, 1.0).repeat(RECORD_VALUES)
    found, numbers = [], []
    for swapped in (0, 1):
        # Each place of each record gets a number of its own; swapped, the neighbour's.
        words = (place[:, None] / RECORD_VALUES, (place ^ swapped)[None] / 65_536 + 2.0**-17)
        monkeypatch.setattr(block_codes, "_words", lambda *_, words=words: words)
        found.append(decode(encode(x, 0)).view(-1, RECORD_VALUES)[:, ::2])
        numbers.append(uniform(words)[:, ::2])
    assert torch.equal(torch.cat(numbers).flatten().sort().values * 65_536, torch.arange(65_536) + 0.5)
    bias = torch.cat(found).double().mean() - float(torch.tensor(small))
    assert abs(bias) <= float(steps_of(x)[0]) * 2.0**-16


def test_decoded_values_are_exact_products() -> None:
    """The sum of decoded values is that of fractions, rounded once: the decoder itself rounds nothing."""
    x = drawn(RECORD_VALUES)
    record = encode(x, 9)[0]
    signed = record[:RECORD_VALUES].view(torch.int8).tolist()
    scales = [Fraction(v) for v in record[RECORD_VALUES:-1].view(torch.float8_e4m3fn).float().tolist()]
    power = Fraction(2) ** (int(record[-1]) - 127) / 2**14
    exact = [n * scales[i // BLOCK] * power for i, n in enumerate(signed)]
    assert [Fraction(v) for v in decode(record[None]).tolist()] == exact


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**127])
def test_what_is_not_finite_spoils_its_record(bad: float) -> None:
    """All of it becomes NaN, and nothing else."""
    x = drawn(3 * RECORD_VALUES)
    x[300] = bad
    decoded = decode(encode(x, 3)).view(3, -1)
    assert decoded[1].isnan().all() and decoded[[0, 2]].isfinite().all()


# On some processors the compiler gives other bits; then the definition runs.
@pytest.mark.filterwarnings("default:.*to code that gives other bits")
def test_compiled_code_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And sums: one kernel for float32 and one for bfloat16."""
    x = drawn(8 * RECORD_VALUES)
    for values in (x, x.bfloat16()):
        eager = encode(values, 11)
        total = add_decoded(x, eager)
        with monkeypatch.context() as patch:
            patch.setattr("narrowgauge.compile.COMPILE_ELEMENTS", 0)
            assert torch.equal(encode(values, 11), eager)
            assert torch.equal(add_decoded(x, eager), total)
