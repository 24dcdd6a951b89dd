"""Public names: each is typed once, in the stub of the package that offers it, and imported when it is first asked for.

A package's ``__init__.pyi`` imports its public names from the modules that define them. Type checkers and editors read that file;
at run time :func:`homes_of` reads the same lines. So the two cannot disagree, and ``import narrowgauge`` costs nothing.

Source: Scientific Python's SPEC 1, lazy loading of submodules and functions from stubs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module

PACKAGE = "narrowgauge"


@cache
def homes_of(package: str) -> dict[str, str]:
    """The module that defines each public name of a package, in the order of its stub; empty without one.

    Args:
        package: ``"narrowgauge"``, or a room: ``"narrowgauge.spec"``.
    Example:
        >>> homes_of("narrowgauge")["prepare"], homes_of("narrowgauge.spec")["FORMATS"]
        ('narrowgauge.assembly.preparation', 'narrowgauge.spec.formats')
    """
    return {name: module for name, module in _imports(package) if module != PACKAGE}


@cache
def rooms() -> tuple[str, ...]:
    """The packages and modules with further public names, which ``narrowgauge`` offers as attributes.

    Example:
        >>> "spec" in rooms(), "errors" in rooms(), "planner" in rooms()
        (True, True, False)
    """
    return tuple(name for name, module in _imports(PACKAGE) if module == PACKAGE)


def _imports(package: str) -> list[tuple[str, str]]:
    """Each name that a stub imports, and the module it is from."""
    # Here, where a name is asked for: every package imports this module.
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec(package)
    stub = Path(spec.origin).with_suffix(".pyi") if spec is not None and spec.origin is not None else None
    if stub is None or not stub.is_file():
        return []
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [(alias.name, str(node.module)) for node in found for alias in node.names]


def find(name: str) -> object:
    """What ``narrowgauge.NAME`` is: a public name, a room, or a name that an earlier version had there, with a warning.

    Args:
        name: of an attribute.
    Raises:
        AttributeError: none of these has that name.
    """
    homes = homes_of(PACKAGE)
    if name == "__all__":
        return list(homes)
    if name in homes:
        return getattr(import_module(homes[name]), name)
    if name in rooms():
        return import_module(f"{PACKAGE}.{name}")
    room = next((room for room in rooms() if name in homes_of(f"{PACKAGE}.{room}") or _has_error(room, name)), None)
    if room is None:
        raise _unknown(PACKAGE, name, (*homes, *rooms()))
    import warnings

    said = f"{PACKAGE}.{name} is now {PACKAGE}.{room}.{name}; the old name works until the next release."
    warnings.warn(said, DeprecationWarning, stacklevel=3)
    return getattr(import_module(f"{PACKAGE}.{room}"), name)


def _has_error(room: str, name: str) -> bool:
    return room == "errors" and name.endswith("Error") and hasattr(import_module(f"{PACKAGE}.errors"), name)


def _unknown(package: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for a name that a package does not have: where it is, or which of the known names is near."""
    said = f"module {package!r} has no attribute {name!r}"
    if not name.startswith("_"):
        # Here, where a name is not found: it imports difflib.
        from narrowgauge.errors import suggestion

        advice = f"It is {PACKAGE}.{name}." if name in homes_of(PACKAGE) else suggestion(name, known)
        said = f"{said}. {advice}" if advice else said
    # With a name, Python does not add a suggestion of its own.
    return AttributeError(said, name=name)


def offer(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package with a stub.

    Args:
        package: its ``__name__``.
    """

    def find_in(name: str) -> object:
        if name == "__all__":
            return list(homes_of(package))
        if name.startswith("_") or name not in homes_of(package):
            raise _unknown(package, name, homes_of(package))
        return getattr(import_module(homes_of(package)[name]), name)

    return find_in, lambda: sorted(homes_of(package))
