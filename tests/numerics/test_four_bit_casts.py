"""Casts of the newer four-bit forms: the better of two scales, scales that undo shrinkage, rotations with other signs.

Each law is shown over all that can be drawn or over all blocks of a kind, against ml_dtypes' own rounding in float64.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowgauge.numerics.quantization import (
    ROTATION_SIZE,
    quantize,
    quantize_blocks,
    random_signs,
    rotate,
)
from narrowgauge.spec import computes
from narrowgauge.spec.computes import Cast
from tensors import gaussian

Doubles = NDArray[np.float64]

NVFP4, MXFP4 = Cast("float4_e2m1fn", "1x16", "float8_e4m3fn"), Cast("float4_e2m1fn", "1x32", "float8_e8m0fnu")
FOUR_OVER_SIX, TWO_SCALES = (replace(cast, fit="least-error") for cast in (NVFP4, MXFP4))
EDEN = replace(NVFP4, rounding="eden")
FORMS = [name for name in computes.VARIANTS if name.startswith(("nvfp4+", "mxfp4+"))]
CASTS = list(dict.fromkeys(cast for name in FORMS for cast in computes.VARIANTS[name].casts.values()))
# Each number that a word of a row and one of a column can add up to.
EVERY_UNIFORM = (torch.arange(1 << 16).float() + 0.5) * 2.0**-16
KEY = torch.tensor(-77, dtype=torch.int32)


def e2m1(x: Doubles) -> Doubles:
    return np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)


def errors_under(blocks: Doubles, scales: Doubles) -> Doubles:
    """The squared error of each block under a scale, worked out in float64."""
    return np.square(e2m1(blocks / scales[:, None]) * scales[:, None] - blocks).sum(1)


# ── the better of two scales ────────────────────────────────────────────────────────────────────────────────────────


def small_blocks(size: int) -> Tensor:
    """Blocks of ``size`` with every pair of 65 magnitudes beside each of 24 largest ones; the rest repeats the first."""
    largest = 6 * (1 + torch.arange(24) / 24)
    parts = torch.linspace(0, 1, 65)
    pairs = torch.cartesian_prod(largest, parts, parts)
    x = torch.stack([pairs[:, 0], pairs[:, 0] * pairs[:, 1], -pairs[:, 0] * pairs[:, 2]], 1)
    return torch.cat([x, x[:, 1:2].expand(-1, size - 3)], 1).contiguous()


def test_four_over_six_takes_the_scale_with_the_smaller_error_in_every_small_block() -> None:
    """To 6 or to 4, both under the tensor's own scale, which leaves room for a half more in the block's."""
    x = small_blocks(16)
    found = quantize(x, FOUR_OVER_SIX)
    assert found.outer is not None and found.inner is not None
    blocks, whole = x.double().numpy(), found.outer.double().item()
    assert whole == pytest.approx(float(x.abs().max()) / (256 * 6), rel=1e-6)
    largest = np.abs(blocks).max(1)
    both = [(largest / end / whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * whole for end in (6, 4)]
    of_six, of_four = (errors_under(blocks, scales) for scales in both)
    mine = (found.values().double() - x.double()).square().sum(1).numpy()
    assert (mine <= np.minimum(of_six, of_four) * (1 + 1e-4) + 1e-9).all()
    # Both are taken, and it pays: by more than a tenth of the error over all these blocks.
    took_four = np.isclose(found.inner[:, 0].double().numpy() * whole, both[1])
    assert 0.2 < took_four.mean() < 0.8 and mine.sum() < 0.9 * of_six.sum()


def test_the_better_of_two_powers_of_two_has_the_smaller_error_in_every_small_block() -> None:
    x = small_blocks(32)
    found = quantize(x, TWO_SCALES)
    assert found.inner is not None
    blocks = x.double().numpy()
    ocp = np.exp2(np.floor(np.log2(np.abs(blocks).max(1))) - 2)
    errors = [errors_under(blocks, ocp * factor) for factor in (1, 2)]
    mine = (found.values().double() - x.double()).square().sum(1).numpy()
    assert (mine <= np.minimum(*errors) * (1 + 1e-4) + 1e-9).all()
    taken = found.inner[:, 0].double().numpy() / ocp
    assert (
        set(taken) == {1, 2} and (mine <= errors[0] * (1 + 1e-4) + 1e-9).all() and mine.sum() < 0.97 * errors[0].sum()
    )


# ── scales that undo shrinkage ──────────────────────────────────────────────────────────────────────────────────────


def every_draw(block: Tensor, cast: Cast) -> Tensor:
    """A block of 16 cast with each uniform number that can be drawn: float64 ``[65536, 16]``."""
    rows = block.expand(1 << 16, 16).contiguous().view(-1, 1, 1, 16)
    words = ((EVERY_UNIFORM - 2.0**-17).view(-1, 1, 1, 1), torch.full((1, 1, 1, 16), 2.0**-17))
    codes, inner, _, outer = quantize_blocks(rows, cast, words, torch.full((1, 1), 9.0))
    assert outer is not None
    return (codes.double() * inner.double() * outer.view(-1, 1, 1, 1).double()).view(-1, 16)


def test_eden_is_as_long_as_its_block_on_average_and_rounding_to_nearest_is_not() -> None:
    """Not sampled: the mean over every number that can be drawn, of the projection of the result on the block."""
    shrinkage = []
    for seed in range(24):
        block = gaussian(16, seed=seed) * (0.01 + seed / 12)
        length = block.double().square().sum()
        mean = (every_draw(block, EDEN).mean(0) @ block.double()) / length
        assert abs(mean - 1) < 2e-5, seed
        shrinkage.append(float((every_draw(block, NVFP4)[0] @ block.double()) / length) - 1)
    # E2M1 under nearest rounding shrinks on average, by 0.3 to 0.8 % in blocks of 16 normal numbers.
    assert -0.015 < np.mean(shrinkage) < -0.002


# ── rotations ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rotation", ["hadamard", "hadamard-plain", "hadamard-drawn"])
def test_every_rotation_is_orthogonal_and_leaves_products_as_they_are(rotation: str, dim: int) -> None:
    """Exactly: entries are ± 1/4, and the products are of small integers."""
    kind: computes.Rotation = rotation  # type: ignore[assignment]
    matrix = rotate(torch.eye(ROTATION_SIZE), 1, kind)
    assert matrix.abs().eq(0.25).all() and (matrix @ matrix.t()).equal(torch.eye(ROTATION_SIZE))
    if rotation != "hadamard":
        hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
        assert matrix.equal(hadamard / 4)
    signs = random_signs(48, dim, KEY) if rotation == "hadamard-drawn" else torch.ones(1, 1)
    a, b = (torch.randint(-8, 9, (24, 48), generator=torch.Generator().manual_seed(seed)).float() for seed in (0, 1))
    lying = [v if dim == 1 else v.t().contiguous() for v in (a, b)]
    one, two = (rotate(v * signs, dim, kind) for v in lying)
    assert not one.equal(lying[0])
    assert (one @ two.t() if dim == 1 else one.t() @ two).equal(a @ b.t())
