"""The page of questions: its figures stand in the log, and its commands are commands."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from narrowgauge.cli.main import main
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.formats import FORMATS
from narrowgauge.spec.storages import STORAGES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "questions.md").read_text(encoding="utf-8")
ANSWERS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
*ASKED, LAST = ANSWERS
COMMANDS = [line for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
QUICK = [command for command in COMMANDS if command.split()[1] in ("show", "plan")]


@pytest.mark.parametrize("question", ANSWERS)
def test_every_answer_has_figures_and_they_stand_in_the_log(question: str) -> None:
    answer = ANSWERS[question]
    figures = re.findall(r"\*\*([+−]?\d[^*]*)\*\*", answer)
    pages = [(DOCS / page).read_text(encoding="utf-8") for page in re.findall(r"\]\((log/\w+\.md)\)", answer)]
    assert bool(figures) == bool(pages) == (question in ASKED)
    for figure in figures:
        assert any(re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", page) for page in pages), figure


def test_all_but_the_last_end_with_a_command() -> None:
    assert LAST == "In a course's terms" and all("```console" in ANSWERS[question] for question in ASKED)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_read(command: str) -> None:
    name, *words = shlex.split(command)
    assert name == "narrowgauge"
    found: click.Command = main
    while isinstance(found, click.Group):
        found = found.commands[words.pop(0)]
    if "resume" in command:
        words = []  # the folder of a run, which is the reader's
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found, "callback", lambda **_: None)
        result = CliRunner().invoke(found, words)
    assert result.exit_code == (2 if "resume" in command else 0), result.output


@pytest.mark.parametrize("command", QUICK)
def test_what_takes_a_moment_runs(command: str) -> None:
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    assert result.exit_code == 0 and result.output.strip()


def test_numbers_of_formats_are_those_of_the_table() -> None:
    half, brain = FORMATS["float16"], FORMATS["bfloat16"]
    assert "epsilon 0.000976562" in PAGE and float(f"{half.epsilon:.6g}") == 0.000976562
    assert "epsilon 0.0078125" in PAGE and brain.epsilon == 0.0078125
    assert "ends at 65504" in PAGE and half.max == 65504
    smallest = {row.name: row.smallest_subnormal for row in (half, brain)}
    assert f"{smallest['float16']:.0e}" == "6e-08" and f"{smallest['bfloat16']:.0e}" == "9e-41"
    assert half.smallest_normal / smallest["float16"] == 1024 and brain.smallest_normal / smallest["bfloat16"] == 128


def test_no_chip_multiplies_one_of_the_two_faster() -> None:
    rates = [(chip.peak_tflops.get("float16"), chip.peak_tflops.get("bfloat16")) for chip in CHIPS.values()]
    both = [pair for pair in rates if None not in pair]
    assert len(both) > 5 and all(half == brain for half, brain in both)


def test_states_of_ten_billion_parameters() -> None:
    sizes = [10e9 * STORAGES[name].bytes_per_param / 8 / 1e9 for name in ("master", "word")]
    assert [math.floor(size) for size in sizes] == [20, 10]
