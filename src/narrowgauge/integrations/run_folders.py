"""Where a framework's run is recorded: beside what was recorded before, never over it."""

from __future__ import annotations

import itertools
from pathlib import Path

from narrowgauge.runs.record import is_run


def folder_for(folder: Path, *, goes_on: bool) -> Path:
    """The first free folder of a name and number, or the last taken one of a training that is resumed.

    Args:
        folder: the name; then ``folder-2``, ``folder-3`` …
        goes_on: the training starts from a checkpoint.
    Returns:
        A folder without a record, unless the training goes on in one.
    """
    numbered = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
    taken = list(itertools.takewhile(is_run, numbered))
    if goes_on and taken:
        return taken[-1]
    return folder if not taken else folder.with_name(f"{folder.name}-{len(taken) + 1}")
