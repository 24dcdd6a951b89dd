"""Gradients in 8 or 4 bits: pack a vector into records of bytes that ranks exchange, and unpack it.

A *record* holds 256 consecutive values: integer codes, an e4m3 scale per block, and one power of two. Each record thus has its
own range. The scale follows the block's amax within an eighth. Code times scale times power is exact in float32.

    256 int8 codes                 8 scales   1 exponent     265 bytes   0.2588 of float32's
    256 int4 codes, two a byte    16 scales   1 exponent     145 bytes   0.1416

Codes are rounded stochastically. So a sum over ranks and steps is unbiased, and no rounding error is kept between steps. Scales
are rounded up, so nothing saturates. :func:`narrowgauge.numerics.quantization.quantize_blocks` does the arithmetic.

Special values: a NaN or a magnitude of 2^127 or more makes all 256 values of its record NaN. An amax below 2^-100 counts as
2^-100 when the power is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from narrowgauge.compile import fused
from narrowgauge.numerics.quantization import TINY, blocked, quantize_blocks, words_of
from narrowgauge.numerics.rounding import bits_of, float_of, power_below
from narrowgauge.spec.computes import Cast
from narrowgauge.spec.formats import get_format

RECORD_VALUES = 256
_MANTISSA_BITS, _EXPONENT_MASK = 23, 0xFF


@dataclass(frozen=True)
class BlockCode:
    """Pack values into records by a stochastic cast to int8 or int4, in blocks with e4m3 scales."""

    cast: Cast

    @property
    def block(self) -> int:
        """Return the number of values that share a scale."""
        assert self.cast.block is not None
        return self.cast.block[1]

    @property
    def num_scales(self) -> int:
        """Return the number of scales in a record, one byte each."""
        return RECORD_VALUES // self.block

    @property
    def code_bytes(self) -> int:
        return RECORD_VALUES * self.cast.element.bits // 8

    @property
    def record_bytes(self) -> int:
        return self.code_bytes + self.num_scales + 1

    @property
    def largest(self) -> float:
        """Return the largest code times the largest scale."""
        return get_format("float8_e4m3fn").max * self.cast.element.max

    @property
    def unit(self) -> float:
        """Return the power of two by which the largest product is divided: 2^14 or 2^10.

        The quotient is above 2, so a record lies below it times the power of two at or below its amax.
        """
        return float(power_below(torch.tensor(self.largest / 2, dtype=torch.float32)))

    def encode(self, x: Tensor, key: int) -> Tensor:
        """Pack a floating-point vector of whole records into uint8 ``[records, record_bytes]``.

        Invariant: the result depends on the values, the key and each record's number alone. Compiled and eager bits are equal.
        Each decoded value is within one step. A step is the block's amax, divided by 127 (8 bits) or 7 (4 bits) and rounded up
        by at most an eighth; it is at least 2^-17 of the record's power. The mean over keys is the value, to 2^-16 of a step.

        ``key`` holds 32 well mixed bits, see :func:`narrowgauge.numerics.hashing.step_seed`. Use another key for each rank,
        step and vector, or equal gradients are rounded in the same direction.

        Example:
            >>> records = BLOCK_CODES["compressed8"].encode(torch.ones(256), key=1)
            >>> records.shape
            torch.Size([1, 265])
        """
        x, sides = x.detach().view(-1, RECORD_VALUES), (1, self.block)
        by_record, by_place = _words(len(x), key, x.device)
        codes, scales, powers, _ = fused(
            x.numel(), _encoding(self), blocked(x, sides),
            blocked(by_record, (1, 1)), blocked(by_place, sides),
        )  # fmt: skip
        records = x.new_empty(len(codes), self.record_bytes, dtype=torch.uint8)
        records[:, : self.code_bytes] = self._packed(codes.view(-1, RECORD_VALUES)).view(torch.uint8)
        records[:, self.code_bytes : -1] = scales.view(-1, self.num_scales).to(torch.float8_e4m3fn).view(torch.uint8)
        records[:, -1] = bits_of(powers) >> _MANTISSA_BITS
        return records

    def add_decoded(self, total: Tensor, records: Tensor) -> Tensor:
        """Return a new ``total``, float32 ``[values]``, plus the values of records. Each element is rounded once."""
        shape = (len(records), 1, self.num_scales, self.block)
        codes = self._unpacked(records[:, : self.code_bytes].contiguous().view(torch.int8)).view(shape)
        scales = records[:, self.code_bytes : -1].contiguous().view(torch.float8_e4m3fn).float()
        powers = float_of(records[:, -1:].to(torch.int32) << _MANTISSA_BITS)
        steps = scales * (powers / self.unit)
        added: Tensor = fused(total.numel(), _add_codes, total.view(shape), codes, steps.view(*shape[:-1], 1))
        return added.view(-1)

    def decode(self, records: Tensor) -> Tensor:
        """Return the values of records, float32."""
        zeros = torch.zeros(len(records) * RECORD_VALUES, dtype=torch.float32, device=records.device)
        return self.add_decoded(zeros, records)

    def _packed(self, codes: Tensor) -> Tensor:
        if self.cast.element.bits == 8:
            return codes
        low, high = codes[:, : RECORD_VALUES // 2], codes[:, RECORD_VALUES // 2 :]
        return (low & 15) | (high << 4)

    def _unpacked(self, codes: Tensor) -> Tensor:
        if self.cast.element.bits == 8:
            return codes
        return torch.cat([(codes << 4) >> 4, codes >> 4], 1)


def _words(num_records: int, key: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random words for each record and for each place in a record."""
    counters = [torch.arange(count, dtype=torch.int32, device=device) for count in (num_records, RECORD_VALUES)]
    # Not torch.tensor: on CUDA it waits for the copy.
    seed, first = (torch.full((), value, dtype=torch.int32, device=device) for value in (key, 0))
    return words_of(counters[0], counters[1], seed, first)


@lru_cache(None)
def _encoding(code: BlockCode) -> Any:
    """Return the function that computes a record's codes, scales and power. Views inside it would prevent vectorized loops."""
    cast, largest_scaled = code.cast, code.largest / code.unit

    def encode_blocks(blocks: Tensor, by_record: Tensor, by_place: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        largest = blocks.abs().amax((1, 3)).amax(1).float().clamp_min(TINY)
        power = power_below(largest)
        codes, scales, inverse, _ = quantize_blocks(blocks, cast, (by_record, by_place), power * largest_scaled)
        return codes.to(torch.int8), scales, power, inverse

    return encode_blocks


def _add_codes(total: Tensor, codes: Tensor, steps: Tensor) -> Tensor:
    return total + codes.float() * steps


BLOCK_CODES: dict[str, BlockCode] = {
    "compressed8": BlockCode(Cast("int8", "1x32", "float8_e4m3fn", "stochastic")),
    "compressed4": BlockCode(Cast("int4", "1x16", "float8_e4m3fn", "stochastic")),
}
"""By the name of the reduction."""
