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
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.spec.tables import table_of
from narrowgauge.torch_support.machine import installed_version, processor_name

Row = dict[str, Any]


def nothing() -> None:
    """Do nothing, where nothing must be done."""


class Contender(NamedTuple):
    """What is timed.

    Args:
        name: what the table calls it.
        run: does the work once.
        before: called before each call, untimed.
        per_call: how many steps one call takes; times are per step.
        rounds: takes part in so many rounds at most (for the very slow).
    """

    name: str
    run: Callable[[], object]
    before: Callable[[], object] = nothing
    per_call: int = 1
    rounds: float = float("inf")


def measure(
    contenders: Sequence[Contender],
    *,
    baseline: str,
    rounds: int,
    warmup: int = 2,
    wait: Callable[[], object] = nothing,
    clock: Callable[[], float] = time.process_time,
) -> list[Row]:
    """Time contenders in rounds; return a row per contender, in the order given.

    Args:
        contenders: the baseline among them.
        baseline: the name of the one that the others are divided by.
        rounds: how many rounds are timed.
        warmup: calls of each before the first round.
        wait: waits for a device's work to end.
        clock: returns seconds.
    """
    for contender in contenders:
        for _ in range(warmup):
            contender.before()
            contender.run()
    wait()
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            if number < contender.rounds:
                contender.before()
                began = clock()
                contender.run()
                wait()
                seconds[contender.name].append((clock() - began) / contender.per_call)
    rows = []
    for name, times in seconds.items():
        # One with few rounds was in the first ones.
        ratios = [a / b for a, b in zip(times, seconds[baseline], strict=False)]
        if len(ratios) == 1:
            ratios *= 2  # the quartiles of one value are that value
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        row = {"": name, "median ms": 1e3 * statistics.median(times), "ratio": middle}
        rows.append(row | {"quartiles": f"{low:.3f}–{high:.3f}", "rounds": len(times)})
    return rows


def machine() -> Row:
    """Return what a reader must know beside the figures."""
    return {
        "narrowgauge": installed_version("narrowgauge"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor_name(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def load() -> str:
    """Return load averages over 1, 5 and 15 minutes, where the system has them."""
    if not hasattr(os, "getloadavg"):
        return "unknown"
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def parser(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return the flags that every benchmark has."""
    raw = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser(description=doc, formatter_class=raw)
    flags.add_argument("--quick", action="store_true", help="small sizes, which measure nothing")
    flags.add_argument("--rounds", type=int, default=rounds, help="timed rounds")
    flags.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
    flags.add_argument("--json", type=Path, metavar="FILE", help="write what is printed there")
    return flags


class Report:
    """What a benchmark prints and, with ``--json``, writes.

    Args:
        title: its name.
        options: the parsed flags.
        peers: packages that are measured beside ours.
    """

    def __init__(self, title: str, options: argparse.Namespace, peers: Sequence[str] = ()) -> None:
        if options.threads:
            torch.set_num_threads(options.threads)
        self.title = title
        self.options = options
        self.machine = machine() | {name: installed_version(name) for name in peers}
        self.tables: dict[str, list[Row]] = {}
        self.notes: list[str] = []
        print(f"{title}{' (quick: no measurement)' if options.quick else ''}")
        print("  ".join(f"{name} {value}" for name, value in self.machine.items()))

    def add(self, title: str, rows: Sequence[Row]) -> None:
        """Print a table and keep it."""
        self.tables[title] = list(rows)
        empty: Row = {name: None for row in rows for name in row}
        shown = []
        for row in rows:
            shown.append(empty | {name: rounded(value) for name, value in row.items()})
        print(f"\n{title}")
        print(table_of(shown).plain(), end="", flush=True)

    def note(self, line: str) -> None:
        """Print a line and keep it."""
        self.notes.append(line)
        print(f"note: {line}", flush=True)

    def end(self) -> int:
        """Write the JSON file that was asked for, and return the exit status."""
        print(f"\nload at the end: {load()}")
        if self.options.json is not None:
            names = ("title", "machine", "tables", "notes")
            content = {name: getattr(self, name) for name in names}
            content["quick"] = self.options.quick
            content["load_at_the_end"] = load()
            self.options.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return 0


def rounded(value: Any) -> Any:
    """Round what a table shows to four digits."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str = "cpu"
) -> list[nn.Parameter]:
    """Return parameters that have gradients."""
    params = [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


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
