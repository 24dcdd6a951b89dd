"""MLflow: metrics over steps, settings as parameters, events as tags.

Everything goes to ``mlflow/mlflow.db`` in the run folder, or to the server of ``MLFLOW_TRACKING_URI``. A resumed run continues
the one it began. Nothing can be taken back there: steps that come again, with the same bits, are logged again.

Source: mlflow.org/docs/latest/ml/tracking; version 3.17.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

# Before the import, which would count its users, and write to their home.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from narrowgauge.runs.events import Event
from narrowgauge.runs.loggers.logger import comparison_of, gauge_numbers, kept_id, numbers_of
from narrowgauge.runs.schema import EVAL, STEP, Row

_SECONDS, _MOST = 2.0, 900
"""Metrics are sent in batches: those of so many seconds, and at most so many (MLflow takes 1000)."""


class MlflowRun:
    """A run of MLflow, logged through its client, so that the program's own active run is left alone.

    It is named after the run folder, and its experiment is ``MLFLOW_EXPERIMENT_NAME``, or ``narrowgauge``. The settings are its
    parameters. Runs of one comparison have its folder's name as their tag ``comparison``.
    """

    def __init__(self, folder: Path, settings: Row, step: int = 0) -> None:
        own = folder.resolve() / "mlflow"
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it reports how it creates its tables
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{own / 'mlflow.db'}")
        self.status, self._metrics, self._sent = "KILLED", list[Metric](), time.monotonic()
        own.mkdir(exist_ok=True)
        self.run_id = kept_id(own, lambda: self._begin(folder, settings))
        self.client.update_run(self.run_id, status="RUNNING")

    def _begin(self, folder: Path, settings: Row) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "narrowgauge")
        found = self.client.get_experiment_by_name(name)
        number = found.experiment_id if found else self.client.create_experiment(name)
        run_id: str = self.client.create_run(number, run_name=folder.resolve().name).info.run_id
        tags = [RunTag("comparison", group)] if (group := comparison_of(folder)) else []
        params = [Param(key, str(value)[:6000]) for key, value in settings.items()]
        self.client.log_batch(run_id, params=params, tags=tags)
        return run_id

    def step(self, row: Row) -> None:
        self._log(numbers_of(STEP, row), row["step"])

    def evaluation(self, row: Row) -> None:
        self._log(numbers_of(EVAL, row), row["step"])

    def gauge(self, row: Row) -> None:
        self._log(gauge_numbers(row), row["step"])

    def event(self, event: Event) -> None:
        """Set a tag: it holds the last event of its kind."""
        self.status = "FINISHED" if event.kind == "finish" else self.status
        self.client.set_tag(self.run_id, f"event.{event.kind}", f"step {event.step}: {event.sentence}"[:5000])

    def go_back(self, step: int) -> None:
        """Nothing: what comes again is logged again, at the same step."""

    def close(self) -> None:
        self._send()
        self.client.set_terminated(self.run_id, self.status)

    def _log(self, numbers: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self._metrics += [Metric(tag, value, now, step) for tag, value in numbers.items()]
        if len(self._metrics) >= _MOST or time.monotonic() - self._sent > _SECONDS:
            self._send()

    def _send(self) -> None:
        while self._metrics:
            self.client.log_batch(self.run_id, metrics=self._metrics[:_MOST])
            del self._metrics[:_MOST]
        self._sent = time.monotonic()
