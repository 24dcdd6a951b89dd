"""The gauges of an update, on cases whose reading is known."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from narrowgauge.errors import FormatError
from narrowgauge.numerics import summation
from narrowgauge.numerics.update_metrics import (
    CHANGE_SUMS,
    DECAY_SUMS,
    UPDATE_SUMS,
    completed,
    decay_terms,
    edq,
    imprecision_share,
    lost_decay,
    lost_fraction,
    noise,
    unseen_fraction,
    update_sums,
    update_terms,
    visible_edq,
)
from narrowgauge.spec.significance import FEWEST_SPACINGS
from oracles.exact_sums import update_sums as oracle_sums
from tensors import gaussian

READINGS = (edq, noise, lost_fraction, unseen_fraction, visible_edq, imprecision_share)


def read(sums: Tensor) -> dict[str, float]:
    return {reading.__name__: reading(sums).item() for reading in READINGS}


# -- the sums --


@pytest.mark.parametrize("chunk", [summation.CHUNK, 7])
def test_sums_against_fractions(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summation, "CHUNK", chunk)
    d, e, v = gaussian(10, 20, seed=1), gaussian(20, 10, seed=2).t(), gaussian(10, 20, seed=3)
    d[0], e[0:3], v[0:5] = 0.0, 0.0, -0.0
    got = update_sums(d, e, v)
    expected = oracle_sums(*(x.reshape(-1).tolist() for x in (d, e, v)))
    assert got.dtype == torch.float64 and got.shape == (len(UPDATE_SUMS),)
    assert got[5:].tolist() == [180.0, 40.0, 80.0, 0.0, 0.0, 200.0, 0.0] == [float(x) for x in expected[5:]]
    for name, value, exact in zip(UPDATE_SUMS, got.tolist(), expected, strict=True):
        assert value == pytest.approx(float(exact), rel=1e-12, abs=1e-12), name


def test_terms_keep_shape_and_dtype_and_sum_to_the_sums() -> None:
    d, e, v = gaussian(3, 50, seed=1), gaussian(3, 50, seed=2), gaussian(3, 50, seed=3)
    terms = update_terms(d, e, v)
    assert len(terms) == len(CHANGE_SUMS)
    assert all(term.dtype == torch.float32 and term.shape == (3, 50) for term in terms)
    summed = torch.stack([term.sum(dtype=torch.float64) for term in terms])
    torch.testing.assert_close(summed, update_sums(d, e, v)[: len(CHANGE_SUMS)], rtol=1e-6, atol=1e-5)


def test_sums_of_parts_add_up_and_readings_take_any_leading_shape() -> None:
    d, e, v = gaussian(6, 40, seed=1), gaussian(6, 40, seed=2), gaussian(6, 40, seed=3)
    rows = torch.stack([update_sums(*row) for row in zip(d, e, v, strict=True)])
    torch.testing.assert_close(rows.sum(0), update_sums(d, e, v), rtol=1e-12, atol=1e-12)
    for reading in READINGS:
        together = reading(rows.reshape(2, 3, len(UPDATE_SUMS)))
        assert together.shape == (2, 3) and together.dtype == torch.float64
        assert together.reshape(-1).tolist() == [reading(row).item() for row in rows]


def test_sums_of_nothing_are_zero_and_refuse_other_shapes() -> None:
    assert update_sums(*[torch.empty(0, 3)] * 3).tolist() == [0.0] * len(UPDATE_SUMS)
    with pytest.raises(FormatError, match=r"\(2,\), \(2,\), \(3,\)"):
        update_sums(torch.ones(2), torch.ones(2), torch.ones(3))


@pytest.mark.parametrize("shape", [(), (7,), (8, 2)])
def test_readings_refuse_vectors_of_another_length(shape: tuple[int, ...]) -> None:
    for reading in (*READINGS, lost_decay):
        with pytest.raises(FormatError, match=r"dd, de, ee"):
            reading(torch.zeros(shape))


# -- known answers of an update --


def test_nothing_is_lost() -> None:
    d = gaussian(1000)
    assert read(update_sums(d, d, d)) == {
        "edq": 1.0,
        "noise": 0.0,
        "lost_fraction": 0.0,
        "unseen_fraction": 0.0,
        "visible_edq": 1.0,
        "imprecision_share": 0.0,
    }


def test_nothing_moves() -> None:
    d = gaussian(1000)
    still = torch.zeros(1000)
    assert read(update_sums(d, still, still)) == {
        "edq": 0.0,
        "noise": 1.0,
        "lost_fraction": 1.0,
        "unseen_fraction": 1.0,
        "visible_edq": 0.0,
        "imprecision_share": 1.0,
    }


def test_a_tail_keeps_what_the_model_does_not_see_yet() -> None:
    d = gaussian(1000)
    reading = read(update_sums(d, d, torch.zeros(1000)))
    assert (reading["edq"], reading["lost_fraction"]) == (1.0, 0.0)
    assert (reading["visible_edq"], reading["unseen_fraction"]) == (0.0, 1.0)


def test_nothing_was_intended() -> None:
    still = torch.zeros(10)
    for sums in (update_sums(still, still, still), update_sums(still, still, torch.ones(10))):
        assert all(math.isnan(value) for name, value in read(sums).items() if name != "imprecision_share")
        assert imprecision_share(sums).item() == 1.0  # which counts what nobody meant to move


def test_half_of_each_change_is_taken() -> None:
    d = gaussian(1000)
    reading = read(update_sums(d, d / 2, 2 * d))
    assert reading["edq"] == reading["noise"] == 0.5
    assert reading["visible_edq"] == 2.0


def test_only_elements_that_meant_to_move_can_be_lost() -> None:
    d = torch.tensor([0.0, -0.0, 1.0, 1.0, 1.0, 1.0])
    e = torch.tensor([0.0, 5.0, 0.0, 1.0, 1.0, 1.0])
    v = torch.tensor([0.0, 0.0, 0.0, -0.0, 1.0, 1.0])
    sums = update_sums(d, e, v)
    assert lost_fraction(sums).item() == 0.25 and unseen_fraction(sums).item() == 0.5


def test_sums_of_an_earlier_version_do_not_know_the_elements() -> None:
    d = gaussian(100)
    old = update_sums(d, d, torch.zeros(100))[:8]
    assert torch.equal(completed(old)[:8], old) and edq(completed(old)).item() == 1.0
    assert math.isnan(imprecision_share(completed(old)).item())
    both = torch.stack([old, old])
    assert completed(both).shape == (2, len(UPDATE_SUMS))
    assert torch.equal(completed(update_sums(d, d, d)), update_sums(d, d, d))


def decayed(intended: Tensor, stored: Tensor, spacings: float = 1e6) -> Tensor:
    """Sums of decay alone."""
    terms = [term.double().sum() for term in decay_terms(intended, stored)]
    zeros = torch.zeros(len(CHANGE_SUMS), dtype=torch.float64)
    known = torch.tensor([float(intended.numel()), spacings], dtype=torch.float64)
    return torch.cat([zeros, torch.stack(terms), known])


def test_lost_decay_against_fractions() -> None:
    assert len(DECAY_SUMS) == len(decay_terms(torch.ones(1), torch.ones(1)))
    c, t = gaussian(200, seed=5), gaussian(200, seed=6)
    pairs = [(Fraction(a), Fraction(b)) for a, b in zip(c.tolist(), t.tolist(), strict=True)]
    exact = 1 - sum((a * b for a, b in pairs), Fraction(0)) / sum((a * a for a, _ in pairs), Fraction(0))
    assert lost_decay(decayed(c, t)).item() == pytest.approx(float(exact), rel=1e-6)
    assert [lost_decay(decayed(c, share * c)).item() for share in (1.0, 0.5, 0.0)] == [0.0, 0.5, 1.0]


def test_no_decay_or_too_little_of_it_is_not_judged() -> None:
    c = gaussian(200)
    assert math.isnan(lost_decay(decayed(0 * c, c)).item())
    assert math.isnan(lost_decay(decayed(c, c, FEWEST_SPACINGS - 1)).item())
    assert lost_decay(decayed(c, c, FEWEST_SPACINGS)).item() == 0.0


def test_the_fewest_spacings_hold_the_error_that_they_promise() -> None:
    """Decay of a sixteenth of a spacing, stored with that probability, of weights whose spacings are normally distributed."""
    generator, count = torch.Generator().manual_seed(1), 16 * FEWEST_SPACINGS
    readings = []
    for _ in range(200):
        spacing = torch.randn(count, generator=generator)
        arrives = torch.rand(count, generator=generator) < 1 / 16
        readings.append(lost_decay(decayed(spacing / 16, torch.where(arrives, spacing, 0.0), FEWEST_SPACINGS)).item())
    found = torch.tensor(readings)
    assert abs(found.mean()) < 5 * math.sqrt(3 / FEWEST_SPACINGS / 200)
    assert 0.85 < found.std() / math.sqrt(3 / FEWEST_SPACINGS) < 1.1


def test_lost_elements_are_counted_where_their_squares_vanish() -> None:
    d = torch.full((4,), 1e-30)
    terms = update_terms(d, torch.zeros(4), torch.zeros(4))
    assert terms[0].sum() == 0 and terms[6].sum() == 4


def test_rounding_to_nearest_bfloat16_stalls() -> None:
    w, d = torch.ones(1000), torch.full((1000,), 1e-4)
    e = (w + d).bfloat16().float() - w
    reading = read(update_sums(d, e, e))
    assert (reading["edq"], reading["noise"], reading["lost_fraction"]) == (0.0, 1.0, 1.0)


def test_a_stochastic_cut_is_right_on_average_and_noisy() -> None:
    # A step of 2^-7 is taken with probability d/2^-7: the mean is d, and the noise sqrt(2^-7/d - 1).
    count, step, d = 400_000, 2.0**-7, 1e-4
    chance = torch.rand(count, generator=torch.Generator().manual_seed(3))
    e = torch.where(chance < d / step, step, 0.0)
    reading = read(update_sums(torch.full((count,), d), e, e))
    expected = math.sqrt(step / d - 1)
    # The mean of `count` such readings has a standard error of expected/sqrt(count) = 0.014: 5 of them.
    assert reading["edq"] == pytest.approx(1.0, abs=5 * expected / math.sqrt(count))
    assert reading["noise"] == pytest.approx(expected, rel=0.05) and expected > 8
    assert reading["lost_fraction"] == pytest.approx(1 - d / step, abs=0.002)


def test_noise_never_roots_a_negative_number() -> None:
    d = gaussian(100_000)
    sums = update_sums(d, d, d)
    sums[2] -= sums[2] * 1e-15
    assert noise(sums).item() == 0.0
