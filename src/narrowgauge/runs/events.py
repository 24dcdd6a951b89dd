"""What happened in a run that deserves a word: one frozen value per happening.

Numbers go to ``steps.jsonl``; an event is what a person would want to be told. Each has a kind from the table below,
the step it belongs to, one sentence, and where it applies the tensor, the value measured, the threshold it crossed and
what to do. The same rows feed the screen during training, ``events.jsonl``, the report and the diagnosis.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from narrowgauge.errors import suggestion

KINDS: dict[str, str] = {
    "start": "the run began",
    "resume": "the run went on from a checkpoint",
    "stop": "the run was stopped before its last step, by request or signal",
    "finish": "the last step was done",
    "note": "a choice was made for the user that he may want to know of",
    "warning": "a gauge crossed its threshold: something is being lost",
    "skip": "an update was not applied, because a gradient was not finite",
    "divergence": "the loss or a gradient norm is no longer finite, or far above its past",
    "checkpoint": "a checkpoint was written",
    "checkpoint_damaged": "a checkpoint did not match its manifest and was passed over",
}
"""Every kind of event and its meaning."""


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
