"""Turn run folders into files to share: pages with their ``compare.json``."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.runs.atomic_io import disk_errors, write_whole
from narrowgauge.runs.foreign_logs import LOGS, is_log
from narrowgauge.runs.record import Run, is_run, latest_runs, read_run


def read_runs(
    paths: Sequence[str | Path], say: Callable[[str], object] = warnings.warn
) -> list[Run]:
    """Return the runs in run folders, logs of other frameworks, and folders of runs.

    Runs keep the order of ``paths``. Runs of one folder are sorted by name. No run appears twice. A
    damaged run beside others of its folder is left out: ``say`` gets the reason.

    Raises:
        RecordError: a folder holds no run, or a record is damaged, unreadable or newer than this
            version.
    """
    runs: list[Run] = []
    damaged: list[RecordError] = []
    for place in run_folders(paths):
        try:
            runs.append(read_run(place))
        except RecordError as error:
            if place in map(Path, paths):
                raise
            damaged.append(error)
    if not runs:
        raise damaged[0]
    for reason in damaged:
        say(f"A run is left out. {reason}")
    return runs


def run_folders(paths: Sequence[str | Path]) -> list[Path]:
    """Return the run folders below ``paths``; see :func:`read_runs`."""
    places: list[Path] = []
    for path in map(Path, paths):
        inside = [path] if is_run(path) or is_log(path) else runs_inside(path)
        if not inside:
            problem = "neither it nor a folder in it has a run.toml, or a log of another framework"
            if not path.exists():
                problem = "there is no such folder or file"
            elif path.is_file():
                problem = "it is a file, and no log that can be read. Unpack a zip first"
            advice = (
                f"Name a run folder, the folder of a comparison, or a {LOGS}.{latest_runs(path)}"
            )
            raise RecordError(f"No run in {path}: {problem}.", advice)
        places += inside
    return list(dict.fromkeys(places))


def runs_inside(path: Path) -> list[Path]:
    """Return the run folders in a folder, by name; empty if the folder does not exist."""
    with disk_errors(path):
        if not path.is_dir():
            return []
        folders = sorted(filter(Path.is_dir, path.iterdir()))
    return [place for place in folders if is_run(place) or is_log(place)]


def report(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    say: Callable[[str], object] = warnings.warn,
) -> Path:
    """Write one page about existing runs, named as for :func:`read_runs`. Return its path.

    If ``out`` is None, write ``report.html`` into the only folder in ``paths``.
    """
    if out is None and len(paths) != 1:
        raise NarrowgaugeError(
            f"{len(paths)} folders were named and no page to write.", "Give --out page.html."
        )
    runs = read_runs(paths, say)
    gc.freeze()  # else Python repeatedly collects garbage among a million rows
    first = Path(paths[0])
    if out is not None:
        page = Path(out)
    else:
        page = (first.parent if first.is_file() else first) / "report.html"
    if page.is_dir():
        raise RecordError(
            f"Cannot write {page}: it is a folder.", "Name a file, for instance --out page.html."
        )
    if page.is_file() and not _is_page(page):
        raise RecordError(
            f"Cannot write {page}: the file there is no HTML page.",
            "Name another, or remove it first.",
        )
    return write_report(compare_runs(runs), page)


def _is_page(file: Path) -> bool:
    with disk_errors(file), file.open("rb") as stream:
        begins = stream.read(256).lstrip().lower()
    return not begins or begins.startswith((b"<!doctype html", b"<html"))


def write_report(comparison: Comparison, page: Path) -> Path:
    """Write the page of a comparison, or replace it. Return its path."""
    # Imported late: the page dominates the loading time.
    from narrowgauge.report.runs_page import render

    write_whole(page, render(comparison).encode())
    return page


def publish(comparison: Comparison, out: Path) -> Path:
    """Write ``compare.json`` and ``report.html`` into a folder. Return the path of the page."""
    write_whole(out / "compare.json", comparison.json())
    return write_report(comparison, out / "report.html")
