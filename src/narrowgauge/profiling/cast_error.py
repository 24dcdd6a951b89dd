"""Measure what the casts of each layer lose on real text: noise, overflow and underflow.

A few training steps run in each recipe, uncompiled, with gauges. They read the input, the weight and the output's gradient of
every narrow layer, cast as in the recipe's compute.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge.gauges.attach import attach_gauges
from narrowgauge.runs.schema import Row, metric_of
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import prepare_data
from narrowgauge.trainer.language_model import vocabulary_size
from narrowgauge.trainer.session import Session, build
from narrowgauge.trainer.step import train_step

NUM_BATCHES = 3
_METRICS = ("sqnr_db", "overflow", "underflow")


@dataclass(frozen=True)
class Loss:
    """The losses of the cast of one tensor, means over the steps.

    Args:
        tensor: ``input``, ``weight`` or ``output_grad``.
        sqnr_db: signal to quantization noise, decibels.
        overflow: fraction of values beyond the format's largest.
        underflow: fraction of nonzero values that become zero.
    """

    layer: str
    tensor: str
    sqnr_db: float
    overflow: float
    underflow: float


def losses(recipes: Sequence[Recipe], config: TrainConfig) -> list[tuple[Loss, ...]]:
    """Return the losses of each recipe's casts on a run's first batches, worst first. ``config.recipe`` is not used."""
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_data(config.data, vocab_size=vocabulary_size(config.model), seed=config.seed)
        plain = replace(config, compile=False, audit_every=0)
        return [_losses_in(build(replace(plain, recipe=recipe), Path(folder), data)) for recipe in recipes]


def _losses_in(session: Session) -> tuple[Loss, ...]:
    rows: list[Row] = []
    gauges = attach_gauges(session.model, session.optimizer, every=1, on_row=rows.append)
    try:
        for _ in range(NUM_BATCHES):
            train_step(session)
    finally:
        gauges.detach()

    lost = []
    for key in rows[0]["tensors"]:
        kind, _, layer = key.partition(":")
        figures: list[list[Any]] = [[metric_of(row, "tensors", key, m) for row in rows] for m in _METRICS]
        if all(value is not None for values in figures for value in values):  # others have no cast
            lost.append(Loss(layer, kind, *(statistics.fmean(map(float, values)) for values in figures)))
    return tuple(sorted(lost, key=lambda loss: loss.sqnr_db))
