"""Gauges that measure a training step, the record of a run, and the search for a step's first bad value."""

from __future__ import annotations

from narrowgauge._public import offer

__getattr__, __dir__ = offer(__name__)
