"""Rounds, memory and notes; no time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from narrowgauge.errors import ChipError
from narrowgauge.planner.time.roofline import Setting
from narrowgauge.profiling import measurement
from narrowgauge.profiling.costs import Round, cost_of
from narrowgauge.profiling.layer_plan import read_model, timed_settings
from narrowgauge.profiling.measurement import training_block, training_session, weight_bytes
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig

CPU = torch.device("cpu")
SHAPE = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def test_rounds_have_all_that_costs_are_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "training_session", lambda c: training_session(c, compile=False))
    monkeypatch.setattr(measurement, "training_block", lambda s, r: training_block(s, r, compile=False))
    monkeypatch.setattr(measurement, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(measurement, "train_step", lambda session: session.loss(session.batch()[0]))
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    _, kinds = read_model(str(tmp_path))
    recipes = [parse("int8-row/word"), parse("float8-row/word"), parse("float32/float32")]
    config = TrainConfig(model=str(tmp_path), batch_size=1, sequence_length=16, lr=1e-3)
    said: list[str] = []
    rounds = measurement.measure(kinds, recipes, config, rounds=2, say=said.append)
    assert len(rounds) == 2
    for r in rounds:
        assert {base.name for base in r.steps} == {"bfloat16/word", "bfloat16/float32", "float32/float32"}
        assert {recipe.name for recipe in r.blocks} == {"bfloat16/word", "int8-row/word", "float8-row/word"}
        assert set(r.table) == set(timed_settings(kinds, recipes))
        assert all(seconds > 0 for seconds in (*r.steps.values(), *r.blocks.values()))
    for recipe in recipes:
        cost = cost_of(recipe, kinds, rounds, 16, {setting: 0.0 for _, setting in rounds[0].table})
        assert cost.step_ratio > 0 and cost.linears_ratio > 0
    assert said[0] == "compiling a step in bfloat16/word" and said[-1] == "timing 2 rounds"


def test_bytes_of_weight_casts() -> None:
    def of(row: str) -> float:
        return weight_bytes(Setting(row), CPU)

    assert of("bfloat16") == 0
    assert of("int8-row") == 1, "one cast serves both"
    assert of("float8-tensor") == 2, "one cast, of bfloat16 values"
    assert of("mxfp8") == 4, "two casts, of bfloat16 values"


@pytest.mark.usefixtures("native_formats")
def test_emulation_is_described() -> None:
    assert (
        measurement.describe_support(COMPUTES["int8-row"], CPU)
        == measurement.describe_support(COMPUTES["bfloat16"], CPU)
        == "native"
    )
    assert measurement.describe_support(COMPUTES["mxfp8"], CPU).startswith("emulated: this ")
    assert "does not multiply float8_e4m3fn" in measurement.describe_support(COMPUTES["mxfp8"], CPU)


def test_noisy_timings_are_noted() -> None:
    base = parse("bfloat16/word")
    assert measurement.noise_notes([Round({base: 1.0}, {}), Round({base: 1.1}, {})]) == []
    [note] = measurement.noise_notes([Round({base: 1.0}, {}), Round({base: 1.9}, {})])
    assert "1.9 ×" in note


def test_a_model_that_does_not_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "free_bytes", lambda: 8 << 30)
    config = TrainConfig(model="llama-1b", batch_size=8, sequence_length=256)
    with pytest.raises(ChipError, match=r"llama-1b .* takes about \d+ GiB, and .* has 8 GiB free. Predict .* --chip"):
        measurement.require_memory(MODELS["llama-1b"], [parse("int8-row/word")], config)
    small = TrainConfig(model="llama-8m", batch_size=8, sequence_length=256)
    measurement.require_memory(MODELS["llama-8m"], [parse("int8-row/word")], small)


def test_free_memory_is_something() -> None:
    assert 1 << 20 < measurement.free_bytes() < 1 << 50
