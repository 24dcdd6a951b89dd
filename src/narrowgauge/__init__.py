"""Train in bfloat16 memory with float32's result: optimizers and number formats for PyTorch, and
tools that measure what a format loses.

The names most needed are here: verbs, optimizers, and the types that verbs return. The others are
under ``ng.spec`` (tables), ``ng.errors``, ``ng.runs``, ``ng.optim``, ``ng.matmul`` and further
packages that ``__init__.pyi`` lists. Every public name is loaded from its module on first use, so
that ``import narrowgauge`` costs nothing and needs no PyTorch: tables and recipes are plain values,
and only verbs that touch tensors (``prepare``, ``AdamW``, ``round_to``, …) bring it in.

    >>> import narrowgauge as ng
    >>> ng.spec.FORMATS["bfloat16"].bits
    16
"""

from __future__ import annotations

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
