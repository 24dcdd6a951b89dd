"""A run that was stopped, killed, damaged or moved to other ranks: the same command goes on, and
what remains is always the same run.
"""

import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from narrowgauge.errors import RankError
from narrowgauge.runs.record import read_run
from narrowgauge.runs.writer import Record
from narrowgauge.trainer import checkpoints
from narrowgauge.trainer import train as loop
from narrowgauge.trainer.export import export
from narrowgauge.trainer.tokens import load_tokenizer, write_tokens
from ranks import run_ranks
from tensors import assert_same_bits
from trainer.tiny_runs import (
    CASES,
    assert_same_run,
    bytes_of,
    call,
    kill,
    refused,
    settings,
    trained,
    words_of,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", CASES)
def test_stopped_and_continued_is_the_same_run(name, place, uninterrupted, tmp_path):
    folder = trained(place, tmp_path / "run", **CASES[name], stop_after=3)
    assert read_run(folder).summary is None and len(read_run(folder).steps) == 3
    loop.train({"out": str(folder), "stop_after": 5})
    trained(place, folder, **CASES[name])
    assert_same_run(read_run(folder), uninterrupted[name])
    kinds = ("start", "stop", "resume", "finish")
    assert [e["what"] for e in read_run(folder).events if e["what"] in kinds] == [
        "start", "stop", "resume", "stop", "resume", "finish",
    ]  # fmt: skip
    before = bytes_of(folder)
    loop.train({"out": str(folder)})
    assert bytes_of(folder) == before


def test_a_killed_run_is_the_same(place, uninterrupted, tmp_path):
    name = "word, accumulated"
    folder = tmp_path / "run"
    words = words_of(settings(place, folder, **CASES[name]))
    for rows in (1, 5):
        kill(words, folder / "steps.jsonl", rows)
    assert call(*words).exit_code == 0
    assert_same_run(read_run(folder), uninterrupted[name])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_saves_and_the_same_command_goes_on(
    number,
    place,
    uninterrupted,
    tmp_path,
    monkeypatch,
):
    folder = tmp_path / "run"
    words = words_of(settings(place, folder, **CASES["naive"], checkpoint_every=0))
    true_step = loop.train_step

    def train_step(run):
        if run.step == 2:
            signal.raise_signal(number)
        return true_step(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        interrupted = call(*words)
    assert interrupted.exit_code == 130
    assert "The same command continues" in interrupted.stdout
    assert [path.name for path in checkpoints.folders(folder)] == ["step-00000003"]
    assert call(*words).exit_code == 0
    assert_same_run(read_run(folder), uninterrupted["naive"])


# ── damage ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def paused(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 5 of 8, never to be changed."""
    out = tmp_path_factory.mktemp("paused") / "run"
    return trained(place, out, **CASES["naive"], stop_after=5)


@pytest.fixture
def stopped(paused: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(paused, tmp_path / "run"))


def flip(content: bytearray, place: int) -> None:
    content[place] ^= 1 << place % 8


def cut(content: bytearray, place: int) -> None:
    del content[place:]


def swap(content: bytearray, place: int) -> None:
    content[place : place + 64] = content[place : place + 64][::-1]


@pytest.mark.parametrize("damage", [flip, cut, swap])
@pytest.mark.parametrize("seed", range(4))
def test_no_damage_changes_the_weights(damage, seed, stopped, uninterrupted):
    """Of any file: rows of the record may be lost, the training is the same."""
    draw = random.Random(f"{damage.__name__} {seed}")
    files = sorted(path for path in stopped.rglob("*") if path.is_file() and path.stat().st_size)
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    damage(content, draw.randrange(len(content)))
    file.write_bytes(content)
    result = call("train", "--out", str(stopped))
    assert result.exit_code == 0, result.output
    summary = read_run(stopped).summary
    for name in ("weights_fingerprint", "val_loss"):
        assert summary[name] == uninterrupted["naive"].summary[name]


def test_a_flipped_digit_in_the_record_trains_at_the_rate_of_the_checkpoint(stopped, uninterrupted):
    file = stopped / "run.toml"
    text = file.read_text()
    assert "lr = 0.003" in text
    file.write_text(text.replace("lr = 0.003", "lr = 0.007"))
    loop.train({"out": str(stopped)})
    assert_same_run(read_run(stopped), uninterrupted["naive"])
    assert read_run(stopped).config["lr"] == 0.003


def test_a_second_writer_is_refused(stopped):
    with Record.open(stopped):
        assert "is writing it" in refused("train", "--out", str(stopped))


# ── changed settings ──────────────────────────────────────────────────────────────────────────────

FIXED = {
    "--seed 3": "seed was 0 and is 3",
    "--batch-size 8": "batch_size was 4 and is 8",
    "--recipe bfloat16/word": "recipe was bfloat16/naive and is bfloat16/word",
    "--model llama-1m": "model was",
    "--sequence-length 8": "sequence_length was 16 and is 8",
    "--steps 4": "steps was 8 and is 4",
    "--data OTHER": "are not those that it started with",
}


@pytest.mark.parametrize("words", FIXED)
def test_what_decides_a_run_from_its_start_cannot_change(words, stopped, tmp_path):
    other = write_tokens(["other " * 999], load_tokenizer(None), tmp_path / "other")
    before = bytes_of(stopped)
    line = refused("train", "--out", str(stopped), *words.replace("OTHER", str(other)).split())
    assert FIXED[words] in line and bytes_of(stopped) == before


def test_a_rate_and_a_longer_run_may_change_and_are_told(stopped):
    printed = call("train", "--out", str(stopped), "--lr", "0.001", "--steps", "9").stdout
    assert "changed-settings: lr was 0.003 and is 0.001 at step 5" in printed
    run = read_run(stopped)
    assert run.summary["steps"] == 9 and run.config["lr"] == 0.001
    assert "lr was 0.001 and is 0.002" in refused("train", "--out", str(stopped), "--lr", "0.002")


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────

SCALED = {
    "recipe": "float16/split/reproducible", "steps": 3, "batch_size": 6, "gradient_accumulation_steps": 6,
    "checkpoint_every": 0, "eval_every": 0,
}  # fmt: skip


def go_on(rank: int, place: Path, runs: dict[Path, dict[str, Any]]) -> None:
    """One rank of some trainings."""
    for out, changes in runs.items():
        trained(place, out, **{**SCALED, **changes}, is_verbose=False)


def read_another_text(rank: int, place: Path, out: Path) -> str:
    """One rank of a training in which rank 1 has other tokens."""
    read = loop.open_tokens
    if rank:
        loop.open_tokens = lambda data: replace(read(data), fingerprint="another")
    with pytest.raises(RankError) as refusal:
        go_on(rank, place, {out: {}})
    return refusal.value.message


def test_ranks_with_other_tokens_are_refused_on_all(place, tmp_path):
    for message in run_ranks(read_another_text, 2, tmp_path / "ranks", place, tmp_path / "run"):
        assert message.startswith("Cannot train: rank 1 has tokens = another, and rank 0 has ")


def test_it_is_the_same_run_on_any_number_of_ranks(place, tmp_path):
    whole, two, parts, elsewhere = (tmp_path / name for name in ("1", "2", "2 to 1", "2 to 3"))
    go_on(0, place, {whole: {}})
    run_ranks(go_on, 2, tmp_path / "a", place, {two: {}, parts: {"stop_after": 2}})
    shutil.copytree(parts, elsewhere)
    run_ranks(go_on, 3, tmp_path / "b", place, {elsewhere: {}})
    go_on(0, place, {parts: {}})
    first = read_run(whole)
    for folder in (two, parts, elsewhere):
        run = read_run(folder)
        assert run.summary["weights_fingerprint"] == first.summary["weights_fingerprint"]
        assert run.summary["val_loss"] == first.summary["val_loss"]
        for kind in ("loss", "grad_norm"):
            assert [row[kind] for row in run.steps] == [row[kind] for row in first.steps]
    for row in read_run(two).steps:
        assert 0 <= row["wait_seconds"] < row["communication_seconds"] < row["seconds"]
    files = []
    for folder in (whole, elsewhere):
        files.append(
            load_file(export(folder, tmp_path / f"out {folder.name}") / "model.safetensors")
        )
    assert_same_bits(*files)
