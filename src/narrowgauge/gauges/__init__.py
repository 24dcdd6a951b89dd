"""Gauges that watch a training step, the record of its row, and the search for its first bad value."""

from __future__ import annotations

from narrowgauge._public import offer

__getattr__, __dir__ = offer(__name__)
