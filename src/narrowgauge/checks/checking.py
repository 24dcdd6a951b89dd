"""``narrowgauge.check``: find updates that rounding will lose, wrong gradients, and errors of the
set-up.

Optimizers of PyTorch and of other libraries pass the same checks as Narrowgauge's.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from narrowgauge.analysis.reading import Reading, Readings
from narrowgauge.checks.findings import Findings
from narrowgauge.checks.gradients import compare_gradients
from narrowgauge.checks.manifest import manifest, parameter_readings
from narrowgauge.checks.passes import Backward, Loss, passes_of
from narrowgauge.checks.set_up import SetUp, set_up_of
from narrowgauge.checks.updates import updates_of
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
    ``batch`` and ``loss``, compare the gradient with the slope of the loss, and one configured step
    with its shadow and with the plain loss in one process, tensor by tensor. All ranks make the
    call. Where ranks hold parts of layers that are no DTensors, one process has no whole model, and
    the gradient is not compared. Gradients, buffers, states, generators and attributes of modules
    are as before at the end.

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
        raises otherwise.
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
        ['stands-still', 'frozen-moments', 'lost-decay']
    """
    if (batch is None) != (loss is None):
        raise RecipeError(
            "Cannot compare gradients because batch= needs loss=, and loss= needs batch=.",
            "Pass both.",
        )
    set_up = set_up_of(model, optimizer)
    findings = Findings([*parameter_readings(set_up)])
    findings.lines = manifest(set_up)
    gradients = None
    if loss is not None:
        passes = passes_of(set_up, batch, loss, backward, findings.unseen)
        compared = compare_gradients(passes)
        findings.add(compared)
        gradients = compared.gradients
    linears = linears_of(model)
    if linears is not None and "narrow" in linears.matrices().values():
        findings.lines.append(str(linears))
    updates = updates_of(set_up, gradients)
    findings.readings += updates.readings
    findings.unseen |= updates.unseen
    judged = [f"settings of {counted(len(set_up.trained), 'tensor')}", *updates.judged]
    judged += findings.judged
    return Readings(findings.readings, findings.lines, "; ".join(judged), findings.unseen)


def static_readings(set_up: SetUp) -> list[Reading]:
    """Return the readings that need no step."""
    return [*parameter_readings(set_up), *updates_of(set_up).readings]
