"""Runs packed into one file, to hand them to somebody else: what of them is packed, and under which names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from narrowgauge.errors import RecordError
from narrowgauge.report.write import read_runs, run_folders
from narrowgauge.runs.archive import write_zip, zip_file_of
from narrowgauge.runs.lines import ROW_FILES
from narrowgauge.runs.schema import Row

RUN_FILES = ("run.toml", *(f"{name}.jsonl" for name in ROW_FILES), "summary.json")
COMPARISON_FILES = ("compare.toml", "compare.json")
"""What is packed of the folder of a run, and of the folder of a comparison; neither checkpoints nor data."""


def pack(paths: Sequence[str | Path], out: str | Path) -> Path:
    """Pack runs into one zip file, which ``narrowgauge report`` and :func:`narrowgauge.read_run` read as their folders.

    The files are packed unchanged: :data:`RUN_FILES` of each run and :data:`COMPARISON_FILES` of each comparison. Paths in
    them, such as the folder of the data in ``run.toml``, stay as they are.

    Invariant: the same folders in the same order give the same bytes.

    Args:
        paths: run folders, folders that hold some, or zip files of this function.
        out: the zip file; absent, or one that this function wrote.
    Returns:
        The zip file.
    Raises:
        RecordError: a folder holds no run, a record is damaged, or the file cannot be written; nothing is written.
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
    """Each run folder with its name in the zip file, and whether ``paths`` holds it, not a folder or zip file above it.

    The name of ``comparison/run`` is ``run`` if that is what was named, and ``comparison/run`` if the comparison was. Names
    get longer, for all runs, until runs of different folders are below different names.
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
    """A ``run.toml`` to be published: what was asked for, without where it lay and which kernel the machine ran.

    Args:
        run: the table of a run.
        name: what takes the place of its folder.
    Example:
        >>> without_paths({"config": {"model": "/home/me/tiny", "out": "/tmp/run"}}, "first")
        {'config': {'model': 'tiny', 'out': 'first'}, 'machine': {}}
    """
    plain = {key: Path(run["config"][key]).name for key in ("model", "data", "tokenizer") if key in run["config"]}
    machine = run.get("machine", {})
    system = {"system": str(machine["system"]).partition("-")[0]} if "system" in machine else {}
    return run | {"config": run["config"] | plain | {"out": name}, "machine": machine | system}
