"""Statistics of tensors: each on cases whose reading is known, and against float64 written out."""

from __future__ import annotations

import math

import pytest
import torch

from narrowgauge.errors import FormatError
from narrowgauge.numerics import tensor_stats
from narrowgauge.numerics.quantization import quantize
from narrowgauge.spec.computes import COMPUTES, Cast

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS)
def test_amax_and_rms_are_those_of_the_values(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.5, -4.0], [0.25, 2.0]], dtype=dtype)
    assert tensor_stats.amax(x).item() == 4.0
    digits = 2**-8 if dtype is torch.bfloat16 else 1e-6
    assert tensor_stats.rms(x).item() == pytest.approx(math.sqrt((0.25 + 16 + 0.0625 + 4) / 4), rel=digits)
    assert tensor_stats.amax(x[:0]).item() == tensor_stats.rms(x[:0]).item() == 0.0


def test_amax_tells_of_values_that_are_not_finite() -> None:
    assert math.isnan(tensor_stats.amax(torch.tensor([1.0, math.nan])).item())
    assert tensor_stats.amax(torch.tensor([1.0, -math.inf])).item() == math.inf
    assert tensor_stats.nonfinite_count(torch.tensor([1.0, -math.inf, math.nan, math.inf])).item() == 3


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_exponent_falls_into_its_bin(dtype: torch.dtype) -> None:
    for exponent in range(-14, 15):
        x = torch.tensor([2.0**exponent, -1.5 * 2.0**exponent], dtype=dtype)
        counts = tensor_stats.exponent_histogram(x, -20, 40).tolist()
        assert counts[exponent + 20] == 2 and sum(counts) == 2


def test_ends_zeros_and_non_finite_values_of_a_histogram() -> None:
    x = torch.tensor([0.0, -0.0, math.nan, math.inf, 1e-45, 1e-38, 1e38, 1.0])
    assert tensor_stats.exponent_histogram(x, -2, 4).tolist() == [2, 0, 1, 1]


def test_histograms_of_parts_add_up() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    parts = sum(tensor_stats.exponent_histogram(part, -20, 30) for part in x.split(123))
    assert torch.equal(parts, tensor_stats.exponent_histogram(x, -20, 30))
    # An oracle that knows logarithms only.
    expected = [sum(1 for v in x.tolist() if math.floor(math.log2(abs(v))) == e) for e in range(-19, 9)]
    assert parts[1:29].tolist() == expected


def test_kurtosis_of_known_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    assert tensor_stats.kurtosis(torch.randn(400_000, generator=generator)).item() == pytest.approx(3.0, abs=0.05)
    assert tensor_stats.kurtosis(torch.rand(400_000, generator=generator) - 0.5).item() == pytest.approx(1.8, abs=0.02)
    one_in_hundred = torch.zeros(100)
    one_in_hundred[3] = 7.0
    assert tensor_stats.kurtosis(one_in_hundred).item() == pytest.approx(100.0)
    assert tensor_stats.kurtosis(torch.zeros(4)).isnan()


def test_the_strongest_feature_is_named() -> None:
    x = torch.ones(2, 8, 16)
    x[1, :, 5] = 10.0
    peak, column = tensor_stats.feature_peak(x)
    assert peak[0].item() == 1.0 and column[1].item() == 5
    assert peak[1].item() == pytest.approx(10 / math.sqrt((15 + 100) / 16))


def test_sums_of_a_cast_count_what_it_loses() -> None:
    x = torch.tensor([[448.0, 2.0**-9, 2.0**-11, 0.0], [448.0, 464.0, 500.0, 1.0]])
    static = Cast("float8_e4m3fn", "tensor", scaling="static")
    sums = tensor_stats.cast_sums(x, static)
    beyond, zeroed, nonzero, total = sums[:, 2:].T.tolist()
    assert beyond == [0, 1]  # 464 is a tie that still rounds to 448
    assert zeroed == [1, 0] and nonzero == [3, 4] and total == [4, 4]
    assert sums[1, 1].item() == 16.0**2 + 52.0**2


