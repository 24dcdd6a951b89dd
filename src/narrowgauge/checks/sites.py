"""Name the lines of the user's code to which the operations of a step belong, and find the
operation that first made a value that is not finite.

A *site* is a line of the user's code, in forward or in backward. Layers that share a line are one
site. Operations of backward get the line of their forward.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from narrowgauge.matmul import layer_matmuls
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support import torch_names

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.10 has none in typing

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PACKAGES = ("matmul", "numerics", "torch_support", "transforms", "checks")
_OURS = tuple(f"{_HERE}{name}{os.sep}" for name in _PACKAGES)
_PASSES = os.path.join(os.path.dirname(__file__), "passes.py")
ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
"""Operations that leave their results unwritten."""
_OVERWRITES = (
    "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "set_",
    "_foreach_zero_",
)  # fmt: skip
"""Operations that do not read what they write to."""
SUM = "sum over micro-batches or uses (AccumulateGrad)"


class Site(NamedTuple):
    """A line of the user's code, in forward or in backward."""

    line: str
    is_backward: bool

    def __str__(self) -> str:
        if self.is_backward:
            return f"{self.line}, backward"
        return self.line


class Sites(TorchDispatchMode):
    """A dispatch mode that is handed the products of our own layers, too. It remembers the line of
    each forward operation, for its backward.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines = dict[int, str]()
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self._undo.enter_context(layers_told(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._undo.close()

    def site(self) -> Site:
        """Return the site of the current operation."""
        node = torch_names.autograd_node()
        line, is_backward = user_line()
        if line:  # forward, recomputed forward, or the user's own backward
            self._lines[torch_names.next_sequence_number()] = line
            return Site(line, is_backward)
        if node is not None and "AccumulateGrad" in node.name():
            return Site(SUM, True)
        number = torch_names.sequence_number(node)
        line = self._lines.get(number) or self._lines.get(number + 1) or "an unknown line"
        return Site(line, True)


def user_line() -> tuple[str, bool]:
    """Return the innermost line that is no library's, with the layer of torch that it called, and
    if it is a backward.

    In backward without a frame of the user's the line is empty.
    """
    frame: Any = sys._getframe(2)
    layer = ""
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if code.co_name == "_engine_run_backward":
            return "", True
        if file == _PASSES and code.co_name == "divided_losses":
            return "the division by the number of micro-batches", False
        if not file.startswith((_TORCH, *_OURS)):
            name = code.co_qualname.replace("<locals>.", "")
            line = f"{name} ({os.path.basename(file)}:{frame.f_lineno})"
            is_backward = code.co_name == "backward" and "ctx" in code.co_varnames[:1]
            return f"{layer} in {line}" if layer else line, is_backward
        owner = frame.f_locals.get("self") if code.co_name == "forward" else None
        if not layer and isinstance(owner, nn.Module):
            layer = type(owner).__name__
        frame = frame.f_back
    return "an unknown line", False


@contextmanager
def layers_told(mode: Any) -> Iterator[None]:
    """Hand the products of our own layers to a mode, with their operands as before the casts."""

    def hand_over(follow: Any, run: Any) -> Any:
        return lambda *args: follow(run, *args)

    with ExitStack() as undo:
        for name in ("output", "gradients"):
            run = getattr(layer_matmuls, name)
            undo.callback(setattr, layer_matmuls, name, run)
            setattr(layer_matmuls, name, hand_over(getattr(mode, f"layer_{name}"), run))
        yield


def storage_key(x: Tensor) -> int:
    """Return a number for the storage of a tensor; 0 without one."""
    return int(x.untyped_storage()._cdata) if x.layout is torch.strided else 0


class ByStorage:
    """Values by the storage of a tensor. A storage that is gone takes its value along."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, Any]] = {}

    def get(self, x: Tensor) -> Any:
        weak, value = self._entries.get(storage_key(x), (None, None))
        return None if weak is None or weak.expired() else value

    def set(self, x: Tensor, value: Any) -> None:
        self._entries[storage_key(x)] = StorageWeakRef(x.untyped_storage()), value
        if len(self._entries) % 64 == 0:
            for key, (weak, _) in list(self._entries.items()):
                if weak.expired():
                    del self._entries[key]

    def drop(self, x: Tensor) -> None:
        self._entries.pop(storage_key(x), None)


def is_float(x: Any) -> bool:
    """Return whether a value is a dense tensor of floats."""
    return isinstance(x, Tensor) and x.layout is torch.strided and x.is_floating_point()


def is_finite(x: Tensor) -> bool:
    """Return whether all values are finite."""
    values = x.detach()
    values = values.float() if values.element_size() == 1 else values
    return not values.numel() or bool(torch.isfinite(values.sum())) or bool(values.isfinite().all())


def first_not_finite(gradients: Mapping[str, Tensor]) -> str:
    """Return the first gradient in backward that is not finite; empty without one."""
    for name in reversed(list(gradients)):
        if not is_finite(gradients[name]):
            return name
    return ""


