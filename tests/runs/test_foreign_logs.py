"""Logs of other frameworks and tables of any program as runs: their names, their damage, and no
claim of what was not logged.

What Lightning's and Hugging Face's own loggers write is read in ``tests/integrations``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import narrowgauge as ng
from narrowgauge.errors import RecordError
from narrowgauge.measuring.comparison import compare_runs
from narrowgauge.runs.record import Run


def test_a_table_of_lightning_counts_steps_from_one(tmp_path: Path) -> None:
    lines = ("epoch,step,train_loss,val_loss,tps", "0,9,2.5,,9", "0,19,2.25,,", "0,19,,2.5,")
    (tmp_path / "metrics.csv").write_text("\n".join((*lines, "")))
    run = ng.read_run(tmp_path)
    assert run.steps == [
        {"step": 10, "loss": 2.5, "tokens_per_second": 9},
        {"step": 20, "loss": 2.25},
    ]
    assert run.evals == [{"step": 20, "val_loss": 2.5}]
    assert compare_runs([run]).rows[0]["bytes_per_param"] is None


def test_a_row_that_is_damaged_or_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train_loss\n0,2.5\n1,low\n2,3.0,1\n3")
    assert ng.read_run(tmp_path).steps == [{"step": 1, "loss": 2.5}]


def state(**changes: Any) -> str:
    entries = {
        "log_history": [{"loss": 2.0, "step": 1, "epoch": 0.5}],
        **changes,
    }
    return json.dumps(entries)


def test_a_trainer_state_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "of-monday.json").write_text(state())
    assert ng.read_run(tmp_path / "of-monday.json").steps == [{"step": 1, "loss": 2.0}]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("trainer_state.json", state()[:-9], "is damaged"),
        ("trainer_state.json", state(log_history=[{"loss": 1.0}]), "holds no loss"),
        ("metrics.csv", "", "has no rows"),
        ("metrics.csv", "step,loss\n,1.0\n", "holds no loss"),
        ("metrics.csv", "step,loss\n\x000,1.0\n", "holds no loss"),
        ("a.csv", "Step,one - loss\n1,3.0\n", "holds no loss at a step. It has Step, one - loss"),
        ("a.csv", "step,loss\n0.5,1.0\n", "holds no loss"),
        ("a.csv", "step;loss\n1;2,5\n", "holds no loss"),
        ("a.jsonl", "{", "No run in"),
    ],
)
def test_what_cannot_be_told_is_refused_in_one_line(
    name: str, text: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    for path in (tmp_path, tmp_path / name) if not name.startswith("a.") else (tmp_path / name,):
        with pytest.raises(RecordError, match=reason) as refusal:
            ng.read_run(path)
        assert "\n" not in str(refusal.value) and name in str(refusal.value)


CSV = "step,loss,lr,note\n1,3.5,0.001,warm\n2,3.25,0.001,\n"
HISTORY = "_step,_runtime,train/loss,train/global_step,eval/loss\n0,1.5,3.5,10,\n1,2.5,3.25,20,\n2,3.0,,20,3.0\n"
ALONE = "_step,loss\n0,3.5\n1,3.25\n"


def read(folder: Path, name: str, text: str) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return ng.read_run(folder / name)


def test_tables_and_exports_are_read_by_their_names(tmp_path: Path) -> None:
    assert read(tmp_path, "mine.csv", CSV).steps == [
        {"step": 1, "loss": 3.5, "lr": 1e-3},
        {"step": 2, "loss": 3.25, "lr": 1e-3},
    ]
    run = read(tmp_path, "history.csv", HISTORY)
    assert run.steps == [{"step": 10, "loss": 3.5}, {"step": 20, "loss": 3.25}]
    assert run.evals == [{"step": 20, "val_loss": 3.0}]
    assert [row["step"] for row in read(tmp_path, "alone.csv", ALONE).steps] == [1, 2]
    assert read(tmp_path, "spaces.csv", "step, loss\n1, 2.5\n").steps == [{"step": 1, "loss": 2.5}]


def test_logs_in_one_folder_are_told_apart_and_compared(tmp_path: Path) -> None:
    first = read(tmp_path, "one.csv", CSV)
    second = read(tmp_path, "other.csv", CSV.replace("3.25", "3.5"))
    assert first.fingerprints == []
    difference = ng.diagnose(first, second)
    assert difference.names == ["one.csv", "other.csv"]
    assert difference.readings[0].stage == "loss"
