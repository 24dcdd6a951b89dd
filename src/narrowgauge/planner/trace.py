"""A trace of ``torch.profiler``, its time divided into the groups of a plan's step.

Of a GPU the kernels count, of a CPU the innermost operations. Each moment counts once: of work that
runs at once, the group that stands first in :data:`GROUPS` has it. So communication is what no
computing hides, as in a plan.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.errors import RecordError
from narrowgauge.planner.units import duration_text
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
_PATTERNS = load_data("trace_names", "planner")


class Span(NamedTuple):
    """Work from ``start`` to ``end``, in microseconds."""

    start: float
    end: float
    group: str
    name: str


@dataclass(frozen=True)
class StepTimes:
    """Hold the seconds of a step by group; ``print`` shows a table.

    Args:
        steps: number of recorded steps.
        seconds: of a step, by those of :data:`GROUPS` that have any.
        names: seconds of a step by name, of what was not recognized; the longest first.
        planned: seconds of a step by group, of a plan.
    """

    name: str
    device: str
    steps: int
    seconds: dict[str, float]
    names: dict[str, float]
    planned: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return the times as values for JSON."""
        return asdict(self)

    def table(self) -> Table:
        """Return a row for each group: its time and share in the trace, and in the plan."""
        columns = [Column("group", "group"), *number_columns(trace="trace")]
        if self.planned:
            columns += number_columns(plan="plan")
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
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise RecordError(
            f"No trace in {path}: it has no list 'traceEvents'.",
            "Name a file of profiler.export_chrome_trace, a run folder, or a log.",
        )
    events = list(filter(_is_timed, events))
    spans, launched_by = _host_spans(events)
    device = "CPU"
    kernels = _device_spans(events, launched_by)
    if kernels:
        device = "GPU"
        end = max(span.end for span in kernels)
        loads = [span for span in spans if span.group == "loader"]
        spans = kernels + [s for s in loads if kernels[0].start <= s.start and s.end <= end]
    if not spans:
        raise RecordError(
            f"No time in {path}: it has no operation and no kernel.",
            "Record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",
        )
    marks = {event["name"] for event in events if event["name"].startswith(_MARKS[0])}
    steps = max(len(marks), 1)
    names: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.group == UNKNOWN:
            names[span.name] += 1e-6 * (span.end - span.start) / steps
    names = dict(sorted(names.items(), key=lambda item: -item[1]))
    seconds = {group: time / steps for group, time in _shares(spans).items()}
    planned = {} if plan is None else _planned(plan)
    return StepTimes(path.name, device, steps, seconds, names, planned)


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
        seconds = _load(path)["options"][0]["step_seconds"]
        return {name: float(value) for name, value in seconds.items() if name != "total"}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise RecordError(
            f"No plan in {path}: it has no 'step_seconds'.",
            "Write one with narrowgauge plan run … --json.",
        ) from error


def _is_timed(event: Any) -> bool:
    """Return whether an event has a name, a start and a duration."""
    if not isinstance(event, dict) or not isinstance(event.get("args", {}), dict):
        return False
    times = [type(event.get(key)) in (int, float) for key in ("ts", "dur")]
    return event.get("ph") == "X" and all(times) and isinstance(event.get("name"), str)


def _group(kind: str, name: str) -> str:
    for group, pattern in _PATTERNS[kind].items():
        if re.search(pattern, name, re.IGNORECASE):
            return str(group)
    return UNKNOWN


def _host_spans(events: Iterable[Any]) -> tuple[list[Span], dict[Any, str]]:
    """Return the time of the innermost operations of each thread, and the group of the operation
    that launched each kernel, by correlation.
    """
    threads = defaultdict(list)
    for event in events:
        is_mark = event.get("cat") == "user_annotation" and event["name"].startswith(_MARKS)
        if is_mark or event.get("cat") in {"cpu_op", *_LAUNCHES}:
            threads[event.get("tid")].append(event)
    spans: list[Span] = []
    launched_by: dict[Any, str] = {}
    for thread in threads.values():
        running: list[Span] = []
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            start = event["ts"]
            spans += _leave(running, start)
            outer = running[-1].group if running else "gaps"
            if event["cat"] in _LAUNCHES:
                launched_by[event.get("args", {}).get("correlation")] = outer
                continue
            if running:
                spans.append(running[-1]._replace(end=start))
            group = _group("operations", event["name"])
            if outer in _WITH_CALLEES or (group == UNKNOWN and outer != "gaps"):
                group = outer
            running.append(Span(start, start + event["dur"], group, event["name"]))
        spans += _leave(running, math.inf)
    return spans, launched_by


def _leave(running: list[Span], time: float) -> list[Span]:
    """End the operations that end before a time. Return what was left of each."""
    left = []
    while running and running[-1].end <= time:
        ended = running.pop()
        left.append(ended)
        if running:
            running[-1] = running[-1]._replace(start=ended.end)
    return left


def _device_spans(events: Iterable[Any], launched_by: Mapping[Any, str]) -> list[Span]:
    """Return the kernels and copies of the GPU, in the order of their start."""
    spans = []
    for event in events:
        if event.get("cat") not in {"kernel", "gpu_memcpy", "gpu_memset"}:
            continue
        group = _group("kernels", event["name"])
        outer = launched_by.get(event.get("args", {}).get("correlation"), UNKNOWN)
        if outer == "optimizer" and group != "communication":
            group = outer
        if outer not in ("gaps", UNKNOWN) and group not in _NAMED_KERNELS:
            group = outer
        spans.append(Span(event["ts"], event["ts"] + event["dur"], group, event["name"]))
    return sorted(spans)


def _shares(spans: Iterable[Span]) -> dict[str, float]:
    """Return the seconds of each group, from the first start to the last end."""
    changes = []
    for span in spans:
        place = GROUPS.index(span.group)
        changes += [(span.start, place, 1), (max(span.start, span.end), place, -1)]
    changes.sort()
    running = [0] * len(GROUPS)
    before = changes[0][0]
    seconds = dict.fromkeys(GROUPS, 0.0)
    for time, place, change in changes:
        group = next((i for i, count in enumerate(running) if count > 0), -1)
        seconds[GROUPS[group]] += 1e-6 * (time - before)
        running[place] += change
        before = time
    return {group: time for group, time in seconds.items() if time}
