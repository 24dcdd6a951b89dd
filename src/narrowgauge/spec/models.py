"""The preset models: names, shapes and parameter counts.

A preset is the shape of a decoder. Its family's Hugging Face class draws the weights, so nothing is
downloaded. The small Llamas are Narrowgauge's. They are named by size, and their matrices suit
narrow formats (widths are multiples of 32, heads are of 32 or 64). The large models have published
shapes.
"""

from dataclasses import dataclass

from narrowgauge.spec.require import unknown
from narrowgauge.spec.toml import load_rows


@dataclass(frozen=True)
class Model:
    """One decoder's shape.

    Attributes:
        family: ``llama`` (rotary positions, RMS norms, gated MLP, no biases) or ``gpt2`` (learned
            positions, layer norms, biases).
        num_parameters: the exact number; a tied embedding counts once.
        vocab_size, max_positions: in tokens.
        hidden_size, intermediate_size: widths of the residual stream and of the MLP.
        num_kv_heads: fewer key-value heads than heads is grouped-query attention.
        tie_embeddings: whether the input embedding is also the output projection.
        rope_theta: base of the rotary frequencies; None without rotary positions.
        source: where the shape is published.
    """

    name: str
    num_parameters: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_positions: int
    family: str = "llama"
    tie_embeddings: bool = False
    source: str = "Narrowgauge"
    rope_theta: float | None = None


MODELS = load_rows(Model, "models")


def get_model(name: str) -> Model:
    """Return the preset of that name.

    Raises:
        RecipeError: no preset has that name.
    """
    key = name.strip().lower()
    if key not in MODELS:
        raise unknown("model", key, MODELS)
    return MODELS[key]
