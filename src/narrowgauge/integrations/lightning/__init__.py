"""A recipe and a run folder in Lightning's Trainer and in Fabric."""

from __future__ import annotations

from narrowgauge._public import offer

__getattr__, __dir__ = offer(__name__)
