"""Arithmetic: tensors in, tensors out. No modules, no processes, no state."""

from __future__ import annotations

from narrowgauge._public import offer

__getattr__, __dir__ = offer(__name__)
