"""Architectures of presets, and of Hugging Face ``config.json`` files.

A configuration says less than a model has; :mod:`~narrowgauge.planner.inputs.model_families` says what the code of its family
adds. A family that is not in that table is refused instead of being taken for a Llama.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError, RecipeError, suggestion
from narrowgauge.planner.inputs.architectures import Architecture, LatentAttention, Mixture
from narrowgauge.planner.inputs.model_families import FAMILIES, UNPLANNED, Family
from narrowgauge.spec.models import MODELS, Model, nearest_in_size

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model", "n_embed")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_MLP = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_SIZES = ("shared_expert_intermediate_size", "shared_intermediate_size")


def read_architecture(text: str) -> Architecture:
    """The architecture of a preset (``narrowgauge show models``), or of a Hugging Face model folder or its ``config.json``.

    Example:
        >>> read_architecture("mixtral-8x7b").num_parameters
        46702792704
    """
    found = preset(text)
    if found is not None:
        return architecture_of(found[0], text.strip().lower(), found[1])
    path = Path(text).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        key = text.strip().lower()
        of_size = nearest_in_size(key) or ""
        is_of_family = of_size.partition("-")[0] == key.partition("-")[0]
        near = suggestion(of_size if is_of_family else key, (*MODELS, *PRESETS, *ALIASES))
        raise RecipeError(
            f"no model and no config.json is named {text!r}.", near or "narrowgauge plan run --help names the presets."
        )
    try:
        table = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}.", "It must be a Hugging Face config.json.") from error
    if not isinstance(table, dict):
        raise DataError(f"{file} holds {type(table).__name__}, no table.", "It must be a Hugging Face config.json.")
    return architecture_of(table, str(path), str(file))


def architecture_of(config: Mapping[str, Any], name: str, source: str = "") -> Architecture:
    """The architecture that a Hugging Face configuration describes; ``name`` is for messages."""
    family = _family(config, name)
    text = config.get(family.text) if family.text else None
    if isinstance(text, Mapping):
        # Whether the head is tied is a key of the whole model.
        whole = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {**whole, **text, "model_type": config["model_type"]}
    config = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    for key, value in family.needs.items():
        if config.get(key, value) != value:
            raise DataError(
                f"{name} has {key} = {config[key]!r}, and the parameters of a {config['model_type']} are known with "
                f"{value!r} alone.",
                "Plan with its number of parameters (--params).",
            )
    reader = _Reader(config, name, family)
    layers, width, heads = (reader.size(*keys) for keys in (_LAYERS, _WIDTH, _HEADS))
    sizes: dict[str, Any] = {
        "head_dim": reader.size("head_dim", default=family.head_dim or 0) or reader.quotient(width, heads),
        "num_kv_heads": reader.size("num_key_value_heads", default=heads),
        "intermediate_size": reader.size(
            *_MLP, default=family.mlp_ratio * width if family.mlp_ratio else _expert_size(reader)
        ),
        "norms_per_layer": family.norms_per_layer,
        "head_norms": family.head_norms,
        "norm_bias": family.norm_bias,
        "max_positions": reader.size(family.positions) + family.more_positions if family.positions else None,
        "qkv_bias": reader.flag(family.qkv_bias),
        "output_bias": reader.flag(family.output_bias),
        "mlp_bias": reader.flag(family.mlp_bias),
    }
    sizes |= family.own(config) if family.own else {}
    if heads % sizes["num_kv_heads"]:
        raise DataError(
            f"{name} has {heads} heads, which {sizes['num_kv_heads']} key-value heads do not divide.",
            "Correct the file.",
        )
    window, share = _window(reader, family, layers)
    return Architecture(
        name,
        layers,
        width,
        heads,
        vocab_size=reader.size("vocab_size"),
        is_gated=family.is_gated,
        tie_embeddings=bool(config.get("tie_word_embeddings", family.tie_embeddings)),
        norm=family.norm,
        has_gains=family.has_gains,
        has_embedding_norm=family.has_embedding_norm,
        num_vectors=family.num_vectors,
        head_bias=reader.flag(family.head_bias),
        activation=_activation(config, family),
        has_fused_inputs=family.has_fused_inputs,
        has_sinks=family.has_sinks,
        window=window,
        window_share=share,
        mixture=_mixture(reader, layers, width),
        latent=_latent(reader) if family.is_latent else None,
        source=source,
        left_out=family.left_out,
        **sizes,
    )


def _family(config: Mapping[str, Any], name: str) -> Family:
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    if isinstance(kind, str) and kind in UNPLANNED:
        raise DataError(
            f"{name} has the model_type {kind!r}: {UNPLANNED[kind]}, for which there are no formulas here.",
            "Plan with its number of parameters (--params).",
        )
    stated = f"has the model_type {kind!r}" if kind else "has no model_type"
    near = suggestion(kind, FAMILIES) if isinstance(kind, str) else ""
    raise DataError(
        f"{name} {stated}, whose parameters are not known here.",
        f"{near} Known are {', '.join(sorted(FAMILIES))}.".strip(),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """A configuration whose sizes are checked as they are read."""

    config: Mapping[str, Any]
    name: str
    family: Family

    def size(self, *keys: str, default: int | None = None) -> int:
        """The first key with a value, a positive integer."""
        key, value = next(
            ((key, self.config[key]) for key in keys if self.config.get(key) is not None), (keys[0], None)
        )
        if value is None and default is not None:
            return default
        if value is None:
            raise DataError(f"{self.name} does not say {key}.", "Use the config.json that belongs to the model.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(f"{self.name} has {key} = {value!r}.", "A size is a whole number above zero.")
        return value

    def quotient(self, width: int, heads: int) -> int:
        if width % heads:
            raise DataError(f"{self.name} has a width of {width}, which {heads} heads do not divide.", "Say head_dim.")
        return width // heads

    def flag(self, value: bool | str) -> bool:
        """A flag of a family: itself, or what the configuration has under that key."""
        if isinstance(value, bool):
            return value
        return bool(self.config.get(value, self.family.is_biased))


def _activation(config: Mapping[str, Any], family: Family) -> str:
    named = (config.get(key) for key in ("hidden_activation", "hidden_act", "activation_function", "activation"))
    return str(next((name for name in named if name), family.activation))


def _window(reader: _Reader, family: Family, layers: int) -> tuple[int | None, float]:
    config, key = reader.config, family.window
    if not config.get(key) or config.get("use_sliding_window") is False:
        return None, 1.0
    kinds, every = config.get("layer_types"), config.get("sliding_window_pattern") or family.full_every
    if isinstance(kinds, list) and kinds:
        share = sum(kind != "full_attention" for kind in kinds) / len(kinds)
    elif config.get("use_sliding_window"):
        share = max(0, layers - int(config.get("max_window_layers", 0))) / layers
    elif isinstance(every, int):
        share = (layers - layers // every if every else layers) / layers
    else:
        raise DataError(f"{reader.name} has sliding_window_pattern = {every!r}.", "Say layer_types.")
    return (reader.size(key), share) if share else (None, 1.0)


def _latent(reader: _Reader) -> LatentAttention:
    rank = reader.config.get("q_lora_rank")
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return LatentAttention(None if rank is None else reader.size("q_lora_rank"), *(reader.size(key) for key in sizes))


def _expert_size(reader: _Reader) -> int | None:
    """The experts' size, in a model without MLPs; None if it has none."""
    return reader.config.get("moe_intermediate_size")


