"""``narrowgauge.check``: find updates that rounding will lose, wrong gradients, and errors of the
set-up.

Optimizers of PyTorch and of other libraries pass the same checks as Narrowgauge's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from narrowgauge.analysis.reading import Reading, Readings
from narrowgauge.checks.gradients import Measured, gradient_readings
from narrowgauge.checks.manifest import manifest, parameter_readings
from narrowgauge.checks.passes import Backward, Loss
from narrowgauge.checks.set_up import SetUp, set_up_of
from narrowgauge.checks.teaches import checked_lesson, loss_lines
from narrowgauge.checks.updates import grid_lines, updates_of
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RecipeError
from narrowgauge.matmul.swapping import linears_of
from narrowgauge.runs.finding import counted


def check(
    model: nn.Module,
    optimizer: Any,
    *,
    batch: Any = None,
    loss: Loss | None = None,
    backward: Backward | None = None,
) -> Readings:
    """Find the losses and errors of a training set-up before it trains.

    Without ``batch`` the model is not called: only weights, states and settings are read. With
    ``batch`` and ``loss``, read what the loss teaches, as :func:`narrowgauge.teaches`; compare the
    gradient with the slope of the loss, and one configured step with its shadow and with the plain loss in one process, tensor
    by tensor. All ranks make the call. Where ranks hold parts of layers that are no DTensors, one
    process has no whole model, and the gradient is not compared. Gradients, buffers, states,
    generators and attributes of modules are as before at the end. ``ng.watch`` and
    ``ng.RunRecorder`` compare steps of the run with those of the optimizer's class.

    Args:
        model: as the loop calls it, possibly wrapped or compiled.
        optimizer: any ``torch.optim.Optimizer``, of this or another library, possibly wrapped; or a
            list of several.
        batch: this rank's batch: tensors with a first dim of sequences, in tuples, dicts or
            dataclasses. A list holds micro-batches, unless ``loss`` takes it whole.
        loss: ``loss(model, batch)`` returns the objective, a mean over its batch, with the loop's
            autocast.
        backward: ``backward(model, batch)`` computes the gradients of a step as the loop does, with
            its accumulation, loss scale and reductions, by calls of ``.backward()``. ``None``: each
            micro-batch's loss, divided by their number.
    Returns:
        The readings beyond their bound. ``ok`` is true if none is worse than a note; ``require()``
        raises otherwise. ``taught`` is a flat dict of what the loss teaches.
    Raises:
        RecipeError: ``model`` is not a module, ``optimizer`` not an optimizer; ``batch`` without
            ``loss``.

    Cost: reads each parameter once, and samples 4,096 elements. With ``batch``: nine passes of the
        loss, 5 to 24 more to rank places whose rounding is unusual, and 40 bytes per parameter.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> [reading.what for reading in ng.check(model, optimizer)]
        ['stands-still', 'frozen-moments', 'swallowed-decay']
    """
    if (batch is None) != (loss is None):
        raise RecipeError(
            "Cannot compare gradients because batch= needs loss=, and loss= needs batch=.",
            "Pass both.",
        )
    set_up = set_up_of(model, optimizer)
    readings = [*parameter_readings(set_up)]
    unseen = dict[str, str]()
    gradients = None
    done = list[str]()
    lines = manifest(set_up) + grid_lines(set_up)
    taught = Readings()
    if loss is not None:
        measured = gradient_readings(set_up, batch, loss, backward, unseen)
        done = measured.judged
        gradients = measured.gradients
        if all(reading.what != "step-in-backward" for reading in measured.readings):
            taught = checked_lesson(set_up, batch, loss, backward, unseen)
        of_gradient, more = _without_the_factor_of_ranks(measured, taught.taught)
        readings = readings + of_gradient + taught.readings
        lines = (
            taught.lines + lines + loss_lines(taught.taught, measured.value) + measured.lines + more
        )
        if measured.products:
            lines.append(products_line(measured.products))
    linears = linears_of(model)
    if linears is not None and "narrow" in linears.matrices().values():
        lines.append(str(linears))
    updates = updates_of(set_up, gradients)
    readings += updates.readings
    unseen |= updates.unjudged
    if updates.judged:
        kinds = sorted({type(p.optimizer).__name__ for p in updates.judged})
        done = [f"updates of {counted(len(updates.judged), 'tensor')} by {', '.join(kinds)}", *done]
    done = [f"settings of {counted(len(set_up.trained), 'tensor')}", *done]
    return Readings(readings, lines, "; ".join(done), unseen, taught.taught)


def _without_the_factor_of_ranks(
    measured: Measured, taught: Mapping[str, Any]
) -> tuple[list[Reading], list[str]]:
    """Return readings without that of a loss times the number of ranks, and a line about it.

    DistributedDataParallel divides by this number, so that the step is that of a mean over the labels of
    all ranks.
    """
    size = all_ranks().size
    mean = taught.get("cross_entropy", math.nan)
    is_mean = size > 1 and abs(taught.get("weight_sum", 0.0) - 1) < 0.01
    is_mean = is_mean and abs(measured.value / size - mean) < 0.1 * mean
    left = []
    for reading in measured.readings:
        is_factor = (reading.what, reading.tensor, reading.expected) == ("gradient", "", 1.0)
        if not (is_mean and is_factor and abs((reading.value or 0.0) * size - 1) < 0.01):
            left.append(reading)
    if len(left) == len(measured.readings):
        return left, []
    return left, [
        f"the loss is {size} times a mean, and the weights of the labels sum to 1 over {size} ranks"
    ]


def products_line(products: Mapping[str, int]) -> str:
    """Return a line about the formats in which a step multiplied.

    Example:
        >>> products_line({"float32": 2, "bfloat16": 6})
        'products of a step: 6 in bfloat16, 2 in float32'
    """
    counts = sorted(products.items(), key=lambda item: -item[1])
    return "products of a step: " + ", ".join(f"{count} in {name}" for name, count in counts)


def static_readings(set_up: SetUp) -> list[Reading]:
    """Return the readings that need no step."""
    return [*parameter_readings(set_up), *updates_of(set_up).readings]
