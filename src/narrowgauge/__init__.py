"""Train bfloat16 weights in 8 bytes a parameter: optimizers and number formats for PyTorch, and
tools that measure what a format loses.

The names most needed are here: verbs and optimizers. Tables are under ``ng.spec``, errors under
``ng.errors``; what is needed rarely is imported from its package, as in ``from narrowgauge.numerics
import ExactSums``. Every public name is loaded from its module on first use, so ``import narrowgauge``
costs nothing and needs no PyTorch; only verbs that touch tensors (``prepare``, ``AdamW``, …) bring it
in.

    >>> import narrowgauge as ng
    >>> ng.spec.FORMATS["bfloat16"].bits
    16
"""

from __future__ import annotations

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
