"""Reads architectures: presets by name, and Hugging Face ``config.json`` files of the families in the table.

A configuration says less than a model has: which biases and norms exist is written in the code of its family, so a family that is
not in the table is refused instead of being taken for a Llama. Every row is checked against the parameters of the Hugging Face
class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from narrowgauge.errors import DataError, RecipeError, suggestion
from narrowgauge.planner.architectures import Architecture, LatentAttention, Mixture, Norm
from narrowgauge.planner.presets import ALIASES, PRESETS, preset
from narrowgauge.spec.models import MODELS


@dataclass(frozen=True, slots=True)
class Family:
    """What the code of a family adds to its configuration.

    Args:
        is_gated, norm, norms_per_layer, head_norms, has_fused_inputs, has_sinks: see
            :class:`~narrowgauge.planner.architectures.Architecture`.
        qkv_bias, output_bias, mlp_bias: whether they exist, or where it is stated (a key of the configuration).
        tie_embeddings: if the configuration does not say; the value that Hugging Face leaves out of files.
        positions: the key with the number of learned positions.
        head_dim: if the configuration does not say; None for the width over the heads.
        window: which layers have the configuration's window, if ``layer_types`` does not say.
    """

    is_gated: bool = True
    norm: Norm = "rms"
    norms_per_layer: int = 2
    head_norms: Literal["none", "head", "all"] = "none"
    has_fused_inputs: bool = False
    has_sinks: bool = False
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    tie_embeddings: bool = False
    positions: str | None = None
    head_dim: int | None = None
    window: Literal["all", "half", "none"] = "none"


_STATED = "attention_bias"
FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias=_STATED, output_bias=_STATED, mlp_bias="mlp_bias"),
    "mistral": Family(window="all"),
    "mixtral": Family(window="all"),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(head_norms="head", qkv_bias=_STATED, output_bias=_STATED, head_dim=128),
    "qwen3_moe": Family(head_norms="head", qkv_bias=_STATED, output_bias=_STATED),
    "deepseek_v2": Family(qkv_bias=_STATED, output_bias=_STATED),
    "deepseek_v3": Family(qkv_bias=_STATED, output_bias=_STATED),
    "gpt_oss": Family(qkv_bias=True, output_bias=True, mlp_bias=True, has_sinks=True, head_dim=64, window="half"),
    "phi3": Family(has_fused_inputs=True, window="all"),
    "olmo2": Family(norm="rms-float32", head_norms="all", qkv_bias=_STATED, output_bias=_STATED),
    "gemma": Family(norm="rms-float32", qkv_bias=_STATED, output_bias=_STATED, tie_embeddings=True, head_dim=256),
    "gemma2": Family(
        norm="rms-float32",
        norms_per_layer=4,
        qkv_bias=_STATED,
        output_bias=_STATED,
        tie_embeddings=True,
        head_dim=256,
        window="half",
    ),
    "starcoder2": Family(
        is_gated=False,
        norm="layer",
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        tie_embeddings=True,
        window="all",
    ),
    "gpt2": Family(
        is_gated=False,
        norm="layer",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
        has_fused_inputs=True,
        positions="n_positions",
    ),
    "gpt_neox": Family(
        is_gated=False, norm="layer", qkv_bias=_STATED, output_bias=_STATED, mlp_bias=True, has_fused_inputs=True
    ),
    "mpt": Family(is_gated=False, norm="layer", has_fused_inputs=True, tie_embeddings=True),
}
_BIASED = ("starcoder2", "gpt_neox")  # have biases if the configuration does not say
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")


def read_architecture(text: str) -> Architecture:
    """The architecture of a preset, or of a Hugging Face model folder or its ``config.json``.

    Args:
        text: a name of ``narrowgauge show models``, or a path.
    Raises:
        RecipeError: there is no such preset, and no such file.
        DataError: the file is not the configuration of a family that is known here, or contradicts itself.
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
        names = (*MODELS, *PRESETS, *ALIASES)
        near = suggestion(text.strip().lower(), names)
        raise RecipeError(
            f"no model and no config.json is named {text!r}.", near or "narrowgauge plan --help names the presets."
        )
    try:
        table = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}.", "It must be a Hugging Face config.json.") from error
    if not isinstance(table, dict):
        raise DataError(f"{file} holds {type(table).__name__}, no table.", "It must be a Hugging Face config.json.")
    return architecture_of(table, str(path), str(file))


