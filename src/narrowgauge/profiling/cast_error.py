"""Measure what the casts of each layer lose on real text: noise, overflow and underflow.

A few training steps run in each recipe, uncompiled, with gauges. They read the input, the weight and the output's gradient of
every narrow layer, cast as in the recipe's compute.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge.gauges.attach import attach_gauges
from narrowgauge.runs.schema import Row, metric_of
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import open_data
from narrowgauge.trainer.session import Session, build
from narrowgauge.trainer.step import train_step

NUM_BATCHES = 3
_METRICS = ("sqnr_db", "overflow", "underflow")


def losses(recipes: Sequence[Recipe], config: TrainConfig) -> list[list[Row]]:
    """Return the losses of each recipe's casts on a run's first batches, worst first. ``config.recipe`` is not used.

    A row has the ``layer``, the ``tensor`` (``input``, ``weight`` or ``output_grad``), and means over the steps: signal to
    quantization noise in decibels (``sqnr_db``), the fraction of values beyond the format's largest (``overflow``), and the
    fraction of nonzero values that become zero (``underflow``).
    """
    with tempfile.TemporaryDirectory() as folder:
        data = open_data(str(config.data), config.held_out, config.seed)
        plain = replace(config, compile=False, audit_every=0)
        return [_losses_in(build(replace(plain, recipe=recipe), Path(folder), data)) for recipe in recipes]


def _losses_in(session: Session) -> list[Row]:
    rows: list[Row] = []
    gauges = attach_gauges(session.model, session.optimizer, every=1, on_row=rows.append)
    try:
        for _ in range(NUM_BATCHES):
            train_step(session)
    finally:
        gauges.detach()

    lost = []
    for key in rows[0]["tensors"]:
        tensor, _, layer = key.partition(":")
        figures: dict[str, list[Any]] = {
            name: [metric_of(row, "tensors", key, name) for row in rows] for name in _METRICS
        }
        if all(value is not None for values in figures.values() for value in values):  # others have no cast
            means = {name: statistics.fmean(map(float, values)) for name, values in figures.items()}
            lost.append({"layer": layer, "tensor": tensor, **means})
    return sorted(lost, key=lambda row: row["sqnr_db"])
