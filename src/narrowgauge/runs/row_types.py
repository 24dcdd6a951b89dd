"""What kind of value a row of a run folder may hold in each column that readers reckon with.

A file can be whole, valid JSON, and yet say ``"loss": "low"``: edited by hand, or written by another program. Each reader
would stumble over that in its own place, so it is looked for once, where rows are read, and told with file and line.
Columns that nobody reckons with may hold what they like.
"""

from __future__ import annotations

from typing import Any

from narrowgauge.runs.readings import FIELDS, Row

TEXT = frozenset({"kind", "message", "tensor", "advice"})
"""Columns of events that hold text."""

_AUDIT = ("edq", "noise", "lost_fraction", "unseen_fraction")
_TOTALS = ("schema_version", "val_loss", "steps", "num_skipped", "bytes_per_param", "wall_seconds", "saturated")
_RATES = ("tokens", "tokens_per_second", "seconds", "peak_memory_bytes")
_NUMBERS: dict[str, frozenset[str]] = {
    "steps": frozenset({"loss", "lr", "grad_norm", "skipped", "saturated", "loss_scale", *_RATES, *_AUDIT}),
    "evals": frozenset({"val_loss", *_RATES}),
    "events": frozenset({"value", "threshold", "to_step", "batches"}),
    "gauges": frozenset(),
    "summary": frozenset({*_TOTALS, *_RATES, *_AUDIT}),
}
_NUMBERED = frozenset({"steps", "evals", "gauges"})
_FIGURE = frozenset({int, float, bool, type(None)})
_LISTS = frozenset({*FIELDS, "block_scales", "histograms"})


def wrong_type(kind: str, row: Row) -> str:
    """The first value of a row that no reader could reckon with, in words; empty where there is none.

    Args:
        kind: ``steps``, ``evals``, ``events``, ``gauges`` or ``summary``.
        row: as it was read, with its floats that are not finite.
    Cost: about 2 µs for a row of a step.
    Example:
        >>> wrong_type("evals", {"step": 3, "val_loss": "low"}), wrong_type("evals", {"step": 3, "val_loss": 2.5})
        ("val_loss = 'low', which is no number", '')
    """
    numbers = _NUMBERS[kind]
    for key, value in row.items():
        if key in numbers and type(value) not in _FIGURE:
            return f"{key} = {short(value)}, which is no number"
        if key in TEXT and kind == "events" and not isinstance(value, (str, type(None))):
            return f"{key} = {short(value)}, which is no text"
    step = row.get("step")
    if kind in _NUMBERED and not is_whole(step):
        return "no step" if step is None else f"step = {short(step)}, which is no whole number"
    return _wrong_reading(row) if kind == "gauges" else ""


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, however it is written; ``True`` is none."""
    return type(value) is int or (type(value) is float and value.is_integer())


def _wrong_reading(row: Row) -> str:
    """The same of what is special to ``gauges.jsonl``: tables of lists of numbers."""
    table: Any
    for key, table in row.items():
        if key not in _LISTS and key != "logits":
            continue
        if not isinstance(table, dict):
            return f"{key} = {short(table)}, which is no table"
        lists: Row = {key: list(table.values())} if key == "logits" else table
        for name, values in lists.items():
            if values is None:
                continue
            if not isinstance(values, list):
                return f"{name} = {short(values)} in {key}, which is no list"
            if not _FIGURE.issuperset(map(type, values)):
                return f"{name} = {short(values)} in {key}, which are no numbers"
    return ""


def short(value: Any) -> str:
    """A value for a message, cut to forty characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
