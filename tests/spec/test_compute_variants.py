"""Variants of computes: names, what they change of their row, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from narrowgauge.errors import RecipeError
from narrowgauge.spec import computes
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.kernels import kernel_for
from narrowgauge.spec.notation import get_compute, known_names, parse, parse_table, parse_value

NAMES = [name for name in computes.names() if name not in COMPUTES]
OF_FOUR_BITS = {
    "mxfp4+deterministic": {
        slot: {"rounding": "nearest", "rotation": "hadamard-plain"} for slot in ("grad_weight.left", "grad_weight.right")
    },
    "mxfp4+two-scales": {
        slot: {"fit": "least-error"} for slot in ("output.left", "output.right", "grad_input.right", "grad_weight.right")
    },
}  # fmt: skip
OF_FOUR_BITS["nvfp4+four-over-six"] = OF_FOUR_BITS["mxfp4+two-scales"]
OF_FOUR_BITS["nvfp4+eden"] = {
    slot: {"rounding": "eden", "rotation": "hadamard-drawn"}
    for slot in ("grad_input.left", "grad_input.right", "grad_weight.left", "grad_weight.right")
}
OF_FOUR_BITS["nvfp4+four-over-six+eden"] = {
    **OF_FOUR_BITS["nvfp4+eden"],
    **{slot: {"fit": "least-error"} for slot in ("output.left", "output.right")},
}
OF_FOUR_BITS["nvfp4+uniform"] = {slot: {"format": "int4", "rotation": "hadamard"} for slot in COMPUTES["nvfp4"].casts}
VARIANTS = [name for name in NAMES if name not in OF_FOUR_BITS]


def test_each_name_is_a_variant_of_a_row() -> None:
    assert set(NAMES) == {*VARIANTS, *OF_FOUR_BITS} and set(NAMES) <= set(known_names())


@pytest.mark.parametrize("name", OF_FOUR_BITS)
def test_a_form_of_four_bits_changes_the_casts_of_its_table_and_no_other(name: str) -> None:
    base = COMPUTES[name.partition("+")[0]]
    row, changed = computes.named(name), OF_FOUR_BITS[name]
    assert row.casts == {slot: replace(cast, **changed.get(slot, {})) for slot, cast in base.casts.items()}  # type: ignore[arg-type]
    assert row.products["output"].accumulation == base.output.accumulation
    same = replace(
        base, name=row.name, purpose=row.purpose, source=row.source, native=row.native,
        output=row.output, grad_input=row.grad_input, grad_weight=row.grad_weight,
    )  # fmt: skip
    assert same == row and row.is_stochastic and row.purpose != base.purpose and base.source in row.source
    recipe = parse(name)
    assert recipe.name == f"{name}/word" and parse_table(recipe.to_dict()) == recipe == parse(recipe.name)
    assert len({str(cast) for cast in (*row.casts.values(), *base.casts.values())}) == len(
        {*row.casts.values(), *base.casts.values()}
    )


@pytest.mark.parametrize("name", OF_FOUR_BITS)
def test_chips_that_multiply_the_row_multiply_its_forms_unless_codes_are_others(name: str) -> None:
    """Signs and scales are chosen before the kernel sees them; of equally spaced codes there is no kernel."""
    base, row = COMPUTES[name.partition("+")[0]], computes.named(name)
    is_native = all(cast.format == "float4_e2m1fn" for cast in row.casts.values())
    for chip in ("sm90", "sm100", "sm120", "gfx950"):
        for place, product in row.products.items():
            expected = kernel_for(base.products[place], chip) if is_native else None
            assert kernel_for(product, chip) == expected
    assert (row.native == base.native) == is_native == bool(row.native)


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4+eden+four-over-six", "nvfp4+eden+eden", "mxfp4+four-over-six", "mxfp4+eden", "nvfp4+uniform+four-over-six",
        "mxfp8+four-over-six", "nvfp4+", "nvfp4+deterministic",
    ],
)  # fmt: skip
def test_a_form_that_a_row_has_not_is_refused_with_those_that_it_has(name: str) -> None:
    base = name.partition("+")[0]
    with pytest.raises(RecipeError, match="has no variant") as error:
        parse(f"{name}/word")
    having = [f"'{known}'" for known in NAMES if known.startswith(f"{base}+")]
    assert all(known in error.value.advice for known in having) or f"take '{base}'" in error.value.advice


def test_variants_are_of_rows_whose_input_shares_one_scale() -> None:
    assert VARIANTS == [
        "float8-tensor+smooth",
        "float8-delayed+smooth",
        "float8-delayed+fresh",
        "float8-tensor-e5m2+smooth",
        "float8-delayed-e5m2+smooth",
        "float8-delayed-e5m2+fresh",
    ]


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
