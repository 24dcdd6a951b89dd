"""A climb is seen though no step of it is large; noise of any kind, a fall and what comes back by itself are none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from statistics import fmean
from typing import Any

import pytest

from narrowgauge.analysis.monitor.alarms import Alarms
from narrowgauge.analysis.monitor.detectors import DETECTORS
from narrowgauge.analysis.monitor.spikes import DriftJudge
from narrowgauge.runs.events import Event

Row = dict[str, Any]
SLOW = ("loss_climb", "growth")
ONSET = 800


def normal(seed: int) -> Iterator[float]:
    draw = random.Random(seed)
    while True:
        yield draw.gauss(0, 1)


def heavy(seed: int) -> Iterator[float]:
    """Student's t of 3, of variance 1: now and then a batch is far off."""
    draw = random.Random(seed)
    while True:
        yield draw.gauss(0, 1) / math.sqrt(sum(draw.gauss(0, 1) ** 2 for _ in range(3)))


def in_order(seed: int) -> Iterator[float]:
    """Batches that are like the one before: half of the noise stays from step to step."""
    draw, value = random.Random(seed), 0.0
    while True:
        value = 0.5 * value + math.sqrt(0.75) * draw.gauss(0, 1)
        yield value


NOISES: dict[str, Callable[[int], Iterator[float]]] = {"normal": normal, "heavy": heavy, "in order": in_order}


def level(step: int, total: int = 2000) -> float:
    """The loss of a healthy run: a warm-up in which it hardly moves, a fall, and a long even part."""
    return 2.5 + 5.0 * math.exp(-max(0, step - 40) / 90) + 0.1 * math.exp(-step / total)


def record(
    noise: str, seed: int, jitter: float, steps: int = 2000, climb: Callable[[int], float] = lambda step: 0.0
) -> list[Row]:
    losses, norms = NOISES[noise](seed), NOISES[noise](seed + 1000)
    return [
        {
            "step": step,
            "loss": level(step) + jitter * next(losses) + climb(step),
            "grad_norm": (0.3 + math.exp(-step / 50)) * math.exp(0.3 * next(norms)),
        }
        for step in range(1, steps + 1)
    ]


def raised(rows: list[Row], alarms: Alarms | None = None) -> list[Event]:
    alarms = alarms or Alarms()
    return [event for row in rows for event in alarms.on_step(row) if event.kind in SLOW]


def ramp(height: float, over: int, onset: int = ONSET) -> Callable[[int], float]:
    """Nothing until the onset, then a climb that stays."""
    return lambda step: height * min(1.0, max(0, step - onset) / over)


def climbs(losses: Iterable[float]) -> list[float]:
    judge = DriftJudge()
    return [climb for loss in losses if (climb := judge.add(loss)) is not None]


@pytest.mark.parametrize("jitter", [0.0, 0.03, 0.3, 1.0])
@pytest.mark.parametrize("noise", NOISES)
def test_a_healthy_run_has_no_climb(noise: str, jitter: float) -> None:
    assert raised(record(noise, 0, jitter)) == []
    for seed in range(1, 6):
        drawn = NOISES[noise](seed)
        assert (
            max(climbs(level(step) + jitter * next(drawn) for step in range(6000))) < DETECTORS["loss-climb"].threshold
        )


# How high it climbs, over how many steps, under how much noise; by how many steps after its onset it is raised. A batch of
# 10,000 tokens jitters by about 0.1 nats, one of 1,000 by 0.3.
CLIMBS = [
    (0.3, 300, 0.02, 260),
    (0.3, 300, 0.1, 360),
    (0.3, 100, 0.05, 160),
    (0.5, 500, 0.1, 360),
    (0.5, 500, 0.33, 640),
    (1.0, 300, 0.33, 300),
]


@pytest.mark.parametrize(("height", "over", "jitter", "within"), CLIMBS)
def test_a_slow_climb_is_told_in_time_and_the_same_record_without_it_is_not(
    height: float, over: int, jitter: float, within: int
) -> None:
    climb = ramp(height, over)
    for seed in range(4):
        rows = record("normal", seed, jitter, ONSET + within, climb)
        alarms = Alarms()
        (event,) = [event for row in rows for event in alarms.on_step(row)]  # and no spike
        assert event.kind == "loss_climb" and ONSET < event.step <= ONSET + within
        assert event.value is not None and 0.1 <= event.value <= climb(event.step)
        assert raised(record("normal", seed, jitter, ONSET + within)) == []


@pytest.mark.parametrize("noise", NOISES)
def test_what_it_says_is_less_than_the_climb(noise: str) -> None:
    for seed in range(6):
        for height in (0.0, 0.5, 2.0):
            drawn = NOISES[noise](seed)
            climb_bounds = climbs(3.0 + height * (step > 1000) + 0.2 * next(drawn) for step in range(3000))
            assert height - 0.25 <= max(climb_bounds) <= height + 0.02


def test_a_falling_loss_and_one_that_rests_have_none() -> None:
    for slope in (0.0, -1e-4, -1e-2):
        assert max(climbs(50.0 + slope * step for step in range(4000))) <= 0.0


def test_a_climb_has_the_unit_of_its_figure() -> None:
    losses = [row["loss"] for row in record("heavy", 0, 0.3, 1200, ramp(0.5, 200))]
    assert climbs(4 * loss for loss in losses) == [4 * climb for climb in climbs(losses)]
    assert climbs(loss + 64 for loss in losses) == pytest.approx(climbs(losses), abs=1e-9)


