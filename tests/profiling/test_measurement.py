"""Rounds have all that costs are made of; costs of recipes from made-up seconds, worked out by
hand.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from narrowgauge.profiling import measurement
from narrowgauge.profiling.measurement import Kind, Times, training_session
from narrowgauge.profiling.profile import cost_row
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Override
from narrowgauge.trainer.config import TrainConfig
from trainer.tiny_runs import SHAPE

KINDS = (
    ("q_proj", 32, 32, 2), ("k_proj", 16, 32, 2), ("v_proj", 16, 32, 2), ("o_proj", 32, 32, 2), ("gate_proj", 48, 32, 2),
    ("up_proj", 48, 32, 2), ("down_proj", 32, 48, 2), ("lm_head", 280, 32, 1),
)  # fmt: skip
"""The linear layers of each shape and place: name, features out and in, number."""


def test_rounds_have_all_that_costs_are_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        measurement, "training_session", lambda c: training_session(c, compile=False)
    )
    monkeypatch.setattr(measurement, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(measurement, "ROUNDS", 2)
    (tmp_path / "config.json").write_text(
        json.dumps({**SHAPE, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4})
    )
    names = ("int8-row/word", "float8-tensor/float32", "scalify/word")
    recipes = list(map(parse, names))
    config = TrainConfig(model=str(tmp_path), batch_size=1, sequence_length=16, lr=1e-3)
    lines: list[str] = []
    times = measurement.measure(recipes, config, lines.append)
    kinds = []
    for k in times.kinds:
        kinds.append((k.pattern.rpartition(".")[2], k.out_features, k.in_features, len(k.names)))
    assert tuple(kinds) == KINDS and times.kinds[0].names[1] == "model.layers.1.self_attn.q_proj"
    assert set(times.steps) == {parse("bfloat16/word"), parse("bfloat16/float32"), *recipes}
    assert set(times.layers) == {
        (recipe, kind.pattern) for recipe in times.steps for kind in times.kinds
    }
    for seconds in times.steps.values():
        assert len(seconds) == 2 and min(seconds) > 0
    for pairs in times.layers.values():
        assert len(pairs) == 2 and min(map(min, pairs)) > 0
    for recipe in recipes:
        assert cost_row(recipe, times)["step_ratio"] > 0
    assert lines[0].startswith("compiling a step and the layers in ")
    assert lines[-1] == "timing 2 rounds"


BASE = parse("bfloat16/word")
RECIPE = replace(parse("float8-row/word"), overrides=(Override("lm_head", COMPUTES["bfloat16"]),))
MADE_KINDS = (
    Kind("layers.*.q_proj", 8, 8, ("layers.0.q_proj", "layers.1.q_proj")),
    Kind("layers.*.fc", 16, 8, ("layers.0.fc", "layers.1.fc")),
    Kind("lm_head", 100, 8, ("lm_head",)),
)
WIDE = {kind.pattern: [(3.0, 9.0), (6.0, 18.0)] for kind in MADE_KINDS}
NARROW = {
    "layers.*.q_proj": [(2.0, 8.0), (4.0, 16.0)],
    "layers.*.fc": [(4.0, 12.0), (8.0, 24.0)],
    "lm_head": [(3.0, 9.0), (6.0, 18.0)],
}
LAYERS = {
    (of, name): seconds
    for of, table in ((BASE, WIDE), (RECIPE, NARROW))
    for name, seconds in table.items()
}


def test_ratios_are_the_baselines_seconds_over_the_recipes_in_each_round() -> None:
    """A second round on a machine of half the speed."""
    cost = cost_row(
        RECIPE, Times(MADE_KINDS, {BASE: [100.0, 200.0], RECIPE: [80.0, 160.0]}, LAYERS)
    )
    assert (cost["step_seconds"], cost["step_ratio"], cost["step_ratio_range"]) == (
        120.0,
        1.25,
        (1.25, 1.25),
    )
    q, fc, head = cost["layers"]
    assert (q["forward_seconds"], q["seconds"], q["baseline_seconds"], q["ratio"]) == (
        3.0,
        12.0,
        13.5,
        9 / 8,
    )
    assert (fc["ratio"], head["ratio"]) == (0.75, 1.0)
    assert [layer["compute"] for layer in (q, fc, head)] == ["float8-row", "float8-row", "bfloat16"]
