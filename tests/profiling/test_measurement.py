"""Rounds have a step of each recipe; costs of recipes from made-up seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrowgauge.profiling import measurement
from narrowgauge.profiling.measurement import training_session
from narrowgauge.profiling.profile import cost_row
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig
from trainer.tiny_runs import SHAPE


def test_rounds_time_recipes_and_their_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        measurement, "training_session", lambda c: training_session(c, compile=False)
    )
    monkeypatch.setattr(measurement, "ROUNDS", 2)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    recipes = list(map(parse, ("int8-row/word", "float8-tensor/float32", "scalify/word")))
    config = TrainConfig(model=str(tmp_path), batch_size=1, sequence_length=16, lr=1e-3)
    times = measurement.measure(recipes, config)
    assert set(times) == {parse("bfloat16/word"), parse("bfloat16/float32"), *recipes}
    for seconds in times.values():
        assert len(seconds) == 2 and min(seconds) > 0


def test_ratios_are_the_baselines_seconds_over_the_recipes_in_each_round() -> None:
    """A second round on a machine of half the speed."""
    recipe = parse("float8-row/word")
    cost = cost_row(recipe, {parse("bfloat16/word"): [100.0, 200.0], recipe: [80.0, 160.0]})
    assert (cost["step_seconds"], cost["step_ratio"]) == (120.0, 1.25)
    assert cost["step_ratio_range"] == (1.25, 1.25)
