"""What tells whether Python objects changed in themselves: values of them that are others once they have.

Of an object these are its attributes, those of ``__slots__`` among them, what a container holds, and the places of iterators and
generators of random numbers, some levels down. Of a function they are what it names and what it keeps: globals, variables of the
functions around it, defaults, and the same of the functions among these; not of those of installed packages.
"""

from __future__ import annotations

import array
import contextlib
import gc
import logging
import random
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from narrowgauge._torch.own_hooks import OwnHook

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes of every module: its parameters, buffers, modules and hooks."""
Kind = TypeVar("Kind")
LeftOut = Callable[["str | None"], bool]
_DEPTH, _MOST, _MOST_FUNCTIONS = 6, 1 << 16, 1 << 12
_BYTES = 1 << 26
"""Of a larger array the shape alone is told."""
_STATELESS = sys.stdlib_module_names | {"torch", "numpy", "narrowgauge"}
"""Packages of whose functions none keeps what a model computes with; ours tell the passes of the audit from the loop's."""
_WATCHING = ("narrowgauge.recompute.", "narrowgauge.gauges.", "narrowgauge.integrations.")
"""Where what watches a loop is defined: it changes in each pass, and tells the audit's."""


def living(kind: type[Kind]) -> list[Kind]:
    """Every object of a class that Python's garbage collector knows.

    Cost: a look at the types of all objects of the process: of 400,000, some 60 ms.
    """
    # Types are asked and not objects, of which some do something when they are asked for their class.
    kinds = _with_subclasses(kind)
    return [each for each in gc.get_objects() if type(each) in kinds]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


class StatePrinter:
    """Makes of a value one that is another once it has changed in itself.

    A printer knows what it has seen, so take a new one for each look.

    Example:
        >>> names = {"seen": ["x"]}
        >>> before = StatePrinter()(names)
        >>> names["seen"].append("y")
        >>> StatePrinter()(names) == before
        False
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], object] = {}
        self._left = _MOST

    def __call__(self, value: Any, depth: int = _DEPTH) -> object:
        self._left -= 1
        if isinstance(value, (int, float, complex, str, bytes, type(None))):
            return value if value == value else "nan"
        key = id(value), depth
        if key not in self._made:
            self._made[key] = id(value) if self._left <= 0 else self._of(value, depth)
        return self._made[key]

    def _of(self, value: Any, depth: int) -> object:
        if isinstance(value, Tensor):
            return id(value), value._version, _content(value)
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, random.Random):
            return value.getstate()
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.random.Generator):
            return repr(value.bit_generator.state)
        if numpy is not None and isinstance(value, numpy.random.RandomState):
            return repr(value.get_state(legacy=False))
        if numpy is not None and isinstance(value, numpy.ndarray):
            return id(value), zlib.crc32(value.tobytes()) if value.nbytes <= _BYTES else value.shape
        if isinstance(value, (bytearray, array.array)):
            return id(value), zlib.crc32(value)
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            return id(value), () if frame is None else (frame.f_lasti, self._each(frame.f_locals.items(), depth))
        if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            return id(value), self._place_of(value, depth)
        if isinstance(value, (list, tuple, deque, set, frozenset, dict)) and len(value) > self._left:
            return id(value), len(value)
        return id(value), self._each(inner_values(value), depth)

    def _each(self, named: Iterable[tuple[object, Any]], depth: int) -> tuple[object, ...]:
        return tuple((name, self(each, depth - 1)) for name, each in named) if depth else ()

    def _place_of(self, iterator: Any, depth: int) -> object:
        """Where an iterator of Python's own stands: what a copy of it would be made from."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # those of itertools cannot be copied from Python 3.14 on
                made_of = iterator.__reduce__()
        except TypeError:
            return repr(iterator)  # as of itertools.count
        if not isinstance(made_of, tuple):
            return made_of
        parts = (each for part in made_of[1:] for each in (part if type(part) is tuple else (part,)))
        return tuple(self._part(each, depth) for each in parts) if depth else ()

    def _part(self, value: Any, depth: int) -> object:
        """A part of what an iterator is made from; containers by what they hold, since some are made when they are asked for."""
        if isinstance(value, range):
            return repr(value)
        if type(value) in (list, tuple) and len(value) <= self._left:
            return self._each(enumerate(value), depth)
        return self(value, depth - 1)


