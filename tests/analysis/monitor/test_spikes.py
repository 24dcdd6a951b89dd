"""A spike is seen when it comes and not before; healthy noise, a falling loss and a flat one raise
none.
"""

from __future__ import annotations

import math
import random

import pytest

from narrowgauge.analysis.spikes import Spike, SpikeJudge
from narrowgauge.analysis.thresholds import PATIENCE

# The first loss spike of BLOOM-176B as it was logged: iteration, loss, gradient norm
# (bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles.md, 2022-04-12). Then the spikes of
# each step.
BLOOM = (
    (31214, 2.198845, 0.242, []),
    (31215, 2.220424, 0.947, []),
    (31216, 2.595213, 2.390, ["loss", "gradient"]),
    (31217, 2.241558, 15.886, ["gradient"]),
    (31218, 2.345279, 145.119, ["gradient"]),
    (31219, 5.098124, 960.351, ["loss", "gradient"]),
    (31220, 3.492029, 353.201, ["loss", "gradient"]),
    (31221, 3.213059, 379.330, ["loss", "gradient"]),
    (31222, 2.804948, 650.246, ["loss", "gradient"]),
    (31250, 2.215699, 0.267, []),
    (31251, 2.235667, 0.205, []),
)


def judge_of(losses: list[float], norms: list[float]) -> SpikeJudge:
    judge = SpikeJudge()
    for loss, norm in zip(losses, norms, strict=True):
        judge.add(loss, norm, spiked=False)
    return judge


def flat() -> SpikeJudge:
    return judge_of([2.0] * 40, [0.5] * 40)


def seen(judge: SpikeJudge, loss: float, norm: float) -> list[Spike]:
    """Judge a step, then record it."""
    spikes = []
    for spike in (judge.loss(loss), judge.norm(norm)):
        if spike is not None:
            spikes.append(spike)
    judge.add(loss, norm, spiked=bool(spikes))
    return spikes


def test_the_spike_of_bloom_is_seen_three_steps_before_its_loss_doubles_and_its_end_too() -> None:
    noise = random.Random(0)
    judge = SpikeJudge()
    for _ in range(200):
        judge.add(2.21 + noise.gauss(0, 0.015), 0.2 * math.exp(noise.gauss(0, 0.15)), spiked=False)
    for step, loss, norm, spikes in BLOOM:
        assert [spike.what for spike in seen(judge, loss, norm)] == spikes, step


@pytest.mark.parametrize("jitter", [0.005, 0.3])
def test_a_healthy_run_has_no_spike(jitter: float) -> None:
    noise = random.Random(0)
    judge = SpikeJudge()
    total = 1500
    for step in range(total):
        share = step / total
        loss = (
            2.5
            + 6.0 * math.exp(-12 * share)
            + 0.3 * math.cos(math.pi * share)
            + jitter * noise.gauss(0, 1)
        )
        norm = (0.3 + 3 * math.exp(-20 * share)) * math.exp(0.3 * noise.gauss(0, 1))
        assert seen(judge, loss, norm) == [], step


def test_what_is_not_finite_is_no_spike_and_no_past() -> None:
    judge = flat()
    for value in (math.nan, math.inf):
        assert judge.loss(value) is None and judge.norm(value) is None
        for _ in range(200):
            judge.add(value, value, spiked=False)
    judge.add(2.0, None, spiked=False)
    judge.add(2.0, 0.0, spiked=False)
    assert judge.norm(5.01) is not None and judge.norm(4.99) is None
    assert judge.loss(2.17) is not None and judge.norm(None) is None


def test_the_level_is_that_of_the_recent_steps() -> None:
    fallen = judge_of([8.0] * 70 + [2.0] * 30, [0.5] * 100)
    assert fallen.loss(3.0) is not None and fallen.loss(2.1) is None


def test_spikes_become_the_level_if_they_last_without_a_break() -> None:
    broken = flat()
    lasting = flat()
    for step in range(PATIENCE):
        assert seen(lasting, 9.0, 0.5)
        if step == PATIENCE - 2:
            broken.add(2.0, 0.5, spiked=False)
        assert seen(broken, 9.0, 0.5)
    assert broken.loss(9.0) is not None and lasting.loss(9.0) is None
