"""Models that transformers builds are read as they are; presets have the same answer as the class
of their configuration.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from narrowgauge.planner.built_models import of_config
from narrowgauge.planner.model import CONFIGS, read_model
from narrowgauge.spec.models import MODELS
from text.refusals import refused

SIZES = {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2,
         "intermediate_size": 160, "vocab_size": 500, "pad_token_id": 0, "tie_word_embeddings": False}  # fmt: skip
FAMILIES = {
    "llama": {},
    "gpt2": {"n_layer": 3, "n_embd": 96, "n_head": 6, "n_positions": 70},
    "qwen3": {"head_dim": 48},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 32},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                    "first_k_dense_replace": 1, "n_shared_experts": 2,
                    "q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 20, "qk_rope_head_dim": 8, "v_head_dim": 28},
    "gemma2": {"head_dim": 48, "sliding_window": 16},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "olmo2": {},
    "phi3": {},
}  # fmt: skip


def config(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **FAMILIES[family], **changes}


def built(keys: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys))


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_the_largest_layer_are_those_of_the_class(family):
    model = built(config(family))
    shape = of_config(config(family), family)
    assert shape.num_parameters == sum(value.numel() for value in model.parameters())
    base = model.base_model
    layers = getattr(base, "layers", None) or base.h
    sizes = []
    for layer in layers:
        # Biases of experts count with the vectors of their layer.
        kept = [p for n, p in layer.named_parameters() if ".experts." not in n or "bias" in n]
        sizes.append(sum(p.numel() for p in kept))
    rel = 0.05 if len(set(sizes)) > 1 else 0.0  # vectors are a mean over layers
    assert shape.largest_layer == pytest.approx(max(sizes), rel=rel)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_operations_are_those_that_pytorch_counts(family):
    """FlopCounterMode counts every matmul of forward and backward; the attention without mask,
    which is not causal.
    """
    from torch.utils.flop_counter import FlopCounterMode

    keys = config(family, attn_implementation="eager")
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        built(keys)(input_ids=torch.zeros(2, 64, dtype=torch.int64)).logits.sum().backward()
    # What remains is the rotary table: an outer product of positions and frequencies.
    shape = of_config(keys, "tiny")
    operations = shape.flops_per_token(64) + shape.attention_flops(64)
    assert counter.get_total_flops() / 128 == pytest.approx(operations, rel=1e-3)


PRESETS = {
    "llama-8b": {"model_type": "llama", "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256},
    "gpt3-175b": {"model_type": "gpt2", "n_layer": 96, "n_embd": 12_288, "n_head": 96, "n_positions": 2048, "vocab_size": 51_200},
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_class_of_its_configuration(name):
    """What is not named has the default of its class, which is a released model."""
    preset = read_model(name)
    read = of_config(PRESETS[name], name)
    # A table of positions is either a length or a part of the vectors outside layers.
    outer = {"positions": read.positions, "outer_vectors": read.outer_vectors}
    assert replace(preset, layers=read.layers, **outer) == read
    assert (preset.num_parameters, preset.largest_layer) == (
        read.num_parameters,
        read.largest_layer,
    )
    assert preset.flops_per_token(4096) == read.flops_per_token(4096)


def test_presets_and_folders_have_their_published_parameters(tmp_path):
    """Mixtral 8x7B has 46.7 billion parameters, not the 7.2 of a Llama of its width."""
    for model in MODELS.values():
        assert read_model(model.name).num_parameters == model.num_parameters
    billions = [46.7, 671.0, 8.2, 30.5, 235.1]
    assert [round(read_model(name).num_parameters / 1e9, 1) for name in CONFIGS] == billions
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mixtral-8x7b"]))
    assert read_model(str(tmp_path)).num_parameters == 46_702_792_704
    assert read_model(built(CONFIGS["mixtral-8x7b"])).layers == read_model(tmp_path).layers


@pytest.mark.parametrize("kind", ["mamba", "jetmoe"])
def test_models_of_other_layers_are_refused_with_the_size_of_their_state(kind):
    """Recurrent layers, linear attention, and attention of experts: no formula here is theirs."""
    keys = {"model_type": kind, "num_hidden_layers": 2, "hidden_size": 64}
    size = sum(value.numel() for value in built(keys).parameters())
    with refused("a model without a formula", size=size):
        of_config(keys, kind)


def test_causal_attention_is_half_and_windows_are_counted():
    plain = read_model("llama-8b")
    assert plain.attention_flops(4096) == 6 * 32 * 4096 * 4096
    near = replace(plain.layers[0], window=16)
    keys = [min(position + 1, 16) for position in range(64)]
    assert near.mean_keys(64) == pytest.approx(
        sum(keys) / 64, rel=0.04
    )  # the formula leaves out the diagonal's half
    gemma = of_config(config("gemma2"), "half")
    assert [(layers.count, layers.window) for layers in gemma.layers] == [(2, 16), (2, None)]
    per_key = 6 * gemma.num_heads * (gemma.query_dim + gemma.value_dim)
    assert gemma.attention_flops(64) == pytest.approx(per_key * 2 * (near.mean_keys(64) + 32))


HYBRIDS = {
    "qwen3_next": {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                   "shared_expert_intermediate_size": 48},
    "jamba": {"num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8},
    "nemotron_h": {"hybrid_override_pattern": "M-M*", "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_are_rows_of_their_kinds_of_layers(family):
    """One of four layers has attention, the others are counted by their matmuls. Jamba was once
    planned as if all had it.
    """
    keys = config("llama", model_type=family, **HYBRIDS[family])
    shape = of_config(dict(keys), "hybrid")
    assert shape.num_parameters == sum(value.numel() for value in built(keys).parameters())
    assert sum(layers.count for layers in shape.layers if layers.has_attention) == 1
    assert shape.num_layers == 4 and shape.num_kv_heads == 2
    assert any(layers.mixer_width > 0 for layers in shape.layers)
    per_key = 3 * 2 * shape.num_heads * (shape.query_dim + shape.value_dim)
    assert shape.attention_flops(64) == per_key * 32
