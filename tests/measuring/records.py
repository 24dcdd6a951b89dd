"""Records of runs made by hand, for tests: healthy rows, to which a case adds what a fault would
write.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from narrowgauge.runs import Record
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import METRICS

Row = dict[str, Any]
NUM_STEPS = 160
AT = 81
EVERY = 10
"""Steps of a record, the first step that a fault spoils, and the steps between samples."""
LAYER = "model.layers.1.mlp.down_proj"
OTHER = "model.layers.0.mlp.down_proj"
ATTENTION = "model.layers.1.self_attn"

HEALTHY: Row = {
    "tensor": {"underflow": 0.002, "overflow": 0.0, "sqnr_db": 31.5, "outlier": 9.0},
    "attention": {"max_logit": 12.0},
}  # fmt: skip


def gauges(step: int, **wrong: Any) -> Row:
    """A row of two layers; ``input=…`` and so on change figures of the second one."""

    def figures(kind: str, name: str, bad: bool) -> list[float | None]:
        healthy = HEALTHY["tensor" if name == "tensors" else kind]
        values = []
        for field in METRICS[name]:
            values.append({**healthy, **(wrong.get(kind, {}) if bad else {})}[field])
        return values

    tensors = {}
    for kind in ("input", "output_grad"):
        for layer in (OTHER, LAYER):
            tensors[f"{kind}:{layer}"] = figures(kind, "tensors", layer == LAYER)
    return {
        "step": step,
        "tensors": tensors,
        "attention": {ATTENTION: figures("attention", "attention", True)},
    }


def healthy_steps(seed: int = 0) -> list[Row]:
    """Rows of steps whose loss falls with some noise."""
    draw = random.Random(seed)
    rows: list[Row] = [
        {
            "step": step, "loss": 2.5 + 3.0 * math.exp(-step / 40) + draw.gauss(0, 0.03), "lr": 3e-3,
            "grad_norm": 0.5 * math.exp(draw.gauss(0, 0.1)), "tokens": 256 * step, "seconds": 0.1 + draw.uniform(0, 0.01),
            "batch_crc": f"{draw.getrandbits(64):016x}", "skipped": False,
        }
        for step in range(1, NUM_STEPS + 1)
    ]  # fmt: skip
    return [{**row, "tokens_per_second": 256 / row["seconds"]} for row in rows]


def healthy_run(recipe: str = "bfloat16/word") -> Run:
    """A record without a fault; its lists may be changed."""
    settings = {
        "recipe": recipe,
        "lr": 3e-3,
        "eps": 1e-8,
        "accumulation_dtype": "float32",
        "gradient_accumulation_steps": 1,
    }
    table = {
        "config": settings,
        "model": {"num_parameters": 1_000_000, "hidden_size": 64},
        "machine": {},
    }
    events = [{"what": "start", "step": 0, "text": "tiny", "severity": "note"}]
    run = Run(Path("made"), table, healthy_steps(), [], events, None)
    run.__dict__["gauges"] = [gauges(step) for step in range(EVERY, NUM_STEPS + 1, EVERY)]
    return run


def written(run: Run, folder: Path) -> Path:
    """A record as a run folder."""
    with Record.create(folder, {"config": run.config}) as writer:
        for row in run.steps:
            writer.append("steps", row)
        for sample in run.gauges:
            writer.append("gauges", sample)
    return folder
