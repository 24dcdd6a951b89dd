"""Every detector on a sequence that fails: the right event, of the right tensor, at the stated step and not before."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from narrowgauge.analysis.monitor.alarms import Alarms, halvings
from narrowgauge.analysis.monitor.detectors import CONDITIONS, DETECTORS, SERIOUS
from narrowgauge.runs.events import KINDS, Event
from narrowgauge.runs.older_events import with_detector
from narrowgauge.runs.schema import METRICS
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES

Row = dict[str, Any]
LAYER = "model.layers.1.mlp.down_proj"
OTHER = "model.layers.0.mlp.down_proj"
ATTENTION = "model.layers.1.self_attn"
ONSET = 400
"""The first sampled step of the failure; samples are 20 steps apart, from 20 on."""

HEALTHY: Row = {
    "tensor": {"amax": 2.0, "rms": 0.5, "nonfinite": 0, "underflow": 0.002, "overflow": 0.0, "sqnr_db": 31.5, "outlier": 9.0,
               "kurtosis": 6.0, "top_feature": 2.0, "top_to_rest": 0.03},
    "update": {"edq": 1.0, "noise": 0.006, "lost_fraction": 0.0, "unseen_fraction": 0.9, "update_to_weight": 1e-3,
               "update_to_ulp": 0.2, "imprecision_share": 0.9, "lost_decay": 0.01},
    "moment": {"bias": 1.0, "frozen_fraction": 0.02},
    "attention": {"max_logit": 12.0, "entropy": 0.7},
    "logits": {"max": 10.0, "log_z": 8.0},
    "step": {"loss": 3.0, "grad_norm": 0.5, "skipped": False},
}  # fmt: skip


def gauges(step: int, **wrong: Any) -> Row:
    """A row of two layers; ``input=…``, ``update=…`` and so on change figures of the second one."""

    def figures(kind: str, name: str, bad: bool) -> list[float | None]:
        healthy = HEALTHY["tensor" if name == "tensors" else kind]
        return [{**healthy, **(wrong.get(kind, {}) if bad else {})}[field] for field in METRICS[name]]

    tensors = {
        f"{kind}:{layer}{'.weight' if kind in ('weight', 'grad') else ''}": figures(kind, "tensors", layer == LAYER)
        for kind in ("weight", "input", "output_grad", "grad")
        for layer in (OTHER, LAYER)
    }
    pairs = ((OTHER, False), (LAYER, True))
    return {
        "step": step,
        "tensors": tensors,
        "updates": {f"{layer}.weight": figures("update", "updates", bad) for layer, bad in pairs},
        "moments": {f"{layer}.weight": figures("moment", "moments", bad) for layer, bad in pairs},
        "attention": {ATTENTION: figures("attention", "attention", True)},
        "logits": {**HEALTHY["logits"], **wrong.get("logits", {})},
    }


def step_row(step: int, **wrong: Any) -> Row:
    return {"step": step, **HEALTHY["step"], **wrong}


def sampled(onset: int = ONSET, until: int = ONSET + 200, **wrong: Any) -> list[Row]:
    """Samples that are healthy before the onset, and wrong from it on."""
    return [gauges(step, **(wrong if step >= onset else {})) for step in range(20, until + 1, 20)]


def stepped(wrong: Callable[[int], Row], until: int = 600) -> list[Row]:
    return [step_row(step, **wrong(step)) for step in range(1, until + 1)]


def run(recipe: Recipe | None, gauge_rows: list[Row] = [], step_rows: list[Row] = []) -> list[Event]:  # noqa: B006
    alarms = Alarms(recipe)
    events = [event for row in step_rows for event in alarms.on_step(row)]
    return events + [event for row in gauge_rows for event in alarms.on_gauges(row)]


WEIGHT = f"{LAYER}.weight"
FLOAT8, NAIVE, FLOAT16 = parse("float8-tensor/word"), parse("bfloat16/naive"), parse("float16/split")
SCALED = {"loss_scale": 65536.0}
# name: recipe, rows of gauges, rows of steps; kind, tensor and step of the one event.
CASES: dict[str, tuple[Recipe, list[Row], list[Row], str, str | None, int]] = {
    "lost-updates": (NAIVE, sampled(update={"edq": 0.3, "noise": 0.84}), [], "lost_updates", WEIGHT, 440),
    "unchanged-weights": (NAIVE, sampled(update={"edq": 0.95, "lost_fraction": 0.6, "imprecision_share": 0.7}), [],
                          "unchanged_weights", WEIGHT, 440),
    "lost-decay": (NAIVE, sampled(update={"edq": 0.97, "lost_decay": 0.8}), [], "lost_decay", WEIGHT, 440),
    "noise": (NAIVE, sampled(update={"noise": 20.0}), [], "noise", WEIGHT, 440),
    "weight-noise": (parse("bfloat16/weight8"), sampled(update={"noise": 2.5, "update_to_weight": 0.02}), [], "noise", WEIGHT,
                     440),
    "frozen-moments": (NAIVE, sampled(moment={"frozen_fraction": 0.9}), [], "frozen_moments", WEIGHT, 440),
    "underflow": (FLOAT8, sampled(output_grad={"underflow": 0.3, "sqnr_db": 4.0}), [], "underflow", f"output_grad:{LAYER}", 420),
    "overflow": (FLOAT8, sampled(input={"overflow": 0.02, "sqnr_db": 2.0}), [], "overflow", f"input:{LAYER}", 400),
    "growing-outliers": (FLOAT8, sampled(input={"outlier": 65.0}), [], "outliers", f"input:{LAYER}", 440),
    "growing-feature": (FLOAT8, sampled(input={"top_feature": 21.0}), [], "outliers", f"input:{LAYER}", 440),
    "drowning-feature": (FLOAT8, sampled(input={"top_feature": 4.7, "top_to_rest": 11.0}), [], "outliers", f"input:{LAYER}", 440),
    "weight-jump": (FLOAT8, sampled(weight={"amax": 2.0**13}), [], "outliers", f"weight:{WEIGHT}", 400),
    "input-jump": (FLOAT8, sampled(input={"amax": 2.0**13}), [], "outliers", f"input:{LAYER}", 400),
    "attention-logits": (NAIVE, sampled(attention={"max_logit": 2e4}), [], "attention", ATTENTION, 400),
    "attention-growth": (NAIVE, sampled(480, 600, attention={"max_logit": 150.0}), [], "attention", ATTENTION, 520),
    "attention-entropy": (NAIVE, sampled(attention={"entropy": 0.01}), [], "attention", ATTENTION, 440),
    "logit-drift": (NAIVE, sampled(logits={"log_z": -31.0}), [], "logits", None, 440),
    "dead-gradient": (NAIVE, sampled(grad={"rms": 0.0}), [], "dead_layer", f"grad:{WEIGHT}", 440),
    "dead-update": (NAIVE, sampled(update={"edq": math.nan}), [], "dead_layer", WEIGHT, 440),
    "nonfinite": (NAIVE, sampled(input={"nonfinite": 1}), [], "nonfinite", f"input:{LAYER}", 400),
    "nonfinite-gradient": (NAIVE, sampled(output_grad={"nonfinite": 1}), [], "nonfinite", f"output_grad:{LAYER}", 400),
    "nonfinite-scaled": (FLOAT16, sampled(grad={"nonfinite": 1}), [], "nonfinite", f"grad:{WEIGHT}", 440),
    "nonfinite-logits": (NAIVE, sampled(logits={"max": math.inf}), [], "nonfinite", None, 400),
    "nonfinite-attention": (NAIVE, sampled(attention={"max_logit": math.nan}), [], "nonfinite", ATTENTION, 400),
    "nonfinite-step": (NAIVE, [], stepped(lambda s: {"loss": math.nan} if s >= 400 else {}), "nonfinite", None, 400),
    "scale-halvings": (FLOAT16, [], stepped(lambda s: {"loss_scale": 2.0 ** (16 - sum(s >= k for k in (400, 420, 440)))}),
                       "loss_scale", None, 440),
    "scale-floor": (FLOAT16, [], stepped(lambda s: {"loss_scale": 1.0 if s >= 400 else 2.0}), "loss_scale", None, 400),
    # A tenth of the steps from 400 on: the tenth of them is a twentieth of the window, at 490.
    "scale-skips": (FLOAT16, [], stepped(lambda s: {**SCALED, "skipped": s >= 400 and s % 10 == 0}), "loss_scale", None, 490),
    "loss-spike": (NAIVE, [], stepped(lambda s: {"loss": 5.0} if s == 400 else {}), "loss_spike", None, 400),
    "gradient-spike": (NAIVE, [], stepped(lambda s: {"grad_norm": 6.0} if s == 400 else {}), "gradient_spike", None, 400),
    # A thousandth of a nat a step: the last 100 steps were lower by half of that, so 0.1 is there at 550, and is raised at the
    # end of the block of 20. The norm is five times as large after 161 steps, its level 50 later.
    "loss-climb": (NAIVE, [], stepped(lambda s: {"loss": 3.0 + max(0, s - 400) / 1000}), "loss_climb", None, 560),
    "gradient-growth": (NAIVE, [], stepped(lambda s: {"grad_norm": 0.5 * math.exp(max(0, s - 400) / 100)}, 660),
                        "growth", None, 620),
    "weight-surge": (NAIVE, sampled(weight={"amax": 9.0}), [], "outliers", f"weight:{WEIGHT}", 440),
    # Fifty readings are known at step 1000.
    "weight-growth": (NAIVE, sampled(1100, 1300, weight={"rms": 2.1}), [], "growth", f"weight:{WEIGHT}", 1140),
    "weight-peak": (NAIVE, [*sampled(1100, 1580, weight={"amax": 7.0}), *sampled(0, 1780, weight={"amax": 17.0})[79:]], [],
                    "outliers", f"weight:{WEIGHT}", 1640),
}  # fmt: skip


def test_every_detector_has_a_case() -> None:
    assert set(CASES) == set(DETECTORS)


@pytest.mark.parametrize("name", CASES)
def test_a_failure_is_told_once_at_its_step_of_its_tensor(name: str) -> None:
    recipe, gauge_rows, step_rows, kind, tensor, step = CASES[name]
    (event,) = run(recipe, gauge_rows, step_rows)
    assert (event.detector, event.kind, event.tensor, event.step) == (name, kind, tensor, step)
    detector = DETECTORS[name]
    assert event.kind == detector.kind and event.value is not None and event.threshold is not None
    assert detector.trips(event.value, event.threshold)
    assert event.message and event.advice.endswith(".") and "{" not in event.message + event.advice
    assert Event.from_row(event.row()) == event
    if name == "scale-halvings":
        assert (event.value, event.threshold) == (3.0, 3.0)
    # As versions wrote it whose events had no detector.
    older = {column: value for column, value in event.row().items() if column != "detector"}
    assert with_detector(older) == event.row()


@pytest.mark.parametrize("recipe", [NAIVE, FLOAT8, FLOAT16, None])
def test_a_healthy_run_is_silent(recipe: Recipe | None) -> None:
    noise = random.Random(0)

    def jitter(kind: str) -> dict[str, float]:
        return {
            name: value * math.exp(0.3 * noise.gauss(0, 1)) for name, value in HEALTHY[kind].items() if name != "edq"
        }

    rows = [
        gauges(step, **{kind: jitter("tensor") for kind in ("weight", "input", "output_grad", "grad")}, update=jitter("update"),
               attention=jitter("attention"), logits=jitter("logits"))
        for step in range(20, 3000, 20)
    ]  # fmt: skip
    steps = stepped(
        lambda s: {"loss": 3.0 + 0.1 * noise.gauss(0, 1), "grad_norm": 0.5 * math.exp(0.3 * noise.gauss(0, 1))}, 2000
    )
    assert run(recipe, rows, steps) == []


@pytest.mark.parametrize(
    ("recipe", "wrong"),
    [
        # Stochastic rounding: a small tensor's EDQ is uncertain, and the optimizer's audit knows by how much.
        (NAIVE, {"update": {"edq": 0.5, "noise": 8.0}}),
        (parse("bfloat16/stochastic"), {"update": {"edq": 0.0, "noise": 1.0}}),
        # Updates that are large, and noise that is large beside small updates alone.
        (parse("bfloat16/weight8"), {"update": {"noise": 0.9, "update_to_weight": 0.05}}),
        (parse("bfloat16/states8"), {"update": {"noise": 9.0, "update_to_weight": 0.005}}),
        # Stochastic second moments move seldom and are right on average; wide codes of any kind follow.
        (parse("bfloat16/word"), {"moment": {"frozen_fraction": 0.9, "bias": 1.2}}),
        (parse("bfloat16/naive"), {"moment": {"frozen_fraction": 0.4, "bias": 1.2}}),
        # A tail, a low part or stochastic rounding keeps what a step does not show; what nobody meant to move is not lost.
        (parse("bfloat16/word"), {"update": {"edq": 0.95, "lost_fraction": 0.6, "imprecision_share": 0.7}}),
        (parse("bfloat16/collage-plus"), {"update": {"edq": 0.95, "lost_fraction": 0.6, "imprecision_share": 0.7}}),
        (parse("bfloat16/stochastic"), {"update": {"edq": 0.95, "lost_fraction": 0.9, "imprecision_share": 0.9}}),
        (NAIVE, {"update": {"edq": 1.0, "lost_fraction": 0.1, "imprecision_share": 0.95}}),
        # What a healthy cast to four bits drops, or cuts off by its power-of-two scale.
        (parse("mxfp4/word"), {"input": {"underflow": 0.74, "overflow": 0.1, "sqnr_db": 12.2}}),
        # Outliers hurt no operand that enters as it is, and massive ones that were always there are no growth.
        (parse("bfloat16/word"), {"input": {"outlier": 500.0, "top_feature": 50.0, "sqnr_db": None}}),
        (FLOAT8, {"output_grad": {"outlier": 178.0, "top_feature": 9.0}}),
        (FLOAT8, {"input": {"outlier": 50.0, "top_feature": 15.0, "top_to_rest": 3.3}}),
        # Weights that no gradient moves far enough to be seen are not dead.
        (NAIVE, {"update": {"update_to_weight": 0.0, "unseen_fraction": 1.0}}),
    ],
)
def test_what_only_looks_like_a_failure_is_silent(recipe: Recipe, wrong: Row) -> None:
    assert run(recipe, sampled(**wrong)) == []


def test_outliers_that_were_always_there_are_no_growth() -> None:
    assert run(FLOAT8, sampled(0, 2000, input={"outlier": 500.0, "top_feature": 50.0})) == []


def test_a_feature_that_grows_is_seen_however_few_there_are() -> None:
    """Of 24 features none can be more than 4.9 times the rms of all; but it can drown the others."""
    for count in (8, 24, 128, 4096):
        rows = []
        for k in range(140):
            to_rest = 1.21 ** max(0, k - 20) / (count - 1)
            peak = math.sqrt(count * to_rest / (1 + to_rest))
            rows.append(gauges(20 * (k + 1), input={"top_feature": peak, "top_to_rest": to_rest}))
        (event,) = run(FLOAT8, rows)
        assert (event.kind, event.tensor) == ("outliers", f"input:{LAYER}")
        assert event.value is not None and event.threshold == (10.0 if count < 440 else 20.0)


def test_slow_growth_is_seen_though_no_step_of_it_is_large() -> None:
    rows = [gauges(20 * n, input={"outlier": 20.0 * 1.01**n}) for n in range(1, 300)]
    (event,) = run(FLOAT8, rows)
    assert event.kind == "outliers" and event.value is not None and 80 < event.value < 100


def test_a_weight_that_grows_by_a_percent_a_step_is_seen_within_a_few_samples() -> None:
    for rate, within in ((1.01, 500), (1.02, 320)):
        rows = [gauges(s, weight={"amax": 0.5 * rate ** max(0, s - ONSET)}) for s in range(20, ONSET + 600, 20)]
        event = run(NAIVE, rows)[0]
        assert (event.kind, event.tensor) == ("outliers", f"weight:{WEIGHT}") and ONSET < event.step <= ONSET + within


def test_a_weight_that_decay_does_not_hold_is_seen_and_one_that_settles_is_not() -> None:
    """From 0.02, with updates of 0.003 at random: the rms of 10,000 steps with a decay of 0.1 and without one."""

    def grown(step: int, decay: float) -> float:
        shrink = (1 - 0.003 * decay) ** 2
        spread = (0.2 * 0.003) ** 2 * ((1 - shrink**step) / (1 - shrink) if decay else step)
        return math.sqrt(0.02**2 * shrink**step + spread * 8)

    def raised(decay: float) -> list[str]:
        return [
            event.kind
            for event in run(NAIVE, [gauges(s, weight={"rms": grown(s, decay)}) for s in range(20, 40_001, 20)])
        ]

    assert raised(0.0) == ["growth"] and raised(0.1) == []


def test_a_weight_that_jumped_and_stays_is_told_once() -> None:
    assert [event.kind for event in run(NAIVE, sampled(1200, 2400, weight={"amax": 2.0**13}))] == ["outliers"]


def test_weights_that_begin_at_zero_may_grow() -> None:
    rows = [gauges(s, weight={"rms": 1e-5 * s, "amax": 2e-5 * s}) for s in range(0, 3000, 20)]
    assert [event for event in run(NAIVE, rows) if event.kind in ("growth", "outliers")] == []


def test_a_second_moment_off_its_shadow_is_frozen_however_it_is_rounded() -> None:
    for recipe in (parse("bfloat16/word"), None):
        for bias in (1.6, 0.6):
            (event,) = run(recipe, sampled(moment={"frozen_fraction": 0.7, "bias": bias}))
            assert (event.kind, event.step) == ("frozen_moments", 440)


def test_an_overflow_while_the_loss_scale_is_searched_for_is_no_failure() -> None:
    def overflow(step: int) -> Row:
        return {**SCALED, "grad_norm": math.inf, "skipped": True} if step in (150, 300) else SCALED

    once = [gauges(step, **({"grad": {"nonfinite": 9}} if step in (300, 320) else {})) for step in range(20, 601, 20)]
    assert run(FLOAT16, once, stepped(overflow)) == []
    (event,) = run(NAIVE, [], stepped(lambda s: {"grad_norm": math.inf, "skipped": True} if s == 300 else {}))
    assert (event.kind, event.step) == ("nonfinite", 300)
    (event,) = run(
        FLOAT16, [], stepped(lambda s: {**SCALED, "loss": math.nan, "skipped": True} if s == 300 else SCALED)
    )
    assert (event.kind, event.step) == ("nonfinite", 300)


def test_a_loss_scale_may_be_found_from_above_in_the_first_steps() -> None:
    def search(step: int) -> Row:
        return {"loss_scale": 2.0 ** (24 - min(step, 60) // 5), "skipped": step <= 60 and step % 5 == 0}

    assert run(FLOAT16, [], stepped(search)) == []
    assert halvings([16.0, 8.0, 16.0, 2.0]) == 4


def test_the_same_trouble_is_told_again_only_after_it_was_over() -> None:
    def raised(*edq: float) -> list[int]:
        rows = [gauges(20 * n, update={"edq": value, "noise": 0.8}) for n, value in enumerate(edq, 1)]
        return [event.step for event in run(NAIVE, rows)]

    assert raised(0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5) == [60, 180]
    assert raised(0.5, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 0.5) == [60]  # it takes three good readings
    assert raised(0.5, 0.5, 0.5, 0.93, 0.93, 0.93, 0.93, 0.5, 0.5, 0.5) == [60]  # 0.93 is not well
    assert raised(0.5, 0.5, 0.95, 0.5, 0.5, 0.95) == []  # nor are two bad ones in a row enough


def test_a_trouble_is_over_when_its_condition_is() -> None:
    rows = [
        gauges(20 * n, input={"underflow": 0.6, "sqnr_db": db})
        for n, db in enumerate([4.0] * 4 + [30.0] * 3 + [4.0] * 4, 1)
    ]
    assert [event.step for event in run(FLOAT8, rows)] == [40, 180]


def test_a_spike_is_told_once_until_ten_steps_were_calm() -> None:
    def raised(*steps: int) -> list[int]:
        rows = stepped(lambda s: {"loss": 6.0} if s in steps else {})
        return [event.step for event in run(NAIVE, [], rows)]

    assert raised(100, 101, 102, 110) == [100]
    assert raised(100, 111) == [100, 111]


def test_many_tensors_at_once_make_one_event_that_names_the_worst() -> None:
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(5)]
    rows: list[Row] = [
        {"step": step, "updates": {name: [0.8 - 0.1 * (n == 3) - 0.01 * n, 0.5] for n, name in enumerate(names)}}
        for step in range(20, 200, 20)
    ]
    (event,) = run(NAIVE, rows)
    assert event.tensor == names[3] and event.message.endswith("; the same holds for 4 more tensors")
    late = [
        {"step": row["step"], "updates": {**row["updates"], "z": [0.1 if row["step"] > 100 else 1.0, 0.5]}}
        for row in rows
    ]
    assert [(event.step, event.tensor) for event in run(NAIVE, late)] == [(60, names[3]), (160, "z")]


def test_of_many_tensors_that_are_not_finite_the_first_to_be_made_is_named() -> None:
    bad = {"nonfinite": 5}
    (event,) = run(NAIVE, sampled(grad={"nonfinite": 900}, output_grad=bad, input=bad))
    assert event.tensor == f"input:{LAYER}" and event.message.endswith("; the same holds for 2 more tensors")


def test_two_detectors_of_a_kind_do_not_both_tell_of_one_tensor() -> None:
    rows = [
        gauges(step, attention={"max_logit": 2e4, "entropy": 0.01} if step >= 400 else {})
        for step in range(20, 900, 20)
    ]
    assert [(event.kind, event.step) for event in run(NAIVE, rows)] == [("attention", 400)]


@pytest.mark.parametrize("name", CASES)
def test_rebuilt_alarms_go_on_as_if_never_interrupted(name: str) -> None:
    recipe, gauge_rows, step_rows, *_, step = CASES[name]
    for cut in (step - 1, step, step + 5):
        rebuilt = Alarms.rebuilt(
            recipe, [r for r in step_rows if r["step"] <= cut], [r for r in gauge_rows if r["step"] <= cut]
        )
        later = [e for row in step_rows if row["step"] > cut for e in rebuilt.on_step(row)]
        later += [e for row in gauge_rows if row["step"] > cut for e in rebuilt.on_gauges(row)]
        assert later == [event for event in run(recipe, gauge_rows, step_rows) if event.step > cut]


def test_it_does_not_matter_how_steps_and_gauges_are_interleaved() -> None:
    steps = stepped(lambda s: {**SCALED, "loss": 3.0 + (s == 400), "grad_norm": math.inf if s == 420 else 0.5})
    samples = sampled(grad={"nonfinite": 3}, input={"outlier": 90.0})
    mixed, events = Alarms(FLOAT16), []
    for row in sorted(itertools.chain(steps, samples), key=lambda row: (row["step"], "tensors" in row)):
        events += mixed.on_gauges(row) if "tensors" in row else mixed.on_step(row)
    expected = run(FLOAT16, samples, steps)
    assert len(events) == 4 and sorted(map(repr, events)) == sorted(map(repr, expected))


def test_a_long_spike_does_not_become_the_past() -> None:
    alarms = Alarms.rebuilt(NAIVE, stepped(lambda s: {"loss": 6.0} if s > 100 else {}, 125))
    assert alarms.judge.loss(6.0) is not None


def test_the_judge_that_a_trainer_asks_is_the_one_that_alarms() -> None:
    alarms = Alarms.rebuilt(NAIVE, stepped(lambda s: {}, 50))
    spike = alarms.judge.loss(9.0)
    (event,) = alarms.on_step(step_row(51, loss=9.0, grad_norm=None, skipped=True))
    assert spike is not None and (event.kind, event.value, event.threshold) == (
        "loss_spike",
        spike.value,
        spike.threshold,
    )
    assert alarms.judge.loss(9.0) == spike  # a spike does not become the past


@pytest.mark.parametrize(
    "row",
    [
        {"step": 1},
        {"step": 1, "tensors": None, "updates": {}, "logits": {}},
        {"step": 1, "tensors": {"grad:w": []}, "updates": {"w": [None] * 6}, "moments": {"w": [1.0]}},
        {
            "step": 1,
            "tensors": {"unheard-of:w": [0.0] * 20},
            "attention": {"a": [None, None]},
            "logits": {"log_z": None},
        },
        {"step": 1, "unheard-of": {"w": [math.nan]}},
    ],
)
def test_rows_with_holes_are_normal(row: Row) -> None:
    alarms = Alarms()
    assert alarms.on_gauges(row) == []
    assert alarms.on_step({"step": 1}) == []


def test_the_tables_name_only_what_exists() -> None:
    worked_out = {"updates.intended", "attention.nonfinite", "logits.nonfinite", "logits.log_z", "steps.halvings",
                  "steps.skipped", "steps.climb", "steps.growth", "steps.nonfinite", "steps.loss_scale", "steps.loss",
                  "steps.grad_norm"}  # fmt: skip
    known = {f"{table}.{name}" for table, names in METRICS.items() for name in names} | worked_out
    for name, row in DETECTORS.items():
        assert row.name == name and row.kind in KINDS and row.metric in known
        assert row.condition in ("", *CONDITIONS) and row.source and row.clears != 1.0
        assert not row.relative or row.window >= 3
    assert set(SERIOUS) < {row.kind for row in DETECTORS.values()}
    assert {row.condition for row in DETECTORS.values()} == {"", *CONDITIONS}
    assert set(METRICS["tensors"]) >= {"amax", "outlier"}


@pytest.mark.parametrize("name", [name for name, row in COMPUTES.items() if not row.is_wide])
def test_every_narrow_compute_has_a_safer_one_that_ends_in_bfloat16(name: str) -> None:
    chain = [name]
    while chain[-1] != "bfloat16":
        chain.append(COMPUTES[chain[-1]].fallback)
        assert chain[-1] in COMPUTES and len(chain) < 6, chain


def test_advice_is_the_run_s_own() -> None:
    for name in ("bfloat16/naive", "bfloat16/kahan", "float16/split"):
        recipe, rows = parse(name), CASES["lost-updates"][1]
        assert f"'{recipe.storage.fallback}'" in run(recipe, rows)[0].advice
        assert recipe.storage.fallback in STORAGES
    advice = run(parse("mxfp4/word"), CASES["underflow"][1])[0].advice
    assert "'mxfp8'" in advice and LAYER in advice


def test_nothing_is_no_jump() -> None:
    """A tensor that is zero, and stays so, has not grown."""
    alarms = Alarms()
    for step in range(20, 200, 20):
        row = {"step": step, "tensors": {"weight:lora_B.weight": [0.0, 0.0, 0, None, None, None, None, None, None]}}
        assert [e for e in alarms.on_gauges(row) if e.kind == "outliers"] == []


def test_an_update_that_was_never_intended_is_told_from_one_that_was_not_audited() -> None:
    for edq, dead in ((math.nan, True), (None, False)):
        alarms, raised = Alarms(), []
        for step in range(20, 120, 20):
            raised += alarms.on_gauges({"step": step, "updates": {"w": [edq, None, None, None, 0.0, None]}})
        assert [e.kind for e in raised] == (["dead_layer"] if dead else [])


@pytest.mark.parametrize(
    "table", [{"attention": {"a": [math.nan, math.nan]}}, {"logits": {"max": math.nan, "log_z": math.nan}}]
)
def test_attention_and_logits_that_are_nan_are_told(table: dict[str, Any]) -> None:
    assert [event.kind for event in Alarms().on_gauges({"step": 20, **table})] == ["nonfinite"]


def test_lost_updates_that_the_audit_raises_are_not_raised_again() -> None:
    rows = sampled(update={"edq": 0.3, "noise": 0.84})
    kinds = []
    for is_audited in (False, True):
        alarms = Alarms(NAIVE, is_audited=is_audited)
        kinds.append([event.kind for row in rows for event in alarms.on_gauges(row)])
        assert Alarms.rebuilt(NAIVE, gauges=rows, is_audited=is_audited).facts.is_audited is is_audited
    assert kinds == [["lost_updates"], []]


def test_a_message_has_the_value_and_the_threshold_and_the_event_has_advice() -> None:
    shown = {row.name for row in DETECTORS.values() if "{value" in row.message and "{limit" in row.message}
    # A spike's sentence is SpikeJudge's; of these the threshold is zero, one or the floor of a loss scale.
    others = {"loss-spike", "gradient-spike", "dead-gradient", "dead-update", "scale-floor"}
    nonfinite = {row.name for row in DETECTORS.values() if row.kind == "nonfinite"}
    assert shown == set(DETECTORS) - others - nonfinite and all(row.advice for row in DETECTORS.values())
