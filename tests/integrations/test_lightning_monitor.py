"""A fit in Lightning leaves a run folder like the trainer's, and its rows in Lightning's own loggers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip(
    "lightning.pytorch", reason="narrowgauge[lightning] is not installed: ./dev test integrations installs it"
)

from lightning.pytorch.loggers import CSVLogger

import narrowgauge as ng
from integrations.lightning_runs import LitReference, fit, loader, plugin_of, trainer_of
from integrations.own_trainer import reference
from narrowgauge.integrations.lightning import NarrowgaugeMonitor

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*num_workers.*")]


def test_a_fit_is_recorded_as_a_run_of_the_trainers(tmp_path: Path) -> None:
    run = reference("float8-row/word", 4)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    monitor = NarrowgaugeMonitor(tmp_path / "run", gauges_every=2, tokens=lambda batch: 128)
    module = LitReference(run)
    trainer = trainer_of(
        plugin_of(run), 4, callbacks=[monitor], logger=logger, val_check_interval=2, log_every_n_steps=1
    )
    trainer.fit(module, loader(), loader(1))
    found = ng.read_run(tmp_path / "run")
    for name in ("step", "loss", "lr", "grad_norm", "tokens", "skipped", "edq"):
        assert [row.get(name) for row in found.steps] == [row.get(name) for row in run.rows], name
    assert module.losses == run.losses and len(found.evals) == 2 and [row["step"] for row in found.gauges] == [2, 4]
    assert found.summary["steps"] == 4 and found.config["recipe"] == "float8-row/word"
    names = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert any("edq" in name for name in names) and "events/start" not in names and "events/finish" in names


def test_a_resumed_fit_goes_on_in_its_folder_and_a_new_one_takes_another(tmp_path: Path) -> None:
    run = reference("bfloat16/word", 4)

    def monitor() -> NarrowgaugeMonitor:
        return NarrowgaugeMonitor(tmp_path / "run")

    _, stopped = fit(run, steps=2, callbacks=[monitor()])
    stopped.save_checkpoint(tmp_path / "two.ckpt")
    fit(run, resume=tmp_path / "two.ckpt", callbacks=[monitor()])
    rows = ng.read_run(tmp_path / "run").steps
    assert [row["loss"] for row in rows] == run.losses
    fit(run, steps=1, callbacks=[monitor()])
    assert len(ng.read_run(tmp_path / "run-2").steps) == 1
