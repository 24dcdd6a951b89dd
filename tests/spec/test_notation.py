"""How recipes are written: names in every spelling, wrong names, and files that say the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from narrowgauge.errors import RecipeError
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.notation import (
    ALIASES,
    FOREIGN_COMPUTES,
    SPELLINGS,
    default_storage,
    full_names,
    get_compute,
    known_names,
    parse,
    parse_file,
    parse_table,
    parse_value,
    representative_names,
)
from narrowgauge.spec.recipes import Override, Phase, Recipe, own_name
from narrowgauge.spec.storages import STORAGES

WORD = parse("bfloat16/word")
FLOAT32 = parse("bfloat16/float32")


def test_full_names_parse_to_themselves() -> None:
    for name in full_names():
        recipe = parse(name)
        assert recipe.name == name
        assert parse(recipe) is recipe
        assert parse_table(recipe.to_dict()) == recipe


def test_every_pair_that_agrees_is_listed() -> None:
    shared = [name for name in STORAGES if "/" not in name]
    own = {name for name in STORAGES if "/" in name}
    bound = {name for name, row in COMPUTES.items() if row.owns_storages}
    assert bound == {"float64", "float8", "float16-throughout"} and len(own) >= 10
    pairs = {f"{compute}/{storage}" for compute in COMPUTES if compute not in bound for storage in shared} | own
    names = full_names()
    assert set(names) == pairs and len(names) == len(pairs)
    # A name is one recipe's only: a storage of the compute's own takes the place of the one that all share.
    assert all(parse(name).storage.name == name for name in own)


def test_representative_names_have_every_row_and_alias() -> None:
    names = representative_names()
    recipes = [parse(name) for name in names]
    assert len(set(names)) == len(names) and set(names) <= set(full_names())
    assert [recipe.compute.name for recipe in recipes[: len(COMPUTES)]] == list(COMPUTES)
    assert {recipe.storage.name for recipe in recipes} == set(STORAGES)
    assert {parse(alias.recipe).name for alias in ALIASES.values() if alias.is_taken} <= set(names)
    assert {name for name in full_names() if name.endswith("/word")} <= set(names)


def test_every_compute_alone_is_taken_with_a_storage_that_fits_it() -> None:
    for name, row in COMPUTES.items():
        recipe = parse(f"{name}/{row.default_storage}" if name in ALIASES else name)
        assert recipe.compute is row and own_name(recipe.storage) == row.default_storage == default_storage(name)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("bf16/word", "bfloat16/word"),
        ("BF16/Word", "bfloat16/word"),
        (" bfloat16 / word ", "bfloat16/word"),
        ("fp32", "float32/float32"),
        ("tf32", "tfloat32/float32"),
        ("fp8-row", "float8-row/word"),
        ("FP8-tensor-e5m2/exact", "float8-tensor-e5m2/exact"),
        ("fp16-throughout", "float16-throughout/naive"),
        ("float32/word", "float32/word"),
        ("fp16/word", "float16/word"),
        ("int8-row/master", "int8-row/master"),
        ("mxfp8/tail8+bfloat16+float32", "mxfp8/tail8+bfloat16+float32"),
        ("bf16-mixed", "bfloat16/float32"),
        ("bfloat16-true", "bfloat16/naive"),
        ("bf16/fp32", "bfloat16/float32"),
        ("bfloat16/exact/native", "bfloat16/exact"),
        ("fp16-mixed", "float16/float32"),
        ("fp16/fp32", "float16/float32"),
        ("float16/master", "float16/master"),
        ("float8/collage-plus", "float8/collage-plus"),
        ("float8/collage-light", "float8/collage-light"),
        ("collage-plus", "bfloat16/collage-plus"),
        ("bf16/tail8+bfloat16+float32", "bfloat16/tail8+bfloat16+float32"),
    ],
)
def test_known_spellings(said: str, meant: str) -> None:
    assert parse(said).name == meant


def test_aliases_lead_to_full_names() -> None:
    taken = [alias for alias in ALIASES.values() if alias.is_taken]
    assert len(taken) > 10 and all(parse(alias.name) == parse(alias.recipe) for alias in taken)
    assert all(parse(name) for name in known_names())


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("16-mixed", "float16/float32"), ("16-true", "float16/naive"), ("bf16-true", "bfloat16/naive"),
        ("32-true", "float32/float32"), ("32", "float32/float32"), ("amp", "float16/float32"),
        ("O0", "float32/float32"), ("O1", "float16/float32"), ("O2", "float16/master"), ("o3", "float16/naive"),
        ("fp8", "float8-row/word"), ("FP8/master", "float8-row/master"), ("int8", "int8-row/word"),
        ("int8/exact", "int8-row/exact"), ("fp8-rowwise", "float8-row/word"), ("tensorwise", "float8-tensor-e5m2/word"),
        ("MXFP8BlockScaling", "mxfp8/word"), ("DelayedScaling/fp32", "float8-delayed-e5m2/float32"),
        ("amp_bf16", "bfloat16/float32"), ("mixed_float16", "float16/float32"), ("pure_bf16", "bfloat16/naive"),
    ],
)  # fmt: skip
def test_names_of_other_libraries_mean_what_they_mean_there(said: str, meant: str) -> None:
    assert parse(said).name == meant
    assert parse_table({"recipe": said}) == parse(meant)


def test_names_that_leave_something_open_are_refused_with_the_recipe_that_is_nearest() -> None:
    refused = [alias for alias in ALIASES.values() if not alias.is_taken]
    assert {"float8-mixed", "transformer-engine"} < {alias.name for alias in refused}
    for alias in refused:
        with pytest.raises(RecipeError) as caught:
            parse(alias.name)
        assert alias.differs in caught.value.message and f"Take '{alias.recipe}'" in caught.value.advice
        for recipe in (alias.recipe, *(other for other, _ in alias.others)):
            assert f"'{recipe}'" in caught.value.advice
            assert parse(recipe).name == (recipe if "/" in recipe else f"{recipe}/word")


def test_names_from_elsewhere_are_none_of_ours() -> None:
    """Nothing here takes the place of a row, and what is looked up is in the spelling in which it is looked up."""
    assert {name for name in {*COMPUTES, *full_names()} & set(ALIASES) if ALIASES[name].is_taken} == set()
    assert set(FOREIGN_COMPUTES.values()) <= set(COMPUTES)
    for name in set(ALIASES) - {"fp8"}:  # which alone is a compute, and float8 another
        head, dash, rest = name.partition("-")
        assert name == name.lower() and SPELLINGS.get(head, head) + dash + rest == name


@pytest.mark.parametrize(
    ("said", "candidates"),
    [
        *((said, ("bfloat16/float32", "bfloat16/master", "bfloat16/word")) for said in ("bf16", "BF16", "bfloat16")),
        *((said, ("float16/float32", "float16/master", "float16/split")) for said in ("fp16", "16", "half", "float16")),
        ("float8", ("float8-row", "float8-tensor-e5m2", "float8/collage-plus")),
        ("mixed", ("bfloat16/float32", "float16/float32")),
        ("fp8-mixed", ("float8-row/float32", "float8-delayed-e5m2/float32")),
    ],
)
def test_a_name_that_means_several_recipes_asks_which(said: str, candidates: tuple[str, ...], tmp_path: Path) -> None:
    """Libraries store weights and moments in different ways by these: none of the ways is taken without a word."""
    path = tmp_path / "mine.toml"
    path.write_text(f'recipe = "{said}"\n', encoding="utf-8")
    for read in (
        parse,
        lambda name: parse_value(name),
        lambda name: parse_table({"recipe": name}),
        lambda name: parse(path),
    ):
        with pytest.raises(RecipeError, match="no recipe is named") as caught:
            read(said)
        assert all(f"'{name}'" in caught.value.advice for name in candidates)


def test_float8_as_a_compute_asks_whether_matmuls_or_weights_are_meant() -> None:
    for ask in (
        lambda: get_compute("float8"),
        lambda: get_compute("Float8"),
        lambda: parse_table({"compute": "float8"}),
    ):
        with pytest.raises(RecipeError, match=r"both go by that name.*float8-row.*float8/collage-plus"):
            ask()
    with pytest.raises(RecipeError, match="or compute 'float8-row'"):
        parse("float8/word")
    assert get_compute("fp8").name == parse("fp8").compute.name == "float8-row"
    assert [get_compute(name).name for name in ("bf16", "int8", "FP8-tensor")] == [
        "bfloat16",
        "int8-row",
        "float8-tensor",
    ]


def test_recorded_recipes_keep_their_meaning() -> None:
    """Run folders hold full names, or tables with a storage; no compute in them is read as another library's name."""
    for storage in ("collage-light", "collage-plus"):
        recorded = parse_value({"compute": "float8", "storage": storage, "reduction": "native"})
        assert recorded == parse_value(f"float8/{storage}") and recorded.compute is COMPUTES["float8"]
    assert parse_value("bfloat16/word").name == "bfloat16/word"
    assert parse_table({"compute": "bfloat16", "keep": ["lm_head"]}).storage.name == "word"


