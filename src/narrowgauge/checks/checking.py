"""``narrowgauge.check``: find updates that rounding will lose, wrong gradients, and errors of the set-up.

Optimizers of PyTorch and of other libraries pass the same checks as Narrowgauge's.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from torch import nn

from narrowgauge.analysis.reading import Reading, Readings
from narrowgauge.checks.gradients import Backward, Loss, gradient_readings
from narrowgauge.checks.parameters import parameter_readings
from narrowgauge.checks.set_up import SetUp, described, set_up_of
from narrowgauge.checks.step_check import StepCheck
from narrowgauge.checks.updates import update_readings
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RecipeError
from narrowgauge.runs.events import Event, emit
from narrowgauge.runs.finding import counted
from narrowgauge.runs.schema import Row
from narrowgauge.spec.update_rules import Range


class CheckWarning(UserWarning):
    """Something is wrong in a step that :func:`narrowgauge.check` watched."""


class Check(Readings):
    """The readings of :func:`narrowgauge.check`. With ``step`` also a handle on the watched step.

    Iterates over :class:`~narrowgauge.analysis.reading.Reading`. As a context manager, stops watching at the end.

    Args:
        readings, lines, looked_at, unseen: as of :class:`~narrowgauge.analysis.reading.Readings`.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(8, 8)
        >>> check = ng.check(model, torch.optim.AdamW([model.bias]))
        >>> check.ok, [(reading.what, reading.tensor) for reading in check]
        (False, [('missing-parameters', 'weight')])
    """

    _watched: StepCheck | None = None

    def watch(self, set_up: SetUp, step: int, max_grad_norm: float | None, ignore: Collection[str]) -> None:
        """Watch the ``step``-th step from now. Add its differences from the optimizer's rule to the readings, and warn."""

        def take(number: int, readings: list[Reading], row: Row) -> None:
            self.unseen = dict(row["unseen"]) if row else self.unseen
            again = [*static_readings(SetUp(set_up.model, set_up.optimizers))]  # the first steps have made states
            seen = [r for r in self.readings if r.step] + readings
            self.readings = Readings([*again, *seen]).readings
            if row:
                self.looked_at = (
                    f"{counted(row.get('compared', 0), 'tensor')} of step {step} compared with the optimizer's rule"
                )
            else:
                self.close()
            _warn(readings, step)

        self.unseen = {"the update": f"step {step} was not taken"}
        self._watched = StepCheck(
            set_up.model, set_up.optimizers[0], 0, take, first=step, max_grad_norm=max_grad_norm, ignore=ignore
        )

    def close(self) -> None:
        """Stop watching; without effect if nothing is watched."""
        if self._watched is not None:
            self._watched.remove()
            self._watched = None

    def __enter__(self) -> Check:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check(
    model: nn.Module,
    optimizer: Any,
    *,
    batch: Any = None,
    loss: Loss | None = None,
    backward: Backward | None = None,
    step: int = 0,
    max_grad_norm: float | None = None,
    ignore: Collection[str] = (),
) -> Check:
    """Find the losses and errors of a training set-up before it trains.

    Without ``batch`` the model is not called: only weights, states and settings are read. With ``batch`` and ``loss`` one
    configured step is compared with float32 in one process, tensor by tensor. All ranks make the call.

    Args:
        model: as the loop calls it, possibly wrapped or compiled.
        optimizer: any ``torch.optim.Optimizer``, of this or another library, possibly wrapped; or a list of several.
        batch: this rank's batch: tensors with a first dim of sequences, in tuples or dicts. A list holds micro-batches.
        loss: ``loss(model, batch)`` returns the objective, a mean over its batch, with the loop's autocast.
        backward: ``backward(model, batch)`` computes the gradients of a step as the loop does, with its accumulation, loss
            scale and reductions. ``None``: the loss of each micro-batch over their number.
        step: the optimizer step, counted from now, to compare with the optimizer's rule during training. Differences are added
            to the readings, and reported by a :class:`CheckWarning` and by events. 0 for none.
        max_grad_norm: the loop's clipping limit, for ``step``.
        ignore: kinds of intended readings of the step, such as ``"weights-written"`` if the loop averages weights.
    Returns:
        The readings beyond their bound. ``ok`` is true if none is worse than a note; ``require()`` raises otherwise.
    Raises:
        RecipeError: ``model`` is not a module, ``optimizer`` not an optimizer; ``step`` with several optimizers; ``batch``
            without ``loss``.

    Cost: reads 4,096 elements of each parameter. With ``batch`` three passes of a float32 copy, and one of the model.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> [reading.what for reading in ng.check(model, optimizer)]
        ['stands-still', 'frozen-moments', 'swallowed-decay']
    """
    Range().check("step", step)
    if (batch is None) != (loss is None):
        raise RecipeError("Cannot compare gradients because batch= needs loss=, and loss= needs batch=.", "Pass both.")
    set_up = set_up_of(model, optimizer)
    if step and len(set_up.optimizers) > 1:
        raise RecipeError(
            f"Cannot compare step {step} because check was given {len(set_up.optimizers)} optimizers.",
            "Leave step out, or pass one optimizer.",
        )
    readings, lines, unseen = [*static_readings(set_up)], described(set_up), dict[str, str]()
    if loss is not None:
        more, words = gradient_readings(set_up, batch, loss, backward, unseen)
        readings, lines = readings + more, lines + words
    number = sum(p.parameter.numel() for p in set_up.trained)
    looked_at = f"{counted(len(set_up.trained), 'tensor')}, {counted(number, 'element')} looked at"
    result = Check(readings, lines, looked_at, unseen)
    if step:
        result.watch(set_up, step, max_grad_norm, ignore)
    return result


def static_readings(set_up: SetUp) -> list[Reading]:
    """Return the readings that need no step."""
    return [*parameter_readings(set_up), *update_readings(set_up)]


def _warn(readings: list[Reading], step: int) -> None:
    """Report the readings of a watched step, on rank 0."""
    if all_ranks().rank != 0:
        return
    for reading in readings:
        emit(event_of(reading, step))
    if readings:
        lines = [f"{r.what} ({r.tensor or 'all tensors'}): {r.advice}" for r in readings]
        warnings.warn("\n".join([f"narrowgauge.check compared step {step}.", *lines]), CheckWarning, stacklevel=2)


def event_of(reading: Reading, step: int) -> Event:
    """Return the event of a reading."""
    kind = "note" if reading.severity == "note" else "warning"
    return Event(
        kind, step, reading.advice, reading.tensor or None, reading.value, reading.bound, detector=reading.what,
        expected=reading.expected, stage=reading.stage,
    )  # fmt: skip
