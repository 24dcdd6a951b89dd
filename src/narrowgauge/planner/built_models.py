"""Read model shapes from a model of transformers, or from its ``config.json``: then it is built on
the meta device, without memory or guesses.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from narrowgauge.errors import DataError, NarrowgaugeError, require_package
from narrowgauge.planner.shapes import Architecture, Layers, WeightShape, parameters_of

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k", "moe_top_k")  # fmt: skip
_WHOLE = {"full_attention", "attention", "global"}
_NEAR = {"sliding_attention", "chunked_attention", "local"}
# Recurrent layers, and attention whose projections are experts.
_OTHER = re.compile(r"A_log|conv_?1d|time_decay|time_mix|attention\.experts")
_NO_MATRIX = re.compile(r"norm|bias|conv|A_log")
_ATTENTION = re.compile(r"(attn|attention|mixer|mamba|temporal).*\.")


def of_config(config: Any, name: str) -> Architecture:
    """Return the architecture of a Hugging Face configuration, or of a model that was built from
    one; ``name`` is for messages.

    Raises:
        DataError: it is not a causal language model of transformers.
    """
    try:
        model = _built(config) if isinstance(config, Mapping) else config
        return _architecture(model, model.config.get_text_config(), name)
    except NarrowgaugeError:
        raise
    except Exception as error:  # classes raise all kinds of errors, also for attributes by layer
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"Cannot plan {name}: {reason}.",
            "Plan a model of transformers or its config.json, name sizes like its own ({'model_type': "
            "'llama', …}), or count its state: narrowgauge show storages.",
        ) from error


def _built(config: Mapping[str, Any]) -> Any:
    """Return the causal language model of a configuration on the meta device."""
    require_package("transformers")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    keys = dict(config)
    built = AutoConfig.for_model(keys.pop("model_type", None), **keys)
    auto: Any = AutoModelForCausalLM
    if type(built) not in auto._model_mapping:
        auto = AutoModelForImageTextToText
    with torch.device("meta"):
        return auto.from_config(built, trust_remote_code=False)


def _size(config: Any, *names: str, default: int = 0) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value:
            return value
    return default


def _total(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _architecture(model: Any, config: Any, name: str) -> Architecture:
    """Return the architecture of a model, from its modules and parameters."""
    hidden = _size(config, "hidden_size", "n_embd")
    heads = _size(config, "num_attention_heads", "n_head", "num_heads")
    kinds = tuple(_kinds(model, config, hidden))
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    has_attention = any(layers.has_attention for layers in kinds)
    if not (has_attention and heads and embedding is not None and head is not None):
        raise DataError(
            f"Cannot plan {name}, because it is not a decoder of attention layers.",
            f"Its {_total(model):,} parameters take the bytes of narrowgauge show storages each.",
        )
    dim = _size(config, "head_dim", default=hidden // heads)
    latent_dim = _size(config, "qk_nope_head_dim") + _size(config, "qk_rope_head_dim")
    result = Architecture(
        name, kinds, hidden, head.weight.shape[0], heads,
        num_kv_heads=_size(config, "num_key_value_heads", "num_kv_heads", default=heads),
        query_dim=latent_dim or dim, value_dim=_size(config, "v_head_dim", default=dim),
        is_latent=latent_dim > 0, tie_embeddings=head.weight is embedding.weight,
    )  # fmt: skip
    return replace(result, outer_vectors=_total(model) - result.num_parameters)


def _kinds(model: Any, config: Any, hidden: int) -> Iterator[Layers]:
    """Yield the kinds of layers of the largest list of modules, with their numbers."""
    from torch import nn

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    modules: Any = max(lists, key=_total, default=[])
    types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    counts: Counter[Layers] = Counter()
    for module, kind in zip(modules, types or [""] * len(modules), strict=True):
        counts[_layer(module, kind, config, hidden)] += 1
    for layers, count in counts.items():
        yield replace(layers, count=count)


def _layer(module: Any, kind: str, config: Any, hidden: int) -> Layers:
    """Return one layer; ``kind`` is its type in the configuration, if it has types."""
    names = [name for name, _ in module.named_parameters()]
    has_attention = any(map(_ATTENTION.search, names)) and not any(map(_OTHER.search, names))
    if kind:
        has_attention = has_attention and kind in _WHOLE | _NEAR
    window = _size(config, "sliding_window", "attention_chunk_size", "window_size") or None
    if kind in _WHOLE or getattr(config, "use_sliding_window", True) is False:
        window = None
    matmuls = []
    for name, value in module.named_parameters():
        if value.ndim in (2, 3) and not _NO_MATRIX.search(name):
            owner = module.get_submodule(name.rpartition(".")[0])
            shape = value.shape[::-1] if "Conv1D" in type(owner).__name__ else value.shape
            matmuls.append(_matmul(name.removesuffix(".weight"), shape, config, hidden))
    vectors = _total(module) - parameters_of(matmuls)
    return Layers(tuple(matmuls), vectors, has_attention=has_attention, window=window)


def _matmul(name: str, shape: Sequence[int], config: Any, hidden: int) -> WeightShape:
    """Return a matrix of a layer. Those of an MLP are named up or down, gates are up."""
    out, inner = shape[-2:]
    leaf = name.rpartition(".")[2]
    if len(shape) == 3:  # one tensor of all experts
        count = shape[0]
        share = _size(config, *_CHOSEN, default=1) / count
        width = inner if out == hidden else out
        if "down" in leaf or leaf == "w2":
            return WeightShape("experts.down_proj", width, hidden, "experts", count, share)
        if leaf == "gate_up_proj":  # two matmuls, as presets have, so both names give one answer
            width //= 2
            count *= 2
        return WeightShape("experts.up_proj", hidden, width, "experts", count, share)
    if _ATTENTION.search(name):
        return WeightShape(leaf, inner, out, "attention")
    if "shared" not in name.rpartition(".")[0] and re.search(r"gate$|router", name):
        return WeightShape("router", inner, out, "experts")
    is_down = out == hidden and (inner != hidden or "down" in leaf)
    return WeightShape("down_proj" if is_down else "up_proj", inner, out, "mlp")
