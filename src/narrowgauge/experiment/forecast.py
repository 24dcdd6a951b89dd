"""How long a step will take, measured before there is anything to train on: forward and backward of one batch of any tokens.

The optimizer's own share and the model's compilation are left out; the first run that is measured corrects the rest.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.experiment.pace import Forecast
from narrowgauge.optim.accumulation import backward_in_parts
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data import Dataset
from narrowgauge.trainer.loop import vocabulary_size
from narrowgauge.trainer.session import build
from narrowgauge.trainer.step import losses

MOST_SECONDS = 10.0
"""After which no further recipe is measured."""


def forecast(configs: Sequence[TrainConfig]) -> dict[str, Forecast]:
    """What a run takes, by recipe.

    Args:
        configs: a run's settings for each recipe.
    Returns:
        As many recipes as can be measured within ``MOST_SECONDS``; none where a model cannot be built or
        does not fit, which its run will tell.
    """
    found: dict[str, Forecast] = {}
    began = time.monotonic()
    for config in configs:
        if time.monotonic() - began < MOST_SECONDS:
            try:
                found[config.recipe.title] = of_a_run(config)
            except (NarrowgaugeError, RuntimeError):  # RuntimeError: a device's memory is full
                return {}
    return found


def of_a_run(config: TrainConfig) -> Forecast:
    """What a run takes: a step, uncompiled, and beside its steps the model and what its first batch takes longer.

    Args:
        config: the run's settings.
    Returns:
        The second batch as a step; the first one where that alone took long.
    Raises:
        NarrowgaugeError: the model cannot be built.
    """
    vocab_size = vocabulary_size(config) or 1
    tokens = np.arange(config.sequence_length * config.batch_size + 1) % vocab_size
    data = Dataset(Path(), tokens, tokens, {"vocab_size": vocab_size, "request": {"held_out": 0.0}})
    moments = [time.monotonic()]
    session = build(dataclasses.replace(config, compile=False), Path(), data)
    while len(moments) < 3 and moments[-1] - moments[0] < MOST_SECONDS / 2:
        # The loss waits for the device.
        float(backward_in_parts(losses(session), session.accumulator, session.optimizer.loss_scaler))
        session.optimizer.zero_grad(set_to_none=True)
        moments.append(time.monotonic())
    step = moments[-1] - moments[-2]
    return Forecast(step, moments[-1] - moments[0] - step * (len(moments) - 1))
