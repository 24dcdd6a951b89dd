"""A run as it grows: the columns that figures read, and whether it is running, has ended, stopped or died."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from narrowgauge.report.figures.series import Series, column
from narrowgauge.report.live.live_run import LiveRun, runs_in, writers
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import read_run
from report.live.growing_runs import begin, write_steps

NOW = 1e9


def age(folder: Path, seconds: float) -> None:
    """Make all rows as old as that at :data:`NOW`."""
    for file in folder.glob("*.jsonl"):
        os.utime(file, (NOW - seconds, NOW - seconds))


def test_columns_are_those_of_the_rows_also_after_a_rollback(tmp_path: Path) -> None:
    with begin(tmp_path / "a") as writer:
        run = LiveRun(writer.path)
        write_steps(writer, 1, 3000)
        writer.step({"step": 3001, "loss": math.nan, "grad_norm": None})
        writer.step({"step": 3002, "loss": math.inf, "skipped": True})
        while run.poll():
            pass
        assert run.is_read
        for turn in range(2):
            for name in ("loss", "grad_norm", "skipped", "loss_scale"):
                line, rows = run.line(name), column(read_run(writer.path).steps, name)
                np.testing.assert_array_equal(line.x, rows.x)
                np.testing.assert_array_equal(line.y, rows.y)
            writer.rewind(2000)
            write_steps(writer, 2001, 2100, loss=7.0 + turn)
            assert run.poll()
        assert run.num_steps == 2100 and set(run.line("loss").y[2000:]) == {8.0}


def test_evaluations_events_and_the_summary_arrive(tmp_path: Path) -> None:
    with begin(tmp_path / "a", steps=10) as writer:
        run = LiveRun(writer.path)
        writer.eval({"step": 5, "val_loss": 2.5})
        writer.event(Event("loss_spike", 5, "the loss jumped"))
        writer.summary({"val_loss": 2.5, "steps": 10})
        assert run.poll()
        assert [row["val_loss"] for row in run.run.evals] == [2.5]
        assert run.run.events[0]["kind"] == "loss_spike"
        assert run.state(NOW, has_writer=True).word == "ended"
        writer.rewind(0)
        assert run.poll() and run.run.evals == [] and run.run.summary is None


def test_a_run_is_alive_while_it_is_written_and_dead_when_nobody_writes_it(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    with begin(folder, steps=100) as writer:
        run = LiveRun(folder)
        run.poll()
        assert run.state(NOW, has_writer=True).word == "waiting"
        write_steps(writer, 1, 40)
        run.poll()
        state = run.state(NOW, has_writer=True)
        assert (state.word, state.step, state.steps, state.seconds_left) == ("running", 40, 100, 30.0)
    age(folder, 5)
    run.poll()
    # Killed: no event says so. Just now it could be another machine's step.
    assert run.state(NOW, has_writer=False).word == "running"
    age(folder, 11)
    run.poll()
    state = run.state(NOW, has_writer=False)
    assert state.word == "died" and state.command == f"narrowgauge resume '{folder}'"
    assert run.state(NOW, has_writer=None).word == "running"
    age(folder, 41)
    run.poll()
    assert run.state(NOW, has_writer=None).word == "silent"
    assert run.state(NOW, has_writer=True).word == "running"


@pytest.mark.parametrize(("kind", "word"), [("stop", "stopped"), ("lost", "died"), ("divergence", "died")])
def test_a_run_that_says_why_it_ended_is_believed_until_it_is_resumed(tmp_path: Path, kind: str, word: str) -> None:
    with begin(tmp_path / "a") as writer:
        run = LiveRun(writer.path)
        write_steps(writer, 1, 3)
        writer.event(Event(kind, 3, "because"))
        run.poll()
        state = run.state(NOW, has_writer=False)
        assert (state.word, state.said) == (word, "because") and state.command.startswith("narrowgauge resume ")
        writer.event(Event("resume", 3, "again"))
        run.poll()
        assert run.state(NOW, has_writer=True).word == "running"


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the system lists no locks")
def test_who_writes_is_read_from_the_list_of_locks_and_no_lock_is_taken(tmp_path: Path) -> None:
    with begin(tmp_path / "a"):
        assert writers([tmp_path / "a"]) == {tmp_path / "a": True}
    assert writers([tmp_path / "a"]) == {tmp_path / "a": False}
    assert writers([tmp_path / "a"], tmp_path / "none") == {tmp_path / "a": None}


def test_runs_are_found_in_folders_that_may_not_exist_yet(tmp_path: Path) -> None:
    assert runs_in([tmp_path / "no"]) == []
    for name in ("b", "a"):
        begin(tmp_path / "all" / name).close()
    (tmp_path / "all" / "other").mkdir()
    found = [tmp_path / "all" / name for name in ("a", "b")]
    assert runs_in([tmp_path / "all", found[1]]) == found


def test_a_sketch_keeps_every_spike_and_forgets_what_was_rolled_back(tmp_path: Path) -> None:
    with begin(tmp_path / "a") as writer:
        run = LiveRun(writer.path)
        for kept, last, spikes in ((0, 1000, {150: 99.0, 700: -9.0}), (400, 1000, {150: 99.0, 820: 50.0})):
            writer.rewind(kept)
            for step in range(kept + 1, last + 1):
                writer.step({"step": step, "loss": spikes.get(step, 2.0), "seconds": kept + 0.5})
            while run.poll():
                pass
            for _ in range(2):  # the second reads what the first has found
                sketch = run.sketch("loss", lambda line: line)
                assert len(sketch) < 200
                assert {int(x): y for x, y in zip(sketch.x, sketch.y, strict=True) if y != 2.0} == spikes
        double = run.sketch("loss", lambda line: Series(line.x, 2 * line.y))
        np.testing.assert_array_equal(double.y, 2 * sketch.y)
