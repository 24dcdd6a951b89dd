"""Recorded differences between two runs: settings, data and software."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import UNAVAILABLE, Row
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
    settings = {**first_run.get("config", {}), **second_run.get("config", {})}
    for table in TABLES:
        others = dict(_values(second_run, table))
        for name, value in _values(first_run, table):
            pair = str(value), str(others.get(name, value))
            # The optimizer's groups and the data repeat settings, such as the seed.
            repeats = table in ("optimizer", "data") and name in settings
            is_unknown = any(text.startswith(UNAVAILABLE) for text in pair)
            is_place = table == "config" and name != "recipe" and all("/" in text for text in pair)
            if pair[0] != pair[1] and not (repeats or is_unknown or is_place):
                yield SettingDifference(name, pair, table)


def _values(run: Row, table: str) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a table of ``run.toml``, those of tables within it by their path."""
    values = run.get(table, {})
    if table == "arithmetic":
        values = values.get("results", {})
    if table == "machine":  # a single process records no number
        values = {"ranks": 1, **values}
    yield from _leaves(values, "")


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and name != "recipe":
            yield from _leaves(value, f"{prefix}{name}.")
        elif name not in NOT_COMPARED:
            yield f"{prefix}{name}", value
