"""How every benchmark here measures: in rounds, beside a named baseline, in one process.

A machine's speed drifts by tens of percent within minutes, so a time alone says little. In each
*round* every contender runs once, in an order that moves on by one place from round to round; a
contender's *ratio* is the median, over the rounds, of its time divided by the baseline's in that
same round. The ratio of the two shortest times stands beside it: noise only ever adds time, so the
two agree on a quiet machine, and where they do not, the machine was not quiet.

Claim: none of its own; it holds no result. Baseline: named by each benchmark.
Run: ``python benchmarks/timing.py`` prints the machine as the benchmarks report it.
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
    """What is done where nothing must be."""


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


@dataclass(frozen=True)
class Timing:
    """One contender's times in seconds per step, and its ratios to the baseline.

    Args:
        name: the contender's.
        seconds: one time per round.
        ratio: median over rounds of its time divided by the baseline's of the same round.
        quartiles: of those ratios.
        ratio_of_best: its shortest time divided by the baseline's shortest.
    """

    name: str
    seconds: tuple[float, ...]
    ratio: float
    quartiles: tuple[float, float]
    ratio_of_best: float

    @property
    def median(self) -> float:
        """Median seconds per step."""
        return statistics.median(self.seconds)

    def row(self) -> Row:
        """The table's row."""
        return {
            "": self.name,
            "median ms": 1e3 * self.median,
            "best ms": 1e3 * min(self.seconds),
            "ratio": self.ratio,
            "quartiles": f"{self.quartiles[0]:.3f}–{self.quartiles[1]:.3f}",
            "ratio of best": self.ratio_of_best,
            "rounds": len(self.seconds),
        }


def measure(
    contenders: Sequence[Contender],
    *,
    baseline: str,
    rounds: int,
    warmup: int = 2,
    wait: Callable[[], object] = nothing,
) -> list[Timing]:
    """Time contenders in rounds.

    Args:
        contenders: the baseline among them.
        baseline: the name of the one that the others are divided by.
        rounds: how many rounds are timed.
        warmup: calls of each before the first round; one for those with few rounds.
        wait: waits for a device's work to end.
    Returns:
        A timing per contender, in the order given.
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
                began = time.perf_counter()
                contender.run()
                wait()
                seconds[contender.name].append((time.perf_counter() - began) / contender.per_call)
    return [_timing(c.name, seconds[c.name], seconds[baseline]) for c in contenders]


def _timing(name: str, seconds: list[float], baseline: list[float]) -> Timing:
    ratios = [
        a / b for a, b in zip(seconds, baseline, strict=False)
    ]  # one with few rounds was in the first ones
    low, middle, high = (
        statistics.quantiles(ratios, n=4, method="inclusive")
        if len(ratios) > 1
        else [ratios[0]] * 3
    )
    return Timing(name, tuple(seconds), middle, (low, high), min(seconds) / min(baseline))


def machine() -> Row:
    """What a reader must know beside the figures: versions, processor, threads, load."""
    return {
        "narrowgauge": peer_version("narrowgauge"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def load() -> str:
    """Load averages over 1, 5 and 15 minutes, where the system has them."""
    if hasattr(os, "getloadavg"):
        return " ".join(f"{x:.2f}" for x in os.getloadavg())
    return "unknown"


def peer_version(package: str) -> str:
    """A peer's version, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        return next(
            (value.strip() for name, _, value in lines if name.strip() == "model name"),
            platform.machine(),
        )
    return platform.processor() or platform.machine()


def parser(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    lines = (doc or "").strip()
    flags = argparse.ArgumentParser(
        description=lines, formatter_class=argparse.RawDescriptionHelpFormatter
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
        """Write the JSON file that was asked for; the exit status."""
        print(f"\nload at the end: {load()}")
        if self.options.json is not None:
            quick = {"quick": self.options.quick, "load_at_the_end": load()}
            content = {
                "benchmark": self.title,
                "machine": self.machine,
                **quick,
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
    return _cell(row.get(name, ""))


def _cell(value: object) -> str:
    if isinstance(value, float):
        if 1e3 <= abs(value) < 1e9:
            return f"{value:,.0f}"
        if 1e-2 <= abs(value) < 1e3 or value == 0:
            return f"{value:.3f}"
        return f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


if __name__ == "__main__":
    print(plain_table([{"": name, "value": str(value)} for name, value in machine().items()]))
