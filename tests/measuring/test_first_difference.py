"""Two runs: records that differ in one known thing, with the step, stage, tensor, bound and
settings that must be told.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.measuring.diagnose.first_difference import first_difference
from narrowgauge.measuring.reading import STAGES
from narrowgauge.runs.record import Run

SETTINGS = {"recipe": "bfloat16/word", "seed": 0, "lr": 1e-3, "batch_size": 4}
NUMEL = 1 << 20
TENSORS = (
    "tokens:batch", "output:layers.0", "output:layers.1", "grad:layers.1", "grad:layers.0", "weight:layers.0", "weight:layers.1",
    "exp_avg:layers.0", "exp_avg:layers.1",
)  # fmt: skip
ROUNDED = 1 + 1e-6
"""A factor that another order of sums may make."""


def make_run(
    name: str,
    changed: Any = None,
    *,
    prints: bool = True,
    steps: int = 4,
    dtype: str = "",
    **tables: Any,
) -> Run:
    """Make a run whose tensors differ from another's where ``changed`` says.

    Args:
        changed: ``(step, tensor)`` to the factor of that tensor's norm.
        dtype: of all tensors.
        tables: of ``run.toml``, added to what every run has.
    """
    table = {"config": SETTINGS, "machine": {"num_threads": 2}}
    table |= {key: {**table.get(key, {}), **values} for key, values in tables.items()}
    run = Run(Path(name), {"data": {"fingerprint": "a"}, **table})
    run.__dict__["fingerprints"] = []
    for step in range(1, steps + 1):
        row = {}
        for number, key in enumerate(TENSORS):
            factor = (changed or {}).get((step, key), 1.0)
            bits = 2000 * step + 2 * number + (factor != 1)
            row[key] = [bits, 2.0 * factor, NUMEL, dtype]
        loss = 3.0 + row["output:layers.1"][1]
        run.steps.append({"step": step, "loss": loss, "lr": 1e-3, "grad_norm": 2.0})
        if prints:
            run.fingerprints.append({"step": step, "tensors": row})
    return run


def pair(changed: Any = None, **tables: Any) -> Any:
    """Compare an undisturbed run with one that has changes."""
    return first_difference(
        make_run("a", prints=tables.get("prints", True)), make_run("b", changed, **tables)
    )


CASES = {
    "another recipe": (
        {"changed": {(1, "output:layers.0"): 1.01}, "config": {"recipe": "float8-row/word"}}, (1, "forward", "output:layers.0"),
        "recipe bfloat16/word and float8-row/word.",
    ),
    "fewer threads, which only round": (
        {"changed": {(2, "grad:layers.1"): ROUNDED}, "machine": {"num_threads": 1}}, (2, "gradient", "grad:layers.1"),
        "within rounding at step 2, in grad:layers.1 (gradient), by 1e-06 times its norm.",
    ),
    "more than rounding behind rounding in one step": (
        {"changed": {(2, "grad:layers.1"): ROUNDED, (2, "grad:layers.0"): 1.01}}, (2, "gradient", "grad:layers.0"),
        "No recorded setting differs.",
    ),
    "every stage": (
        {"changed": {(2, key): 1.01 for key in TENSORS[2:]}}, (2, "forward", "output:layers.1"), "by 0.01 times its norm",
    ),
    "no fingerprints": (
        {"changed": {(3, "output:layers.1"): 1.5}, "prints": False}, (3, "loss", ""), "in loss (loss), by 0.2 times its loss.",
    ),
}  # fmt: skip
"""By case: what differs, then the step, stage and tensor of the reading, and a sentence."""


@pytest.mark.parametrize("case", CASES)
def test_the_first_difference_and_what_can_act_there_are_told(case):
    options, place, sentence = CASES[case]
    runs = pair(**options)
    first = runs.readings[0]
    assert (first.step, first.stage, first.tensor) == place and sentence in str(runs), str(runs)
    assert runs.is_rounding == (case == "fewer threads, which only round"), str(runs)
    assert first.value != first.expected == pytest.approx(first.value, rel=0.6)
    stages = [STAGES.index(reading.stage) for reading in runs.readings]
    assert stages == sorted(stages)
    assert json.dumps(runs.to_dict()) and runs.to_dict()["readings"][0]["tensor"] == place[2]


def test_every_place_beyond_rounding_is_listed_at_equal_loss_scales():
    for scale, factor in ((1.0, 65536.0), (65536.0, 1.0)):
        runs = make_run("a"), make_run("b")
        runs[1].steps[2]["loss_scale"] = scale
        for run, scaled in zip(runs, (1, 65536), strict=True):
            for number in range(6):
                entry = [10 * number + scaled, 2.0 * scaled, NUMEL, ""]
                run.fingerprints[2]["tensors"][f"grad:layers.{number}"] = entry
        result = first_difference(*runs)
        assert {(reading.step, reading.stage) for reading in result.readings} == {(3, "gradient")}
        assert [reading.value for reading in result.readings] == [2.0 * factor] * 6
        assert result.is_rounding == (factor == 1)


def test_a_difference_is_of_rounding_only_where_every_recorded_number_agrees():
    runs = make_run("a"), make_run("b", {(2, "grad:layers.1"): ROUNDED})
    for run in runs:
        run.steps[1] |= {"decay/group0": 1e-3, "arrived": 1e-3, "seconds": 0.1 * len(run.path.name)}
    runs[1].steps[1]["seconds"] = 9.0
    assert first_difference(*runs).is_rounding
    runs[1].steps[1]["decay/group0"] = 4e-4
    result = first_difference(*runs)
    assert not result.is_rounding
    assert "in decay/group0 (optimizer step), by 0.6 times its decay/group0." in str(result)
    wide = make_run("a", config={"recipe": "float32/float32"})
    unlike = first_difference(wide, make_run("b", {(1, "grad:layers.1"): ROUNDED}))
    assert not unlike.is_rounding, "the runs round unlike"


WIDE = {"recipe": "float32/float32"}
REACH = [
    # 32 roundoffs over the root of the elements: of bfloat16 and 2^20 elements 1.2e-4; at least 2^-20.
    ({}, (2, "grad:layers.1"), 1.00012, 1.00013),
    ({"config": WIDE}, (2, "exp_avg:layers.1"), 1 + 9e-7, 1 + 1.1e-6),
    # What the outputs say counts, and the format of the weights alone for what is stored in it.
    ({"dtype": "float32"}, (2, "grad:layers.1"), 1 + 9e-7, 1 + 1.1e-6),
    ({"dtype": "float32"}, (2, "exp_avg:layers.1"), 1.00012, 1.00013),
    # Of the mean of 2^12 tokens.
    ({"config": WIDE, "prints": False}, "loss", 1 + 8e-7, 1 + 3e-5),
    # Of the 2^21 elements of all gradients.
    ({}, "grad_norm", 1 + 8.6e-5, 1 + 8.7e-5),
]


@pytest.mark.parametrize(("options", "place", "within", "beyond"), REACH)
def test_the_reach_of_rounding_is_that_of_the_format_and_the_elements(
    options, place, within, beyond
):
    for factor in (within, beyond):
        runs = make_run("a", **options), make_run("b", {place: factor}, **options)
        for run in runs:
            run.steps[2]["tokens"] = 3 << 12
        if isinstance(place, str):
            runs[1].steps[2][place] *= factor
        assert first_difference(*runs).is_rounding == (factor == within)


def test_the_ranks_whose_parts_differ_are_told():
    runs = make_run("a"), make_run("b", {(2, "output:layers.0"): 1.01})
    key = "output:layers.0"
    for run, hashes in zip(runs, ([7, 8, 9], [7, 5, 9]), strict=True):
        run.fingerprints[1]["tensors"][key].append(hashes)
    assert "Of 3 ranks these differ there: 1." in str(first_difference(*runs))
    runs[0].fingerprints[1]["tensors"][key] = [5, 2.0, NUMEL, ""]  # all are alike
    assert "Of 3 ranks these differ there: 0, 2." in str(first_difference(*runs))
    runs[1].fingerprints[1]["tensors"][key][4] = [1, 2, 3]
    assert "ranks" not in str(first_difference(*runs)), "all of them"


def test_equal_records_are_the_same_run():
    runs = pair(machine={"num_threads": 1})
    assert runs.verdict == "The same in all that both recorded (4 steps)." and not runs.readings
    assert "Recorded settings that differ: machine.num_threads 2 and 1." in str(runs)
    resumed = make_run("a"), make_run("b")
    again = {"step": 4, "tensors": {"weight:layers.0": [9, 1.0, NUMEL, ""]}}
    resumed[1].fingerprints.append(again)
    assert not first_difference(*resumed).readings, "a row that a resume repeats"
    for run in resumed:
        run.steps[2]["loss"] = math.nan
    assert not first_difference(*resumed).readings, "the same NaN"
    assert "(1 step)" in first_difference(make_run("a", steps=1), make_run("b")).verdict
    assert "no step in common" in first_difference(make_run("a", steps=0), make_run("b")).verdict


@pytest.mark.parametrize("place", [0, 1])
def test_a_number_beside_nan_is_no_rounding(place):
    runs = make_run("a"), make_run("b")
    runs[place].steps[2]["loss"] = math.nan
    result = first_difference(*runs)
    assert result.verdict == "The runs first differ at step 3, in loss (loss)."
    assert not result.is_rounding


def test_the_hash_of_the_final_weights_is_the_last_column():
    runs = make_run("a"), make_run("a")
    for run in runs:
        run.__dict__["summary"] = {"weights_fingerprint": "abc"}
    assert "bit for bit to the last weight" in first_difference(*runs).verdict
    runs[1].__dict__["summary"] = {"weights_fingerprint": "abd"}
    result = first_difference(*runs)
    assert (result.readings[0].step, result.readings[0].what) == (4, "weights_fingerprint")
    assert not result.is_rounding
    for run, value in zip(runs, (3.0, 6.0), strict=True):
        run.evals.append({"step": 4, "val_loss": value})
    assert first_difference(*runs).readings[0].what == "val_loss"


def test_what_only_one_run_has_is_the_answer():
    first, second = make_run("a"), make_run("b")
    for row in first.fingerprints:
        row["tensors"]["grad:layers.2"] = [5, 1.0, NUMEL, ""]
    runs = first_difference(first, second)
    assert (runs.readings[0].stage, runs.readings[0].what) == ("gradient", "only-in-one-run")
    assert "Only a has grad:layers.2." in str(runs)
    first.steps[0]["zero"] = ["a"]
    second.steps[0]["zero"] = []
    swapped = first_difference(second, first)
    assert [at.what for at in swapped.readings] == ["only-in-one-run", "zero"]
    for row in second.fingerprints:  # a kind that one of them did not record at all says nothing
        tensors = row["tensors"]
        row["tensors"] = {key: tensors[key] for key in tensors if not key.startswith("output")}
        row["tensors"]["unknown:layers.0"] = [5, 1.0, NUMEL, ""]
    assert not first_difference(make_run("a"), second).readings


def up_to_ten():
    """Yield rows of a long record, which are read one at a time."""
    for step in range(1, 11):
        yield {"step": step, "loss": 3.0}
    raise AssertionError("read on")


def test_two_runs_are_read_no_further_than_their_first_difference():
    long = up_to_ten()
    first = replace(make_run("a", steps=0), steps=long)
    second = replace(make_run("b", steps=0), steps=[{"step": 8, "loss": 2.0}])
    assert [(at.step, at.what) for at in first_difference(first, second).readings] == [(8, "loss")]
