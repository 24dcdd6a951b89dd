"""A trace of ``torch.profiler``: the time of a GPU's kernels by the groups of a plan's step.

Names decide (``data/trace_names.toml``). Kernels that run at once all count.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
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
_STEP = "ProfilerStep#"
Span = tuple[float, float, str, str]
"""The start, duration, device and name of a kernel, or of the mark of a step."""


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
        spans = sorted(_spans(_load(path)["traceEvents"]))
        if plan is not None:
            planned = dict(_load(plan)["options"][0]["step_seconds"])
            planned.pop("total")
    except (LookupError, TypeError, ValueError) as error:
        raise RecordError(
            f"Cannot divide {path}: it has no 'traceEvents', or {plan} no 'step_seconds'.",
            "Name a file of profiler.export_chrome_trace, a run folder or a log, and the output of "
            "narrowgauge plan run … --json.",
        ) from error
    kernels = [span for span in spans if not span[3].startswith(_STEP)]
    if not kernels:
        raise RecordError(
            f"Cannot divide {path}: it has no kernel of a GPU.",
            "Of a CPU, print profiler.key_averages().table().",
        )
    steps = sum(span <= kernels[-1] for span in spans) - len(kernels) or 1
    seconds = _seconds(kernels, steps)
    total = sum(seconds.values())
    rows = []
    for group in {**seconds, **planned}:
        row = {"group": group, "seconds": seconds[group], "trace": duration_text(seconds[group])}
        row["share"] = f"{seconds[group] / total:.1%}"
        row["plan"] = duration_text(planned.get(group, 0.0)) if plan else ""
        rows.append(row)
    title = f"{path.name}: {steps} × {duration_text(total)}"
    return table_of(rows, title, hidden=("seconds",))


def _seconds(kernels: list[Span], steps: int) -> dict[str, float]:
    """Return the seconds of a step by group, the mean over devices."""
    seconds: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = {}
    for start, duration, device, name in kernels:
        before = busy.get(device, start)
        busy[device] = max(before, start + duration)
        seconds[_group(name)] += duration
        seconds["gaps"] += max(0.0, start - before)
    for group in seconds:
        seconds[group] *= 1e-6 / steps / len(busy)
    return seconds


def _load(path: Path) -> Any:
    with disk_errors(path):
        content = path.read_bytes()
    try:
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        return json.loads(content)
    except Exception as error:  # bytes that were cut or changed raise all kinds of errors
        raise RecordError(
            f"Cannot read {path}: it is no JSON ({error}).", "Write the file again."
        ) from error


def _spans(events: Any) -> list[Span]:
    """Return the kernels, and the marks of steps."""
    spans = []
    for row in events:
        with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):
            is_mark = row["cat"] == "user_annotation" and row["name"].startswith(_STEP)
            if row["ph"] == "X" and (is_mark or row["cat"] in _KERNELS):
                place = str(row.get("args", {}).get("device", row["tid"]))
                spans.append((float(row["ts"]), float(row["dur"]), place, str(row["name"])))
    return spans


def _group(name: str) -> str:
    for group, pattern in _GROUPS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return str(group)
    return f"unrecognized: {name[:80]}"
