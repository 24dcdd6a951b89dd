"""Every law of a run on steps that fail: the right reading, of the right tensor, at the stated step and
not before. Healthy steps are silent. A count speaks at every share.
"""

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from measuring.records import Row
from narrowgauge.measuring.diagnose.laws import Laws
from narrowgauge.measuring.diagnose.step_metrics import StepMetrics
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import STAGES, Reading


def stepped(wrong: Callable[[int], Row], until: int = 600) -> list[StepMetrics]:
    healthy = {"loss": 3.0, "grad_norm": 0.5, "skipped": False}
    return [
        StepMetrics.of({"step": step, **healthy, **wrong(step)}) for step in range(1, until + 1)
    ]


def after(step: int, **fields: Any):
    return lambda number: fields if number >= step else {}


def told(steps: Iterable[StepMetrics], laws: Laws | None = None) -> list[Reading]:
    laws = laws or Laws()
    readings = []
    for step in steps:
        readings += laws.fresh(step)
    return readings


SCALED = {"loss_scale": 65536.0}
SLOW = {"tokens_per_second": 500.0, "seconds": 2.0}
CASES = {
    "stored-share": (stepped(after(400, stored={"a": 0.5, "b": 1.0})), "a", 404),
    "stored-share of steps that differ": (stepped(lambda s: {"stored": {"a": s % 2}}), "a", 16),
    "nonfinite": (stepped(lambda s: {"loss": math.nan} if 400 <= s < 424 else {}), "", 400),
    "skipped-steps": (stepped(lambda s: {"skipped": s >= 400}), "", 400),
    "not-restored": (stepped(lambda s: {"loss_scale": 2.0**16 if s >= 400 else 2.0**13}), "loss scale", 400),
    "zero-gradients": (stepped(lambda s: {"arrived": 0.0}, 40), "", 1),
    "missing-gradients": (stepped(lambda s: {"arrived": 1.0, "missing": ["a"]}, 40), "a", 1),
    "same-data": (stepped(lambda s: {"same_data": True}, 40), "", 1),
    "zero-rate": (stepped(lambda s: {"lr": 0.0 if s >= 400 else 1e-3, "largest": 0.0 if s >= 400 else 1e-3}), "", 400),
    "gradients-kept": (stepped(lambda s: {"kept": True}, 40), "", 1),
    "masters-apart": (stepped(after(400, stored={"a": 0.0}, behind=["a"])), "a", 404),
    "stored-share of audits": (stepped(lambda s: {"stalled": {"b": 0.3, "a": 0.5} if s == 400 else {}}), "b and 1 other", 400),
    "clip-norm": (stepped(after(400, arrived=1.02, limit=1.0)), "", 400),
    "clip-norm of a power of two": (stepped(after(400, arrived=2.0**-12, limit=1.0)), "", 400),
    "ranks-apart in gradients": (stepped(after(400, unsummed=["a"], apart=["b"])), "a", 400),
    "ranks-apart": (stepped(after(400, apart=["a"])), "a", 400),
    "weights-jump": (stepped(lambda s: {"largest": 2.0 if s == 400 else 1e-4, "lr": 1e-4, "largest_in": "a"}), "a", 400),
    "spike": (stepped(lambda s: {"loss": 5.0} if s == 400 else {}), "", 400),
    "slower-steps": (stepped(lambda s: SLOW if s >= 400 else {"tokens_per_second": 1000.0, "seconds": 1.0}), "", 400),
    "idle-device": (stepped(lambda s: {"utilization": 40.0}), "", 1),
}  # fmt: skip
"""By kind and case: the steps, and the tensor and the step of the first reading."""
STAGE_OF = {"nonfinite": "loss", "ranks-apart": "optimizer step"}
"""The stage of a case, where it is not its kind's."""


def test_every_kind_of_a_law_has_a_case_and_a_sentence():
    calls = ("ng.check", "ng.same", "check_resume")
    elsewhere = {kind.name for kind in KINDS.values() if kind.by.startswith(calls)}
    assert not set(KINDS) - set(CASES) - elsewhere
    for kind in KINDS.values():
        assert kind.stage in STAGES
        text = Reading(1, kind.stage, "", kind.name, 0.5, 1.0, 0.25).text
        assert text.endswith(".") and "{" not in text and "nan" not in text


