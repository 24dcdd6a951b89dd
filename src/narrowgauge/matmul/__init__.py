"""Narrow matmuls: one Linear, three matmuls, six casts; each compute is a value of :mod:`narrowgauge.spec.computes`."""

from __future__ import annotations

from narrowgauge._public import offer

__getattr__, __dir__ = offer(__name__)
