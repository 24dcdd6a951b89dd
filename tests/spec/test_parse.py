"""How recipes are written: names in every spelling, wrong names, and files that say the same."""

import itertools

import pytest

from narrowgauge.errors import RecipeError
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.parse import ALIASES, REFUSED, parse
from narrowgauge.spec.recipes import is_pair
from narrowgauge.spec.storages import STORAGES


def test_full_names_parse_to_themselves():
    for compute, storage in itertools.product(COMPUTES.values(), STORAGES.values()):
        name = f"{compute.name}/{storage.short_name}"
        if not is_pair(compute, storage) or name in REFUSED:
            continue
        recipe = parse(name)
        assert recipe.name == name
        assert parse(recipe) is recipe


def test_aliases_lead_to_full_names():
    for name, alias in ALIASES.items():
        assert parse(name) == parse(alias["recipe"])
    assert all(parse(name) for name in COMPUTES if name not in REFUSED)


SPELLINGS = {
    "BF16/Word": "bfloat16/word", " bfloat16 / word ": "bfloat16/word", "fp32": "float32/float32",
    "FP8-tensor/exact": "float8-tensor/exact",
    "fp16/split": "float16/split", "bf16-mixed": "bfloat16/float32", "bfloat16-true": "bfloat16/naive",
    "bfloat16/exact/native": "bfloat16/exact", "fp16/fp32": "float16/float32",
    "collage-plus": "bfloat16/collage-plus",
    # Names of other libraries.
    "16-mixed": "float16/float32", "16-true": "float16/naive", "bf16-true": "bfloat16/naive",
    "32-true": "float32/float32", "32": "float32/float32",
    "O0": "float32/float32", "O1": "float16/float32", "O2": "float16/master", "o3": "float16/naive",
    "fp8": "float8-row/word", "FP8/master": "float8-row/master", "int8": "int8-row/word",
    "int8/exact": "int8-row/exact", "fp8-rowwise": "float8-row/word",
    "MXFP8BlockScaling": "mxfp8/word",
}  # fmt: skip


@pytest.mark.parametrize(("spelling", "name"), SPELLINGS.items())
def test_names_in_every_spelling_and_of_other_libraries(spelling, name):
    assert parse(spelling).name == name


def test_names_that_are_no_recipe_are_refused_with_what_is_nearest():
    assert not set(REFUSED) & set(ALIASES)
    for name, row in REFUSED.items():
        with pytest.raises(RecipeError, match=f"'{name.upper()}'") as caught:
            parse(name.upper())
        assert row.get("why", "too little") in str(caught.value)
        for nearest in row["nearest"]:
            assert f"'{nearest}'" in caught.value.advice
            assert nearest.startswith("--lora") or parse(nearest).name.startswith(nearest)
