"""Configuration and environment of a page's runs: differing settings in a table, the others by section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row

_NOT_SHOWN = frozenset({"config.out"})
"""Meaningless settings that differ between any two runs."""


@dataclass(frozen=True)
class Environment:
    """Hold the configuration and environment of runs.

    Args:
        differing: settings that differ between runs.
        runs: values of the differing settings, by the run's name.
        shared: all other settings, by their table in ``run.toml``.
    """

    differing: Sequence[str]
    runs: Sequence[tuple[str, Sequence[Any]]]
    shared: Mapping[str, Mapping[str, Any]]


def environment(named: Sequence[tuple[Run, str]]) -> Environment:
    flat = [(name, _flat(run.run)) for run, name in named]
    keys = list(dict.fromkeys(key for _, settings in flat for key in settings))
    missing = object()
    differing = {key for key in keys if len({repr(settings.get(key, missing)) for _, settings in flat}) > 1}
    shown = [key for key in keys if key in differing - _NOT_SHOWN]
    shared: dict[str, dict[str, Any]] = {}
    for key in keys:
        if key not in differing:
            table, _, name = key.partition(".") if "." in key else ("run", "", key)
            shared.setdefault(table, {})[name] = flat[0][1][key]
    return Environment(shown, [(name, [settings.get(key, "–") for key in shown]) for name, settings in flat], shared)


def _flat(table: Row, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
