"""Rates and memories of many jobs as one file: a fold of the planner moves none of them.

``./dev test --update-golden tests/planner/test_golden_plans.py`` records them again, and the diff
shows what moved.
"""

import json
from pathlib import Path
from random import Random

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.layouts import suits
from narrowgauge.planner.program import PROGRAMS
from planner.jobs import estimate

FILE = Path(__file__).parents[1] / "golden" / "plans.json"
MODELS = ("llama-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt3-175b", "mpt-7b", "gpt2-124m")
CHIPS = ("H100-SXM", "A100-SXM4-40GB", "B200-SXM", "RTX-4090", "MI300X", "V100-SXM2-32GB")
RECIPES = ("bfloat16/word", "bfloat16/master", "float8-row/states8", "bfloat16/float32", "float16/split", "mxfp8/compact",
           "nvfp4/word/reproducible")  # fmt: skip
LAYOUTS = (
    "shard=8,micro_batch=2,micro_batches=4",
    "shard=4,tensor=2,recompute=full,micro_batches=2",
    "data=2,shard=2,zero=1,pipeline=2,micro_batches=8,recompute=selective",
    "shard=8,zero=2,expert=4,micro_batches=2,accumulation_dtype=bfloat16",
    "shard=2,context=4,recompute=selective",
    "shard=4,tensor=4,pipeline=4,interleave=2,micro_batches=16,expert=4,recompute=full",
    "shard=8,tensor=2,expert=16,micro_batches=4",
)  # fmt: skip
LOOPS = (*PROGRAMS, "offload=true", "release=true")
TUNED = (
    {},
    {},
    {"lora": 16, "base": "nf4"},
    {"lora": 64},
)
OPTIMIZERS = ("adamw", "adamw", "lion", "muon", "muon", "galore")


def figures():
    """Return tokens per second, bytes on the chip and the host, and MFU of drawn jobs by name."""
    draw = Random(0).choice
    rows = {}
    while len(rows) < 100:
        question = {
            "model": draw(MODELS), "chip": draw(CHIPS), "recipe": draw(RECIPES), "length": draw((2048, 65_536)),
            "optimizer": draw(OPTIMIZERS), "asked": draw(LAYOUTS), "program": draw(LOOPS),
        }  # fmt: skip
        tuned = draw(TUNED)
        try:
            job = estimate(**question, **tuned)
        except NarrowgaugeError:
            continue
        if not suits(job.architecture, job.layout, job.sequence_length):
            continue
        question |= {"asked": str(job.layout), "tuned": " ".join(tuned)}
        figures = job.tokens_per_second, job.peak_bytes, job.host_bytes, job.mfu
        rows[", ".join(map(str, question.values()))] = [float(f"{x:.8g}") for x in figures]
    return rows


def test_no_rate_and_no_memory_moved(update_golden):
    rows = figures()
    if update_golden:
        text = ",\n".join(f"{json.dumps(name)}: {values}" for name, values in rows.items())
        FILE.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    assert rows.keys() == recorded.keys()
    for name, values in rows.items():
        assert values == pytest.approx(recorded[name], rel=1e-6), name
