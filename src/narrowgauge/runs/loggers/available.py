"""The table of loggers: what ``--log-to`` and ``RunRecorder(loggers=...)`` take.

A logger is a class of six methods, :class:`Logger`. To add one, write a file with such a class and a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from narrowgauge.errors import NarrowgaugeError, suggestion
from narrowgauge.runs.events import Event
from narrowgauge.runs.schema import Row


class Logger(Protocol):
    """Shows a run elsewhere. Made as ``Class(folder, settings, step)``: the run folder, its settings, and the steps done.

    All calls come from one thread, in the order in which the rows were written. An exception ends the logger, not the run.
    """

    def step(self, row: Row) -> None:
        """Take a row of ``steps.jsonl``."""

    def evaluation(self, row: Row) -> None:
        """Take a row of ``evals.jsonl``."""

    def gauge(self, row: Row) -> None:
        """Take a row of ``gauges.jsonl``."""

    def event(self, event: Event) -> None:
        """Take an event."""

    def go_back(self, step: int) -> None:
        """Forget the steps after ``step``, which come again."""

    def close(self) -> None:
        """Write what is left, and end."""


@dataclass(frozen=True)
class Available:
    """A logger that can be asked for.

    Args:
        name: as users write it.
        title: as its makers write it.
        package: the module that must be installed.
        place: ``module:class`` in this folder.
        help: where it writes, from the run folder.
    """

    name: str
    title: str
    package: str
    place: str
    help: str

    @property
    def is_installed(self) -> bool:
        """Whether its package is found, without importing it."""
        return find_spec(self.package) is not None

    def load(self) -> Callable[[Path, Row, int], Logger]:
        """Its class, which imports the package."""
        module, name = self.place.split(":")
        loaded: Any = getattr(import_module(f"narrowgauge.runs.loggers.{module}"), name)
        return loaded  # type: ignore[no-any-return]


LOGGERS: dict[str, Available] = {
    row.name: row
    for row in (
        Available("tensorboard", "TensorBoard", "tensorboard", "tensorboard:TensorBoard", "`tensorboard/`"),
        Available("wandb", "Weights & Biases", "wandb", "wandb:WandbRun", "`wandb/`; and online, unless `WANDB_MODE=offline`"),
        Available("mlflow", "MLflow", "mlflow", "mlflow:MlflowRun", "`mlflow/mlflow.db`, or where `MLFLOW_TRACKING_URI` says"),
        Available("aim", "Aim", "aim", "aim:AimRun", "`aim/`, or where `AIM_REPO` says"),
    )
}  # fmt: skip
"""Every logger, by name."""


def names_in(listed: str | Iterable[str]) -> tuple[str, ...]:
    """The loggers in a comma-separated list, or in a sequence of names; each once, and ``none`` for no more.

    Example:
        >>> names_in("tensorboard, tensorboard"), names_in("none")
        (('tensorboard',), ())
    """
    parts = listed.split(",") if isinstance(listed, str) else listed
    return tuple(dict.fromkeys(name for part in parts if (name := part.strip().lower()) not in ("", "none")))


def require_loggers(names: Iterable[str]) -> None:
    """Refuse a logger that does not exist, or whose package is missing.

    Raises:
        NarrowgaugeError: the first of them.
    """
    for name in names:
        if name not in LOGGERS:
            raise NarrowgaugeError(
                f"no logger is named '{name}'.", suggestion(name, LOGGERS) or f"There are: {', '.join(LOGGERS)}."
            )
        if not LOGGERS[name].is_installed:
            raise NarrowgaugeError(
                f"{LOGGERS[name].title} was requested, and {LOGGERS[name].package} is not installed.",
                f'pip install "narrowgauge[loggers]", or only {LOGGERS[name].package}.',
            )
