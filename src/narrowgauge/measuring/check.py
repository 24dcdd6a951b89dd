"""``narrowgauge.check``: find updates that rounding will lose, wrong gradients, and errors of the
set-up.

One configured step runs beside its float64 shadow, on the model itself, before training:

- *rounding* is the gradient minus its shadow (:mod:`narrowgauge.measuring.places`);
- *structure* is that shadow minus the shadow of the plain loss in one process
  (:mod:`narrowgauge.measuring.structure`);
- *slope* is the change of the plain loss beside its gradient (:mod:`narrowgauge.measuring.slope`).

With several ranks each process makes the plain pass over the batches of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RecipeError
from narrowgauge.measuring.beside import is_finite
from narrowgauge.measuring.loss_value import coarse_loss
from narrowgauge.measuring.one_process import OneProcess
from narrowgauge.measuring.passes import (
    Backward,
    Gradients,
    Loss,
    Pass,
    Passes,
    inner_name,
    micro_batches,
)
from narrowgauge.measuring.places import (
    Roundings,
    nonfinite_readings,
    not_followed,
    rounding_readings,
)
from narrowgauge.measuring.policies.finite import Finite
from narrowgauge.measuring.policies.wide import Wide
from narrowgauge.measuring.reading import Reading, Readings, measured
from narrowgauge.measuring.set_up import SetUp, set_up_of, set_up_readings
from narrowgauge.measuring.stored import stored_readings
from narrowgauge.measuring.units import UNITS
from narrowgauge.runs.finding import counted
from narrowgauge.torch_support.torch_hooks import has_own_hooks

LOSS = 2.0**-14
"""Half of float32's digits: a loss that is off by more was rounded in a 16-bit format."""


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
    ``batch`` and ``loss``, compare one configured step with its shadow without roundings, with the
    plain loss in one process, and with the slope of the loss. All ranks make the call. Weights,
    gradients, buffers, states, generators and attributes of modules are as before at the end.

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
        raises otherwise. What was not followed is in ``unseen``.
    Raises:
        RecipeError: ``model`` is not a module, ``optimizer`` not an optimizer; ``batch`` without
            ``loss``.

    Cost: reads each parameter once, and samples 4,096 elements. With ``batch``: seven passes of the
        loss, about 12 more to find the line of an unusual rounding, and 8 bytes for each value of a
        pass.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> [reading.what for reading in ng.check(model, optimizer)]
        ['stored-share']
    """
    if (batch is None) != (loss is None):
        raise RecipeError(
            "Cannot compare gradients because batch= needs loss=, and loss= needs batch=.",
            "Pass both.",
        )
    set_up = set_up_of(model, optimizer)
    told = Told()
    told.readings += set_up_readings(set_up, told.lines)
    gradients: Gradients = {}
    if loss is not None:
        gradients = _compare(set_up, batch, loss, backward, told)
    told.readings += stored_readings(set_up, gradients, told.table, told.unseen)
    told.looked_at.insert(0, f"settings of {counted(len(set_up.trained), 'tensor')}")
    lines = [*told.table, *told.lines]
    return Readings(told.readings, lines, "; ".join(told.looked_at), told.unseen)


@dataclass
class Told:
    """What a check has found so far."""

    readings: list[Reading] = field(default_factory=list)
    table: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    looked_at: list[str] = field(default_factory=list)
    unseen: dict[str, str] = field(default_factory=dict)


def _compare(
    set_up: SetUp, batch: Any, loss: Loss, backward: Backward | None, told: Told
) -> Gradients:
    """Compare the gradients of one configured step, and return them."""
    model = set_up.model
    for p in model.parameters():
        if isinstance(getattr(p, "main_grad", None), Tensor):
            told.unseen["the gradient"] = "a kernel adds to main_grad, where a copy has none"
            return {}
    leaves = {inner_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    leaves |= set_up.outside
    leaves = {name: p for name, p in leaves.items() if not p.is_meta}
    parts = micro_batches(model, batch, loss)
    passes = Passes(model, set_up.optimizers, leaves, parts, batch, loss, backward)
    finite = Finite(model)
    first = passes.run(passes.step, Wide(), finite)
    if first.changed:
        told.readings.append(_stepped(passes, first))
        return {}
    if first.unlisted:
        told.readings.append(measured("missing-parameters", first.unlisted, len(first.unlisted), 0))
    told.readings += nonfinite_readings(first, finite, told.lines)

    def repeat(places: Any) -> Pass:
        return passes.run(passes.step, Wide(places))

    number = int(all_ranks().size == 1)  # ranks would take turns of their own
    told.readings += rounding_readings(Roundings(first, repeat), told.lines, number)
    told.unseen |= not_followed(first)
    one_process = OneProcess(passes, first)
    told.readings += one_process.readings()
    told.readings += _loss_readings(one_process.plain, told.lines)
    told.lines += one_process.lines
    told.unseen |= one_process.unseen
    told.unseen |= passes.unrestored
    told.looked_at.append(f"gradients of {counted(len(first.gradients), 'tensor')}")
    shared: Told = all_ranks().gather(told)[0]  # every rank returns the same
    vars(told).update(vars(shared))
    return _above_noise(first)


def _above_noise(first: Pass) -> Gradients:
    """Return the gradients of a pass, with zeros for those that are rounding alone.

    A bias in front of a batch norm has a gradient of zero, and gets the noise of a sum. No storage
    need keep what it would do.
    """
    gradients = dict(first.gradients)
    for name, shadow in first.shadows.items():
        noise = gradients[name].double() - shadow.double()
        if noise.norm() > shadow.double().norm():
            gradients[name] = torch.zeros_like(gradients[name])
    return gradients


def _stepped(passes: Passes, first: Pass) -> Reading:
    """Return a reading of tensors that a pass changed: a note where each has a hook, on purpose."""
    is_meant = all(has_own_hooks(passes.leaves[name]) for name in first.changed)
    what = "steps-in-backward" if is_meant else "step-order"
    return measured(what, first.changed, len(first.changed), 0)


def _loss_readings(plain: Pass | None, lines: list[str]) -> list[Reading]:
    """Return a reading of a loss that a 16-bit format rounds, and its line: the forward number."""
    loss = None if plain is None else plain.loss
    if plain is None or not isinstance(loss, Tensor) or not is_finite(loss):
        return []
    value = float(loss.detach())
    line = f"loss {value:.6g}"
    off = abs(value - plain.value) / (abs(plain.value) or 1.0)
    if math.isfinite(off):
        line += f", {off:.2g} of it from float64's"
    lines.append(line)
    if loss.dtype not in UNITS:
        return []
    lines += coarse_loss(loss)
    return [measured("loss-rounding", "the loss", off, 0.0)] if off > LOSS else []
