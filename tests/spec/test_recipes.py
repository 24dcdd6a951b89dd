"""Recipes: the tables' figures, contradictions, and what a recipe says of each name and each step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from narrowgauge.errors import RecipeError
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.formats import FORMATS
from narrowgauge.spec.notation import parse, parse_table, parse_value
from narrowgauge.spec.recipes import Override, Phase, Recipe
from narrowgauge.spec.storages import STORAGES

WORD = parse("bfloat16/word")
FLOAT32 = parse("bfloat16/float32")


@pytest.mark.parametrize(
    ("compute", "storage", "advice"),
    [
        ("float16", "split", "Take 'float16/split'"),
        ("bfloat16", "float16/split", "Take compute 'float16'"),
        ("float16", "float8/collage-plus", "Take 'float16/collage-plus'"),
        ("float16", "float16-throughout/naive", "Take 'float16/naive'"),
        ("float8", "word", "Take storage 'collage-light', 'collage-plus', or compute 'float8-row'."),
    ],
)
def test_rows_that_do_not_fit_are_refused(compute: str, storage: str, advice: str) -> None:
    with pytest.raises(RecipeError, match=f"compute '{compute}' was requested with storage '{storage}'") as caught:
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
        (
            "float32/word",
            {
                "residual": "float32",
                "logits": "float32",
                "weights seen": "bfloat16",
                "kept for backward": "float32, 4 bytes",
            },
        ),
        ("tfloat32", {"residual": "float32", "logits": "float32", "kept for backward": "tfloat32, 4 bytes"}),
        ("float16/word", {"residual": "float16", "logits": "float16", "kept for backward": "float16, 2 bytes"}),
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
        ("tfloat32/word", "float32"),
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
    (WORD, "float8", "it takes its own storages only", "Take another"),
    (WORD, "float16-throughout", "it takes its own storages only", "Take another"),
    (
        WORD,
        "scalify",
        "'scalify' with transform 'scalify', in a recipe of 'bfloat16' without a transform",
        "the same transform",
    ),
    (
        parse("unit"),
        "scalify",
        "with transform 'scalify', in a recipe of 'unit' with transform 'unit'",
        "the same transform",
    ),
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
        assert str(caught.value).startswith(f"{where} has compute '{other}'")
        assert found in str(caught.value) and advice in caught.value.advice


def test_computes_of_other_dtypes_go_together_where_the_weights_are_narrow() -> None:
    for other in ("float16", "float32", "tfloat32", "nvfp4"):
        assert dataclasses.replace(WORD, evaluation=COMPUTES[other]).dtype == "bfloat16"
    assert dataclasses.replace(FLOAT32, phases=(Phase(0.5, COMPUTES["nvfp4"]),)).dtype == "bfloat16"
    own = parse("float8/collage-plus")
    assert dataclasses.replace(own, evaluation=own.compute).evaluation is own.compute


@pytest.mark.parametrize("ends", [(0.0,), (-0.5,), (1.5,), (0.5, 0.5), (0.9, 0.1), (float("nan"),), (1.0, 1.1)])
def test_phases_follow_each_other_within_the_run(ends: tuple[float, ...]) -> None:
    with pytest.raises(RecipeError, match=r"a phase until \S+ was requested after \S+ of the run"):
        dataclasses.replace(WORD, phases=tuple(Phase(end, COMPUTES["float8-row"]) for end in ends))


def test_recipes_are_values() -> None:
    assert hash(parse("bfloat16/word")) == hash(Recipe(COMPUTES["bfloat16"], STORAGES["word"]))


@pytest.mark.parametrize(
    "table",
    [
        {"recipe": "bf16/word"},
        {"recipe": "float8-row/split", "name": "no part of what it is"},
        {"recipe": "bfloat16/tail8+e6m5+float32"},
        {"recipe": "float8-delayed+smooth/word"},
    ],
)
def test_a_plain_recipe_is_written_as_its_name(table: dict[str, str]) -> None:
    recipe = parse_table(table)
    assert recipe.is_plain and recipe.to_value() == recipe.title == recipe.name
    assert parse_value(recipe.to_value()) == recipe == parse_value(recipe.to_dict()) == parse_value(recipe)


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({"keep": ["lm_head"]}, "keep"),
        ({"evaluation": "float32"}, "evaluation"),
        ({"override": [{"pattern": "*.up_proj", "compute": "int8-row"}]}, "override"),
        ({"phase": [{"until": 0.5, "compute": "int8-row"}], "keep": ["lm_head"]}, "keep, phase"),
    ],
)
def test_a_recipe_with_exceptions_is_written_as_its_table(more: dict[str, Any], kinds: str) -> None:
    recipe = parse_table({"recipe": "bfloat16/word", **more})
    assert (
        not recipe.is_plain and recipe.to_value() == recipe.to_dict() and recipe.title == f"bfloat16/word with {kinds}"
    )
    assert parse_value(recipe.to_value()) == recipe != WORD
    named = parse_table({"recipe": "bfloat16/word", "name": "mine", **more})
    assert parse_value(named.to_value()).title == named.title == "bfloat16/word (mine)" and named == recipe


@pytest.mark.parametrize("value", [3, None, ["bfloat16/word"], True])
def test_a_value_of_another_type_is_no_recipe(value: Any) -> None:
    with pytest.raises(RecipeError, match=r"a\.toml has recipe = .*A recipe is a name in quotes, or a table"):
        parse_value(value, "a.toml")