def test_a_compute_of_another_library_is_taken_wherever_a_compute_is_named() -> None:
    table = {"compute": "int8", "evaluation": "fp8", "phase": [{"until": 0.5, "compute": "blockwise"}]}
    recipe = parse_table(table)
    assert [row.name for row in recipe.computes] == ["int8-row", "float8-block", "float8-row"]
    with pytest.raises(RecipeError, match="evaluation has compute 'float64' in a recipe of 'bfloat16'"):
        parse_table({"compute": "bf16", "evaluation": "double"})


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
        ("float8-rwo", "Did you mean 'float8-row'"),
        ("int8-rwo/word", "Did you mean 'int8-row'"),
        ("float8-row/wrod", "Did you mean 'word'"),
        ("float16-throughout/word", "Take storage 'naive'"),
        ("float8/float32", "Take storage 'collage-light', 'collage-plus'"),
        ("float8/tail8+bfloat16+float32", "Take storage 'collage-light', 'collage-plus'"),
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


def test_a_file_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('compute = "bf16"\nkeep = ["lm_head"]\n', encoding="utf-8")
    assert parse(path) == parse(str(path)) == parse_file(path)
    assert parse(path) == dataclasses.replace(parse("bfloat16/word"), keep=("lm_head",))
    path.write_text(
        'recipe = "bf16/word"\nevaluation = "fp32"\n[[phase]]\nuntil = 1\ncompute = "int8-row"\n'
        '[[override]]\npattern = "lm_head"\ncompute = "mxfp8"\n',
        encoding="utf-8",
    )
    assert parse(path) == Recipe(
        WORD.compute,
        WORD.storage,
        overrides=(Override("lm_head", compute=COMPUTES["mxfp8"]),),
        phases=(Phase(1.0, COMPUTES["int8-row"]),),
        evaluation=COMPUTES["float32"],
    )


