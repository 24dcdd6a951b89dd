"""Whole texts that people read, as files: a wording changes by ``./dev test --update-golden
tests/text``, and the diff shows it.

Every text is the same on all machines: chips are named, and runs are made up.
"""

from pathlib import Path

import pytest
from click.testing import CliRunner

import narrowgauge as ng
from measuring.made_runs import make_run, seeds
from measuring.records import AT, healthy_run
from narrowgauge.cli.main import main
from narrowgauge.measuring.diagnose.comparison import compare_runs
from narrowgauge.runs.record import Run

GOLDEN = Path(__file__).parents[1] / "golden" / "text"
WORD = "--recipe bfloat16/word --chip H100-SXM"

COMMANDS = {
    "show-recipe-word": "show recipe float8-row/word",
    "plan-run": f"plan run --model llama-8b {WORD} --chips 8 --tokens 1e12",
    "plan-run-too-large": f"plan run --model llama-70b {WORD} --chips 8",
}


def run(line: str) -> str:
    result = CliRunner().invoke(main, line.split(), prog_name="narrowgauge")
    assert result.exit_code == 0, result.output
    return result.stdout


def with_validation(recipe: str, losses: tuple[float, ...], step_seconds: float) -> list[Run]:
    """Make runs with a validation half way."""
    runs = []
    for seed, loss in enumerate(losses):
        runs.append(
            make_run(
                recipe, seed, loss, evals=[(5, loss + 1), (10, loss)], step_seconds=step_seconds
            )
        )
    return runs


def compared() -> list[Run]:
    return [
        *with_validation("bfloat16/master", (4.0, 4.1, 4.2), 0.5),
        *with_validation("bfloat16/word", (4.01, 4.09, 4.2), 0.25),
        *seeds("bfloat16/compact", (4.013, 4.1, 4.197)),
        *seeds("bfloat16/naive", (4.1, 4.2, 4.31), edq=0.3),
        *seeds("float8-row/word", (4.02, 4.121, 4.22)),
    ]


def verdict(runs: list[Run]) -> str:
    comparison = compare_runs(runs)
    return f"{comparison.table().plain()}\n{comparison.verdict}\n"


def spiked_run() -> Run:
    run = healthy_run()
    for row in run.steps:
        row["loss"] += 3.0 * (row["step"] == AT)
        row["grad_norm"] *= 30.0 ** (row["step"] == AT - 1)
    return run


TEXTS = {
    **{name: lambda line=line: run(line) for name, line in COMMANDS.items()},
    "compare": lambda: verdict(compared()),
    "diagnose-spike": lambda: f"{ng.diagnose(spiked_run())}\n",
    "diagnose-two-runs": lambda: f"{ng.diagnose(healthy_run(), spiked_run())}\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_as_recorded(
    name,
    update_golden,
    tmp_path,
    monkeypatch,
    native_formats,
):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    file = GOLDEN / f"{name}.txt"
    text = TEXTS[name]()
    assert str(Path.home()) not in text
    if update_golden:
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