@pytest.mark.parametrize("name", ["float8-row", "float8-tensor", "int8-row", "mxfp8", "nvfp4", "float8-block"])
def test_sqnr_is_the_ratio_of_powers(name: str) -> None:
    cast = COMPUTES[name].output.left
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    rows = 128 if cast.block and cast.block[0] > 1 else 8
    x = x.repeat(rows // 8, 1) if rows != 8 else x
    sums = tensor_stats.cast_sums(x, cast).sum(0)
    if cast.rounding == "nearest" and cast.rotation == "none" and cast.block is None:
        kept = quantize(x, cast, 1).values().double()
        expected = 10 * math.log10(float(x.double().square().sum() / (x.double() - kept).square().sum()))
        assert tensor_stats.sqnr_of_sums(sums).item() == pytest.approx(expected, rel=1e-9)
    assert 10 < tensor_stats.sqnr_of_sums(sums).item() < 60


def test_tensors_that_share_a_cast_keep_their_own_scales() -> None:
    """Joined with a magnitude for each row, they read as alone."""
    cast = COMPUTES["float8-tensor"].output.left
    one, other = torch.randn(4, 32), 1000 * torch.randn(4, 32)
    amax = torch.stack([one.abs().amax(), other.abs().amax()]).repeat_interleave(4).view(-1, 1)
    joined = tensor_stats.cast_sums(torch.cat([one, other]), cast, amax=amax)
    assert torch.equal(joined, torch.cat([tensor_stats.cast_sums(one, cast), tensor_stats.cast_sums(other, cast)]))


def test_block_scales_range() -> None:
    assert tensor_stats.block_scale_exponents(torch.tensor([2.0**-3, 2.0**4, 1.5, 0.0])).tolist() == [-3.0, 0.0, 4.0]
    assert tensor_stats.block_scale_exponents(torch.zeros(3)).isnan().all()


def test_updates_against_weight_and_spacing() -> None:
    weight = torch.tensor([1.0, 1.5, 2.0, 0.0])
    change = torch.full((4,), 2.0**-8)
    assert tensor_stats.update_to_ulp(change, weight, 7).item() == 0.5  # 0.5, 0.5 and 0.25; zero has no spacing
    assert tensor_stats.update_to_weight(weight, weight + change).item() == pytest.approx(
        2.0**-8 / math.sqrt((1 + 2.25 + 4) / 4)
    )
    assert tensor_stats.update_to_weight(weight, weight).item() == 0.0


def test_half_a_spacing_is_where_rounding_begins_to_take() -> None:
    """The reading says beforehand what a bfloat16 does: a little above a half it moves, a little below it stays."""
    weight = torch.ones(100)
    for factor, moves in ((0.51, True), (0.49, False)):
        change = torch.full((100,), factor * 2.0**-7)
        assert tensor_stats.update_to_ulp(change, weight, 7).item() == pytest.approx(factor)
        assert bool(((weight + change).bfloat16() != weight.bfloat16()).all()) is moves


def test_bias_of_second_moments() -> None:
    exact = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
    bias = tensor_stats.moment_bias(2 * exact, exact)
    assert bias[0].item() == 2.0 and bias[1].isnan()


def test_attention_of_known_logits() -> None:
    """One key stands out by far: its logit is the maximum, and its query attends to it alone."""
    query, key = torch.zeros(2, 8, 4), torch.zeros(1, 8, 4)
    query[:, :, 0], key[:, 2, 0] = 10.0, 100.0
    found = tensor_stats.attention_statistics(query, key, 0.5, torch.tensor([7]))
    assert found[0].item() == 500.0 and found[1].item() == pytest.approx(0.0, abs=1e-6)
    # What comes later is not seen.
    before = tensor_stats.attention_statistics(query, key, 0.5, torch.tensor([1]))
    assert before.tolist() == [0.0, 1.0]


def test_entropy_against_sums_written_out() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(4, 6, 8, generator=generator), torch.randn(2, 6, 8, generator=generator)
    places = torch.tensor([3, 5])
    entropies = []
    for head in range(4):
        for place in (3, 5):
            logits = [float(query[head, place] @ key[head // 2, k]) * 0.3 for k in range(place + 1)]
            weights = [math.exp(v) for v in logits]
            shares = [w / sum(weights) for w in weights]
            entropies.append(-sum(s * math.log(s) for s in shares) / math.log(place + 1))
    found = tensor_stats.attention_statistics(query, key, 0.3, places)[1].item()
    assert found == pytest.approx(sum(entropies) / 8, rel=1e-5)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(FormatError, match="3 query heads cannot share 2"):
        tensor_stats.attention_statistics(torch.zeros(3, 2, 2), torch.zeros(2, 2, 2), 1.0, torch.tensor([1]))
