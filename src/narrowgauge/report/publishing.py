"""Turn run folders into files to share: pages with their ``compare.json``."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.runs.atomic_io import write_whole
from narrowgauge.runs.places import is_page, run_folders
from narrowgauge.runs.record import Run, read_run


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


def report(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    say: Callable[[str], object] = warnings.warn,
    *,
    refresh: int = 0,
) -> Path:
    """Write one page about existing runs, named as for :func:`read_runs`. Return its path.

    If ``out`` is None, write ``report.html`` into the only folder in ``paths``. With ``refresh``,
    a browser loads the page of unfinished runs again after so many seconds.
    """
    if out is None and len(paths) != 1:
        raise NarrowgaugeError(
            f"{len(paths)} folders were named and no page to write.", "Give --out page.html."
        )
    first = Path(paths[0])
    folder = first.parent if first.is_file() else first
    page = Path(out or folder / "report.html")
    require_page(page)
    runs = read_runs(paths, say)
    gc.freeze()  # else Python repeatedly collects garbage among a million rows
    if all(run.summary is not None for run in runs):
        refresh = 0
    return write_report(compare_runs(runs), page, refresh)


def follow(paths: Sequence[Path], out: Path | None, seconds: int) -> Iterator[Path]:
    """Write the page of runs again and again until all are finished; yield its path each time.

    A rendering rests ten times as long as it took.
    """
    is_finished = False
    while not is_finished:
        began = time.monotonic()
        is_finished = all(run.summary is not None for run in read_runs(paths))
        yield report(paths, out, refresh=seconds)
        if not is_finished:
            time.sleep(max(seconds, 10 * (time.monotonic() - began)))


def require_page(page: Path) -> None:
    """Refuse to replace a file that is not a page of ours."""
    if page.exists() and not is_page(page):
        raise RecordError(
            f"Cannot write {page}: what is there is no page of Narrowgauge's.",
            "Name a file, for instance --out page.html.",
        )


def write_report(comparison: Comparison, page: Path, refresh: int = 0) -> Path:
    """Write the page of a comparison, or replace one of ours. Return its path."""
    require_page(page)
    # Imported late: the page dominates the loading time.
    from narrowgauge.report.runs_page import render

    write_whole(page, render(comparison, refresh).encode())
    return page


def publish(comparison: Comparison, out: Path) -> Path:
    """Write ``compare.json`` and ``report.html`` into a folder. Return the path of the page."""
    write_whole(out / "compare.json", comparison.json())
    return write_report(comparison, out / "report.html")
