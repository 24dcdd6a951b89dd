"""Rounds have all that costs are made of; no time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrowgauge.profiling import measurement
from narrowgauge.profiling.layers import timed_recipes
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
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    names = ("int8-row/word", "float8-delayed/float32", "scalify/word")
    recipes = list(map(parse, names))
    config = TrainConfig(model=str(tmp_path), batch_size=1, sequence_length=16, lr=1e-3)
    lines: list[str] = []
    kinds, rounds = measurement.measure(recipes, config, rounds=2, say=lines.append)
    assert len(rounds) == 2
    for r in rounds:
        assert {recipe.name for recipe in r.steps} >= {"bfloat16/word", *(recipe.name for recipe in recipes)}
        assert set(r.layers) == {(recipe, kind.pattern) for recipe in timed_recipes(recipes) for kind in kinds}
        assert all(forward > 0 and both > 0 for forward, both in r.layers.values())
        assert all(seconds > 0 for seconds in r.steps.values())
    for recipe in recipes:
        cost = cost_row(recipe, kinds, rounds)
        assert cost["step_ratio"] > 0 and cost["linears_ratio"] > 0
    assert lines[0].startswith("compiling a step and the layers in ") and lines[-1] == "timing 2 rounds"
