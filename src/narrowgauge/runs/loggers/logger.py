"""Loggers: what each must be able to do, which there are, and the thread that hands rows on to one.

A logger is a class of six methods, :class:`Logger`; ``--log-to`` and ``RunRecorder(loggers=...)`` take the names in
:data:`LOGGERS`. To add one, write a file with such a class and a row here.

A logger writes to a database, or to a server that may not answer for minutes. So each has a thread of its own, which takes rows
from a queue; training waits for it only at the very end. The first exception ends the logger, and is kept as a sentence that the
run records as one event. Rows are plain Python values, so what a logger does cannot change what the run computes.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from narrowgauge.errors import NarrowgaugeError, suggestion
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import DEFINITION_FILE
from narrowgauge.runs.schema import GAUGE, METRICS, Column, Row, metric_of


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
    """A logger that can be requested.

    Args:
        name, title: as users write it, and as its makers do.
        package: the module that must be installed.
        place: ``module:class`` in this folder.
        help: where it writes, relative to the run folder.
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


def names_in(listed: str | Iterable[str]) -> tuple[str, ...]:
    """The loggers in a comma-separated list, or in a sequence of names, each once; ``none`` stands for no logger.

    Example:
        >>> names_in("tensorboard, tensorboard"), names_in("none")
        (('tensorboard',), ())
    """
    parts = listed.split(",") if isinstance(listed, str) else listed
    return tuple(dict.fromkeys(name for part in parts if (name := part.strip().lower()) not in ("", "none")))


def require_loggers(names: Iterable[str]) -> None:
    """Refuse a logger that does not exist, or whose package is missing."""
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


# ── delivery ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

MOST_WAITING = 20_000
"""A logger with so many rows in its queue does not answer, and is given up."""
PATIENCE_SECONDS = 300.0
"""How long the end of a run waits for a logger."""


class Delivery:
    """A logger, and the thread that makes it and hands rows on to it.

    Example:
        >>> class Shouting:
        ...     def step(self, row): print("step", row["step"])
        ...     def close(self): print("closed")
        >>> delivery = Delivery("Shouting", Shouting)
        >>> delivery.send("step", {"step": 1})
        >>> delivery.close(), delivery.failure
        step 1
        closed
        (None, '')
    """

    def __init__(self, title: str, make: Callable[[], Logger]) -> None:
        self.title, self.failure = title, ""
        """Why the logger has ended, in words; empty while it has not."""
        self._make = make
        self._waiting: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        # A daemon: a server that does not answer must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"narrowgauge-{title}", daemon=True)
        self._thread.start()

    def send(self, method: str, *arguments: Any) -> None:
        """Queue a call of one of the logger's methods; returns at once."""
        if not self.failure:
            if self._waiting.qsize() >= MOST_WAITING:
                self.failure = f"{MOST_WAITING} rows wait for it"
            self._waiting.put((method, arguments))

    def close(self, patience: float = PATIENCE_SECONDS) -> None:
        """Wait until everything is handed on and the logger is closed; give it up after ``patience`` seconds."""
        self._waiting.put(None)
        self._thread.join(patience)
        if self._thread.is_alive() and not self.failure:
            self.failure = f"it has not ended after {patience:g} s"

    def _run(self) -> None:
        logger: Logger | None = None
        try:
            logger = self._make()
            while (waiting := self._waiting.get()) is not None and not self.failure:
                method, arguments = waiting
                getattr(logger, method)(*arguments)
            logger.close()
        except BaseException as error:  # a package may end with SystemExit
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.failure = self.failure or reason.rstrip(".")
            # It may hold a process or a file.
            with suppress(BaseException):
                if logger is not None:
                    logger.close()


# ── rows as named numbers, and the identifier of a run ───────────────────────────────────────────────────────────────────


def numbers_of(table: dict[str, Column], row: Row) -> dict[str, float]:
    """The tagged columns of a row that have a value.

    Example:
        >>> from narrowgauge.runs.schema import EVAL
        >>> numbers_of(EVAL, {"step": 3, "val_loss": 2.5})
        {'validation/loss': 2.5}
    """
    found = {column.tag: row.get(column.name) for column in table.values() if column.tag}
    return {tag: float(value) for tag, value in found.items() if value is not None}


def gauge_numbers(row: Row) -> dict[str, float]:
    """The tagged metrics of each tensor in a row of ``gauges.jsonl``, and those of the logits.

    Example:
        >>> gauge_numbers({"step": 1, "logits": {"max": 4.0}})
        {'logits/max': 4.0}
    """
    tagged = [(table, metric) for table, metrics in METRICS.items() for metric in metrics.values() if metric.tag]
    found = {
        metric.tag.format(name): metric_of(row, table, name, metric.name)
        for table, metric in tagged
        for name in row.get(table, {})
    }
    found |= {GAUGE["logits"].tag.format(name): value for name, value in row.get("logits", {}).items()}
    return {tag: float(value) for tag, value in found.items() if value is not None}


def comparison_of(folder: Path) -> str | None:
    """The name of the comparison that a run belongs to, by which loggers group it; ``None`` for a run of its own."""
    above = folder.resolve().parent
    return above.name if (above / DEFINITION_FILE).is_file() else None


def kept_id(folder: Path, make: Callable[[], str] = lambda: secrets.token_hex(4)) -> str:
    """The identifier of a run with a logger, made once and kept in ``run_id`` of the logger's folder in the run folder."""
    file = folder / "run_id"
    if not file.is_file():
        folder.mkdir(exist_ok=True)
        made = make()
        file.write_text(made)
        return made
    return file.read_text()
