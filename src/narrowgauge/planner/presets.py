"""Preset shapes for planning, as keys of a Hugging Face ``config.json``; models that ``train`` builds are in ``spec/models``."""

from __future__ import annotations

from typing import Any

from narrowgauge.spec.models import MODELS, Model

Config = dict[str, Any]


def _llama(layers: int, width: int, heads: int, kv_heads: int, mlp: int, vocab: int, family: str = "llama") -> Config:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }


def _gpt(layers: int, width: int, heads: int) -> Config:
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "n_positions": 2048,
        "vocab_size": 51_200,
    }


def _mpt(layers: int, width: int, heads: int) -> Config:
    sizes = {"model_type": "mpt", "n_layers": layers, "d_model": width, "n_heads": heads}
    # llm-foundry's: learned positions and biases, which the released checkpoints do not have.
    return {**sizes, "vocab_size": 50_368, "max_seq_len": 2048, "learned_pos_emb": True, "no_bias": False}


def _qwen3(layers: int, width: int, heads: int, kv_heads: int, mlp: int, expert: int = 0) -> Config:
    family = "qwen3_moe" if expert else "qwen3"
    mixture = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert} if expert else {}
    return {**_llama(layers, width, heads, kv_heads, mlp, 151_936, family), "head_dim": 128, **mixture}


def _mixtral(layers: int, width: int, heads: int, mlp: int) -> Config:
    shape = _llama(layers, width, heads, 8, mlp, 32_000, "mixtral")
    return {**shape, "num_local_experts": 8, "num_experts_per_tok": 2}


_DEEPSEEK_V3: Config = {
    **_llama(61, 7168, 128, 128, 18_432, 129_280, "deepseek_v3"),
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

_LLAMA1 = "Touvron et al., LLaMA, arXiv 2302.13971, table 2"
_LLAMA3 = "Llama Team, The Llama 3 Herd of Models, arXiv 2407.21783, table 3"
_MIXTRAL = "Mistral AI, Mixtral of Experts, arXiv 2401.04088, table 1"
_MIXTRAL22 = "mistral-community/Mixtral-8x22B-v0.1, config.json"
_DEEPSEEK = "DeepSeek-V3, arXiv 2412.19437, section 4.2 (without the multi-token-prediction module)"
_QWEN3 = "Qwen3, arXiv 2505.09388, tables 1 and 2; config.json of the checkpoint"
_KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, table 3 and section 6"
_FOUNDRY = "MosaicML, llm-foundry, scripts/train/yamls/pretrain"

PRESETS: dict[str, tuple[Config, str]] = {
    "llama-33b": (_llama(60, 6656, 52, 52, 17_920, 32_000), _LLAMA1),
    "llama-65b": (_llama(80, 8192, 64, 64, 22_016, 32_000), _LLAMA1),
    "llama-405b": (_llama(126, 16_384, 128, 8, 53_248, 128_256), _LLAMA3),
    "mixtral-8x7b": (_mixtral(32, 4096, 32, 14_336), _MIXTRAL),
    "mixtral-8x22b": (_mixtral(56, 6144, 48, 16_384), _MIXTRAL22),
    "deepseek-v3": (_DEEPSEEK_V3, _DEEPSEEK),
    "qwen3-8b": (_qwen3(36, 4096, 32, 8, 12_288), _QWEN3),
    "qwen3-32b": (_qwen3(64, 5120, 64, 8, 25_600), _QWEN3),
    "qwen3-30b-a3b": (_qwen3(48, 2048, 32, 4, 6144, 768), _QWEN3),
    "qwen3-235b-a22b": (_qwen3(94, 4096, 64, 4, 12_288, 1536), _QWEN3),
    "megatron-22b": (_gpt(48, 6144, 64), _KORTHIKANTI),
    "gpt3-175b": (_gpt(96, 12_288, 96), _KORTHIKANTI),
    "megatron-530b": (_gpt(105, 20_480, 128), _KORTHIKANTI),
    "megatron-1t": (_gpt(128, 25_600, 160), _KORTHIKANTI),
    "mpt-125m": (_mpt(12, 768, 12), _FOUNDRY),
    "mpt-350m": (_mpt(24, 1024, 16), _FOUNDRY),
    "mpt-760m": (_mpt(24, 1536, 12), _FOUNDRY),
    "mpt-1b": (_mpt(24, 2048, 16), _FOUNDRY),
    "mpt-3b": (_mpt(32, 2560, 20), _FOUNDRY),
    "mpt-7b": (_mpt(32, 4096, 32), _FOUNDRY),
    "mpt-13b": (_mpt(40, 5120, 40), _FOUNDRY),
    "mpt-30b": (_mpt(48, 7168, 56), _FOUNDRY),
    "mpt-70b": (_mpt(80, 8192, 64), _FOUNDRY),
}

ALIASES = {"llama-30b": "llama-33b"}
"""Other names of presets: LLaMA's third size is called 30B by its files and 33B by its paper."""


def config_of(model: Model) -> Config:
    """The ``config.json`` keys of a model that the trainer builds."""
    if model.family == "gpt2":
        return {
            "model_type": "gpt2",
            "n_layer": model.num_layers,
            "n_embd": model.hidden_size,
            "n_head": model.num_heads,
            "n_inner": model.intermediate_size,
            "n_positions": model.max_positions,
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": model.tie_embeddings,
        }
    shape = (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads, model.intermediate_size)
    return {**_llama(*shape, model.vocab_size), "tie_word_embeddings": model.tie_embeddings}


def preset(name: str) -> tuple[Config, str] | None:
    """The configuration and the source of a preset of either table; None if neither has that name."""
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key in MODELS:
        return config_of(MODELS[key]), MODELS[key].source
    return PRESETS.get(key)
