"""Sums of micro-batch gradients: each row's bits, its bound, its bytes, and what no sum may do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from covering import whole
from narrowgauge.errors import RecipeError
from narrowgauge.machine.cpp_compiler import compiler_missing
from narrowgauge.numerics.rounding import step_seed
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.numerics.summation import CHUNK
from narrowgauge.optim import accumulation, codec
from narrowgauge.optim.accumulation import (
    ACCUMULATIONS,
    ADDITIONS,
    AccumulationWarning,
    GradientAccumulator,
    add_kahan,
    add_stochastic,
    backward_in_parts,
    in_words,
)
from narrowgauge.optim.compilation import normal_words
from narrowgauge.spec.sums import Accumulation, naive_limit
from oracles import accumulation as oracle
from tensors import bits

ROWS = tuple(ACCUMULATIONS)
OURS = tuple(name for name, row in ACCUMULATIONS.items() if row.planes)
SCALED = tuple(name for name, row in ACCUMULATIONS.items() if row.code is not None)
"""Rows of 8 bits: the first gradient is rounded too, and one that is not finite spoils the scale of its tensor."""
NUMBERS = tuple(name for name in ROWS if name not in SCALED)
SHAPES = [(), (0,), (1,), (7,), (64,), (5, 9), (3, 4, 6)]


def gradients(shape: tuple[int, ...], k: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """``k`` gradients whose magnitudes spread over twelve binades."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-6, 6, (k, *shape), generator=generator)
    return list((torch.randn((k, *shape), generator=generator) * 2.0**spread).to(dtype).unbind(0))


def summed(row: str, parts: Sequence[Tensor], **options: object) -> Tensor:
    """The finished gradient of one parameter whose micro-batch gradients are ``parts``."""
    parameter = torch.nn.Parameter(torch.zeros_like(parts[0]))
    accumulator = GradientAccumulator([parameter], row, **options)  # type: ignore[arg-type]
    for part in parts:
        if row == "bfloat16" and parameter.grad is not None:
            parameter.grad += part  # as autograd does
        else:
            parameter.grad = part.clone(memory_format=torch.preserve_format)
        accumulator.accumulate()
    accumulator.finish()
    assert parameter.grad is not None
    return parameter.grad


def singles(parts: Sequence[Tensor]) -> list[oracle.Singles]:
    return [part.float().reshape(-1).numpy() for part in parts]


# ── what each row sums to ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("row", "expected"),
    [("bfloat16", 256.0), ("float32", 1000.0), ("kahan", 1000.0), ("bfloat16-stochastic", None), ("float8_e5m2", 16.0)],
)
def test_a_thousand_ones(row: str, expected: float | None) -> None:
    """Through autograd itself. The stochastic sum of one value is one random number: here it only has to go on."""
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    accumulator = GradientAccumulator([weight], row)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccumulationWarning)
        for _ in range(1000):
            weight.sum().backward()
            accumulator.accumulate()
    accumulator.finish()
    assert weight.grad is not None
    assert weight.grad.tolist() == [expected] * 4 if expected else 700 < float(weight.grad[0]) < 1300


def test_stochastic_sums_of_a_thousand_are_right_on_average() -> None:
    """128 constants from 1 to 2 with four seeds. A sum of k equal values strays by 2^-8 sqrt(k^3 / 3) of one at most,
    7.1 % of the sum; the mean of 512 such by 0.32 %. Five times that is allowed."""
    constants = (1 + torch.arange(128) / 128).bfloat16()
    ratios = [summed("bfloat16-stochastic", [constants] * 1000, seed=s).float() / (1000 * constants) for s in range(4)]
    table = torch.stack(ratios)
    assert abs(float(table.mean()) - 1) < 5 * 0.0713 / math.sqrt(512)
    assert 0.01 < float(table.std()) < 0.0713
    assert len(table.unique()) > 100  # walks of their own


