"""Analyse the record of a run: while it trains, after it ended, and beside a second run."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