def _content(tensor: Tensor) -> int:
    """A checksum of a small tensor, which a write through ``.data`` changes and its version does not tell; 0 of others."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.numel() > _MOST:
        return 0
    try:
        return zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    except RuntimeError:  # of another layout
        return 0


def inner_values(value: Any) -> list[tuple[object, Any]]:
    """What an object holds, by place; modules, functions and loggers hold nothing here."""
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return [(id(each), None) for each in value]
    if isinstance(value, dict):
        return [(repr(key) if isinstance(key, (str, int)) else id(key), each) for key, each in value.items()]
    if isinstance(value, (nn.Module, type, ModuleType, logging.Logger, OwnHook)) or _is_function(value):
        return []
    if type(value).__module__.startswith(_WATCHING):
        return []
    return [*getattr(value, "__dict__", {}).items(), *_slots_of(value)]


def _slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        if "__slots__" in vars(kind):
            for name, slot in vars(kind).items():
                if isinstance(slot, MemberDescriptorType) and hasattr(value, name):
                    yield name, slot.__get__(value)


# ── functions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_function(value: Any) -> bool:
    return isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, staticmethod, classmethod, property))


def is_code(value: Any) -> bool:
    """Whether :func:`values_of_functions` follows a value."""
    return callable(value) or _is_function(value)


def values_of_functions(
    functions: Iterable[Any], own: Collection[int] = (), packages: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """What functions keep or name, with where; of functions, classes and modules among these, the same.

    Args:
        functions: also methods, properties, partial functions and objects that can be called.
        own: the ids of modules of which nothing is told.
        packages: installed ones that are followed, too; of others nothing is told, such as of bars of progress that a thread
            moves.
    """
    left_out = partial(_is_left_out, packages=packages)
    left, seen = deque(functions), set[int](own)
    while left and len(seen) < _MOST_FUNCTIONS:
        function = left.popleft()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for place, value in _values_of(function, left_out):
            if not place or is_code(value):
                left.append(value)
            else:
                yield place, value


def _is_left_out(name: str | None, packages: Collection[str]) -> bool:
    """Whether what a module of this name defines is not followed."""
    name = name or ""
    root = name.partition(".")[0]
    if root in _STATELESS or root in packages:
        return root in _STATELESS
    # Its own file and not its package's: another package of that name may be installed.
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _values_of(function: Any, left_out: LeftOut) -> Iterator[tuple[str, Any]]:
    """What one function keeps or names; what is to be followed, and is no value, has no place."""
    if isinstance(function, (staticmethod, classmethod)):
        yield "", function.__func__
    elif isinstance(function, property):
        yield from (("", each) for each in (function.fget, function.fset) if each is not None)
    elif isinstance(function, MethodType):
        yield from (("", each) for each in (function.__func__, function.__self__))
    elif isinstance(function, partial):
        yield "", function.func
        yield from (("the arguments of a partial function", each) for each in (function.args, function.keywords))
    elif isinstance(function, FunctionType):
        yield from _values_of_plain(function, left_out)
    elif not isinstance(function, BuiltinFunctionType):
        yield from _values_of_object(function, left_out)
        if callable(function) and not isinstance(function, (type, nn.Module)):
            yield "", type(function).__call__


def _values_of_object(value: Any, left_out: LeftOut) -> Iterator[tuple[str, Any]]:
    """What an object holds that is a class, a module or can be called."""
    kind = value if isinstance(value, type) else type(value)
    if left_out(kind.__module__):
        return
    held: list[tuple[object, Any]]
    if isinstance(value, type):
        held = [
            (name, each) for name, each in vars(value).items() if not name.startswith("__") and not _is_function(each)
        ]
    elif isinstance(value, nn.Module):
        held = [
            (name, each) for m in value.modules() for name, each in vars(m).items() if name not in MODULE_ATTRIBUTES
        ]
        held += value.named_buffers()
    else:
        held = inner_values(value)
    yield from ((f"{kind.__qualname__}.{name}", each) for name, each in held)


def _values_of_plain(function: FunctionType, left_out: LeftOut) -> Iterator[tuple[str, Any]]:
    if left_out(function.__module__):
        return
    own = f"{function.__module__}.{function.__qualname__}"
    yield from (
        (f"what {own} keeps", each) for each in (function.__defaults__, function.__kwdefaults__, vars(function))
    )
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not bound yet
            yield f"{name} of {own}", cell.cell_contents
    named = set(_names_in(function.__code__))
    for name in sorted(named & function.__globals__.keys()):
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            yield f"{function.__module__}.{name}", value
        elif not left_out(value.__name__):
            yield from ((f"{value.__name__}.{each}", vars(value)[each]) for each in sorted(named & vars(value).keys()))


def _names_in(code: CodeType) -> Iterator[str]:
    """The global names and attributes in a function's code, and in that of the functions and comprehensions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
