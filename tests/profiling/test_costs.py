"""The arithmetic from parts to a step and to the fastest recipe: on made-up seconds, worked out by hand."""

from __future__ import annotations

import pytest

from narrowgauge.planner.roofline import Setting, Shape
from narrowgauge.profiling.layers import Kind, settings_of
from narrowgauge.profiling.measurement import Round
from narrowgauge.profiling.profile import cost_row, linears_seconds
from narrowgauge.spec.computes import COMPUTES, casts_made
from narrowgauge.spec.notation import parse

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


def test_casts_of_an_input_are_counted_once_for_all_that_share_it() -> None:
    assert len(CASTS) == 6
    assert linears_seconds(settings_of(KINDS, BASE), TABLE) == 2 * 4 * 9 + 9
    # q, k and v: 3 × (6 + 4 × 0.5) and 2 × 0.5 for their common input; fc: 10 + 6 × 0.5; the head is kept.
    assert linears_seconds(settings_of(KINDS, RECIPE), TABLE) == 2 * (3 * 8 + 1 + 13) + 9


def test_ratios_are_the_baselines_seconds_over_the_recipes() -> None:
    cost = cost_row(RECIPE, KINDS, [Round({BASE: 100.0, RECIPE: 80.0}, TABLE)])
    assert (cost["step_seconds"], cost["step_ratio"]) == (80.0, 1.25)
    assert cost["linears_ratio"] == pytest.approx(81 / 85) and cost["linears_share"] == pytest.approx(0.81)
    by_name = {layer["pattern"]: layer for layer in cost["layers"]}
    assert by_name["layers.*.q_proj"]["seconds"] == pytest.approx(8 + 1 / 3)
    assert by_name["layers.*.q_proj"]["ratio"] == pytest.approx(9 / (8 + 1 / 3))
    assert [layer["verdict"] for layer in cost["layers"]] == ["gains", "gains", "gains", "loses", "kept"]
    assert cost["overrides"] == ["layers.*.fc"]
    fc = by_name["layers.*.fc"]
    parts = [fc[f"{way}_{operation}_seconds"] for operation in ("cast", "matmul") for way in ("forward", "backward")]
    assert parts == [1.0, 2.0, 6.0, 4.0] and sum(parts) == fc["seconds"]
