"""Estimates for tests: by default Llama 8B in `word` on as many H100 as the layout has ranks."""

from __future__ import annotations

from typing import Any

from narrowgauge.planner.efficiency import Efficiency, efficiency_of
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.machine import cluster_of
from narrowgauge.planner.model import read_model
from narrowgauge.planner.program import DEFAULT, read_program, with_parts
from narrowgauge.planner.search import search
from narrowgauge.planner.shapes import Architecture
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.notation import parse

LLAMA = read_model("llama-8b")


def estimate(program: str = "", layout: Layout | None = None, **fields: Any) -> Estimate:
    layout = layout or Layout()
    model = fields.pop("model", LLAMA)
    shape = model if isinstance(model, Architecture) else read_model(model)
    chips = fields.pop("chips", layout.num_ranks)
    cluster = fields.pop("cluster", cluster_of(fields.pop("chip", "H100-SXM"), chips))
    recipe = parse(fields.pop("recipe", "bfloat16/word"))
    loop = with_parts(read_program(program), fields.pop("parts", {}))
    length = fields.pop("length", 4096)
    return Estimate(shape, recipe, layout, cluster, length, program=loop, **fields)


def best(tokens: float | None = None, fixed: Any = None, **fields: Any) -> Estimate:
    return search(estimate(**fields), tokens, fixed)


def exact(**rows: float) -> Efficiency:
    """Shares of an H100 that reach every printed rate, start kernels in no time and hide nothing."""
    values = {}
    for name in efficiency_of(get_chip("H100-SXM"), DEFAULT).values:
        is_zero = name.endswith("seconds") or name.startswith(("overlap", "slowed"))
        values[name] = 0.0 if is_zero else 1.0
    return Efficiency({**values, "spread": 0.0, **rows})
