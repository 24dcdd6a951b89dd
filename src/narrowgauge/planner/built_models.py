"""Read model shapes from a ``config.json``: transformers builds the model on the meta device,
without memory or guesses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from narrowgauge.errors import DataError
from narrowgauge.planner.model import (
    Architecture,
    LatentAttention,
    Matmul,
    Mixture,
    Norm,
    Part,
    Split,
)

_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "top_k",
    "moe_top_k",
)
_FLOAT32_NORMS = ("Gemma", "VaultGemma", "Olmo2", "Olmo3")
_HEAD_NORM = re.compile(r"\.(q|k|qk|query|key)_?(layer)?_?norm$")
_ATTENTION = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "global",
    "local",
}
# Recurrent layers, and attention whose projections are experts.
_OTHER = re.compile(r"A_log|conv1d|time_decay|time_mix|attention\.experts")
_OUTSIDE = re.compile(r"vision|visual|audio|multi_modal|image")


def of_config(config: Mapping[str, Any], name: str) -> Architecture:
    """Return the architecture of a Hugging Face configuration; ``name`` is for messages.

    Raises:
        DataError: transformers cannot build a causal language model from it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    keys = dict(config)
    kind = keys.pop("model_type", None)
    try:
        built = AutoConfig.for_model(kind, **keys)
        kinds = [
            auto
            for auto in (AutoModelForCausalLM, AutoModelForImageTextToText)
            if type(built) in auto._model_mapping
        ]
        with torch.device("meta"):
            model = (kinds or [AutoModelForCausalLM])[0].from_config(built)  # type: ignore[no-untyped-call]
    except Exception as error:  # model classes raise all kinds of errors for a configuration
        # Some errors begin with lines that only name a validator.
        lines = [
            line.strip()
            for line in str(error).splitlines()
            if line.strip() and not line.endswith(":")
        ]
        reason = (lines or [type(error).__name__])[0].partition(" Should contain")[0].rstrip(".")
        raise DataError(
            f"Cannot plan {name} (model_type {kind!r}), because transformers does not build it: "
            f"{reason}.",
            "Plan its number of parameters: narrowgauge plan run --params.",
        ) from error
    return _architecture(model, built.get_text_config(), name)


def _size(config: Any, *names: str, default: int = 0) -> int:
    values = (getattr(config, name, None) for name in names)
    return int(next((value for value in values if isinstance(value, int) and value), default))


