"""The table of causes: why a run went wrong, one entry per cause.

Detectors say what happens, causes say why. A cause predicts signs, each with the probability that a run with this cause shows
it; a sign that it does not list shows as often as in healthy runs. What no sign of a record can tell has an entry all the same:
it says which measurement tells it. The command, the documentation, the tests and the report page read this table.

Probabilities are rough on purpose (0.95 nearly always, 0.8 usually, 0.5 often, 0.2 sometimes): what decides is which of two
causes predicts a sign at all.
"""

from __future__ import annotations

from narrowgauge.analysis.diagnosis.causes_of_arithmetic import CAUSES_OF_ARITHMETIC
from narrowgauge.analysis.diagnosis.causes_of_training import CAUSES_OF_TRAINING
from narrowgauge.analysis.diagnosis.predictions import HEALTHY, Cause

__all__ = ["CAUSES", "HEALTHY", "Cause"]

_NOTHING = (
    Cause(
        HEALTHY, "nothing is wrong", "the run trains as its settings let it", "Nothing to do.",
        "the base rates of the signs", prior=40.0,
    ),
)  # fmt: skip

CAUSES: dict[str, Cause] = {row.name: row for row in (*_NOTHING, *CAUSES_OF_ARITHMETIC, *CAUSES_OF_TRAINING)}
"""All causes by name; :data:`HEALTHY` is the first."""
