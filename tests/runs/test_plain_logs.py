"""Tables and exports of any program as runs: what names its numbers is read, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.errors import RecordError

CSV = "step,loss,lr,note\n1,3.5,0.001,warm\n2,3.25,0.001,\n"
HISTORY = "_step,_runtime,train/loss,train/global_step,eval/loss\n0,1.5,3.5,10,\n1,2.5,3.25,20,\n2,3.0,,20,3.0\n"
ALONE = "_step,loss\n0,3.5\n1,3.25\n"


def read(folder: Path, name: str, text: str) -> ng.runs.Run:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return ng.read_run(folder / name)


def test_tables_and_exports_are_read_by_their_names(tmp_path: Path) -> None:
    assert read(tmp_path, "mine.csv", CSV).steps == [
        {"step": 1, "loss": 3.5, "lr": 1e-3},
        {"step": 2, "loss": 3.25, "lr": 1e-3},
    ]
    run = read(tmp_path, "history.csv", HISTORY)
    assert run.steps == [{"step": 10, "loss": 3.5}, {"step": 20, "loss": 3.25}] and run.evals == [
        {"step": 20, "val_loss": 3.0}
    ]
    assert [row["step"] for row in read(tmp_path, "alone.csv", ALONE).steps] == [1, 2]
    assert read(tmp_path, "spaces.csv", "step, loss\n1, 2.5\n").steps == [{"step": 1, "loss": 2.5}]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "loss\n3.0\n", "no column of steps"),
        ("a.csv", "Step,one - loss,two - loss\n1,3.0,2.0\n", "holds no loss. It has one - loss, two - loss"),
        ("a.csv", "step,loss\n0.5,1.0\n", "not a whole number"),
        ("a.csv", "step;loss\n1;2,5\n", "no commas between its columns"),
        ("a.jsonl", "{", "No run in"),
        ("a.csv", "step,accuracy\n1,0.5\n", "holds no loss. It has accuracy"),
    ],
)
def test_what_cannot_be_told_is_refused_in_one_line(name: str, text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecordError, match=reason) as refusal:
        ng.read_run(tmp_path / name)
    assert "\n" not in str(refusal.value) and name in str(refusal.value)


def test_logs_in_one_folder_are_told_apart_and_compared(tmp_path: Path) -> None:
    one, other = read(tmp_path, "one.csv", CSV), read(tmp_path, "other.csv", CSV.replace("3.25", "3.5"))
    assert (one.path.name, other.path.name) == ("one.csv", "other.csv") and one.gauges == one.fingerprints == []
    found = ng.diagnose(one, other)
    assert found.names == ("one.csv", "other.csv") and found.readings[0].stage == "loss"
    assert "--" not in str(found) and "neither settings nor versions in its record" in str(found)
