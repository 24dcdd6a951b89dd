"""Parameter counts against Hugging Face's classes on the meta device, and published counts; operations against sums by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from narrowgauge.errors import DataError, RecipeError
from narrowgauge.planner.inputs.architectures import of_size
from narrowgauge.planner.inputs.model_configs import PRESETS, architecture_of, read_architecture
from narrowgauge.planner.inputs.model_families import FAMILIES, UNPLANNED
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
    "gemma3_text": {"head_dim": 48, "layer_types": None},
    "vaultgemma": {"head_dim": 48},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_local_experts": 6,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 224,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
        "head_dim": 16,
        "moe_layers": None,
    },
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 56},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "use_qk_norm": True,
        "head_dim": 16,
        "attention_bias": True,
    },
    "dots1": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
    },
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 72,
        "mlp_only_layers": [1],
    },
    "ernie4_5": {"head_dim": 32, "use_bias": True},
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 48,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "use_bias": False,
    },
    "hunyuan_v1_dense": {"head_dim": 32},
    "exaone4": {"sliding_window": 16, "sliding_window_pattern": 4},
    "nemotron": {"head_dim": 16, "mlp_bias": True},
    "seed_oss": {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True},
    "helium": {"head_dim": 16},
    "arcee": {"head_dim": 16},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32},
    "ministral": {"head_dim": 16},
    "ministral3": {"head_dim": 16},
    "cwm": {"head_dim": 16},
    "phimoe": {"num_local_experts": 6, "num_experts_per_tok": 2, "lm_head_bias": True, "attention_bias": True},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"head_dim": 16},
    "stablelm": {"use_qkv_bias": True, "use_parallel_residual": True},
    "youtu": {
        "q_lora_rank": 24,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 8,
        "v_head_dim": 28,
        "head_dim": 8,
        "num_key_value_heads": 6,
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 96, "max_position_embeddings": 70},
    "gpt_neo": {
        "num_layers": 4,
        "num_heads": 6,
        "max_position_embeddings": 70,
        "window_size": 16,
        "attention_types": [[["global", "local"], 2]],
    },
    "bloom": {"n_layer": 3, "n_head": 6},
}
_OUTSIDE = ("model.vision_tower", "model.multi_modal_projector")
_NESTED = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
_GPTS = ("gpt2", "gptj", "codegen", "gpt_bigcode")
_TINY["deepseek_v2"] = {**_TINY["deepseek_v3"], "q_lora_rank": None, "attention_bias": False}


def _counted(config: dict[str, Any]) -> int:
    """Parameters of Hugging Face's class, without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    named = model.named_parameters()
    return sum(value.numel() for name, value in named if not name.startswith(_OUTSIDE))


def _tiny(family: str) -> dict[str, Any]:
    if family in _NESTED:
        text = {key: value for key, value in _tiny(_NESTED[family]).items() if key != "model_type"}
        return {"model_type": family, "text_config": text, "tie_word_embeddings": False}
    sizes = {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    tiny = {**sizes, "intermediate_size": 160, "vocab_size": 500, "pad_token_id": 0, "tie_word_embeddings": False}
    if family in _GPTS:
        tiny = {"n_layer": 3, "n_embd": 96, "n_head": 6, "n_positions": 70, "vocab_size": 500, "rotary_dim": 8}
    if family == "mpt":
        tiny = {"n_layers": 3, "d_model": 96, "n_heads": 6, "vocab_size": 500, "max_seq_len": 70}
    if family in ("gpt_neox", "falcon", "opt", "persimmon", "bloom", "gpt_neo"):
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


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("falcon", {"new_decoder_architecture": False, "multi_query": True, "bias": False}),
        ("falcon", {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "alibi": True}),
        ("gpt_bigcode", {"multi_query": False}),
        ("persimmon", {"qk_layernorm": False}),
        ("cohere", {"use_qk_norm": False, "attention_bias": True}),
        ("stablelm", {"use_parallel_residual": False}),
        ("glm4_moe", {"use_qk_norm": False}),
        ("llama4_text", {"interleave_moe_layer_step": 1}),
        ("granitemoeshared", {"shared_intermediate_size": 0}),
    ],
)
def test_what_a_configuration_changes(family: str, change: dict[str, Any]) -> None:
    config = {**_tiny(family), **change}
    assert architecture_of(config, family).num_parameters == _counted(config)


