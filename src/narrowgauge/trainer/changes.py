"""What has changed since a run began: its settings, its rows, and the machine it goes on with.

A run's settings stand in its ``run.toml``, which anybody can edit, in its first row and in every checkpoint. Where they
differ, going on would be another run than the one that its rows tell of, so that is refused, with the name of the setting,
unless it is meant. Other versions or another machine may change bits; that is told, and goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.lines import json_value, restored, toml_value
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import short
from narrowgauge.runs.writer import require_rows, rows_lost
from narrowgauge.trainer.config import TrainConfig

_NOT_OF_THE_RUN = ("out", "stop_after")
"""Settings that say where a run lies and when to pause, and change nothing of it."""

_BITS_DEPEND_ON = (
    ("versions", "narrowgauge", "narrowgauge"),
    ("versions", "torch", "torch"),
    ("versions", "transformers", "transformers"),
    ("machine", "device", "device"),
    ("machine", "capability", "processor capability"),
    ("machine", "num_threads", "thread count"),
)


def accept(run: Run, present: TrainConfig, step: int, standing: Mapping[str, Any], is_meant: bool) -> list[str]:
    """What going on from a checkpoint has to accept: changed settings and lost rows, a sentence each.

    Args:
        run: as it was read.
        present: the settings it would go on with, filled in.
        step: of the checkpoint; 0 without one.
        standing: what the checkpoint says of ``settings`` and ``rows``, where it does; older ones do not.
        is_meant: whether the user said so.
    Returns:
        Sentences without a full stop; none where all is as it was.
    Raises:
        RecordError: something has changed or is missing, and it is not meant.
    """
    changed = changed_settings(standing.get("settings") or run.began_with or {}, present.to_dict())
    if is_meant:
        said = [f"{name} was {before} up to step {step} and is {now} from here on" for name, before, now in changed]
        return [*said, *rows_lost(run.path, step, standing.get("rows"))]
    if changed:
        told = "; ".join(f"{name} is {now}, and the run was begun with {before}" for name, before, now in changed)
        raise RecordError(
            f"{run.path / 'run.toml'} was changed: {told}.",
            f"Put it back, or go on with what it says now: narrowgauge resume {run.path} --accept-changes",
        )
    require_rows(run.path, step, standing.get("rows"))
    return []


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Settings that differ, by name, with both values in words. A setting that an older version lacked was at its default.

    Example:
        >>> changed_settings({"lr": 0.003, "out": "a"}, {"lr": 0.007, "seed": 0, "out": "b"})
        [('lr', '0.003', '0.007')]
    """
    if not before:
        return []
    found, defaults = [], TrainConfig().to_dict()
    for field in fields(TrainConfig):
        if field.name in _NOT_OF_THE_RUN:
            continue
        values = [
            restored(json_value(toml_value(table.get(field.name, defaults.get(field.name))))) for table in (before, now)
        ]
        if values[0] != values[1]:
            said = ["not set" if value is None else short(value) for value in values]
            found.append((field.name, said[0], said[1]))
    return found


def differences(recorded: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """What has changed since a run began that may change its bits, a sentence each.

    Args:
        recorded: the run's ``run.toml``; what it does not say is not compared.
        present: of this process, see :func:`describe`.
    Returns:
        Sentences without a full stop; none where nothing differs.
    Example:
        >>> differences({"versions": {"torch": "2.12.1"}}, {"versions": {"torch": "2.13.0"}})
        ['torch 2.12.1 began this run and 2.13.0 goes on: bits may differ from an uninterrupted run']
    """
    sentences = []
    for table, key, words in _BITS_DEPEND_ON:
        there = recorded.get(table)
        before = there.get(key) if isinstance(there, dict) else None
        now = present.get(table, {}).get(key)
        if before is not None and before != now:
            said = f"{words} {before} began this run and {now} goes on"
            sentences.append(f"{said}: bits may differ from an uninterrupted run")
    return sentences
