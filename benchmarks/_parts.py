"""Resume a benchmark: append each finished part to a file of JSON lines, and skip the parts that
the file holds.

A part is a row or a table that can be measured alone. The file does not know which code measured a
part: remove it to measure again. Claim and baseline: none of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _timing import Report

from narrowgauge.runs.finding import duration


@dataclass(frozen=True)
class Part:
    """One part of a benchmark.

    Args:
        name: unique within the benchmark.
        settings: what else decides the result, as JSON.
        make: measures the part; returns JSON.
        seconds: usual time on two cores with AVX512.
    """

    name: str
    settings: Mapping[str, Any]
    make: Callable[[], Any]
    seconds: float

    @property
    def key(self) -> str:
        return json.dumps([self.name, self.settings], sort_keys=True)


def complete(
    parts: Sequence[Part], out: Path, report: Report, *, only_kept: bool = False
) -> dict[str, Any]:
    """Return each part's result by name. Measure what the file lacks, unless ``only_kept``."""
    file = out / "parts.jsonl"
    results = _read(file)
    missing = [part for part in parts if part.key not in results]
    if not report.options.quick:
        report.note(announcement([part.seconds for part in missing], len(parts), file))
    for number, part in enumerate(missing if not only_kept else ()):
        show(f"{number + 1} of {len(missing)}: {part.name}")
        began = time.perf_counter()
        line = json.dumps(
            {"part": part.key, "made": part.make(), "seconds": time.perf_counter() - began}
        )
        out.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write("\n" + line)  # after a line that may be cut off
        results[part.key] = json.loads(line)["made"]
    show("")
    return {part.name: results[part.key] for part in parts if part.key in results}


def _read(file: Path) -> dict[str, Any]:
    """Return finished parts by key. A line that was cut off is no part."""
    results = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            results[row["part"]] = row["made"]
    return results


def announcement(missing: Sequence[float], number: int, place: Path) -> str:
    """Say how many parts are missing and how long they usually take."""
    if not missing:
        return f"nothing is missing: read from {place}; remove it to measure again"
    return f"{len(missing)} of {number} are missing in {place}, about {duration(sum(missing))} on two cores"


def show(line: str) -> None:
    """Show progress in one line of a terminal."""
    if sys.stderr.isatty():
        print(
            f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}",
            end="",
            file=sys.stderr,
            flush=True,
        )


def add_out(flags: argparse.ArgumentParser, name: str, of: str = "finished parts") -> None:
    flags.add_argument(
        "--out",
        type=Path,
        help=f"folder of the {of} (default runs/{name}; --quick: a temporary one)",
    )


@contextlib.contextmanager
def out_folder(options: argparse.Namespace, name: str) -> Iterator[Path]:
    """Return the requested folder, or the default one."""
    if options.out is not None or not options.quick:
        yield options.out or Path("runs", name)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
