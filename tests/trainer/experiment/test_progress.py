"""The progress display: in terminals of any width, and elsewhere; with a clock that the test sets."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from narrowgauge.runs.record import Run
from narrowgauge.trainer.experiment.planned_runs import plan_runs
from narrowgauge.trainer.experiment.progress import Progress, RunProgress
from narrowgauge.trainer.experiment.time_left import RunEstimate

RECIPES = ("bfloat16/word", "bfloat16/naive")


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def progress_of(stream: io.StringIO, seeds: int = 1) -> tuple[Progress, Clock]:
    clock = Clock()
    return Progress(plan_runs(RECIPES, range(seeds), Path("out")), Path("out"), stream, clock), clock


def finished(loss: float) -> Run:
    return Run(Path("a"), {"config": {}}, summary={"val_loss": loss})


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def seen(progress: Progress, width: int) -> list[str]:
    """The lines of the live display."""
    console = RichConsole(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(progress._view())
    return [line.rstrip() for line in capture.get().splitlines()]


def train(progress: Progress, clock: Clock, number: int, steps: int = 10) -> None:
    progress.begin(number)
    run = RunProgress(progress, 10)
    run.stage("building the model")
    run.start("bfloat16/word", 0)
    clock.now += 4
    for step in range(1, steps + 1):
        clock.now += 2
        run.step({"step": step, "loss": 3.5})


def test_a_pipe_gets_a_line_per_run_with_the_time_left() -> None:
    stream = io.StringIO()
    progress, clock = progress_of(stream, seeds=2)
    with progress:
        progress.plan([(recipe, 10, False) for _ in (0, 1) for recipe in RECIPES], {RECIPES[0]: RunEstimate(1.5, 3.0)})
        for number in range(4):
            train(progress, clock, number)
            progress.end(number, finished(2.5))
    assert stream.getvalue().splitlines() == [
        "bfloat16/word, bfloat16/naive · seeds 0, 1 · out",
        # Of the second recipe nothing is known but the first: 2 × (15 + 3) + 2 × 15.
        "about 1 min 6 s for 4 runs (a step takes 1.5 s here)",
        "1/4  bfloat16/word, seed 0  validation loss 2.5000  24.0 s  about 1 min 12 s left",
        "2/4  bfloat16/naive, seed 0  validation loss 2.5000  24.0 s  about 48 s left",
        "3/4  bfloat16/word, seed 1  validation loss 2.5000  24.0 s  about 24 s left",
        "4/4  bfloat16/naive, seed 1  validation loss 2.5000  24.0 s",
    ]


def test_an_estimate_that_could_not_be_measured_is_not_printed() -> None:
    stream = io.StringIO()
    progress, clock = progress_of(stream)
    with progress:
        progress.plan([(recipe, 10, False) for recipe in RECIPES], {})
        train(progress, clock, 0)
        progress.end(0, finished(2.5))
    assert [line.rpartition("  ")[2] for line in stream.getvalue().splitlines()[1:]] == ["about 24 s left"]


@pytest.mark.parametrize(("columns", "has_table"), [(40, False), (79, False), (80, True), (200, True)])
def test_a_terminal_of_any_width_gets_a_bar_at_once(
    columns: int, has_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    progress, clock = progress_of(Terminal())
    assert progress._live is not None
    with progress:
        lines = seen(progress, columns)
        assert lines[0].endswith(" 0/2 runs") and "━" in lines[0] and lines[1] == "loading PyTorch"
        assert any("┃ recipe" in line for line in lines) == has_table
        progress.plan([(recipe, 10, False) for recipe in RECIPES], {})
        train(progress, clock, 0, steps=5)
        lines = seen(progress, columns)
        assert max(map(len, lines)) <= columns and lines[0].endswith("0/2 runs · about 34 s left")
        assert any("step 5/10" in line for line in lines)
        assert has_table or lines[1].startswith("bfloat16/word, seed 0: step 5/10")
        progress.end(0, finished(2.5))
    # The bar is gone at the end.
    assert not any("runs" in line for line in seen(progress, columns))


def test_a_line_replaces_a_table_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for lines, has_table in (("14", True), ("13", False)):
        monkeypatch.setenv("LINES", lines)
        progress, _ = progress_of(Terminal(), seeds=3)
        progress.status("starting")
        assert any("┃" in line for line in seen(progress, 100)) == has_table


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert progress_of(Terminal())[0]._live is None


def test_how_to_resume_one_run_is_not_shown() -> None:
    progress, _ = progress_of(io.StringIO())
    progress.begin(0)
    RunProgress(progress, 10).say("Stopped after step 3. Go on with: narrowgauge resume out/a")
    progress.stdout.write("\n")
    assert progress.lines[0][2] == "Stopped after step 3."


def test_stopping_is_shown_without_breaking_the_table(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for stream, beside in ((Terminal(), True), (io.StringIO(), False)):
        progress, clock = progress_of(stream)
        train(progress, clock, 0, steps=2)
        RunProgress(progress, 10).stopping("Stopping after this step.")
        assert any("Stopping after this step." in line for line in seen(progress, 100)) == beside
        assert capfd.readouterr().err == ("" if beside else "Stopping after this step.\n")
