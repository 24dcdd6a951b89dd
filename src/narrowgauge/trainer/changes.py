"""What has changed since a run began: its settings, its records, and the machine that resumes it.

The settings of a run are stored in its ``run.toml``, which anyone can edit, in its first record and in every checkpoint. If
they differ, resuming would continue another run than the recorded one, so it is refused with the name of the setting, unless
the change is accepted explicitly. Other versions or another machine may change bits; a note says so and the run continues.
How a run is shared out over ranks is no part of it: a resume may choose anew, and ``run.toml`` then says what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs import arithmetic
from narrowgauge.runs.lines import json_value, restored, toml_value
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import short
from narrowgauge.runs.writer import require_rows, rows_lost
from narrowgauge.trainer.config import CHOSEN_ANEW, TrainConfig

_NOT_OF_THE_RUN = ("out", "stop_after", "verify_every", *CHOSEN_ANEW)
"""Settings for the location of a run, for pausing it, and those that whoever goes on with it chooses."""

_BITS_DEPEND_ON = (
    ("versions", "narrowgauge", "narrowgauge"),
    ("versions", "torch", "torch"),
    ("versions", "transformers", "transformers"),
    ("machine", "device", "device"),
    ("machine", "capability", "processor capability"),
    ("machine", "num_threads", "thread count"),
)


def accept(run: Run, present: TrainConfig, step: int, standing: Mapping[str, Any], is_accepted: bool) -> list[str]:
    """Changed settings and lost records that resuming from a checkpoint has to accept, one sentence each.

    Args:
        run: the recorded run.
        present: the settings it would continue with, filled in.
        step: step of the checkpoint; 0 without one.
        standing: ``settings`` and ``rows`` stored in the checkpoint; older checkpoints lack them.
        is_accepted: whether the user accepts changes.
    Returns:
        Sentences without a full stop; none if nothing has changed.
    Raises:
        RecordError: something has changed or is missing, and changes are not accepted.
    """
    changed = changed_settings(standing.get("settings") or run.began_with or {}, present.to_dict())
    if is_accepted:
        sentences = [
            f"{name} was {before} up to step {step} and is {now} from there on" for name, before, now in changed
        ]
        return [*sentences, *rows_lost(run.path, step, standing.get("rows"))]
    if changed:
        changes = "; ".join(f"{name} is {now}, and the run started with {before}" for name, before, now in changed)
        raise RecordError(
            f"{run.path / 'run.toml'} was changed: {changes}.",
            f"Restore it, or accept the change: narrowgauge resume {run.path} --accept-changes",
        )
    require_rows(run.path, step, standing.get("rows"))
    return []


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Settings that differ, by name, with both values as text. A setting that an older version lacked had its default.

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
            texts = ["not set" if value is None else short(value) for value in values]
            found.append((field.name, texts[0], texts[1]))
    return found


def moved(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What was chosen anew since ``run.toml`` was written, and the ranks: name, value before, and value now, as text.

    Args:
        recorded: the run's ``run.toml``.
        present: the same for this process, see :func:`describe`.
    Example:
        >>> moved({"config": {"shard": "full"}, "machine": {"ranks": 2}}, {"config": {"shard": "none"}, "machine": {}})
        [('shard', "'full'", "'none'"), ('the number of ranks', '2', '1')]
    """
    defaults = TrainConfig().to_dict()
    values = [
        {
            **{name: short(run.get("config", {}).get(name, defaults.get(name, "not set"))) for name in CHOSEN_ANEW},
            "the number of ranks": str(run.get("machine", {}).get("ranks", 1)),
        }
        for run in (recorded, present)
    ]
    return [(name, before, values[1][name]) for name, before in values[0].items() if before != values[1][name]]


def with_present_ranks(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``run.toml`` with this process's ranks and what it has chosen anew; all else as it was.

    Args:
        recorded, present: as for :func:`moved`.
    """

    def replaced(table: str, names: tuple[str, ...]) -> dict[str, Any]:
        kept = {name: value for name, value in recorded.get(table, {}).items() if name not in names}
        return kept | {name: value for name, value in present.get(table, {}).items() if name in names}

    return {**recorded, "config": replaced("config", CHOSEN_ANEW), "machine": replaced("machine", ("ranks",))}


def differences(recorded: dict[str, Any], present: dict[str, Any], doing: str = "resumes") -> list[str]:
    """Changes since a run began that may change its bits, one sentence each.

    Args:
        recorded: the run's ``run.toml``; missing entries are not compared.
        present: the same for this process, see :func:`describe`.
        doing: what this process does with the run.
    Returns:
        Sentences without a full stop; none if nothing differs.
    Example:
        >>> differences({"versions": {"torch": "2.12.1"}}, {"versions": {"torch": "2.13.0"}})
        ['the run started with torch 2.12.1 and resumes with 2.13.0: bits may differ from an uninterrupted run']
    """
    sentences = []
    for table, key, words in _BITS_DEPEND_ON:
        there = recorded.get(table)
        before = there.get(key) if isinstance(there, dict) else None
        now = present.get(table, {}).get(key)
        if before is not None and before != now:
            change = f"the run started with {words} {before} and {doing} with {now}"
            sentences.append(f"{change}: bits may differ from an uninterrupted run")
    if parted := _parted_by(recorded, present):
        sentences.append(f"this machine's arithmetic is not that of the run's start, in: {parted}")
    return sentences


def _parted_by(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """The names of what differs in the measured arithmetic, at most five; a table that cannot be read is not compared."""
    try:
        names = [difference.probe.name for difference in arithmetic.differences(recorded, present)]
    except RecordError:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
