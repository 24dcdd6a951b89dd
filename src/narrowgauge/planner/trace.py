"""A trace of ``torch.profiler``, its time divided into the groups of a plan's step.

Of a GPU the kernels count, of a CPU the innermost operations. Each moment counts once: of work that
runs at once, the group that stands first in :data:`GROUPS` has it. So communication is what no
computing hides, as in a plan. Of several GPUs the times are means, from the first kernel of all to
the last.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.errors import RecordError
from narrowgauge.planner.units import count_text, duration_text
from narrowgauge.runs.atomic_io import disk_errors, load_json
from narrowgauge.spec.tables import Column, Table, number_columns
from narrowgauge.spec.toml import load_data

UNKNOWN = "unrecognized"
GROUPS = (
    *("matmuls", "attention", "loss", "optimizer", "casts", "elementwise"),
    *(UNKNOWN, "communication", "copies", "loader", "gaps"),
)
"""Groups of a trace. All but ``unrecognized``, ``copies`` and ``loader`` are groups of a plan."""
_WITH_CALLEES = {"optimizer", "loader", "communication", "loss", "attention", "casts"}
"""Groups of operations whose callees belong to them, whatever they are."""
_NAMED_KERNELS = {"communication", "attention", "loss", "matmuls", "copies"}
"""Groups that a kernel's name tells better than the operation that launched it."""
_MARKS = ("ProfilerStep#", "Optimizer.step#", "enumerate(DataLoader)#")
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
# Bound of a time in microseconds, some 30,000 years. Beyond it a file is broken.
_LIMIT = 1e18
_BROKEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_PATTERNS = load_data("trace_names", "planner")
# Seconds of each group, by its place in GROUPS and, where not recognized, the name.
Times = dict[tuple[int, str], float]


class Span(NamedTuple):
    """Work from ``start`` to ``end``, in microseconds; then what the profiler says of it."""

    start: float
    end: float
    group: str
    name: str
    kind: str = ""
    thread: str = ""
    device: str = ""
    correlation: str = ""


