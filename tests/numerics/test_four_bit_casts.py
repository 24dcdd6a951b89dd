"""Casts of the newer four-bit forms: the better of two scales, scales that undo shrinkage, rotations with other signs.

Each law is shown over all that can be drawn or over all blocks of a kind, against ml_dtypes' own rounding in float64.
"""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from covering import whole
from narrowgauge._torch.inductor import compile_any_shape
from narrowgauge.errors import FormatError
from narrowgauge.numerics.quantization import (
    ROTATION_SIZE,
    blocked,
    quantize,
    quantize_blocks,
    random_signs,
    random_words,
    rotate,
    sides_of,
)
from narrowgauge.spec import computes
from narrowgauge.spec.computes import COMPUTES, Cast
from tensors import gaussian

Doubles = NDArray[np.float64]

NVFP4, MXFP4 = Cast("float4_e2m1fn", "1x16", "float8_e4m3fn"), Cast("float4_e2m1fn", "1x32", "float8_e8m0fnu")
FOUR_OVER_SIX, TWO_SCALES = (replace(cast, fit="least-error") for cast in (NVFP4, MXFP4))
EDEN = replace(NVFP4, rounding="eden")
FORMS = [name for name in computes.names() if name.startswith(("nvfp4+", "mxfp4+"))]
CASTS = list(dict.fromkeys(cast for name in FORMS for cast in computes.named(name).casts.values()))
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


@pytest.mark.parametrize("cast", [FOUR_OVER_SIX, TWO_SCALES], ids=str)
def test_magnitudes_do_not_change_which_scale_is_better(cast: Cast) -> None:
    """Errors are compared in units in which their squares neither overflow nor vanish."""
    x = gaussian(32, 64)
    usual = quantize(x, cast)
    for power in (-90, -40, 40, 120):
        found = quantize(x * 2.0**power, cast)
        assert found.codes.equal(usual.codes)
    assert quantize(torch.zeros(4, 64), cast).values().count_nonzero() == 0
    bad = x.clone()
    bad[3, 5] = math.nan
    assert quantize(bad, cast).values()[3, :16].isnan().all()


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


def test_eden_draws_one_of_two_neighbouring_scales_and_rounds_values_to_nearest() -> None:
    block = gaussian(16, seed=3)
    drawn = every_draw(block, EDEN)
    kinds = drawn.unique(dim=0)
    assert len(kinds) == 2
    first, second = (kinds / kinds.abs().max(1, keepdim=True).values).unbind()
    assert torch.allclose(first, second, atol=1e-12) and len(every_draw(block, NVFP4).unique(dim=0)) == 1


def every_sign() -> Tensor:
    """All 65,536 choices of 16 signs."""
    return (torch.arange(1 << 16)[:, None] >> torch.arange(16) & 1) * 2.0 - 1


VECTORS = {
    "normal": gaussian(16, seed=0),
    "one outlier": torch.cat([torch.tensor([8.0]), gaussian(15, seed=1)]),
    "falling by halves": 2.0 ** -torch.arange(16.0),
    "a ramp": torch.arange(1.0, 17.0),
}


@pytest.mark.parametrize("name", VECTORS)
def test_over_all_signs_eden_is_off_by_what_a_rotation_of_16_leaves_and_shrinks_nothing(name: str) -> None:
    """The exact mean over the signs of its rotation, and over the scale by its expectation.

    EDEN is unbiased over all rotations. Hadamard's with random signs are fewer: what is left lies across the vector, is below
    1.5 % of it here, and none of it along.
    """
    x, signs = VECTORS[name], every_sign()
    turned = rotate(signs * x, 1, "hadamard-plain")
    back = rotate(torch.eye(16), 1, "hadamard-plain").double()
    amax = torch.full((1, 1), float(x.norm()))
    words = random_words(1 << 16, 16, KEY)
    found = quantize(turned, EDEN, words=words, amax=amax)
    along = (turned.double() * found.codes.double()).sum(1, keepdim=True)
    lengths = turned.double().square().sum(1, keepdim=True)
    # The scale's mean is what makes each projection as long as the vector.
    values = found.codes.double() * lengths / along
    mean = ((values @ back.t()) * signs).mean(0)
    off = mean - x.double()
    assert abs(off @ x.double()) < 1e-6 * lengths[0] and off.norm() < 0.015 * x.norm()
    # What is drawn has that mean, but for the luck of one draw for each choice of signs.
    drawn = ((found.values().double() @ back.t()) * signs).mean(0)
    assert (drawn - mean).norm() < 1e-3 * x.norm()


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


