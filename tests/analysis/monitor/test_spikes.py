"""A spike is seen when it comes and not before; healthy noise, a falling loss and a flat one raise none."""

from __future__ import annotations

import math
import random

import pytest

from narrowgauge.analysis.monitor.spikes import Spike, SpikeJudge

# The first loss spike of BLOOM-176B as it was logged: iteration, loss, gradient norm
# (bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles.md, 2022-04-12).
BLOOM = (
    (31214, 2.198845, 0.242),
    (31215, 2.220424, 0.947),
    (31216, 2.595213, 2.390),
    (31217, 2.241558, 15.886),
    (31218, 2.345279, 145.119),
    (31219, 5.098124, 960.351),
    (31220, 3.492029, 353.201),
    (31221, 3.213059, 379.330),
    (31222, 2.804948, 650.246),
    (31250, 2.215699, 0.267),
    (31251, 2.235667, 0.205),
)
# The first 20 losses and gradient norms of llama-1m under nvfp4/word at three times its best learning rate. Step 21 was a spike
# of 8.64 and 7.14, while the loss was still falling.
FALLING = (
    *((7.65, 2.51), (7.67, 1.97), (7.61, 1.61), (7.56, 2.08), (7.55, 1.89), (7.49, 2.29), (7.40, 1.29), (7.37, 1.22)),
    *((7.25, 1.22), (7.22, 1.15), (7.10, 1.04), (7.00, 1.06), (6.96, 1.14), (6.71, 1.11), (6.70, 0.87), (6.74, 0.82)),
    *((6.47, 0.73), (6.51, 1.02), (6.67, 0.75), (6.51, 0.74)),
)


def judge_of(losses: list[float], norms: list[float]) -> SpikeJudge:
    judge = SpikeJudge()
    for loss, norm in zip(losses, norms, strict=True):
        judge.add(loss, norm, spiked=False)
    return judge


def flat(steps: int = 40, loss: float = 2.0, norm: float = 0.5) -> SpikeJudge:
    return judge_of([loss] * steps, [norm] * steps)


def seen(judge: SpikeJudge, loss: float, norm: float) -> list[Spike]:
    """Judge a step, then record it."""
    spikes = [spike for spike in (judge.loss(loss), judge.norm(norm)) if spike is not None]
    judge.add(loss, norm, spiked=bool(spikes))
    return spikes


