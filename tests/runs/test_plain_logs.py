"""Tables, exports and text of any program as runs: what names its numbers is read, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.errors import RecordError

CSV = "step,loss,lr,note\n1,3.5,0.001,warm\n2,3.25,0.001,\n"
HISTORY = "_step,_runtime,train/loss,train/global_step,eval/loss\n0,1.5,3.5,10,\n1,2.5,3.25,20,\n2,3.0,,20,3.0\n"
ALONE = "_step,loss\n0,3.5\n1,3.25\n"
CHARTS = "Step,sun-3 - train/loss,sun-3 - train/loss__MIN,sun-3 - train/loss__MAX\n1,3.5,3.5,3.5\n2,NaN,,\n"
ROWS = "\n".join(json.dumps({"_step": step, "loss": 4.0 - step, "grad_norm": 1.0, "name": "a"}) for step in (1, 2))


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
    first, second = read(tmp_path, "charts.csv", CHARTS).steps
    assert first == {"step": 1, "loss": 3.5} and second["loss"] != second["loss"]
    for text in (ROWS, f"[{ROWS.replace(chr(10), ',')}]"):
        assert [row["loss"] for row in read(tmp_path, "rows.jsonl", text).steps] == [3.0, 2.0]


LINES = {
    "iter 0: loss 10.9551, time 41ms, mfu -100%\nstep 0: train loss 10.95, val loss 10.96\niter 1: loss 10.5, time 40ms\n": (
        [(1, 10.95), (2, 10.5)], [(1, 10.96)],
    ),
    " [2024-01-01 00:00:00] iteration       10/     500 | consumed samples:  320 | elapsed time per iteration (ms): 351.1 | "
    "learning rate: 1.000E-06 | global batch size:    32 | lm loss: 1.09E+01 | loss scale: 1.0 | grad norm: 2.313 | "
    "number of skipped iterations:   0 |\n": ([(10, 10.9)], []),
    "\x1b[31mstep:  1  \x1b[32mloss:  8.25\x1b[39m  grad_norm: 2.5  memory: 3.1GiB(4%)  tps: 1,234\n": ([(1, 8.25)], []),
    "[step=100/5000,epoch=0]\n    optim/total_grad_norm=0.5\n    train/CrossEntropyLoss=3.125\n": ([(100, 3.125)], []),
    "step 5 | test loss 9.0\nstep 5 | aux loss 0.01 | loss 2.5\nvalidation at step 5: loss 2.75\n": ([(5, 2.5)], [(5, 2.75)]),
    "step 1,024 loss nan\n": ([(1024, None)], []),
}  # fmt: skip


@pytest.mark.parametrize("text", LINES)
def test_lines_of_text_are_read_by_the_names_in_them(text: str, tmp_path: Path) -> None:
    run = read(tmp_path, "train.log", text)
    steps, evals = LINES[text]
    found = [(row["step"], row["loss"]) for row in run.steps if row.get("loss") is not None]
    assert [(step, None if loss != loss else loss) for step, loss in found] == steps
    assert [(row["step"], row["val_loss"]) for row in run.evals] == evals


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "loss\n3.0\n", "no column of steps"),
        ("a.csv", "Step,one - loss,two - loss\n1,3.0,2.0\n", "holds several runs with loss"),
        ("a.csv", "step,loss\n0.5,1.0\n", "not a whole number"),
        ("a.jsonl", "{", "is damaged"),
        ("a.log", "hello\nstep 3 of the plan\n", "holds no loss"),
        ("a.log", "".join(f"epoch {k // 3} step {k % 3} loss 2.0\n" for k in range(9)), "begin anew in each epoch"),
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
    assert "--" not in str(found) and "neither settings nor versions are recorded of both" in str(found)
