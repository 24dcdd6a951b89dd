"""A trace of ``torch.profiler``: the time of a GPU's kernels by the groups of a plan's step.

Names decide (``data/trace_names.toml``). Kernels that run at once all count.
"""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

from narrowgauge.errors import RecordError
from narrowgauge.planner.plan_result import duration_text
from narrowgauge.spec.tables import Table, table_of
from narrowgauge.spec.toml import load_data

_GROUPS = load_data("trace_names", "planner")


def is_trace(path: Path) -> bool:
    """Return whether a path names a file that may be a trace."""
    return path.name.endswith((".json", ".json.gz")) and path.is_file()


def read_trace(path: Path, plan: Path | None = None) -> Table:
    """Return the seconds of a step of a trace by group. ``gaps`` is time in which no kernel runs.

    Args:
        path: written by ``profiler.export_chrome_trace``, plain or compressed.
        plan: the output of ``narrowgauge plan run --json``, to stand beside it.
    Raises:
        RecordError: a file cannot be read, or is none of these.
    """
    seconds: Counter[str] = Counter()
    planned = {}
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            events = json.load(file)["traceEvents"]
        if plan is not None:
            planned = json.loads(plan.read_bytes())["options"][0]["step_seconds"]
        kernels = [
            row for row in events if row.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        ]
        kernels.sort(key=lambda row: row["ts"])
        names = {str(row.get("name")) for row in events if row.get("ts", 0) <= kernels[-1]["ts"]}
        steps = sum(name.startswith("ProfilerStep#") for name in names)
        end = kernels[0]["ts"]
        for row in kernels:
            seconds["gaps"] += max(0.0, row["ts"] - end)
            seconds[_group_of(row["name"])] += row["dur"]
            end = max(end, row["ts"] + row["dur"])
    except (AttributeError, LookupError, TypeError, ValueError, OSError, EOFError) as error:
        words = "it has no kernels of a GPU"
        if plan is not None:
            words += f", or {plan} is not the output of narrowgauge plan run … --json"
        raise RecordError(
            f"Cannot divide {path}: {words}.",
            "Name a file of profiler.export_chrome_trace, a run folder or a log. For a CPU, print "
            "profiler.key_averages().table().",
        ) from error
    rows = []
    unit = 1e-6 / max(1, steps)
    for group in seconds:
        rows.append({"group": group, "seconds": unit * seconds[group], "plan": planned.get(group)})
    length = duration_text(unit * (end - kernels[0]["ts"]))
    return table_of(rows, f"{path.name}: a step of {length}; kernels that run at once all count")


def _group_of(kernel: str) -> str:
    for group, pattern in _GROUPS.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return group
    return f"unrecognized: {kernel[:80]}"
