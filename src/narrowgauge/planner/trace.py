"""A trace of ``torch.profiler``, its time summed by the groups of a plan's step.

Of a GPU the kernels count, of a CPU the time of each operation without those that it calls. Names
decide (``data/trace_names.toml``). Kernels that run at once all count.
"""

from __future__ import annotations

import gzip
import re
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.errors import RecordError
from narrowgauge.planner.units import count_text, duration_text
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


@dataclass(frozen=True)
class StepTimes:
    """Hold the seconds of a step by group; ``print`` shows a table.

    Args:
        steps: number of recorded steps.
        seconds: of a step, by group.
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
        for group in dict.fromkeys((*self.seconds, *self.planned)):
            row = {"group": group}
            for name, seconds in (("trace", self.seconds), ("plan", self.planned)):
                row[name] = ""
                if seconds.get(group):
                    share = seconds[group] / sum(seconds.values())
                    row[name] = f"{duration_text(seconds[group])} {share:6.1%}"
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
    """Sum the time of a trace by group.

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
    events = list(_spans(rows))
    marks = [span for span in events if span.name.startswith("ProfilerStep#")]
    kernels = [span for span in events if span.kind in _KERNELS]
    places = {span.place for span in kernels}
    work = [span for span in events if "Profiler" not in span.name]
    times = _kernel_times(kernels) if kernels else _operation_times(work)
    if not times:
        raise RecordError(
            f"No time in {path}: it has no operation and no kernel.",
            "Record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",
        )
    host = [span for span in work if span.kind not in _KERNELS]
    starts = sorted(span.start for span in host or kernels)  # kernels run after their step
    # Without a schedule the profiler opens a mark at the last step(), in which nothing runs.
    full = {
        mark.name
        for mark in marks
        if bisect_left(starts, mark.start) < bisect_left(starts, mark.end)
    }
    steps = max(1, len(full))
    seconds: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for (group, name), microseconds in times.items():
        value = 1e-6 * microseconds / steps / max(1, len(places))
        seconds[group] += value
        if group == UNKNOWN:
            names[name] += value
    device = f"mean of {len(places)} GPUs" if len(places) > 1 else ("GPU" if kernels else "CPU")
    planned = _planned(plan) if plan else ({},)
    by_group = {group: seconds[group] for group in (*_ORDER, *seconds) if group in seconds}
    unknown = dict(sorted(names.items(), key=itemgetter(1), reverse=True))
    return StepTimes(path.name, device, steps, by_group, unknown, *planned)


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
        seconds = {name: float(value) for name, value in option["step_seconds"].items()}
        del seconds["total"]
        fits = "" if option["fits"] else ", does not fit"
        return seconds, f"plan of {count_text(float(option['tokens_per_step']))} tokens{fits}"
    except _BROKEN as error:
        raise RecordError(
            f"No plan in {path}: it has no 'step_seconds', 'tokens_per_step' or 'fits'.",
            "Write one with narrowgauge plan run … --json.",
        ) from error


def _spans(rows: list[Any]) -> Iterator[Span]:
    """Yield the operations, kernels and marks that have a start and a duration."""
    kinds = {"cpu_op", "user_annotation", *_KERNELS}
    for row in rows:
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
