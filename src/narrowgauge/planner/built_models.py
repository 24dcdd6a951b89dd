"""Read model shapes from a ``config.json``: transformers builds the model on the meta device,
without memory or guesses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from narrowgauge.errors import DataError, NarrowgaugeError
from narrowgauge.planner.shapes import (
    Architecture,
    LatentAttention,
    Layers,
    Mixture,
    Split,
    Weight,
)

_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "top_k",
    "moe_top_k",
)
_WHOLE = {"full_attention", "attention", "global"}
_NEAR = {"sliding_attention", "chunked_attention", "local"}
# Recurrent layers, and attention whose projections are experts.
_OTHER = re.compile(r"A_log|conv_?1d|time_decay|time_mix|attention\.experts")
_NO_MATRIX = re.compile(r"norm|bias|conv|A_log")
_ATTENTION = re.compile(r"(attn|attention|mixer|mamba|temporal).*\.")


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
    rows = _kinds(model, config, hidden)
    attention = next((row for row in rows if row[1].has_attention), None)
    if not (attention and heads and embedding is not None and head is not None):
        raise DataError(
            f"Cannot plan {name}, because it is not a decoder of attention layers.",
            f"Count its state: narrowgauge show storages --params {total}.",
        )
    counts = Counter(layers for _, layers in rows)
    kinds = tuple(layers.times(count) for layers, count in counts.items())
    fields = _attention_fields(config, attention[1], kinds)
    result = Architecture(
        name,
        kinds,
        hidden,
        head.weight.shape[0],
        is_gated=_is_gated(kinds),
        tie_embeddings=head.weight is embedding.weight,
        positions=_positions(model, hidden),
        **fields,
    )
    return with_all(result, total)


def _kinds(model: Any, config: Any, hidden: int) -> list[tuple[Any, Layers]]:
    """Return the decoder's layers: each module, and what it is."""
    from torch import nn

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    modules: Any = max(lists, key=lambda layers: _total(layers.parameters()), default=[])
    types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    rows = []
    for module, kind in zip(modules, types or [""] * len(modules), strict=True):
        rows.append((module, _layer(module, kind, config, hidden)))
    return rows


def _positions(model: Any, hidden: int) -> int:
    """Count the learned positions."""
    positions = 0
    for path, module in model.named_modules():
        if type(module).__name__.endswith("Embedding") and re.search("wpe|position", path):
            rows, columns = module.weight.shape
            positions += rows * (columns == hidden)
    return positions


