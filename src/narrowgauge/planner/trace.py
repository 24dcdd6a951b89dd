"""A trace of ``torch.profiler``, its time summed by the groups of a plan's step.

Of a GPU the kernels count. Of a CPU the operations in the thread of the steps count, each without
those that it calls. Names decide (``data/trace_names.toml``). Kernels that run at once all count.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.errors import RecordError
from narrowgauge.planner.words import duration_text
from narrowgauge.runs.atomic_io import disk_errors
from narrowgauge.spec.tables import Table, table_of
from narrowgauge.spec.toml import load_data

UNKNOWN = "unrecognized"
_PATTERNS = load_data("trace_names", "planner")
_KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}
_WITH_CALLEES = {"optimizer", "loader", "communication", "loss", "attention", "casts"}
"""Groups of operations whose callees belong to them, whatever they are."""


class Span(NamedTuple):
    """Hold an event in microseconds, and what the profiler says of it."""

    start: float
    end: float
    name: str
    kind: str
    place: str


def is_trace(path: Path) -> bool:
    """Return whether a path names a file that may be a trace."""
    return path.name.endswith((".json", ".json.gz")) and path.is_file()


def read_trace(path: Path, plan: Path | None = None) -> Table:
    """Return the seconds of a step of a trace by group, and the longest names without a group.

    ``gaps`` is time in which no work runs: the host prepares it, or waits.

    Args:
        path: written by ``profiler.export_chrome_trace``, plain or compressed.
        plan: the output of ``narrowgauge plan run --json``, to stand beside it.
    Raises:
        RecordError: a file cannot be read, or is none of these.
    """
    spans = _spans(_load(path))
    marks = [span for span in spans if span.name.startswith("ProfilerStep#")]
    work = [span for span in spans if span.kind in _KERNELS]
    kind = "kernels"
    if not work:
        kind = "operations"
        # The step waits for the threads of gloo and of a loader: their time would count twice.
        threads = {mark.place for mark in marks} or {span.place for span in spans}
        work = [span for span in spans if span.place in threads and span not in marks]
    if not work:
        raise RecordError(
            f"No time in {path}: it has no operation and no kernel in a list 'traceEvents'.",
            "Name a file of profiler.export_chrome_trace, a run folder, or a log.",
        )
    steps = 0
    for mark in marks:
        steps += any(mark.start <= span.start < mark.end for span in work)
    devices = len({span.place for span in work}) if kind == "kernels" else 1
    scale = 1e-6 / max(1, steps) / devices
    seconds: dict[str, float] = defaultdict(float)
    for (group, name), microseconds in _times(work, kind).items():
        seconds[group] += scale * microseconds
        if group == UNKNOWN:
            seconds[f"{UNKNOWN}: {name[:80]}"] += scale * microseconds
    total = sum(value for group, value in seconds.items() if ":" not in group)
    planned = _planned(plan) if plan else {}
    rows = []
    for group in dict.fromkeys((*seconds, *planned)):
        row = {"group": group, "seconds": seconds[group], "trace": duration_text(seconds[group])}
        row["share"] = f"{seconds[group] / total:.1%}"
        row["plan"] = duration_text(planned.get(group, 0.0)) if plan else ""
        rows.append(row)
    title = f"{path.name}: {max(1, steps)} × {duration_text(total)}, {kind}"
    return table_of(rows, title, hidden=("seconds",))


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


def _planned(path: Path) -> dict[str, float]:
    """Return the seconds of a step by group, of the best option of a plan."""
    try:
        seconds = _load(path)["options"][0]["step_seconds"]
        return {name: float(seconds[name]) for name in seconds if name != "total"}
    except (LookupError, TypeError, ValueError) as error:
        raise RecordError(
            f"No plan in {path}: it has no 'step_seconds'.",
            "Write one with narrowgauge plan run … --json.",
        ) from error


def _spans(trace: Any) -> list[Span]:
    """Return the operations, kernels and marks that have a start and a duration, the first first."""
    kinds = {"cpu_op", "user_annotation", *_KERNELS}
    spans = []
    for row in trace.get("traceEvents", ()) if isinstance(trace, dict) else ():
        with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):
            if row["ph"] == "X" and row["cat"] in kinds:
                place = row.get("args", {}).get("device", row["tid"])
                start = float(row["ts"])
                spans.append(
                    Span(start, start + float(row["dur"]), str(row["name"]), row["cat"], str(place))
                )
    return sorted(spans, key=lambda span: (span.start, -span.end))


def _group(table: str, name: str) -> str:
    for group, pattern in _PATTERNS[table].items():
        if re.search(pattern, name, re.IGNORECASE):
            return str(group)
    return UNKNOWN


def _times(spans: list[Span], kind: str) -> dict[tuple[str, str], float]:
    """Return the microseconds by group and name: of kernels with the gaps between them, of
    operations without those that they call.
    """
    times: dict[tuple[str, str], float] = defaultdict(float)
    busy: dict[str, float] = {}
    running: dict[str, list[tuple[Span, str]]] = defaultdict(list)
    for span in spans:
        group = _group(kind, span.name)
        outer = running[span.place]
        while outer and (outer[-1][0].end <= span.start or kind == "kernels"):
            outer.pop()
        if outer:
            caller, of_caller = outer[-1]
            if of_caller in _WITH_CALLEES or group == UNKNOWN:
                group = of_caller
            times[of_caller, caller.name] -= span.end - span.start
        times[group, span.name] += span.end - span.start
        outer.append((span, group))
        if kind == "kernels":
            before = busy.get(span.place, span.start)
            times["gaps", ""] += max(0.0, span.start - before)
            busy[span.place] = max(before, span.end)
    return times
