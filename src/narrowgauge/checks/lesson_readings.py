"""Readings of what no healthy loss teaches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading

Facts = dict[str, Any]
HALF = 0.5
"""Share of the labels that excludes a shift; share of documents whose first tokens learn."""


def lesson_readings(facts: Facts) -> Iterator[Reading]:
    """Yield a reading of each fact that no healthy loss has."""
    yield from _of_labels(facts)
    yield from _of_sight(facts)
    if facts["log_error"]:
        yield KINDS["softmax"].case("narrow").reading("", facts["log_error"], 0, **facts)
    if facts["probabilities"]:
        yield KINDS["softmax"].reading("", 1)


def _of_labels(facts: Facts) -> Iterator[Reading]:
    kind = KINDS["wrong-labels"]
    shift = facts["shift"]
    sequences = facts["sequences"]
    is_other = shift not in (None, 1) and facts["next_share"] <= HALF
    if is_other and (facts["sees_later"] is False or facts["offset"] > 0):
        yield KINDS["wrong-shift"].reading("", shift, 1, **facts)
    if shift is not None and facts["padding_learned"] > sequences:
        yield kind.reading("", facts["padding_learned"], 0, **facts)
    if facts["ends_unlearned"] and shift == 1 and not facts["padding_learned"]:
        yield kind.case("end").reading("", facts["ends_unlearned"], 0, **facts)
    if facts["smoothed_alone"] and facts["learns"] != "a distribution":
        yield kind.case("smoothed").reading("", facts["smoothed_alone"], 0)
    total = facts["weight_sum"]
    learned = facts["learned"]
    if facts["is_even"] and abs(total * (learned + sequences) / learned - 1) < 3e-4 and sequences:
        yield KINDS["counts-unlearned"].reading("", total, 1, **facts)


def _of_sight(facts: Facts) -> Iterator[Reading]:
    kind = KINDS["unmasked"]
    first_seen = facts["first_seen"]
    restart = facts["restart"] or 0
    if facts["sees_later"] and facts["shift"] == 1:
        yield kind.case("target").reading("", 1, 0)
    if first_seen is not None and first_seen < restart:
        words = (
            f"Positions begin anew at {restart}, and the last row that learns sees tokens from "
            f"{first_seen} on: packed documents see each other"
        )
        yield kind.reading("", first_seen, words=words)
    elif facts["sees_padding"]:
        padding = facts["padding"]
        words = f"The gradient of rows that learn reaches the padding token {padding}"
        yield kind.reading("", padding, words=words)
    elif facts["sees_later"] is False and facts["starts_learned"] > HALF * facts["starts"]:
        case = KINDS["wrong-labels"].case("start")
        yield case.reading("", facts["starts_learned"], 0)
