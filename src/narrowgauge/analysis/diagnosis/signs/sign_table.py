"""The table of signs: everything that one run's record can show or not show.

The posterior multiplies the probabilities of signs as if they were independent given a cause. They nearly are: each event of the
monitor is one sign, and signs that compare (which comes first, which tensor of many) add what no event says.
"""

from __future__ import annotations

from dataclasses import replace

from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.analysis.diagnosis.loop_terms import in_terms_of
from narrowgauge.analysis.diagnosis.signs.batch_signs import SIGNS_OF_BATCHES
from narrowgauge.analysis.diagnosis.signs.event_signs import SIGNS_OF_EVENTS
from narrowgauge.analysis.diagnosis.signs.gauge_signs import SIGNS_OF_GAUGES, SIGNS_OF_LAYERS
from narrowgauge.analysis.diagnosis.signs.replay_signs import SIGNS_OF_REPLAYS
from narrowgauge.analysis.diagnosis.signs.setting_signs import SIGNS_OF_SETTINGS
from narrowgauge.analysis.diagnosis.signs.sign import UNKNOWN, Observation, Sign
from narrowgauge.analysis.diagnosis.signs.step_signs import (
    SIGNS_OF_EVALS,
    SIGNS_OF_LOSS_SCALE,
    SIGNS_OF_RATES,
    SIGNS_OF_STEPS,
    SIGNS_OF_TIME,
)
from narrowgauge.spec.tables import Row, Table, name_columns, number_columns, text_columns

SIGNS: dict[str, Sign] = {
    sign.name: sign
    for sign in (
        *SIGNS_OF_EVENTS,
        *SIGNS_OF_STEPS,
        *SIGNS_OF_BATCHES,
        *SIGNS_OF_EVALS,
        *SIGNS_OF_TIME,
        *SIGNS_OF_RATES,
        *SIGNS_OF_LOSS_SCALE,
        *SIGNS_OF_GAUGES,
        *SIGNS_OF_LAYERS,
        *SIGNS_OF_SETTINGS,
        *SIGNS_OF_REPLAYS,
    )
}


def observe(evidence: Evidence) -> dict[str, Observation]:
    """Look for every sign in a run: an observation per sign, by its name."""
    seen: dict[str, Observation] = {}
    return {name: _look(sign, evidence, seen) for name, sign in SIGNS.items()}


def _look(sign: Sign, evidence: Evidence, seen: dict[str, Observation]) -> Observation:
    """Look for a sign; it is unknown without the one that it is given. ``seen`` holds those looked for already."""
    if sign.name not in seen:
        is_asked = not sign.given or _look(SIGNS[sign.given], evidence, seen).state == "present"
        seen[sign.name] = sign.observe(evidence) if is_asked else replace(UNKNOWN, sign=sign.name)
    return seen[sign.name]


def sign_rows() -> list[Row]:
    return [
        {
            "name": sign.name,
            "meaning": sign.meaning,
            "reads": list(sign.reads),
            "base_rate": sign.base_rate,
            "needs": in_terms_of("trainer", sign.needs),
            "given": sign.given,
        }
        for sign in SIGNS.values()
    ]


def sign_table() -> Table:
    columns = (
        *name_columns(sign="name"),
        *text_columns(what_it_says="meaning", reads="reads"),
        *number_columns(of_healthy_runs="base_rate"),
        *text_columns(among_runs_with="given", recorded_by="needs"),
    )
    return Table(columns, sign_rows())
