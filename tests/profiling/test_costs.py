"""Costs of recipes from made-up seconds, worked out by hand."""

from __future__ import annotations

from narrowgauge.profiling.layers import Kind
from narrowgauge.profiling.measurement import Times
from narrowgauge.profiling.profile import cost_row
from narrowgauge.spec.notation import parse

RECIPE, BASE = parse("float8-row/word"), parse("bfloat16/word")
KINDS = (
    Kind("layers.*.q_proj", 8, 8, ("layers.0.q_proj", "layers.1.q_proj")),
    Kind("layers.*.fc", 16, 8, ("layers.0.fc", "layers.1.fc")),
    Kind("lm_head", 100, 8, ("lm_head",)),
)
WIDE = {kind.pattern: [(3.0, 9.0), (6.0, 18.0)] for kind in KINDS}
NARROW = {
    "layers.*.q_proj": [(2.0, 8.0), (4.0, 16.0)],
    "layers.*.fc": [(4.0, 12.0), (8.0, 24.0)],
    "lm_head": [(3.0, 9.0), (6.0, 18.0)],
}
LAYERS = {(of, name): seconds for of, table in ((BASE, WIDE), (RECIPE, NARROW)) for name, seconds in table.items()}


def test_ratios_are_the_baselines_seconds_over_the_recipes_in_each_round() -> None:
    """A second round on a machine of half the speed."""
    cost = cost_row(RECIPE, Times(KINDS, {BASE: [100.0, 200.0], RECIPE: [80.0, 160.0]}, LAYERS))
    assert (cost["step_seconds"], cost["step_ratio"], cost["step_ratio_range"]) == (120.0, 1.25, (1.25, 1.25))
    q, fc, head = cost["layers"]
    assert (q["forward_seconds"], q["seconds"], q["baseline_seconds"], q["ratio"]) == (3.0, 12.0, 13.5, 9 / 8)
    assert (fc["ratio"], head["ratio"]) == (0.75, 1.0)
    assert [layer["compute"] for layer in (q, fc, head)] == ["float8-row", "float8-row", "bfloat16"]
