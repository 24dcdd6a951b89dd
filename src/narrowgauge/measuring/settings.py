"""Recorded differences between two runs: settings, data and software."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import UNAVAILABLE, Row, short
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

TABLES = ("config", "data", "model", "optimizer", "versions", "machine", "arithmetic")
"""Compared tables of ``run.toml``."""

NOT_COMPARED = frozenset({
    "out", "stop_after", "eval_every", "checkpoint_every", "keep_checkpoints", "log_every",
    "gauges_every", "audit_every", "verify_every", "fingerprints_every", "unigram_loss",
})  # fmt: skip
"""Settings that do not affect the bits of training."""


class SettingDifference(NamedTuple):
    """Describe one difference: a setting, a version, or a property of the data or machine.

    ``values`` are the values of the two runs, as text. ``table`` is the table of ``run.toml``.
    """

    name: str
    values: tuple[str, str]
    table: str = "config"

    def __str__(self) -> str:
        return f"{self.name} {self.values[0]} and {self.values[1]}"


def recipe_of(run: Run) -> Recipe | None:
    """Return the recipe in a run's record, or ``None``."""
    try:
        return parse(run.config["recipe"])
    except (NarrowgaugeError, KeyError, TypeError):
        return None


def settings_diff(first_run: Row, second_run: Row) -> Iterator[SettingDifference]:
    """Yield the differences of two ``run.toml``, including the arithmetic.

    Skip entries that only one has, and paths: what is there is in another table.
    """
    settings = {*_table(first_run, "config"), *_table(second_run, "config")}
    for table in TABLES:
        for difference in _of_table(table, _table(first_run, table), _table(second_run, table)):
            # The optimizer's groups and the data repeat settings, such as the seed.
            repeats = table in ("optimizer", "data") and difference.name in settings
            is_unknown = any(text.startswith(UNAVAILABLE) for text in difference.values)
            are_paths = all("/" in text for text in difference.values)
            is_place = table == "config" and difference.name != "recipe" and are_paths
            if not repeats and not is_unknown and not is_place:
                yield difference


def _table(run: Row, name: str) -> Row:
    table = run.get(name)
    if not isinstance(table, dict):
        return {}
    if name == "arithmetic":
        return table.get("results") or {}
    if name == "machine":  # a single process records no number
        return {"ranks": 1, **table}
    return table


def _of_table(
    table: str, first_table: Mapping[str, Any], second_table: Mapping[str, Any], prefix: str = ""
) -> Iterator[SettingDifference]:
    for name, first in first_table.items():
        second = second_table.get(name, first)
        if name in NOT_COMPARED:
            continue
        if isinstance(first, dict) and isinstance(second, dict) and name != "recipe":
            yield from _of_table(table, first, second, f"{prefix}{name}.")
        elif first != second:
            yield SettingDifference(f"{prefix}{name}", (_text(first), _text(second)), table)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return short(value)
