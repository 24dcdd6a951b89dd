"""Named sets of recipes: what they stand for, and that their names mean nothing else."""

from __future__ import annotations

import pytest

from narrowgauge.cli import flags
from narrowgauge.errors import RecipeError
from narrowgauge.machine import processor
from narrowgauge.spec import notation
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.notation import ALIASES, SPELLINGS, parse, parse_names
from narrowgauge.spec.recipe_sets import RECIPE_SETS, RecipeSet
from narrowgauge.spec.recipes import Recipe, own_name
from narrowgauge.spec.storages import STORAGES


@pytest.mark.parametrize("row", RECIPE_SETS.values(), ids=RECIPE_SETS)
def test_a_row_names_recipes_in_full_and_pairs_that_differ_in_one_format(row: RecipeSet) -> None:
    recipes = {name: parse(name) for name in row.recipes}
    assert [recipe.name for recipe in recipes.values()] == list(row.recipes)
    assert set(row.where_native) < set(row.recipes) and row.question.endswith("?") and row.source
    formats = set()
    for one, other in row.pairs:
        assert {one, other} <= set(row.needed)
        assert own_name(recipes[one].storage) == own_name(recipes[other].storage)
        formats.add((recipes[one].compute.output.left.format, recipes[other].compute.output.left.format))
    assert len(formats) == 1, "every pair differs in the same two formats"
    assert row.name not in {*COMPUTES, *STORAGES, *ALIASES, *SPELLINGS, *notation.known_names()}


def test_a_set_stands_for_its_recipes_once() -> None:
    row = RECIPE_SETS["sixteen-bit"]
    assert [recipe.name for recipe in parse_names("sixteen-bit")] == list(row.recipes)
    found = [recipe.name for recipe in parse_names("bf16-true, Sixteen-Bit,bfloat16/word")]
    rest = [name for name in row.recipes if name != "bfloat16/naive"]
    assert found == ["bfloat16/naive", *rest, "bfloat16/word"]


def test_recipes_for_native_machines_are_left_out_elsewhere_unless_listed() -> None:
    asked = []

    def is_native(recipe: Recipe) -> bool:
        asked.append(recipe.name)
        return False

    row = RECIPE_SETS["sixteen-bit"]
    assert [recipe.name for recipe in parse_names("sixteen-bit", is_native)] == list(row.needed)
    assert asked == list(row.where_native), "the others are compared on every machine"
    named = parse_names("sixteen-bit,tf32/float32", is_native)
    assert [recipe.name for recipe in named] == [*row.needed, "tfloat32/float32"]


def test_a_comparison_asks_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with processor.pretending("avx512_bf16", "amx_bf16"):  # no processor multiplies tfloat32
        found = flags.RECIPES_HERE.convert("sixteen-bit", None, None)
    assert [recipe.name for recipe in found] == list(RECIPE_SETS["sixteen-bit"].needed)
    # A plan for a chip asks no machine.
    assert len(flags.RECIPES.convert("sixteen-bit", None, None)) == len(RECIPE_SETS["sixteen-bit"].recipes)


def test_one_recipe_is_no_set() -> None:
    with pytest.raises(
        RecipeError, match="'sixteen-bit' is a set of 6 recipes, and one recipe was expected"
    ) as refused:
        parse("sixteen-bit")
    assert "narrowgauge compare --recipes sixteen-bit" in refused.value.advice