def test_a_key_beside_recipe_overrules_its_part() -> None:
    assert parse_table({"recipe": "bfloat16/word", "storage": "exact"}).name == "bfloat16/exact"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "names no compute"),
        ('computes = "bfloat16"', "Did you mean 'compute'"),
        ("compute = 16", "which is not text"),
        ('compute = "float65"', "no recipe part is named 'float65'"),
        ('recipe = "bfloat16/word"\nkeep = "lm_head"', "not a list of patterns"),
        ('recipe = "bfloat16/word"\noverride = "x"', "[[override]]"),
        ('recipe = "bfloat16/word"\n[[override]]\npattern = "x"', "It takes pattern, and storage, compute or both"),
        ('recipe = "bfloat16/word"\n[[override]]\nstorage = "split"', "the keys storage. It takes pattern"),
        (
            'recipe = "bfloat16/word"\n[[override]]\npattern = "x"\nuntil = 1\nstorage = "split"',
            "pattern, storage, until",
        ),
        ('recipe = "bfloat16/word"\n[[override]]\npattern = "x"\ncompute = "int8-rwo"', "Did you mean 'int8-row'"),
        ('recipe = "bfloat16/word"\n[[override]]\npattern = "x"\ncompute = 8', "which is not text"),
        ('recipe = "bfloat16/word"\n[[override]]\n', "the keys none"),
        ('recipe = "bfloat16/word"\nphase = "x"', "[[phase]]"),
        ('recipe = "bfloat16/word"\n[[phase]]\nuntil = 0.5', "the keys until. It takes until and compute"),
        ('recipe = "bfloat16/word"\n[[phase]]\nuntil = "half"\ncompute = "mxfp8"', "which is not a number"),
        ('recipe = "bfloat16/word"\n[[phase]]\nuntil = true\ncompute = "mxfp8"', "which is not a number"),
        ('recipe = "bfloat16/word"\n[[phase]]\nuntil = 2\ncompute = "mxfp8"', "at most 1"),
        ('recipe = "bfloat16/word"\n[[phase]]\nuntil = 0.5\ncompute = "mxpf8"', "Did you mean 'mxfp8'"),
        ('recipe = "bfloat16/word"\nevaluation = "bfloat"', "Did you mean 'bfloat16'"),
        ('recipe = "bfloat16/word"\nevaluation = 1', "which is not text"),
        ('recipe = "bfloat16/word"\nevaluation = "unit"', "with the same transform"),
        ('recipe = "bfloat16/word"\n[[override]]\npattern = "x"\nstorage = "wrd"', "Did you mean 'word'"),
        ('recipe = "other.toml"', "another recipe file"),
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
