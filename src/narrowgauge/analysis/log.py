"""The log of a run: ``events.jsonl`` holds readings, and ``ng.on_event`` passes them on.

What happens in every run is a note: ``start``, ``resume``, ``checkpoint``, ``skip``, ``stop``,
``finish`` and ``note``. What a tool did not look at is a note named ``unseen``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from narrowgauge.analysis.reading import SEVERITIES, STAGES, Reading
from narrowgauge.runs.schema import Row, number, step_of

_LISTENERS: list[Callable[[Reading], object]] = []
_TEXTS = ("stage", "tensor", "what", "advice", "severity", "side", "place")


def happened(
    what: str, step: int, words: str, *, severity: str = "note", stage: str = "", **fields: Any
) -> Reading:
    """Return the reading of something that happened after ``step`` steps.

    Args:
        words: what happened and what to do, in sentences.
        fields: of :class:`Reading`.
    """
    stage = stage or ("between steps" if step else "start")
    return Reading(
        step, stage, fields.pop("tensor", ""), what, advice=words, severity=severity, **fields
    )


def row_of(reading: Reading) -> Row:
    """Return a reading as a row of ``events.jsonl``, without its empty fields."""
    return {name: value for name, value in reading.to_dict().items() if value not in (None, "")}


def reading_of(row: Row) -> Reading:
    """Return the reading in a row of ``events.jsonl``, which may lack fields."""
    values: dict[str, Any] = {"step": step_of(row)}
    for field in fields(Reading)[1:]:
        value = row.get(field.name)
        if field.name in _TEXTS:
            values[field.name] = str(value or "")
        else:
            values[field.name] = number(value)
    if values["stage"] not in STAGES:
        values["stage"] = "between steps" if values["step"] else "start"
    if values["severity"] not in SEVERITIES:
        values["severity"] = "error"
    if values["rank"] is not None:
        values["rank"] = int(values["rank"])
    return Reading(**values)


def on_event(callback: Callable[[Reading], object]) -> Callable[[], None]:
    """Call a function with every reading that a run of this process logs, after it was written.

    Args:
        callback: takes a :class:`narrowgauge.Reading`. Its exception ends the run.
    Returns:
        A function that removes the callback.
    Example:
        >>> stop = on_event(lambda reading: print(reading.what))
        >>> emit(happened("note", 0, "bits may differ"))
        note
        >>> stop()
    """
    _LISTENERS.append(callback)

    def stop() -> None:
        if callback in _LISTENERS:
            _LISTENERS.remove(callback)

    return stop


def emit(reading: Reading) -> None:
    """Call every callback with a reading that was written."""
    for callback in list(_LISTENERS):
        callback(reading)
