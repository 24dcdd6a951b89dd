"""The two whole files of a run folder, read and checked: what was asked for, and what came out.

Both may have been damaged, edited by hand or written by a newer version; each reader gets values that it can reckon with,
or one sentence on what is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import disk_errors, load_json
from narrowgauge.runs.row_types import is_whole, short, wrong_type
from narrowgauge.runs.rows import Row, revived

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA_VERSION = 2
"""The version of the run folder. A newer one is refused; an older one stays readable. Since 2 every row has a checksum."""


def read_settings(path: Path) -> Row:
    """``run.toml`` of a run folder.

    Raises:
        RecordError: no run is there, the file is damaged, or it was written by a newer version.
    """
    file = path / "run.toml"
    with disk_errors(file):
        is_there = file.is_file()
    if not is_there:
        found = "the folder has no run.toml" if path.is_dir() else "there is no such folder"
        raise RecordError(f"No run in {path}: {found}.", "Name the folder that was given as --out.")
    try:
        with disk_errors(file):
            run: Row = tomllib.loads(file.read_bytes().decode())
        version = schema_of(run)
    except (ValueError, KeyError, RecursionError) as error:
        raise RecordError(f"{file} is damaged: {error}.", "Restore the file from a copy.") from error
    _require_known(version, path)
    return run


def schema_of(run: Row) -> int:
    version = run["schema_version"]
    if not is_whole(version):
        raise ValueError(f"its schema_version = {short(version)} is no whole number")
    return int(version)


def _require_known(version: int, path: Path) -> None:
    if version > SCHEMA_VERSION:
        raise RecordError(
            f"The run {path} has record schema {version}; this version reads up to {SCHEMA_VERSION}.",
            "Upgrade with pip install --upgrade narrowgauge.",
        )


def require_numbers(file: Path, run: Row) -> None:
    """What readers reckon with among the settings."""
    config: Any = run.get("config")
    for key in ("seed", "steps") if isinstance(config, dict) else ():
        if key in config and not is_whole(config[key]):
            reason = f"its {key} = {short(config[key])} is no whole number"
            raise RecordError(f"{file} is damaged: {reason}.", "Restore the file from a copy.")


def read_summary(file: Path) -> Row | None:
    if not file.exists():
        return None
    try:
        with disk_errors(file):
            summary: Row = revived(load_json(file.read_bytes()))
        if not isinstance(summary, dict):
            raise ValueError(f"{short(summary)} is not an object")
        if wrong := wrong_type("summary", summary):
            raise ValueError(f"it has {wrong}")
    except (ValueError, RecursionError) as error:
        advice = "Delete it; narrowgauge resume writes it again."
        raise RecordError(f"{file} is damaged: {error}.", advice) from error
    _require_known(summary.get("schema_version") or 0, file.parent)
    return summary