def test_the_spike_of_bloom_is_seen_three_steps_before_its_loss_doubles_and_its_end_too() -> None:
    noise = random.Random(0)
    judge = SpikeJudge()
    for _ in range(200):
        judge.add(2.21 + noise.gauss(0, 0.015), 0.2 * math.exp(noise.gauss(0, 0.15)), spiked=False)
    judged = {step: [spike.what for spike in seen(judge, loss, norm)] for step, loss, norm in BLOOM}
    assert judged == {
        31214: [],
        31215: [],
        31216: ["loss", "gradient"],
        31217: ["gradient"],
        31218: ["gradient"],
        31219: ["loss", "gradient"],
        31220: ["loss", "gradient"],
        31221: ["loss", "gradient"],
        31222: ["loss", "gradient"],
        31250: [],
        31251: [],
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("jitter", [0.005, 0.05, 0.3])
def test_a_healthy_run_has_no_spike(seed: int, jitter: float) -> None:
    noise, judge, total = random.Random(seed), SpikeJudge(), 1500
    for step in range(total):
        share = step / total
        loss = 2.5 + 6.0 * math.exp(-12 * share) + 0.3 * math.cos(math.pi * share) + jitter * noise.gauss(0, 1)
        norm = (0.3 + 3 * math.exp(-20 * share)) * math.exp(0.3 * noise.gauss(0, 1))
        assert seen(judge, loss, norm) == [], step


def test_a_spike_is_seen_while_the_loss_falls() -> None:
    judge = SpikeJudge()
    for loss, norm in FALLING:
        assert seen(judge, loss, norm) == []
    assert [spike.what for spike in seen(judge, 8.64, 7.14)] == ["loss"]


def test_a_flat_past_makes_no_spike_of_a_trifle() -> None:
    judge = flat(loss=2.0, norm=0.5)
    assert judge.loss(2.159) is None and judge.loss(2.161) is not None  # 8 deviations of at least 0.01 * 2
    assert judge.norm(4.99) is None and judge.norm(5.01) is not None  # ten times the median
    assert flat(loss=1e-3).loss(0.08) is None and flat(loss=1e-3).loss(0.082) is not None  # at least 0.01 nat


def test_only_upward_jumps_count() -> None:
    judge = flat()
    assert judge.loss(0.0) is None and judge.loss(-5.0) is None and judge.norm(1e-9) is None


def test_the_threshold_is_the_largest_value_that_is_no_spike() -> None:
    judge = judge_of([2.0 + 0.1 * (step % 7) for step in range(60)], [0.5 + 0.1 * (step % 5) for step in range(60)])
    spike = judge.loss(99.0)
    assert spike is not None
    assert judge.loss(spike.threshold * (1 - 1e-12)) is None
    assert judge.loss(spike.threshold * (1 + 1e-12)) is not None
    assert judge.norm(judge.norm_limit()) is None
    steep = judge.norm(math.nextafter(judge.norm_limit(), math.inf))
    assert steep is not None and steep.threshold == judge.norm_limit() and steep.z == pytest.approx(8.0)


def test_asking_changes_nothing() -> None:
    asked, silent = SpikeJudge(), SpikeJudge()
    for step in range(120):
        loss, norm = 3.0 - 0.01 * step + 0.2 * (step % 3), 0.5 + 0.2 * (step % 4)
        for value in (loss, 50.0, math.nan):
            asked.loss(value), asked.norm(value)
        for judge in (asked, silent):
            judge.add(loss, norm, spiked=False)
        assert asked.norm_limit() == silent.norm_limit() and asked.loss(50.0) == silent.loss(50.0)


def test_too_little_is_known_at_first() -> None:
    judge = SpikeJudge()
    for step in range(20):
        assert judge.norm_limit() == math.inf and judge.norm(1e30) is None, step
        judge.add(2.0, 0.5, spiked=False)
    assert judge.norm_limit() == pytest.approx(5.0)


def test_the_first_losses_are_judged_by_the_largest_of_them() -> None:
    judge = SpikeJudge()
    for loss in (7.66, 7.52):
        judge.add(loss, 1.0, spiked=False)
    assert judge.loss(100.0) is None  # two are too few
    judge.add(7.22, 1.0, spiked=False)
    assert judge.loss(9.19) is None and judge.loss(9.2) is not None  # 7.66 and a fifth
    assert flat(3, loss=0.5).loss(1.49) is None and flat(3, loss=0.5).loss(1.51) is not None  # a nat at least


def test_what_is_not_finite_is_no_spike_and_no_past() -> None:
    judge = flat()
    for value in (math.nan, math.inf):
        assert judge.loss(value) is None and judge.norm(value) is None
        for _ in range(200):
            judge.add(value, value, spiked=False)
    judge.add(2.0, None, spiked=False)
    judge.add(2.0, 0.0, spiked=False)
    assert judge.norm_limit() == pytest.approx(5.0) and judge.loss(2.17) is not None and judge.norm(None) is None


def test_spikes_in_a_row_become_the_past_at_last() -> None:
    judge = flat()
    for step in range(50):
        assert [spike.what for spike in seen(judge, 9.0, 80.0)] == ["loss", "gradient"], step
    assert seen(judge, 9.0, 80.0) == []
    assert judge.norm_limit() == pytest.approx(800.0)


def test_a_calm_step_between_them_starts_the_count_again() -> None:
    judge = flat()
    for _ in range(3):
        for _ in range(49):
            assert seen(judge, 9.0, 0.5)
        assert seen(judge, 2.0, 0.5) == []
    assert seen(judge, 9.0, 0.5)


def test_a_new_past_of_few_steps_is_judged_as_a_beginning() -> None:
    judge = SpikeJudge(patience=10)
    for loss in [2.0] * 40 + [9.0] * 10:
        judge.add(loss, loss, spiked=loss > 2.0)
    assert judge.norm_limit() == math.inf
    assert judge.loss(10.7) is None and judge.loss(10.9) is not None


def test_wild_steps_in_the_past_do_not_hide_a_spike() -> None:
    judge = flat(90)
    for _ in range(10):  # recorded as no spikes
        judge.add(9.0, 50.0, spiked=False)
    assert judge.loss(3.0) is not None and judge.norm(6.0) is not None


def test_the_past_is_the_latest_of_it() -> None:
    judge = judge_of([7.0 - 0.04 * step for step in range(100)], [10.0 * 0.96**step for step in range(100)])
    assert judge.loss(3.6) is None and judge.loss(4.5) is not None
    assert judge.norm_limit() < 5.0


def test_the_jitter_is_that_of_normal_noise() -> None:
    noise = random.Random(1)
    judge = SpikeJudge(window=2000, recent=2000)
    for _ in range(2000):
        judge.add(5.0 + noise.gauss(0, 0.2), math.exp(noise.gauss(0, 1.0)), spiked=False)
    spike = judge.loss(9.0)
    assert spike is not None and spike.threshold == pytest.approx(5.0 + 8 * 0.2, rel=0.03)
    assert math.log(judge.norm_limit()) == pytest.approx(8.0, rel=0.05)
