"""Checks before training: updates lost to rounding, wrong gradients, and resumes that change the run."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
