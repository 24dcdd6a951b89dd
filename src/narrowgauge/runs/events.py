"""Events: messages for a person about a run.

Code should read the kind, the detector and the other columns instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from narrowgauge.errors import suggestion
from narrowgauge.runs.finding import sentences
from narrowgauge.runs.schema import EVENT_KINDS as KINDS
from narrowgauge.runs.schema import Row

_LISTENERS: list[Callable[[Event], object]] = []


@dataclass(frozen=True)
class Event:
    """Something that happened in a run.

    Args:
        kind: one of :data:`KINDS`.
        step: optimizer steps done when it happened; 0 is before the first.
        message: one sentence.
        tensor, rank: the parameter and the rank concerned.
        value, threshold: the measured value and its limit, in the unit that the message names.
        advice: what to do.
        detector: a detector of the monitor, a check of ``ng.check``, a reading
            (:mod:`narrowgauge.analysis.kinds`), ``audit``, ``replicas``, ``changed-settings`` or
            ``changed-software``. Empty if nothing was judged.
        expected, stage: of a reading: the expected value, and the stage of the step.
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
    rank: int | None = None
    detector: str = ""
    expected: float | None = None
    stage: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"no event kind is named {self.kind!r}. {suggestion(self.kind, KINDS)}".strip()
            )

    def row(self) -> Row:
        """Return the event as a row of ``events.jsonl``; empty columns are left out."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}

    @property
    def sentence(self) -> str:
        """Return the message and the advice, without the last full stop."""
        return sentences(self.message, self.advice).removesuffix(".")


def on_event(callback: Callable[[Event], object]) -> Callable[[], None]:
    """Call a function with every event of every run and all gauges of this process, after it was
    written.

    Args:
        callback: takes an :class:`Event`. Its exception ends the run.
    Returns:
        A function that removes the callback.
    Example:
        >>> stop = on_event(lambda event: print(event.kind))
        >>> emit(Event("note", 0, "bits may differ"))
        note
        >>> stop()
    """
    _LISTENERS.append(callback)

    def stop() -> None:
        if callback in _LISTENERS:
            _LISTENERS.remove(callback)

    return stop


def emit(event: Event) -> None:
    """Call every callback with an event. Writers of runs and gauges do so after writing it."""
    for callback in list(_LISTENERS):
        callback(event)
