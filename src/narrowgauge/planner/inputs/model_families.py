"""Families: what the code of a Hugging Face ``model_type`` adds to its configuration, one row per family.

A configuration says less than a model has: which biases and norms exist is written in the code of its family, and some values are
left out of files because they are the class's own. So a family that is not in the table is refused instead of being taken for a
Llama; for layers that the planner has no formulas for, ``UNPLANNED`` says which.

Source: the modelling and configuration files of transformers 5.23. Every row is checked against the parameters of the Hugging
Face class (``tests/planner/test_architectures.py``), and so are the values that are left out of files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from narrowgauge.planner.inputs.architectures import Norm

Config = Mapping[str, Any]
STATED = "attention_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the code of a family adds to its configuration.

    Fields of :class:`~narrowgauge.planner.inputs.architectures.Architecture` mean the same here.

    Args:
        qkv_bias, output_bias, mlp_bias, head_bias: whether they exist, or the key of the configuration that says it.
        is_biased: whether a bias exists that is not stated.
        tie_embeddings: if the configuration does not say; the value that Hugging Face leaves out of files.
        positions: the key with the number of learned positions; more_positions: what the class adds to it.
        head_dim: if the configuration does not say; None for the width over the heads.
        mlp_ratio: of the MLP's size to the width, if the configuration does not say; None if it must.
        activation: the MLP's function, if the configuration does not say.
        window: the key with a window in tokens; full_every: every n-th layer attends to all tokens, if ``layer_types`` does not
            say; 0 for none, 1 for all.
        is_latent: whether keys and values are expanded from a latent vector.
        has_shared_expert: whether every token visits one more expert, though no key says so.
        has_expert_biases: of the router and the experts.
        router_vectors: further parameters of each mixture: as many as the ``"width"`` (the gate of a shared expert) or as the
            ``"experts"`` (a correction of the router that is a parameter).
        own: further fields of the architecture that follow from the configuration.
        needs: values that keys must have, if they are stated: others mean layers that are not in the row.
        text: the key of the text model's own configuration, in a model with other parts; left_out: which parts.
        defaults: sizes that files leave out where they are the class's own; nested configurations do.
    """

    is_gated: bool = True
    norm: Norm = "rms"
    norms_per_layer: int = 2
    head_norms: Literal["none", "head", "all"] = "none"
    norm_bias: bool = True
    head_bias: bool | str = False
    has_gains: bool = True
    has_embedding_norm: bool = False
    num_vectors: int = 0
    has_fused_inputs: bool = False
    has_sinks: bool = False
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    is_biased: bool = False
    tie_embeddings: bool = False
    positions: str | None = None
    more_positions: int = 0
    head_dim: int | None = None
    mlp_ratio: int | None = None
    activation: str = "silu"
    window: str = "sliding_window"
    full_every: int = 1
    is_latent: bool = False
    has_shared_expert: bool = False
    has_expert_biases: bool = False
    router_vectors: Literal["none", "width", "experts"] = "none"
    own: Callable[[Config], Mapping[str, Any]] | None = None
    needs: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    left_out: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _mpt(config: Config) -> dict[str, Any]:
    has_biases = not config.get("no_bias", True)
    found: dict[str, Any] = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "norm_bias"), has_biases)
    found["intermediate_size"] = (config.get("expansion_ratio") or 4) * config["d_model"]
    if config.get("learned_pos_emb"):
        # Hugging Face's class has ALiBi only; this key says that llm-foundry's has learned positions.
        found["max_positions"] = config["max_seq_len"]
    return found


def _bloom(config: Config) -> dict[str, Any]:
    return {"intermediate_size": 4 * (config.get("hidden_size") or config["n_embed"])}


def _falcon(config: Config) -> dict[str, Any]:
    """Falcon 7B shares one key and value head; 40B and 180B have groups of them, and a norm for each branch."""
    heads = config.get("num_attention_heads") or config["n_head"]
    size = config.get("ffn_hidden_size") or 4 * config["hidden_size"]
    if config.get("new_decoder_architecture"):
        norms = config.get("num_ln_in_parallel_attn") or 2
        groups = config.get("num_kv_heads") or config.get("n_head_kv") or heads
        return {"num_kv_heads": groups, "norms_per_layer": norms, "intermediate_size": size}
    norms = 1 if config.get("parallel_attn", True) else 2
    groups = 1 if config.get("multi_query", True) else heads
    return {"num_kv_heads": groups, "norms_per_layer": norms, "intermediate_size": size}


def _one_key_value_head(config: Config) -> dict[str, Any]:
    return {"num_kv_heads": 1} if config.get("multi_query", True) else {}


def _norms_of_heads(key: str, kind: str, is_default: bool = False) -> Callable[[Config], dict[str, Any]]:
    return lambda config: {"head_norms": kind if config.get(key, is_default) else "none"}