@pytest.mark.parametrize(
    ("total", "gradient"), [(256.0, 1.0), (256.0, -0.125), (1.0, 2.0**-12), (-3.0, 2**-7 + 2**-13)]
)
def test_one_stochastic_addition_is_unbiased_over_seeds(total: float, gradient: float) -> None:
    """|z| < 5 over 2^16 seeds: one false failure in 1.7 million."""
    seeds = torch.arange(1 << 16, dtype=torch.int32) * 0x9E3779B
    (result,) = add_stochastic(torch.tensor([gradient]), [torch.tensor([total])], seeds)
    values = result.view(torch.float32).double()
    assert len(values.unique()) == 2
    deviation = float(values.std()) / math.sqrt(len(seeds))
    assert abs(float(values.mean()) - (total + gradient)) < 5 * deviation


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("k", [1, 2, 9])
def test_sums_are_those_written_down(shape: tuple[int, ...], k: int) -> None:
    parts = gradients(shape, k)
    exact = singles(parts)
    high, low = oracle.kahan_sum(exact)
    seeds = [step_seed(step_seed(11, 0) % 2**32, j) for j in range(k)]
    expected = {
        "float32": oracle.nearest(oracle.float32_sum(exact)),
        "kahan": oracle.nearest(high + low),
        "bfloat16-stochastic": oracle.stochastic_sum(exact, seeds),
    }
    for row, values in expected.items():
        assert torch.equal(summed(row, parts, seed=11).float(), torch.from_numpy(values).reshape(shape)), row


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("k", [1, 2, 3, 16, 100])
@pytest.mark.parametrize("signs", ["one", "both"])
def test_sums_stay_within_their_bounds(row: str, k: int, signs: str) -> None:
    parts = [part.abs() if signs == "one" else part for part in gradients((600,), k, seed=k)]
    exact = torch.stack(parts).double().sum(0)  # 20 binades and 100 addends: a float64 holds that
    magnitudes = torch.stack(parts).double().abs().sum(0)
    last = 2.0**-8 * exact.abs() if ACCUMULATIONS[row].addition < 2.0**-9 else 0.0
    allowed = ACCUMULATIONS[row].bound(k) * magnitudes * (1 + 2.0**-8) + last
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccumulationWarning)
        error = (summed(row, parts).double() - exact).abs()
    assert (error <= allowed).all()


def test_before_the_last_rounding_the_bounds_tell_the_rows_apart() -> None:
    """The planes themselves, of same-signed sums: each row keeps its own bound and breaks that of the next better one."""
    k, worst = 100, {}
    parts = [part.abs() for part in gradients((20_000,), k)]
    exact = torch.stack(parts).double().sum(0)
    for row in OURS:
        parameter = torch.nn.Parameter(torch.zeros(20_000, dtype=torch.bfloat16))
        accumulator = GradientAccumulator([parameter], row, compile=False)
        for part in parts:
            parameter.grad = part.clone()
            accumulator.accumulate()
        kept = torch.stack([plane.double() for plane in accumulator._planes[parameter]]).sum(0)
        worst[row] = float(((kept - exact).abs() / exact).max())
        assert worst[row] <= ACCUMULATIONS[row].bound(k)
    assert worst["kahan"] > ACCUMULATIONS["float32"].bound(k)
    assert worst["bfloat16-stochastic"] > ACCUMULATIONS["kahan"].bound(k)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccumulationWarning)
        naive = summed("bfloat16", parts).double()
    assert float(((naive - exact).abs() / exact).mean()) > 0.01


def test_float16_sums_are_rounded_once_ties_away_from_zero() -> None:
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[torch.isfinite(every)]
    assert torch.equal(bits(summed("float32", [finite])), bits(finite))  # subnormals and -0 included
    assert torch.equal(bits(summed("float32", [-finite])), bits(-finite))
    parts = gradients((3000,), 7, dtype=torch.float16)
    total = oracle.float32_sum(singles(parts))
    expected = torch.from_numpy(oracle.nearest(total, dropped=13).astype(np.float16))
    assert torch.equal(bits(summed("float32", parts)), bits(expected))
    tie = [torch.tensor([1.0, -1.0], dtype=torch.float16), torch.tensor([2.0**-11, -(2.0**-11)], dtype=torch.float16)]
    assert summed("float32", tie).tolist() == [1 + 2.0**-10, -1 - 2.0**-10]
    large = [torch.tensor([65504.0, 65504.0], dtype=torch.float16), torch.tensor([15.0, 16.0], dtype=torch.float16)]
    assert summed("float32", large).tolist() == [65504.0, math.inf]
    # What autograd's float16 sum loses on the way, the float32 sum keeps.
    back = [torch.tensor([v], dtype=torch.float16) for v in (60000.0, 60000.0, -60000.0)]
    assert summed("float32", back).tolist() == [60000.0]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("k", [4, 8])
