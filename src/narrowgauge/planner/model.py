"""Models: the architecture of a preset, a ``config.json`` or a model of the hub's cache.

A preset answers at once. transformers builds a ``config.json`` on the meta device, without memory.
We read its parameters and guess none.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError, RecipeError, require_package, suggestion
from narrowgauge.planner.built_models import of_config
from narrowgauge.planner.shapes import Architecture, Layers, Weight
from narrowgauge.spec.models import MODELS, refuse_own_code
from narrowgauge.spec.toml import load_data


def _mlp(inner: int, size: int, gates: int, prefix: str = "", **fields: Any) -> list[Weight]:
    up = Weight(f"{prefix}up_proj", inner, size, fields.pop("part", "mlp"), **fields)
    down = replace(up, name=f"{prefix}down_proj", in_features=size, out_features=inner)
    return [up] * gates + [down]


def decoder(
    name: str,
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int = 0,
    head_dim: int = 0,
    intermediate_size: int = 0,
    is_gated: bool = True,
    has_biases: bool = False,
    has_head_norms: bool = False,
    mixture: Mapping[str, int] | None = None,
    latent: Mapping[str, int] | None = None,
    **fields: Any,
) -> Architecture:
    """Return a usual decoder: layers of attention and an MLP (or a mixture) between an embedding
    and a head.

    Args:
        num_kv_heads: 0 for the number of heads; head_dim: 0 for width over heads;
            intermediate_size: 0 for four times the width.
        has_biases: all matmuls but the head have biases, and norms too.
        has_head_norms: queries and keys have norms, a gain for each dimension of a head.
        mixture: ``num_experts``, ``experts_per_token``, ``expert_size``, and ``shared_size`` of the
            experts that every token visits. The first ``dense_layers`` have an MLP instead.
        latent: ``query_rank``, ``key_value_rank``, and ``plain_dim``, ``rotary_dim``, ``value_dim``
            of a head.
        fields: further fields of :class:`Architecture`.
    """
    kv_heads = num_kv_heads or num_heads
    query_dim = value_dim = head_dim or hidden_size // num_heads
    vectors = 2 * hidden_size + 2 * query_dim * has_head_norms
    sizes = [(hidden_size, heads * query_dim) for heads in (num_heads, kv_heads, kv_heads)]
    if latent:
        query_rank = latent["query_rank"]
        rank = latent["key_value_rank"]
        value_dim = latent["value_dim"]
        query_dim = latent["plain_dim"] + latent["rotary_dim"]
        vectors += query_rank + rank
        sizes = [
            (hidden_size, query_rank),
            (query_rank, num_heads * query_dim),
            (hidden_size, rank + latent["rotary_dim"]),
            (rank, num_heads * (latent["plain_dim"] + value_dim)),
        ]
    sizes.append((num_heads * value_dim, hidden_size))
    attention = [Weight("attention", inner, out, "attention") for inner, out in sizes]
    size = intermediate_size or 4 * hidden_size
    gates = 1 + is_gated
    dense = (*attention, *_mlp(hidden_size, size, gates))
    if has_biases:
        vectors += 2 * hidden_size + sum(weight.out_features for weight in dense)
    row = mixture or {"dense_layers": num_layers}
    dense_layers = row.get("dense_layers", 0)
    kinds = [Layers(dense, vectors, dense_layers, size)] if dense_layers else []
    if mixture:
        experts = row["num_experts"]
        chosen = row["experts_per_token"]
        shared_size = row.get("shared_size", 0)
        matmuls = [*attention, Weight("router", hidden_size, experts, "experts")]
        matmuls += _mlp(
            hidden_size, row["expert_size"], gates, "experts.",
            part="experts", count=experts, tokens_share=chosen / experts,
        )  # fmt: skip
        if shared_size:
            matmuls += _mlp(hidden_size, shared_size, gates, "shared.")
        inner = chosen * row["expert_size"] + shared_size
        count = num_layers - dense_layers
        kinds.append(Layers(tuple(matmuls), vectors, count, inner, experts, chosen))
    return Architecture(
        name, tuple(kinds), hidden_size,
        num_heads=num_heads, num_kv_heads=kv_heads, query_dim=query_dim, value_dim=value_dim,
        outer_vectors=hidden_size * (1 + has_biases), is_gated=is_gated, is_latent=bool(latent),
        **fields,
    )  # fmt: skip


_PRESETS: dict[str, Any] = load_data("presets", "planner")
PRESET_NAMES = tuple(_PRESETS["models"])
"""The presets that the trainer does not build."""
_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size", "vocab_size",
          "tie_embeddings")  # fmt: skip


def _preset(name: str) -> Mapping[str, Any] | None:
    """Return the arguments of :func:`decoder` for a preset, None for another name."""
    if name not in MODELS:
        row = _PRESETS["models"].get(_PRESETS["aliases"].get(name, name))
        return row and {**_PRESETS["families"][row.get("like", "llama")], **row}
    model = MODELS[name]
    row = {size: getattr(model, size) for size in _SIZES}
    if model.family == "gpt2":
        row = {**_PRESETS["families"]["gpt"], **row, "positions": model.max_positions}
    return row


def read_model(text: str) -> Architecture:
    """Return the architecture of a preset (``narrowgauge show models``), a Hugging Face model
    folder or a ``config.json``.

    Example:
        >>> read_model("mixtral-8x7b").num_parameters
        46702792704
    """
    key = text.strip().lower()
    row = _preset(key)
    if row is not None:
        sizes = {name: value for name, value in row.items() if name not in ("like", "source")}
        return decoder(_PRESETS["aliases"].get(key, key), **sizes)
    path = Path(text).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", text) and not path.exists():
        require_package("transformers")
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # no name of the hub
            file = Path(str(try_to_load_from_cache(text, "config.json")))
    if not key or not file.is_file():
        near = suggestion(key, (*MODELS, *PRESET_NAMES))
        advice = "narrowgauge plan run --help names the presets. hf download ORG/NAME config.json caches one of the hub."
        raise RecipeError(f"no model and no config.json is named {text!r}.", near or advice)
    try:
        config = {**json.loads(file.read_bytes())}
    except (OSError, TypeError, ValueError, RecursionError) as error:
        advice = "It must be a Hugging Face config.json."
        raise DataError(f"Cannot read {file}: {error}.", advice) from error
    refuse_own_code(file)
    require_package("transformers")
    return of_config(config, str(path))