@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if row.defaults])
def test_sizes_that_files_leave_out_are_those_of_the_class(family: str) -> None:
    """Nested configurations are written without what equals their class: gemma-3-4b-it does not say its vocabulary."""
    own = AutoConfig.for_model(family).get_text_config().to_dict()
    defaults = FAMILIES[family].defaults
    assert {name: own[name] for name in defaults if name in own} == defaults
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    config = {"model_type": family, FAMILIES[family].text or "unused": text, **({} if FAMILIES[family].text else text)}
    found = architecture_of(config, family)
    assert (found.hidden_size, found.vocab_size) == (2560, defaults["vocab_size"])
    assert bool(found.left_out) == bool(FAMILIES[family].text)


def test_every_second_or_fourth_layer_attends_to_all() -> None:
    shares = {"gemma2": 1 / 2, "gemma3_text": 5 / 6, "olmo3": 3 / 4, "cohere2": 3 / 4, "mistral": 1, "gpt_neo": 1 / 2}
    for family, share in shares.items():
        layers = {"num_hidden_layers": 12, "num_layers": 12, "layer_types": None, "sliding_window": 16}
        found = architecture_of({**_tiny(family), **layers}, family)
        assert (found.window, found.window_share) == (16, pytest.approx(share)), family
    assert architecture_of({**_tiny("qwen3"), "sliding_window": 16}, "qwen3").window is None


def test_families_without_formulas_are_refused_by_name() -> None:
    assert not set(UNPLANNED) & set(FAMILIES)
    for family, why in UNPLANNED.items():
        with pytest.raises(DataError, match=family) as caught:
            architecture_of({**_tiny("llama"), "model_type": family}, "it")
        assert why in str(caught.value) and "--params" in caught.value.advice
    with pytest.raises(DataError, match="do_layer_norm_before = False"):
        architecture_of({**_tiny("opt"), "do_layer_norm_before": False}, "opt-350m")
    with pytest.raises(DataError) as caught:
        architecture_of({**_tiny("llama"), "model_type": "gemma33"}, "it")
    assert "Did you mean 'gemma3'" in caught.value.advice


@pytest.mark.parametrize(
    ("config", "total"),
    [
        # Counts of the checkpoints, as their model cards and papers say them.
        ({"model_type": "bloom", "hidden_size": 14_336, "n_layer": 70, "n_head": 112, "vocab_size": 250_880}, 176_247_271_424),
        (
            {"model_type": "opt", "hidden_size": 12_288, "num_hidden_layers": 96, "num_attention_heads": 96, "ffn_dim": 49_152,
             "vocab_size": 50_272, "max_position_embeddings": 2048, "word_embed_proj_dim": 12_288}, 175e9,
        ),
        (
            {"model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
             "intermediate_size": 24_576, "vocab_size": 50_432}, 20_554_567_680,
        ),
        (
            {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
             "vocab_size": 65_024}, 6_921_720_704,
        ),
        (
            {"model_type": "smollm3", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
             "num_key_value_heads": 4, "intermediate_size": 11_008, "vocab_size": 128_256}, 3_075_098_624,
        ),
    ],
)  # fmt: skip
def test_counts_of_published_checkpoints(config: dict[str, Any], total: float) -> None:
    assert architecture_of(config, "it").num_parameters == pytest.approx(total, rel=3e-3 if total == 175e9 else 1e-9)


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


@pytest.mark.parametrize(
    ("asked", "near"), [("llama-2m", "llama-1m"), ("llama-9b", "llama-8b"), ("mixtral-8x7c", "mixtral-8x7b")]
)
def test_a_size_that_is_no_preset_suggests_the_nearest_of_its_family(asked: str, near: str) -> None:
    with pytest.raises(RecipeError, match=rf"Did you mean '{near}'"):
        read_architecture(asked)
