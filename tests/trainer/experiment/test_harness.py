"""A comparison in your own training loop."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import narrowgauge as ng
from analysis.comparison.made_runs import SIZES
from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.gauges.recording import step_row
from narrowgauge.report.publishing import read_runs
from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer.experiment.harness import RunLog, compare
from narrowgauge.trainer.experiment.planned_runs import hold


def trained(recipe: str, seed: int, log: RunLog) -> dict[str, float]:
    for step in range(1, 11):
        log.step({"loss": 5.0 - step / 10, "tokens": 100 * step})
        if step % 5 == 0:
            log.eval({"val_loss": 4.5 - step / 10})
    return {"val_loss": 4.0 + seed / 10, "bytes_per_param": SIZES[recipe]}


def test_your_own_training_loop_is_compared_in_order_and_kept(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []

    def train(recipe: str, seed: int, log: RunLog) -> dict[str, float]:
        calls.append((recipe, seed))
        return trained(recipe, seed, log)

    found = compare(train, ["bfloat16/master", "bfloat16/word"], seeds=2, out=tmp_path / "out")
    assert calls == [(recipe, seed) for seed in (0, 1) for recipe in ("bfloat16/master", "bfloat16/word")]
    assert found.verdict[0].startswith("bfloat16/word is the cheapest") and found.rows[0]["tokens_per_second"] > 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "compare.json", "report.html", "bfloat16-master-seed0", "bfloat16-master-seed1", "bfloat16-word-seed0",
        "bfloat16-word-seed1",
    }  # fmt: skip
    run = read_run(tmp_path / "out" / "bfloat16-word-seed1")
    assert [row["step"] for row in run.steps] == list(range(1, 11)) and [row["step"] for row in run.evals] == [5, 10]
    assert all(row["seconds"] >= 0 for row in (*run.steps, *run.evals))
    assert run.summary is not None and run.summary["val_loss"] == 4.1 and run.summary["steps"] == 10
    assert compare_runs(read_runs([tmp_path / "out"])).rows == found.rows
    with pytest.raises(RecordError, match="is not empty"):
        compare(train, ["bfloat16/word"], out=tmp_path / "out")


@pytest.mark.parametrize(
    ("returned", "loss"), [(3.5, 3.5), (None, 2.5), ({"bytes_per_param": 8.0}, 2.5), ({"val_loss": math.nan}, None)]
)
def test_what_a_loop_may_return(returned: Any, loss: float | None) -> None:
    def train(recipe: str, seed: int, log: RunLog) -> Any:
        log.eval({"val_loss": 2.5})
        return returned

    found = compare(train, ["anything at all"])
    assert found.rows[0]["val_loss"] == loss and found.rows[0]["diverged"] is (loss is None)


def test_contradictory_requests_are_refused() -> None:
    with pytest.raises(NarrowgaugeError, match="gave no validation loss for mine"):
        compare(lambda recipe, seed, log: None, ["mine"])
    with pytest.raises(NarrowgaugeError, match="no recipe was named"):
        compare(trained, [])
    with pytest.raises(NarrowgaugeError, match=r"two of the recipes are identical, bfloat16/word\. Name each once\."):
        compare(trained, ["bf16/word", "bfloat16/word"])
    with pytest.raises(NarrowgaugeError, match="seeds = 0"):
        compare(trained, ["bfloat16/word"], seeds=0)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda log: "abc", "val_loss = 'abc', which is no number"),
        (lambda log: {"val_loss": [1.0]}, r"val_loss = \[1.0\], which is no number"),
        (lambda log: log.step(2.5), "log.step was given 2.5"),
        (lambda log: log.step({"loss": "low"}), "log.step gave loss = 'low'"),
        (lambda log: log.step({"step": 0.5}), "step = 0.5"),
        (lambda log: log.eval([("val_loss", 1.0)]), "log.eval was given"),
        (lambda log: log.eval({"val_loss": object()}), "which is no number"),
    ],
)
def test_a_value_that_is_no_number_is_refused_in_one_line(act: Any, says: str) -> None:
    with pytest.raises(NarrowgaugeError, match=says):
        compare(lambda recipe, seed, log: act(log), ["mine"])


def test_tensors_of_one_number_are_numbers_and_a_missing_metric_may_be_none() -> None:
    class Tensor:
        def __float__(self) -> float:
            return 2.5

    def train(recipe: str, seed: int, log: RunLog) -> Any:
        log.step({"loss": Tensor(), "tokens": None, "grad_norm": None})
        log.eval({"val_loss": Tensor()})

    assert compare(train, ["mine"]).rows[0]["val_loss"] == 2.5


def test_losses_alone_give_a_verdict_without_bytes_and_flags() -> None:
    found = compare(lambda recipe, seed, log: 4.0 + seed / 10, ["mine", "yours"], seeds=2)
    assert found.verdict == (
        "No record holds the bytes per parameter of these recipes, so none is named the cheapest.",
        "Within the noise of mine: yours (0.0000\u00a0±\u00a00.0000).",
        "No step was audited, so lost updates would not be seen.",
    )
    alone = compare(lambda recipe, seed, log: 4.0, ["mine", "yours"])
    assert len(alone.verdict) == 2 and alone.verdict[0].startswith("One seed each")


def test_a_function_that_raises_loses_nothing_that_was_done(tmp_path: Path) -> None:
    def train(recipe: str, seed: int, log: RunLog) -> float:
        log.step({"loss": 3.0})
        if (recipe, seed) == ("yours", 1):
            raise KeyError("a mistake")
        return 2.5 + seed

    with pytest.raises(KeyError, match="a mistake") as caught:
        compare(train, ["mine", "yours"], seeds=2, out=tmp_path / "out")
    rows = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [(row["recipe"], row["num_seeds"]) for row in rows] == [("mine", 2), ("yours", 1)]
    assert "Not finished" in (tmp_path / "out" / "report.html").read_text()
    if sys.version_info >= (3, 11):
        place = tmp_path / "out" / "report.html"
        assert caught.value.__notes__ == [f"3 of 4 runs were done before that; {place} shows them."]
    with pytest.raises(RecordError, match="is not empty") as refused:
        compare(train, ["mine", "yours"], seeds=2, out=tmp_path / "out")
    assert "--" not in str(refused.value)


def test_an_error_is_not_hidden_by_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    def train(recipe: str, seed: int, log: RunLog) -> float:
        # The page cannot be written.
        (tmp_path / "out" / "report.html").mkdir()
        raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake") as caught:
        compare(train, ["mine"], out=tmp_path / "out")
    assert not hasattr(caught.value, "__notes__")


def test_two_processes_do_not_compare_in_one_folder(tmp_path: Path) -> None:
    def train(recipe: str, seed: int, log: RunLog) -> float:
        with pytest.raises(RecordError, match="another process is doing that"), hold(tmp_path / "out"):
            pass
        return 1.0

    assert compare(train, ["mine"], out=tmp_path / "out").rows[0]["val_loss"] == 1.0


def test_a_step_does_not_last_as_long_as_the_validation_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    def train(recipe: str, seed: int, log: RunLog) -> None:
        for _ in range(2):
            wait(1.0)
            log.step({"loss": 3.0})
            wait(10.0)
            log.eval({"val_loss": 2.5})
        read.append(read_run(log._record.reporter.folder))

    read: list[Run] = []
    clock = SimpleNamespace(perf_counter=lambda: now, process_time=lambda: now / 2)
    monkeypatch.setattr(step_row, "time", clock)
    compare(train, ["mine"])
    assert [(row["seconds"], row["cpu_seconds"]) for row in read[0].steps] == [(1.0, 0.5), (1.0, 0.5)]
    assert [row["seconds"] for row in read[0].evals] == [1.0, 2.0]


# ── watched ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def watched(recipe: str, seed: int, log: RunLog) -> float:
    torch.manual_seed(seed)
    model, optimizer = ng.prepare(torch.nn.Linear(16, 16), recipe, lr=1e-4, audit_every=2)
    log.watch(model, optimizer, every=3)
    for _ in range(6):
        loss = model(torch.randn(8, 16).bfloat16()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step({"loss": loss.item()})
    return loss.item()


def test_one_call_adds_gauges_and_the_audit_to_a_runs_record(tmp_path: Path) -> None:
    found = compare(watched, ["bfloat16/word", "bfloat16/naive"], out=tmp_path)
    word, naive = (read_run(tmp_path / f"bfloat16-{name}-seed0") for name in ("word", "naive"))
    for run, is_lossless in ((word, True), (naive, False)):
        assert [row["step"] for row in run.gauges] == [3, 6]
        assert "weight:weight" in run.gauges[0]["tensors"]
        # Each audit stands in the row of its own step, and in no other.
        assert [row["step"] for row in run.steps if "edq" in row] == [2, 4, 6]
        assert run.summary is not None
        assert (run.summary["edq"] > 0.9) == is_lossless and (run.summary["lost_fraction"] < 0.1) == is_lossless
    assert [row["bytes_per_param"] for row in found.rows] == pytest.approx([8.5, 8.0], abs=0.2)


def test_metrics_that_the_function_gives_are_kept(tmp_path: Path) -> None:
    def train(recipe: str, seed: int, log: RunLog) -> dict[str, float]:
        log.watch(model := torch.nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.1), every=0)
        log.step({"loss": 1.0, "edq": 0.25})
        return {"val_loss": watched(recipe, seed, log), "edq": 0.5, "bytes_per_param": 99.0}

    compare(train, ["bfloat16/word"], out=tmp_path)
    run = read_run(tmp_path / "bfloat16-word-seed0")
    assert run.summary is not None and (run.summary["edq"], run.summary["bytes_per_param"]) == (0.5, 99.0)
    assert run.steps[0]["edq"] == 0.25


def test_gauges_are_detached_however_a_run_ends(tmp_path: Path) -> None:
    model, kept = torch.nn.Linear(4, 4), []

    def train(recipe: str, seed: int, log: RunLog) -> float:
        kept.append(log.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1))
        if recipe == "broken":
            raise ValueError("mine")
        return 1.0

    # The second run could not watch the same model if the first one still did.
    with pytest.raises(ValueError, match="mine"):
        compare(train, ["fine", "broken"])
    kept.append(ng.attach_gauges(model))
    assert len(kept) == 3 and not any(gauges.sampling for gauges in kept)
