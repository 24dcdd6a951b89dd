"""From the rows of runs to findings: while a run goes on, between two runs, and after one."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