def floats_of(tree: Any) -> list[Tensor]:
    """Return the dense tensors of floats in a tree."""
    return [x for x in tree_leaves(tree) if is_float(x)]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def written_by(schema: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes in place, by its schema."""
    values = dict(kwargs)
    for argument, value in zip(schema.arguments, args, strict=False):
        values[argument.name] = value
    written = []
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors_in(values.get(argument.name))
    return written


# ── values that are not finite ────────────────────────────────────────────────────────────────────


class Cause(NamedTuple):
    """The operation that first made a value that is not finite, by its place in the step."""

    order: int
    words: str
    is_deliberate: bool


class FirstBad(Sites):
    """Follow values that are not finite to the operation that made them.

    Args:
        model: gives the names of weights and buffers that hold such values.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = dict[int, str]()
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            self._names[storage_key(x)] = torch_names.plain_name(name)
        self._causes = ByStorage()
        self._count = 0

    def first(self, tensors: Mapping[str, Tensor] | list[Tensor]) -> str:
        """Return the earliest operation that reached some tensors; empty if none is known."""
        values = tensors.values() if isinstance(tensors, Mapping) else tensors
        causes = map(self._causes.get, values)
        known: list[Cause] = [cause for cause in causes if cause is not None]
        return min(known).words if known else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        written = written_by(func._schema, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        read = [x for x in leaves if is_float(x)]
        if name in _OVERWRITES:
            read = []
        elif name == "copy_" or func._schema.overload_name.endswith("out"):
            read = [x for x in read if not any(x is target for target in written)]
        bad = self._bad_operands(read)
        sizes = _sizes(read)
        asks = any(isinstance(x, float) and math.isinf(x) for x in leaves) or name in ALLOCATES
        self.site()  # lines of forward, for backward
        result = func(*args, **kwargs)
        storages = set(map(storage_key, read))
        made = [x for x in tensors_in(result) if written or storage_key(x) not in storages]
        self._trace(name, bad, sizes, asks, [*written, *made])
        return result

    def layer_output(self, run: Any, x: Tensor, weight: Tensor, bias: Any, call: Any) -> Any:
        """Trace a layer's product."""
        return self._layer(run, (x, weight, bias, call), [x, weight], call)

    def layer_gradients(
        self, run: Any, grad: Tensor, saved: Any, weight: Tensor, call: Any, needs: Any
    ) -> Any:
        """Trace a layer's two products in backward."""
        return self._layer(run, (grad, saved, weight, call, needs), [grad, weight], call)

    def _layer(self, run: Any, args: Any, operands: list[Tensor], call: Any) -> Any:
        bad = self._bad_operands(operands)
        with torch_names.no_modes():
            results = run(*args)
            made = tensors_in(results)[:1] if len(args) == 4 else tensors_in(results)
        self._trace(f"the product in {call.compute.name}", bad, _sizes(operands), False, made)
        return results

    def _bad_operands(self, operands: list[Tensor]) -> list[tuple[Tensor, Cause | None]]:
        return [(x, self._causes.get(x)) for x in operands if not is_finite(x)]

    def _trace(
        self, name: str, bad: list[Any], sizes: str, asks: bool, results: list[Tensor]
    ) -> None:
        """Note the operation that made a result that is not finite, or hand on where its operands'
        came from.
        """
        self._count += 1
        for x in results:
            if not is_float(x):
                continue
            if is_finite(x):
                self._causes.drop(x)
                continue
            self._causes.set(x, self._cause_of(name, bad, sizes, asks, x))

    def _cause_of(self, name: str, bad: list[Any], sizes: str, asks: bool, x: Tensor) -> Cause:
        has_nan = bool(x.isnan().any())
        causes: list[Cause] = [c for _, c in bad if c is not None and not c.is_deliberate]
        masks: list[Cause] = [c for _, c in bad if c is not None and c.is_deliberate]
        unknown = [operand for operand, c in bad if c is None]
        if causes:
            return min(causes)
        if unknown and (has_nan or not _is_mask(unknown[0])):
            holder = f"an operand of shape {list(unknown[0].shape)}"
            holder = self._names.get(storage_key(unknown[0]), holder)
            words = f"{_value(unknown[0])} in {holder} before any operation, read by {name}"
            return Cause(self._count, f"{words} in {self.site()}", False)
        if (masks or unknown) and not has_nan:
            return min(masks, default=Cause(self._count, "a mask", True))
        count = int((~x.isfinite()).sum())
        words = f"{name} in {self.site()} made {_value(x)} in {count} of {x.numel()} values"
        words += f" ({dtype_name(x.dtype)}), from {sizes or 'nothing'}"
        return Cause(self._count, words, asks)


def _sizes(operands: list[Tensor]) -> str:
    sizes = []
    for x in operands[:4]:
        if x.numel():
            values = x.detach().float().abs()
            largest = float(values.where(values.isfinite(), 0.0).amax())
            sizes.append(f"{dtype_name(x.dtype)} {list(x.shape)} up to {largest:.3g}")
    return "; ".join(sizes)


def _value(x: Tensor) -> str:
    return "NaN" if bool(x.isnan().any()) else "infinity"


def _is_mask(x: Tensor) -> bool:
    return x.ndim == 0 or bool((x.isfinite() | (x == -math.inf)).all())
