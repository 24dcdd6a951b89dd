"""Print a traced function of pointwise operations as lines of C++ or Triton.

The definition of a step is a function of tensors. It is run once on a few values, and its
operations are recorded. A :class:`Language` is a table with the text of each operation. Every
printed operation rounds as PyTorch's own: no approximate division, no fused multiply-add.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.torch_support.compile import usual_defaults
from narrowgauge.torch_support.torch_names import IS_RECORDED

Argument = tuple[torch.dtype, Sequence[int]]
"""The dtype and the shape of a tensor that a function takes."""


@dataclass(frozen=True, eq=False)
class Language:
    """Hold the texts of a language.

    Attributes: name: as messages show it. operations: the text of each operation of PyTorch, from
        its arguments and the ``type`` of its result. types: the name of each dtype. literal:
        returns a number as an argument of an operation in a dtype. assignment: the text that gives
        a ``value`` a ``name``. comment: begins a comment. device: where a definition takes the
        branches of this language.
    """

    name: str
    operations: Mapping[str, str]
    types: Mapping[torch.dtype, str]
    literal: Callable[[Any, torch.dtype], str]
    assignment: str
    comment: str
    device: str


_CONSTANTS = {"ones_like": 1, "zeros_like": 0}
_UNCHANGED = ("detach", "alias", "clone", "expand", "scalar_tensor")


@dataclass(frozen=True)
class Operation:
    """Hold one operation of a trace: its name in PyTorch, its arguments, its result, and the
    function that called it.
    """

    name: str
    arguments: Sequence[Any]
    options: Mapping[str, Any]
    result: Any
    source: str


@dataclass(frozen=True)
class Graph:
    """Hold the operations of a function in their order, its arguments and its results.

    Tensors are compared by identity.
    """

    inputs: Sequence[Tensor]
    operations: Sequence[Operation]
    results: Sequence[Tensor]


class _Recorder(TorchDispatchMode):
    """Record the operations that run.

    ``make_fx`` records the same ones, and takes ten times as long.
    """

    def __init__(self, with_sources: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._with_sources = with_sources

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        result = function(*args, **options)
        name = function.overloadpacket.__name__
        source = _source_of(sys._getframe(1)) if self._with_sources else ""
        self.operations.append(Operation(name, args, options, result, source))
        return result


def _source_of(frame: FrameType | None) -> str:
    """Return the innermost function of the definition: ``codes.encode_weight``, or an empty string."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        is_ours = module.startswith("narrowgauge.") and ".torch_support." not in module
        function = frame.f_code.co_name
        if is_ours and not function.startswith("<"):  # a comprehension
            return f"{module.rpartition('.')[2]}.{function}"
        frame = frame.f_back
    return ""


def trace(
    function: Callable[..., Any], device: str, *arguments: Argument, with_sources: bool = False
) -> Graph:
    """Return the operations of a function of tensors, given by dtype and shape. The shapes should
    be small.

    ``with_sources`` keeps the function of the definition that each operation comes from.
    """
    with usual_defaults(), torch.no_grad():
        inputs = [torch.zeros(shape, dtype=dtype, device=device) for dtype, shape in arguments]
        token = IS_RECORDED.set(True)
        collects = gc.isenabled()
        gc.disable()  # what a collected object does at its end would be recorded
        try:
            with _Recorder(with_sources) as recorder:
                results = function(*inputs)
        finally:
            IS_RECORDED.reset(token)
            if collects:
                gc.enable()
    leaves = [x for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, Tensor)]
    return Graph(inputs, recorder.operations, leaves)


@dataclass
class Printed:
    """Hold a printed graph.

    Attributes:
        lines: of the language.
        results: the names of the results.
        writes: ``(argument, value)`` for each argument that the function overwrites.
    """

    lines: list[str]
    results: list[str]
    writes: list[tuple[str, str]]


def print_graph(graph: Graph, inputs: Sequence[str], prefix: str, language: Language) -> Printed:
    """Print a graph.

    Args:
        graph: from :func:`trace`.
        inputs: the names of the arguments. Element ``k`` of an argument ``v`` is named ``v_k``.
        prefix: begins the names that the lines assign.
        language: the texts.
    Raises:
        NotImplementedError: an operation has no text.
    """
    printer = _Printer(prefix, language)
    for tensor, name in zip(graph.inputs, inputs, strict=True):
        printer.names[id(tensor)] = name
    for operation in graph.operations:
        printer.add_source(operation.source)
        printer.add(operation)
    printed = printer.printed
    printed.results = [
        printer.names[id(tensor)] for tensor in graph.results if id(tensor) in printer.names
    ]
    return printed


