"""Measure time as every benchmark here does: in rounds, beside a named baseline, in one process.

A machine's speed drifts by tens of percent within minutes, so a time alone says little. In each
*round* every contender runs once, in an order that moves on by one place from round to round. A
contender's *ratio* is the median, over the rounds, of its time divided by the baseline's in that
same round. Time is the processor's, of all threads of the process, which other programs do not
add to; where a device or other processes work too, it is the clock's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import torch

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.spec.tables import Column, Table

Row = dict[str, Any]
NOT_INSTALLED = "not installed"


def nothing() -> None:
    """Do nothing, where nothing must be done."""


@dataclass(frozen=True)
class Contender:
    """What is timed.

    Args:
        name: what the table calls it.
        run: does the work once.
        before: called before each call, untimed.
        per_call: how many steps one call takes; times are per step.
        rounds: takes part in so many rounds at most (for the very slow); ``None`` for all.
    """

    name: str
    run: Callable[[], object]
    before: Callable[[], object] = nothing
    per_call: int = 1
    rounds: int | None = None


def measure(
    contenders: Sequence[Contender],
    *,
    baseline: str,
    rounds: int,
    warmup: int = 2,
    wait: Callable[[], object] = nothing,
    clock: Callable[[], float] = time.process_time,
) -> list[Row]:
    """Time contenders in rounds.

    Args:
        contenders: the baseline among them.
        baseline: the name of the one that the others are divided by.
        rounds: how many rounds are timed.
        warmup: calls of each before the first round; one for those with few rounds.
        wait: waits for a device's work to end.
        clock: returns seconds.
    Returns:
        A row per contender, in the order given.
    """
    for contender in contenders:
        for _ in range(warmup if contender.rounds is None else 1):
            contender.before()
            contender.run()
    wait()
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    for number in range(rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            if contender.rounds is None or number < contender.rounds:
                contender.before()
                began = clock()
                contender.run()
                wait()
                seconds[contender.name].append((clock() - began) / contender.per_call)
    return [row_of(name, times, seconds[baseline]) for name, times in seconds.items()]


def row_of(name: str, seconds: list[float], baseline: list[float]) -> Row:
    # One with few rounds was in the first ones.
    ratios = [ours / theirs for ours, theirs in zip(seconds, baseline, strict=False)]
    low, middle, high = ratios[0], ratios[0], ratios[0]
    if len(ratios) > 1:
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "": name,
        "median ms": 1e3 * statistics.median(seconds),
        "ratio": middle,
        "quartiles": f"{low:.3f}–{high:.3f}",
        "rounds": len(seconds),
    }


def machine() -> Row:
    """Return what a reader must know beside the figures: versions, processor, threads, load."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "narrowgauge": peer_version("narrowgauge"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": names[0] if names else platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def load() -> str:
    """Return load averages over 1, 5 and 15 minutes, where the system has them."""
    if hasattr(os, "getloadavg"):
        return " ".join(f"{x:.2f}" for x in os.getloadavg())
    return "unknown"


def peer_version(package: str) -> str:
    """Return a peer's version, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def parser(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return the flags that every benchmark has."""
    flags = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--quick", action="store_true", help="small sizes: shows that it runs, measures nothing"
    )
    flags.add_argument(
        "--rounds", type=int, default=rounds, help=f"timed rounds (default {rounds})"
    )
    flags.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
    flags.add_argument(
        "--json", type=Path, metavar="FILE", help="write machine, tables and notes there"
    )
    return flags


@dataclass
class Report:
    """What a benchmark prints and, with ``--json``, writes.

    Args:
        title: its name.
        options: the parsed flags.
        peers: packages that are measured beside ours.
    """

    title: str
    options: argparse.Namespace
    peers: Sequence[str] = ()
    tables: dict[str, list[Row]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.options.threads:
            torch.set_num_threads(self.options.threads)
        self.machine = {**machine(), **{name: peer_version(name) for name in self.peers}}
        print(f"{self.title}{' (quick: no measurement)' if self.options.quick else ''}")
        print("  ".join(f"{name} {value}" for name, value in self.machine.items()))

    def add(self, title: str, rows: Sequence[Row]) -> None:
        """Print a table and keep it."""
        self.tables[title] = list(rows)
        print(f"\n{title}")
        print(plain_table(rows), flush=True)

    def note(self, line: str) -> None:
        """Print a line and keep it."""
        self.notes.append(line)
        print(f"note: {line}", flush=True)

    def end(self) -> int:
        """Write the JSON file that was asked for, and return the exit status."""
        print(f"\nload at the end: {load()}")
        if self.options.json is not None:
            content = {
                "benchmark": self.title,
                "machine": self.machine,
                "quick": self.options.quick,
                "load_at_the_end": load(),
                "tables": self.tables,
                "notes": self.notes,
            }
            self.options.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return 0


def exit_by(main: Callable[[], int]) -> NoReturn:
    """Run a benchmark and exit with its status: 2 and one line for an error of the project's own,
    130 for Ctrl-C.
    """
    try:
        sys.exit(main())
    except NarrowgaugeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def plain_table(rows: Sequence[Row]) -> str:
    """Return rows as aligned text, a column per key, in the order in which keys first appear."""
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        is_number = any(isinstance(row.get(name), int | float) for row in rows)
        columns.append(Column(name, partial(_value, name), right=is_number))
    return Table(tuple(columns), list(rows)).plain().rstrip("\n")


def _value(name: str, row: Row) -> str:
    value = row.get(name, "")
    if isinstance(value, float):
        if 1e3 <= abs(value) < 1e9:
            return f"{value:,.0f}"
        return f"{value:.3f}" if 1e-2 <= abs(value) < 1e3 or value == 0 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