def _parallel_norms(config: Config) -> dict[str, Any]:
    return {"norms_per_layer": 1 if config.get("use_parallel_residual") else 2}


def _llama4(config: Config) -> dict[str, Any]:
    """Layers without experts have an MLP of their own size."""
    return {"intermediate_size": config["intermediate_size_mlp"]}


_LLAMA = Family(qkv_bias=STATED, output_bias=STATED, mlp_bias="mlp_bias")
_GPT = Family(
    is_gated=False, norm="layer", qkv_bias=True, output_bias=True, mlp_bias=True, tie_embeddings=True,
    has_fused_inputs=True, mlp_ratio=4,
)  # fmt: skip
_GPTJ = Family(
    is_gated=False, norm="layer", norms_per_layer=1, mlp_bias=True, head_bias=True, mlp_ratio=4, activation="gelu_new"
)
_GEMMA = Family(
    norm="rms-float32", qkv_bias=STATED, output_bias=STATED, tie_embeddings=True, head_dim=256
)  # the activation is stated under another key
_GEMMA3 = replace(
    _GEMMA,
    norms_per_layer=4,
    head_norms="head",
    full_every=6,
    activation="gelu_pytorch_tanh",
    defaults={
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "sliding_window": 4096,
    },
)  # fmt: skip
_LLAMA4 = Family(
    qkv_bias=STATED, output_bias=STATED, window="attention_chunk_size", full_every=4, own=_llama4, has_shared_expert=True,
    defaults={
        "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192,
    },
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "apertus": Family(is_gated=False, head_norms="head", qkv_bias=STATED, output_bias=STATED, num_vectors=2),
    "arcee": replace(_LLAMA, is_gated=False),
    "bloom": replace(_GPT, has_embedding_norm=True, own=_bloom, activation="gelu"),
    "codegen": replace(_GPTJ, has_fused_inputs=True),
    "cohere": Family(
        norm="layer", norm_bias=False, norms_per_layer=1, qkv_bias=STATED, output_bias=STATED, tie_embeddings=True,
        own=_norms_of_heads("use_qk_norm", "all"),
    ),
    "cohere2": Family(
        norm="layer", norm_bias=False, norms_per_layer=1, qkv_bias=STATED, output_bias=STATED, tie_embeddings=True, full_every=4
    ),
    "cwm": Family(full_every=4, head_dim=128),
    "deepseek_v2": Family(qkv_bias=STATED, output_bias=STATED, is_latent=True),
    "deepseek_v3": Family(qkv_bias=STATED, output_bias=STATED, is_latent=True),
    "dots1": Family(head_norms="head", qkv_bias=STATED, output_bias=STATED),
    "ernie4_5": Family(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", tie_embeddings=True, head_dim=128),
    "ernie4_5_moe": Family(tie_embeddings=True, router_vectors="experts", needs={"use_bias": False}),
    "exaone4": Family(head_norms="head", full_every=4),
    "falcon": replace(
        _GPT, qkv_bias="bias", output_bias="bias", mlp_bias="bias", own=_falcon, activation="gelu"
    ),
    "flex_olmo": Family(head_norms="all", qkv_bias=STATED, output_bias=STATED),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms_per_layer=4, full_every=2),
    "gemma3": replace(_GEMMA3, text="text_config", left_out="its vision tower and the projection of images"),
    "gemma3_text": _GEMMA3,
    "glm": Family(qkv_bias=STATED, is_biased=True, head_dim=128),
    "glm4": Family(norms_per_layer=4, qkv_bias=STATED, is_biased=True, head_dim=128),
    "glm4_moe": Family(qkv_bias=STATED, own=_norms_of_heads("use_qk_norm", "head")),
    "gpt2": replace(_GPT, positions="n_positions", activation="gelu_new"),
    "gpt_bigcode": replace(_GPT, positions="n_positions", own=_one_key_value_head, activation="gelu_pytorch_tanh"),
    "gpt_neo": replace(
        _GPT, qkv_bias=False, has_fused_inputs=False, positions="max_position_embeddings", window="window_size", full_every=2,
        activation="gelu_new",
    ),
    "gpt_neox": Family(
        is_gated=False, norm="layer", qkv_bias=STATED, output_bias=STATED, mlp_bias=True, is_biased=True, has_fused_inputs=True,
        activation="gelu",
    ),
    "gpt_oss": Family(
        qkv_bias=True, output_bias=True, mlp_bias=True, has_sinks=True, head_dim=64, full_every=2, has_expert_biases=True
    ),
    "gptj": _GPTJ,
    "granite": _LLAMA,
    "granitemoe": Family(qkv_bias=STATED, output_bias=STATED),
    "granitemoeshared": Family(qkv_bias=STATED, output_bias=STATED),
    "helium": Family(qkv_bias=STATED, mlp_bias="mlp_bias", head_dim=128),
    "hunyuan_v1_dense": Family(head_norms="head", qkv_bias=STATED, output_bias=STATED),
    "llama": _LLAMA,
    "llama4": replace(_LLAMA4, text="text_config", left_out="its vision tower and the projection of images"),
    "llama4_text": _LLAMA4,
    "minimax_m2": Family(head_norms="all"),
    "ministral": Family(full_every=0),
    "ministral3": Family(head_dim=128),
    "mistral": Family(full_every=0),
    "mixtral": Family(full_every=0),
    "mpt": Family(
        is_gated=False, norm="layer", has_fused_inputs=True, tie_embeddings=True, own=_mpt, mlp_ratio=4, activation="gelu"
    ),
    "nemotron": Family(is_gated=False, norm="layer", qkv_bias=STATED, output_bias=STATED, mlp_bias="mlp_bias"),
    "olmo": Family(norm="layer", has_gains=False, qkv_bias=STATED, output_bias=STATED),
    "olmo2": Family(norm="rms-float32", head_norms="all", qkv_bias=STATED, output_bias=STATED),
    "olmo3": Family(norm="rms-float32", head_norms="all", qkv_bias=STATED, output_bias=STATED, full_every=4),
    "olmoe": Family(head_norms="all", qkv_bias=STATED, output_bias=STATED),
    # The smallest OPT but one has other norms, and embeddings narrower than its layers.
    "opt": replace(
        _GPT, has_fused_inputs=False, positions="max_position_embeddings", more_positions=2, activation="relu",
        needs={"do_layer_norm_before": True, "enable_bias": True, "layer_norm_elementwise_affine": True},
    ),
    "persimmon": Family(
        is_gated=False, norm="layer", qkv_bias=True, output_bias=True, mlp_bias=True, has_fused_inputs=True,
        own=_norms_of_heads("qk_layernorm", "head", is_default=True),
    ),
    "phi": Family(
        is_gated=False, norm="layer", norms_per_layer=1, qkv_bias=True, output_bias=True, mlp_bias=True, head_bias=True,
        needs={"qk_layernorm": False}, activation="gelu_new",
    ),
    "phi3": Family(has_fused_inputs=True, full_every=0),
    "phimoe": Family(norm="layer", qkv_bias=STATED, output_bias=STATED, head_bias="lm_head_bias"),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(qkv_bias="qkv_bias", is_biased=True, router_vectors="width"),
    "qwen3": Family(head_norms="head", qkv_bias=STATED, output_bias=STATED, head_dim=128),
    "qwen3_moe": Family(head_norms="head", qkv_bias=STATED, output_bias=STATED),
    "seed_oss": Family(qkv_bias=STATED, is_biased=True, output_bias="attention_out_bias", mlp_bias="mlp_bias", head_dim=128),
    "smollm3": replace(_LLAMA, tie_embeddings=True),
    "stablelm": Family(
        norm="layer", qkv_bias="use_qkv_bias", own=_parallel_norms, needs={"qk_layernorm": False}
    ),
    "starcoder2": Family(
        is_gated=False, norm="layer", qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", is_biased=True,
        tie_embeddings=True, full_every=0,
    ),
    "vaultgemma": replace(_GEMMA, full_every=2),
    "youtu": Family(qkv_bias=STATED, output_bias=STATED, tie_embeddings=True, is_latent=True),
}  # fmt: skip
"""By ``model_type``."""

