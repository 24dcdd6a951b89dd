"""Read model shapes from a ``config.json``: transformers builds the model on the meta device,
without memory or guesses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from narrowgauge.errors import DataError, NarrowgaugeError
from narrowgauge.planner.shapes import (
    Architecture,
    LatentAttention,
    Matmul,
    Mixture,
    Norm,
)

_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "top_k",
    "moe_top_k",
)
_ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation")
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
_NO_MATRIX = re.compile(r"norm|bias|conv")


def of_config(config: Mapping[str, Any], name: str) -> Architecture:
    """Return the architecture of a Hugging Face configuration; ``name`` is for messages.

    Raises:
        DataError: transformers cannot build a causal language model from it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    keys = dict(config)
    kind = keys.pop("model_type", None)
    why = "transformers does not build it"
    try:
        built = AutoConfig.for_model(kind, **keys)
        auto: Any = AutoModelForCausalLM
        is_text = type(built) in AutoModelForCausalLM._model_mapping
        if not is_text and type(built) in AutoModelForImageTextToText._model_mapping:
            auto = AutoModelForImageTextToText
        with torch.device("meta"):
            model = auto.from_config(built)
        why = "its layers differ"
        return _architecture(model, built.get_text_config(), name)
    except NarrowgaugeError:
        raise
    except Exception as error:  # classes raise all kinds of errors, also for attributes by layer
        raise DataError(
            f"Cannot plan {name} (model_type {kind!r}), because {why}: {_reason(error)}.",
            "Count its state: narrowgauge show storages --params.",
        ) from error


def _reason(error: Exception) -> str:
    """Return the first line of an error that does not only name a validator."""
    for line in str(error).splitlines():
        if line.strip() and not line.endswith(":"):
            return line.strip().partition(" Should contain")[0].rstrip(".")
    return type(error).__name__


def _size(config: Any, *names: str, default: int = 0) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value:
            return int(value)
    return default


