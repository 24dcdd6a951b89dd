"""Comparisons in a loop of your own and with the trainer: kept, interrupted, extended, refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge.measuring.diagnose.comparison import compare_runs
from narrowgauge.report.publishing import read_runs
from narrowgauge.runs.record import read_run
from narrowgauge.trainer import train as loop
from narrowgauge.trainer.compare import compare, compare_recipes
from narrowgauge.trainer.settings import OF_A_RUN
from text.refusals import refused
from trainer.tiny_runs import bytes_of, settings


def watched(recipe: str, seed: int, record: Any) -> dict[str, float]:
    torch.manual_seed(seed)
    model, optimizer = ng.prepare(torch.nn.Linear(16, 16), recipe, lr=1e-4, audit_every=2)
    with record(model, optimizer) as recorder:
        for _ in range(6):
            loss = model(torch.randn(8, 16).bfloat16()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss, tokens=8)
        recorder.evaluate(4.0 + seed / 10)
    return {"bytes_per_param": 7.0}


def test_your_own_training_loop_is_compared_in_order_and_kept(tmp_path):
    names = ["bfloat16/word", "bfloat16/naive"]
    comparison = compare(watched, names, seeds=2, out=tmp_path)
    assert [row["bytes_per_param"] for row in comparison.rows] == [7.0, 7.0]
    run = read_run(tmp_path / "bfloat16-naive-seed1")
    # Each audit stands in the row of its own step, and in no other.
    assert [row["step"] for row in run.steps if "edq" in row] == [2, 4, 6]
    assert (run.summary["val_loss"], run.summary["steps"]) == (4.1, 6)
    assert compare_runs(read_runs([tmp_path])).verdict == comparison.verdict
    with refused("a folder that is there", name="run.toml"):
        compare(watched, ["bfloat16/word"], out=tmp_path)


@pytest.mark.parametrize(
    ("returned", "loss"), [(3.5, 3.5), (torch.tensor(2.5), 2.5), ({"val_loss": math.nan}, None)]
)
def test_what_a_loop_may_return(returned, loss):
    comparison = compare(lambda recipe, seed, record: returned, ["anything at all"])
    assert comparison.rows[0]["val_loss"] == loss
    assert (comparison.rows[0]["verdict"] == "diverged") is (loss is None)


RECIPES = ("bfloat16/word", "bfloat16/naive")


@pytest.fixture(scope="module")
def base(place: Path, one_thread: None) -> dict[str, Any]:
    """The settings that all runs share."""
    short = {"steps": 4, "eval_every": 2, "checkpoint_every": 1}
    table = vars(settings(place, Path("nowhere"), **short))
    return {name: value for name, value in table.items() if name not in OF_A_RUN}


def done(base: dict[str, Any], out: Path, seeds: int = 1, **changes: Any) -> str:
    """Compare or go on, and return the printed text."""
    lines = []
    compare_recipes(RECIPES, {**base, **changes}, seeds=seeds, out=out, say=lines.append)
    return "\n".join(lines)


def test_an_interrupted_comparison_goes_on_takes_a_seed_and_is_kept(base, tmp_path, monkeypatch):
    true_train = loop.train

    def train(named, **more):
        if "naive" in named["out"]:
            true_train({**named, "stop_after": 3}, **more)
            raise KeyboardInterrupt
        return true_train(named, **more)

    parts = tmp_path / "parts"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", train)
        with pytest.raises(KeyboardInterrupt):
            done(base, parts)
    assert not (parts / "compare.json").exists()
    assert done(base, parts).count("earlier") == 1
    (parts / "bfloat16-word-seed1").mkdir()  # as a kill before the first file of a run leaves it
    assert done(base, parts, seeds=2).count("earlier") == 2
    rows = json.loads((parts / "compare.json").read_text())
    assert [row["num_seeds"] for row in rows] == [2, 2]
    before = bytes_of(parts)
    assert done(base, parts, seeds=2).count("earlier") == 4
    assert bytes_of(parts) == before
    with refused("another rate"):
        done(base, parts, lr=1e-3)


def test_a_run_that_diverges_is_a_result(base, tmp_path):
    assert done(base, tmp_path, lr=1e38).count("validation loss nan") == 2
    rows = json.loads((tmp_path / "compare.json").read_text())
    assert [row["verdict"] for row in rows] == ["diverged", "diverged"]
