"""Recorded differences between two runs: settings, data and software."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import Run, config_of
from narrowgauge.runs.schema import UNAVAILABLE, Row, short
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

TABLES = ("config", "data", "model", "optimizer", "versions", "machine")
"""Compared tables of ``run.toml``."""

NOT_COMPARED = frozenset({
    "out", "stop_after", "eval_every", "checkpoint_every", "keep_checkpoints", "log_every",
    "gauges_every", "audit_every", "verify_every", "fingerprints_every", "unigram_loss",
})  # fmt: skip
"""Settings that do not affect the bits of training."""


@dataclass(frozen=True, slots=True)
class SettingDifference:
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

    Skip entries that only one has.
    """
    first_run = {**first_run, "config": config_of(first_run)}
    second_run = {**second_run, "config": config_of(second_run)}
    same = set()
    for table in _PLACES:
        if first_run.get(table) and first_run[table] == second_run.get(table):
            same.add(table)
    named = {*(first_run["config"] or ()), *(second_run["config"] or ())}
    for table in TABLES:
        first = first_run.get(table)
        second = second_run.get(table)
        if isinstance(first, dict) and isinstance(second, dict):
            for difference in _of_table(table, first, second):
                # Both repeat settings: the optimizer's groups, and the seed of the data.
                repeats = table in ("optimizer", "data") and difference.name in named
                # The same content in another folder is not a difference.
                are_paths = all("/" in value or "\\" in value for value in difference.values)
                moved = table == "config" and difference.name in same and are_paths
                if not repeats and not moved:
                    yield difference
    for difference in _of_table("arithmetic", _probes(first_run), _probes(second_run)):
        if not any(text.startswith(UNAVAILABLE) for text in difference.values):
            yield difference


_PLACES = ("data", "model")
"""Settings that may be folders. The table of that name in ``run.toml`` describes their content."""


def _probes(run: Row) -> Row:
    arithmetic = run.get("arithmetic")
    if not isinstance(arithmetic, dict) or not isinstance(arithmetic.get("results"), dict):
        return {}
    results: Row = arithmetic["results"]
    return results


def _of_table(
    table: str, first_table: Mapping[str, Any], second_table: Mapping[str, Any], prefix: str = ""
) -> Iterator[SettingDifference]:
    names = list(filter(second_table.__contains__, first_table))
    if table == "machine":  # a single process records no rank count
        names = [*names, *({"ranks"} & (first_table.keys() ^ second_table.keys()))]
    for name in names:
        if name in NOT_COMPARED:
            continue
        first = first_table.get(name, 1)
        second = second_table.get(name, 1)
        if isinstance(first, dict) and isinstance(second, dict) and name != "recipe":
            yield from _of_table(table, first, second, f"{prefix}{name}.")
        elif first != second:
            yield SettingDifference(f"{prefix}{name}", (_text(first), _text(second)), table)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return short(value)
