"""A trace of ``torch.profiler``, its time summed by the groups of a plan's step.

Of a GPU the kernels count. Of a CPU the operations in the thread of the steps count, each without
those that it calls. Names decide (``data/trace_names.toml``). Kernels that run at once all count.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.errors import RecordError
from narrowgauge.planner.units import duration_text
from narrowgauge.runs.atomic_io import disk_errors, load_json
from narrowgauge.spec.tables import Column, Table, number_columns
from narrowgauge.spec.toml import load_data

UNKNOWN = "unrecognized"
_PATTERNS = load_data("trace_names", "planner")
_ORDER = ("matmuls", "attention", "loss", "optimizer", "casts", "elementwise", "copies")
_KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}
_WITH_CALLEES = {"optimizer", "loader", "communication", "loss", "attention", "casts"}
"""Groups of operations whose callees belong to them, whatever they are."""
_BROKEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


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
    spans = list(_spans(_load(path)))
    kernels = [span for span in spans if span.kind in _KERNELS]
    marks = [span for span in spans if span.name.startswith("ProfilerStep#")]
    host = [span for span in spans if span.kind not in _KERNELS and "Profiler" not in span.name]
    if marks and not kernels:
        # The step waits for the threads of gloo and of a loader: their time would count twice.
        host = [span for span in host if span.place == marks[0].place]
    times = _kernel_times(kernels) if kernels else _operation_times(host)
    if not times:
        raise RecordError(
            f"No time in {path}: it has no operation and no kernel in a list 'traceEvents'.",
            "Name a file of profiler.export_chrome_trace, a run folder, or a log.",
        )
    # Kernels run after their step, so the host's work decides which marks count.
    steps = set()
    for mark in marks:
        if any(mark.start <= span.start < mark.end for span in host or kernels):
            steps.add(mark.name)
    devices = max(1, len({span.place for span in kernels}))
    scale = 1e-6 / max(1, len(steps)) / devices
    seconds: dict[str, float] = defaultdict(float)
    for (group, name), microseconds in times.items():
        seconds[group] += scale * microseconds
        if group == UNKNOWN:
            seconds[f"{UNKNOWN}: {name[:80]}"] += scale * microseconds
    columns = [Column("group", "group"), *number_columns(trace="trace")]
    planned = {}
    if plan:
        planned = _planned(plan)
        columns += number_columns(plan="plan")
    rows = []
    total = scale * sum(times.values())
    for group in dict.fromkeys((*_ORDER, *seconds, *planned)):
        if group not in seconds and group not in planned:
            continue
        value = seconds[group]
        row = {"group": group, "seconds": value, "plan": duration_text(planned.get(group, 0.0))}
        rows.append({**row, "trace": f"{duration_text(value)} {value / total:6.1%}"})
    title = (
        f"{path.name}: {len(steps) or 1} × {duration_text(total)}, {'GPU' if kernels else 'CPU'}"
    )
    return Table(tuple(columns), rows, title)


def _load(path: Path) -> Any:
    with disk_errors(path):
        content = path.read_bytes()
    try:
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        return load_json(content)
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise RecordError(
            f"Cannot read {path}: it is no JSON ({error}).", "Write the file again."
        ) from error


def _planned(path: Path) -> dict[str, float]:
    """Return the seconds of a step by group, of the best option of a plan."""
    try:
        seconds = {**_load(path)["options"][0]["step_seconds"]}
        del seconds["total"]
        return {name: float(value) for name, value in seconds.items()}
    except _BROKEN as error:
        raise RecordError(
            f"No plan in {path}: it has no 'step_seconds'.",
            "Write one with narrowgauge plan run … --json.",
        ) from error


def _spans(trace: Any) -> Iterator[Span]:
    """Yield the operations, kernels and marks that have a start and a duration."""
    kinds = {"cpu_op", "user_annotation", *_KERNELS}
    rows = trace.get("traceEvents") if isinstance(trace, dict) else None
    for row in rows if isinstance(rows, list) else ():
        try:
            start = float(row["ts"])
            end = start + float(row["dur"])
            if row["ph"] == "X" and row["cat"] in kinds and 0 <= start <= end < 1e18:
                place = row.get("args", {}).get("device", row["tid"])
                yield Span(start, end, str(row["name"]), row["cat"], str(place))
        except _BROKEN:
            continue


def _group(table: str, name: str) -> str:
    for group, pattern in _PATTERNS[table].items():
        if re.search(pattern, name, re.IGNORECASE):
            return str(group)
    return UNKNOWN


def _kernel_times(kernels: list[Span]) -> dict[tuple[str, str], float]:
    """Return the microseconds of kernels by group and name, and of the gaps between them."""
    times: dict[tuple[str, str], float] = defaultdict(float)
    busy: dict[str, float] = {}
    for span in sorted(kernels):
        times[_group("kernels", span.name), span.name] += span.end - span.start
        before = busy.get(span.place, span.start)
        times["gaps", ""] += max(0.0, span.start - before)
        busy[span.place] = max(before, span.end)
    return times


def _operation_times(events: list[Span]) -> dict[tuple[str, str], float]:
    """Return the microseconds of operations without those that they call, by group and name."""
    times: dict[tuple[str, str], float] = defaultdict(float)
    running: dict[str, list[tuple[Span, str]]] = defaultdict(list)
    for span in sorted(events, key=lambda span: (span.start, -span.end)):
        outer = running[span.place]
        while outer and outer[-1][0].end <= span.start:
            outer.pop()
        group = _group("operations", span.name)
        if outer:
            caller, of_caller = outer[-1]
            if of_caller in _WITH_CALLEES or group == UNKNOWN:
                group = of_caller
            times[of_caller, caller.name] -= span.end - span.start
        times[group, span.name] += span.end - span.start
        outer.append((span, group))
    return times
