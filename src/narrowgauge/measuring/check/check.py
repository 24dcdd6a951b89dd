"""``narrowgauge.check``: find updates that rounding will lose, wrong gradients, and errors of the
set-up.

One configured step runs beside its float64 shadow, on the model itself, before training:

- *rounding* is the gradient minus its shadow (:mod:`narrowgauge.measuring.check.rounding_sites`);
- *structure* is that shadow minus the shadow of the plain loss in one process
  (:mod:`narrowgauge.measuring.check.structure`);
- *slope* is the change of the plain loss beside its gradient (:mod:`narrowgauge.measuring.check.slope`).

With several ranks each process makes the plain pass over the batches of all.
"""

from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks, unlike
from narrowgauge.errors import RecipeError
from narrowgauge.measuring.check.passes import Backward, Gradients, Loss, Passes, micro_batches
from narrowgauge.measuring.check.policies.float64_shadow import Float64Shadow
from narrowgauge.measuring.check.predicted_update import add_stored
from narrowgauge.measuring.check.rounding_sites import add_nonfinite, add_roundings
from narrowgauge.measuring.check.slope import compare_slope
from narrowgauge.measuring.check.structure import compare_structure
from narrowgauge.measuring.check.training_setup import (
    TrainingSetup,
    add_setup,
    sample_elements,
    setup_of,
)
from narrowgauge.measuring.reading import Readings, of_all, words_of
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import fingerprint


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
        loss, log2(lines of code) + 1 more for each of three lines that round most, and 8 bytes for each
        value of a pass.

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
    result = Readings()
    add_setup(setup, result)
    gradients = {}
    if loss is not None:
        gradients = _compare(setup, batch, loss, backward, result)
        result = all_ranks().gather(result)[0]  # every rank returns the same
    add_stored(setup, gradients, result)
    return result


def _compare(
    setup: TrainingSetup, batch: Any, loss: Loss, backward: Backward | None, result: Readings
) -> Gradients:
    """Compare the gradients of one configured step, and return them."""
    on_meta = of_all(name for name, p in setup.parameters.items() if p.is_meta)
    if on_meta:
        words = f"Cannot compare gradients because the device meta has no values of {on_meta}."
        raise RecipeError(words, "Load the weights first, or check without batch=.")
    leaves = setup.outside  # masters, which have their weights' names
    for name, p in setup.parameters.items():
        if p.requires_grad:
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
    passes = Passes(setup.model, leaves, parts, loss, batch, backward)
    passes.all_parts = [*chain.from_iterable(all_ranks().gather(parts))]
    first = passes.run(passes.step, Float64Shadow(), passes.nonfinite)
    if first.changed:
        result.unseen["the gradient"] = f"{of_all(first.changed)} moved within the backward pass"
        return {}
    add_nonfinite(passes, first, result)
    areas = {
        "the roundings of the gradient": partial(add_roundings, passes, first),
        "the structure of the gradient": partial(compare_structure, passes, first),
        "the slope of the loss": partial(compare_slope, passes),
    }
    for area, compare in areas.items():
        try:
            compare(result)
            result.looked_at += f", {area}"
        except Exception as error:  # whatever the loss raises of an unwrapped model; ours in tests
            result.unseen[area] = words_of(error)
    return first.gradients
