"""The run folder: rows come back as written, and no crash, full disk or second writer spoils what
is there.
"""

import contextlib
import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.measuring.diagnose.step_metrics import StepMetrics
from narrowgauge.runs import record as reading
from narrowgauge.runs.record import read_run
from narrowgauge.runs.schema import STEP, VERSION
from narrowgauge.runs.writer import Record, shortened
from narrowgauge.trainer import checkpoints
from text.refusals import refused
from trainer.tiny_runs import bytes_of

RUN = {
    "config": {"recipe": "bfloat16/word", "lr": 1e-3, "eval_every": None, "out": Path("a")},
    "versions": {"torch": "2.13.0"},
}


START = {"what": "start", "step": 0, "text": "begun", "severity": "note"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with four steps, two evaluations, one event and a summary."""
    path = tmp_path / "run"
    with Record.create(path, RUN) as record:
        for step in range(1, 5):
            record.append("steps", {"step": step, "loss": 1 / step})
        for step in (2, 4):
            record.append("evals", {"step": step, "val_loss": 3.0})
        record.append("events", START)
        record.summary({"steps": 4, "val_loss": float("inf")})
    return path


def test_everything_comes_back(folder):
    run = read_run(folder)
    config = {"recipe": "bfloat16/word", "lr": 1e-3, "out": "a"}
    versions = {"torch": "2.13.0"}
    assert run.run == {"schema_version": VERSION, "config": config, "versions": versions}
    assert run.steps == [{"step": step, "loss": 1 / step} for step in range(1, 5)]
    assert [row["step"] for row in run.evals] == [2, 4] and run.events == [START]
    assert run.summary == {"steps": 4, "val_loss": math.inf}
    assert not run.notes


def test_values_come_back_exactly(tmp_path):
    """Not finite ones too, and those of other libraries; others as text."""
    values = [0.1, 1e-320, 2**-1074, 1.7976931348623157e308, -0.0, 1 / 3]
    settings = {"dtype": torch.bfloat16, "size": np.int64(3), "rates": np.array([0.5, 1.0])}
    with Record.create(tmp_path / "run", {"config": settings}) as record:
        row = {"step": np.int64(1), "loss": math.nan, "lr": np.float32(0.5), "seconds": None}
        record.append("steps", {**row, "values": values, "of": torch.tensor([1.5])})
    run = read_run(tmp_path / "run")
    [back] = run.steps
    assert math.isnan(back["loss"]) and "seconds" not in back
    assert (back["step"], back["lr"], back["of"]) == (1, 0.5, [1.5])
    assert [value.hex() for value in back["values"]] == [value.hex() for value in values]
    assert run.config == {"dtype": "torch.bfloat16", "size": 3, "rates": [0.5, 1.0]}


@pytest.mark.parametrize("torn", [b'{"step":5,"lo', b'{"step":5}', b"\0" * 40])
def test_a_torn_last_line_is_dropped_and_cut_off(folder, torn):
    with (folder / "steps.jsonl").open("ab") as stream:
        stream.write(torn)
    assert len(read_run(folder).steps) == 4
    with Record.open(folder) as record:
        record.append("steps", {"step": 5, "loss": 0.0})
    assert [row["step"] for row in read_run(folder).steps] == [1, 2, 3, 4, 5]


DAMAGED_LINES = {
    "no closing quote": (2, b'{"step:2,"loss":0.5}'),
    "no object": (2, b"5"),
    "zeros": (4, b"\0" * 40),
    "no step": (3, b'{"loss":0.5}'),
    "half a step": (3, b'{"step":2.5,"loss":0.5}'),
    "the last": (4, b'{"step":4,"loss'),
}


@pytest.mark.parametrize("damage", DAMAGED_LINES)
def test_a_damaged_line_costs_that_line(damage, folder):
    number, line = DAMAGED_LINES[damage]
    lines = (folder / "steps.jsonl").read_bytes().splitlines()
    lines[number - 1] = line
    (folder / "steps.jsonl").write_bytes(b"".join(content + b"\n" for content in lines))
    undamaged_steps = [step for step in (1, 2, 3, 4) if step != number]
    run = read_run(folder)
    assert [row["step"] for row in run.steps] == undamaged_steps
    note = f"steps.jsonl has 1 damaged row of 4, the first in line {number}; left out"
    assert run.notes == [note]
    with Record.open(folder) as record:
        assert record.notes == [note]
        record.append("steps", {"step": 5, "loss": 0.0})
    run = read_run(folder)
    assert [row["step"] for row in run.steps] == [*undamaged_steps, 5] and not run.notes


def test_rewind_forgets_steps_evals_and_the_summary_and_keeps_events(folder):
    before = bytes_of(folder)
    with Record.open(folder) as record:
        record.rewind(4)
        # The run is not finished any more.
        before[folder / "summary.json.cut"] = before.pop(folder / "summary.json") + b"\n"
        assert bytes_of(folder) == before
        record.rewind(3)
        record.append("steps", {"step": 4, "loss": 9.0})
        record.rewind(4)
    run = read_run(folder)
    assert [(row["step"], row["loss"]) for row in run.steps] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1 / 3),
        (4, 9.0),
    ]
    assert [row["step"] for row in run.evals] == [2]
    assert len(run.events) == 1
    assert run.summary is None


def assert_a_full_disk_leaves_whole_rows(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")
    with Record(folder) as writer:
        writer.append("steps", {"step": 1, "loss": 0.5})
        with (folder / "large").open("wb", 0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(bytes(1000))
        with refused("a full disk", file=r"steps\.jsonl: No space left on device"):
            for step in range(2, 10_000):
                writer.append("steps", {"step": step, "loss": 0.5})
    notes = []
    rows = [*reading.rows_in(folder / "steps.jsonl", notes)]
    assert [row["step"] for row in rows] == [*range(1, step)] and not notes


SIZES = ("300k", "700k", "1000k", "1300k", "1600k", "2000k")


@pytest.mark.parametrize("size", SIZES)
def test_a_disk_that_is_too_small_says_so_and_keeps_what_it_holds(size, tmp_path):
    """On a real file system. PyTorch's writer gives no number of an error there."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root mounts a file system")
    try:
        model = torch.nn.Linear(256, 256)
        optimizer = ng.AdamW(model.parameters(), storage="word")
        model(torch.ones(256, dtype=model.weight.dtype)).sum().backward()
        optimizer.step()
        saved = 0
        with refused("a full disk", file="") as raised:
            for saved in range(100):
                checkpoints.save(tmp_path, model, optimizer, {"step": saved}, keep=100)
        assert "Success" not in str(raised.value) and raised.value.status == 1
        assert len(checkpoints.folders(tmp_path)) == saved
        if saved:
            assert checkpoints.require(tmp_path)[1] == []
        assert_a_full_disk_leaves_whole_rows(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


LISTS = [name for name, column in STEP.items() if column.type == "names"]


def test_a_row_has_two_kilobytes_at_300_tensors():
    """With every number and such lists: the worst tensors are there, and the laws count all."""
    names = [
        f"model.layers.{number}.mlp.experts.{number}.down_proj.weight" for number in range(300)
    ]
    row = {"step": 1, "stored": {name: -len(name) / 7 for name in names}}
    for name, column in STEP.items():
        if column.type == "number":
            row[name] = math.pi * 1e5
    row = shortened(row | dict.fromkeys(LISTS, names))
    assert len(json.dumps(row)) <= 2048
    assert len(row["stored"]) <= 20 and max(row["stored"].values()) == -len(names[299]) / 7
    assert len(shortened({"zero": [*map(str, range(300))]})["zero"]) == 20
    for name in LISTS:
        assert row[name] == names[: len(row[name])] and 0 < len(row[name]) <= 20
        assert len(set(getattr(StepMetrics.of(row), name))) == 300


def test_a_loop_of_300_tensors_is_judged_whole(tmp_path):
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(300))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(UserWarning, match="and 299 others"),
        ng.RunRecorder(tmp_path / "run", model, optimizer) as recorder,
    ):
        for parameter in model.parameters():
            parameter.grad = torch.full((2, 2), math.nan)
        optimizer.step()
        recorder.step(1.0)
    assert max(map(len, (tmp_path / "run" / "steps.jsonl").read_bytes().splitlines())) <= 2048
    [bad, *_] = ng.diagnose(tmp_path / "run").readings
    assert bad.tensor.endswith("and 299 others")


def test_a_large_file_is_read_as_a_list_in_few_loops(folder, monkeypatch):
    """Also of two runs, whose steps are not looked up one by one."""
    expected = read_run(folder)
    monkeypatch.setattr(reading, "LARGE", 0)
    run = read_run(folder)
    assert run.last_step == expected.steps[-1]
    assert len(run.steps) == 4 and [*run.steps] == expected.steps
    loops = []
    true_rows_in = reading.rows_in

    def rows_in(file, notes):
        loops.append(file.stem)
        return true_rows_in(file, notes)

    monkeypatch.setattr(reading, "rows_in", rows_in)
    ng.diagnose(folder)
    assert loops.count("steps") <= 3
    ng.diagnose(folder, folder)
    assert loops.count("steps") <= 9
