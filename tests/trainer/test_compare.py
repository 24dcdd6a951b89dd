"""Comparisons in a loop of your own and with the trainer: repeated, interrupted, extended, refused."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from measuring.made_runs import SIZES
from narrowgauge.errors import NarrowgaugeError, RecipeError, RecordError, Terminated
from narrowgauge.measuring.comparison import compare_runs
from narrowgauge.report.publishing import read_runs
from narrowgauge.runs.record import read_run
from narrowgauge.trainer import loop
from narrowgauge.trainer.compare import compare, compare_recipes
from narrowgauge.trainer.settings import OF_A_RUN
from trainer.tiny_runs import bytes_of, lasting, settings


def watched(recipe: str, seed: int, record: Any) -> dict[str, float]:
    torch.manual_seed(seed)
    model, optimizer = ng.prepare(torch.nn.Linear(16, 16), recipe, lr=1e-4, audit_every=2)
    with record(model, optimizer, gauges_every=3) as recorder:
        for _ in range(6):
            loss = model(torch.randn(8, 16).bfloat16()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss, tokens=8)
        recorder.evaluate(4.0 + seed / 10)
    return {"bytes_per_param": SIZES[recipe]}


def test_your_own_training_loop_is_compared_in_order_and_kept(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []

    def train(recipe: str, seed: int, record: Any) -> dict[str, float]:
        calls.append((recipe, seed))
        return watched(recipe, seed, record)

    names = ["bfloat16/word", "bfloat16/naive"]
    comparison = compare(train, names, seeds=2, out=tmp_path)
    assert calls == [(name, seed) for seed in (0, 1) for name in names]
    assert [row["bytes_per_param"] for row in comparison.rows] == [SIZES[name] for name in names]
    assert comparison.rows[0]["tokens_per_second"] > 0
    for number, name in enumerate(names):
        run = read_run(tmp_path / f"{name.replace('/', '-')}-seed1")
        assert [row["step"] for row in run.gauges] == [3, 6]
        # Each audit stands in the row of its own step, and in no other.
        assert [row["step"] for row in run.steps if "edq" in row] == [2, 4, 6]
        assert (run.steps[-1]["lost_fraction"] > 0.1) == bool(number)
        assert (run.summary["val_loss"], run.summary["steps"]) == (4.1, 6)
    assert compare_runs(read_runs([tmp_path])).text() == comparison.text()
    with pytest.raises(RecordError, match="a run is there already"):
        compare(train, ["bfloat16/word"], out=tmp_path)


@pytest.mark.parametrize(
    ("returned", "loss"), [(3.5, 3.5), (torch.tensor(2.5), 2.5), ({"val_loss": math.nan}, None)]
)
def test_what_a_loop_may_return(returned: Any, loss: float | None) -> None:
    comparison = compare(lambda recipe, seed, record: returned, ["anything at all"])
    assert comparison.rows[0]["val_loss"] == loss
    assert comparison.rows[0]["diverged"] is (loss is None)


LOOPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gave no validation loss for mine, but None": (None, {}),
    "gave no validation loss for mine, but 'abc'": ("abc", {}),
    "gave no validation loss for mine, but {": ({"val_loss": torch.ones(2)}, {}),
    "Cannot compare bfloat16/word with seeds = 1": (2.0, {"recipes": ["bf16/word", "bfloat16/word"]}),
    "Cannot compare mine with seeds = 0": (2.0, {"seeds": 0}),
    "Cannot compare no recipe": (2.0, {"recipes": []}),
}  # fmt: skip


@pytest.mark.parametrize("words", LOOPS)
def test_what_cannot_be_compared_is_refused_in_one_line(words: str) -> None:
    returned, options = LOOPS[words]
    with pytest.raises(NarrowgaugeError, match=words):
        compare(lambda recipe, seed, record: returned, **{"recipes": ["mine"], **options})


RECIPES = ("bfloat16/word", "bfloat16/naive")
NAMES = [f"bfloat16-{name}-seed{seed}" for seed in (0, 1) for name in ("word", "naive")]


@pytest.fixture(scope="module")
def base(place: Path) -> dict[str, Any]:
    """The settings that all runs share."""
    short = {"steps": 4, "eval_every": 2, "checkpoint_every": 1, "gauges_every": 0}
    table = settings(place, Path("nowhere"), **short).to_dict()
    for name in OF_A_RUN:
        table.pop(name, None)
    return table


def done(
    base: dict[str, Any],
    out: Path,
    recipes: Sequence[str] = RECIPES,
    seeds: int = 2,
    **changes: Any,
) -> str:
    """Compare or go on, and return the printed text."""
    stream = io.StringIO()
    compare_recipes(recipes, {**base, **changes}, seeds=seeds, out=out, stream=stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def first(
    base: dict[str, Any], one_thread: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A comparison, and the printed text; tests that change it take another."""
    out = tmp_path_factory.mktemp("first") / "out"
    return out, done(base, out)