@pytest.mark.parametrize("name", CASES)
def test_a_failure_is_told_of_its_tensor_at_its_step(name):
    steps, tensor, step = CASES[name]
    kind = name.partition(" ")[0]
    first, *others = told(steps)
    assert (first.what, first.tensor, first.step) == (kind, tensor, step)
    assert first.excess >= 1 and first.severity == KINDS[kind].severity
    assert first.stage == STAGE_OF.get(name, KINDS[kind].stage)
    assert {reading.what for reading in others} <= {kind}
    assert told(steps, Laws({kind})) == []


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_goes_on_as_if_it_was_never_interrupted(name):
    steps, _, step = CASES[name]
    whole = told(steps)
    for cut in (step - 1, step + 5):
        before = [x for x in steps if x.step <= cut]
        later = told([x for x in steps if x.step > cut], Laws((), before))
        assert later == whole[len(told(before)) :]


NUMBER = 200


@pytest.mark.parametrize("percent", [0, 2, 50, 88, 98, 100])
@pytest.mark.parametrize(
    ("kind", "tensor", "rare"),
    [
        ("zero-gradients", "", {"arrived": 0.0}),
        ("zero-gradients", "expert", {"zero": ["expert"]}),
        ("missing-gradients", "expert", {"missing": ["expert"]}),
        ("gradients-kept", "", {"kept": True}),
        ("same-data", "", {"same_data": True}),
    ],
)
def test_a_count_over_the_run_speaks_from_nine_in_ten_on(percent, kind, tensor, rare):
    """Games, policies and rare experts mean the others, which are named as not looked at."""
    laws = Laws()
    readings = []
    for step in range(NUMBER):
        is_so = (step + 1) * percent // 100 > step * percent // 100
        fields = {"arrived": 1.0, "missing": [], "kept": False, "same_data": False}
        fields |= rare if is_so else {}
        readings = laws.read(StepMetrics(step + 1, **fields))
    assert [(r.what, r.tensor) for r in readings] == [(kind, tensor)] * (percent > 90)
    assert [(r.what, r.tensor) for r in laws.usual] == [(kind, tensor)] * (0 < percent < 90)
    for reading in (*readings, *laws.usual):
        assert reading.value == pytest.approx(percent / 100) and f"{percent}.0%" in reading.text


def test_a_healthy_run_is_silent():
    noise = random.Random(0)
    steps = []
    for step in range(1, 2000):
        loss = 2.5 + 6.0 * math.exp(-step / 160) + 0.1 * noise.gauss(0, 1)
        norm = 0.5 * math.exp(0.3 * noise.gauss(0, 1))
        stored = {"a": 1 + 0.1 * noise.gauss(0, 1)}
        largest = 1e-4 * noise.random()
        numbers = {"loss": loss, "grad_norm": norm, "arrived": norm, "lr": 1e-4}
        steps.append(StepMetrics(step, skipped=False, stored=stored, largest=largest, **numbers))
    assert told(steps) == []


def test_an_overflow_while_the_loss_scale_is_searched_for_is_no_failure():
    overflow = {**SCALED, "grad_norm": math.inf, "skipped": True}
    assert told(stepped(lambda s: overflow if s in (150, 300) else SCALED)) == []
    search = stepped(lambda s: {"loss_scale": 2.0 ** max(24 - s, 10), "skipped": s < 14})
    assert told(search) == []
    micro_batches = stepped(lambda s: {"skipped": s % 4 != 0})
    assert told(micro_batches) == []
    (first, *_) = told(stepped(lambda s: {"skipped": s > 2}))
    assert (first.what, first.step) == ("skipped-steps", 3)
    readings = told(stepped(lambda s: {"skipped": s % 7 in (0, 2, 3, 4)}))
    assert {reading.what for reading in readings} == {"skipped-steps"}
    bad_loss = {**overflow, "loss": math.nan}
    (reading,) = told(stepped(lambda s: bad_loss if s == 300 else SCALED))
    assert (reading.what, reading.step, reading.stage) == ("nonfinite", 300, "loss")


