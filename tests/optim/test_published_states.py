"""Published 8-bit states, by their formulas: the values they keep, what they hold, and where ours are better and where not.

``benchmarks/stall.py`` and ``second_moments.py`` measure the same rows at full size, ``quality.py`` trains with them.
"""

from __future__ import annotations

import warnings
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from benchmark_modules import benchmark_module
from oracles import published_states
from oracles.adamw import AdamW64, Deviation, deviation
from oracles.flashoptim import FlashAdamW
from oracles.minifloat import Grid
from oracles.published_states import FLOAT32, MASTER, PUBLISHED, CodedAdamW, PublishedStates, dynamic_map
from stored_weight import StoredWeight

EVERY_ROW = pytest.mark.parametrize("name", PUBLISHED)
EXACT = PublishedStates("exact", "nothing is rounded", MASTER, FLOAT32, FLOAT32)
BETAS = (0.9, 0.999)


def normal(*shape: int, scale: float = 1.0, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def drifting(rms: float, steps: int, shape: tuple[int, int] = (16, 256)) -> list[Tensor]:
    """Gradients that push one way, with noise."""
    return [((0.5 + normal(*shape, seed=2 + step)) * rms / 1.25**0.5).bfloat16() for step in range(steps)]


def unequal(steps: int, shape: tuple[int, int] = (16, 256)) -> list[Tensor]:
    """Gradients whose scale differs from element to element, log-normally with sigma 2."""
    scale = 1e-3 * (2 * normal(*shape)).exp()
    return [(normal(*shape, seed=2 + step) * scale).bfloat16() for step in range(steps)]


def followed(one: CodedAdamW | StoredWeight, gradients: list[Tensor], start: Tensor, lr: float = 1e-4) -> Deviation:
    return deviation(one, AdamW64(start, lr, BETAS), gradients)


def checksum(x: Tensor) -> int:
    return zlib.crc32(x.contiguous().view(torch.uint8).numpy().tobytes())


# ── the codes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_optimizer_whose_states_are_not_rounded_is_adamw() -> None:
    start = normal(16, 64, scale=0.02)
    gradients = [normal(16, 64, scale=1e-2, seed=3 + step) for step in range(20)]
    decayed = CodedAdamW(EXACT, start, 1e-3, BETAS, weight_decay=0.1)
    found = deviation(decayed, AdamW64(start, 1e-3, BETAS, weight_decay=0.1), gradients)
    assert found.movement < 1e-5 and found.direction < 1e-5


def test_the_row_of_flashoptim_is_its_oracle_bit_for_bit() -> None:
    start = normal(16, 100, scale=0.02).bfloat16()
    row, oracle = CodedAdamW(PUBLISHED["flashoptim"], start, 1e-3), FlashAdamW(start, 1e-3)
    for g in drifting(1e-3, 20, (16, 100)):
        row.step(g)
        oracle.step(g)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(row, name), getattr(oracle, name)), name


# Of torchao 0.18.0 and, exact as on CUDA, of bitsandbytes 0.50.2's default backend; computed with those packages.
MAPS = {True: 454261483, False: 3899729807}
CODES = {
    "bitsandbytes": {True: 2871289322, False: 972065641},
    "torchao-8bit": {True: 807279234, False: 1456345392},
    "torchao-fp8": {True: 3052090462, False: 2477308750},
}


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_is_that_of_the_packages(signed: bool) -> None:
    assert checksum(dynamic_map(signed)) == MAPS[signed]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", CODES)
def test_block_codes_are_those_of_the_packages(name: str, signed: bool) -> None:
    place = torch.arange(4096)
    x = ((place * 7919 % 1009) - 504).float() / torch.exp2((place % 13).float())
    row = PUBLISHED[name]
    codes = row.exp_avg.encode(x)[0] if signed else row.exp_avg_sq.encode(x * x)[0]
    assert checksum(codes) == CODES[name][signed]


@pytest.mark.parametrize(
    ("name", "moment", "dtype"),
    [
        ("fp8-lm", "exp_avg", "float8_e4m3fn"),
        ("fp8-lm", "exp_avg_sq", "float16"),
        ("fp8-moments", "exp_avg_sq", "float8_e5m2"),
    ],
)
def test_codes_of_a_whole_tensor_are_the_nearest_to_its_scaled_values(name: str, moment: str, dtype: str) -> None:
    x = (normal(20, 20) * normal(20, 20, seed=2).exp() * 3e-4).square()
    codes, scale = getattr(PUBLISHED[name], moment).encode(x)
    grid = Grid(dtype)
    assert codes.dtype is getattr(torch, dtype) and scale.shape == ()
    amax, largest = float(x.max()), float(grid.max)
    if name == "fp8-lm":  # the power of two below, by which nothing overflows
        assert torch.frexp(scale).mantissa == 0.5 and largest / 2 < amax / float(scale) <= largest
        assert codes.float().flatten().tolist() == [
            grid.nearest(value / float(scale)) for value in x.flatten().tolist()
        ]
    else:
        assert float(codes.float().max()) == largest
        assert codes.float().flatten().tolist() == [grid.nearest(value) for value in (x / scale).flatten().tolist()]