def test_k_micro_batches_equal_one_batch_within_the_bound(row: str, k: int) -> None:
    """A real layer: each micro-batch's gradient is rounded to bfloat16 first, 2^-8 of its magnitude."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(64, 24, generator=generator).bfloat16()
    targets = torch.randn(64, 16, generator=generator).bfloat16()
    weight = torch.nn.Parameter((torch.randn(16, 24, generator=generator) * 0.1).bfloat16())
    slopes = ((inputs @ weight.detach().t()).float() - targets.float()).bfloat16()
    pieces = [(s.double().t() @ x.double()) for s, x in zip(slopes.chunk(k), inputs.chunk(k), strict=True)]

    def share(s: Tensor, x: Tensor) -> Tensor:
        return (torch.nn.functional.linear(x, weight) * s).float().sum()

    accumulator = GradientAccumulator([weight], row, num_micro_batches=k)
    backward_in_parts((share(s, x) for s, x in zip(slopes.chunk(k), inputs.chunk(k), strict=True)), accumulator)
    assert weight.grad is not None
    exact, parts = torch.stack(pieces).sum(0), torch.stack(pieces).abs().sum(0)
    # 64 products summed in float32 inside the matmul come before all of that.
    products = slopes.double().abs().t() @ inputs.double().abs()
    allowed = 2.0**-8 * parts + ACCUMULATIONS[row].bound(k) * parts * 1.01 + 2.0**-8 * exact.abs() + 2.0**-17 * products
    found = weight.grad.double()
    assert ((found - exact).abs() <= allowed).all()
    # One micro-batch left out is far outside.
    assert row in SCALED or ((found - exact + pieces[0]).abs() > allowed).double().mean() > 0.5


# ── laws ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("row", NUMBERS)
def test_one_micro_batch_comes_back_bit_for_bit(row: str) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = every[~every.isnan()]
    result = summed(row, [numbers])
    if row == "kahan":  # its second plane is +0
        assert torch.equal(result, numbers)
    else:
        assert torch.equal(bits(result), bits(numbers))


@pytest.mark.parametrize("row", OURS)
def test_places_shapes_and_chunks_do_not_enter(row: str) -> None:
    parts = gradients((260, 131), 4)  # more than a chunk, an odd number of columns
    whole = summed(row, parts, seed=3, compile=False)
    crossed = [part.t().contiguous().t() for part in parts]
    assert not crossed[0].is_contiguous()
    assert torch.equal(bits(summed(row, crossed, seed=3)), bits(whole))
    for rows in ([1, 100, 159], [37] * 7 + [1]):
        cut = [summed(row, [p.split(rows)[j] for p in parts], seed=3) for j in range(len(rows))]
        assert torch.equal(bits(torch.cat(cut)), bits(whole))
    order = torch.randperm(260, generator=torch.Generator().manual_seed(0))
    assert torch.equal(bits(summed(row, [p[order] for p in parts], seed=3)), bits(whole[order]))
    odd = torch.zeros(1 + whole.numel(), dtype=torch.bfloat16)  # begins between two words

    def moved(part: Tensor) -> Tensor:
        place = odd.clone()[1:]
        place.copy_(part.reshape(-1))
        return place

    assert torch.equal(bits(summed(row, [moved(p) for p in parts], seed=3)), bits(whole.reshape(-1)))


@pytest.mark.parametrize("row", OURS)
@pytest.mark.parametrize("exponent", [-40, 17])
def test_gradients_scaled_by_a_power_of_two_give_the_scaled_sum(row: str, exponent: int) -> None:
    """So the loss scale has no say in the rounding."""
    parts = gradients((5000,), 6)
    scaled = summed(row, [part * 2.0**exponent for part in parts], seed=1)
    assert torch.equal(bits(scaled), bits(summed(row, parts, seed=1) * 2.0**exponent))
    assert torch.equal(summed(row, [-part for part in parts], seed=1), -summed(row, parts, seed=1))


@whole
def test_compiled_sums_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both additions as one row of three planes, since each compilation takes seconds."""

    def both(gradient: Tensor, planes: Sequence[Tensor], seed: Tensor) -> list[Tensor]:
        return [*add_stochastic(gradient, planes[:1], seed), *add_kahan(gradient, planes[1:], seed)]

    monkeypatch.setitem(accumulation.ADDITIONS, "both", both)
    monkeypatch.setitem(ACCUMULATIONS, "both", replace(ACCUMULATIONS["kahan"], name="both", planes=("bfloat16",) * 3))
    parts = gradients((3001, 2), 5)
    bad = torch.tensor([math.inf, -math.inf, math.nan, 3.38e38, -3.38e38, 1e-40, -0.0, 0.0]).bfloat16()
    for part in parts[1:]:
        part.view(-1)[:8] = bad
    kept = []
    for compile in (False, True):
        parameter = torch.nn.Parameter(torch.zeros_like(parts[0]))
        accumulator = GradientAccumulator([parameter], "both", seed=9, compile=compile)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if compiler_missing() else "error")  # of what did not compile
            for part in parts:
                parameter.grad = part.clone()
                accumulator.accumulate()
        kept.append(torch.stack(accumulator._planes[parameter]))
    eager, fast = kept
    assert torch.equal(bits(eager), bits(fast)) and eager.isnan().any()


