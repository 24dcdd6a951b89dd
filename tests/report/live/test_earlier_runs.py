"""The band of earlier runs: of finished runs of the same comparison alone, as wide as they are apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.report.live.live_page import LivePage
from narrowgauge.runs.record import DEFINITION_FILE
from report.live.growing_runs import begin


def run(folder: Path, loss: float, *, seed: int = 0, finished: bool = True, steps: int = 20, **config: Any) -> Path:
    with begin(folder, seed=seed, steps=40, **config) as writer:
        for step in range(1, steps + 1):
            writer.step({"step": step, "loss": loss + 1 / step, "seconds": 0.5})
        for step in (5, steps):
            writer.eval({"step": step, "val_loss": loss})
        if finished:
            writer.summary({"val_loss": loss, "steps": steps})
    return folder


def figures(*paths: Path) -> dict[str, Any]:
    page = LivePage(paths)
    while page.poll() or not page.is_read:
        pass
    page.update()
    return {name[7:]: json.loads(text) for name, (_, text) in page._parts.items() if name.startswith("figure:")}


def bands(figure: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        trace["meta"].get("view", ""): trace
        for trace in figure["data"]
        if "group" not in trace["meta"] and trace.get("fill") == "toself"
    }


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """Two finished runs at 2 and 3, one that diverged, one that is under way, all of one comparison."""
    folder = tmp_path / "comparison"
    run(folder / "a", 2.0, lr=1e-3)
    run(folder / "b", 3.0, seed=1, lr=2e-3)
    run(folder / "c", float("nan"), seed=2)
    (folder / DEFINITION_FILE).write_text("")
    return folder


def test_a_run_is_drawn_over_the_range_of_the_finished_runs_of_its_comparison(comparison: Path) -> None:
    alone = run(comparison / "d", 2.5, seed=3, finished=False, steps=10)
    found = figures(alone)
    training = bands(found["training-loss"])
    assert set(training) == {"smoothed", "raw"}
    at_four = [y for x, y in zip(training["raw"]["x"], training["raw"]["y"], strict=True) if x == 4]
    assert at_four == [3.25, 2.25] and max(training["raw"]["x"]) == 20
    assert bands(found["validation-loss"])[""]["y"] == [3.0, 3.0, 2.0, 2.0]
    assert all("2 earlier runs" in found[name]["how"] for name in ("training-loss", "validation-loss"))
    # Below the line of the run itself, which is not part of it.
    groups = [trace["meta"].get("group") for trace in found["training-loss"]["data"]]
    assert groups[:2] == [None, None] and set(groups[2:]) == {0}


def test_a_page_of_the_whole_comparison_has_the_same_band(comparison: Path) -> None:
    alone = run(comparison / "d", 2.5, seed=3, finished=False, steps=10)
    raw = bands(figures(comparison)["training-loss"])["raw"]
    assert raw["y"] == bands(figures(alone)["training-loss"])["raw"]["y"]


def test_there_is_none_when_no_run_is_under_way_or_none_has_finished(comparison: Path, tmp_path: Path) -> None:
    assert not bands(figures(comparison)["training-loss"])
    alone = run(tmp_path / "else" / "d", 2.5, finished=False)
    assert not bands(figures(alone)["training-loss"]) and "Grey" not in figures(alone)["training-loss"]["how"]


def test_without_a_comparison_runs_belong_together_whose_settings_are_equal_but_for_seed_and_recipe(
    tmp_path: Path,
) -> None:
    run(tmp_path / "a", 2.0, recipe="bfloat16/master", out="a")
    run(tmp_path / "b", 9.0, lr=1.0)
    run(tmp_path / "c", 2.5, seed=1, finished=False, out="c")
    found = figures(tmp_path)["training-loss"]
    assert "1 earlier run " in found["how"]
    raw = bands(found)["raw"]
    assert max(raw["y"]) == 3.0 and min(raw["y"]) == pytest.approx(2.05)
