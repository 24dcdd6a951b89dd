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


def test_the_last_override_that_names_a_layer_wins_over_what_the_row_keeps() -> None:
    table = {
        "recipe": "float8-row/word",
        "override": [
            {"pattern": "*.mlp.*", "compute": "int8-row"},
            {"pattern": "*.down_proj", "compute": "bf16"},
            {"pattern": "lm_head", "compute": "mxfp8"},
        ],
    }
    recipe = parse(table)
    assert computes_of(recipe) == ["int8-row", "bfloat16", "mxfp8"]
    assert recipe.compute_of("model.layers.0.self_attn.q_proj").name == "float8-row"
    assert parse(recipe.to_value()) == recipe
    assert [row.name for row in recipe.computes] == ["float8-row", "int8-row", "bfloat16", "mxfp8"]


def test_a_label_is_no_part_of_a_plain_recipe() -> None:
    recipe = parse({"recipe": "float8-row/split", "name": "mine"})
    assert recipe.to_value() == recipe.title == "float8-row/split"
    assert parse(recipe.to_value()) == recipe
