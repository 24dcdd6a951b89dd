"""Classes that add methods to a user's module, which stays the same object."""

import functools
from typing import Any


@functools.cache
def extended_class(base: type[Any], plain: type[Any]) -> type[Any]:
    """Return a class that adds ``base`` to a user's class, and keeps its name."""
    additions = {"__reduce_ex__": _reduced, "_made_of": (base, plain)}
    return type(plain.__name__, (base, plain), additions)


def _reduced(module: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle or copy a module of such a class.

    The class is in no module, so it is made again from the plain one.
    """
    reduced = object.__reduce_ex__(module, max(2, protocol))
    return (_empty_module, module._made_of, *reduced[2:])


def _empty_module(base: Any, plain: Any) -> Any:
    extended: Any = extended_class(base, plain)
    return extended.__new__(extended)
