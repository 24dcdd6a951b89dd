"""A climb is seen though no step of it is large; noise of any kind, a fall and what comes back by itself are none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from narrowgauge.analysis.alarms import Alarms
from narrowgauge.analysis.detectors import DETECTORS
from narrowgauge.analysis.spikes import DriftJudge
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


@pytest.mark.parametrize("jitter", [0.03, 0.3])
@pytest.mark.parametrize("noise", NOISES)
def test_a_healthy_run_has_no_climb(noise: str, jitter: float) -> None:
    assert raised(record(noise, 0, jitter)) == []
    for seed in range(1, 3):
        drawn = NOISES[noise](seed)
        assert (
            max(climbs(level(step) + jitter * next(drawn) for step in range(6000))) < DETECTORS["loss-climb"].threshold
        )


# How high it climbs, over how many steps, under how much noise; by how many steps after its onset it is raised. A batch of
# 10,000 tokens jitters by about 0.1 nats, one of 1,000 by 0.3.
CLIMBS = [
    (0.3, 300, 0.1, 360),
    (0.5, 500, 0.33, 640),
]


@pytest.mark.parametrize(("height", "over", "jitter", "within"), CLIMBS)
def test_a_slow_climb_is_told_in_time_and_the_same_record_without_it_is_not(
    height: float, over: int, jitter: float, within: int
) -> None:
    climb = ramp(height, over)
    for seed in range(2):
        rows = record("normal", seed, jitter, ONSET + within, climb)
        alarms = Alarms()
        (event,) = [event for row in rows for event in alarms.on_step(row)]  # and no spike
        assert event.kind == "loss_climb" and ONSET < event.step <= ONSET + within
        assert event.value is not None and 0.1 <= event.value <= climb(event.step)
        assert raised(record("normal", seed, jitter, ONSET + within)) == []
