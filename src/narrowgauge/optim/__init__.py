"""Optimizers: a rule (which step to take) combined with a storage (in which formats weights and states are stored)."""

from __future__ import annotations

from narrowgauge._public import offer

__getattr__, __dir__ = offer(__name__)
