"""From run folders to a page: runs are read, compared, and written as ``report.html`` and ``compare.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs
from narrowgauge.analysis.comparison.labels import listed
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.runs.archive import files_in, zip_file_of
from narrowgauge.runs.atomic_io import AGAIN, disk_errors, write_whole
from narrowgauge.runs.foreign_logs import is_log
from narrowgauge.runs.record import Run, is_run, read_run


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in folders and zip files, each of a run or a comparison.

    Args:
        paths: run folders or logs of other frameworks, folders that hold some, or zip files of ``--pack``.
    Returns:
        The runs, in the order named; those of one folder by name. None twice.
    Raises:
        RecordError: a folder holds no run, or a record is damaged, unreadable or newer than this version.
    """
    return [read_run(place) for place in run_folders(paths)]


def run_folders(paths: Sequence[str | Path]) -> dict[Path, Path]:
    """The run folders that paths lead to, each with the path that led to it; see :func:`read_runs`."""
    places: dict[Path, Path] = {}
    for path in map(Path, paths):
        inside = [path] if is_run(path) or is_log(path) else runs_inside(path)
        if not inside:
            found = "neither it nor a folder in it has a run.toml, or a log of another framework"
            if not path.exists():
                found = "there is no such folder"
            elif path.is_file():
                found = "the zip file has no run.toml"
            raise RecordError(f"No run in {path}: {found}.", "Name a run folder, or the folder of a comparison.")
        places |= {place: path for place in inside if place not in places}
    return places


def runs_inside(path: Path) -> list[Path]:
    """The run folders in a folder, by name, or in a zip file, in its order; none where there is no such folder.

    Raises:
        RecordError: one of them cannot be read, so its content is not known.
    """
    with disk_errors(path):
        if not path.is_dir():
            return [file.parent for file in files_in(path) if file.name == "run.toml"]
        folders = sorted(place for place in path.iterdir() if place.is_dir())
    return [place for place in folders if is_run(place) or is_log(place)]


def title_of(found: Comparison) -> str:
    """The title of a comparison's page.

    Example:
        >>> title_of(compare_runs([Run(Path("a"), {"config": {"recipe": "bf16/word", "model": "llama-1m"}})]))
        'llama-1m in bfloat16/word'
    """
    runs = [one.run for group in found.classes.groups.values() for one in group]
    models = list(dict.fromkeys(Path(str(run.config.get("model", "a model"))).name for run in runs))
    return (
        f"{listed(models)} in {listed(found.classes) if len(found.classes) <= 4 else f'{len(found.classes)} recipes'}"
    )


def report(paths: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write one page on existing runs.

    Args:
        paths: run folders, folders of comparisons, or zip files of ``--pack``.
        out: the page; ``None`` puts ``report.html`` into the one folder named, or ``NAME.html`` next to ``NAME.zip``.
    Returns:
        The page.
    Raises:
        RecordError: a folder holds no run, or the page cannot be written.
        NarrowgaugeError: several folders and no ``out``.
    """
    if out is None and len(paths) != 1:
        raise NarrowgaugeError(f"{len(paths)} folders were named and no page to write.", "Give --out page.html.")
    runs = read_runs(paths)
    zip_file = zip_file_of(Path(paths[0]))
    page = zip_file.with_suffix(".html") if zip_file is not None else Path(paths[0]) / "report.html"
    page = Path(out) if out is not None else page
    if page.is_dir():
        raise RecordError(f"Cannot write {page}: it is a folder.", "Name a file, for instance --out page.html.")
    if page.is_file() and not _is_page(page):
        raise RecordError(f"Cannot write {page}: the file there is no HTML page.", "Name another, or remove it first.")
    return write_page(compare_runs(runs), page)


def _is_page(file: Path) -> bool:
    with disk_errors(file), file.open("rb") as stream:
        begins = stream.read(256).lstrip().lower()
    return not begins or begins.startswith((b"<!doctype html", b"<html"))


def write_page(found: Comparison, page: Path) -> Path:
    """Write the page of a comparison; returns its path."""
    # Late, since the page is most of what there is to load.
    from narrowgauge.report.render import render

    write_whole(page, render(found, title_of(found)).encode(), AGAIN)
    return page


def publish(found: Comparison, out: Path) -> Path:
    """Write ``compare.json`` and ``report.html`` into a folder; returns the path of the page."""
    write_whole(out / "compare.json", found.json(), AGAIN)
    return write_page(found, out / "report.html")
