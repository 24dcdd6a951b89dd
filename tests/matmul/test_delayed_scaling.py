"""Delayed scaling: what the amax history holds, what it scales by, and that a spike is counted."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from matmul.scenarios import DELAYED, gaussian, make_layer, names, passed
from narrowgauge.matmul.delayed_scaling import delayed_amax, join_histories, new_history
from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.swapping import NarrowLayers
from narrowgauge.spec.computes import COMPUTES, HISTORY

every_row = pytest.mark.parametrize("row", DELAYED, **names)
CAST = COMPUTES["float8-delayed"].output.left
CPU = torch.device("cpu")


def seen(values: float | Tensor, step: int, history: Tensor) -> float:
    x = values if isinstance(values, Tensor) else torch.tensor([[values, -values / 2]])
    amax = delayed_amax(x, CAST, history, 0, torch.tensor(step, dtype=torch.int32), record=True)
    assert amax is not None and amax.shape == (1, 1) and amax.dtype == torch.float32
    return amax.item()


def test_a_scale_is_the_largest_of_as_many_steps_as_are_looked_back_on() -> None:
    history = new_history(CPU)
    draw, met = random.Random(0), dict[int, float]()
    step = 0
    for _ in range(60):
        value = draw.choice([1e-3, 0.5, 1.0, 3.0, 100.0])
        earlier = [met[s] for s in range(step - HISTORY, step) if s in met]
        expected = max(earlier) if earlier else value
        for _ in range(3):  # micro-batches and recomputation see what the first one saw
            assert seen(value, step, history) == torch.tensor(expected).float().item()
        met[step] = value
        # Steps that the layer took no part in age like others.
        step += draw.choice([1, 1, 1, 2, HISTORY + 1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_nan_now_and_gone_at_the_next_step(bad: float) -> None:
    history = new_history(CPU)
    x = torch.tensor([[1.0, bad]])
    assert seen(x, 0, history) != seen(x, 0, history)  # NaN: the first step has nothing else
    assert seen(3.0, 1, history) == 3.0
    assert seen(x, 2, history) != seen(x, 2, history)
    assert history[:, 0].isfinite().all()
    assert seen(5.0, 3, history) == 3.0


def test_a_newer_step_of_another_rank_takes_the_place_of_an_older_one() -> None:
    here, there = new_history(CPU), new_history(CPU)
    seen(100.0, 0, here)
    seen(3.0, HISTORY + 1, there)
    theirs = iter([there[:, 1].flatten(), torch.cat([there[:, 0].flatten(), there[:, 2].flatten()])])
    join_histories([here], lambda ours: torch.maximum(ours, next(theirs)))
    assert torch.equal(here, there)


def train(layer: Linear, linears: NarrowLayers, steps: range, spike: int = -1) -> list:  # type: ignore[type-arg]
    found = []
    for step in steps:
        linears.step = step
        scale = 1000.0 if step == spike else 1.0 + 0.1 * (step % 3)
        found.append(passed(layer, gaussian(33, 65, seed=step, scale=scale), gaussian(33, 17, seed=step + 500)))
    return found


@every_row
def test_a_spike_saturates_is_counted_and_passes(row) -> None:  # type: ignore[no-untyped-def]
    layer, linears = make_layer(row)
    found = train(layer, linears, range(4), spike=3)
    inputs, weight, gradient = linears.overflows()["fc"]
    assert inputs > 33 * 65 * 0.9 and weight == 0
    assert gradient < 33 * 17 * 0.05
    assert found[3].output.isfinite().all()
    assert found[3].output.abs().max() < 10 * found[2].output.abs().max()  # cut, as said
    # From then on the scale has room for it, for as long as it is looked back on.
    again = train(layer, linears, range(4, 6), spike=5)
    assert linears.overflows()["fc"][0] == inputs
    assert again[1].output.abs().max() > 100 * found[2].output.abs().max()
    train(layer, linears, range(6, 30))
    assert linears.overflows()["fc"][0] < 33 * 65 * 0.05


@every_row
def test_a_later_compute_goes_on_with_a_copy_of_the_loaded_history(row) -> None:  # type: ignore[no-untyped-def]
    (layer, linears), (other, others) = make_layer(row), make_layer("float8-row")
    train(layer, linears, range(2))
    saved, before = linears.state_dict(), layer.amax_history.clone()  # type: ignore[union-attr]
    others.load_state_dict(saved)
    others.set_compute(lambda _: row)
    for resumed, handle in ((other, others), (layer, linears)):
        train(resumed, handle, range(2, 4))
    assert torch.equal(saved["amax_histories"]["fc"], before) and torch.equal(other.amax_history, layer.amax_history)


@every_row
def test_evaluation_records_nothing(row) -> None:  # type: ignore[no-untyped-def]
    layer, linears = make_layer(row)
    train(layer, linears, range(2))
    before = layer.amax_history.clone()  # type: ignore[union-attr]
    linears.step = 2
    with torch.no_grad():
        layer(gaussian(33, 65, scale=50.0))
    y = layer.eval()(gaussian(33, 65, scale=50.0))
    with torch.inference_mode():
        layer(gaussian(33, 65, scale=50.0))
    assert torch.equal(layer.amax_history, before)
    y.sum().backward()
    assert torch.equal(layer.amax_history, before)
