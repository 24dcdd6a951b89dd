"""Train language models in narrow number formats, know exactly what each format costs, and get the same bits again.

The names most needed are here: verbs, optimizers, and the types that verbs return. The others are under ``ng.spec`` (tables),
``ng.errors``, ``ng.runs``, ``ng.optim``, ``ng.matmul`` and the further rooms that ``__init__.pyi`` lists. Every public name is
loaded from its module on first use, so that ``import narrowgauge`` costs nothing and needs no PyTorch: tables and recipes are
plain values, and only verbs that touch tensors (``prepare``, ``AdamW``, ``round_to``, …) bring it in.

    >>> import narrowgauge as ng
    >>> ng.spec.FORMATS["bfloat16"].bits
    16
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__version__ = "0.1.0"


class _FormerModules:
    """Finds modules by the paths that they had in an earlier version, where no present one has that path."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> Any:
        if not fullname.startswith("narrowgauge.") or fullname == "narrowgauge._moved":
            return None
        return import_module("narrowgauge._moved").find_former(fullname)


sys.meta_path.append(_FormerModules())


def __getattr__(name: str) -> object:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'narrowgauge' has no attribute {name!r}")
    value: object = import_module("narrowgauge._public").find(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    public = import_module("narrowgauge._public")
    return sorted([*public.homes_of("narrowgauge"), *public.rooms(), "__version__"])