def test_one_wild_reading_moves_no_level() -> None:
    for seed in range(4):
        drawn = normal(seed)
        losses = [2.0 + 0.1 * next(drawn) + 40.0 * (step == 990) for step in range(2000)]
        assert max(climbs(losses)) < 0.0


def test_the_longer_the_span_the_less_is_allowed_for_noise() -> None:
    def climb_bounds(span: int) -> float:
        judge, drawn = DriftJudge(spans=(span,)), normal(0)
        losses = (2.0 + (step > 1000) + 0.33 * next(drawn) for step in range(4000))
        return fmean([climb for loss in losses if (climb := judge.add(loss)) is not None][-50:])

    # Of a climb by 1, all but twice five standard errors of the mean of the middle half of so many blocks of 20.
    for span in (5, 10, 20):
        assert climb_bounds(span) == pytest.approx(1.0 - 10 * 1.09 * 0.33 / math.sqrt(20 * span), abs=0.1)
    assert climb_bounds(5) < climb_bounds(10) < climb_bounds(20)
    assert {5, 10, 20} == set(DriftJudge().spans)


def test_too_little_is_known_for_two_hundred_steps() -> None:
    judge = DriftJudge()
    climb_bounds = [judge.add(float(step)) for step in range(400)]
    known = [step + 1 for step, climb in enumerate(climb_bounds) if climb is not None]
    assert known == list(range(220, 401, 20))


@pytest.mark.parametrize("length", [1, 30, 45])
def test_a_spike_that_comes_back_is_no_climb(length: int) -> None:
    for seed in range(4):
        rows = record("normal", seed, 0.1, climb=lambda step: 4.0 if 1000 <= step < 1000 + length else 0.0)
        assert raised(rows) == []


def test_a_jump_that_stays_is_a_climb_once_it_is_no_spike_any_more() -> None:
    rows = record("normal", 0, 0.1, climb=lambda step: 4.0 * (step >= 1000))
    (event,) = raised(rows)
    assert event.kind == "loss_climb" and 1050 < event.step <= 1140


def test_a_bump_at_the_end_of_the_warm_up_is_no_climb() -> None:
    for seed in range(4):
        rows = record("normal", seed, 0.2, 600, climb=lambda step: 0.5 * math.exp(-(((step - 100) / 30) ** 2)))
        assert raised(rows) == []


def test_a_climb_is_told_again_only_after_it_came_back() -> None:
    def twice(step: int) -> float:
        return 0.6 * (600 < step <= 1000) + 0.6 * (step > 1500)

    first, second = raised(record("normal", 0, 0.05, climb=twice))
    assert 600 < first.step < 800 and 1500 < second.step < 1700
    assert len(raised(record("normal", 0, 0.05, climb=lambda step: 0.6 * (step > 600)))) == 1


def test_a_gradient_norm_that_grows_slowly_is_told_as_a_factor() -> None:
    def grown(seed: int, rate: float) -> list[Row]:
        rows = record("normal", seed, 0.1, 1600)
        return [{**row, "grad_norm": row["grad_norm"] * math.exp(rate * max(0, row["step"] - ONSET))} for row in rows]

    for seed in range(4):
        (event,) = raised(grown(seed, math.log(12) / 500))
        assert event.kind == "growth" and event.tensor is None and 5.0 <= (event.value or 0.0) < 12.0
        assert ONSET + 325 < event.step <= ONSET + 500
        assert raised(grown(seed, math.log(3) / 800)) == []  # healthy norms grow, too


def test_a_gradient_spike_that_comes_back_is_no_growth() -> None:
    rows = record("normal", 0, 0.1)
    spiked = [{**row, "grad_norm": row["grad_norm"] * (1e4 if 1000 <= row["step"] < 1045 else 1)} for row in rows]
    assert raised(spiked) == []


def test_steps_without_a_loss_or_a_norm_do_not_count() -> None:
    rows = record("normal", 0, 0.05, 1400, ramp(0.5, 200))
    holes = [
        {"step": 0, "loss": math.nan, "grad_norm": math.inf},
        {"step": 0, "loss": None, "grad_norm": None},
        {"step": 0, "loss": math.inf, "grad_norm": 0.0, "skipped": True},
        {"step": 0},
    ]
    torn = [row for number, row in enumerate(rows) for row in ((*holes, row) if number % 50 == 7 else (row,))]
    assert raised(torn) == raised(rows) != []


def test_a_resumed_run_tells_what_an_uninterrupted_one_does() -> None:
    for seed in range(3):
        rows = record("heavy", seed, 0.1, 1500, ramp(0.5, 300))
        (event,) = raised(rows)
        for cut in (ONSET, event.step - 7, event.step - 1):
            assert raised(rows[cut:], Alarms.rebuilt(None, rows[:cut])) == [event]
        assert raised(rows[event.step :], Alarms.rebuilt(None, rows[: event.step])) == []


def test_a_run_that_went_back_has_not_climbed() -> None:
    """What was deleted is forgotten: the lowest, too, of a part that went astray downward."""
    astray, well = record("normal", 2, 0.1, 1500, ramp(2.0, 300)), record("normal", 3, 0.1, 2000)
    assert raised(astray) != []
    assert raised(well[800:], Alarms.rebuilt(None, astray[:800])) == []
    low = record("normal", 2, 0.1, 1500, ramp(-1.0, 100))
    assert raised(well[800:], Alarms.rebuilt(None, low)) != []
    assert raised(well[800:], Alarms.rebuilt(None, low[:800])) == []
