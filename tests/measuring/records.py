"""A record of a run made by hand, for tests: healthy rows, to which a case adds what a fault would
write.
"""

import math
import random
from pathlib import Path
from typing import Any

from narrowgauge.runs import Record
from narrowgauge.runs.record import Run

Row = dict[str, Any]
NUM_STEPS = 160
AT = 81
"""Steps of a record, and the first step that a fault spoils."""


def healthy_steps(seed: int = 0) -> list[Row]:
    """Rows of steps whose loss falls with some noise."""
    draw = random.Random(seed)
    rows = []
    for step in range(1, NUM_STEPS + 1):
        seconds = 0.1 + draw.uniform(0, 0.01)
        row = {
            "step": step, "loss": 2.5 + 3.0 * math.exp(-step / 40) + draw.gauss(0, 0.03), "lr": 3e-3,
            "grad_norm": 0.5 * math.exp(draw.gauss(0, 0.1)), "tokens": 256 * step, "seconds": seconds,
            "tokens_per_second": 256 / seconds, "skipped": False,
        }  # fmt: skip
        rows.append(row)
    return rows


def healthy_run() -> Run:
    """A record without a fault; its lists may be changed."""
    table = {"config": {"recipe": "bfloat16/word", "lr": 3e-3}, "machine": {}}
    events = [{"what": "start", "step": 0, "text": "tiny", "severity": "note"}]
    return Run(Path("made"), table, healthy_steps(), [], events, None)


def written(run: Run, folder: Path) -> Path:
    """A record as a run folder."""
    with Record.create(folder, {"config": run.config}) as record:
        for row in run.steps:
            record.append("steps", row)
    return folder