@dataclass(frozen=True)
class StepTimes:
    """Hold the seconds of a step by group; ``print`` shows a table.

    Args:
        steps: number of recorded steps.
        seconds: of a step, by those of :data:`GROUPS` that have any.
        names: seconds of a step by name, of what was not recognized; the longest first.
        planned: seconds of a step by group, of a plan.
        plan: tokens of a step of the plan, and whether it fits, as the title of its column.
    """

    name: str
    device: str
    steps: int
    seconds: dict[str, float]
    names: dict[str, float]
    planned: dict[str, float]
    plan: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the times as values for JSON."""
        return asdict(self)

    def table(self) -> Table:
        """Return a row for each group: its time and share in the trace, and in the plan."""
        columns = [Column("group", "group"), *number_columns(trace="trace")]
        if self.planned:
            columns += number_columns(**{self.plan: "plan"})
        rows = []
        for group in dict.fromkeys((*GROUPS, *self.planned)):
            row = {"group": group}
            for name, seconds in (("trace", self.seconds), ("plan", self.planned)):
                row[name] = ""
                if seconds.get(group):
                    share = seconds[group] / sum(seconds.values())
                    row[name] = f"{duration_text(seconds[group])} {share:6.1%}"
            if row["trace"] or row["plan"]:
                rows.append(row)
        return Table(tuple(columns), rows)

    def __str__(self) -> str:
        total = sum(self.seconds.values())
        text = f"{self.name}: {self.steps} × {duration_text(total)} on the {self.device}\n"
        text += self.table().plain()
        text += "gaps: no work runs. The host prepares it, or waits."
        if self.names:
            shares = [f"{name[:80]} {value / total:.1%}" for name, value in self.names.items()]
            text += f"\nNot recognized: {', '.join(shares[:8])}."
        return text


def is_trace(path: Path) -> bool:
    """Return whether a path names a file that may be a trace."""
    return path.name.endswith((".json", ".json.gz")) and path.is_file()


def read_trace(path: Path, plan: Path | None = None) -> StepTimes:
    """Divide the time of a trace into groups.

    Args:
        path: written by ``profiler.export_chrome_trace``, plain or compressed.
        plan: the output of ``narrowgauge plan run --json``, to stand beside it.
    Raises:
        RecordError: a file cannot be read, or is none of these.
    """
    trace = _load(path)
    rows = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(rows, list):
        raise RecordError(
            f"No trace in {path}: it has no list 'traceEvents'.",
            "Name a file of profiler.export_chrome_trace, a run folder, or a log.",
        )
    events = list(_timed(rows))
    spans, launched_by, steps = _host_spans(events)
    kernels = _device_spans(events, launched_by)
    device = {0: "CPU", 1: "GPU"}.get(len(kernels), f"mean of {len(kernels)} GPUs")
    loads = [span for span in spans if span.group == "loader"]
    times = _mean_times(kernels or [spans], loads, steps)
    seconds: dict[str, float] = defaultdict(float)
    for (place, _), time in sorted(times.items()):
        seconds[GROUPS[place]] += time
    if not any(seconds.values()):
        raise RecordError(
            f"No time in {path}: it has no operation and no kernel.",
            "Record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",
        )
    longest = sorted(times, key=times.__getitem__, reverse=True)
    names = {key[1]: times[key] for key in longest if GROUPS[key[0]] == UNKNOWN}
    planned = _planned(plan) if plan else ({},)
    return StepTimes(path.name, device, steps, dict(seconds), names, *planned)


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


def _planned(path: Path) -> tuple[dict[str, float], str]:
    """Return the seconds of a step by group, of the best option of a plan, and its title."""
    try:
        option = _load(path)["options"][0]
        seconds = {name: _number(value) for name, value in option["step_seconds"].items()}
        del seconds["total"]
        fits = "" if option["fits"] else ", does not fit"
        return seconds, f"plan of {count_text(_number(option['tokens_per_step']))} tokens{fits}"
    except _BROKEN as error:
        raise RecordError(
            f"No plan in {path}: it has no 'step_seconds', 'tokens_per_step' or 'fits'.",
            "Write one with narrowgauge plan run … --json.",
        ) from error


def _number(value: Any) -> float:
    if not 0 <= (number := float(value)) < _LIMIT:
        raise ValueError(value)
    return number


def _timed(rows: Iterable[Any]) -> Iterator[Span]:
    """Return the events that have a start and a duration."""
    for row in rows:
        try:
            row = {**row.get("args", {}), **row}
            start, duration = _number(row["ts"]), _number(row["dur"])
        except _BROKEN:
            continue
        if row.get("ph") == "X":
            keys = ("name", "cat", "tid", "device", "correlation")
            yield Span(start, start + duration, UNKNOWN, *(str(row.get(key)) for key in keys))


def _group(kind: str, name: str) -> str:
    for group, pattern in _PATTERNS[kind].items():
        if re.search(pattern, name, re.IGNORECASE):
            return str(group)
    return UNKNOWN


def _host_spans(events: Iterable[Span]) -> tuple[list[Span], dict[str, str], int]:
    """Return the time of the innermost operations of each thread, the group of the operation that
    launched each kernel, by correlation, and the number of steps.

    A mark in which nothing starts is no step: the profiler opens one at the last ``step()``.
    """
    threads = defaultdict(list)
    for event in events:
        is_mark = event.kind == "user_annotation" and event.name.startswith(_MARKS)
        if is_mark or event.kind in {"cpu_op", *_LAUNCHES}:
            threads[event.thread].append(event)
    spans: list[Span] = []
    launched_by = {}
    outermost = set()
    for thread in threads.values():
        running: list[Span] = []
        for event in sorted(thread, key=lambda event: (event.start, -event.end)):
            spans += _leave(running, event.start)
            outer = running[-1].group if running else "gaps"
            if running and (event.kind == "cpu_op" or "Launch" in event.name):
                outermost.add(running[0].name)
            if event.kind in _LAUNCHES:
                launched_by[event.correlation] = outer
                continue
            if running:
                spans.append(running[-1]._replace(end=event.start))
            group = _group("operations", event.name)
            if outer in _WITH_CALLEES or (group == UNKNOWN and outer != "gaps"):
                group = outer
            running.append(event._replace(group=group))
        spans += _leave(running, math.inf)
    steps = {name for name in outermost if name.startswith(_MARKS[0])}
    spans = [s for s in spans if s.name in steps or not s.name.startswith(_MARKS[0])]
    return spans, launched_by, len(steps) or 1


def _leave(running: list[Span], time: float) -> Iterator[Span]:
    """End the operations that end before a time. Yield what was left of each."""
    while running and running[-1].end <= time:
        ended = running.pop()
        yield ended
        if running:
            running[-1] = running[-1]._replace(start=ended.end)


def _device_spans(events: Iterable[Span], launched_by: Mapping[str, str]) -> list[list[Span]]:
    """Return the kernels and copies of each GPU."""
    devices = defaultdict(list)
    for event in events:
        if event.kind not in {"kernel", "gpu_memcpy", "gpu_memset"}:
            continue
        group = _group("kernels", event.name)
        outer = launched_by.get(event.correlation, UNKNOWN)
        kept = {"communication"} if outer == "optimizer" else _NAMED_KERNELS
        if outer not in ("gaps", UNKNOWN) and group not in kept:
            group = outer
        devices[event.device].append(event._replace(group=group))
    return list(devices.values())


def _mean_times(parts: list[list[Span]], loads: list[Span], steps: int) -> Times:
    """Return the times of a step, as means over the parts.

    Their sum is the time from the first start to the last end.
    """
    ends = [time for part in parts for span in part for time in span[:2]] or [0.0]
    whole = Span(min(ends), max(ends), "gaps", "")
    times: Times = defaultdict(float)
    for part in parts:
        changes = []
        for span in (*part, *loads, whole):
            key = (GROUPS.index(span.group), span.name if span.group == UNKNOWN else "")
            changes += [(span.start, key, 1), (max(span.start, span.end), key, -1)]
        running: Times = defaultdict(int)
        before = whole.start
        for time, key, change in sorted(changes):
            if before < time <= whole.end:
                times[min(running)] += 1e-6 * (time - before) / len(parts) / steps
                before = time
            running[key] += change
            if not running[key]:
                del running[key]
    return times