def test_drawn_signs_repeat_every_16_places_and_another_key_draws_others() -> None:
    signs = random_signs(48, 1, KEY)
    assert signs.shape == (1, 48) and signs.abs().eq(1).all() and random_signs(40, 0, KEY).equal(signs[:, :40].t())
    assert signs[:, :16].equal(signs[:, 16:32]) and signs[:, :16].equal(signs[:, 32:])
    keys = torch.arange(400, dtype=torch.int32) * 7919
    drawn = torch.cat([random_signs(16, 1, key) for key in keys])
    # Each place is as often + as -, and no two places go together: 400 draws, 5 standard deviations of a mean.
    assert drawn.mean(0).abs().max() < 5 / 20 and len(drawn.unique(dim=0)) > 390
    together = drawn.t() @ drawn / 400 - torch.eye(16)
    assert together.abs().max() < 5 / 20


# ── compiled, and what is refused ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dim", [1, pytest.param(0, marks=whole)])
def test_compiled_casts_give_the_same_bits(dim: int) -> None:
    """All in one function, with rows of wild ranges and values that are not finite."""
    casts = (FOUR_OVER_SIX, TWO_SCALES, EDEN)

    def cast_blocks(*given: Tensor) -> list[Tensor | None]:
        return [
            part
            for place, cast in enumerate(casts)
            for part in quantize_blocks(given[3 * place], cast, (given[3 * place + 1], given[3 * place + 2]))
        ]

    x = gaussian(384, 640) * torch.exp2(torch.arange(384) % 61 - 30.0)[:, None]
    given, words = list[Tensor](), random_words(384, 640, KEY)
    for cast in casts:
        high, wide = sides_of(cast, dim)
        source = x.clone()
        source[2], source[-1, -1] = 0.0, math.inf if cast.scale == "float8_e8m0fnu" else 1e6
        given += [blocked(source, (high, wide)), blocked(words[0], (high, 1)), blocked(words[1], (1, wide))]
    torch._dynamo.reset()
    compiled = compile_any_shape(cast_blocks, "cast_for_a_test")
    for one, other in zip(compiled(*given), cast_blocks(*given), strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert ((one == other) | (one.isnan() & other.isnan())).all()


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_a_code_times_the_scale_of_its_block_is_a_bfloat16(cast: Cast) -> None:
    """What the emulation multiplies is exact, so that it multiplies the numbers that a chip would."""
    for x in (gaussian(64, 64), gaussian(64, 64) * torch.exp2(torch.arange(64) - 32.0)):
        words = random_words(64, 64, KEY) if cast.rounding != "nearest" else None
        found = quantize(x, cast, words=words)
        values = found.operand()
        assert values.bfloat16().float().equal(values) and values.count_nonzero() > 0
        if found.inner is not None and cast.scale == "float8_e4m3fn":
            assert found.inner.to(torch.float8_e4m3fn).float().equal(found.inner)


def test_what_is_refused() -> None:
    x, words = gaussian(16, 32), random_words(16, 32, KEY)
    with pytest.raises(FormatError, match="the smaller of two random errors is biased"):
        quantize(x, replace(FOUR_OVER_SIX, rounding="stochastic"), words=words)
    with pytest.raises(FormatError, match="'eden' corrects e4m3 scales of blocks"):
        quantize(x, replace(MXFP4, rounding="eden"), words=words)
    with pytest.raises(FormatError, match="without random words"):
        quantize(x, EDEN)
    assert COMPUTES["nvfp4"].output.left == NVFP4 and COMPUTES["mxfp4"].output.left == MXFP4
