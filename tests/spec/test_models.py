"""The preset models: parameter counts against the Hugging Face classes, names and sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from narrowgauge.errors import DataError, RecipeError
from narrowgauge.spec.models import (
    MODELS,
    Model,
    get_model,
    weights_file,
)


def count_parameters(model: Model) -> int:
    """Parameters of the real model, built without memory."""
    gpt2 = {"n_positions": model.max_positions, "n_embd": model.hidden_size, "n_inner": model.intermediate_size,
            "n_layer": model.num_layers, "n_head": model.num_heads}  # fmt: skip
    llama = {"max_position_embeddings": model.max_positions, "hidden_size": model.hidden_size,
             "intermediate_size": model.intermediate_size, "num_hidden_layers": model.num_layers,
             "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads}  # fmt: skip
    shared = {"vocab_size": model.vocab_size, "tie_word_embeddings": model.tie_embeddings}
    with torch.device("meta"):
        if model.family == "gpt2":
            return GPT2LMHeadModel(GPT2Config(**gpt2, **shared)).num_parameters()
        return LlamaForCausalLM(LlamaConfig(**llama, **shared)).num_parameters()


@pytest.mark.parametrize(
    "name", [name for name in MODELS if name not in ("llama-13b", "llama-70b")]
)
def test_parameter_counts_against_transformers(name: str) -> None:
    assert MODELS[name].num_parameters == count_parameters(MODELS[name])


def test_published_parameter_counts() -> None:
    published = {
        "llama-1b": 1_235_814_400,
        "llama-7b": 6_738_415_616,
        "llama-8b": 8_030_261_248,
        "llama-13b": 13_015_864_320,
        "llama-70b": 70_553_706_496,
        "gpt2-124m": 124_439_808,
    }
    assert {name: MODELS[name].num_parameters for name in published} == published


def test_names() -> None:
    assert get_model("Llama-8M") is MODELS["llama-8m"]
    with pytest.raises(RecipeError, match="Did you mean 'llama-125m'"):
        get_model("llama-120m")


def test_weights_that_cannot_be_read_are_no_random_start(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(DataError, match=r"Cannot read the weights model\.gguf"):
        weights_file(tmp_path)