class _Printer:
    """Print the operations of a graph, one after the other.

    ``names`` has the name of each tensor, by its identity.
    """

    def __init__(self, prefix: str, language: Language) -> None:
        self._prefix = prefix
        self._language = language
        self.names: dict[int, str] = {}
        self.printed = Printed([], [], [])
        self._count = 0
        self._source = ""

    def add(self, operation: Operation) -> None:
        """Print an operation."""
        name = operation.name
        result = operation.result
        if name == "new_zeros":  # the result of a step without an audit
            return
        dtype = result.dtype
        texts = self._texts_of_arguments(operation)
        operations = self._language.operations
        if name in _UNCHANGED:
            self.names[id(result)] = texts[0]
        elif name == "select":
            self.names[id(result)] = f"{texts[0]}_{operation.arguments[2]}"
        elif name == "copy_":
            self.printed.writes.append((texts[0], texts[1]))
        elif name in _CONSTANTS:
            self.names[id(result)] = self._language.literal(_CONSTANTS[name], dtype)
        elif name == "clamp":
            self.names[id(result)] = self._clamped(operation, texts)
        elif name in operations:
            text = operations[name].format(*texts, type=self._language.types[dtype])
            self.names[id(result)] = self._assign(text)
        else:
            raise NotImplementedError(f"no text in {self._language.name} for aten::{name}")

    def _texts_of_arguments(self, operation: Operation) -> list[str]:
        """Return the names of arguments, and numbers as literals in the operands' dtype."""
        dtype = operation.result.dtype
        tensors = [x for x in operation.arguments if isinstance(x, Tensor)]
        if dtype is torch.bool and tensors:
            dtype = tensors[0].dtype  # comparisons take numbers of their operands' dtype
        texts = []
        for argument in operation.arguments:
            if isinstance(argument, Tensor):
                texts.append(self.names[id(argument)])
            elif argument is None or isinstance(argument, int | float):
                texts.append(self._language.literal(argument, dtype))
        return texts

    def _clamped(self, operation: Operation, texts: Sequence[str]) -> str:
        dtype = operation.result.dtype
        missing = self._language.literal(None, dtype)
        high = self._language.literal(operation.options.get("max"), dtype)
        limits = [*texts[1:], high][:2]
        name = texts[0]
        for limit, form in zip(limits, ("maximum", "minimum"), strict=True):
            if limit != missing:
                name = self._assign(self._language.operations[form].format(name, limit))
        return name

    def _assign(self, value: str) -> str:
        name = f"{self._prefix}{self._count}"
        self._count += 1
        self.printed.lines.append(self._language.assignment.format(name=name, value=value))
        return name

    def add_source(self, source: str) -> None:
        """Print as a comment the function of the definition that the next operation comes from,
        where it changes.
        """
        if source and source != self._source:
            self._source = source
            self.printed.lines.append(f"{self._language.comment} {source}")


class Proof(NamedTuple):
    """Say why a printed kernel cannot be used: an empty string if it has the bits of its
    definition.

    ``is_final``: every later comparison would find the same. An error may pass, such as a full
        disk.
    """

    reason: str
    is_final: bool


class CompilerError(RuntimeError):
    """Say that a compiler refuses a text, or that there is none. It is not asked again."""


def prove(name: str, language: str, compare: Callable[[], bool]) -> Proof:
    """Compare a printed kernel with its definition. Warn if it cannot be used."""
    is_final = False
    try:
        with usual_defaults():
            if compare():
                return Proof("", True)
        is_final = True
        reason = f"{language} compiles {name} to code that gives other bits"
    except (MemoryError, torch.OutOfMemoryError):
        raise  # another call may have the memory
    except Exception as error:  # a broken compiler must not stop a training run
        is_final = isinstance(error, CompilerError)
        line = (str(error).splitlines() or [""])[0][:160]
        reason = f"Cannot compile {name} ({type(error).__name__}: {line})"
    factor = "about 25 times " if language == "C++" else ""
    warnings.warn(
        f"{reason}. It runs uncompiled: {factor}slower, with the same bits.", stacklevel=4
    )
    return Proof(reason, is_final)