@EVERY_ROW
def test_zeros_stay_zeros_or_next_to_it(name: str) -> None:
    row, zeros = PUBLISHED[name], torch.zeros(16, 256)
    for kept in (row.weight, row.exp_avg, row.exp_avg_sq):
        assert float(kept.there_and_back(zeros).abs().max()) == 0


def test_a_group_is_expanded_to_what_e4m3_spans() -> None:
    """Magnitudes from 1 to 4: their centre is 2, and log2(448² / 2) / log2 4 = 8.307 is 8.25 in sixteenths."""
    x = torch.tensor([1.0, -4.0, 2.0, 0.0]).repeat(32)
    codes, scale, power, centre = published_states.encode_expanded(x)
    assert (codes.dtype, power.item(), centre.item()) == (torch.float8_e4m3fn, 8.25, pytest.approx(2, rel=1e-6))
    assert scale.item() == pytest.approx(2**8.25 / 448, rel=1e-5)
    # 1 lies 16.5 binades below 4 there, two and a half subnormal steps from zero; 2 is half way between.
    assert codes[:4].float().tolist() == pytest.approx([448 / 2**16.5, -448, 448 / 2**8.25, 0], rel=2**-4, abs=2**-10)
    kept = published_states.EXPANDED.there_and_back(x)
    assert ((kept - x).abs() <= x.abs() * 2**-2 / 8.25).all()  # a relative error of a power is divided by it


def test_a_group_of_one_magnitude_is_not_expanded() -> None:
    x = torch.full((128,), 0.3)
    assert published_states.encode_expanded(x)[2].item() == 1
    assert torch.allclose(published_states.EXPANDED.there_and_back(x), x, rtol=2**-4)


def test_a_group_of_more_than_e4m3_spans_is_narrowed() -> None:
    x = torch.logspace(-12, 0, 128)
    power = published_states.encode_expanded(x)[2].item()
    kept = published_states.EXPANDED.there_and_back(x)
    assert power == 0.375 and (kept > 0).all()
    # The span is 12 decades: with codes of e4m3 alone all that lies under 2^-19 of the largest would be zero.
    assert float((kept / x).log2().abs().max()) < 2**-1 / 0.375


BYTES = {
    "fp8-moments": 10 + 8 / 65536,
    "fp8-lm": 9 + 12 / 65536,
    "coat": 10 + 2 * 12 / 128,
    "flashoptim": 7 + 2 * 2 / 32,
    "bitsandbytes": 10 + 8 / 256,
    "torchao-8bit": 10 + 8 / 256,
    "torchao-fp8": 10 + 8 / 256,
}


@EVERY_ROW
def test_bytes_are_counted_from_what_is_held(name: str) -> None:
    kept = CodedAdamW(PUBLISHED[name], normal(256, 256), 1e-3)
    assert kept.bytes_per_param() == PUBLISHED[name].bytes_per_param(256, 256) == BYTES[name]


def test_small_tensors_keep_float32_moments_where_the_packages_say_so() -> None:
    plain = {name: PUBLISHED[name].codes(4000) == (FLOAT32, FLOAT32) for name in PUBLISHED}
    assert {name for name, is_plain in plain.items() if is_plain} == {"bitsandbytes", "torchao-8bit", "torchao-fp8"}
    odd = {name for name in PUBLISHED if PUBLISHED[name].codes(5000) == (FLOAT32, FLOAT32)}
    assert odd == {"torchao-8bit", "torchao-fp8"}


# ── beside ours ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def movement(one: CodedAdamW | StoredWeight, start: Tensor, lr: float) -> float:
    return followed(one, drifting(0.11, 10) * 10, start, lr).movement


@pytest.mark.parametrize("name", ["fp8-lm", "flashoptim"])
def test_weights_cut_to_the_nearest_stall_at_more_bytes_than_compact(name: str) -> None:
    start = normal(16, 256).bfloat16()
    assert PUBLISHED[name].bytes_per_param(256, 256) > 7.1
    theirs, ours = CodedAdamW(PUBLISHED[name], start, 1e-5), StoredWeight("compact", start, 1e-5)
    assert ours.optimizer.bytes_per_param() < 7.1
    assert movement(theirs, start, 1e-5) > 0.5 > 3 * movement(ours, start, 1e-5)


@pytest.mark.parametrize("name", ["fp8-moments", "flashoptim", "bitsandbytes", "torchao-8bit", "torchao-fp8"])
def test_unequal_neighbours_are_lost_as_zeros_there_and_not_in_ours(name: str) -> None:
    start = normal(16, 256, scale=0.02).bfloat16()
    theirs = followed(CodedAdamW(PUBLISHED[name], start, 1e-4), unequal(60), start)
    ours = followed(StoredWeight("compact", start, 1e-4), unequal(60), start)
    assert theirs.zeros > 0.01 >= 10 * ours.zeros
    assert ours.direction < 0.3 * theirs.direction


