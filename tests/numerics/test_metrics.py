"""Metrics of updates, tensors and casts, on cases with a known reading, and against fractions and
float64 written out.
"""

import pytest
import torch

from narrowgauge.numerics import chunks
from narrowgauge.numerics.exact_sums import largest_magnitude
from narrowgauge.numerics.metrics import (
    UPDATE_SUMS,
    update_metrics,
)
from oracles.exact_sums import update_sums as oracle_sums
from tensors import gaussian, update_sums


@pytest.mark.parametrize("chunk", [chunks.CHUNK, 7])
def test_sums_against_fractions(chunk, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", chunk)
    d = gaussian(10, 20, seed=1)
    e = gaussian(20, 10, seed=2).t()
    v = gaussian(10, 20, seed=3)
    d[0] = 0.0
    e[0:3] = 0.0
    v[0:5] = -0.0
    got = update_sums(d, e, v)
    expected = oracle_sums(*(x.reshape(-1).tolist() for x in (d, e, v)))
    assert got.dtype == torch.float64 and got.shape == (len(UPDATE_SUMS),)
    assert got[3:].tolist() == [180.0, 40.0, 80.0, 200.0, 0.0] == [float(x) for x in expected[3:]]
    for name, value, exact in zip(UPDATE_SUMS, got.tolist(), expected, strict=True):
        assert value == pytest.approx(float(exact), rel=1e-12, abs=1e-12), name


def test_only_elements_that_meant_to_move_can_be_lost():
    d = torch.tensor([0.0, -0.0, 1.0, 1.0, 1.0, 1.0])
    e = torch.tensor([0.0, 5.0, 0.0, 1.0, 1.0, 1.0])
    v = torch.tensor([0.0, 0.0, 0.0, -0.0, 1.0, 1.0])
    reading = {}
    for name, value in update_metrics(update_sums(d, e, v)).items():
        reading[name] = value.item()
    assert reading["lost_fraction"] == 0.25
    assert reading["imprecision_share"] == pytest.approx(4 / 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_is_the_largest_magnitude(dtype):
    x = torch.tensor([[0.5, -4.0], [0.25, 2.0]], dtype=dtype)
    assert largest_magnitude(x).item() == 4.0 and largest_magnitude(x[:0]).item() == 0.0
