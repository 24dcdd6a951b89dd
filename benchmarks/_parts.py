"""Parts of a benchmark: each is kept when it is made, so that an interrupted benchmark takes up where it was.

A *part* is a row or a table that can be made by itself. Its file under ``--out`` is written whole or not at all. It is read in
place of making the part again where settings, code and machine are the same. The code is all of the package, of the oracles and
of what is imported from this folder: nobody knows which of its lines bears on a figure. To make parts again, remove the folder.

Before the first one is made, it is said how many are missing and about how long they take. Each states what it took on two cores
with AVX512; what those that are there took here tells how far off that is.

Claim and baseline: none of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timing import Report

import narrowgauge
from narrowgauge.runs.atomic_io import AGAIN, load_json, write_whole
from narrowgauge.runs.finding import counted, duration

HERE = Path(__file__).resolve().parent
PASSING = ("load", "cpus")
"""What :func:`timing.machine` says that changes no figure."""


@dataclass(frozen=True)
class Part:
    """What is made and kept in one piece.

    Args:
        name: what no other part of the benchmark is called.
        settings: what decides the result beside the code, as JSON holds it.
        make: makes it, of what JSON holds.
        seconds: what it takes on two cores with AVX512.
    """

    name: str
    settings: Mapping[str, Any]
    make: Callable[[], Any]
    seconds: float

    @property
    def file(self) -> str:
        """Its file's name, another one for other settings: those of a short try do not replace the full ones."""
        told = hashlib.sha256(json.dumps([self.name, self.settings], sort_keys=True).encode()).hexdigest()[:8]
        return f"{re.sub(r'[^A-Za-z0-9.+]+', '-', self.name)[:60]}-{told}.json"


Timed = tuple[float, float]
"""What something was expected to take, and what it took, in seconds."""


def expected_seconds(missing: Sequence[float], took: Sequence[Timed]) -> float:
    """The time of what is missing: what is stated of it, times how far off that was for what is done."""
    return sum(missing) * (statistics.median(real / stated for stated, real in took) if took else 1.0)


def announcement(missing: Sequence[float], took: Sequence[Timed], out: Path, thing: str = "part") -> str:
    """How many parts are missing under a folder, and about how long they take.

    Example of what it says: ``12 of 40 parts are missing in runs/stall, about 31 s by what the others took``.
    """
    if not missing:
        return f"nothing is missing: {out} holds {counted(len(took), thing)}; remove it to begin anew"
    number = f"{len(missing)} of {counted(len(missing) + len(took), thing)} {'is' if len(missing) == 1 else 'are'}"
    by = "by what the others took" if took else "by what they took elsewhere"
    return f"{number} missing in {out}, about {duration(expected_seconds(missing, took))} {by}"


def complete(parts: Sequence[Part], out: Path, report: Report, *, only_kept: bool = False) -> dict[str, Any]:
    """What each part is, by name and in their order: read where it is kept, else made; said and shown as it goes.

    ``only_kept`` leaves out what is missing.
    """
    by = versions(report)
    found = {part.name: kept for part in parts if (kept := stored(part, out, by)) is not None}
    missing = [part for part in parts if part.name not in found]
    took = [(part.seconds, found[part.name]["seconds"]) for part in parts if part.name in found]
    if not report.options.quick:  # whose sizes nothing is stated of
        report.note(announcement([part.seconds for part in missing], took, out))
    try:
        for number, part in enumerate(missing if not only_kept else ()):
            left = duration(expected_seconds([each.seconds for each in missing[number:]], took))
            show(f"{number + 1} of {len(missing)}: {part.name}; about {left} left")
            found[part.name] = made = keep(part, out, by)
            took.append((part.seconds, made["seconds"]))
    finally:
        show("")
    return {part.name: found[part.name]["made"] for part in parts if part.name in found}


def keep(part: Part, out: Path, by: Mapping[str, Any]) -> Any:
    """Make a part and write its file; what the file holds, so that a part that was just made is one that was read."""
    began = time.perf_counter()
    made = part.make()
    content = {"settings": part.settings, "by": by, "seconds": time.perf_counter() - began, "made": made}
    text = json.dumps(content, ensure_ascii=False)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / part.file, text.encode(), AGAIN)
    return load_json(text)


def stored(part: Part, out: Path, by: Mapping[str, Any]) -> Any:
    """What a part's file holds; ``None`` where there is none, or one of other code or another machine."""
    try:
        content = load_json((out / part.file).read_bytes())
        same = content["by"] == by and {"seconds", "made"} <= set(content)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return content if same else None


def versions(report: Report) -> dict[str, Any]:
    """The code and the machine that figures come from."""
    return {name: value for name, value in report.machine.items() if name not in PASSING} | {"code": code_hash()}


def code_hash() -> str:
    """A hash of every file that a figure may depend on."""
    package, oracles = Path(narrowgauge.__file__).parent, HERE.parent / "tests" / "oracles"
    loaded = {Path(file).resolve() for each in list(sys.modules.values()) if (file := getattr(each, "__file__", None))}
    files = {*package.rglob("*.py"), *oracles.rglob("*.py"), *(file for file in loaded if file.parent == HERE)}
    state = hashlib.sha256()
    for file in sorted(files):
        state.update(hashlib.sha256(file.read_bytes()).digest())
    return state.hexdigest()[:16]


def show(line: str) -> None:
    """The line of progress, in the place of the one before; only a terminal has it."""
    if sys.stderr.isatty():
        fitting = line[: shutil.get_terminal_size().columns - 1]
        print(f"\r\x1b[K{fitting}", end="", file=sys.stderr, flush=True)


def add_out(flags: argparse.ArgumentParser, name: str, of: str = "finished parts") -> None:
    """The flag ``--out``."""
    usual = f"default runs/{name}; --quick: a temporary one"
    flags.add_argument("--out", type=Path, help=f"folder of the {of} ({usual})")


@contextlib.contextmanager
def out_folder(options: argparse.Namespace, name: str) -> Iterator[Path]:
    """The folder that was asked for, or the usual one."""
    if options.out is not None or not options.quick:
        yield options.out or Path("runs", name)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
