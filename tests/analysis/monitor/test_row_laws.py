"""Every law of rows on a sequence that fails: the right reading, of the right tensor, at the stated
step and not before.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from analysis.diagnosis.records import ATTENTION, HEALTHY, LAYER, Row, gauges
from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.laws import Laws
from narrowgauge.analysis.reading import Reading
from narrowgauge.analysis.snapshot import Facts, Snapshot
from narrowgauge.analysis.thresholds import Z
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

ONSET = 400
"""The first sampled step of the failure; samples are 20 steps apart, from 20 on."""


def step_row(step: int, **wrong: Any) -> Row:
    return {"step": step, "loss": 3.0, "grad_norm": 0.5, "skipped": False, **wrong}


def sampled(onset: int = ONSET, until: int = ONSET + 200, **wrong: Any) -> list[Row]:
    """Samples that are healthy before the onset, and wrong from it on."""
    rows = []
    for step in range(20, until + 1, 20):
        rows.append(gauges(step, **(wrong if step >= onset else {})))
    return rows


def stepped(wrong: Callable[[int], Row], until: int = 600) -> list[Row]:
    return [step_row(step, **wrong(step)) for step in range(1, until + 1)]


def run(
    recipe: Recipe | None, gauge_rows: Sequence[Row] = (), step_rows: Sequence[Row] = ()
) -> list[Reading]:
    return read(Laws(Facts().advised_for(recipe)), step_rows, gauge_rows)


def read(laws: Laws, step_rows: Sequence[Row], gauge_rows: Sequence[Row]) -> list[Reading]:
    snapshots = [*map(Snapshot.of_step, step_rows), *map(Snapshot.of_gauges, gauge_rows)]
    readings: list[Reading] = []
    for now in snapshots:
        readings += laws.read(now)
    return readings


WEIGHT = f"{LAYER}.weight"
FLOAT8 = parse("float8-tensor/word")
NAIVE = parse("bfloat16/naive")
FLOAT16 = parse("float16/split")
SCALED = {"loss_scale": 65536.0}
OVERFLOW = {"loss_scale": math.inf, "grad_norm": math.inf, "skipped": True}
# name: recipe, rows of gauges, rows of steps; tensor and step of the one reading.
CASES: dict[str, tuple[Recipe, list[Row], list[Row], str, int]] = {
    "lost-decay": (NAIVE, sampled(update={"edq": 0.97, "lost_decay": 0.8}), [], WEIGHT, 440),
    "underflow": (FLOAT8, sampled(output_grad={"underflow": 0.3, "sqnr_db": 4.0}), [], f"output_grad:{LAYER}", 420),
    "overflow": (FLOAT8, sampled(input={"overflow": 0.02, "sqnr_db": 2.0}), [], f"input:{LAYER}", 400),
    "growing-outliers": (FLOAT8, sampled(input={"outlier": 65.0}), [], f"input:{LAYER}", 440),
    "attention-logits": (NAIVE, sampled(attention={"max_logit": 2e4}), [], ATTENTION, 400),
    "nonfinite-step": (NAIVE, [], stepped(lambda s: {"loss": math.nan} if 400 <= s < 424 else {}), "", 400),
    "divergence": (FLOAT16, [], stepped(lambda s: OVERFLOW if s >= 400 else SCALED), "", 424),
    "scale-halvings": (FLOAT16, [], stepped(lambda s: {"loss_scale": 2.0 ** (16 - sum(s >= k for k in (400, 420, 440)))}),
                       "", 440),
    "loss-scale-anew": (FLOAT16, [], stepped(lambda s: {"loss_scale": 2.0**16 if s >= 400 else 2.0**13}), "", 400),
    "scale-floor": (FLOAT16, [], stepped(lambda s: {"loss_scale": 1.0 if s >= 400 else 2.0}), "", 400),
    "loss-spike": (NAIVE, [], stepped(lambda s: {"loss": 5.0} if s == 400 else {}), "", 400),
    "gradient-spike": (NAIVE, [], stepped(lambda s: {"grad_norm": 6.0} if s == 400 else {}), "", 400),
}  # fmt: skip


def test_every_kind_of_a_row_has_a_case() -> None:
    assert set(CASES) == {
        kind.name for kind in KINDS.values() if kind.by in ("gauges_every", "recorder.step")
    }
    assert KINDS["loss-spike"].bound == KINDS["gradient-spike"].bound == Z


def test_one_reading_names_the_worst_tensor_and_counts_the_others() -> None:
    rows = [{"step": 20, "attention": {"a": [120.0], "b": [500.0], "c": [130.0]}}]
    (reading,) = run(NAIVE, rows)
    assert reading.tensor == "b and 2 others" and reading.value == 500.0


@pytest.mark.parametrize("name", CASES)
def test_a_failure_is_told_once_at_its_step_of_its_tensor(name: str) -> None:
    recipe, gauge_rows, step_rows, tensor, step = CASES[name]
    (event,) = run(recipe, gauge_rows, step_rows)
    assert (event.what, event.tensor, event.step) == (name, tensor, step)
    assert not event.is_inside and event.severity == ("warning" if "spike" in name else "error")
    assert event.advice.endswith(".") and "{" not in event.advice
    if name == "scale-halvings":
        assert (event.value, event.bound) == (3.0, 3.0)


@pytest.mark.parametrize("recipe", [FLOAT8, None])
def test_a_healthy_run_is_silent(recipe: Recipe | None) -> None:
    noise = random.Random(0)

    def jitter(kind: str) -> dict[str, float]:
        jittered = {}
        for name, value in HEALTHY[kind].items():
            if name != "edq":
                jittered[name] = value * math.exp(0.3 * noise.gauss(0, 1))
        return jittered

    rows = [
        gauges(step, **{kind: jitter("tensor") for kind in ("weight", "input", "output_grad", "grad")}, update=jitter("update"),
               attention=jitter("attention"))
        for step in range(20, 2000, 20)
    ]  # fmt: skip
    steps = stepped(
        lambda s: {
            "loss": 3.0 + 0.1 * noise.gauss(0, 1),
            "grad_norm": 0.5 * math.exp(0.3 * noise.gauss(0, 1)),
        },
        2000,
    )
    assert run(recipe, rows, steps) == []


@pytest.mark.parametrize(
    ("recipe", "wrong"),
    [
        # What a healthy cast to four bits drops, or cuts off by its power-of-two scale.
        (parse("mxfp4/word"), {"input": {"underflow": 0.74, "overflow": 0.1, "sqnr_db": 12.2}}),
        # Outliers hurt no operand that enters as it is, and massive ones that were always there are
        # no growth.
        (parse("bfloat16/word"), {"input": {"outlier": 500.0, "sqnr_db": None}}),
        (FLOAT8, {"input": {"outlier": 50.0}}),
        # Weights that no gradient moves far enough to be seen are not dead.
        (NAIVE, {"update": {"unseen_fraction": 1.0}}),
    ],
)
def test_what_only_looks_like_a_failure_is_silent(recipe: Recipe, wrong: Row) -> None:
    assert run(recipe, sampled(**wrong)) == []


def test_an_overflow_while_the_loss_scale_is_searched_for_is_no_failure() -> None:
    def overflow(step: int) -> Row:
        return {**SCALED, "grad_norm": math.inf, "skipped": True} if step in (150, 300) else SCALED

    assert run(FLOAT16, [], stepped(overflow)) == []
    settling = stepped(lambda s: {"loss_scale": 2.0 ** (16 - sum(s >= k for k in (10, 20, 30)))})
    assert run(FLOAT16, [], settling) == []
    (event,) = run(
        NAIVE, [], stepped(lambda s: {"grad_norm": math.inf, "skipped": True} if s == 300 else {})
    )
    assert (event.what, event.step) == ("nonfinite-step", 300)
    (event,) = run(
        FLOAT16,
        [],
        stepped(lambda s: {**SCALED, "loss": math.nan, "skipped": True} if s == 300 else SCALED),
    )
    assert (event.what, event.step) == ("nonfinite-step", 300)


def test_the_same_trouble_is_told_again_only_after_it_was_over() -> None:
    def raised(*lost: float) -> list[int]:
        rows = []
        for n, value in enumerate(lost, 1):
            rows.append(gauges(20 * n, update={"lost_decay": value}))
        return [event.step for event in run(NAIVE, rows)]

    assert raised(0.6, 0.6, 0.6, 0.0, 0.0, 0.0, 0.6, 0.6, 0.6) == [60, 180]
    assert raised(0.6, 0.6, 0.6, 0.0, 0.0, 0.6, 0.6, 0.6) == [60]  # it takes three good readings
    assert raised(0.6, 0.6, 0.3, 0.6, 0.6, 0.3) == []  # nor are two bad ones in a row enough


@pytest.mark.parametrize("name", CASES)
def test_resumed_alarms_go_on_as_if_never_interrupted(name: str) -> None:
    recipe, gauge_rows, step_rows, *_, step = CASES[name]
    for cut in (step - 1, step + 5):
        resumed = Laws(Facts().advised_for(recipe))
        parts = []
        for is_later in (False, True):
            steps = [r for r in step_rows if (r["step"] > cut) is is_later]
            samples = [r for r in gauge_rows if (r["step"] > cut) is is_later]
            parts.append(read(resumed, steps, samples))
        later = parts[1]
        assert later == [event for event in run(recipe, gauge_rows, step_rows) if event.step > cut]


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"tensors": None, "updates": {}},
        {"tensors": {"grad:w": []}, "updates": {"w": [None] * 6}},
        {"tensors": {"unheard-of:w": [0.0] * 20}, "attention": {"a": [None, None]}},
        {"unheard-of": {"w": [math.nan]}},
    ],
)
def test_rows_with_holes_are_normal(tables: Row) -> None:
    assert read(Laws(), [{"step": 1}], [{"step": 1, **tables}]) == []


def test_a_slow_growth_is_measured_from_the_lowest_median() -> None:
    rows = [gauges(20 * k, input={"outlier": 20 * 1.05**k}) for k in range(1, 101)]
    (event,) = run(FLOAT8, rows)
    assert event.bound == pytest.approx(4 * 20 * 1.05**5.5, rel=0.01)
