"""Events: what raises them has one id each."""

from __future__ import annotations

from narrowgauge.analysis.detectors import DETECTORS
from narrowgauge.runs.events import RAISED_BY


def test_what_raises_events_has_one_id_each() -> None:
    assert not RAISED_BY.keys() & DETECTORS.keys()
