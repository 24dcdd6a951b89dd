"""Run a user's step operation by operation, and show each to policies.

One dispatch mode sees every operation of forward and backward. A policy is an object with
``before(operation)``, whose result is a note, and ``after(operation, note)``:
:mod:`narrowgauge.measuring.check.policies`.

A *site* is a line of the user's code, in forward or in backward. Layers that share a line are one
site, and an operation of backward has the site of its forward operation.
"""

import os
import sys
from contextlib import ExitStack
from functools import partial
from traceback import walk_stack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.matmul import layer_matmuls
from narrowgauge.torch_support import torch_names

_PACKAGE = os.path.dirname(os.path.dirname(layer_matmuls.__file__)) + os.sep
_INNER = ("matmul", "measuring", "numerics", "torch_support", "transforms")
_SKIPPED = (os.path.dirname(torch.__file__) + os.sep, *(_PACKAGE + name for name in _INNER))
"""Folders whose frames are not the user's code."""
ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
"""Operations that leave their results unwritten."""
SUM = "the sum of micro-batches or uses"
UNKNOWN = "an unknown line"
BACKWARD = ", backward"
_OVERWRITES = ("fill_", "zero_", "set_", "_foreach_zero_", "copy_")


class Operation:
    """An operation with its arguments, and with its result after it ran.

    Attributes:
        name: without namespace and overload.
        operands: all tensors among the arguments. ``written`` are those that it writes in place,
            ``read`` those whose values it reads.
        arguments: by their names in the schema.
        layer: the call of one of our narrow layers, whose products are one operation. Their
            arguments are as before their casts.
        site: the line, and whether that is in backward, as ``is_backward`` says.
        draws: whether its result is random numbers; a dropout's mask is one of its results.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, site: str) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.site = site
        self.is_backward = site.endswith(BACKWARD)
        self.result: Any = None
        self.arguments: dict[str, Any] = {}
        self.operands = self.read = tensors_in((args, kwargs))
        self.written: list[Tensor] = []
        self.layer: Any = None
        self.draws = self.is_collective = False
        if not isinstance(func, torch._ops.OpOverload):
            self.layer = args[3]
            self.name = f"the product in {self.layer.compute.name}"
            return
        schema = func._schema
        self.name = schema.name.split("::")[1]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.draws = is_random and self.name != "native_dropout"
        self.is_collective = "c10d" in func.namespace
        names = [argument.name for argument in schema.arguments]
        self.arguments = dict(zip(names, args, strict=False)) | kwargs
        for argument in schema.arguments:
            if argument.is_write:
                self.written += tensors_in(self.arguments.get(argument.name))
        if self.is_collective and self.name.endswith("_"):
            self.written = tensors_in(args[0])  # its schema does not say so
        if self.name in _OVERWRITES or schema.overload_name.endswith("out"):
            targets = set(map(id, self.written))
            self.read = [x for x in self.operands if id(x) not in targets]

    @property
    def is_view(self) -> bool:
        """Return whether the result lies in the memory of an operand, and nothing was written."""
        storages = set(map(storage_key, self.operands))
        results = set(map(storage_key, tensors_in(self.result)))
        return bool(results) and not self.written and results <= storages


class PolicyMode(TorchDispatchMode):
    """Run each operation, and ask each policy before and after it.

    A tensor subclass is declined, so that its inner operations come here.

    Args:
        is_alone: refuse what waits for other ranks: each process makes the pass for itself.

    Attributes:
        generators: of the user's own that the pass draws from, with their states before. They are put
            back at its end.
    """

    def __init__(self, *policies: Any, is_alone: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policies = policies
        self.is_alone = is_alone and all_ranks().size > 1
        self.generators: dict[torch.Generator, Tensor] = {}
        self._lines: dict[int, str] = {}
        """The lines of forward, by the numbers of their autograd nodes."""
        self._undo = ExitStack()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter, nn.Buffer) for kind in types):
            return NotImplemented
        return self._asked(Operation(func, args, kwargs or {}, self._site()))

    def _asked(self, operation: Operation) -> Any:
        if operation.is_collective and self.is_alone:
            raise ArithmeticError(
                f"the loss calls {operation.name.strip('_')} over ranks, and one process computes it"
            )
        generator = operation.arguments.get("generator")
        if generator is not None and generator not in self.generators:
            self.generators[generator] = generator.get_state()
        notes = [policy.before(operation) for policy in self.policies]
        operation.result = operation.func(*operation.args, **operation.kwargs)
        for policy, note in zip(self.policies, notes, strict=True):
            policy.after(operation, note)
        return operation.result

    def __enter__(self) -> Any:
        for name in ("layer_output", "gradients"):
            run = getattr(layer_matmuls, name)
            self._undo.callback(setattr, layer_matmuls, name, run)
            setattr(layer_matmuls, name, partial(self._layer, run))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._undo.close()
        for generator, state in self.generators.items():
            generator.set_state(state)

    def _layer(self, run: Any, *args: Any) -> Any:
        site = self._site()
        with torch_names.no_modes(), torch.autocast(args[0].device.type, enabled=False):
            return self._asked(Operation(run, args, {}, site))

    def _site(self) -> str:
        """Return the site of the current operation."""
        line = _user_line()
        if line:  # forward, a recomputed forward, or a backward that the user wrote
            self._lines[torch_names.next_sequence_number()] = line
            return line
        node = torch_names.autograd_node()
        if node is None or "AccumulateGrad" in node.name():
            return SUM
        number = torch_names.sequence_number(node)
        return (self._lines.get(number) or self._lines.get(number + 1) or UNKNOWN) + BACKWARD


def _user_line() -> str:
    """Return the site of the innermost line of the user; empty in a backward that has no frame of the
    user.
    """
    for frame, number in walk_stack(sys._getframe()):
        code = frame.f_code
        if code.co_name == "_engine_run_backward":
            return ""
        if not code.co_filename.startswith(_SKIPPED):
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has none
            name = name.replace("<locals>.", "")
            line = f"{name} ({os.path.basename(code.co_filename)}:{number})"
            is_backward = code.co_name == "backward" and "ctx" in code.co_varnames[:2]
            return line + BACKWARD if is_backward else line
    return UNKNOWN


def is_in_autograd_function() -> bool:
    """Return whether a pass of an autograd function of the user runs."""
    file = torch.autograd.function.__file__
    return any(frame.f_code.co_filename == file for frame, _ in walk_stack(sys._getframe()))


# ── tensors and their memory ──────────────────────────────────────────────────────────────────────


class ByStorage(WeakKeyDictionary[torch.UntypedStorage, Any]):
    """Keep values by the memory of a tensor, for as long as that lives."""

    def of(self, x: Tensor) -> Any:
        return self.get(x.untyped_storage()) if x.layout is torch.strided else None

    def put(self, x: Tensor, value: Any) -> None:
        if x.layout is torch.strided:
            self[x.untyped_storage()] = value


def storage_key(x: Tensor) -> int:
    """Return a number for the memory of a tensor; 0 without one."""
    return int(x.untyped_storage()._cdata) if x.layout is torch.strided else 0


def tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def is_float(x: Any) -> bool:
    """Return whether a value is a dense tensor of floats or complex numbers."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return False
    return x.is_floating_point() or x.is_complex()


def floats_in(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if is_float(x)]


def at_least_16_bits(x: Tensor) -> Tensor:
    """Return the values of a tensor in a format that torch compares with infinity."""
    return x.detach().float() if x.element_size() == 1 else x.detach()


def is_finite(x: Tensor) -> bool:
    """Return whether all values of a tensor are finite."""
    return bool(at_least_16_bits(x).isfinite().all())