def test_where_nothing_is_unusual_theirs_are_finer() -> None:
    """A spacing of ours is an eighth of a value, and a stochastic error is twice that of the nearest."""
    start, gradients = normal(16, 256, scale=0.02).bfloat16(), drifting(1e-2, 60)
    ours = followed(StoredWeight("compact", start, 1e-4), gradients, start)
    for name in ("flashoptim", "bitsandbytes", "torchao-8bit", "coat"):
        assert followed(CodedAdamW(PUBLISHED[name], start, 1e-4), gradients, start).direction < ours.direction, name


def test_coat_keeps_unequal_neighbours_closer_than_compact() -> None:
    """Its groups have a range of their own; second moments of ours end 2^-33 below the largest of their row."""
    start, gradients = normal(16, 256, scale=0.02).bfloat16(), unequal(60)
    theirs = followed(CodedAdamW(PUBLISHED["coat"], start, 1e-4), gradients, start)
    assert theirs.zeros == 0
    assert theirs.direction < followed(StoredWeight("compact", start, 1e-4), gradients, start).direction


def second_moments(name: str, steps: int, beta2: float = 0.999) -> float:
    """The mean of a row's second moments over exact ones: stationary gradients of one scale, begun at their limit."""
    kept, generator = PUBLISHED[name].exp_avg_sq, torch.Generator().manual_seed(7)
    exact = torch.ones(8, 256, dtype=torch.float64)
    found = kept.there_and_back(exact.float())
    for _ in range(steps):
        square = torch.randn(8, 256, generator=generator).square()
        exact = beta2 * exact + (1 - beta2) * square
        found = kept.there_and_back(beta2 * found + (1 - beta2) * square)
    return float((found / exact).mean())


@pytest.mark.parametrize("name", ["fp8-moments", "torchao-fp8"])
def test_equal_second_moments_in_fp8_follow_the_luckiest(name: str) -> None:
    """A change of a thousandth is rounded away, so codes stay, and values go where the scale goes: with the largest of all."""
    assert second_moments(name, 400) > 2
    assert 0.9 < second_moments("bitsandbytes", 400) < 1.15


# ── in training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@EVERY_ROW
def test_training_keeps_of_each_matrix_what_the_row_keeps(name: str, tmp_path: Path) -> None:
    """The hook's run is the row's own optimizer, but for roundings of float32."""
    training = benchmark_module("_published_training")
    start, folder = (
        normal(16, 256, scale=0.02).bfloat16().float(),
        tmp_path / f"published-{name}-beta0.999-lr0.001-seed0",
    )
    folder.mkdir()
    weight, gain = (torch.nn.Parameter(x.bfloat16()) for x in (start, torch.ones(8)))
    optimizer = ng.AdamW([weight, gain], lr=1e-3, weight_decay=0.1, storage="master", compile=False)
    row = CodedAdamW(PUBLISHED[name], start, 1e-3, weight_decay=0.1)
    gains = ng.AdamW(
        [torch.nn.Parameter(gain.detach().clone())], lr=1e-3, weight_decay=0.1, storage="master", compile=False
    )
    with warnings.catch_warnings(), training.keeping(f"published/{name}", folder):
        warnings.simplefilter("error", ng.optim.UpdateLossWarning)
        for g in drifting(1e-3, 3):
            weight.grad, gain.grad = g, torch.full((8,), 1e-3, dtype=torch.bfloat16)
            optimizer.step()
            row.step(g)
    for kept, wanted in (("weight", row.weight), ("exp_avg", row.exp_avg), ("exp_avg_sq", row.exp_avg_sq)):
        # Where float32 differs in its last digit, a code may be the neighbour.
        is_near = torch.isclose(optimizer.stored(weight, kept), wanted, rtol=1e-5, atol=1e-12)
        assert is_near.float().mean() > 0.98, kept
    handed = gains.param_groups[0]["params"][0]
    for _ in range(3):  # a vector is kept as master keeps it; the hook is gone
        handed.grad = torch.full((8,), 1e-3, dtype=torch.bfloat16)
        gains.step()
    assert torch.equal(optimizer.stored(gain, "exp_avg"), gains.stored(handed, "exp_avg"))
    found, figures = training.of_folder(folder)
    assert (found, figures["edq"]) == (f"published/{name}", None)
    assert figures["bytes_per_param"] == (4096 * PUBLISHED[name].bytes_per_param(16, 256) + 8 * 16) / 4104


def test_a_run_of_ours_is_not_touched(tmp_path: Path) -> None:
    training = benchmark_module("_published_training")
    weight = torch.nn.Parameter(normal(16, 256).bfloat16())
    optimizer = ng.AdamW([weight], lr=1e-3, storage="master", compile=False)
    with training.keeping("word", tmp_path):
        weight.grad = normal(16, 256).bfloat16()
        optimizer.step()
    exact = 0.1 * weight.grad.float()
    assert torch.allclose(optimizer.stored(weight, "exp_avg"), exact, rtol=1e-6)
    assert training.of_folder(tmp_path / "word-beta0.95-lr0.001-seed0") is None and not list(tmp_path.iterdir())
