"""Configuration and environment of a page's runs: a table of what differs, and one of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.spec.tables import Column, Table, text_columns

_NOT_SHOWN = "config.out"
"""A meaningless setting that differs between any two runs."""


def setting_tables(named: Sequence[tuple[Run, str]]) -> tuple[Table, Table]:
    """Return the settings that differ between runs, a row per run, and the others, a row per setting."""
    flat = [(name, _flat(run.run)) for run, name in named]
    keys = dict.fromkeys(key for _, settings in flat for key in settings if key != _NOT_SHOWN)
    values = {key: [settings.get(key, "–") for _, settings in flat] for key in keys}
    differing = [key for key in keys if len(set(map(repr, values[key]))) > 1]
    runs = [{"run": name, **{key: values[key][place] for key in differing}} for place, (name, _) in enumerate(flat)]
    shared = [{"setting": key, "value": values[key][0]} for key in keys if key not in differing]
    columns = tuple(Column(key, key) for key in ("run", *differing))
    both = text_columns(setting="setting", value="value")
    return Table(columns, runs if differing else []), Table(both, shared)


def _flat(table: Row, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
