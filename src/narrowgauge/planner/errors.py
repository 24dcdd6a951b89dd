"""Error bars: the residuals of plans on published runs that were asked by name, for dense models and
for mixtures.

``data/errors.toml`` has the ends of the 80 % intervals of measured over planned values, and
``next`` the half widths of what differs between two runs.
"""

from __future__ import annotations

from typing import Any

from narrowgauge.spec.toml import load_data

ERRORS: dict[str, Any] = load_data("errors", "planner")
Ends = tuple[float, float]
"""The ends of an 80 % interval."""


def error_of(quantity: str, kind: str) -> Ends:
    """Return the ends of measured over planned ``"speed"`` (of rates) or ``"memory"``."""
    row = ERRORS[quantity][kind]
    return row["low"], row["high"]


def runs_of(quantity: str, kind: str) -> int:
    """Return the number of published runs that an error bar is from."""
    return int(ERRORS[quantity][kind]["runs"])
