"""The arithmetic from parts to a step, to memory and to the fastest recipe: on made-up seconds, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from narrowgauge.planner.time.roofline import Setting, Shape
from narrowgauge.profiling.costs import Round, cost_of, fastest_settings, linears_seconds, memory_of
from narrowgauge.profiling.layer_plan import Kind, baseline_of, plain_recipe, settings_of, timed_settings
from narrowgauge.spec.computes import COMPUTES, casts_made
from narrowgauge.spec.notation import parse, parse_table

SQUARE, WIDE = Shape(8, 8), Shape(16, 8)
Q, K, V = (Kind(f"layers.*.{name}_proj", SQUARE, 2) for name in "qkv")
UP = Kind("layers.*.fc", WIDE, 2)
HEAD = Kind("lm_head", Shape(100, 8), 1)
KINDS = (Q, K, V, UP, HEAD)
PLAIN, ROW = Setting("bfloat16"), Setting("float8-row")
# A plain layer takes 9; narrow ones 6 and their casts, of which those of the input are made once for q, k and v.
PLAIN_PARTS = {"output": 3.0, "grad_input": 3.0, "grad_weight": 3.0}
CASTS = dict.fromkeys(casts_made(COMPUTES["float8-row"]), 0.5)
ROW_PARTS = {**CASTS, "output": 2.0, "grad_input": 2.0, "grad_weight": 2.0}
TABLE = {
    (SQUARE, PLAIN): PLAIN_PARTS, (WIDE, PLAIN): PLAIN_PARTS, (HEAD.shape, PLAIN): PLAIN_PARTS,
    (SQUARE, ROW): ROW_PARTS, (WIDE, ROW): {**ROW_PARTS, "output": 6.0},
}  # fmt: skip
RECIPE = parse("float8-row/word")
BASE = parse("bfloat16/word")
WEIGHT_BYTES = {PLAIN: 0.0, ROW: 2.0}


def test_casts_of_an_input_are_counted_once_for_all_that_share_it() -> None:
    assert len(CASTS) == 6
    assert linears_seconds(settings_of(KINDS, BASE), TABLE) == 2 * 4 * 9 + 9
    # q, k and v: 3 × (6 + 4 × 0.5) and 2 × 0.5 for their common input; fc: 10 + 6 × 0.5; the head is kept.
    assert linears_seconds(settings_of(KINDS, RECIPE), TABLE) == 2 * (3 * 8 + 1 + 13) + 9


def test_a_step_is_the_rest_and_the_linear_layers() -> None:
    rest = 19.0
    rounds = [Round({BASE: 81 + rest}, TABLE)]
    cost = cost_of(RECIPE, KINDS, rounds, 5, WEIGHT_BYTES)
    assert cost.step_seconds == pytest.approx(85 + rest)
    assert cost.step_ratio == pytest.approx(100 / 104)
    assert cost.linears_ratio == pytest.approx(81 / 85)
    assert cost.linears_share == pytest.approx(0.81)
    by_name = {layer.kind.pattern: layer for layer in cost.kinds}
    assert by_name["layers.*.q_proj"].seconds == pytest.approx(8 + 1 / 3)
    assert by_name["layers.*.q_proj"].ratio == pytest.approx(9 / (8 + 1 / 3))
    assert [layer.verdict for layer in cost.kinds] == ["gains", "gains", "gains", "loses", "kept"]
    # Without fc: 2 × (25 + 9) + 9.
    assert cost.overrides == ("layers.*.fc",)
    assert cost.fastest_ratio == pytest.approx(100 / (77 + rest))


def test_what_layers_take_beyond_their_parts_is_read_from_a_block() -> None:
    # All blocks in bfloat16 take 80, of which linear layers 72; in the row 30 more, where the parts say 4 more.
    round = Round({BASE: 100.0}, TABLE, {BASE: 80.0, RECIPE: 110.0})
    cost = cost_of(RECIPE, KINDS, [round], 5, WEIGHT_BYTES)
    factor = (72 + 30) / 76
    assert cost.block_factor == pytest.approx(factor)
    assert cost.step_ratio == pytest.approx(100 / 130)
    assert cost.linears_ratio == pytest.approx(81 / (81 + 30))
    fc = next(layer for layer in cost.kinds if layer.kind == UP)
    assert fc.seconds == pytest.approx(13 * factor)
    assert sum(fc.operations.values()) == 13, "operations are reported as they were timed"
    head = next(layer for layer in cost.kinds if layer.kind == HEAD)
    assert (head.seconds, head.baseline_seconds) == (9, 9)
    # q, k and v too lose now: 25 × 102/76 against 27.
    assert cost.fastest_ratio == 1
    assert len(cost.overrides) == 4


def test_a_block_timed_in_a_better_moment_makes_no_layer_free() -> None:
    cost = cost_of(RECIPE, KINDS, [Round({BASE: 100.0}, TABLE, {BASE: 300.0, RECIPE: 100.0})], 5, WEIGHT_BYTES)
    assert cost.step_ratio == pytest.approx(100 / (19 + 9 + 76 / 2))


def test_ratios_are_taken_within_a_round() -> None:
    slow = {key: {part: 10 * seconds for part, seconds in parts.items()} for key, parts in TABLE.items()}
    rounds = [Round({BASE: 100.0}, TABLE), Round({BASE: 1000.0}, slow), Round({BASE: 100.0}, TABLE)]
    assert cost_of(RECIPE, KINDS, rounds, 5, WEIGHT_BYTES).step_ratio == pytest.approx(100 / 104)


def test_casts_and_matmuls_of_each_direction_are_separate() -> None:
    [fc] = [k for k in cost_of(RECIPE, KINDS, [Round({BASE: 100.0}, TABLE)], 5, WEIGHT_BYTES).kinds if k.kind == UP]
    told = [fc.seconds_of(casts=c, forward=f) for c in (True, False) for f in (True, False)]
    assert told == [1.0, 2.0, 6.0, 4.0]
    assert sum(told) == fc.seconds


def test_the_fastest_file_is_a_recipe_that_does_what_it_says() -> None:
    cost = cost_of(RECIPE, KINDS, [Round({BASE: 100.0}, TABLE)], 5, WEIGHT_BYTES)
    again = parse_table(cost.fastest)
    assert [again.compute_of(kind.name).name for kind in KINDS] == ["float8-row"] * 3 + ["bfloat16"] * 2
    assert again.storage == RECIPE.storage


def test_where_every_layer_loses_the_fastest_is_the_plain_recipe() -> None:
    table = {**TABLE, (SQUARE, ROW): {**ROW_PARTS, "output": 9.0}}
    cost = cost_of(RECIPE, KINDS, [Round({BASE: 100.0}, table)], 5, WEIGHT_BYTES)
    assert parse_table(cost.fastest) == BASE
    assert cost.fastest_ratio == 1


@pytest.mark.parametrize(("output", "chosen"), [(2.4, ROW), (2.5, ROW), (2.9, PLAIN)])
def test_layers_with_one_input_are_chosen_for_together(output: float, chosen: Setting) -> None:
    """Each alone would pay the cast of the input by itself, and lose: 9.4 and more against 9."""
    parts = {**ROW_PARTS, "output": output}
    own = sum(parts.values()) - 1
    assert own < 9 < own + 1
    rows = fastest_settings(settings_of((Q, K, V), RECIPE), {**TABLE, (SQUARE, ROW): parts})
    assert list(rows.values()) == [chosen] * 3


def test_a_difference_that_could_be_noise_changes_nothing() -> None:
    rows = settings_of([UP], RECIPE)
    slower = [{**PLAIN_PARTS, "output": 3.0 + extra} for extra in (0.17, 0.19)]
    chosen = [fastest_settings(rows, {**TABLE, (WIDE, ROW): parts})[UP] for parts in slower]
    assert chosen == [ROW, PLAIN]


def test_memory_counts_an_input_once_for_each_form_it_is_kept_in() -> None:
    recipe = parse("int8-row/word")
    rows, plain = settings_of(KINDS, recipe), settings_of(KINDS, BASE)
    codes = Setting("int8-row")
    tokens = 5
    memory = memory_of(rows, plain, tokens, {codes: 1.0, PLAIN: 0.0})
    inputs = 2 * tokens * 8
    assert memory.baseline_kept == 2 * inputs + 2 * inputs + 2 * tokens * 8
    assert memory.kept == inputs + inputs + 2 * tokens * 8
    assert memory.weight_casts == 2 * (3 * 64 + 128)
    mixed = memory_of({**rows, K: PLAIN}, plain, tokens, {codes: 1.0, PLAIN: 0.0})
    assert mixed.kept == memory.kept + 2 * inputs, "q and v keep codes, k the values"


@pytest.mark.parametrize(
    ("name", "base", "yardstick"),
    [
        ("float8-row/word", "bfloat16/word", "bfloat16/word"),
        ("int8-row/float32", "bfloat16/float32", "bfloat16/float32"),
        ("float32/float32", "float32/float32", "bfloat16/float32"),
        ("tfloat32/float32", "float32/float32", "bfloat16/float32"),
        ("float16/split", "float16/split", "bfloat16/word"),
        ("float8/collage-plus", "float8/collage-plus", "bfloat16/word"),
        ("bfloat16/word", "bfloat16/word", "bfloat16/word"),
    ],
)
def test_each_recipe_has_a_plain_base_and_a_bfloat16_yardstick(name: str, base: str, yardstick: str) -> None:
    recipe = parse(name)
    assert (plain_recipe(recipe).name, baseline_of(recipe).name) == (base, yardstick)
    assert all(setting.is_plain for setting in settings_of(KINDS, plain_recipe(recipe)).values())
    assert all(setting.compute == "bfloat16" for setting in settings_of(KINDS, baseline_of(recipe)).values())


def test_storages_of_some_layers_stay_in_the_base() -> None:
    given = {"recipe": "int8-row/word", "override": [{"pattern": "*fc*", "storage": "exact", "compute": "bfloat16"}]}
    recipe = parse_table(given)
    assert [o.storage.name for o in plain_recipe(recipe).overrides if o.storage] == ["exact"]
    assert plain_recipe(recipe).computes == (COMPUTES["bfloat16"],)
    assert settings_of(KINDS, recipe)[UP] == PLAIN


def test_what_a_recipe_keeps_is_float32() -> None:
    recipe = replace(RECIPE, keep=("layers.*.fc",))
    assert settings_of(KINDS, recipe)[UP] == Setting("float32", "float32", "float32")
    assert settings_of(KINDS, parse("int8-row/float32"))[Q] == Setting("int8-row", "bfloat16", "float32")


def test_everything_that_a_cost_reads_is_asked_for() -> None:
    recipes = [parse(name) for name in ("float8-row/word", "float32/float32", "float16/split", "tfloat32/float32")]
    needed = timed_settings(KINDS, recipes)
    assert len(needed) == len(set(needed))
    steps = {other: 100.0 for recipe in recipes for other in (plain_recipe(recipe), baseline_of(recipe))}
    rounds = [Round(steps, dict.fromkeys(needed, PLAIN_PARTS))]
    for recipe in recipes:
        cost = cost_of(recipe, KINDS, rounds, 5, {setting: 0.0 for _, setting in needed})
        assert cost.step_ratio == 1


@pytest.mark.parametrize("row", [row for row in COMPUTES.values() if not row.is_wide], ids=lambda row: row.name)
def test_a_row_makes_no_cast_that_another_serves_for(row: object) -> None:
    made = casts_made(row)  # type: ignore[arg-type]
    assert "output.left" in made and "output.right" in made
    assert ("grad_input.right" in made) == (not row.reuses_weight and not row.grad_input.right.is_wide)  # type: ignore[attr-defined]
