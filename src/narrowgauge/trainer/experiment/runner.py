"""Running a comparison: every recipe with every seed, then the page, whichever way a single run is made.

Two back ends make runs: ``training.py`` trains with the library's own trainer (``narrowgauge compare``), ``harness.py`` calls a
training function of yours (``ng.compare``). Folders, order, seeds, baseline, page and verdict are the same. Runs go seed by seed,
so that complete pairs exist whenever a comparison stops, and a run that has ended is not made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.report.publishing import publish
from narrowgauge.runs.atomic_io import disk_errors, held_folder
from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer.experiment.planned_runs import PlannedRun

if TYPE_CHECKING:
    from narrowgauge.trainer.experiment.progress import Progress


def make_runs(
    runs: Sequence[PlannedRun], make_run: Callable[[int], None], progress: Progress | None = None
) -> list[Run]:
    """Make every run that has not ended.

    Args:
        runs: of the comparison.
        make_run: makes or resumes the run of an index.
        progress: displays them.
    Returns:
        All runs, in the given order.
    """
    found = []
    for index, planned in enumerate(runs):
        if not planned.has_ended:
            if progress is not None:
                progress.begin(index)
            make_run(index)
        found.append(read_run(planned.folder))
        if progress is not None:
            progress.end(index, found[-1])
    return found


def compare_and_publish(runs: Sequence[Run], out: Path) -> tuple[Comparison, Path]:
    """Compare runs and write ``compare.json`` and the page; the comparison and the path of the page."""
    found = compare_runs(runs)
    return found, publish(found, out)


@contextlib.contextmanager
def hold(out: Path) -> Iterator[None]:
    """Create a folder and lock it for this process; remove it again where an error leaves it empty.

    Raises:
        RecordError: it is a file, or another process compares there.
    """
    with disk_errors(out):
        if out.exists() and not out.is_dir():
            raise RecordError(f"Cannot compare in {out}: it is a file.", "Choose another folder.")
        absent = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
    with held_folder(out) as is_held:
        if not is_held:
            raise RecordError(
                f"Cannot compare in {out}: another process is doing that.", "Wait until it ends, or stop it."
            )
        try:
            yield
        except (NarrowgaugeError, OSError):
            for folder in absent:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
