"""Rounds have all that costs are made of; no time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrowgauge.profiling import measurement
from narrowgauge.profiling.measurement import training_session
from narrowgauge.profiling.profile import cost_row
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig

SHAPE = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def test_rounds_have_all_that_costs_are_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "training_session", lambda c: training_session(c, compile=False))
    monkeypatch.setattr(measurement, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(measurement, "ROUNDS", 2)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    names = ("int8-row/word", "float8-delayed/float32", "scalify/word")
    recipes = list(map(parse, names))
    config = TrainConfig(model=str(tmp_path), batch_size=1, sequence_length=16, lr=1e-3)
    lines: list[str] = []
    times = measurement.measure(recipes, config, lines.append)
    assert set(times.steps) == {parse("bfloat16/word"), parse("bfloat16/float32"), *recipes}
    assert set(times.layers) == {(recipe, kind.pattern) for recipe in times.steps for kind in times.kinds}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.steps.values())
    assert all(len(pairs) == 2 and min(map(min, pairs)) > 0 for pairs in times.layers.values())
    for recipe in recipes:
        assert cost_row(recipe, times)["step_ratio"] > 0
    assert lines[0].startswith("compiling a step and the layers in ") and lines[-1] == "timing 2 rounds"
