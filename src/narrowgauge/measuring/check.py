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

from itertools import chain
from typing import Any

from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.measuring.beside import is_finite
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.passes import (
    Backward,
    Findings,
    Gradients,
    Loss,
    Pass,
    Passes,
    micro_batches,
    trained_leaves,
)
from narrowgauge.measuring.places import add_nonfinite, add_roundings
from narrowgauge.measuring.policies.finite import Finite
from narrowgauge.measuring.policies.wide import Wide
from narrowgauge.measuring.reading import Readings, words_of
from narrowgauge.measuring.set_up import SetUp, set_up_of, set_up_readings, spread
from narrowgauge.measuring.slope import compare_slope
from narrowgauge.measuring.stored import stored_readings
from narrowgauge.measuring.structure import compare_ranks, compare_structure, unlike
from narrowgauge.measuring.units import UNITS
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.runs.finding import counted
from narrowgauge.torch_support.torch_hooks import has_own_hooks


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
        RecipeError: ``batch`` without ``loss``.

    Cost: reads each parameter once, and samples 16,384 elements. With ``batch``: four calls of the
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
    findings = Findings([*set_up_readings(set_up)])
    if not set_up.outside.keys().isdisjoint(set_up.parameters):
        words = "the loop copies them after the step; ng.watch sees it"
        findings.unseen["whether weights follow their masters"] = words
    gradients: Gradients = {}
    looked_at = f"settings of {counted(len(set_up.trained), 'tensor')}"
    if loss is not None:
        gradients = _compare(set_up, batch, loss, backward, findings)
        findings = all_ranks().gather(findings)[0]  # every rank returns the same
    if gradients:
        looked_at += f"; gradients of {counted(len(gradients), 'tensor')}"
    table: list[str] = []
    findings.readings += stored_readings(set_up, gradients, table, findings.unseen)
    return Readings(findings.readings, [*table, *findings.lines], looked_at, findings.unseen)


def _compare(
    set_up: SetUp, batch: Any, loss: Loss, backward: Backward | None, findings: Findings
) -> Gradients:
    """Compare the gradients of one configured step, and return them."""
    leaves = set_up.outside | trained_leaves(set_up.model)  # masters have their weights' names
    for p in leaves.values():
        if is_sharded(p) or isinstance(getattr(p, "main_grad", None), Tensor):
            words = "not followed through shards and main_grad; check before they are made"
            findings.unseen["the gradient"] = words
            return {}
    apart = unlike({name: fingerprint(spread(p)) for name, p in leaves.items()})
    if apart:
        findings.unseen["the gradient"] = f"ranks hold unlike weights, such as {apart[0]}"
        return {}
    parts = micro_batches(set_up.model, batch, loss)
    passes = Passes(set_up.model, leaves, parts, loss, set_up.optimizers, batch, backward)
    finite = Finite()
    first = passes.run(passes.step, Wide(), finite)
    if first.changed:
        # A loop may step by hooks, with one pass a step.
        if len(parts) == 1 and all(has_own_hooks(leaves[name]) for name in first.changed):
            findings.unseen["the gradient"] = "hooks step weights within the backward pass"
        else:
            findings.add("step-order", first.changed, len(first.changed))
        return {}
    add_nonfinite(first, finite, findings)
    ranks = all_ranks()
    number = int(ranks.size == 1)  # ranks would take turns of their own
    add_roundings(first, lambda sites: passes.run(passes.step, Wide(sites)), number, findings)
    all_parts = [*chain.from_iterable(ranks.gather(parts))]
    compare_ranks(passes, first, findings)
    try:
        plain = compare_structure(passes, all_parts, first, findings)
        _add_loss(plain, findings)
        compare_slope(passes, all_parts, findings)
    except NarrowgaugeError:
        raise
    except Exception as error:  # whatever the loss raises of an unwrapped model
        findings.unseen["the gradient"] = words_of(error)
    return first.gradients


def _add_loss(plain: Pass | None, findings: Findings) -> None:
    """Tell a loss that a 16-bit format rounds, and print its distance: the forward number."""
    if plain is None or not isinstance(plain.loss, Tensor) or not is_finite(plain.loss):
        return
    value = float(plain.loss.detach())
    off = abs(value - plain.value) / (abs(plain.value) or 1.0)
    findings.lines.append(f"loss {value:.6g}, {off:.2g} of it from float64's")
    if plain.loss.dtype in UNITS and off > KINDS["loss-rounding"].bound:
        findings.add("loss-rounding", "the loss", off)