def _architecture(model: Any, config: Any, name: str) -> Architecture:
    """Return the architecture of a model on the meta device, from its modules and parameters."""
    import torch.nn as nn

    total = sum(value.numel() for value in model.parameters())
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    heads = _size(config, "num_attention_heads", "n_head", "num_heads")
    hidden = _size(config, "hidden_size", "n_embd")
    depth = _size(config, "num_hidden_layers", "n_layer", "num_layers")
    modules = dict(model.named_modules())
    lists = ((n, list(m)) for n, m in modules.items() if isinstance(m, nn.ModuleList))
    layers = next(
        (layers for n, layers in lists if len(layers) == depth and not _OUTSIDE.search(n)), []
    )
    is_other = any(_OTHER.search(n) for layer in layers for n, _ in layer.named_parameters())
    is_other |= not _ATTENTION.issuperset(_layer_types(config))
    if is_other or not (layers and heads and embedding is not None and head is not None):
        raise DataError(
            f"Cannot plan {name}, because it is not a decoder of attention layers.",
            f"Plan its state: narrowgauge plan run --params {total}.",
        )

    counts: Counter[Matmul] = Counter()
    for layer in layers:
        counts.update(_matmuls_of(layer, hidden))
    mixture = _mixture(config, counts)
    share = mixture.experts_per_token / mixture.num_experts if mixture else 1.0
    matmuls = [
        replace(m, count=count * m.count, tokens_share=share if m.is_expert else 1.0)
        for m, count in counts.items()
    ]
    vectors = sum(p.numel() for layer in layers for p in layer.parameters()) - sum(
        m.num_parameters for m in matmuls
    )
    has_bias = getattr(head, "bias", None) is not None
    matmuls.append(
        Matmul("lm_head", hidden, head.weight.shape[0], 1, "head", "column", 1.0, has_bias)
    )

    latent = None
    if rank := _size(config, "kv_lora_rank"):
        dims = (_size(config, f"{part}_head_dim") for part in ("qk_nope", "qk_rope", "v"))
        latent = LatentAttention(_size(config, "q_lora_rank") or None, rank, *dims)
    head_dim = _size(config, "head_dim", default=hidden // heads)
    inputs = [
        m
        for m in matmuls
        if m.part == "attention" and m.in_features == hidden and m.split == "column"
    ]
    kv_heads = (sum(m.out_features * m.count for m in inputs) / len(layers) / head_dim - heads) / 2
    if latent or kv_heads < 1:
        kv_heads = _size(config, "num_key_value_heads", default=heads)
    mlp = [m for m in matmuls if m.part in ("mlp", "experts") and m.name != "router"]
    downs = [m for m in mlp if m.split == "row"]
    inner = sum(m.in_features * m.count for m in downs)
    is_gated = sum(m.out_features * m.count for m in mlp if m.split == "column") > 1.5 * inner
    activations = ("hidden_activation", "hidden_act", "activation_function", "activation")
    named = (value for key in activations if isinstance(value := getattr(config, key, None), str))

    inside = dict(layers[0].named_modules())
    head_norms = [m for n, m in inside.items() if _HEAD_NORM.search(n)]
    is_of_all = any(p.numel() > head_dim for m in head_norms for p in m.parameters())
    norms = [
        m
        for n, m in inside.items()
        if "norm" in type(m).__name__.lower() and not _HEAD_NORM.search(n)
    ]
    wide = [
        m
        for m in norms
        if not list(m.parameters()) or max(p.numel() for p in m.parameters()) == hidden
    ]
    tables = (
        m.weight.shape
        for n, m in modules.items()
        if isinstance(m, nn.Embedding) and re.search("wpe|position", n)
    )
    window, window_share = _window(config)
    result = Architecture(
        name,
        len(layers),
        hidden,
        head.weight.shape[0],
        tuple(matmuls),
        vectors,
        outer_vectors=0,
        num_heads=heads,
        num_kv_heads=round(kv_heads),
        query_dim=latent.plain_dim + latent.rotary_dim if latent else head_dim,
        value_dim=latent.value_dim if latent else head_dim,
        intermediate_size=next(
            (m.in_features for m in sorted(downs, key=lambda m: "." in m.name)), 0
        ),
        is_gated=is_gated,
        tie_embeddings=head.weight is embedding.weight,
        positions=sum(rows for rows, columns in tables if columns == hidden),
        norm=_norm_kind(wide or norms),
        norms_per_layer=len(wide),
        head_norms="none" if not head_norms else "all" if is_of_all else "head",
        activation=next(named, "silu" if is_gated else "gelu"),
        has_fused_inputs=len({m.name for m in inputs}) == 1 and not latent,
        window=window,
        window_share=window_share,
        mixture=mixture,
        latent=latent,
        left_out="parts beside the text decoder" if any(map(_OUTSIDE.search, modules)) else "",
    )
    # All parameters not counted yet: final norms, an embedding's norm, a vision tower.
    return replace(result, outer_vectors=total - result.num_parameters)


def _matmuls_of(layer: Any, hidden: int) -> Iterator[Matmul]:
    """Yield the matrices of a layer."""
    parameters = dict(layer.named_parameters())
    weights = {
        n: p
        for n, p in parameters.items()
        if p.ndim in (2, 3) and not re.search(r"norm|bias|conv", n)
    }
    attention = [
        n
        for n, p in weights.items()
        if p.ndim == 2 and re.search(r"attn|attention|mixer", n.rpartition(".")[0])
    ]
    for name, value in weights.items():
        module = name.rpartition(".")[0]
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        part: Part
        split: Split
        if value.ndim == 3:
            width = next((size for size in value.shape[1:] if size != hidden), hidden)
            has_bias = f"{name}_bias" in parameters
            if "down" in leaf or leaf == "w2":
                yield Matmul(
                    f"experts.{leaf}",
                    width,
                    hidden,
                    value.shape[0],
                    "experts",
                    "row",
                    has_bias=has_bias,
                )
                continue
            # Count gate and up as two matmuls, as presets do, so both names of a model give one
            # answer.
            names = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
            sizes = hidden, width // len(names), value.shape[0]
            yield from (
                Matmul(f"experts.{n}", *sizes, "experts", "column", has_bias=has_bias)
                for n in names
            )
            continue
        owner = layer.get_submodule(module)
        out, inner = value.shape[::-1] if "Conv1D" in type(owner).__name__ else value.shape
        part = "attention" if name in attention else "mlp"
        split = "column"
        if part == "attention":
            split = "row" if name == attention[-1] else "none" if "_a_proj" in leaf else "column"
        elif out == hidden and (inner != hidden or "down" in leaf):
            split = "row"
        if "shared" in module:
            leaf = f"shared.{leaf}"
            split = split if min(value.shape) > 1 else "none"
        elif part == "mlp" and re.search(r"gate$|router", module):
            leaf = "router"
            part = "experts"
            split = "none"
        yield Matmul(
            leaf, inner, out, 1, part, split, has_bias=getattr(owner, "bias", None) is not None
        )


def _mixture(config: Any, counts: Counter[Matmul]) -> Mixture | None:
    """Return the experts, from the number of layers with each matrix."""
    downs = [(m, count) for m, count in counts.items() if m.is_expert and m.split == "row"]
    if not downs:
        return None
    down, layers = downs[0]
    shared = sum(m.in_features for m in counts if m.name.startswith("shared.") and m.split == "row")
    return Mixture(
        down.count, _size(config, *_EXPERTS_PER_TOKEN, default=1), down.in_features, layers, shared
    )


def _layer_types(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or []


def _window(config: Any) -> tuple[int | None, float]:
    """Return the attention window (None for all tokens), and the fraction of layers with it."""
    window = _size(config, "sliding_window", "attention_chunk_size", "window_size") or None
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None, 1.0
    kinds = _layer_types(config)
    share = sum(k not in ("full_attention", "global") for k in kinds) / len(kinds) if kinds else 1.0
    return (window, share) if share else (None, 1.0)


def _norm_kind(norms: list[Any]) -> Norm:
    kind = type(norms[0]).__name__ if norms else "RMSNorm"
    if kind.startswith(_FLOAT32_NORMS):
        return "rms-float32"
    return "rms" if "RMS" in kind or kind.startswith("T5") else "layer"
