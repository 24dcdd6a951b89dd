"""What happened in a run that deserves a word: one frozen value per happening.

Numbers go to ``steps.jsonl``; an event is what a person would want to be told. Each has a kind from the table below,
the step it belongs to, one sentence, and where it applies the tensor, the value measured, the threshold it crossed and
what to do. The same rows feed the screen during training, ``events.jsonl``, the report and the diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from narrowgauge.errors import suggestion

KINDS: dict[str, str] = {
    "start": "the run began",
    "resume": "the run went on from a checkpoint",
    "stop": "the run was stopped before its last step, by request or signal",
    "finish": "the last step was done",
    "note": "a choice was made for the user that he may want to know of",
    "warning": "something is being lost that has no kind of its own",
    "skip": "an update was not applied, because a gradient was not finite or the step was a spike",
    "divergence": "training goes nowhere: 25 steps in a row failed, or it stopped as --on-spike asks",
    "rollback": "the run went back to a checkpoint and round the data that led to a spike",
    "first_bad_value": "the operation that made the first value that is not finite, found by doing the step again",
    "lost_updates": "a storage loses part of the updates",
    "noise": "a storage adds more to the updates than they are",
    "frozen_moments": "second moments no longer follow the gradients",
    "underflow": "a cast makes much of a tensor zero",
    "overflow": "a cast cuts off much of a tensor",
    "outliers": "a tensor's largest values grow away from the others",
    "attention": "attention logits grow, or attend to one place only",
    "logits": "the model's logits drift away from zero",
    "loss_scale": "the loss scale collapses",
    "loss_spike": "the loss jumped above its past",
    "gradient_spike": "the gradient norm jumped above its past",
    "loss_climb": "the loss climbs slowly, and does not come back",
    "growth": "a weight or the gradient norm grows far beyond what it was",
    "dead_layer": "a layer no longer learns",
    "nonfinite": "a tensor holds values that are not finite",
    "checkpoint": "a checkpoint was written",
    "checkpoint_damaged": "a checkpoint did not match its manifest and was passed over",
}
"""Every kind of event and its meaning."""

_LISTENERS: list[Callable[[Event], object]] = []


@dataclass(frozen=True)
class Event:
    """One happening of a run.

    Law: ``Event.from_row(event.row()) == event``.

    Args:
        kind: a key of :data:`KINDS`.
        step: optimizer steps done when it happened; 0 is before the first.
        message: one sentence.
        tensor: the parameter it is about.
        value: what was measured, in the unit the message names.
        threshold: what it was compared with, in the same unit.
        advice: what to do.

    Raises:
        ValueError: ``kind`` is not in the table.

    Example:
        >>> Event("skip", 7, "the gradient norm was inf", value=float("inf")).row()
        {'kind': 'skip', 'step': 7, 'message': 'the gradient norm was inf', 'value': inf}
    """

    kind: str
    step: int
    message: str
    tensor: str | None = None
    value: float | None = None
    threshold: float | None = None
    advice: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no event kind is named {self.kind!r}. {suggestion(self.kind, KINDS)}".strip())

    def row(self) -> dict[str, Any]:
        """The event as a row of ``events.jsonl``; what does not apply is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None and value != ""}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Event:
        """The event of a row; fields this version does not know are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in {"message": "", **row}.items() if name in known})


def on_event(callback: Callable[[Event], object]) -> Callable[[], None]:
    """Be told of every event of every run and gauge of this process, as it happens.

    Law: events are told in the order in which they are written, after they were; what a callback raises ends the run, as
    any error of the caller's would.

    Args:
        callback: gets an event with ``kind``, ``step``, ``message`` and, where they apply, ``tensor``, ``value``,
            ``threshold`` and ``advice``.
    Returns:
        A function that ends it.
    Example:
        >>> told = []
        >>> stop = on_event(lambda event: told.append(event.kind))
        >>> tell(Event("note", 0, "bits may differ"))
        >>> stop()
        >>> tell(Event("finish", 9, "done"))
        >>> told
        ['note']
    """
    _LISTENERS.append(callback)

    def stop() -> None:
        if callback in _LISTENERS:
            _LISTENERS.remove(callback)

    return stop


def tell(event: Event) -> None:
    """Tell an event to all who asked; writers of runs and gauges call it once it is written."""
    for callback in list(_LISTENERS):
        callback(event)
