"""Lightning's two packages, ``lightning`` and ``pytorch_lightning``, which have separate classes.

A plugin or callback must derive from the classes of the package whose ``Trainer`` gets it. So each is written without a base, and
joined with the base of the package that the program has imported when it is first used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from narrowgauge.errors import NarrowgaugeError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def package_in_use() -> str:
    """The package that the program has imported, ``lightning`` first; else the one that is installed."""
    for package in PACKAGES:
        if package in sys.modules:
            return package
    for package in PACKAGES:
        if find_spec(package.partition(".")[0]) is not None:
            return package
    raise NarrowgaugeError("Lightning was not found.", "pip install 'narrowgauge[lightning]'")


@cache
def joined(part: type, name: str, room: str, base: str, package: str) -> type:
    """The class ``name`` that derives from ours, ``part``, and from the class ``base`` in a package's module ``room``.

    It is the same class for the same arguments.
    """
    above = getattr(import_module(f"{package}.{room}"), base)
    made = type(name, (part, above), {"__doc__": part.__doc__, "__module__": part.__module__})
    return made


def joined_when_asked(part: type, name: str, room: str, base: str) -> Callable[[str], type]:
    """The ``__getattr__`` of a module with one class of :func:`joined`, which is made on first use."""

    def find(asked: str) -> type:
        if asked != name:
            raise AttributeError(f"module '{part.__module__}' has no attribute {asked!r}")
        return joined(part, name, room, base, package_in_use())

    return find


def trainer_of(module: nn.Module | None) -> Any:
    """The ``Trainer`` that a module is attached to; ``None`` for a plain module, and for one in Fabric."""
    if module is None or getattr(module, "fabric", None) is not None:
        return None
    try:
        return getattr(module, "trainer", None)
    except RuntimeError:  # a LightningModule that is not attached
        return None


def map_tensors(data: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same structure with a function applied to every tensor."""
    from lightning_utilities import apply_to_collection  # of both packages

    return apply_to_collection(data, Tensor, function)
