"""Gauges that measure a training step, the record of a run, and the search for a step's first bad value."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