def _mixture(reader: _Reader, layers: int, width: int) -> Mixture | None:
    config = reader.config
    if all(config.get(key) is None for key in _EXPERTS):
        return None
    experts, chosen = reader.size(*_EXPERTS), reader.size(*_CHOSEN)
    if chosen > experts:
        raise DataError(f"{reader.name} sends a token to {chosen} of {experts} experts.", "Correct the file.")
    size = reader.size("moe_intermediate_size", "intermediate_size")
    count = next((config[key] for key in _SHARED_EXPERTS if config.get(key)), 0)
    shared = int(next((config[key] for key in _SHARED_SIZES if config.get(key)), count * size))
    if reader.family.has_shared_expert:
        shared = size
    vectors = {"none": 0, "width": width, "experts": experts}[reader.family.router_vectors]
    return Mixture(
        experts, chosen, size, _mixture_layers(reader, layers), shared, reader.family.has_expert_biases, vectors
    )


def _mixture_layers(reader: _Reader, layers: int) -> int:
    """How many layers have a mixture: the named ones, or every n-th after the first dense ones except those listed as dense."""
    config = reader.config
    kinds, named = config.get("mlp_layer_types"), config.get("moe_layers")
    if isinstance(kinds, list) and kinds:
        return sum(kind == "sparse" for kind in kinds)
    if isinstance(named, list) and named:
        return len(named)
    first = int(config.get("first_k_dense_replace") or config.get("moe_layer_start_index") or 0)
    last = int(config.get("moe_layer_end_index", -1))
    last = layers - 1 if last < 0 else last
    step = reader.size("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
    listed = config.get("mlp_only_layers") or ()
    # Qwen counts from one: with a step of 2, layers 1, 3, 5 (from zero) have experts.
    return sum(first <= i <= last and (i + 1) % step == 0 and i not in listed for i in range(layers))


# ── presets: shapes for planning as keys of a config.json; those that train builds are in spec/models ─────────────────────

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
