"""From run folders to files that can be handed on: pages with their ``compare.json``, and zip files of what a page needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs
from narrowgauge.analysis.comparison.labels import listed
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.runs.archive import files_in, read_bytes, write_zip, zip_file_of
from narrowgauge.runs.atomic_io import AGAIN, disk_errors, write_whole
from narrowgauge.runs.foreign_logs import is_log, logs_to_name
from narrowgauge.runs.lines import ROW_FILES
from narrowgauge.runs.record import DEFINITION_FILE, Run, is_run, latest_runs, read_run
from narrowgauge.runs.schema import Row
from narrowgauge.spec.tables import Table
from narrowgauge.spec.toml import load_toml


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in run folders, logs of other frameworks, folders that hold some, and zip files of ``--pack``.

    They come in the order named, those of one folder by name, and none twice.

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
                found = "there is no such folder or file"
            elif path.is_file():
                found = "the zip file has no run.toml"
            advice = f"Name a run folder, or the folder of a comparison.{logs_to_name(path)}{latest_runs(path)}"
            raise RecordError(f"No run in {path}: {found}.", advice)
        places |= {place: path for place in inside if place not in places}
    return places


def runs_inside(path: Path) -> list[Path]:
    """The run folders in a folder, by name, or in a zip file, in its order; none where there is no such folder."""
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
    """Write one page on existing runs, named as for :func:`read_runs`; returns its path.

    ``out`` None puts ``report.html`` into the one folder named, or ``NAME.html`` next to ``NAME.zip``.
    """
    if out is None and len(paths) != 1:
        raise NarrowgaugeError(f"{len(paths)} folders were named and no page to write.", "Give --out page.html.")
    runs = read_runs(paths)
    page = Path(out) if out is not None else _page_of(Path(paths[0]))
    if page.is_dir():
        raise RecordError(f"Cannot write {page}: it is a folder.", "Name a file, for instance --out page.html.")
    if page.is_file() and not _is_page(page):
        raise RecordError(f"Cannot write {page}: the file there is no HTML page.", "Name another, or remove it first.")
    return write_report(compare_runs(runs, resolve=resolve_of(paths)), page)


def table(paths: Sequence[str | Path]) -> Table:
    """The table of costs of existing runs, named as for :func:`read_runs`: a row per recipe, as on their page."""
    return compare_runs(read_runs(paths), resolve=resolve_of(paths)).table()


def resolve_of(paths: Sequence[str | Path]) -> float | None:
    """The difference that the one comparison named was to resolve."""
    if len(paths) != 1:
        return None
    file = Path(paths[0]) / DEFINITION_FILE
    found = read_bytes(file)
    try:
        resolve = None if found is None else load_toml(found.decode()).get("resolve")
        return None if resolve is None else float(resolve)
    except (ValueError, TypeError) as error:
        raise RecordError(f"{file} is damaged: {error}.", "Restore the file from a copy.") from error


def _page_of(path: Path) -> Path:
    zip_file = zip_file_of(path)
    return path / "report.html" if zip_file is None else zip_file.with_suffix(".html")


def _is_page(file: Path) -> bool:
    with disk_errors(file), file.open("rb") as stream:
        begins = stream.read(256).lstrip().lower()
    return not begins or begins.startswith((b"<!doctype html", b"<html"))


def write_report(found: Comparison, page: Path) -> Path:
    # Imported late: the page takes most of the time to load.
    from narrowgauge.report.page import write_page
    from narrowgauge.report.runs_page import render

    return write_page(render(found, title_of(found)), page)


def publish(found: Comparison, out: Path) -> Path:
    """Write ``compare.json`` and ``report.html`` into a folder; returns the path of the page."""
    write_whole(out / "compare.json", found.json(), AGAIN)
    return write_report(found, out / "report.html")


# ── runs packed into one file, to hand them to somebody else ──────────────────────────────────────────────────────────────

RUN_FILES = ("run.toml", *(f"{name}.jsonl" for name in ROW_FILES), "summary.json")
COMPARISON_FILES = ("compare.toml", "compare.json")
"""What is packed of the folder of a run, and of the folder of a comparison; neither checkpoints nor data."""


def pack(paths: Sequence[str | Path], out: str | Path) -> Path:
    """Pack runs into one zip file, which ``narrowgauge report`` and :func:`narrowgauge.read_run` read as their folders.

    The files are packed unchanged: :data:`RUN_FILES` of each run and :data:`COMPARISON_FILES` of each comparison. Paths in
    them, such as the folder of the data in ``run.toml``, stay as they are.

    Invariant: the same folders in the same order give the same bytes. If a folder holds no run or a record is damaged, nothing is
    written; a zip file that exists is only replaced if this function wrote it.
    """
    if foreign := [run for run in read_runs(paths) if run.is_foreign]:
        raise RecordError(
            f"{foreign[0].path} is a log of another framework, and only run folders are packed.",
            "Name the run folders alone; send the log as it is.",
        )
    files: dict[str, Path] = {}
    for place, name, is_named in _names(paths):
        if not is_named:
            files |= {str(name.parent / file): place.parent / file for file in COMPARISON_FILES}
        files |= {str(name / file): place / file for file in RUN_FILES}
    write_zip(Path(out), files)
    return Path(out)


def _names(paths: Sequence[str | Path]) -> list[tuple[Path, PurePosixPath, bool]]:
    """Each run folder with its name in the zip file, and whether ``paths`` itself names it, not a folder or zip file above it.

    The name of ``comparison/run`` is ``run`` if the run was named, and ``comparison/run`` if the comparison was. Names get
    longer, for all runs, until runs of different folders are below different names.
    """
    places = run_folders(paths)
    num_parts = []
    for place, named in places.items():
        below = len(_parts(place)) - len(_parts(named))
        num_parts.append(below if zip_file_of(named) == named else below + 1)

    def names(least: int) -> list[PurePosixPath]:
        return [PurePosixPath(*_parts(place)[-max(least, num) :]) for place, num in zip(places, num_parts, strict=True)]

    num_folders = len({_parts(place)[:-1] for place in places})
    least = 1
    while len({name.parent for name in names(least)}) < num_folders:
        least += 1
    return [(place, name, place == places[place]) for place, name in zip(places, names(least), strict=True)]


def _parts(path: Path) -> tuple[str, ...]:
    """The names from the root of the disk to a path."""
    return Path(os.path.abspath(path)).parts[1:]


def without_paths(run: Row, name: str) -> Row:
    """A ``run.toml`` to publish, without paths and the machine's kernel; ``name`` takes the place of the run's folder.

    Example:
        >>> without_paths({"config": {"model": "/home/me/tiny", "out": "/tmp/run"}}, "first")
        {'config': {'model': 'tiny', 'out': 'first'}, 'machine': {}}
    """
    plain = {key: Path(run["config"][key]).name for key in ("model", "data", "tokenizer") if key in run["config"]}
    machine = run.get("machine", {})
    system = {"system": str(machine["system"]).partition("-")[0]} if "system" in machine else {}
    return run | {"config": run["config"] | plain | {"out": name}, "machine": machine | system}