def _attention_fields(config: Any, layer: Layers, kinds: Sequence[Layers]) -> dict[str, Any]:
    """Return the fields of an architecture that describe its attention; ``layer`` has it."""
    heads = _size(config, "num_attention_heads", "n_head", "num_heads")
    hidden = _size(config, "hidden_size", "n_embd")
    head_dim = _size(config, "head_dim", default=hidden // heads)
    fields: dict[str, Any] = {"num_heads": heads, "query_dim": head_dim, "value_dim": head_dim}
    outputs = 0  # of the projections of attention's input
    for matmul in layer.matmuls:
        if (matmul.part, matmul.split, matmul.in_features) == ("attention", "column", hidden):
            outputs += matmul.out_features * matmul.count
    rank = _size(config, "kv_lora_rank")
    if rank:
        plain = _size(config, "qk_nope_head_dim")
        rotary = _size(config, "qk_rope_head_dim")
        value_dim = _size(config, "v_head_dim")
        query_rank = _size(config, "q_lora_rank") or None
        fields["latent"] = LatentAttention(query_rank, rank, plain, rotary, value_dim)
        fields |= {"query_dim": plain + rotary, "value_dim": value_dim}
    kv_heads = (outputs / head_dim - heads) / 2
    if rank or kv_heads < 1 or not all(layers.has_attention for layers in kinds):
        kv_heads = _size(config, "num_key_value_heads", default=heads)
    fields["num_kv_heads"] = round(kv_heads)
    return fields


def with_all(result: Architecture, total: int) -> Architecture:
    """Return an architecture that counts ``total`` parameters.

    What is not counted yet is outside the layers: final norms, an embedding's norm, a vision tower.
    """
    return replace(result, outer_vectors=result.outer_vectors + total - result.num_parameters)


def _layer(module: Any, kind: str, config: Any, hidden: int) -> Layers:
    """Return one layer; ``kind`` is its type in the configuration, if it has types."""
    names = [name for name, _ in module.named_parameters()]
    has_attention = any(map(_ATTENTION.search, names)) and not any(map(_OTHER.search, names))
    if kind:
        has_attention = has_attention and kind in _WHOLE | _NEAR
    counts: Counter[Weight] = Counter()
    for weight in _matmuls_of(module, config, hidden):
        counts[weight] += weight.count
    matmuls = []
    for weight, count in counts.items():
        matmul = replace(weight, count=count)
        if matmul.part == "attention" and not has_attention:
            matmul = replace(matmul, split="none")
        matmuls.append(matmul)
    vectors = _total(module.parameters()) - sum(matmul.num_parameters for matmul in matmuls)
    window = _size(config, "sliding_window", "attention_chunk_size", "window_size") or None
    if kind in _WHOLE or getattr(config, "use_sliding_window", True) is False:
        window = None
    layer = Layers(1, tuple(matmuls), vectors, has_attention, window)
    return _with_inner(layer)


def _with_inner(layer: Layers) -> Layers:
    """Return a layer with the sizes of its MLP or of its experts."""
    downs = [matmul for matmul in layer.matmuls if matmul.split == "row"]
    shared = [down for down in downs if down.name.startswith("shared.")]
    dense = [down for down in downs if down.part == "mlp" and down not in shared]
    experts = next((down for down in downs if down.is_expert), None)
    mixture = None
    if experts:
        chosen = round(experts.tokens_share * experts.count)
        shared_size = sum(down.in_features for down in shared)
        mixture = Mixture(experts.count, chosen, experts.in_features, shared_size)
    return replace(layer, inner_size=dense[0].in_features if dense else 0, mixture=mixture)


def _matmuls_of(layer: Any, config: Any, hidden: int) -> Iterator[Weight]:
    """Yield the matrices of a layer."""
    parameters = dict(layer.named_parameters())
    weights = {}
    output = ""  # the last projection of attention
    for name, value in parameters.items():
        if value.ndim in (2, 3) and not _NO_MATRIX.search(name):
            weights[name] = value
            if value.ndim == 2 and _ATTENTION.search(name):
                output = name
    for name, value in weights.items():
        module = name.rpartition(".")[0]
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if value.ndim == 3:
            chosen = _size(config, *_EXPERTS_PER_TOKEN, default=1)
            has_bias = f"{name}_bias" in parameters
            for weight in _expert_matmuls(leaf, value.shape, hidden, has_bias):
                yield replace(weight, tokens_share=chosen / weight.count)
            continue
        owner = layer.get_submodule(module)
        has_bias = getattr(owner, "bias", None) is not None
        out, inner = value.shape
        if "Conv1D" in type(owner).__name__:
            inner, out = value.shape
        matmul = Weight(leaf, inner, out, 1, "mlp", "column", has_bias=has_bias)
        if _ATTENTION.search(name):
            matmul = replace(matmul, part="attention")
            if name == output:
                matmul = replace(matmul, split="row")
            elif "_a_proj" in leaf:
                matmul = replace(matmul, split="none")
        elif out == hidden and (inner != hidden or "down" in leaf):
            matmul = replace(matmul, split="row")
        yield _of_mixture(matmul, module)


def _of_mixture(matmul: Weight, module: str) -> Weight:
    """Return a matrix as a router or a shared expert if its module is one."""
    if "shared" in module:
        is_vector = 1 in (matmul.in_features, matmul.out_features)
        split = "none" if is_vector else matmul.split
        return replace(matmul, name=f"shared.{matmul.name}", split=split)
    if matmul.part == "mlp" and re.search(r"gate$|router", module):
        return replace(matmul, name="router", part="experts", split="none")
    return matmul


def _expert_matmuls(leaf: str, shape: Any, hidden: int, has_bias: bool) -> Iterator[Weight]:
    """Yield the matrices of one tensor of all experts of a layer."""
    count, *sides = shape
    width = next((side for side in sides if side != hidden), hidden)
    # Count gate and up as two matmuls, as presets do, so both names of a model give one answer.
    names = [leaf]
    if leaf == "gate_up_proj":
        names = ["gate_proj", "up_proj"]
        width //= 2
    split: Split = "column"
    ends = hidden, width
    if "down" in leaf or leaf == "w2":
        split = "row"
        ends = width, hidden
    for name in names:
        yield Weight(f"experts.{name}", *ends, count, "experts", split, has_bias=has_bias)


def _is_gated(kinds: Iterable[Layers]) -> bool:
    """Tell whether MLPs have about twice as many outputs of gate and up as inputs of down."""
    wide = inner = 0
    for layers in kinds:
        for matmul in layers.matmuls:
            if matmul.part != "attention":
                wide += matmul.count * matmul.out_features * (matmul.split == "column")
                inner += matmul.count * matmul.in_features * (matmul.split == "row")
    return wide > 1.5 * inner
