"""Models: the architecture of a preset, a ``config.json``.

A preset of the trainer answers at once. transformers builds a configuration on the meta device,
without memory. We read its parameters and guess none.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError, RecipeError, suggestion
from narrowgauge.planner.built_models import of_config
from narrowgauge.planner.shapes import Architecture, Layers, WeightShape
from narrowgauge.spec.models import MODELS, Model
from narrowgauge.spec.toml import load_data

CONFIGS = load_data("presets", "planner")
"""Configurations of transformers by the name of a preset that the trainer does not build."""


def of_preset(row: Model) -> Architecture:
    """Return the architecture of a decoder that ``narrowgauge train`` builds."""
    hidden = row.hidden_size
    dim = hidden // row.num_heads
    widths = row.num_heads * dim, row.num_kv_heads * dim
    has_biases = row.family == "gpt2"
    matmuls = [
        WeightShape("attention", hidden, width, "attention") for width in (*widths, widths[1])
    ]
    matmuls.append(WeightShape("attention", widths[0], hidden, "attention"))
    matmuls.append(
        WeightShape("up_proj", hidden, row.intermediate_size, "mlp", 1 if has_biases else 2)
    )
    matmuls.append(WeightShape("down_proj", row.intermediate_size, hidden, "mlp"))
    vectors = 2 * hidden
    if has_biases:
        vectors += 2 * hidden + sum(weight.out_features for weight in matmuls)
    return Architecture(
        row.name, (Layers(tuple(matmuls), vectors, row.num_layers),), hidden, row.vocab_size,
        row.num_heads, row.num_kv_heads, dim, dim, outer_vectors=hidden * (1 + has_biases),
        tie_embeddings=row.tie_embeddings, positions=row.max_positions * has_biases,
    )  # fmt: skip


def read_model(model: Any) -> Architecture:
    """Return the architecture of a preset (``narrowgauge show models``), a Hugging Face model
    folder, a ``config.json`` or its values, or a model that transformers built.

    Example:
        >>> read_model("llama-8b").num_parameters
        8030261248
    """
    if isinstance(model, Architecture):
        return model
    if not isinstance(model, str | Path):
        return of_config(model, type(model).__name__)
    text = str(model)
    key = text.strip().lower()
    if key in MODELS:
        return of_preset(MODELS[key])
    if key in CONFIGS:
        return _of_named(key)
    file = Path(text).expanduser()
    if file.is_dir():
        file = file / "config.json"
    if not key or not file.is_file():
        near = suggestion(key, (*MODELS, *CONFIGS))
        advice = "narrowgauge plan run --help names the presets; hf download ORG/NAME config.json prints a path."
        raise RecipeError(f"no model and no config.json is named {text!r}.", near or advice)
    try:
        config = {**json.loads(file.read_bytes())}
    except (OSError, TypeError, ValueError) as error:
        advice = "It must be a Hugging Face config.json."
        raise DataError(f"Cannot read {file}: {error}.", advice) from error
    return of_config(config, text)


@lru_cache
def _of_named(name: str) -> Architecture:
    return of_config(CONFIGS[name], name)
