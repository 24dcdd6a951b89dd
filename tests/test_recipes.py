"""Recipes: the grammar, the tables' figures, contradictions, and files that say the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from narrowgauge.computes import COMPUTES
from narrowgauge.errors import RecipeError
from narrowgauge.formats import FORMATS
from narrowgauge.recipes import (
    ALIASES,
    DEFAULT_STORAGE,
    Override,
    Phase,
    Recipe,
    full_names,
    known_names,
    own_name,
    parse,
    parse_file,
    parse_table,
    representative_names,
)
from narrowgauge.storages import STORAGES

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
    assert own == {
        "float16/master", "float16/split", "float16-throughout/naive", "float8/collage-light", "float8/collage-plus",
    }  # fmt: skip
    bound = {"float8", "float16-throughout"}
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
    assert set(ALIASES.values()) <= set(names)
    assert {name for name in full_names() if name.endswith("/word")} <= set(names)


def test_every_compute_alone_is_taken_with_a_storage_that_fits_it() -> None:
    assert list(DEFAULT_STORAGE) == list(COMPUTES)
    others = {"float32", "tfloat32", "float16", "float16-throughout", "float8"}
    for name in COMPUTES:
        recipe = parse(name)
        assert recipe.compute is COMPUTES[name] and own_name(recipe.storage) == DEFAULT_STORAGE[name]
        assert (recipe.storage.name == "word") == (name not in others)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("bf16/word", "bfloat16/word"),
        ("BF16/Word", "bfloat16/word"),
        (" bfloat16 / word ", "bfloat16/word"),
        ("bf16", "bfloat16/word"),
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
        ("float8-rwo", "Did you mean 'float8-row'"),
        ("int8/word", "Did you mean 'int8-row'"),
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


@pytest.mark.parametrize(
    ("compute", "storage", "advice"),
    [
        ("float16", "split", "Take the row 'float16/split'"),
        ("bfloat16", "float16/split", "Take compute 'float16'"),
        ("float16", "float8/collage-plus", "Take storage 'master', 'split'"),
        ("float16", "float16-throughout/naive", "Take storage 'master', 'split'"),
        ("float8", "word", "Take storage 'collage-light', 'collage-plus'"),
    ],
)
def test_rows_that_do_not_fit_are_refused(compute: str, storage: str, advice: str) -> None:
    with pytest.raises(RecipeError, match=f"compute '{compute}' was asked for over storage '{storage}'") as caught:
        Recipe(COMPUTES[compute], STORAGES[storage])
    assert advice in caught.value.advice


def test_the_state_of_word_is_one_32_bit_word() -> None:
    assert sum(bits for _, bits in STORAGES["word"].fields) == 32
    assert STORAGES["word"].exp_avg_sq.hold


def test_formats_are_named_in_full() -> None:
    names = {row.visible for row in STORAGES.values()}
    names |= {cast.format for row in COMPUTES.values() for cast in row.casts.values()}
    assert names | {row.dtype for row in COMPUTES.values()} <= set(FORMATS)


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
        ("float32/word", {"residual": "bfloat16", "logits": "bfloat16", "kept for backward": "float32, 4 bytes"}),
        ("tfloat32", {"residual": "float32", "logits": "float32", "kept for backward": "tfloat32, 4 bytes"}),
        ("float16/word", {"residual": "bfloat16", "logits": "bfloat16", "kept for backward": "float16, 2 bytes"}),
        ("float8-row/float32", {"residual": "float32", "logits": "bfloat16", "kept for backward": "bfloat16, 2 bytes"}),
        ("float8-tensor/word", {"logits": "bfloat16", "kept for backward": "float8_e4m3fn codes, 1 byte"}),
        ("int8-row/master", {"residual": "bfloat16", "kept for backward": "int8 codes, 1 byte"}),
        ("float16-throughout", {"norms": "float32 inside, float16 out", "kept for backward": "float16, 2 bytes"}),
    ],
)
def test_dtypes_outside_the_matmuls(recipe: str, places: dict[str, str]) -> None:
    found = parse(recipe).dtypes
    assert found["loss"] == found["softmax"] == found["rotary buffers"] == "float32"
    assert {place: found[place] for place in places} == places
    assert found["logits"] == parse(recipe).dtype


# ── computes by module and by progress ──────────────────────────────────────────────────────────────────────────────

LINEARS = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "lm_head"]


def computes_of(recipe: Recipe, progress: float = 1.0) -> list[str]:
    return [recipe.compute_of(name, progress).name for name in LINEARS]


@pytest.mark.parametrize(
    ("recipe", "head"),
    [
        ("float8-row/word", "bfloat16"),
        ("float8-row/float32", "bfloat16"),
        ("tfloat32/float32", "float32"),
        ("tfloat32/word", "bfloat16"),
        ("bfloat16/word", "bfloat16"),
        ("float32/word", "float32"),
    ],
)
def test_what_a_row_keeps_is_a_plain_layer_of_the_models_dtype(recipe: str, head: str) -> None:
    policy = parse(recipe)
    assert computes_of(policy) == [policy.compute.name] * 2 + [head]
    assert policy.compute_of("draft.lm_head.inner").name == head  # what lies under it goes with it
    assert policy.compute_of("lm_head_other").name == policy.compute.name


def test_what_the_recipe_keeps_is_float32_before_all_else() -> None:
    override = Override("*", compute=COMPUTES["int8-row"])
    recipe = dataclasses.replace(parse("float8-row/word"), keep=("model.layers.1", "lm_head"), overrides=(override,))
    assert computes_of(recipe) == ["int8-row", "float32", "float32"]


def test_the_last_override_that_names_a_layer_wins_over_what_the_row_keeps() -> None:
    table = {
        "recipe": "float8-row/word",
        "override": [
            {"pattern": "*.mlp.*", "compute": "int8-row"},
            {"pattern": "*.down_proj", "compute": "bf16"},
            {"pattern": "*embed*", "storage": "split"},
            {"pattern": "lm_head", "compute": "mxfp8", "storage": "exact"},
            {"pattern": "*.layers.9.*", "storage": "exact"},
        ],
    }
    recipe = parse_table(table)
    assert computes_of(recipe) == ["int8-row", "bfloat16", "mxfp8"]
    assert recipe.compute_of("model.layers.0.self_attn.q_proj").name == "float8-row"
    assert (
        recipe.compute_of("model.layers.9.self_attn.q_proj").name == "float8-row"
    )  # another storage, not another compute
    assert recipe.storage_of("model.layers.9.self_attn.q_proj.weight", 2).name == "exact"
    assert recipe.storage_of("model.layers.0.mlp.up_proj.weight", 2).name == "word"
    assert parse_table(recipe.to_dict()) == recipe
    assert [row.name for row in recipe.computes] == ["float8-row", "int8-row", "bfloat16", "mxfp8"]


def test_phases_hold_until_their_share_of_the_run_is_done() -> None:
    recipe = parse_table(
        {
            "recipe": "bf16/word",
            "phase": [{"until": 0.1, "compute": "float32"}, {"until": 0.9, "compute": "fp8-row"}],
            "override": [{"pattern": "*.down_proj", "compute": "int8-row"}],
        }
    )
    assert recipe.name == "bfloat16/word"
    found = [recipe.compute_at(step / 10).name for step in range(11)]
    assert found == ["float32"] + ["float8-row"] * 8 + ["bfloat16"] * 2
    assert computes_of(recipe, 0.5) == ["float8-row", "int8-row", "bfloat16"]
    assert computes_of(recipe) == ["bfloat16", "int8-row", "bfloat16"]
    assert computes_of(recipe, 0.0) == ["float32", "int8-row", "float32"]
    assert parse_table(recipe.to_dict()) == recipe


def test_a_phase_until_the_end_leaves_the_recipes_own_for_what_comes_after() -> None:
    recipe = dataclasses.replace(WORD, phases=(Phase(1.0, COMPUTES["mxfp4"]),))
    assert [recipe.compute_at(p).name for p in (0.0, 0.999, 1.0)] == ["mxfp4", "mxfp4", "bfloat16"]
    assert WORD.compute_at(0.0) is WORD.compute_at(1.0) is COMPUTES["bfloat16"]


def test_evaluation_may_take_another_compute() -> None:
    recipe = parse_table({"compute": "fp8-row", "evaluation": "bf16"})
    assert recipe.evaluation is COMPUTES["bfloat16"] and recipe.compute_at(0.5).name == "float8-row"
    assert [row.name for row in recipe.computes] == ["float8-row", "bfloat16"]
    assert parse_table(recipe.to_dict()) == recipe and parse("float8-row/word").evaluation is None


MIXTURES = [
    (WORD, "float8", "it takes storages of its own only", "Take another"),
    (WORD, "float16-throughout", "it takes storages of its own only", "Take another"),
    (WORD, "scalify", "'scalify' with transform 'scalify', in a recipe of 'bfloat16' without a transform", "share it"),
    (parse("unit"), "scalify", "with transform 'scalify', in a recipe of 'unit' with transform 'unit'", "share it"),
    (FLOAT32, "float16", "'float16' of float16 in a recipe of 'bfloat16', which casts float32", "such as 'word'"),
    (parse("float32"), "bfloat16", "of bfloat16 in a recipe of 'float32'", "such as 'word'"),
]


@pytest.mark.parametrize(("recipe", "other", "found", "advice"), MIXTURES)
def test_computes_that_no_model_could_have_together_are_refused(
    recipe: Recipe, other: str, found: str, advice: str
) -> None:
    row = COMPUTES[other]
    beside = {
        "the phase until 0.5": {"phases": (Phase(0.5, row),)},
        "override 'lm_head'": {"overrides": (Override("lm_head", compute=row),)},
        "evaluation": {"evaluation": row},
    }
    for where, parts in beside.items():
        with pytest.raises(RecipeError) as caught:
            dataclasses.replace(recipe, **parts)
        assert str(caught.value).startswith(f"{where} asks for compute '{other}'")
        assert found in str(caught.value) and advice in caught.value.advice


def test_computes_of_other_dtypes_go_together_where_the_weights_are_narrow() -> None:
    for other in ("float16", "float32", "tfloat32", "nvfp4"):
        assert dataclasses.replace(WORD, evaluation=COMPUTES[other]).dtype == "bfloat16"
    assert dataclasses.replace(FLOAT32, phases=(Phase(0.5, COMPUTES["nvfp4"]),)).dtype == "bfloat16"
    own = parse("float8/collage-plus")
    assert dataclasses.replace(own, evaluation=own.compute).evaluation is own.compute


@pytest.mark.parametrize("ends", [(0.0,), (-0.5,), (1.5,), (0.5, 0.5), (0.9, 0.1), (float("nan"),), (1.0, 1.1)])
def test_phases_follow_each_other_within_the_run(ends: tuple[float, ...]) -> None:
    with pytest.raises(RecipeError, match=r"a phase until \S+ was asked for after \S+ of the run"):
        dataclasses.replace(WORD, phases=tuple(Phase(end, COMPUTES["float8-row"]) for end in ends))


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


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
        ("compute = 16", "which is no text"),
        ('compute = "float64"', "no recipe part is named 'float64'"),
        ('recipe = "bfloat16/word"\nkeep = "lm_head"', "no list of patterns"),
        ('recipe = "bfloat16/word"\noverride = "x"', "[[override]]"),
        ('recipe = "bfloat16/word"\n[[override]]\npattern = "x"', "It takes pattern, and storage, compute or both"),
        ('recipe = "bfloat16/word"\n[[override]]\nstorage = "split"', "the keys storage. It takes pattern"),
        (
            'recipe = "bfloat16/word"\n[[override]]\npattern = "x"\nuntil = 1\nstorage = "split"',
            "pattern, storage, until",
        ),
        ('recipe = "bfloat16/word"\n[[override]]\npattern = "x"\ncompute = "int8"', "Did you mean 'int8-row'"),
        ('recipe = "bfloat16/word"\n[[override]]\npattern = "x"\ncompute = 8', "which is no text"),
        ('recipe = "bfloat16/word"\n[[override]]\n', "the keys none"),
        ('recipe = "bfloat16/word"\nphase = "x"', "[[phase]]"),
        ('recipe = "bfloat16/word"\n[[phase]]\nuntil = 0.5', "the keys until. It takes until and compute"),
        ('recipe = "bfloat16/word"\n[[phase]]\nuntil = "half"\ncompute = "mxfp8"', "which is no number"),
        ('recipe = "bfloat16/word"\n[[phase]]\nuntil = true\ncompute = "mxfp8"', "which is no number"),
        ('recipe = "bfloat16/word"\n[[phase]]\nuntil = 2\ncompute = "mxfp8"', "at most 1"),
        ('recipe = "bfloat16/word"\n[[phase]]\nuntil = 0.5\ncompute = "mxpf8"', "Did you mean 'mxfp8'"),
        ('recipe = "bfloat16/word"\nevaluation = "bfloat"', "Did you mean 'bfloat16'"),
        ('recipe = "bfloat16/word"\nevaluation = 1', "which is no text"),
        ('recipe = "bfloat16/word"\nevaluation = "unit"', "share it"),
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
