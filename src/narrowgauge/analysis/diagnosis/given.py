"""What two runs were not given alike, by their ``run.toml``: settings, data, versions, machine and its arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs import arithmetic
from narrowgauge.runs.schema import Row, short
from narrowgauge.spec.notation import parse_value

NOT_COMPARED = frozenset({
    "out", "stop_after", "eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints", "log_every", "tensorboard",
    "log_to", "gauges_every", "audit_every", "verify_every", "fingerprints_every", "max_rollbacks",
})  # fmt: skip
"""Settings that change no bit of the training."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that the two runs were not given alike.

    Args:
        name: of the setting, the version, the property of the machine.
        values: of the two runs, as text.
        table: of ``run.toml`` that holds it.
    """

    name: str
    values: tuple[str, str]
    table: str = "config"

    def __str__(self) -> str:
        return f"{self.name} {self.values[0]} and {self.values[1]}"


def differences(one: Row, other: Row) -> Iterator[Difference]:
    """What two runs were not given alike, by their ``run.toml``: settings, data, versions, machine and its arithmetic.

    Args:
        one, other: the two tables; what one of them lacks is not compared.
    """
    same = {
        name for table, names in _PLACES.items() if one.get(table) and one[table] == other.get(table) for name in names
    }
    for table in ("config", "data", "versions", "machine"):
        first, second = (each.get(table) for each in (one, other))
        if isinstance(first, dict) and isinstance(second, dict):
            found = _of_table(table, first, second)
            yield from (each for each in found if not (table == "config" and each.name in same and _are_places(each)))
    parted = arithmetic.differences(one, other)
    for each in parted:
        yield Difference(
            each.probe.name, (_text(each.one), _text(each.other)), f"arithmetic.{arithmetic.origin(parted)}"
        )


_PLACES = {"data": ("data", "tokenizer"), "model": ("model",)}
"""By table of ``run.toml``: settings that may be folders, whose content the table describes."""


def _are_places(difference: Difference) -> bool:
    """Whether both values are paths: the same content in another folder is no difference."""
    return all("/" in value or "\\" in value for value in difference.values)


def _of_table(table: str, one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[Difference]:
    names = [name for name in one if name in other]
    if table == "machine":  # a run of one process has no count of ranks
        names = [*names, *({"ranks"} & (one.keys() ^ other.keys()))]
    for name in names:
        if table == "config" and name in NOT_COMPARED:
            continue
        first, second = one.get(name, 1), other.get(name, 1)
        if isinstance(first, dict) and isinstance(second, dict) and name != "recipe":
            yield from _of_table(table, first, second, f"{prefix}{name}.")
        elif first != second:
            parts = _reductions(first, second) if name == "recipe" else None
            yield Difference(f"{prefix}{name}", (_text(first), _text(second)), table) if parts is None else parts


def _reductions(one: Any, other: Any) -> Difference | None:
    """The difference of two recipes that differ in nothing but how gradients are summed; ``None`` of others."""
    try:
        first, second = parse_value(one), parse_value(other)
    except NarrowgaugeError:
        return None
    if replace(first, reduction=second.reduction) != second:
        return None
    return Difference("recipe.reduction", (first.reduction.name, second.reduction.name))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else short(value)
