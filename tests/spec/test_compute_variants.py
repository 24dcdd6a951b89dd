"""Variants of computes: names, what they change of their row, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from narrowgauge.errors import RecipeError
from narrowgauge.spec import computes
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.notation import get_compute, known_names, parse, parse_table, parse_value

VARIANTS = [name for name in computes.names() if name not in COMPUTES]


def test_variants_are_of_rows_whose_input_shares_one_scale() -> None:
    assert VARIANTS == [
        "float8-tensor+smooth",
        "float8-delayed+smooth",
        "float8-delayed+fresh",
        "float8-tensor-e5m2+smooth",
        "float8-delayed-e5m2+smooth",
        "float8-delayed-e5m2+fresh",
    ]
    assert set(VARIANTS) <= set(known_names())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_differs_from_its_row_in_what_its_name_says(name: str) -> None:
    base, _, word = name.partition("+")
    row, plain = computes.named(name), COMPUTES[base]
    assert row.name == name and computes.find(name) is row
    changed = {place for place, cast in row.casts.items() if cast != plain.casts[place]}
    inputs, weights = {"output.left", "grad_weight.right"}, {"output.right", "grad_input.right"}
    assert changed == (inputs if word == "smooth" else set()) | (weights if plain.is_delayed else set())
    for place in changed:
        cast = row.casts[place]
        assert replace(cast, smooth=False, scaling=plain.casts[place].scaling) == plain.casts[place]
        assert cast.scaling == "current" and cast.smooth == (place in inputs)
    assert (row.keeps_codes, row.reuses_weight, row.reuses_grad) == (True, True, True)


@pytest.mark.parametrize("name", VARIANTS)
def test_recipes_name_them_as_texts_and_in_tables(name: str) -> None:
    recipe = parse(name)
    assert recipe.name == f"{name}/word" and recipe.compute is computes.named(name)
    assert parse_table(recipe.to_dict()) == recipe == parse(recipe.name) == parse_table({"compute": name})
    phased = parse_table({"compute": "bfloat16", "phase": [{"until": 0.9, "compute": name}]})
    assert phased.compute_at(0.5).name == name and parse_table(phased.to_dict()) == phased


def test_a_layer_gets_what_concerns_it() -> None:
    recipe = parse("float8-delayed+smooth/word")
    found = {name: recipe.compute_of(name).name for name in ("a.mlp.down_proj", "down_proj", "a.up_proj", "lm_head")}
    assert found == {
        "a.mlp.down_proj": "float8-delayed+smooth",
        "down_proj": "float8-delayed+smooth",
        "a.up_proj": "float8-delayed+fresh",
        "lm_head": "bfloat16",
    }
    overridden = parse_table(
        {"compute": "bfloat16", "override": [{"pattern": "*.mlp.*", "compute": "float8-tensor+smooth"}]}
    )
    assert overridden.compute_of("a.mlp.down_proj").output.left.smooth
    assert overridden.compute_of("a.mlp.up_proj") is COMPUTES["float8-tensor"]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("float8-delayed+smoth", "mean 'float8-delayed+smooth'"),
        ("float8-delayed+rough/word", "'float8-delayed+smooth' or 'float8-delayed+fresh'"),
        ("float8-row+smooth/word", "take 'float8-row'"),
        ("float8-tensor+fresh", "'float8-tensor+smooth'"),
        ("scalify+smooth/word", "take 'scalify'"),
    ],
)
def test_a_variant_that_is_not_had_is_refused_with_those_that_are(name: str, advice: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse(name)
    assert advice in error.value.advice
    with pytest.raises(KeyError):
        computes.named(name)


@pytest.mark.parametrize(
    ("said", "name", "threshold"),
    [
        ("int8-outlier+threshold=4", "int8-outlier+threshold=4", 4.0),
        ("INT8-outlier+threshold=2.50", "int8-outlier+threshold=2.5", 2.5),
        ("int8-outlier+threshold=6.0", "int8-outlier", 6.0),
        ("int8-outlier-codes+threshold=0.1", "int8-outlier-codes+threshold=0.1", 0.1),
        ("int8-outlier+threshold=3.14159265", "int8-outlier+threshold=3.14159265", 3.14159265),
    ],
)
def test_a_threshold_is_a_part_of_the_name_and_comes_back_from_it(said: str, name: str, threshold: float) -> None:
    recipe = parse(said)
    assert recipe.name == f"{name}/word" and recipe.compute.output.left.outliers == threshold
    assert recipe == parse(recipe.name) == parse_table(recipe.to_dict()) == parse_value(recipe.to_value())
    assert recipe.compute == get_compute(said) == get_compute(name)
    base = COMPUTES[name.partition("+")[0]]
    left = replace(recipe.compute.output.left, outliers=6.0)
    assert replace(recipe.compute, output=replace(base.output, left=left), name=base.name, purpose=base.purpose) == base
    assert f"columns from {threshold:g} on in 16 bits" in str(recipe.compute.output.left)


@pytest.mark.parametrize("word", ["0", "-4", "nan", "inf", "1e999", "four", ""])
@pytest.mark.parametrize("form", ["{}", "{}/word"])
def test_a_threshold_that_is_no_positive_number_is_refused_in_one_line(word: str, form: str) -> None:
    said = form.format(f"int8-outlier+threshold={word}")
    for read in (parse, lambda text: get_compute(text.partition("/")[0])):
        with pytest.raises(RecipeError, match=r"a threshold of outliers is a finite number above 0") as error:
            read(said)
        assert "'int8-outlier+threshold=4'" in error.value.advice and "\n" not in str(error.value)


def test_a_threshold_of_a_compute_without_outliers_is_refused_with_those_that_have_them() -> None:
    with pytest.raises(RecipeError, match="'int8-row' separates no outliers") as error:
        parse("int8-row+threshold=4/word")
    assert error.value.advice == "Take 'int8-outlier+threshold=4' or 'int8-outlier-codes+threshold=4'."
    with pytest.raises(RecipeError, match="has no variant"):
        parse("int8-outlier+limit=4/word")
