"""``narrowgauge.check``: find updates that rounding will lose, wrong gradients, and errors of the
set-up.

One configured step runs beside its float64 shadow, on the model itself, before training:

- *rounding* is the gradient minus its shadow (:mod:`narrowgauge.measuring.check.rounding_sites`);
- *structure* is that shadow minus the shadow of the plain loss in one process
  (:mod:`narrowgauge.measuring.check.structure`);
- *slope* is the change of the plain loss beside its gradient (:mod:`narrowgauge.measuring.check.slope`).

With several ranks each process makes the plain pass over the batches of all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks, unlike
from narrowgauge.errors import RecipeError
from narrowgauge.measuring.check.dispatch import is_finite
from narrowgauge.measuring.check.passes import (
    Backward,
    Gradients,
    Loss,
    Pass,
    Passes,
    micro_batches,
)
from narrowgauge.measuring.check.policies.first_nonfinite import FirstNonfinite
from narrowgauge.measuring.check.policies.float64_shadow import Float64Shadow
from narrowgauge.measuring.check.predicted_update import add_stored
from narrowgauge.measuring.check.rounding_sites import add_nonfinite, add_roundings
from narrowgauge.measuring.check.slope import compare_slope
from narrowgauge.measuring.check.structure import compare_ranks, compare_structure
from narrowgauge.measuring.check.training_setup import (
    TrainingSetup,
    sample_elements,
    setup_of,
    setup_readings,
)
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Readings, of_all, words_of
from narrowgauge.measuring.unit_roundoff import UNITS
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.runs.text import plural

PLACES = 3
"""Lines of places that round most, at most."""


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
        The readings beyond their bound. ``ok`` is true if there is none. What was not followed is in
        ``unseen``.
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
    setup = setup_of(model, optimizer)
    result = Readings(setup_readings(setup))
    if not setup.outside.keys().isdisjoint(setup.parameters):
        words = "the loop copies them after the step; ng.watch sees it"
        result.unseen["whether weights follow their masters"] = words
    gradients: Gradients = {}
    missing = setup.missing
    if missing and "missing-parameters" not in [reading.what for reading in result]:
        words = "in none of the optimizers passed: pass all in a list"
        result.unseen[f"the step of {of_all(missing)}"] = words
    held = plural(len(setup.trained), "tensor")
    looked_at = f"which of {held} an optimizer holds, finite weights, ties, rounded buffers"
    if loss is not None:
        gradients = _compare(setup, batch, loss, backward, result)
        result = all_ranks().gather(result)[0]  # every rank returns the same
    if gradients:
        looked_at += f"; gradients of {plural(len(gradients), 'tensor')}"
    add_stored(setup, gradients, result)
    return Readings(result.readings, result.lines, looked_at, result.unseen)


def _compare(
    setup: TrainingSetup, batch: Any, loss: Loss, backward: Backward | None, result: Readings
) -> Gradients:
    """Compare the gradients of one configured step, and return them."""
    leaves = setup.outside  # masters, which have their weights' names
    for name, p in setup.parameters.items():
        if p.requires_grad and not p.is_meta:
            leaves[name] = p
    for p in leaves.values():
        if is_sharded(p) or isinstance(getattr(p, "main_grad", None), Tensor):
            words = "not followed through shards and main_grad; check before they are made"
            result.unseen["the gradient"] = words
            return {}
    unlike_names = [*unlike({name: fingerprint(sample_elements(p)) for name, p in leaves.items()})]
    if unlike_names:
        result.unseen["the gradient"] = f"ranks hold unlike weights, such as {unlike_names[0]}"
        return {}
    parts = micro_batches(setup.model, batch, loss)
    passes = Passes(setup.model, leaves, parts, loss, setup.optimizers, batch, backward)
    finite = FirstNonfinite()
    first = passes.run(passes.step, Float64Shadow(), finite)
    if first.changed:
        names = of_all(first.changed)
        result.unseen["the gradient"] = f"{names} moved within the backward pass"
        return {}
    add_nonfinite(first, finite, result)
    ranks = all_ranks()
    all_parts = [*chain.from_iterable(ranks.gather(parts))]

    def roundings() -> None:
        number = PLACES if ranks.size == 1 else 0  # ranks would take turns of their own
        add_roundings(
            first, lambda sites: passes.run(passes.step, Float64Shadow(sites)), number, result
        )

    def structure() -> None:
        compare_ranks(passes, first, result)
        _add_loss(compare_structure(passes, all_parts, first, finite, result), result)

    areas: dict[str, Callable[[], None]] = {
        "the roundings of the gradient": roundings, "the structure of the gradient": structure,
        "the slope of the loss": partial(compare_slope, passes, all_parts, result),
    }  # fmt: skip
    for area, compare in areas.items():
        try:
            compare()
        except Exception as error:  # whatever the loss raises of an unwrapped model; ours in tests
            result.unseen[area] = words_of(error)
    return first.gradients


def _add_loss(plain: Pass, result: Readings) -> None:
    """Tell a loss that a 16-bit format rounds, and print its distance: the forward number."""
    if not isinstance(plain.loss, Tensor) or not is_finite(plain.loss):
        return
    value = float(plain.loss.detach())
    off = abs(value - plain.value) / (abs(plain.value) or 1.0)
    result.lines.append(f"loss {value:.6g}, {off:.2g} of it from float64's")
    if plain.loss.dtype in UNITS and off > KINDS["loss-rounding"].bound:
        result.add("loss-rounding", "the loss", off)