def _total(parameters: Iterable[Any]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _architecture(model: Any, config: Any, name: str) -> Architecture:
    """Return the architecture of a model on the meta device, from its modules and parameters."""
    total = _total(model.parameters())
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    heads = _size(config, "num_attention_heads", "n_head", "num_heads")
    hidden = _size(config, "hidden_size", "n_embd")
    kinds = _layer_types(config)
    depth = _size(config, "num_hidden_layers", "n_layer", "num_layers")
    is_other = [kind not in _ATTENTION for kind in kinds] or [False] * depth
    layers = _layers(model, depth, is_hybrid=any(is_other) and not all(is_other))
    if not (layers and heads and embedding is not None and head is not None):
        raise DataError(
            f"Cannot plan {name}, because it is not a decoder of attention layers.",
            f"Count its state: narrowgauge show storages --params {total}.",
        )
    counts: Counter[Matmul] = Counter()
    vectors = 0
    for layer, other in zip(layers, is_other, strict=True):
        for matmul in _matmuls_of(layer, hidden):
            if other and matmul.part == "attention":
                matmul = replace(matmul, name=f"mixer.{matmul.name}", split="none")
            counts[matmul] += 1
        vectors += _total(layer.parameters())
    mixture = _mixture(config, counts)
    matmuls = []
    for matmul, count in counts.items():
        all_layers = replace(matmul, count=count * matmul.count)
        vectors -= all_layers.num_parameters
        if mixture and matmul.is_expert:
            share = mixture.experts_per_token / mixture.num_experts
            all_layers = replace(all_layers, tokens_share=share)
        matmuls.append(all_layers)
    head_dim = _size(config, "head_dim", default=hidden // heads)
    query_dim = value_dim = head_dim
    latent = None
    rank = _size(config, "kv_lora_rank")
    if rank:
        query_rank = _size(config, "q_lora_rank") or None
        plain = _size(config, "qk_nope_head_dim")
        rotary = _size(config, "qk_rope_head_dim")
        value_dim = _size(config, "v_head_dim")
        query_dim = plain + rotary
        latent = LatentAttention(query_rank, rank, plain, rotary, value_dim)
    inputs = set()
    outputs = 0  # of the projections of attention's input
    inner = wide = 0  # inputs of down projections, outputs of gates and up projections
    downs = []
    for matmul in matmuls:
        is_column = matmul.split == "column"
        if matmul.name.startswith("mixer."):
            continue
        if matmul.part == "attention":
            if is_column and matmul.in_features == hidden:
                inputs.add(matmul.name)
                outputs += matmul.out_features * matmul.count
        elif is_column:
            wide += matmul.out_features * matmul.count
        elif matmul.split == "row":
            inner += matmul.in_features * matmul.count
            downs.append(matmul)
    kv_heads = (outputs / is_other.count(False) / head_dim - heads) / 2
    if latent or kv_heads < 1 or any(is_other):
        kv_heads = _size(config, "num_key_value_heads", default=heads)
    # A dense MLP's size comes before that of experts.
    downs.sort(key=lambda matmul: "." in matmul.name)
    is_gated = wide > 1.5 * inner
    activation = "silu" if is_gated else "gelu"
    for key in reversed(_ACTIVATIONS):
        value = getattr(config, key, None)
        if isinstance(value, str):
            activation = value
    positions = 0
    is_beside = False
    for path, module in model.named_modules():
        is_beside = is_beside or bool(_OUTSIDE.search(path))
        if type(module).__name__.endswith("Embedding") and re.search("wpe|position", path):
            rows, columns = module.weight.shape
            if columns == hidden:
                positions += rows
    norm, norms_per_layer, head_norms = _norms(layers[is_other.index(False)], hidden, head_dim)
    window, window_share = _window(config, kinds)
    has_bias = getattr(head, "bias", None) is not None
    vocab = head.weight.shape[0]
    matmuls.append(Matmul("lm_head", hidden, vocab, 1, "head", "column", 1.0, has_bias))
    result = Architecture(
        name,
        len(layers),
        hidden,
        vocab,
        tuple(matmuls),
        vectors,
        outer_vectors=0,
        num_heads=heads,
        num_kv_heads=round(kv_heads),
        query_dim=query_dim,
        value_dim=value_dim,
        intermediate_size=downs[0].in_features if downs else 0,
        is_gated=is_gated,
        tie_embeddings=head.weight is embedding.weight,
        positions=positions,
        norm=norm,
        norms_per_layer=norms_per_layer,
        head_norms=head_norms,
        activation=activation,
        has_fused_inputs=len(inputs) == 1 and not latent,
        window=window,
        window_share=window_share,
        mixture=mixture,
        latent=latent,
        left_out="parts beside the text decoder" if is_beside else "",
        num_attention_layers=is_other.count(False) if any(is_other) else None,
    )
    return with_all(result, total)


def with_all(result: Architecture, total: int) -> Architecture:
    """Return an architecture that counts ``total`` parameters.

    What is not counted yet is outside the layers: final norms, an embedding's norm, a vision tower.
    """
    return replace(result, outer_vectors=result.outer_vectors + total - result.num_parameters)


def _layers(model: Any, depth: int, *, is_hybrid: bool) -> list[Any]:
    """Return the decoder's layers; empty if no layer is one of attention."""
    import torch.nn as nn

    for path, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and len(module) == depth
        if is_list and not _OUTSIDE.search(path):
            names = dict(module.named_parameters())
            if is_hybrid or not any(map(_OTHER.search, names)):
                return list(module)
            break
    return []


def _matmuls_of(layer: Any, hidden: int) -> Iterator[Matmul]:
    """Yield the matrices of a layer."""
    parameters = dict(layer.named_parameters())
    weights = {}
    output = ""  # the last projection of attention
    for name, value in parameters.items():
        if value.ndim in (2, 3) and not _NO_MATRIX.search(name):
            weights[name] = value
            if value.ndim == 2 and _is_attention(name):
                output = name
    for name, value in weights.items():
        module = name.rpartition(".")[0]
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if value.ndim == 3:
            yield from _expert_matmuls(leaf, value.shape, hidden, f"{name}_bias" in parameters)
            continue
        owner = layer.get_submodule(module)
        has_bias = getattr(owner, "bias", None) is not None
        out, inner = value.shape
        if "Conv1D" in type(owner).__name__:
            inner, out = value.shape
        matmul = Matmul(leaf, inner, out, 1, "mlp", "column", has_bias=has_bias)
        if _is_attention(name):
            matmul = replace(matmul, part="attention")
            if name == output:
                matmul = replace(matmul, split="row")
            elif "_a_proj" in leaf:
                matmul = replace(matmul, split="none")
        elif out == hidden and (inner != hidden or "down" in leaf):
            matmul = replace(matmul, split="row")
        if "shared" in module:
            matmul = replace(matmul, name=f"shared.{leaf}")
            if min(value.shape) == 1:
                matmul = replace(matmul, split="none")
        elif matmul.part == "mlp" and re.search(r"gate$|router", module):
            matmul = replace(matmul, name="router", part="experts", split="none")
        yield matmul


def _is_attention(name: str) -> bool:
    return re.search(r"attn|attention|mixer", name.rpartition(".")[0]) is not None


def _expert_matmuls(leaf: str, shape: Any, hidden: int, has_bias: bool) -> Iterator[Matmul]:
    """Yield the matrices of one tensor of all experts of a layer."""
    count, *sides = shape
    width = next((side for side in sides if side != hidden), hidden)
    if "down" in leaf or leaf == "w2":
        yield Matmul(f"experts.{leaf}", width, hidden, count, "experts", "row", 1.0, has_bias)
        return
    # Count gate and up as two matmuls, as presets do, so both names of a model give one answer.
    names = [leaf]
    if leaf == "gate_up_proj":
        names = ["gate_proj", "up_proj"]
        width //= 2
    for name in names:
        yield Matmul(f"experts.{name}", hidden, width, count, "experts", "column", 1.0, has_bias)


def _mixture(config: Any, counts: Counter[Matmul]) -> Mixture | None:
    """Return the experts, from the number of layers with each matrix."""
    shared = 0
    first = None
    for matmul, layers in counts.items():
        if matmul.split == "row" and matmul.name.startswith("shared."):
            shared += matmul.in_features
        elif matmul.split == "row" and matmul.is_expert and first is None:
            first = matmul, layers
    if first is None:
        return None
    down, layers = first
    chosen = _size(config, *_EXPERTS_PER_TOKEN, default=1)
    return Mixture(down.count, chosen, down.in_features, layers, shared)


def _layer_types(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or []


def _window(config: Any, kinds: list[str]) -> tuple[int | None, float]:
    """Return the attention window (None for all tokens), and the fraction of layers with it."""
    window = _size(config, "sliding_window", "attention_chunk_size", "window_size")
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None, 1.0
    if not kinds:
        return window, 1.0
    near = sum(kind not in ("full_attention", "global") for kind in kinds)
    if not near:
        return None, 1.0
    return window, near / len(kinds)


def _norms(layer: Any, hidden: int, head_dim: int) -> tuple[Norm, int, Any]:
    """Return the kind of a layer's norms, those of the stream's width, and norms of heads."""
    norms = []
    wide = []
    head_norms = "none"
    for name, module in layer.named_modules():
        sizes = [parameter.numel() for parameter in module.parameters()]
        if _HEAD_NORM.search(name):
            is_of_all = head_norms == "all" or max(sizes, default=0) > head_dim
            head_norms = "all" if is_of_all else "head"
        elif "norm" in type(module).__name__.lower():
            norms.append(module)
            if max(sizes, default=hidden) == hidden:
                wide.append(module)
    kind = type((wide or norms)[0]).__name__ if norms else "RMSNorm"
    norm: Norm = "layer"
    if kind.startswith(_FLOAT32_NORMS):
        norm = "rms-float32"
    elif "RMS" in kind or kind.startswith("T5"):
        norm = "rms"
    return norm, len(wide), head_norms
