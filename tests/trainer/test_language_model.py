"""Models are a function of shape and seed, weights of a folder are kept, and what cannot be read is
refused.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from narrowgauge.trainer.language_model import build
from tensors import random_tokens
from text.refusals import refused

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "attention_dropout": 0.5,
}  # fmt: skip
TOKENS = random_tokens(3, 17, 96)


def small(**changes: object) -> PreTrainedModel:
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "attention_dropout": 0.0, **changes}))
    return model.to(torch.bfloat16)


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama", "dtype": "bfloat16", **SMALL, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_weights_are_a_function_of_the_seed_alone():
    first = build("llama-1m", vocab_size=300, seed=5).state_dict()
    torch.rand(7)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        second = build("llama-1m", vocab_size=300, seed=5).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = build("llama-1m", vocab_size=300, seed=6).state_dict()
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_folder_with_a_config_alone_is_drawn_from_the_seed(tmp_path):
    folder = write_config(tmp_path / "shape")
    from_folder = build(str(folder), seed=1)
    assert from_folder.lm_head.weight.dtype == torch.float32
    config = from_folder.config
    assert config.attention_dropout == 0 and config.rms_norm_eps == 1e-6
    assert build(str(folder), vocab_size=50, seed=1).lm_head.weight.shape == (50, 32)


@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_folder_with_weights_keeps_them_in_float32(is_pickled, tmp_path):
    saved = small()
    saved.save_pretrained(tmp_path)
    if is_pickled:
        (tmp_path / "model.safetensors").unlink()
        torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    model = build(str(tmp_path), vocab_size=96, seed=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.float()), name
    with refused("too few embeddings"):
        build(str(tmp_path), vocab_size=97, seed=0)


@pytest.mark.parametrize(
    "config",
    [
        "{damaged",
        '{"model_type": "unknown"}',
        '{"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}',
        '{"model_type": "t5", "auto_map": {"AutoModelForCausalLM": "code.Model"}}',
    ],
)
def test_what_transformers_cannot_read_is_one_line_and_no_code_runs(config, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever is asked agrees
    (tmp_path / "code.py").write_text("raise SystemExit('this code ran')")
    (tmp_path / "config.json").write_text(config)
    with refused("a model that cannot be read"):
        build(str(tmp_path), seed=0)


def test_a_model_that_sees_its_targets_is_refused(tmp_path):
    folder = write_config(tmp_path, model_type="bert", num_key_value_heads=2, attention_dropout=0.0)
    with refused("a model that sees its targets"):
        build(str(folder), seed=0)


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors.index.json"])
def test_weights_that_cannot_be_read_are_no_random_start(name, tmp_path):
    (write_config(tmp_path) / name).touch()
    with refused("a model that cannot be read"):
        build(str(tmp_path), seed=0)
