"""The arithmetic from layers to a step and to the fastest recipe: on made-up seconds, worked out by hand."""

from __future__ import annotations

import pytest

from narrowgauge.profiling.layers import Kind
from narrowgauge.profiling.measurement import Round
from narrowgauge.profiling.profile import cost_row
from narrowgauge.spec.notation import parse

RECIPE, BASE = parse("float8-row/word"), parse("bfloat16/word")
KINDS = (
    Kind("layers.*.q_proj", 8, 8, ("layers.0.q_proj", "layers.1.q_proj")),
    Kind("layers.*.fc", 16, 8, ("layers.0.fc", "layers.1.fc")),
    Kind("lm_head", 100, 8, ("lm_head",)),
)
WIDE = dict.fromkeys((kind.pattern for kind in KINDS), (3.0, 9.0))
NARROW = {"layers.*.q_proj": (2.0, 8.0), "layers.*.fc": (4.0, 13.0), "lm_head": (3.0, 9.0)}
LAYERS = {(of, name): seconds for of, table in ((BASE, WIDE), (RECIPE, NARROW)) for name, seconds in table.items()}


def test_ratios_are_the_baselines_seconds_over_the_recipes() -> None:
    cost = cost_row(RECIPE, KINDS, [Round({BASE: 100.0, RECIPE: 80.0}, LAYERS)])
    assert (cost["step_seconds"], cost["step_ratio"]) == (80.0, 1.25)
    # Two blocks and the head: 2 × (9 + 9) + 9 over 2 × (8 + 13) + 9.
    assert cost["linears_ratio"] == pytest.approx(45 / 51) and cost["linears_share"] == pytest.approx(0.45)
    q, fc, head = cost["layers"]
    assert (q["forward_seconds"], q["seconds"], q["baseline_seconds"], q["ratio"]) == (2.0, 8.0, 9.0, 9 / 8)
    assert [layer["verdict"] for layer in (q, fc, head)] == ["gains", "loses", "kept"]
    assert cost["overrides"] == ["layers.*.fc"]
    assert cost["fastest"]["override"] == [{"pattern": "layers.*.fc", "compute": "bfloat16"}]