def test_the_first_place_that_is_not_finite_is_told_at_its_step():
    """Weights that became so in a step are of that step, and not of the start."""
    steps = [
        StepMetrics(1, loss=3.0, bad=["b", "a"]),
        StepMetrics(2, loss=math.nan, bad_weight="a"),
    ]
    (reading,) = told(steps)
    assert (reading.step, reading.stage, reading.tensor) == (1, "gradient", "b and 1 other")
    (reading,) = told(steps[1:])
    assert (reading.step, reading.stage, reading.tensor) == (2, "between steps", "a")


def test_slow_steps_are_told_as_they_last():
    def at(rate):
        steps = [
            StepMetrics(s, tokens_per_second=1000 * rate(s), seconds=0.1 / rate(s))
            for s in range(1, 400)
        ]
        return [reading.step for reading in told(steps) if reading.what == "slower-steps"]

    assert at(lambda s: 0.1 if s >= 200 else 1.0) == [200]
    assert at(lambda s: 0.1 if s >= 207 and s % 10 else 1.0) == [207]
    assert at(lambda s: 1 / 90 if s % 4 == 0 else 1.0) == []  # each fourth step saves
    assert at(lambda s: 0.005 if s <= 25 else 1.0) == []  # the first ones compile
    assert at(lambda s: 0.005 if 200 <= s < 209 else 1.0) == []  # a slow disk for a while
    assert at(lambda s: 0.75 if s >= 200 else 1.0) == []
    assert at(lambda s: 0.3 if 200 <= s < 220 else 1.0) == []  # five seconds are lost


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5, 30])
@pytest.mark.parametrize("lasts", [1, 40])
def test_a_jump_is_told_whenever_it_begins(first, lasts):
    sizes = [2.0 if first <= step < first + lasts else 1e-4 for step in range(1, 61)]
    steps = [StepMetrics(step, largest=x, lr=1e-4) for step, x in enumerate(sizes, 1)]
    readings = told(steps)
    is_told = first > 1 or lasts == 1  # else it is the usual step
    assert [(r.what, r.step) for r in readings] == [("weights-jump", first)] * is_told


BLOOM = (
    (31214, 2.198845, False), (31215, 2.220424, False), (31216, 2.595213, True), (31217, 2.241558, False),
    (31218, 2.345279, False), (31219, 5.098124, True), (31220, 3.492029, True), (31221, 3.213059, True),
    (31222, 2.804948, True), (31250, 2.215699, False), (31251, 2.235667, False),
)  # fmt: skip
"""The first loss spike of BLOOM-176B as it was logged: iteration and loss (bigscience-workshop/bigscience,
train/tr11-176B-ml/chronicles.md, 2022-04-12), and whether it is a spike."""


def test_the_spike_of_bloom_is_seen_three_steps_before_its_loss_doubles_and_its_end_too():
    noise = random.Random(0)
    laws = Laws()
    for step in range(200):
        assert not laws.read(StepMetrics(step, loss=2.21 + noise.gauss(0, 0.015)))
    for step, loss, is_spike in BLOOM:
        assert len(laws.read(StepMetrics(step, loss=loss))) == is_spike, step


def test_rows_with_holes_are_normal():
    steps = [
        StepMetrics.of({"step": 1, "loss": "low", "grad_norm": 0.0, "stored": [], "bad": None})
    ]
    assert told(steps) == [] and not StepMetrics(1, loss=None, bad_weight="", stored={}).columns
    cut = StepMetrics.of({"step": 1, "bad": ["a"], "counts": {"bad": 3}})
    assert cut.bad == ["a", "tensor 2", "tensor 3"]


def test_tensors_that_rows_leave_out_are_counted_once():
    """Other rows name them, or none does."""
    for blocks, count, number in ((4, 20, 39), (1, 300, 299)):
        laws = Laws()
        for step in range(1, 41):
            names = [f"layers.{10 * (step % blocks) + place}" for place in range(10)]
            row = {"step": step, "missing": names, "counts": {"missing": count}}
            readings = laws.read(StepMetrics.of(row))
        (reading,) = [*laws.usual, *readings]
        assert reading.tensor.endswith(f"and {number} others"), reading
