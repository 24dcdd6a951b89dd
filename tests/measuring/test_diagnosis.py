"""One run: a table of made-up records, each with the reading that it must give, and healthy records
that give none.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import narrowgauge as ng
from measuring.records import AT, LAYER, NUM_STEPS, healthy_run, written
from narrowgauge.cli.main import main
from narrowgauge.measuring.diagnose import Diagnosis
from narrowgauge.measuring.reading import Reading, in_order
from narrowgauge.runs.record import Run

WEIGHT = f"{LAYER}.weight"
Fault = Callable[[Run], None]


# ── what a fault writes ───────────────────────────────────────────────────────────────────────────


def steps(since: int = AT, until: int = NUM_STEPS, **columns: object) -> Fault:
    def strike(run: Run) -> None:
        for row in run.steps:
            if since <= row["step"] <= until:
                row.update(
                    {
                        name: value(row) if callable(value) else value
                        for name, value in columns.items()
                    }
                )
                if "seconds" in columns:
                    row["tokens_per_second"] = 256 / row["seconds"]

    return strike


def event(what: str, step: int = AT, **columns: object) -> Fault:
    return lambda run: run.events.append(
        {"what": what, "step": step, "text": "it happened", **columns}
    )


def joint(*faults: Fault) -> Fault:
    def strike(run: Run) -> None:
        for fault in faults:
            fault(run)

    return strike


CASES: dict[str, tuple[Fault, int, str, str, str]] = {
    # steps; the laws have tests of their own
    "a loss that spikes": (steps(AT, AT, loss=9.0), AT, "loss", "", "loss-spike"),
    "one norm that is not finite, in a step that was applied": (
        steps(AT, AT, grad_norm=math.nan), AT, "gradient", "", "nonfinite",
    ),
    "more skips than a search for a loss scale": (
        joint(steps(1, loss_scale=64.0), steps(2, 40, skipped=True)), 2, "optimizer step", "", "skipped-steps",
    ),
    "slower steps, but one in ten": (
        steps(seconds=lambda row: 0.4 - 0.3 * (row["step"] % 10 == 0)), AT, "between steps", "", "slower-steps",
    ),
    "a device in percent": (steps(1, utilization=40.0), 1, "between steps", "", "idle-device"),
    # recorded events
    "an alarm of the audit": (
        event("lost-updates", tensor="a", value=0.5, stage="storage"), AT, "storage", "a", "lost-updates",
    ),
}  # fmt: skip
"""By case: what the fault writes, and the step, stage, tensor and name of the first reading."""


def struck(fault: Fault) -> Run:
    run = healthy_run()
    run.__dict__.update(fingerprints=[])
    fault(run)
    return run


@pytest.mark.parametrize("name", CASES)
def test_a_record_gives_its_reading(name: str) -> None:
    fault, step, stage, tensor_name, kind = CASES[name]
    diagnosis = ng.diagnose(struck(fault))
    expected = (step, stage, tensor_name, kind)
    assert expected in [(r.step, r.stage, r.tensor, r.what) for r in diagnosis.readings], str(
        diagnosis
    )
    assert diagnosis.readings[0].step == step and not diagnosis.ok
    for reading in diagnosis.readings:
        assert reading.excess >= 1, diagnosis.readings
    assert f"{kind}" in str(diagnosis) and json.dumps(diagnosis.to_dict())


def scaled_search(run: Run) -> None:
    """A loss scale that is found by halving, and grows."""
    steps(
        1,
        loss_scale=lambda row: 2.0 ** (24 - min(row["step"], 12))
        * (2.0 if row["step"] > AT else 1.0),
    )(run)
    steps(1, 12, skipped=True, grad_norm=math.inf)(run)


HEALTHY: dict[str, Fault] = {
    "plain": joint(),
    "a search for a loss scale": scaled_search,
    "first steps that compile": steps(1, 25, seconds=30.0),
    "a busy device": steps(1, utilization=98.0),
    "a last step that was skipped": steps(NUM_STEPS, grad_norm=math.inf, skipped=True, loss_scale=2.0),
    "routine": joint(*(event(what, severity="note") for what in ("start", "stop", "finish", "checkpoint"))),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_record_gives_none(name: str) -> None:
    diagnosis = ng.diagnose(struck(HEALTHY[name]))
    assert diagnosis.ok and diagnosis.verdict.startswith("Nothing found: 160 rows watched; "), str(
        diagnosis
    )


@pytest.mark.parametrize("step", [1, 100])
def test_hashes_of_the_start_alone_are_not_looked_at(step: int) -> None:
    run = struck(joint())
    tensors = {"weight:a": [7, 1.0, 4]}
    run.__dict__.update(
        fingerprints=[{"step": 0, "tensors": tensors}, {"step": step, "tensors": tensors}]
    )
    assert ("hashes of weights" in ng.diagnose(run).areas) is (step > 1)


def test_readings_are_ordered_by_step_then_stage_then_excess() -> None:
    rows = [
        Reading(9, "data", "", "late"),
        Reading(2, "storage", "", "last"),
        Reading(2, "forward", "a", "small", 2.0, None, 1.0),
        Reading(2, "forward", "b", "large", 10.0, None, 1.0),
        Reading(2, "data", "", "first", 1.0, 0.0, 1.0),
    ]
    assert [row.what for row in in_order(rows)] == ["first", "large", "small", "last", "late"]


def test_a_log_without_a_column_of_skipped_steps_tells_nothing_of_them(tmp_path: Path) -> None:
    log = tmp_path / "trainer_state.json"

    def diagnosed(bad: range, loss: float) -> Diagnosis:
        healthy = []
        for step in range(5, 75, 5):
            healthy.append({"step": step, "loss": 4.0 - step / 100, "grad_norm": 1.0})
        history = []
        for row in healthy:
            history.append(
                {**row, "loss": loss, "grad_norm": math.nan} if row["step"] in bad else row
            )
        log.write_text(json.dumps({"log_history": history, "global_step": 70, "max_steps": 70}))
        return ng.diagnose(log)

    # transformers logs a loss of 0 where it was NaN
    lost = diagnosed(range(35, 75), 0.0)
    assert [(r.step, r.stage, r.what) for r in lost.readings] == [(35, "gradient", "nonfinite")]
    assert "skipped steps" in lost.unseen
    assert diagnosed(range(35, 40), 3.6).ok, "a loss scaler may have skipped it"
    assert "14 rows watched; looked at" in diagnosed(range(0), 0.0).verdict
    assert ng.diagnose(Run(tmp_path, {}, [{"step": 1}])).verdict.startswith("Nothing was looked at")


def test_a_run_is_finished_when_somebody_said_so_or_its_last_planned_step_is_written() -> None:
    run = healthy_run()
    assert not ng.diagnose(run).is_finished and "not finished" in str(ng.diagnose(run))
    run.run["config"]["steps"] = NUM_STEPS
    assert ng.diagnose(run).is_finished
    run.steps.pop()
    assert not ng.diagnose(run).is_finished
    run.__dict__["summary"] = {"steps": NUM_STEPS - 1}
    assert ng.diagnose(run).is_finished


def test_what_a_record_does_not_show_is_said() -> None:
    run = healthy_run()
    assert "casts of layers" in ng.diagnose(run).areas
    run.gauges.clear()
    assert ng.diagnose(run).unseen["casts of layers"] == "gauges_every=20"
    run.events.append(
        {"what": "unseen", "step": 3, "tensor": "the clip", "text": "no limit", "severity": "note"}
    )
    assert ng.diagnose(run).unseen["the clip"] == "no limit"
    run.events.append(
        {"what": "a later kind", "step": 3, "text": "it happened", "severity": "error"}
    )
    assert "step 3: a later kind: it happened." in str(ng.diagnose(run))


# ── the command, and damaged records ──────────────────────────────────────────────────────────────


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["diagnose", *map(str, words)], prog_name="narrowgauge")


@pytest.fixture(scope="module")
def spiked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(struck(steps(AT, AT, loss=9.0)), tmp_path_factory.mktemp("whole") / "run")


def test_the_command_prints_the_table_or_json(spiked_run: Path) -> None:
    result = call(spiked_run)
    assert result.exit_code == 0
    assert "run: 1 reading beyond the bound, the first at step 81." in result.output
    (reading,) = json.loads(call(spiked_run, "--json").output)["readings"]
    assert (reading["step"], reading["stage"], reading["what"], reading["value"]) == (
        AT,
        "loss",
        "loss-spike",
        9.0,
    )
    both_same = call(spiked_run, spiked_run)
    assert both_same.exit_code == 0
    assert "The same in all that both recorded (160 steps)." in both_same.output
    assert json.loads(call(spiked_run, spiked_run, "--json").output)["same"]


def rows(*records: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in records)


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


TOML = "schema_version = 2\n"
DAMAGES: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "no settings": (lambda folder: (folder / "run.toml").unlink(), 2, "or a Hugging Face trainer_state.json"),
    "garbled settings": (write("run.toml", f"{TOML}[config\n"), 2, "run.toml is damaged"),
    "an unknown recipe": (write("run.toml", f'{TOML}[config]\nrecipe = "foo/bar"\n'), 0, "loss-spike"),
    "no row": (write("steps.jsonl", ""), 0, "Nothing found: 0 rows watched; looked at casts of layers."),
    "not a number": (
        write("steps.jsonl", rows(*({"step": k, "loss": math.nan} for k in range(1, 60)))), 0, "nonfinite",
    ),
    "a broken row": (write("steps.jsonl", '{"step": 1\n{"step": 2}\n{"step": 3}\n'), 0, "1 damaged row of 3, "),
    "broken gauges": (write("gauges.jsonl", "xx\n{}\n"), 0, "gauges.jsonl has 2 damaged rows of 2"),
    "short gauges": (
        write("gauges.jsonl", rows({"step": 20, "tensors": {"grad:a": [None, 1]}})),
        0, "loss-spike",
    ),
    "events without words": (
        write("events.jsonl", rows({"what": "loss-spike"}, {"step": 3}, {"text": "resumed"})), 0,
        "events.jsonl has 3 damaged rows of 3",
    ),
}  # fmt: skip
"""What is done to a record with a spike, how the command ends, and what it says."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_refused_in_a_line_or_says_what_is_missing(
    spiked_run: Path, tmp_path: Path, damage: str
) -> None:
    spoil, status, words = DAMAGES[damage]
    folder = tmp_path / "run"
    shutil.copytree(spiked_run, folder)
    spoil(folder)
    result = call(folder)
    assert result.exit_code == status and words in result.output, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert status == 0 or result.output.count("\n") <= 2
