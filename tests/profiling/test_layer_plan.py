"""The linear layers of a model: a preset's row says the same as the model itself, and layers that share an input form a group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from narrowgauge.errors import DataError, RecipeError
from narrowgauge.planner.time.roofline import Shape
from narrowgauge.profiling.layer_plan import Kind, groups_of, kinds_of_module, kinds_of_preset, read_model
from narrowgauge.spec.models import MODELS, Model
from narrowgauge.trainer import language_model

LLAMA = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama-1m", "llama-8b", "gpt2-124m"])
def test_a_presets_row_says_what_the_model_is_made_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = MODELS[name]
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(language_model._preset_config(row, None))
    assert kinds_of_preset(row) == kinds_of_module(model)


@pytest.mark.parametrize("row", MODELS.values(), ids=lambda row: row.name)
def test_with_embeddings_and_norms_the_kinds_are_all_parameters(row: Model) -> None:
    kinds = kinds_of_preset(row)
    weights = sum(kind.count * kind.shape.num_weights for kind in kinds[:-1])
    head = kinds[-1].shape.num_weights
    embeddings = head if row.tie_embeddings else 2 * head
    small = row.num_parameters - weights - embeddings
    if row.family == "gpt2":
        small -= row.max_positions * row.hidden_size
    assert 0 < small < 20 * (row.num_layers + 1) * row.hidden_size


def test_a_folder_is_read_like_a_preset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    row, kinds = read_model(str(tmp_path))
    assert kinds == kinds_of_preset(row)
    assert [str(kind.shape) for kind in kinds[:4]] == ["32 × 32", "16 × 32", "16 × 32", "32 × 32"]
    assert row.num_parameters == language_model.num_parameters(language_model.build(str(tmp_path), seed=0))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Did you mean 'llama-8m'"):
        read_model("lama-8m")
    with pytest.raises(DataError, match="cannot read a causal language model"):
        read_model(str(tmp_path))


def test_groups_are_of_one_parent() -> None:
    names = ["a.q_proj", "a.k_proj", "b.q_proj", "a.o_proj", "a.v_proj"]
    kinds = [Kind(name, Shape(4, 4), 1) for name in names]
    found = [[kind.pattern for kind in group] for group in groups_of(kinds)]
    assert found == [["a.q_proj", "a.k_proj", "a.v_proj"], ["b.q_proj"], ["a.o_proj"]]
