"""Estimates for tests: by default Llama 8B in `word` on as many H100 as the layout has ranks."""

from typing import Any

from narrowgauge.planner.cluster import Cluster
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.layouts import Layout, read_layout
from narrowgauge.planner.model import read_model
from narrowgauge.planner.program import Tuning, read_program
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.parse import parse

LLAMA = read_model("llama-8b")

# Steps 1 and 10 of four H100: XilunWu, pull request 1884 of pytorch/torchtitan, 15 October 2025.
TITAN_LOG = """\
[rank0]:[titan] - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2465  memory: 33.21GiB(34.95%)  tps: 87  mfu: 0.51%
[rank0]:[titan] - INFO - \x1b[31mstep: 10  \x1b[32mloss: 10.2391  memory: 44.84GiB(47.19%)  tps: 5,615  mfu: 32.88%
"""


def estimate(
    program: str = "",
    asked: str = "",
    *,
    model: str = "llama-8b",
    chip: str = "H100-SXM",
    recipe: str = "bfloat16/word",
    length: int = 4096,
    optimizer: str = "adamw",
    **tuned: Any,
) -> Estimate:
    """Estimate with a layout as it is asked for, ``shard=8,micro_batch=2``."""
    layout = Layout(**read_layout(asked))
    cluster = Cluster(get_chip(chip), layout.num_ranks)
    loop, tuning = read_program(program), Tuning(**tuned)
    return Estimate(
        read_model(model), parse(recipe), layout, cluster, length, loop, tuning, optimizer=optimizer
    )
