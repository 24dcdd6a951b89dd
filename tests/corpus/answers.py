"""What check, the record and the diagnosis read of each row of the corpus, asked once.

``ng.check`` compares the loop's own gradients with the loop's own loss, the mean over all tokens. Then the loop trains for six
steps beside ``ng.RunRecorder``, and ``ng.diagnose`` reads the record.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowgauge as ng
from corpus.loop import Loop
from corpus.rows import Row

STEPS = 6
LOCATES: dict[str, set[str]] = {
    "settings": {"missing-parameters", "parameters-twice", "untied"},
    "data": {"gradient"},
    "forward": {"gradient", "step-order", "rounding", "cast-range"},
    "loss": {"gradient", "rounding", "loss-rounding"},
    "gradient": {
        "slope", "gradient", "no-gradient", "nonfinite", "skipped-steps", "gradients-kept", "zero-gradients", "rounding",
        "no-graph", "cast-range",
    },
    "clip": {"clip-norm", "clipped-scaled", "gradient", "zero-gradients"},
    "state": {"parameters-twice", "no-gradient", "weights-jump"},
    "weights": {"nonfinite", "stored-share", "lost-updates", "truncated-setting", "weights-jump"},
    "resume": {"loss-scale-anew", "weights-jump"},
    "evaluation": {"drift"},
}  # fmt: skip
"""By stage of a fault, the kinds of readings that point at it."""


DELIBERATE = {"sharpness-aware", "gradient noise"}
"""Healthy loops that change their gradients on purpose after the passes: the check is given the passes alone."""


def answers(row: Row, folder: Path) -> list[Any]:
    """Return every reading, the notes left out."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        readings = [*checked(row), *_recorded(row, folder)]
    return [reading for reading in readings if reading.severity != "note"]


def checked(row: Row) -> list[Any]:
    """Return the readings of the check with the loop's batch."""
    loop = row.loop(STEPS)
    settings = loop.settings
    parts = [(part, loop.labels(part)) for part in loop.read(0).chunk(settings.micro_batches)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        before, loop.model = loop.model, model
        try:
            return loop.summed(loop.logits(batch[0]), batch[1]) / loop.count(batch[1])
        finally:
            loop.model = before

    def backward(model: nn.Module, batch: Any) -> None:
        labels = [loop.labels(part) for part, _ in batch]
        total = sum(loop.count(part) for part in labels)
        for number, (part, _) in enumerate(batch):
            loop.backward(loop.loss(loop.logits(part), labels[number], total), number)
        if row.name not in DELIBERATE:
            loop.before_clip()
        if loop.scaler is not None:
            loop.scaler = loop.new_scaler(settings.loss_scale)

    loop.step = 1
    optimizers = [loop.optimizer, *loop.others]
    try:
        check = ng.check(loop.model, optimizers, batch=parts, loss=loss, backward=backward)
    except ng.errors.NarrowgaugeError:
        return []
    return list(check)


def _recorded(row: Row, folder: Path) -> list[Any]:
    loop = row.loop(STEPS)
    limit = loop.settings.clip or None
    with ng.RunRecorder(
        folder,
        loop.model,
        [*loop.others, loop.optimizer],
        max_grad_norm=limit,
        fingerprints_every=0,
    ) as recorder:
        one_step = loop.one_step

        def recorded() -> Any:
            value = one_step()
            recorder.step(
                value,
                **({"loss_scale": loop.scaler.get_scale()} if loop.scaler is not None else {}),
            )
            return value

        loop.one_step = recorded  # type: ignore[method-assign]
        loop.run()
    return list(ng.diagnose(folder).readings)


def verdict(row: Row, readings: list[Any], locates: dict[str, set[str]] = LOCATES) -> str:
    """Return ``located``, ``elsewhere`` or ``silent``. ``locates`` has the kinds that point at each stage."""
    named = [
        name
        for name, _ in Loop(row.settings).model.named_parameters()
        if re.search(row.where, name)
    ]

    def points(reading: Any) -> bool:
        is_there = (
            not row.where
            or not named
            or not reading.tensor
            or any(name in reading.tensor for name in named)
        )
        return reading.what in locates[row.stage] and is_there

    return "silent" if not readings else "located" if any(map(points, readings)) else "elsewhere"
