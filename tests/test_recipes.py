"""Recipes: the grammar, the tables' figures, contradictions, and files that say the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from narrowgauge.errors import RecipeError
from narrowgauge.formats import FORMATS
from narrowgauge.recipes import (
    ALIASES,
    COMPUTES,
    Recipe,
    full_names,
    known_names,
    parse,
    parse_file,
    parse_table,
)
from narrowgauge.storages import STORAGES


@pytest.mark.parametrize("name", full_names())
def test_full_names_parse_to_themselves(name: str) -> None:
    recipe = parse(name)
    assert recipe.name == name
    assert parse(recipe) is recipe
    assert parse_table(recipe.to_dict()) == recipe


def test_every_pair_that_agrees_is_listed() -> None:
    shared = [name for name in STORAGES if "/" not in name]
    own = [name for name in STORAGES if "/" in name]
    assert own == ["float16/master", "float16/split", "float8/collage-light", "float8/collage-plus"]
    assert full_names() == ["float32/float32", *(f"bfloat16/{name}" for name in shared), "float16/float32", *own]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("bf16/word", "bfloat16/word"),
        ("BF16/Word", "bfloat16/word"),
        (" bfloat16 / word ", "bfloat16/word"),
        ("bf16", "bfloat16/word"),
        ("fp32", "float32/float32"),
        ("bf16-mixed", "bfloat16/float32"),
        ("bfloat16-true", "bfloat16/naive"),
        ("bf16/fp32", "bfloat16/float32"),
        ("bfloat16/exact/native", "bfloat16/exact"),
        ("fp16", "float16/split"),
        ("fp16-mixed", "float16/float32"),
        ("fp16/fp32", "float16/float32"),
        ("float16/master", "float16/master"),
        ("float8", "float8/collage-plus"),
        ("float8/collage-light", "float8/collage-light"),
        ("collage-plus", "bfloat16/collage-plus"),
        ("bf16/tail8+bfloat16+float32", "bfloat16/tail8+bfloat16+float32"),
    ],
)
def test_known_spellings(said: str, meant: str) -> None:
    assert parse(said).name == meant


def test_aliases_lead_to_full_names() -> None:
    assert all(parse(alias).name == name for alias, name in ALIASES.items())
    assert all(parse(name) for name in known_names())


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("bfloat16/wrod", "Did you mean 'word'"),
        ("bfloat17/word", "Did you mean 'bfloat16'"),
        ("word", "Did you mean 'bfloat16/word'"),
        ("bfloat16-mixd", "Did you mean 'bfloat16-mixed'"),
        ("", "no recipe is named ''"),
        ("bfloat16/", "no recipe part is named ''"),
        ("bfloat16/word/native/more", "no recipe is named"),
        ("bfloat16/word/reproducibl", "no recipe part is named 'reproducibl'"),
        ("float32/word", "Take 'float32/float32'"),
        ("float16/word", "Take storage 'master', 'split'"),
        ("float16/tail8+bfloat16+float32", "Take storage 'master', 'split'"),
        ("float8/float32", "Take storage 'collage-light', 'collage-plus'"),
        ("bfloat16/tail8+bfloat16", "no recipe part is named 'tail8+bfloat16'"),
        ("bfloat16/tail8+e7m5+float32", "no recipe part is named 'tail8+e7m5+float32'"),
    ],
)
def test_wrong_names_are_refused_in_one_line(said: str, word: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(said)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "storage"),
    [("bf16/split", "split"), ("fp16/split", "float16/split"), ("bf16/collage-plus", "collage-plus"),
     ("float8/collage-plus", "float8/collage-plus"), ("fp16/fp32", "float32")],
)  # fmt: skip
def test_a_compute_has_its_own_storage_of_a_name_that_others_have_too(recipe: str, storage: str) -> None:
    assert parse(recipe).storage is STORAGES[storage]
    assert parse(recipe).bytes_per_param == STORAGES[storage].bytes_per_param


def test_the_state_of_word_is_one_32_bit_word() -> None:
    assert sum(bits for _, bits in STORAGES["word"].fields) == 32
    assert STORAGES["word"].exp_avg_sq.hold


def test_formats_are_named_in_full() -> None:
    names = {row.visible for row in STORAGES.values()}
    names |= {getattr(row, place) for row in COMPUTES.values() for place in ("output", "grad_input", "grad_weight")}
    assert names <= set(FORMATS)


def test_storage_by_parameter_name() -> None:
    recipe = parse_table(
        {
            "recipe": "bfloat16/word",
            "keep": ["lm_head", "*.router"],
            "override": [
                {"pattern": "*embed*", "storage": "split"},
                {"pattern": "*embed_positions*", "storage": "exact"},
            ],
        }
    )
    found = {
        name: recipe.storage_of(name, dims).name
        for name, dims in [
            ("model.layers.0.mlp.up_proj.weight", 2),
            ("model.norm.weight", 1),
            ("lm_head.weight", 2),
            ("lm_head_other.weight", 2),
            ("model.layers.3.router.weight", 2),
            ("model.embed_tokens.weight", 2),
            ("model.embed_positions.weight", 2),
        ]
    }
    assert list(found.values()) == ["word", "master", "float32", "word", "float32", "split", "exact"]
    assert parse_table(recipe.to_dict()) == recipe


def test_composed_storages_by_parameter_name() -> None:
    recipe = parse_table(
        {"recipe": "bfloat16/word", "override": [{"pattern": "*embed*", "storage": "tail8+bfloat16+float32"}]}
    )
    assert recipe.storage_of("model.embed_tokens.weight", 2).bytes_per_param == 11
    assert recipe.storage_of("model.embed_tokens.bias", 1).name == "master"
    assert parse_table(recipe.to_dict()) == recipe
    assert parse_table(parse("bf16/tail16+float32+bfloat16").to_dict()).bytes_per_param == 12


@pytest.mark.parametrize(
    ("recipe", "vectors"),
    [("bfloat16/naive", "naive"), ("bfloat16/kahan", "kahan"), ("float8/collage-plus", "master"),
     ("bfloat16/compact", "master"), ("float16/split", "float16/master")],
)  # fmt: skip
def test_baselines_store_their_vectors_as_their_sources_do(recipe: str, vectors: str) -> None:
    assert parse(recipe).storage_of("model.norm.weight", 1).name == vectors


@pytest.mark.parametrize(
    ("recipe", "places"),
    [
        ("float32/float32", {"residual": "float32", "logits": "float32", "weights seen": "float32"}),
        ("bfloat16/float32", {"residual": "float32", "logits": "bfloat16", "weights seen": "float32"}),
        ("bfloat16/word", {"residual": "bfloat16", "logits": "bfloat16", "weights seen": "bfloat16"}),
        ("float16/split", {"residual": "float16", "logits": "float16", "weights seen": "float16"}),
        ("float16/float32", {"residual": "float32", "logits": "float16", "weights seen": "float32"}),
        ("float8/collage-plus", {"residual": "bfloat16", "logits": "bfloat16", "weights seen": "bfloat16"}),
    ],
)
def test_dtypes_outside_the_matmuls(recipe: str, places: dict[str, str]) -> None:
    found = parse(recipe).compute.dtypes(parse(recipe).storage)
    assert found["loss"] == found["softmax"] == "float32"
    assert {place: found[place] for place in places} == places


def test_a_file_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('compute = "bf16"\nkeep = ["lm_head"]\n', encoding="utf-8")
    assert parse(path) == parse(str(path)) == parse_file(path)
    assert parse(path) == dataclasses.replace(parse("bfloat16/word"), keep=("lm_head",))


def test_a_key_beside_recipe_overrules_its_part() -> None:
    assert parse_table({"recipe": "bfloat16/word", "storage": "exact"}).name == "bfloat16/exact"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "names no compute"),
        ('computes = "bfloat16"', "Did you mean 'compute'"),
        ("compute = 16", "which is no text"),
        ('compute = "float64"', "no recipe part is named 'float64'"),
        ('recipe = "bfloat16/word"\nkeep = "lm_head"', "no list of patterns"),
        ('recipe = "bfloat16/word"\noverride = "x"', "[[override]]"),
        ('recipe = "bfloat16/word"\n[[override]]\npattern = "x"', "It takes pattern and storage"),
        ('recipe = "bfloat16/word"\n[[override]]\npattern = "x"\nstorage = "wrd"', "Did you mean 'word'"),
        ('recipe = "other.toml"', "another file"),
        ("not toml", "cannot be read"),
    ],
)
def test_wrong_files_are_refused_in_one_line(text: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        parse(path)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"mine\.toml' does not exist"):
        parse(tmp_path / "mine.toml")


def test_recipes_are_values() -> None:
    assert hash(parse("bfloat16/word")) == hash(Recipe(COMPUTES["bfloat16"], STORAGES["word"]))
