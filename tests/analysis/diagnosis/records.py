"""Records of runs made by hand, for tests: healthy rows, to which a case adds what a fault would write."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import narrowgauge as ng
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import METRICS

Row = dict[str, Any]
NUM_STEPS, AT, EVERY = 160, 81, 10
"""Steps of a record, the first step that a fault spoils, and the steps between samples."""
_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
PARAMETERS = ("model.embed_tokens.weight", *(f"model.layers.{k}.{name}.weight" for k in (0, 1) for name in _LINEARS))
_TENSOR = {"amax": 2.0, "rms": 0.5, "nonfinite": 0, "underflow": 0.002, "overflow": 0.0, "sqnr_db": 31.5,
           "outlier": 9.0}  # fmt: skip
_UPDATE = {
    "edq": 1.0,
    "noise": 0.01,
    "lost_fraction": 0.0,
    "unseen_fraction": 0.9,
    "imprecision_share": 0.9,
    "lost_decay": 0.0,
}
_MOMENT = {"bias": 1.0, "frozen_fraction": 0.02}
_ATTENTION = {"max_logit": 12.0, "entropy": 0.7}


def healthy_steps(seed: int = 0) -> list[Row]:
    """Rows of steps whose loss falls with some noise."""
    draw = random.Random(seed)
    return [
        {
            "step": step, "loss": 2.5 + 3.0 * math.exp(-step / 40) + draw.gauss(0, 0.03), "lr": 3e-3,
            "grad_norm": 0.5 * math.exp(draw.gauss(0, 0.1)), "tokens": 256 * step, "seconds": 0.1 + draw.uniform(0, 0.01),
            "batch_crc": f"{draw.getrandbits(64):016x}", "skipped": False,
        }
        for step in range(1, NUM_STEPS + 1)
    ]  # fmt: skip


def metrics(table: str, known: Row, **changed: Any) -> list[Any]:
    """The list of a table of the gauges, in its order."""
    return [{**known, **changed}[name] for name in METRICS[table]]


def tensor(**changed: Any) -> list[Any]:
    """The metrics of a healthy tensor, with some changed."""
    return metrics("tensors", _TENSOR, **changed)


def update(**changed: Any) -> list[Any]:
    """The metrics of a healthy update, with some changed."""
    return metrics("updates", _UPDATE, **changed)


def healthy_gauges() -> list[Row]:
    """Samples of two layers' tensors, updates, moments and attention."""
    return [
        {
            "step": step,
            "tensors": {f"{kind}:{name}": tensor() for kind in ("weight", "grad") for name in PARAMETERS}
            | {
                f"{kind}:{name.removesuffix('.weight')}": tensor()
                for kind in ("input", "output_grad")
                for name in PARAMETERS[1:]
            },
            "updates": {name: update() for name in PARAMETERS},
            "moments": {name: metrics("moments", _MOMENT) for name in PARAMETERS},
            "attention": {f"model.layers.{k}.self_attn": metrics("attention", _ATTENTION) for k in (0, 1)},
        }
        for step in range(EVERY, NUM_STEPS + 1, EVERY)
    ]  # fmt: skip


def healthy_run(recipe: str = "bfloat16/word", **config: Any) -> Run:
    """A record without a fault; its lists may be changed."""
    settings = {
        "recipe": recipe, "lr": 3e-3, "eps": 1e-8, "accumulation_dtype": "float32", "gradient_accumulation_steps": 1, **config,
    }  # fmt: skip
    table = {"config": settings, "model": {"num_parameters": 1_000_000, "hidden_size": 64}, "machine": {}}
    events = [{"kind": "start", "step": 0, "message": "tiny"}]
    run = Run(Path("made"), table, healthy_steps(), [], events, None)
    run.__dict__["gauges"] = healthy_gauges()
    return run


def written(run: Run, folder: Path) -> Path:
    """A record as a run folder."""
    with ng.runs.RunWriter.create(folder, {"config": run.config}) as writer:
        for row in run.steps:
            writer.append("steps", row)
        for sample in run.gauges:
            writer.append("gauges", sample)
    return folder


def later(rows: list[Row]) -> list[Row]:
    """The rows from the fault on."""
    return [row for row in rows if row["step"] >= AT]