_STATE_SPACE, _LINEAR = "state-space layers", "linear attention in most layers"
_VISION = "images or sound beside text"
UNPLANNED: dict[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "recurrent_gemma", "rwkv", "xlstm"), "recurrent layers"),
    **dict.fromkeys(
        ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "zamba", "zamba2", "zaya"), _STATE_SPACE
    ),
    **dict.fromkeys(
        ("bailing_hybrid", "kimi_linear", "minimax", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
         "qwen3_5_text", "qwen3_next"), _LINEAR
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), "convolutions in most layers"),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), "a trained index of the tokens that are attended to"),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"), "embeddings of their own in every layer"),
    **dict.fromkeys(("longcat_flash",), "experts that compute nothing, and two attentions in a layer"),
    **dict.fromkeys(("jetmoe",), "experts in its attention"),
    **dict.fromkeys(("bert", "roberta", "electra", "modernbert"), "an encoder that is no decoder"),
    **dict.fromkeys(("t5", "bart", "mt5", "t5gemma"), "an encoder beside the decoder"),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni", "mllama", "llava", "mistral3", "idefics3", "paligemma",
         "phi4_multimodal", "whisper"), _VISION
    ),
}  # fmt: skip
"""What a family has that the planner has no formulas for, by ``model_type``."""
