"""Parameter counts against Hugging Face's classes on the meta device, and published counts; operations against sums by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from narrowgauge.errors import DataError, RecipeError
from narrowgauge.planner.architectures import of_size
from narrowgauge.planner.model_configs import FAMILIES, architecture_of, read_architecture
from narrowgauge.planner.presets import PRESETS
from narrowgauge.spec.models import MODELS

_TINY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 32},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 8,
        "v_head_dim": 28,
        "attention_bias": True,
    },
    "gemma2": {"head_dim": 48},
    "gemma": {"head_dim": 48},
    "qwen3": {"head_dim": 48},
    "starcoder2": {"use_bias": True},
}
_TINY["deepseek_v2"] = {**_TINY["deepseek_v3"], "q_lora_rank": None, "attention_bias": False}


def _counted(config: dict[str, Any]) -> int:
    """Parameters of Hugging Face's class, without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in model.parameters())


def _tiny(family: str) -> dict[str, Any]:
    sizes = {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    tiny = {**sizes, "intermediate_size": 160, "vocab_size": 500, "pad_token_id": 0, "tie_word_embeddings": False}
    if family == "gpt2":
        tiny = {"n_layer": 3, "n_embd": 96, "n_head": 6, "n_positions": 70, "vocab_size": 500}
    if family == "mpt":
        tiny = {"n_layers": 3, "d_model": 96, "n_heads": 6, "vocab_size": 500, "max_seq_len": 70}
    if family == "gpt_neox":
        del tiny["num_key_value_heads"]
    return {"model_type": family, **tiny, **_TINY.get(family, {})}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_parameters_of_its_class(family: str) -> None:
    config = _tiny(family)
    assert architecture_of(config, family).num_parameters == _counted(config)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "olmo2", "starcoder2", "gpt_neox"])
def test_tied_heads_and_stated_biases(family: str) -> None:
    config = {**_tiny(family), "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "use_bias": False}
    assert architecture_of(config, family).num_parameters == _counted(config)


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("mpt")])
def test_presets_have_the_parameters_of_their_class(name: str) -> None:
    assert read_architecture(name).num_parameters == _counted(PRESETS[name][0])


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-70b", 70.55e9, 70.55e9),  # elements of the checkpoint
        ("mixtral-8x7b", 46.7e9, 12.9e9),  # mistral.ai/news/mixtral-of-experts
        ("mixtral-8x22b", 141e9, 39e9),  # mistral.ai/news/mixtral-8x22b
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),  # model cards
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("deepseek-v3", 671e9, 36.6e9 + 0.93e9),  # README_WEIGHTS.md; its active count leaves the input embedding out
        ("mpt-125m", 125_311_488, 125_311_488),  # llm-foundry, scripts/train/benchmarking
        ("mpt-70b", 64_862_437_376, 64_862_437_376),
        ("megatron-1t", 1008e9, 1008e9),  # arXiv 2205.05198, table 3
    ],
)
def test_published_counts(name: str, total: float, active: float) -> None:
    found = read_architecture(name)
    assert found.num_parameters == pytest.approx(total, rel=0.006)
    assert found.num_active_parameters == pytest.approx(active, rel=0.02)


def test_models_of_the_trainer_are_counted_alike() -> None:
    for model in MODELS.values():
        assert read_architecture(model.name).num_parameters == model.num_parameters


def test_the_largest_layer_is_that_of_the_class() -> None:
    config = _tiny("deepseek_v3")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    found = architecture_of(config, "tiny")
    assert (found.dense_layer_parameters, found.mixture_layer_parameters) == (layers[0], layers[-1])
    assert found.layer_parameters == max(layers)


def test_operations_are_those_that_pytorch_counts() -> None:
    """FlopCounterMode counts every matmul of forward and backward; the attention without mask, which is not causal."""
    from torch.utils.flop_counter import FlopCounterMode

    config = {**_tiny("llama"), "attn_implementation": "eager"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            # The first layer's input needs a gradient, as everything after it.
            model(input_ids=tokens).logits.sum().backward()
    found = architecture_of(config, "tiny").flops_per_token(64, is_causal=False)
    # What remains is the rotary table: an outer product of positions and frequencies.
    assert counter.get_total_flops() / 128 == pytest.approx(found, rel=1e-3)


def test_causal_attention_is_half_and_windows_are_counted() -> None:
    whole = read_architecture("llama-8b")
    assert whole.attention_flops(4096) * 2 == whole.attention_flops(4096, is_causal=False) == 12 * 32 * 4096 * 4096
    config = {**_tiny("mistral"), "sliding_window": 16}
    near = architecture_of(config, "near")
    keys = [min(position + 1, 16) for position in range(64)]
    assert near.mean_keys(64) == pytest.approx(sum(keys) / 64, rel=0.04)  # the formula leaves out the diagonal's half
    assert near.mean_keys(8) == 4
    half = architecture_of({**_tiny("gemma2"), "sliding_window": 16}, "half")
    assert half.mean_keys(64) == pytest.approx((near.mean_keys(64) + 32) / 2)


def test_of_size_has_no_shape() -> None:
    found = of_size(10e9)
    assert (found.num_parameters, found.has_shape, found.matmuls, found.flops_per_token(8)) == (10**10, False, (), 6e10)


def test_files_and_folders_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_tiny("qwen2")))
    folder, file = (read_architecture(str(path)) for path in (tmp_path, tmp_path / "config.json"))
    assert folder.num_parameters == file.num_parameters == _counted(_tiny("qwen2"))
    assert (folder.name, folder.source) == (str(tmp_path), str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": None}, "no model_type"),
        ({"hidden_size": -3}, "hidden_size = -3"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide'"),
        ({"hidden_size": 97}, "6 heads do not divide"),
        ({"num_key_value_heads": 4}, "4 key-value heads do not divide"),
        ({"vocab_size": None}, "does not say vocab_size"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "3 of 2 experts"),
    ],
)
def test_contradictions_cost_one_line(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**_tiny("llama"), **change}))
    with pytest.raises(DataError, match=says) as caught:
        read_architecture(str(file))
    assert "\n" not in str(caught.value) and caught.value.advice


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Did you mean 'llama-70b'"):
        read_architecture("llama-70")
    for text in ("[1]", "{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(DataError, match=r"cannot be read|holds list"):
            read_architecture(str(tmp_path))
