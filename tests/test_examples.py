"""The examples run as they stand, and what they say in the end is true of what was asked."""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import narrowgauge
from narrowgauge.runs.record import read_run

EXAMPLES = Path(__file__).parents[1] / "examples"
SHAPE = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
Start = Callable[..., tuple[int, str, str]]


@pytest.fixture
def first_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    """Runs the example on a little text and a little model; its status and what it said."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "a text").mkdir()
    draw = random.Random(0)
    for number in range(6):
        words = draw.choices(["def", "return", "import", "self", "None", "the", "fox"], k=200)
        (tmp_path / "a text" / f"{number}.txt").write_text(" ".join(words))
    monkeypatch.chdir(tmp_path)

    def start(*words: str) -> tuple[int, str, str]:
        small = ("--steps", "3", "--sequence-length", "16", "--batch-size", "2", "--eval-batches", "1")
        return alone("--model", "./tiny", "--data", "a text", *small, *words)

    def alone(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["first_minute.py", *words])
        status = 0
        try:
            runpy.run_path(str(EXAMPLES / "first_minute.py"), run_name="__main__")
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    start.alone = alone  # type: ignore[attr-defined]
    return start


def test_own_loop_learns_and_loses_little(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[3]) for line in lines[:-1]]
    assert len(losses) == 4 and losses[-1] < losses[0] and lines[-1].startswith("8.")


def test_recorded_loop_ends_with_a_run_folder_and_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / "recorded_loop.py").read_text()
    monkeypatch.setattr(sys, "argv", ["recorded_loop.py", str(tmp_path / "mine")])
    said = []
    for _ in range(2):
        runpy.run_path(str(EXAMPLES / "recorded_loop.py"), run_name="__main__")
        said.append(capsys.readouterr().out.splitlines())
    run = read_run(tmp_path / "mine")
    assert len(text.splitlines()) <= 60 and said[0] == said[1]
    assert [row["step"] for row in run.steps] == list(range(1, 201)) and len(run.evals) == 4
    assert run.summary is not None and run.summary["val_loss"] < run.evals[0]["val_loss"]
    assert [event["kind"] for event in run.events] == ["start", "finish", "resume", "finish"]


def test_own_rule_fits_its_promise_and_learns_alike_in_every_storage(capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / "own_rule.py").read_text()
    rule = [line for line in text[text.index("def scalars") : text.index("OPTIONS")].splitlines() if line.strip()]
    assert len(rule) <= 15 and len(text.splitlines()) < 80
    runpy.run_path(str(EXAMPLES / "own_rule.py"), run_name="__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    losses, sizes = [float(line[-1]) for line in lines], [float(line[1]) for line in lines]
    assert max(losses) < 1.1 * losses[0] < 0.06 and sizes[0] == 20.0
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 8


def test_first_minute_compares_three_recipes_and_ends_with_a_page(first_minute: Start, tmp_path: Path) -> None:
    status, said, _ = first_minute("--seeds", "2", "--out", "here")
    assert status == 0
    rows = json.loads((tmp_path / "here" / "compare.json").read_text())
    assert [row["recipe"] for row in rows] == ["bfloat16/master", "bfloat16/word", "bfloat16/naive"]
    assert all(row["num_seeds"] == 2 for row in rows)
    assert Path(said.splitlines()[-1]).resolve() == tmp_path / "here" / "report.html"
    page = (tmp_path / "here" / "report.html").read_text()
    assert all(row["recipe"] in page for row in rows)
    lines = [line for line in said.splitlines() if "validation loss" in line and line[0].isdigit()]
    assert [line.split()[0] for line in lines] == [f"{k}/6" for k in range(1, 7)]


def test_first_minute_says_where_the_command_is_that_its_messages_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = runpy.run_path(str(EXAMPLES / "first_minute.py"))["where"]
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert where(folder / "python") == ""
    (folder / "narrowgauge").touch(mode=0o755)
    assert "is .venv/bin/narrowgauge; 'source .venv/bin/activate'" in where(folder / "python")
    monkeypatch.setenv("PATH", str(folder))
    assert where(folder / "python") == ""


def test_first_minute_goes_on_with_what_was_stopped(first_minute: Start, tmp_path: Path) -> None:
    first_minute("--seeds", "1", "--out", "here")
    before = (tmp_path / "here" / "compare.json").read_text()
    status, *_ = first_minute_alone(first_minute, "--out", "here")
    assert status == 0 and (tmp_path / "here" / "compare.json").read_text() == before


def test_first_minute_takes_a_file_of_settings_and_flags_overrule_it(first_minute: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("steps = 50\nweight_decay = 0.25\nbeta2 = 0.5\n")
    status, *_ = first_minute("--config", "mine.toml", "--beta2", "0.75", "--seeds", "1", "--out", "here")
    assert status == 0
    config = read_run(tmp_path / "here" / "bfloat16-word-seed0").config
    assert (config["steps"], config["weight_decay"], config["beta2"]) == (3, 0.25, 0.75)


def test_first_minute_adds_seeds_to_what_is_there(first_minute: Start, tmp_path: Path) -> None:
    first_minute("--seeds", "1", "--out", "here")
    status, said, _ = first_minute_alone(first_minute, "--out=here", "--seeds", "2", "--json")
    assert status == 0 and [row["num_seeds"] for row in json.loads(said)] == [2, 2, 2]


def words_of_first_minute(given: list[str]) -> list[str]:
    """What the example makes of these words, but for the name of the command."""
    name, *found = runpy.run_path(str(EXAMPLES / "first_minute.py"))["words"](given)
    assert name == "compare" and found[len(found) - len(given) :] == given
    return list(found[: len(found) - len(given)])


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        ([], set()),
        (["--out"], set()),
        (["--seconds", "5"], {"--steps"}),
        (["--tokens=900"], {"--steps"}),
        (["--lr=1e-3", "--json"], {"--lr"}),
        (["--config", "mine.toml"], {"--lr", "--gauges-every"}),
        (["--config=mine.toml", "--steps", "9"], {"--lr", "--gauges-every", "--steps"}),
        (["--config", "nowhere.toml"], set()),
        (["--out=new"], set()),
    ],
)
def test_first_minute_leaves_out_what_was_said_otherwise(
    given: list[str], left_out: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("lr = 0.01\ngauges_every = 0\n")
    flags = {word for word in words_of_first_minute(given) if word.startswith("--")}
    assert flags == {"--recipes", "--seeds", "--steps", "--sequence-length", "--lr", "--gauges-every"} - left_out


@pytest.mark.parametrize("given", [["--out", "here"], ["--out=here"], ["--out", "here", "--json"], ["--help"]])
def test_first_minute_says_nothing_of_its_own_where_all_is_said(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "compare.toml").touch()
    assert words_of_first_minute(given) == []


@pytest.mark.parametrize("words", [("--wrong", "1"), ("--recipes", "nonsense"), ("--seeds", "0"), ("--data", "")])
def test_first_minute_refuses_before_it_trains(words: tuple[str, ...], first_minute: Start, tmp_path: Path) -> None:
    status, said, complained = first_minute(*words)
    assert (status, said) == (2, "") and complained.count("\n") == 1
    assert words[0].strip("-") in complained or words[1] in complained
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a text", "tiny"]


def first_minute_alone(first_minute: Start, *words: str) -> tuple[int, str, str]:
    """The example with these words and no others."""
    alone: Start = first_minute.alone  # type: ignore[attr-defined]
    return alone(*words)


def test_float8_training_learns_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / "float8_training.py").read_text()
    runpy.run_path(str(EXAMPLES / "float8_training.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    for line in lines[:3]:
        first, last = (float(line.split()[place].rstrip(";")) for place in (2, 4))
        assert last < first / 50
    assert len(text.splitlines()) < 80 and "float8-row multiplies" in lines[3]


def test_int8_inference_loses_little_where_outliers_stay_wide(capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / "int8_inference.py").read_text()
    runpy.run_path(str(EXAMPLES / "int8_inference.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    by_row, by_codes, by_outlier = (float(line.rsplit(" ", 1)[1].rstrip("%")) for line in lines[:3])
    assert by_outlier < by_codes < by_row / 2
    assert "the same bits" in lines[3] and "it goes on with" in lines[4] and len(text.splitlines()) < 80


def test_a_run_of_two_ranks_goes_on_elsewhere_with_the_same_bits(capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "resume_elsewhere.py"), run_name="__main__")
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("two ranks, then")]
    (on_one, one), (on_three, three) = (line.split(": ") for line in lines)
    assert (on_one[-1], on_three[-1]) == ("1", "3") and one == three and len(one) == 16


def test_many_ranks_have_the_bits_of_one() -> None:
    text = (EXAMPLES / "many_ranks.py").read_text()
    source = str(Path(narrowgauge.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = [sys.executable, str(EXAMPLES / "many_ranks.py")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    one, two = (line.split("  ") for line in done.stdout.splitlines())
    assert (one[0], two[0]) == ("1 rank", "2 ranks") and one[1:] == two[1:] and len(text.splitlines()) < 90


def test_lightning_training_learns_with_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(
        "lightning", reason="narrowgauge[lightning] is not installed: ./dev test integrations installs it"
    )
    text = (EXAMPLES / "lightning_training.py").read_text()
    runpy.run_path(str(EXAMPLES / "lightning_training.py"), run_name="__main__")
    losses, sizes = capsys.readouterr().out.splitlines()[-2:]
    first, last = (float(losses.split()[place]) for place in (1, 4))
    assert last < 0.8 * first and len(text.splitlines()) <= 60 and float(sizes.split()[0]) < 8.5


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="narrowgauge[torchtitan] is not installed")
def test_what_torchtitan_lacks_is_said_in_one_line() -> None:
    package = "triton"
    code = f"import runpy, sys; sys.modules[{package!r}] = None; runpy.run_path({str(EXAMPLES / 'torchtitan_configs.py')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    (line,) = [line for line in done.stderr.splitlines() if "Warning" not in line and line.strip()]
    assert done.returncode == 1 and line.startswith(f"torchtitan was imported, and {package} was not found. ")
    assert "pip install" in line
