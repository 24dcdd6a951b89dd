"""One run: made-up records with the reading that they must give, healthy ones that give none, and
damaged ones.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import narrowgauge as ng
from measuring.records import AT, NUM_STEPS, healthy_run, written
from narrowgauge.cli.main import main
from narrowgauge.measuring.reading import Reading, in_order
from narrowgauge.runs.record import Run


def spiked() -> Run:
    run = healthy_run()
    run.steps[AT - 1]["loss"] = 9.0
    return run


def with_event(what: str, **columns: Any) -> Run:
    run = healthy_run()
    run.events.append({"what": what, "step": AT, "text": "it happened", **columns})
    return run


def test_a_healthy_record_gives_none():
    diagnosis = ng.diagnose(with_event("checkpoint", severity="note"))
    assert diagnosis.ok and diagnosis.verdict.startswith("Nothing found: 160 rows watched; ")


def test_readings_are_ordered_by_step_then_stage_then_excess():
    rows = [
        Reading(9, "data", "", "late"),
        Reading(2, "storage", "", "last"),
        Reading(2, "forward", "a", "small", 2.0, None, 1.0),
        Reading(2, "forward", "b", "large", 10.0, None, 1.0),
        Reading(2, "data", "", "first", 1.0, 0.0, 1.0),
    ]
    assert [row.what for row in in_order(rows)] == ["first", "large", "small", "last", "late"]


def test_a_log_without_a_column_of_skipped_steps_tells_nothing_of_them(tmp_path):
    log = tmp_path / "trainer_state.json"

    def diagnosed(bad, loss):
        history = []
        for step in range(5, 75, 5):
            row = {"step": step, "loss": 4.0 - step / 100, "grad_norm": 1.0}
            history.append(row | ({"loss": loss, "grad_norm": math.nan} if step in bad else {}))
        log.write_text(json.dumps({"log_history": history, "global_step": 70, "max_steps": 70}))
        return ng.diagnose(log)

    # transformers logs a loss of 0 where it was NaN
    lost = diagnosed(range(35, 75), 0.0)
    assert [(r.step, r.stage, r.what) for r in lost.readings] == [(35, "gradient", "nonfinite")]
    assert "skipped steps" in lost.unseen
    assert diagnosed(range(35, 40), 3.6).ok, "a loss scaler may have skipped it"
    assert ng.diagnose(Run(tmp_path, {}, [{"step": 1}])).verdict.startswith("Nothing was looked at")


def test_a_run_is_finished_when_somebody_said_so_or_its_last_planned_step_is_written():
    run = healthy_run()
    assert not ng.diagnose(run).is_finished and "not finished" in str(ng.diagnose(run))
    run.run["config"]["steps"] = NUM_STEPS
    assert ng.diagnose(run).is_finished
    run.steps.pop()
    assert not ng.diagnose(run).is_finished
    run.__dict__["summary"] = {"steps": NUM_STEPS - 1}
    assert ng.diagnose(run).is_finished


def test_what_a_record_does_not_show_is_said():
    run = with_event("unseen", tensor="the clip", severity="note")
    run.run["config"]["recipe"] = "a recipe of another program"
    assert ng.diagnose(run).unseen["the clip"] == "it happened"


def test_a_class_whose_updates_were_not_measured_is_no_part_of_what_was_looked_at():
    run = with_event("unseen", tensor="stored updates by optimi.AdamW")
    assert ng.diagnose(run).unseen["stored updates by optimi.AdamW"] == "it happened"
    for row in run.steps:
        row["stored"] = {"a.weight": 0.99}
    assert ", stored updates (but those by optimi.AdamW)" in ng.diagnose(run).verdict


def test_what_a_watch_told_of_an_earlier_step_is_not_left_out():
    """A count may be below its bound at the end. What is there at the end is a reading alone."""
    run = with_event("stored-share", tensor="a.weight")
    assert f"stored-share of a.weight (was told of step {AT}" in str(ng.diagnose(run))
    run.steps[AT - 1]["loss"] = 9.0
    run.events[-1] |= {"what": "spike", "tensor": ""}
    assert "was told" not in str(ng.diagnose(run))


# ── the command, and damaged records ──────────────────────────────────────────────────────────────


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["diagnose", *map(str, words)], prog_name="narrowgauge")


@pytest.fixture(scope="module")
def spiked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(spiked(), tmp_path_factory.mktemp("whole") / "run")


def test_the_command_prints_the_table_or_json(spiked_run):
    assert "run: 1 reading beyond the bound, the first at step 81." in call(spiked_run).output
    (reading,) = json.loads(call(spiked_run, "--json").output)["readings"]
    assert (reading["step"], reading["what"], reading["value"]) == (AT, "spike", 9.0)
    same = call(spiked_run, spiked_run)
    assert "The same in all that both recorded (160 steps)." in same.output
    assert json.loads(call(spiked_run, spiked_run, "--json").output)["ok"]


def test_a_damaged_row_of_a_run_is_told_once(spiked_run, tmp_path):
    folder = shutil.copytree(spiked_run, tmp_path / "run")
    with (folder / "steps.jsonl").open("a") as file:
        file.write('5\n{"step": 161}\n')
    for words in ([folder], [folder, spiked_run]):
        assert call(*words).output.count("1 damaged row of 162") == 1
