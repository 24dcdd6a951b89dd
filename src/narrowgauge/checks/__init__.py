"""Before training: which updates rounding loses, whether the gradient is the gradient, whether a resume is the same run."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
