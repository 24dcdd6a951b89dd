"""Models: the architecture of a preset, a ``config.json``.

A preset answers at once. transformers builds a ``config.json`` on the meta device, without memory.
We read its parameters and guess none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError, RecipeError, require_package, suggestion
from narrowgauge.planner.built_models import of_config
from narrowgauge.planner.shapes import Architecture, Layers, Weight
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.toml import load_data


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
    attention: Sequence[tuple[int, int]] = (),
    vectors: int = 0,
    mixture: Mapping[str, int] | None = None,
    **fields: Any,
) -> Architecture:
    """Return a usual decoder: layers of attention and an MLP (or a mixture) between an embedding
    and a head.

    Args:
        num_kv_heads: 0 for the number of heads; head_dim: 0 for width over heads;
            intermediate_size: 0 for four times the width.
        has_biases: all matmuls but the head have biases, and norms too.
        attention: inputs and outputs of its projections; empty for those of queries, keys, values
            and outputs.
        vectors: parameters of a layer's norms beside those of its width.
        mixture: ``num_experts``, ``experts_per_token``, ``expert_size``, ``shared_size`` of the
            experts that every token visits, and the number of ``dense_layers`` with an MLP instead.
        fields: further fields of :class:`Architecture`.
    """
    kv_heads = num_kv_heads or num_heads
    dim = head_dim or hidden_size // num_heads
    if not attention:
        attention = [(hidden_size, heads * dim) for heads in (num_heads, kv_heads, kv_heads)]
        attention.append((num_heads * dim, hidden_size))
    mixer = [Weight("attention", inner, out, "attention") for inner, out in attention]
    vectors += 2 * hidden_size
    ups = 1 + is_gated
    dense = mixer + _mlp(hidden_size, intermediate_size or 4 * hidden_size, ups)
    if has_biases:
        vectors += 2 * hidden_size + sum(weight.out_features for weight in dense)
    layers = [Layers(tuple(dense), vectors, num_layers)]
    if mixture:
        experts = mixture["num_experts"]
        sparse = [*mixer, Weight("router", hidden_size, experts, "experts")]
        for weight in _mlp(hidden_size, mixture["expert_size"], ups):
            share = mixture["experts_per_token"] / experts
            sizes = weight.in_features, weight.out_features
            sparse.append(Weight(f"experts.{weight.name}", *sizes, "experts", experts, share))
        if mixture["shared_size"]:
            sparse += _mlp(hidden_size, mixture["shared_size"], ups)
        count = mixture["dense_layers"]
        layers = [Layers(tuple(sparse), vectors, num_layers - count)]
        if count:
            layers.insert(0, Layers(tuple(dense), vectors, count))
    return Architecture(
        name, tuple(layers), hidden_size, num_heads=num_heads, num_kv_heads=kv_heads,
        outer_vectors=hidden_size * (1 + has_biases), **{"query_dim": dim, "value_dim": dim, **fields},
    )  # fmt: skip


def _mlp(hidden_size: int, size: int, ups: int) -> list[Weight]:
    up = Weight("up_proj", hidden_size, size, "mlp")
    return [up] * ups + [Weight("down_proj", size, hidden_size, "mlp")]


_PRESETS: dict[str, Any] = load_data("presets", "planner")
PRESET_NAMES = tuple(_PRESETS["models"])
"""The presets that the trainer does not build."""
_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size", "vocab_size",
          "tie_embeddings")  # fmt: skip


def _preset(name: str) -> dict[str, Any]:
    """Return the arguments of :func:`decoder` for a preset; none for another name."""
    if name not in MODELS:
        row = {**_PRESETS["models"].get(name, {})}
        family = _PRESETS["families"].get(row.pop("like", ""), {})
        return {**family, **row}
    model = MODELS[name]
    row = {size: getattr(model, size) for size in _SIZES}
    if model.family == "gpt2":
        row = {**_PRESETS["families"]["gpt"], **row, "positions": model.max_positions}
    return row


def read_model(model: Any) -> Architecture:
    """Return the architecture of a preset (``narrowgauge show models``), a Hugging Face model
    folder, a ``config.json``, or a model that transformers built.

    Example:
        >>> read_model("mixtral-8x7b").num_parameters
        46702792704
    """
    if not isinstance(model, str | Path):
        return of_config(model, type(model).__name__)
    text = str(model)
    key = text.strip().lower()
    row = _preset(key)
    if row:
        return decoder(key, **row)
    file = Path(text).expanduser()
    if file.is_dir():
        file = file / "config.json"
    if not key or not file.is_file():
        near = suggestion(key, (*MODELS, *PRESET_NAMES))
        advice = "narrowgauge plan run --help names the presets; hf download ORG/NAME config.json prints a path."
        raise RecipeError(f"no model and no config.json is named {text!r}.", near or advice)
    try:
        config = {**json.loads(file.read_bytes())}
    except (OSError, TypeError, ValueError) as error:
        advice = "It must be a Hugging Face config.json."
        raise DataError(f"Cannot read {file}: {error}.", advice) from error
    require_package("transformers")
    return of_config(config, text)
