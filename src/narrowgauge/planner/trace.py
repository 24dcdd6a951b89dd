"""A trace of ``torch.profiler``: the time of a GPU's kernels by the groups of a plan's step.

Names decide (``data/trace_names.toml``). Kernels that run at once all count.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from bisect import bisect_left
from collections import defaultdict
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.planner.words import duration_text
from narrowgauge.runs.atomic_io import disk_errors
from narrowgauge.spec.tables import Table, table_of
from narrowgauge.spec.toml import load_data

_GROUPS = load_data("trace_names", "planner")
_KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}


def is_trace(path: Path) -> bool:
    """Return whether a path names a file that may be a trace."""
    return path.name.endswith((".json", ".json.gz")) and path.is_file()


def read_trace(path: Path, plan: Path | None = None) -> Table:
    """Return the seconds of a step of a trace by group; kernels without a group have their names.

    ``gaps`` is time in which no kernel runs: the host prepares it, or waits.

    Args:
        path: written by ``profiler.export_chrome_trace``, plain or compressed.
        plan: the output of ``narrowgauge plan run --json``, to stand beside it.
    Raises:
        RecordError: a file cannot be read, or is none of these.
    """
    planned: dict[str, float] = {}
    try:
        seconds = _seconds(_load(path)["traceEvents"])
        if plan is not None:
            planned = dict(_load(plan)["options"][0]["step_seconds"])
            planned.pop("total")
    except (AttributeError, LookupError, TypeError, ValueError, OSError, EOFError) as error:
        reason = "it has no kernels of a GPU"
        if plan is not None:
            reason += f", or {plan} has no 'step_seconds'"
        raise RecordError(
            f"Cannot divide {path}: {reason}.",
            "Name a file of profiler.export_chrome_trace, a run folder or a log, and the output of "
            "narrowgauge plan run … --json. For a CPU, print profiler.key_averages().table().",
        ) from error
    total = sum(seconds.values())
    rows = []
    for group in {**seconds, **planned}:
        row = {"group": group, "seconds": seconds[group], "trace": duration_text(seconds[group])}
        row["share"] = f"{seconds[group] / total:.1%}"
        row["plan"] = duration_text(planned.get(group, 0.0)) if plan else ""
        rows.append(row)
    return table_of(rows, f"{path.name}: a step of {duration_text(total)}", hidden=("seconds",))


def _load(path: Path) -> Any:
    with disk_errors(path):
        content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def _seconds(events: Any) -> dict[str, float]:
    """Return the seconds of a step by group, the mean over devices: from the first kernel of the first
    step to the first kernel of the last one, where there are several.
    """
    kernels = sorted(
        (row for row in events if row.get("cat") in _KERNELS), key=lambda row: row["ts"]
    )
    starts = [row["ts"] for row in kernels]
    marks = _marks(events, starts[-1])
    first = 0.0
    last = math.inf
    if len(marks) > 1:  # the time after the last step is not in the trace
        first = starts[bisect_left(starts, marks[0])]
        last = starts[bisect_left(starts, marks[-1])]
    seconds: dict[str, float] = defaultdict(float)
    ends: dict[int, float] = {}
    for row in kernels:
        device = row["args"]["device"]
        if row["ts"] < first or ends.get(device, 0.0) >= last:
            continue
        begin = min(row["ts"], last)
        seconds["gaps"] += max(0.0, begin - ends.get(device, begin))
        ends[device] = max(ends.get(device, 0.0), begin)
        if row["ts"] < last:
            seconds[_group(row["name"])] += row["dur"]
            ends[device] = max(ends[device], row["ts"] + row["dur"])
    for group in seconds:
        seconds[group] *= 1e-6 / max(1, len(marks) - 1) / len(ends)
    return seconds


def _marks(events: Any, end: float) -> list[float]:
    """Return when the host began each step, up to ``end``."""
    marks = []
    for row in events:
        is_mark = row.get("cat") == "user_annotation" and row["name"].startswith("ProfilerStep#")
        if is_mark and row["ts"] <= end:
            marks.append(row["ts"])
    return sorted(marks)


def _group(name: str) -> str:
    for group, pattern in _GROUPS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return str(group)
    return f"unrecognized: {name[:80]}"
