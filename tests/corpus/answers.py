"""What check and run read of a row of the corpus: the columns of its confusion matrix.

``ng.check`` compares the loop's own gradients with the loop's own loss, the mean over all tokens. Then the loop trains for six
steps beside ``ng.RunRecorder``, whose laws are the watch's, and ``ng.diagnose`` reads the record.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowgauge as ng
from corpus.rows import Row

STEPS = 6
LOCATES: dict[str, set[str]] = {
    "settings": {"missing-parameters", "parameters-twice", "untied"},
    "data": {"gradient"},
    "forward": {"gradient", "step-order", "rounding", "cast-range"},
    "loss": {"gradient", "rounding", "loss-rounding"},
    "gradient": {
        "slope", "gradient", "no-gradient", "nonfinite", "skipped-steps", "gradients-kept", "zero-gradients", "rounding",
        "cast-range",
    },
    "clip": {"clip-norm", "gradient", "zero-gradients"},
    "state": {"parameters-twice", "no-gradient", "weights-jump"},
    "weights": {"nonfinite", "stored-share", "weights-jump"},
    "resume": {"not-restored", "weights-jump"},
}  # fmt: skip
"""By stage of a fault, the kinds of readings that point at it."""


DELIBERATE = {"sharpness-aware", "gradient noise"}
"""Healthy loops that change their gradients on purpose after the passes: the check is given the passes alone."""


def answer(row: Row, folder: Path) -> str:
    """Return whether a fault is located, and the kinds of readings of each column; notes are left out.
    Nothing for a healthy loop without a reading.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        columns = {"check": checked(row), "run": recorded(row, folder)}
    parts = []
    told = []
    for column, readings in columns.items():
        serious = [reading for reading in readings if reading.severity != "note"]
        told += serious
        if serious:
            parts.append(f"{column} {' '.join(sorted({reading.what for reading in serious}))}")
    place = "accused"
    if row.stage:
        place = "elsewhere" if told else "silent"
        names = [name for name, _ in row.loop(1, is_edited=False).model.named_parameters()]
        named = [name for name in names if row.where and re.search(row.where, name)]
        for reading in told:
            is_there = not named or not reading.tensor or any(x in reading.tensor for x in named)
            if reading.what in LOCATES[row.stage] and is_there:
                place = "located"
    elif not told:
        return ""
    return f"{place}: {', '.join(parts)}"


def checked(row: Row) -> Any:
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
        return ng.check(loop.model, optimizers, batch=parts, loss=loss, backward=backward)
    except ng.errors.NarrowgaugeError:
        return []


def recorded(row: Row, folder: Path) -> Any:
    """Return the readings of the record of a run."""
    loop = row.loop(STEPS)
    optimizers = [*loop.others, loop.optimizer]
    limit = loop.settings.clip or None
    recorder = ng.RunRecorder(
        folder, loop.model, optimizers, max_grad_norm=limit, fingerprints_every=0
    )
    one_step = loop.one_step

    def step() -> Any:
        value = one_step()
        scale = {} if loop.scaler is None else {"loss_scale": loop.scaler.get_scale()}
        recorder.step(value, **scale)
        return value

    loop.one_step = step  # type: ignore[method-assign]
    with recorder:
        loop.run()
    return ng.diagnose(folder).readings
