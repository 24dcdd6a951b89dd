"""Error bars: the residuals of plans on published runs, one bar for each class of question.

``data/errors.toml`` has the 10 and 90 % quantiles of measured over planned values. A class without
a row has no published run, and no interval. A chip without a run of a class has the class's
interval, widened.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from narrowgauge.spec.chips import CHIPS, Chip
from narrowgauge.spec.toml import load_data

_ERRORS: dict[str, Any] = load_data("errors", "planner")
Ends = tuple[float, float]
"""The ends of an 80 % interval."""
LONG = 32_768
"""Tokens of a sequence from which a plan has the error bar of long sequences."""
WIDER = 1.5
"""Power of an interval's ends on a chip without a published run of the class."""


@cache
def published_runs() -> tuple[dict[str, Any], ...]:
    """Return the published runs that ship with the planner, each with its source."""
    runs = []
    for shared in load_data("runs", "planner")["publications"]:
        runs_of_publication = shared.pop("runs")
        runs += [{**shared, **run} for run in runs_of_publication]
    return tuple(runs)


@cache
def chips_with_runs() -> frozenset[tuple[str, str]]:
    """Return the pairs of a chip's architecture and a class that have a published run."""
    return frozenset((CHIPS[run["chip"]].architecture, run["kind"]) for run in published_runs())


def is_checked(kind: str, chip: Chip) -> bool:
    """Tell whether a run of this class was published on this chip's architecture."""
    return (chip.architecture, kind) in chips_with_runs()


def error_of(quantity: str, kind: str, chip: Chip) -> Ends | None:
    """Return the 10 and 90 % quantiles of measured over planned ``"speed"`` (of seconds) or
    ``"memory"``; None if no published run checks this class.
    """
    row = _ERRORS[quantity].get(kind)
    if row is None:
        return None
    power = 1.0 if is_checked(kind, chip) else WIDER
    return row["low"] ** power, row["high"] ** power


def runs_of(quantity: str, kind: str) -> int:
    """Return the number of published runs that an error bar is from."""
    return int(_ERRORS[quantity].get(kind, {}).get("runs", 0))
