"""Estimates for tests: by default Llama 8B in `word` on as many H100 as the layout has ranks."""

from __future__ import annotations

from typing import Any

from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.machine import cluster_of
from narrowgauge.planner.model import read_model
from narrowgauge.planner.program import Tuning, read_program
from narrowgauge.spec.notation import parse

LLAMA = read_model("llama-8b")


def estimate(program: str = "", layout: Layout | None = None, **fields: Any) -> Estimate:
    layout = layout or Layout()
    model = fields.pop("model", LLAMA)
    shape = read_model(model) if isinstance(model, str) else model
    cluster = cluster_of(fields.pop("chip", "H100-SXM"), fields.pop("chips", layout.num_ranks))
    recipe = parse(fields.pop("recipe", "bfloat16/word"))
    tuning = Tuning(
        **{k: fields.pop(k) for k in ("lora", "base", "experts", "train_embeddings") if k in fields}
    )
    length = fields.pop("length", 4096)
    return Estimate(shape, recipe, layout, cluster, length, read_program(program), tuning, **fields)
