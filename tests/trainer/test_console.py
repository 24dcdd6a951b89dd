"""The console: a bar on a terminal, plain lines in a pipe, and no run that ends because of either."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import narrowgauge
from narrowgauge.trainer.console import Console, summary_table

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(narrowgauge.__file__).parents[1]), "COLUMNS": "100"}
SCRIPT = """
from narrowgauge.trainer.console import Console
with Console(4, 2) as console:
    console.say("first [bold]words[/bold]")
    console.start("bfloat16/word", 0)
    for k in range(1, 5):
        audit = {"edq": 1.0, "lost_fraction": 0.25}
        console.step({"step": k, "loss": 2.5, "tokens_per_second": 1234.0, "lr": 1e-3, **audit})
    console.evaluation({"step": 4, "val_loss": 2.25})
    console.summary([{"recipe": "bfloat16/word", "val_loss": 2.25, "edq": 0.9}])
"""
FINISHED = {
    "recipe": "bfloat16/word", "val_loss": 2.25, "bytes_per_param": 8.0, "edq": 0.9, "tokens_per_second": 1234.5,
    "wall_seconds": 61.2,
}  # fmt: skip


def through_pipe(**environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, check=True, env={**ENVIRONMENT, **environment}
    )
    assert result.stderr == b""
    return result.stdout.decode("utf-8" if "PYTHONIOENCODING" not in environment else "ascii")


def on_terminal(**environment: str) -> str:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**ENVIRONMENT, **environment}) as process:
        os.close(theirs)
        seen = b""
        # Linux says that the other end is gone with an error, others with nothing.
        while part := read_some(ours):
            seen += part
    os.close(ours)
    assert process.returncode == 0, seen
    return seen.decode()


def read_some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}, {"PYTHONIOENCODING": "ascii"}], ids=str)
def test_a_pipe_sees_plain_lines(environment: dict[str, str]) -> None:
    output = through_pipe(**environment)
    assert "\x1b" not in output and "\r" not in output
    lines = output.splitlines()
    assert lines[0] == "first [bold]words[/bold]"
    steps = [line for line in lines if "tokens/s  lr" in line]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "4/4"]
    assert steps[0] == "step      1/4  loss 2.5000  1,234 tokens/s  lr 1.00e-03  update lost 0.0%"
    assert "step      4/4  validation loss 2.2500" in lines


def test_a_terminal_sees_a_bar_and_a_table() -> None:
    output = on_terminal(TERM="xterm-256color")
    assert "\x1b[" in output and "━" in output and "4/4" in output
    assert "loss 2.5000  1,234 tokens/s" in output
    assert "────" in output and "first [bold]words[/bold]" in output
    assert "lr 1.00e-03" not in output, "lines are for pipes"


@pytest.mark.parametrize("columns", ["40", "70"])
def test_a_narrow_terminal_cuts_no_figure(columns: str) -> None:
    output = on_terminal(TERM="xterm-256color", COLUMNS=columns)
    last = output.splitlines()[-1]
    assert "────" not in output and last.split()[:3] == ["bfloat16/word", "2.2500", "–"], output


def test_a_terminal_that_cannot_move_its_cursor_sees_lines() -> None:
    output = on_terminal(TERM="dumb")
    assert "\x1b" not in output and "step      4/4  loss 2.5000" in output


def test_the_table_has_a_cell_for_everything_and_a_dash_for_nothing() -> None:
    table = summary_table([FINISHED, {"recipe": "float32/float32"}])
    head, full, empty = table.plain().splitlines()
    assert full.split() == ["bfloat16/word", "2.2500", "8.00", "10.0%", "1,234", "61"]
    assert empty.split() == ["float32/float32", *"–––––"]
    assert head.index("tokens/s") + len("tokens/s") == full.index("1,234") + len("1,234")
    assert head.split() == ["recipe", "val.", "loss", "bytes/param", "update", "lost", "tokens/s", "seconds"]


def test_an_edq_above_one_is_no_negative_loss() -> None:
    assert "0.0%" in summary_table([{**FINISHED, "edq": 1.02}]).plain()


def test_an_audit_without_a_reading_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "loss": 2.5, "tokens_per_second": 1.0, "lr": 0.0, "edq": None, "lost_fraction": None}
    with Console(1, 1) as console:
        console.step(row)
    assert "lost" not in capsys.readouterr().out


def test_ending_twice_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Console(1, 1) as console:
        console.__exit__()
    console.say("still here")
    assert capsys.readouterr().out == "still here\n"


STAGES = """
from narrowgauge.trainer.console import Console
with Console(4, 2) as console:
    console.stage("training a tokenizer")
    console.progress and console.progress.refresh()
    console.stage("building the model")
    console.progress and console.progress.refresh()
    console.start("bfloat16/word", 1)
    console.progress and console.progress.refresh()
    console.compiling("graph", 2)
    console.progress and console.progress.refresh()
    console.step({"step": 2, "loss": 2.5, "tokens_per_second": 1234.0, "lr": 1e-3})
"""


@pytest.mark.parametrize("columns", ["40", "100"])
def test_a_bar_is_there_before_there_are_steps(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCRIPT", STAGES)
    output = on_terminal(TERM="xterm-256color", COLUMNS=columns)
    places = [output.find(word) for word in ("training a tokenizer", "building the model", "1/4", "2/4")]
    assert places == sorted(places) and places[0] >= 0, output
    assert "━" in output[: places[1]] and ("compiling graph 2" in output) == (columns == "100")
    assert "/4" not in output[: places[1]], "no steps are counted before there are any"
    assert through_pipe() == "step      2/4  loss 2.5000  1,234 tokens/s  lr 1.00e-03\n"


def test_that_it_will_stop_is_told_beside_the_bar_and_past_every_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = STAGES + '    console.stopping("stopping now")\n    console.progress and console.progress.refresh()\n'
    monkeypatch.setitem(globals(), "SCRIPT", script)
    last = on_terminal(TERM="xterm-256color").split("\r")
    assert any("stopping now" in line and "2/4" in line for line in last)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, env=ENVIRONMENT)
    assert result.stderr == b"stopping now\n"
