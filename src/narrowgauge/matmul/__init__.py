"""Narrow matmuls: one Linear, three matmuls, six casts.

Each compute is a value of :mod:`narrowgauge.spec.computes`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
