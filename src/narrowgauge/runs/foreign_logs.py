"""Runs of other frameworks, from the logs that they leave: what a log does not hold stays unknown.

Such a run has losses, learning rates and gradient norms at the steps that were logged, and no recipe, seed, bytes or audit. It is
named after its folder. :func:`narrowgauge.read_run` and ``narrowgauge report`` read it like a run folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from narrowgauge.errors import RecordError
from narrowgauge.runs import huggingface_state, lightning_csv, tensorboard_events
from narrowgauge.runs.atomic_io import disk_errors
from narrowgauge.runs.foreign_names import NAMES, Log
from narrowgauge.runs.schema import Row

SOURCE = "source"
"""The table of ``Run.run`` that says where a run of another framework was read from."""


class LogRun(NamedTuple):
    """The run that a log describes: what :class:`narrowgauge.Run` holds, in its order."""

    path: Path
    run: Row
    steps: list[Row]
    evals: list[Row]
    events: list[Row]
    summary: Row | None


@dataclass(frozen=True)
class LogFormat:
    """A format of logs.

    Args:
        name: as it is shown.
        find: the files of the log in a folder, or of a file; none where there is no such log.
        read: what they hold; raises ``ValueError`` where they are damaged.
    """

    name: str
    find: Callable[[Path], list[Path]]
    read: Callable[[list[Path]], Log]


FORMATS = (
    LogFormat("Hugging Face trainer_state.json", huggingface_state.find, huggingface_state.read),
    LogFormat("Lightning metrics.csv", lightning_csv.find, lightning_csv.read),
    LogFormat("TensorBoard events", tensorboard_events.find, tensorboard_events.read),
)
"""Every format, in the order tried: a folder with several is read by the first."""


def log_names() -> str:
    """The logs that can be read, to follow "a": ``Hugging Face trainer_state.json, Lightning metrics.csv or …``."""
    names = [row.name for row in FORMATS]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def is_log(path: Path) -> bool:
    """Whether a file or folder is a log of another framework.

    Raises:
        RecordError: the folder cannot be read.
    """
    return _found(path) is not None


def read_log(path: Path) -> LogRun:
    """The run that a log describes.

    Args:
        path: a file or folder for which :func:`is_log` holds.
    Returns:
        Its rows; a summary of the last losses unless the log says that the run has not ended.
    Raises:
        RecordError: the log is damaged, holds no metric under a name of
            :data:`~narrowgauge.runs.foreign_names.NAMES`, or needs a package that is not installed.
    """
    found = _found(path)
    assert found is not None
    form, files = found
    with disk_errors(path):
        try:
            log = form.read(files)
            steps, evals = log.rows("steps"), log.rows("evals")
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{files[0]} is damaged: {error}.", "Restore the file from a copy.") from error
    if not steps and not evals:
        names = ", ".join(sorted(log.values)[:8]) or "nothing"
        raise RecordError(
            f"{files[0]} holds no loss: {form.name} with {names}.", f"Log it as one of {', '.join(NAMES['loss'][:3])}."
        )
    source = {"format": form.name, "file": str(files[-1])}
    summary = None if log.is_finished is False else _summary(steps, evals)
    folder = path if path.is_dir() else path.parent
    return LogRun(folder, {SOURCE: source, "config": log.config}, steps, evals, [], summary)


def _found(path: Path) -> tuple[LogFormat, list[Path]] | None:
    with disk_errors(path):
        return next(((form, files) for form in FORMATS if (files := form.find(path))), None)


def _summary(steps: list[Row], evals: list[Row]) -> Row:
    summary: Row = {"steps": max(row["step"] for row in [*steps[-1:], *evals[-1:]])}
    last = next((row["val_loss"] for row in reversed(evals) if row["val_loss"] is not None), None)
    return summary if last is None else {**summary, "val_loss": last}
