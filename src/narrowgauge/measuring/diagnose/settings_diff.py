"""Recorded differences between two runs: settings, data and software."""

from collections.abc import Iterator, Sequence
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import Run
from narrowgauge.spec.parse import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.tables import Row

PROGRAM = ("config", "data", "model", "optimizer")
"""Tables of ``run.toml`` that say what is computed."""
TABLES = (*PROGRAM, "versions", "machine", "arithmetic")
"""Compared tables: the others may explain another rounding, and no more."""

NOT_COMPARED = frozenset({
    "out", "stop_after", "eval_every", "checkpoint_every", "keep_checkpoints",
    "audit_every", "fingerprints_every", "unigram_loss",
})  # fmt: skip
"""Settings that do not affect the bits of training."""


def recipe_of(run: Run) -> Recipe | None:
    """Return the recipe in a run's record, or ``None``."""
    try:
        return parse(run.config["recipe"])
    except (NarrowgaugeError, KeyError, TypeError):
        return None


def settings_diff(
    first: Row, second: Row, tables: Sequence[str] = TABLES
) -> dict[str, tuple[str, str]]:
    """Return the values of both ``run.toml`` that differ, by name: settings, versions, and properties
    of the data, the machine and its arithmetic, by their table.

    Skip entries that only one has, and paths: what is there is in another table.
    """
    differences = {}
    for table in tables:
        prefix = "" if table == "config" else f"{table}."
        second_values = dict(_leaves(second.get(table, {}), prefix))
        for name, value in _leaves(first.get(table, {}), prefix):
            pair = str(value), str(second_values.get(name, value))
            is_place = not prefix and name != "recipe" and all("/" in text for text in pair)
            if pair[0] != pair[1] and not is_place:
                differences[name] = pair
    return differences


def _leaves(values: Row, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a table, those of tables within it by their path."""
    for name, value in values.items():
        if isinstance(value, dict) and name != "recipe":
            yield from _leaves(value, f"{prefix}{name}.")
        elif name not in NOT_COMPARED:
            yield prefix + name, value
