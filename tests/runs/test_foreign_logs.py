"""Logs of other frameworks and tables of any program as runs: their names, their damage, and no
claim of what was not logged.

What Lightning's and Hugging Face's own loggers write is read in ``tests/integrations``.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import narrowgauge as ng
from narrowgauge.measuring.diagnose.comparison import compare_runs
from narrowgauge.runs.record import Run


def history(*rows: dict[str, Any]) -> str:
    return json.dumps({"log_history": rows})


LIGHTNING = "epoch,step,train_loss,val_loss,tps\n0,9,2.5,,9\n0,19,2.25,,\n0,19,,2.5,\n"
CSV = "step,loss,lr,note\n1,3.5,0.001,warm\n2,3.25,0.001,\n"
TITAN = (
    "[rank0]:[titan] - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.5000  memory: 44.84GiB(47.19%)  tps: 5,615\n"
    "[rank0]:[titan] - INFO - \x1b[33mvalidate step: 10  \x1b[32mloss:  7.2500  memory: 34.8GiB(36.19%)  tps: 15,615\n"
)
HISTORY = "_step,_runtime,train/loss,train/global_step,eval/loss\n0,1.5,3.5,10,\n1,2.5,3.25,20,\n2,3.0,,20,3.0\n"
READ = {
    "metrics.csv": (LIGHTNING, [(10, 2.5), (20, 2.25)], [(20, 2.5)]),
    "of-monday.json": (history({"loss": 2.0, "step": 1, "epoch": 0.5}), [(1, 2.0)], []),
    "titan.log": (TITAN, [(10, 7.5)], [(10, 7.25)]),
    "mine.csv": (CSV, [(1, 3.5), (2, 3.25)], []),
    "history.csv": (HISTORY, [(10, 3.5), (20, 3.25)], [(20, 3.0)]),
    "alone.csv": ("_step,loss\n0,3.5\n1,3.25\n", [(1, 3.5), (2, 3.25)], []),
    "spaces.csv": ("step, loss\n1, 2.5\n", [(1, 2.5)], []),
    "damaged or being written.csv": ("step,loss\n1,2.5\n2,low\n3,3.0,1\n4", [(1, 2.5)], []),
}
"""By name of the file: its text, and the steps and evaluations in it."""


def read(folder: Path, name: str, text: str) -> Run:
    (folder / name).write_text(text)
    return ng.read_run(folder / name)


@pytest.mark.parametrize("name", READ)
def test_a_log_is_read_by_its_content_and_its_names(name, tmp_path):
    text, steps, evals = READ[name]
    run = read(tmp_path, name, text)
    assert [(row["step"], row["loss"]) for row in run.steps] == steps
    assert [(row["step"], row["val_loss"]) for row in run.evals] == evals
    assert compare_runs([run]).rows[0]["bytes_per_param"] is None
    others = {"tokens_per_second": 9} if name == "metrics.csv" else {}
    others |= {"lr": 1e-3} if name == "mine.csv" else {}
    if name == "titan.log":
        others = {"tokens_per_second": 5_615, "peak_memory_bytes": 44.84 * 2**30}
    assert run.steps[0] == {"step": steps[0][0], "loss": steps[0][1], **others}


def test_logs_in_one_folder_are_told_apart_and_compared(tmp_path):
    first = read(tmp_path, "one.csv", CSV)
    second = read(tmp_path, "other.csv", CSV.replace("3.25", "3.5"))
    assert first.fingerprints == []
    difference = ng.diagnose(first, second)
    assert difference.names == ["one.csv", "other.csv"]
    assert difference.readings[0].stage == "loss"
