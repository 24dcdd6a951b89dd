"""A trace of ``torch.profiler``: the time of a GPU's kernels by the groups of a plan's step.

Names decide (``data/trace_names.toml``). Kernels that run at once all count.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.planner.words import duration_text
from narrowgauge.spec.tables import Table, table_of
from narrowgauge.spec.toml import load_data

_GROUPS: dict[str, str] = load_data("trace_names", "planner")


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
    rows = []
    planned: dict[str, float] = {}
    try:
        seconds = _seconds(_load(path)["traceEvents"])
        if plan is not None:
            planned = _load(plan)["options"][0]["step_seconds"]
    except (AttributeError, LookupError, TypeError, ValueError, OSError, EOFError) as error:
        raise RecordError(
            f"Cannot divide {path}: it has no kernels of a GPU, or {plan} has no 'step_seconds'.",
            "Name a file of profiler.export_chrome_trace, a run folder or a log, and the output of "
            "narrowgauge plan run … --json. For a CPU, print profiler.key_averages().table().",
        ) from error
    for group, spent in seconds.items():
        rows.append({"group": group, "seconds": spent, "plan": planned.get(group)})
    return table_of(rows, f"{path.name}: a step of {duration_text(seconds.total())}")


def _load(path: Path) -> Any:
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def _seconds(events: Any) -> Counter[str]:
    """Return the seconds of a step by group, the mean over devices."""
    kernels = [row for row in events if row.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels.sort(key=lambda row: row["ts"])
    marks = [row["ts"] for row in events if str(row.get("name")).startswith("ProfilerStep#")]
    last = kernels[-1]["ts"]
    seconds: Counter[str] = Counter()
    ends: dict[int, float] = {}
    for row in kernels:
        device = row["args"]["device"]
        begun = row["ts"]
        known = [
            group for group in _GROUPS if re.search(_GROUPS[group], row["name"], re.IGNORECASE)
        ]
        seconds["gaps"] += max(0.0, begun - ends.get(device, begun))
        seconds[[*known, f"unrecognized: {row['name'][:80]}"][0]] += row["dur"]
        ends[device] = max(ends.get(device, 0.0), begun + row["dur"])
    for group in seconds:
        seconds[group] *= 1e-6 / max(1, sum(mark <= last for mark in marks)) / len(ends)
    return seconds
