"""Gradients in 8 bits: pack a vector into records of bytes that ranks exchange, and unpack it.

A *record* holds 256 consecutive values: int8 codes, an e4m3 scale for each block of 32, and one power of two. Each record thus
has its own range. The scale follows the block's amax within an eighth. Code times scale times power is exact in float32.

    256 int8 codes     8 scales   1 exponent     265 bytes   0.2588 of float32's

Codes are rounded stochastically. So a sum over ranks and steps is unbiased, and no rounding error is kept between steps. Scales
are rounded up, so nothing saturates. :func:`narrowgauge.numerics.quantization.quantize_blocks` does the arithmetic.

Special values: a NaN or a magnitude of 2^127 or more makes all 256 values of its record NaN. An amax below 2^-100 counts as
2^-100 when the power is chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.compile import fused
from narrowgauge.numerics.quantization import TINY, blocked, quantize_blocks, words_of
from narrowgauge.numerics.rounding import bits_of, float_of, power_below
from narrowgauge.spec.computes import Cast

CAST = Cast("int8", "1x32", "float8_e4m3fn", "stochastic")
BLOCK, RECORD_VALUES = 32, 256
NUM_SCALES = RECORD_VALUES // BLOCK
RECORD_BYTES = RECORD_VALUES + NUM_SCALES + 1
_LARGEST = 448.0 * 127  # the largest scale times the largest code
# A power of two. The largest product over it is above 2, so a record lies below that times the power of two at or below its amax.
_UNIT = 2.0**14
_MANTISSA_BITS = 23


def encode(x: Tensor, key: int) -> Tensor:
    """Pack a floating-point vector of whole records into uint8 ``[records, RECORD_BYTES]``.

    Invariant: the result depends on the values, the key and each record's number alone. Compiled and eager bits are equal.
    Each decoded value is within one step. A step is the block's amax, divided by 127 and rounded up by at most an eighth.
    It is at least 2^-17 of the record's power. The mean over keys is the value, to 2^-16 of a step.

    ``key`` holds 32 well mixed bits, see :func:`narrowgauge.numerics.hashing.step_seed`. Use another key for each rank, step
    and vector, or equal gradients are rounded in the same direction.

    Example:
        >>> encode(torch.ones(256), key=1).shape
        torch.Size([1, 265])
    """
    x, sides = x.detach().view(-1, RECORD_VALUES), (1, BLOCK)
    by_record, by_place = _words(len(x), key, x.device)
    codes, scales, powers, _ = fused(
        x.numel(), _encode_blocks, blocked(x, sides), blocked(by_record, (1, 1)), blocked(by_place, sides)
    )
    records = x.new_empty(len(codes), RECORD_BYTES, dtype=torch.uint8)
    records[:, :RECORD_VALUES] = codes.view(-1, RECORD_VALUES).view(torch.uint8)
    records[:, RECORD_VALUES:-1] = scales.view(-1, NUM_SCALES).to(torch.float8_e4m3fn).view(torch.uint8)
    records[:, -1] = bits_of(powers) >> _MANTISSA_BITS
    return records


def add_decoded(total: Tensor, records: Tensor) -> Tensor:
    """Return a new ``total``, float32 ``[values]``, plus the values of records. Each element is rounded once."""
    shape = (len(records), 1, NUM_SCALES, BLOCK)
    codes = records[:, :RECORD_VALUES].contiguous().view(torch.int8).view(shape)
    scales = records[:, RECORD_VALUES:-1].contiguous().view(torch.float8_e4m3fn).float()
    powers = float_of(records[:, -1:].to(torch.int32) << _MANTISSA_BITS)
    steps = scales * (powers / _UNIT)
    added: Tensor = fused(total.numel(), _add_codes, total.view(shape), codes, steps.view(*shape[:-1], 1))
    return added.view(-1)


def decode(records: Tensor) -> Tensor:
    """Return the values of records, float32."""
    zeros = torch.zeros(len(records) * RECORD_VALUES, dtype=torch.float32, device=records.device)
    return add_decoded(zeros, records)


def _words(num_records: int, key: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random words for each record and for each place in a record."""
    counters = [torch.arange(count, dtype=torch.int32, device=device) for count in (num_records, RECORD_VALUES)]
    # Not torch.tensor: on CUDA it waits for the copy.
    seed, first = (torch.full((), value, dtype=torch.int32, device=device) for value in (key, 0))
    return words_of(counters[0], counters[1], seed, first)


def _encode_blocks(blocks: Tensor, by_record: Tensor, by_place: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute a record's codes, scales and power. Views in here would prevent vectorized loops."""
    largest = blocks.abs().amax((1, 3)).amax(1).float().clamp_min(TINY)
    power = power_below(largest)
    codes, scales, inverse, _ = quantize_blocks(blocks, CAST, (by_record, by_place), power * (_LARGEST / _UNIT))
    return codes.to(torch.int8), scales, power, inverse


def _add_codes(total: Tensor, codes: Tensor, steps: Tensor) -> Tensor:
    return total + codes.float() * steps
