"""Turn run folders into files to share: pages with their ``compare.json``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from narrowgauge.errors import NarrowgaugeError, RecordError, require_package
from narrowgauge.measuring.comparison import Comparison, compare_runs
from narrowgauge.runs.atomic_io import write_whole
from narrowgauge.runs.places import is_page, run_folders
from narrowgauge.runs.record import Run, read_run

SCRIPT = "plotly.min.js"


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Return the runs in run folders, logs of other frameworks, and folders of runs.

    Runs keep the order of ``paths``. Runs of one folder are sorted by name. No run appears twice.
    Warn of a run in such a folder that cannot be read, and leave it out.

    Raises:
        RecordError: a folder holds no run, or none that can be read; or a run that ``paths`` name
            is damaged, unreadable or newer than this version.
    """
    named = list(map(Path, paths))
    runs = []
    refusal = RecordError("")
    for folder in run_folders(paths):
        try:
            runs.append(read_run(folder))
        except RecordError as error:
            if folder in named:
                raise
            refusal = error
            warnings.warn(f"{folder.name} is left out: {error}", stacklevel=2)
    if not runs:
        raise refusal
    return runs


def report(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    inline: bool = False,
) -> Path:
    """Write one page about existing runs, named as for :func:`read_runs`. Return its path.

    If ``out`` is None, write ``report.html`` into the only folder in ``paths``. With ``inline``
    the page holds Plotly's script, 5 MB; else it is a file beside the page.
    """
    if out is None and len(paths) != 1:
        raise NarrowgaugeError(
            f"{len(paths)} folders were named and no page to write.", "Give --out page.html."
        )
    first = Path(paths[0])
    folder = first.parent if first.is_file() else first
    runs = read_runs(paths)
    return write_report(
        compare_runs(runs), runs, Path(out or folder / "report.html"), inline=inline
    )


def write_report(
    comparison: Comparison, runs: Sequence[Run], page: Path, *, inline: bool = False
) -> Path:
    """Write the page of a comparison, or replace one of ours. Return its path."""
    if page.exists() and not is_page(page):
        raise RecordError(
            f"Cannot write {page}: what is there is not a page of Narrowgauge's.",
            "Name a file, for instance --out page.html.",
        )
    require_package("plotly")
    # Imported late: Plotly takes a second to load.
    from plotly.offline import get_plotlyjs

    from narrowgauge.report.page import render

    script = f'<script src="{SCRIPT}"></script>'
    if inline:
        script = f"<script>{get_plotlyjs()}</script>"
    content = render(comparison, runs, script).encode()
    if not inline:
        write_whole(page.with_name(SCRIPT), get_plotlyjs().encode())
    write_whole(page, content)
    return page


def publish(comparison: Comparison, runs: Sequence[Run], out: Path) -> Path:
    """Write ``compare.json`` and ``report.html`` into a folder. Return the path of the page."""
    write_whole(out / "compare.json", comparison.json())
    return write_report(comparison, runs, out / "report.html")