def metrics_of(out: Path) -> list[Any]:
    """Everything but times of the first pair."""
    runs = [read_run(out / name) for name in NAMES[:2]]
    return [[lasting(row) for row in [*run.steps, *run.evals, run.summary or {}]] for run in runs]


def test_a_folder_holds_the_runs_the_rows_and_the_page_and_goes_on(
    first: tuple[Path, str], base: dict[str, Any]
) -> None:
    out, printed = first
    files = {"compare.json", "differences.svg", "plotly.min.js", "report.html"}
    assert {path.name for path in out.iterdir()} == {*files, *NAMES}
    rows = json.loads((out / "compare.json").read_text())
    assert {row["recipe"] for row in rows} == {*RECIPES}
    assert printed.count("\n") == 6 and "\x1b" not in printed and "\r" not in printed
    (out / ".DS_Store").touch()
    (out / NAMES[0] / ".notes.swp").touch()
    before = bytes_of(out)
    assert done(base, out).count("earlier") == 4
    assert bytes_of(out) == before
    with pytest.raises(RecordError, match=r"it is finished, and lr would change"):
        done(base, out, lr=1e-3)


def test_an_interrupted_comparison_goes_on_with_the_same_bits(
    first: tuple[Path, str], base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_train = loop.train

    def train(named: dict[str, Any], **more: Any) -> Path:
        if "naive" in named["out"]:
            true_train({**named, "stop_after": 3}, **more)
            raise Terminated
        return true_train(named, **more)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", train)
        with pytest.raises(Terminated, match=r"1 of 2 runs are done\. The same command goes on"):
            done(base, tmp_path, seeds=1)
    assert not (tmp_path / "compare.json").exists()
    assert len(read_run(tmp_path / NAMES[1]).steps) == 3
    assert done(base, tmp_path, seeds=1).count("earlier") == 1
    assert metrics_of(tmp_path) == metrics_of(first[0])


def test_recipes_and_seeds_may_be_added(base: dict[str, Any], tmp_path: Path) -> None:
    done(base, tmp_path, RECIPES[:1], 1, steps=1)
    assert done(base, tmp_path, steps=1).count("earlier") == 1
    done(base, tmp_path, RECIPES[1:], 1, steps=1)  # the page still has both recipes
    rows = json.loads((tmp_path / "compare.json").read_text())
    assert [row["num_seeds"] for row in rows] == [2, 2]


def test_a_run_that_diverges_is_a_result(base: dict[str, Any], tmp_path: Path) -> None:
    assert done(base, tmp_path, seeds=1, lr=1e38).count("validation loss nan") == 2
    rows = json.loads((tmp_path / "compare.json").read_text())
    assert [row["diverged"] for row in rows] == [True, True]
    assert done(base, tmp_path, seeds=1, lr=1e38).count("earlier") == 2


def test_an_error_before_the_first_run_leaves_nothing(base: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="64 positions"):
        done(base, tmp_path / "deep" / "out", sequence_length=65)
    assert not any(tmp_path.iterdir())