@pytest.mark.parametrize("row", NUMBERS)
@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_in_its_element_alone(row: str, place: int, value: float) -> None:
    parts = gradients((11,), 7)
    parts[place][5] = value
    result = summed(row, parts)
    assert not result[5].isfinite() and result.isfinite().sum() == 10
    assert bool(result[5].isnan()) == math.isnan(value)
    opposite = [torch.tensor([v]).bfloat16() for v in (math.inf, 1.0, -math.inf, 1.0)]
    assert summed(row, opposite).isnan().all()
    largest = torch.tensor([3.38e38]).bfloat16()
    assert summed(row, [largest] * 3).tolist() == [math.inf]


@pytest.mark.parametrize(("row", "dtype"), [*((row, torch.bfloat16) for row in ROWS), ("float32", torch.float16)])
def test_every_nan_stays_one(row: str, dtype: torch.dtype) -> None:
    """Whatever its payload: one of all ones, which CUDA's additions make of any, could carry into the sign."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    nans = every[every.isnan()]
    ones = torch.ones_like(nans)
    for parts in ([nans], [nans, ones, ones], [ones, ones, nans], [nans, nans]):
        assert summed(row, parts).isnan().all()
    filled = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert accumulation.nearest([filled], dtype).isnan().all()
    seed = torch.tensor(1, dtype=torch.int32)
    if row in accumulation.ADDITIONS:
        planes = [torch.ones(2) for _ in ACCUMULATIONS[row].planes]
        for gradient, before in ((filled, planes), (torch.ones(2), [filled, *planes[1:]])):
            assert (accumulation.ADDITIONS[row](gradient, before, seed)[0] == 0x7FC00000).all()


def test_the_random_bits_belong_to_seed_step_and_micro_batch() -> None:
    """And to nothing else: a run that is resumed sets ``step`` and goes on with the same bits."""
    parts = gradients((4000,), 6)
    parameter = torch.nn.Parameter(torch.zeros(4000, dtype=torch.bfloat16))

    def step(accumulator: GradientAccumulator) -> Tensor:
        for part in parts:
            parameter.grad = part.clone()
            accumulator.accumulate()
        accumulator.finish()
        assert parameter.grad is not None
        result, parameter.grad = parameter.grad, None
        return result

    through = GradientAccumulator([parameter], "bfloat16-stochastic", seed=4)
    sums = [step(through) for _ in range(3)]
    assert not torch.equal(sums[0], sums[1]) and not torch.equal(sums[1], sums[2])
    resumed = GradientAccumulator([parameter], "bfloat16-stochastic", seed=4)
    resumed.step = 2
    assert torch.equal(step(resumed), sums[2])
    assert not torch.equal(step(GradientAccumulator([parameter], "bfloat16-stochastic", seed=5)), sums[0])


# ── sums of 8 bits, relative to a power of two per tensor ───────────────────────────────────────────────────────────


def e5m2_values(amax: float) -> np.ndarray:
    """The magnitudes of five exponent and two mantissa bits up to the power of two above ``amax``, by definition."""
    end = 2.0 ** math.ceil(math.log2(amax))
    steps = [mantissa * 2.0**-32 for mantissa in range(4)]  # of the end: numbers below the normal ones
    steps += [(1 + mantissa / 4) * 2.0**exponent for exponent in range(-30, 1) for mantissa in range(4)]
    return np.array(steps) * end


@pytest.mark.filterwarnings("ignore::narrowgauge.optim.accumulation.AccumulationWarning")
@pytest.mark.parametrize("row", SCALED)
@pytest.mark.parametrize("amax", [1e-20, 3e-4, 1.0, 5.5, 1e9])
def test_a_gradient_is_held_as_one_of_the_two_neighbours_in_8_bits(row: str, amax: float) -> None:
    part = gradients((4000,), 1)[0]
    part = (part / part.abs().max() * amax).bfloat16()
    weight = torch.nn.Parameter(gradients((4000,), 1, seed=1)[0])  # whose bits tell equal gradients apart
    weight.grad = part.clone()
    accumulator = GradientAccumulator([weight], row)
    accumulator.finish()
    held = weight.grad.double().numpy()
    exact = part.double().numpy()
    values = e5m2_values(float(part.abs().max()))
    above = np.searchsorted(values, np.abs(exact))
    low, high = values[np.maximum(above - 1, 0)], values[above]
    expected = np.where(np.abs(exact) - low < high - np.abs(exact), low, high) * np.sign(exact)
    if row == "float8_e5m2":
        assert np.array_equal(held, expected)
        return
    assert np.logical_or(np.abs(held) == low, np.abs(held) == high).all() and not (held * exact < 0).any()
    share = np.where(high > low, (np.abs(exact) - low) / (high - low), 0.0)
    # As many go up as their places between the neighbours ask for: |z| < 5. To the nearest, all of these would stand.
    assert (held != expected).mean() > 0.1
    assert abs(((np.abs(held) == high) - share)[share > 0].sum()) < 5 * math.sqrt((share * (1 - share)).sum())


def test_one_stochastic_addition_of_8_bits_has_the_sum_as_its_mean() -> None:
    """Exactly: over all addends that the dither can have, of sums anywhere in the window."""
    code = ACCUMULATIONS["float8_e5m2-stochastic"].code
    assert code is not None
    dropped = codec.dropped_bits(code)
    into, back = codec.multipliers(code, torch.tensor(1.0))
    every = torch.arange(1 << dropped, dtype=torch.int32)
    for total in (1.0, 0.9, -0.3, 2.0**-9 * 1.37, -(2.0**-29) * 1.9, 2.0**-31 * 1.1):
        word = codec.encode(code, torch.tensor(total).expand(1 << dropped), every, 0, into)
        mean = float(codec.decode(code, word, 0, back).double().mean())
        assert mean == pytest.approx(float(torch.tensor(total)), rel=2.0**-18)


@pytest.mark.filterwarnings("ignore::narrowgauge.optim.accumulation.AccumulationWarning")
@pytest.mark.parametrize("row", SCALED)
def test_the_scale_follows_the_sum_up_and_down(row: str) -> None:
    """A sum that grows a thousandfold saturates nowhere, and one that cancels leaves its rest with all of its bits."""
    grows = [torch.full((64,), 2.0**k).bfloat16() for k in (0, 4, 10)]
    assert (summed(row, grows).float() - 1041.0).abs().max() <= 256.0
    assert 4096.0 <= float(summed(row, [torch.tensor([4096.0]).bfloat16(), torch.ones(1).bfloat16()])[0]) <= 5120.0
    parts = [torch.tensor([4096.0, 1.0]).bfloat16(), torch.tensor([-4096.0, 2.0**-26]).bfloat16()]
    assert summed(row, parts)[0] == 0.0 and 0.75 <= float(summed(row, parts)[1]) <= 1.25


@pytest.mark.filterwarnings("ignore::narrowgauge.optim.accumulation.AccumulationWarning")
@pytest.mark.parametrize("row", SCALED)
def test_a_sum_above_the_largest_window_is_not_finite(row: str) -> None:
    large = torch.tensor([2.0**30, 1.0]).bfloat16()
    assert summed(row, [large]).tolist() == [2.0**30, 1.0]
    assert summed(row, [large, large]).isnan().all()


@pytest.mark.filterwarnings("ignore::narrowgauge.optim.accumulation.AccumulationWarning")
@pytest.mark.parametrize("row", SCALED)
@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_tensor_until_the_step_ends(row: str, place: int, value: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(11).bfloat16()) for _ in range(2)]
    accumulator = GradientAccumulator(parameters, row)
    for j, part in enumerate(gradients((11,), 7)):
        for parameter in parameters:
            parameter.grad = part.clone()
        if j == place:
            parameters[0].grad[5] = value  # type: ignore[index]
        accumulator.accumulate()
    accumulator.finish()
    assert parameters[0].grad.isnan().all() and parameters[1].grad.isfinite().all()  # type: ignore[union-attr]
    parameters[0].grad = torch.ones(11).bfloat16()
    accumulator.finish()
    assert parameters[0].grad.tolist() == [1.0] * 11


# ── parameters of all kinds ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("row", ROWS)
def test_missing_frozen_and_tied(row: str) -> None:
    sometimes, always, never, frozen = (torch.nn.Parameter(torch.ones(3).bfloat16()) for _ in range(4))
    frozen.requires_grad_(False)
    accumulator = GradientAccumulator([sometimes, always, never, frozen, always], row)
    for j in range(4):
        loss = (always + always * frozen).sum() + (sometimes.sum() if j % 2 else 0.0)
        loss.backward()
        accumulator.accumulate()
    accumulator.finish()
    found = [None if p.grad is None else p.grad.tolist() for p in (sometimes, always, never, frozen)]
    assert found == [[2.0] * 3, [8.0] * 3, None, None]
    accumulator.discard()
    accumulator.finish()
    assert all(p.grad is None for p in (sometimes, always, never, frozen))


@pytest.mark.parametrize("row", ROWS)
def test_float32_parameters_are_left_to_autograd(row: str) -> None:
    narrow, wide = torch.nn.Parameter(torch.ones(4).bfloat16()), torch.nn.Parameter(torch.ones(4))
    plain = torch.nn.Parameter(torch.ones(4))
    accumulator = GradientAccumulator([narrow, wide], row)
    for j in range(5):
        (narrow.sum() + (wide * 0.1 * j).sum()).backward()
        (plain * 0.1 * j).sum().backward()
        accumulator.accumulate()
    accumulator.finish()
    assert wide.grad is not None and plain.grad is not None
    assert torch.equal(wide.grad, plain.grad)
    assert narrow.grad is not None and narrow.grad.tolist() == [5.0] * 4


@pytest.mark.parametrize("row", ROWS)
def test_bytes_are_counted_and_as_the_table_says(row: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in ((64, 3), (5,), ())]
    accumulator = GradientAccumulator(parameters, row)
    assert accumulator.bytes_per_param() == 0
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        accumulator.accumulate()
    scales = 3 * 4 / (64 * 3 + 5 + 1) if row in SCALED else 0.0
    assert accumulator.bytes_per_param() == pytest.approx(ACCUMULATIONS[row].bytes_per_param + scales, rel=1e-12)
    accumulator.finish()  # the buffers are kept for the next step
    assert accumulator.bytes_per_param() == pytest.approx(ACCUMULATIONS[row].bytes_per_param + scales, rel=1e-12)


@pytest.mark.parametrize("row", OURS)
def test_it_works_in_pieces_that_fit_the_cache(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[int] = []

    def watched(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for chunks in real(*tensors):
            longest.append(max(chunk.numel() for chunk in chunks))
            yield chunks

    real = accumulation.flat_chunks
    monkeypatch.setattr(accumulation, "flat_chunks", watched)
    parts = gradients((300, 301), 2)
    summed(row, parts, compile=False)
    summed(row, [part.t() for part in parts])
    assert len(longest) > 12 and max(longest) <= CHUNK


def test_shards_are_summed_where_they_lie() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        parts = gradients((6, 5), 4)
        weight = torch.nn.Parameter(distribute_tensor(torch.zeros(6, 5).bfloat16(), mesh, [Shard(0)]))
        for row in OURS:
            accumulator = GradientAccumulator([weight], row)
            for part in parts:
                weight.grad = distribute_tensor(part, mesh, [Shard(0)])
                accumulator.accumulate()
            accumulator.finish()
            assert isinstance(weight.grad, DTensor)
            assert weight.grad.placements == weight.placements
            assert torch.equal(bits(weight.grad.to_local()), bits(summed(row, parts)))
            weight.grad = None
    finally:
        dist.destroy_process_group()


# ── in a loop ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_gradient_that_was_not_accumulated_is_not_lost() -> None:
    weight = torch.nn.Parameter(torch.ones(2).bfloat16())
    accumulator = GradientAccumulator([weight])
    for _ in range(3):
        weight.sum().backward()
        if weight.grad is not None and float(weight.grad[0]) < 3:
            accumulator.accumulate()
    weight.sum().backward()
    accumulator.finish()
    assert weight.grad is not None and weight.grad.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("row", [None, *ROWS])
def test_losses_are_made_one_at_a_time_and_scaled(row: str | None) -> None:
    weight = torch.nn.Parameter(torch.ones(2).bfloat16())
    accumulator = GradientAccumulator([weight], row) if row else None
    seen: list[bool] = []

    def losses() -> Iterator[Tensor]:
        for factor in (1.0, 2.0, 4.0):
            seen.append(weight.grad is None)
            yield weight.float().sum() * factor

    total = backward_in_parts(losses(), accumulator, LossScaler.static(8.0))
    assert float(total) == 14.0 and not total.requires_grad
    assert weight.grad is not None and weight.grad.tolist() == [56.0, 56.0]
    assert seen == [True, row in OURS, row in OURS]


@pytest.mark.parametrize("row", ROWS)
def test_half_a_batch_is_not_added_to_the_next(row: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2).bfloat16())
    accumulator = GradientAccumulator([weight], row)

    def broken() -> Iterator[Tensor]:
        yield weight.sum()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backward_in_parts(broken(), accumulator)
    assert accumulator.step == 0
    backward_in_parts((weight.sum() for _ in range(2)), accumulator)
    assert accumulator.step == 1
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="no losses"):
        backward_in_parts([], accumulator)


# ── what is said and refused ────────────────────────────────────────────────────────────────────────────────────────


def test_the_naive_sum_warns_once_from_where_it_loses_more_than_the_storage() -> None:
    """From the row of ``word`` itself: a spacing of its first moment against half a spacing of bfloat16 per addition."""
    assert next(k for k in range(2, 12) if (k - 1) * 2.0**-8 > 2.0**-5) == naive_limit() + 1 == 10
    weight = torch.nn.Parameter(torch.ones(1).bfloat16())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradientAccumulator([weight], "bfloat16", num_micro_batches=9)
        for row in OURS:
            most = ACCUMULATIONS[row].most_micro_batches
            GradientAccumulator([weight], row, num_micro_batches=10_000 if most is None else most)
    with pytest.warns(AccumulationWarning, match=r"^10 micro-batches .* 4% of the gradient.*'float32'"):
        told = GradientAccumulator([weight], "bfloat16", num_micro_batches=10)
    with pytest.warns(
        AccumulationWarning, match=r"^2 micro-batches .* 27% .* at 16: .*'float8_e5m2-stochastic' .* 1 byte a"
    ):
        GradientAccumulator([weight], "float8_e5m2", num_micro_batches=2)
    untold = GradientAccumulator([weight], "bfloat16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for accumulator in (told, untold):
            for _ in range(2):
                backward_in_parts((weight.sum() for _ in range(20)), accumulator)
    assert [str(w.message)[:16] for w in caught] == ["10 micro-batches"]


@pytest.mark.parametrize("row", ["bfloat16", "float8_e5m2"])
def test_gradients_that_autograd_sums_in_more_bits_warn_of_nothing(row: str) -> None:
    wide = [torch.nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    frozen = torch.nn.Parameter(torch.ones(1).bfloat16(), requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradientAccumulator([*wide, frozen], row, num_micro_batches=1000)
    with pytest.warns(AccumulationWarning):
        GradientAccumulator([*wide, torch.nn.Parameter(torch.ones(1).bfloat16())], row, num_micro_batches=1000)


@pytest.mark.parametrize("row", NUMBERS)
def test_an_accumulator_that_was_pickled_before_there_were_codes_goes_on(row: str) -> None:
    older: Accumulation = object.__new__(Accumulation)
    known = ACCUMULATIONS[row]
    older.__setstate__(  # type: ignore[attr-defined]
        [known.name, known.planes, known.gradients, known.addition, known.loses, known.source]
    )
    assert older == known
    made = GradientAccumulator([torch.nn.Parameter(torch.ones(3).bfloat16())], row)
    state = {name: value for name, value in vars(made).items() if name != "_bounds"}
    again: GradientAccumulator = object.__new__(GradientAccumulator)
    again.__setstate__({**state, "row": older})
    (weight,) = again.parameters
    backward_in_parts((weight.sum() for _ in range(2)), again)
    assert weight.grad is not None and weight.grad.tolist() == [2.0] * 3
    assert again.bytes_per_param() == known.bytes_per_param


def test_what_cannot_be_summed_is_refused() -> None:
    half = torch.nn.Parameter(torch.ones(2).half())
    with pytest.raises(RecipeError, match=r"no accumulation is named 'khan'\. Did you mean 'kahan'"):
        GradientAccumulator([half], "khan")
    for row in ("bfloat16", "bfloat16-stochastic", "kahan", *SCALED):
        with pytest.raises(RecipeError, match=rf"'{row}' sums bfloat16 gradients.*is float16"):
            GradientAccumulator([half], row)
    quantized = torch.nn.Parameter(torch.zeros(2, dtype=torch.int16), requires_grad=False)
    GradientAccumulator([quantized], "kahan")
    good, sparse = (torch.nn.Parameter(torch.ones(3, 2).bfloat16()) for _ in range(2))
    good.grad = torch.ones_like(good)
    sparse.grad = torch.ones_like(sparse).to_sparse()
    accumulator = GradientAccumulator([good, sparse])
    with pytest.raises(RecipeError, match="sparse"):
        accumulator.accumulate()
    assert good.grad is not None and accumulator.bytes_per_param() == 0  # nothing was added


def test_the_table_says_what_it_costs() -> None:
    assert {name: row.bytes_per_param for name, row in ACCUMULATIONS.items()} == {
        "float64": 8, "float32": 4, "bfloat16": 0, "bfloat16-stochastic": 2, "kahan": 4,
        "float8_e5m2": 1, "float8_e5m2-stochastic": 1,
    }  # fmt: skip
    assert all(row.bound(1) == (row.addition if row.code else 0) for row in ACCUMULATIONS.values())
    assert all(row.loses and row.source for row in ACCUMULATIONS.values())
    assert replace(ACCUMULATIONS["bfloat16"], addition=0.5).bound(3) == 1.25


@pytest.mark.parametrize("name", list(ADDITIONS))
def test_words_are_summed_half_by_half(name: str) -> None:
    """What is compiled gives each value of a word what the addition gives it alone."""
    count = 1 + len(ACCUMULATIONS[name].planes)
    drawn = [normal_words(torch.bfloat16, (64,), torch.device("cpu"), seed) for seed in range(count)]
    seed = torch.tensor(7, dtype=torch.int32)
    outputs = [word.clone() for word in drawn[1:]]
    in_words(ADDITIONS[name])(*drawn, seed, *outputs)
    gradient, *planes = (word.view(torch.bfloat16).float() for word in drawn)
    for output, wanted in zip(outputs, ADDITIONS[name](gradient, planes, seed), strict=True):
        assert torch.equal(output.view(torch.bfloat16).float().view(torch.int32), wanted)