def architecture_of(config: Mapping[str, Any], name: str, source: str = "") -> Architecture:
    """The architecture that a Hugging Face configuration describes.

    Args:
        config: its keys.
        name, source: for messages.
    Raises:
        DataError: its family is not known here, or keys are missing or contradict each other.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        stated = f"has the model_type {kind!r}" if kind else "has no model_type"
        raise DataError(
            f"{name} {stated}, whose parameters are not known here.", f"Known are {', '.join(sorted(FAMILIES))}."
        )
    reader = _Reader(config, name)
    layers, width, heads = (reader.size(*keys) for keys in (_LAYERS, _WIDTH, _HEADS))
    latent = _latent(reader) if kind in ("deepseek_v2", "deepseek_v3") else None
    head_dim = reader.size("head_dim", default=family.head_dim or 0) or reader.quotient(width, heads)
    kv_heads = reader.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise DataError(
            f"{name} has {heads} heads, which {kv_heads} key-value heads do not divide.", "Correct the file."
        )
    window, share = _window(reader, family, layers)
    biases = {key: reader.flag(getattr(family, key)) for key in ("qkv_bias", "output_bias", "mlp_bias")}
    has_biases = kind != "mpt" or not config.get("no_bias", True)
    if kind == "mpt":
        biases = dict.fromkeys(biases, has_biases)
    return Architecture(
        name,
        layers,
        width,
        heads,
        kv_heads,
        head_dim,
        reader.size("intermediate_size", "n_inner", "ffn_dim", default=_mlp_width(reader, width)),
        reader.size("vocab_size"),
        is_gated=family.is_gated,
        tie_embeddings=bool(config.get("tie_word_embeddings", family.tie_embeddings)),
        max_positions=_positions(reader, family),
        norm=family.norm,
        norms_per_layer=family.norms_per_layer,
        head_norms=family.head_norms,
        norm_bias=has_biases,
        activation=_activation(config),
        has_fused_inputs=family.has_fused_inputs,
        has_sinks=family.has_sinks,
        window=window,
        window_share=share,
        mixture=_mixture(reader, layers),
        latent=latent,
        source=source,
        **biases,
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """A configuration whose sizes are checked as they are read."""

    config: Mapping[str, Any]
    name: str

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
        """A flag of a family: itself, or the key that says it."""
        if isinstance(value, bool):
            return value
        return bool(self.config.get(value, self.config["model_type"] in _BIASED))


def _activation(config: Mapping[str, Any]) -> str:
    named = (config.get(key) for key in ("hidden_activation", "hidden_act", "activation_function"))
    default = {"gpt2": "gelu_new", "gpt_neox": "gelu", "mpt": "gelu"}.get(config["model_type"], "silu")
    return str(next((name for name in named if name), default))


def _mlp_width(reader: _Reader, width: int) -> int | None:
    kind = reader.config["model_type"]
    if kind == "gpt2":
        return 4 * width
    return reader.size("expansion_ratio", default=4) * width if kind == "mpt" else None


def _positions(reader: _Reader, family: Family) -> int | None:
    if reader.config["model_type"] == "mpt":
        # Hugging Face's has ALiBi only; llm-foundry's learned positions are said by this key.
        return reader.size("max_seq_len") if reader.config.get("learned_pos_emb") else None
    return reader.size(family.positions) if family.positions else None


def _window(reader: _Reader, family: Family, layers: int) -> tuple[int | None, float]:
    """The window and the share of the layers that have it."""
    window = reader.config.get("sliding_window")
    if window is None or reader.config.get("use_sliding_window") is False:
        return None, 1.0
    kinds = reader.config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        share = sum(kind == "sliding_attention" for kind in kinds) / len(kinds)
    elif reader.config.get("use_sliding_window"):
        share = max(0, layers - int(reader.config.get("max_window_layers", 0))) / layers
    else:
        share = {"all": 1.0, "half": (layers + 1) // 2 / layers, "none": 0.0}[family.window]
    return (reader.size("sliding_window"), share) if share else (None, 1.0)


def _latent(reader: _Reader) -> LatentAttention:
    rank = reader.config.get("q_lora_rank")
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return LatentAttention(None if rank is None else reader.size("q_lora_rank"), *(reader.size(key) for key in sizes))


def _mixture(reader: _Reader, layers: int) -> Mixture | None:
    config, keys = reader.config, ("num_local_experts", "n_routed_experts", "num_experts")
    if all(config.get(key) is None for key in keys):
        return None
    experts, chosen = reader.size(*keys), reader.size("num_experts_per_tok")
    if chosen > experts:
        raise DataError(f"{reader.name} sends a token to {chosen} of {experts} experts.", "Correct the file.")
    size = reader.size("moe_intermediate_size", "intermediate_size")
    shared = int(config.get("n_shared_experts") or 0) * size
    has_biases = config["model_type"] == "gpt_oss"
    return Mixture(experts, chosen, size, _mixture_layers(reader, layers), shared, has_biases)


def _mixture_layers(reader: _Reader, layers: int) -> int:
    """Layers with a mixture: after the first dense ones, each or every n-th, without those listed."""
    config = reader.config
    first = int(config.get("first_k_dense_replace") or 0)
    step = reader.size("decoder_sparse_step", default=1)
    listed = config.get("mlp_only_layers") or ()
    # Qwen counts from one: with a step of 2, layers 1, 3, 5 (from zero) have experts.
    return sum(i >= first and (i + 1) % step == 0 and i not in listed for i in range(layers))
