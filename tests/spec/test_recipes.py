"""Recipes: the tables' figures, contradictions, and what a recipe says of each name."""

from __future__ import annotations

from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

LINEARS = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "lm_head"]


def computes_of(recipe: Recipe) -> list[str]:
    return [recipe.compute_of(name, is_kept=name == "lm_head").name for name in LINEARS]


def test_what_stays_wide_is_a_plain_layer_of_the_models_dtype() -> None:
    assert computes_of(parse("float8-row/word")) == ["float8-row", "float8-row", "bfloat16"]
    assert computes_of(parse("float16/split")) == ["float16"] * 3
