"""Measure time as every benchmark here does: in rounds, beside a named baseline, in one process.

A machine's speed drifts by tens of percent within minutes, so a time alone says little. In each
*round* every contender runs once, in an order that moves on by one place from round to round. A
contender's *ratio* is the median, over the rounds, of its time divided by the baseline's in that
same round. Time is the processor's, of all threads of the process, which other programs do not
add to; where a device or other processes work too, it is the clock's.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
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
    """

    name: str
    run: Callable[[], object]
    before: Callable[[], object] = nothing
    per_call: int = 1


def measure(
    contenders,
    *,
    rounds: int,
    warmup: int = 2,
    wait=nothing,
    clock=time.process_time,
):
    """Time contenders in rounds; return a row per contender, in the order given.

    Args:
        contenders: the first one is the baseline, by which the others are divided.
        rounds: how many rounds are timed, two or more.
        warmup: calls of each before the first round.
        wait: waits for a device's work to end.
        clock: returns seconds.
    """
    for contender in contenders:
        for _ in range(warmup):
            contender.before()
            contender.run()
    wait()
    seconds = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            contender.before()
            began = clock()
            contender.run()
            wait()
            seconds[contender.name].append((clock() - began) / contender.per_call)
    rows = []
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[contenders[0].name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        row = {"": name, "median ms": 1e3 * statistics.median(times), "ratio": middle}
        rows.append(row | {"quartiles": f"{low:.3f}–{high:.3f}"})
    return rows


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
    return flags


def begin(title: str, options: argparse.Namespace, peers=()) -> None:
    """Print what a reader must know beside the figures.

    Args:
        title: the benchmark's name.
        options: the parsed flags.
        peers: packages that are measured beside ours.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    facts = {name: installed_version(name) for name in ("narrowgauge", "torch", *peers)}
    facts |= {
        "python": platform.python_version(),
        "processor": processor_name(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    print(f"{title}{' (quick: no measurement)' if options.quick else ''}")
    print("  ".join(f"{name} {value}" for name, value in facts.items()))


def show(title: str, rows) -> None:
    """Print a table, of figures with four digits."""
    shown = []
    for row in rows:
        line = {name: None for other in rows for name in other}
        for name, value in row.items():
            line[name] = float(f"{value:.4g}") if isinstance(value, float) else value
        shown.append(line)
    print(f"\n{title} (load {load()})")
    print(table_of(shown).plain(), end="", flush=True)


def parameters(shapes, dtype: torch.dtype, device: str = "cpu"):
    """Return parameters that have gradients."""
    params = [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def exit_by(main) -> NoReturn:
    """Run a benchmark and exit with its status: 2 and one line for an error of the project's own."""
    try:
        sys.exit(main())
    except NarrowgaugeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
