"""The command beside an event: by its ids and fields, runnable, and on the page."""

from __future__ import annotations

import html
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from narrowgauge.analysis.monitor.detectors import DETECTORS
from narrowgauge.cli.main import main
from narrowgauge.report.event_commands import command_of, resumption
from narrowgauge.runs.events import KINDS
from narrowgauge.runs.record import Run
from narrowgauge.spec.notation import parse
from report.made_pages import page_of

MakeRun = Callable[..., Run]
FOLDER = Path("runs/my first")


def run_in(recipe: object, *events: dict[str, object], **more: object) -> Run:
    return Run(FOLDER, {"config": {"recipe": recipe}, **more}, events=list(events))


@pytest.mark.parametrize(
    ("recipe", "detector", "instead"),
    [
        ("bfloat16/naive", "lost-updates", "bfloat16/word"),
        ("bfloat16/naive", "audit", "bfloat16/word"),
        ("float8-row/word/reproducible", "audit", "float8-row/split/reproducible"),
        ("float8-row/word", "overflow", "float8-block/word"),
        ("float16/master", "scale-halvings", "bfloat16/master"),
    ],
)
def test_advice_on_a_part_of_the_recipe_is_the_training_with_another(recipe: str, detector: str, instead: str) -> None:
    command = command_of(run_in(recipe), {"kind": "warning", "step": 3, "detector": detector, "message": "anything"})
    assert shlex.split(command) == ["narrowgauge", "train", "--config", str(FOLDER / "run.toml"), "--recipe", instead]
    assert parse(instead) != parse(recipe)


@pytest.mark.parametrize(
    ("recipe", "detector"),
    [
        ("bfloat16/naive", "loss-spike"),
        ("bfloat16/naive", "a detector of later"),
        ("no recipe", "audit"),
        ({"compute": "float8-row", "storage": "word", "keep": ["lm_head"]}, "audit"),
        ("float64/float64", "audit"),
        (None, "audit"),
    ],
)
def test_where_no_other_recipe_is_advised_the_diagnosis_tells_more(recipe: object, detector: str) -> None:
    command = command_of(run_in(recipe), {"kind": "warning", "detector": detector})
    assert shlex.split(command) == ["narrowgauge", "diagnose", str(FOLDER)]


def test_a_loop_of_your_own_is_not_started_or_resumed_by_a_command() -> None:
    run = run_in("bfloat16/naive", recorder={})
    assert command_of(run, {"kind": "lost_updates", "detector": "audit"}).startswith("narrowgauge diagnose ")
    assert command_of(run, {"kind": "lost"}) == resumption(run) == ""


def test_a_run_that_stopped_is_resumed_once() -> None:
    stop, resume, lost = {"kind": "stop"}, {"kind": "resume"}, {"kind": "lost"}
    run = run_in("bfloat16/word", stop, resume, lost)
    assert [command_of(run, event) for event in run.events] == ["", "", f"narrowgauge resume '{FOLDER}'"]
    ended = Run(FOLDER, run.run, events=run.events, summary={})
    assert command_of(ended, lost) == ""


def test_the_parts_that_a_detector_advises_are_those_that_its_advice_names() -> None:
    assert DETECTORS["lost-updates"].advised_parts == ("storage",)
    assert DETECTORS["overflow"].advised_parts == ("compute",)
    assert DETECTORS["loss-spike"].advised_parts == ()


def test_every_command_is_one_of_the_command_line() -> None:
    run = run_in("bfloat16/naive")
    found = {command_of(run, {"kind": kind, "detector": name}) for kind in KINDS for name in ("", "audit", *DETECTORS)}
    verbs = {shlex.split(command)[1] for command in found if command}
    assert verbs == {"train", "resume", "diagnose"} <= set(main.commands)


def test_the_run_toml_of_a_run_is_a_settings_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'schema_version = 2\n[config]\nmodel = "llama-1m"\nrecipe = "bfloat16/naive"\nsteps = 0\nout = "runs/a"\n'
    )
    done = CliRunner().invoke(main, ["train", "--config", str(tmp_path / "run.toml"), "--recipe", "bfloat16/word"])
    # Its settings are read, none of the others is refused, and the first that is wrong is.
    assert done.exit_code == 2 and "steps = 0" in done.output


def test_the_page_shows_it_beside_the_advice(make_run: MakeRun) -> None:
    event = {"kind": "lost_updates", "step": 5, "message": "lost", "advice": "Do it.", "detector": "audit"}
    run = make_run("bfloat16/naive", events=(event, {"kind": "start", "step": 0, "message": "it began"}))
    page = html.unescape(page_of([run]))
    assert f'Do it.<code class="command">{command_of(run, event)}</code>' in page
    assert page.count('class="command">narrowgauge train') == 1
