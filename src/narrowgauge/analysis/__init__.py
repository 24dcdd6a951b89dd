"""From the rows of runs to findings: while a run goes on, between two runs, and after one."""

from __future__ import annotations

from narrowgauge._public import offer

__getattr__, __dir__ = offer(__name__)
