"""Watching: every operation of a step, forward and backward, judged by what it makes of what it gets.

The first tensor that is not finite is often innocent: attention masks are filled with -inf, and what a ``where`` throws away may
be anything. So a bad value is followed instead. An operation that makes one out of finite operands is a *source*; what merely
passes bad values on has the source of its operands; and only a source that reaches the loss or a gradient is named, the
earliest of those. An infinity that was asked for (a fill, a mask given as a tensor) is *deliberate*: an operation that makes a
NaN of it is a source of its own, as the softmax of a row that is masked whole.

Operations are seen below autograd, so those of backward, of autocast and of checkpoints' second forward are seen too; a custom
operator is one. On the way forward, modules are known by hooks. On the way back there are none: PyTorch numbers the nodes of
its graph in the order they are made, so a node belongs to the innermost module within whose first and last number it lies.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from narrowgauge import _torch
from narrowgauge._torch import plain_name
from narrowgauge.gauges.nan_origin.bad_value import BadValue, Phase
from narrowgauge.gauges.nan_origin.operations import (
    Kinds,
    Labels,
    bad_numbers,
    bad_value,
    is_asked,
    is_silent,
    kinds_of,
    name_of,
    named_tensors,
    packet,
    parts_of,
    writes,
)
from narrowgauge.matmul.custom_ops import ROWS
from narrowgauge.spec.computes import PLACES

# Which cast of a row an operator of ours makes; one that is not listed makes none.
_CASTS = {
    "cast_input": ("output",), "multiply_output": ("output",), "grouped_output": ("output",), "cast_kept": ("grad_weight",),
    "gradients": ("grad_input", "grad_weight"), "grouped_gradients": ("grad_input", "grad_weight"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """Where bad values began.

    Args:
        order: the how-manieth operation it was.
        bad: what is known of it.
        deliberate: an infinity was asked for.
    """

    order: int
    bad: BadValue
    deliberate: bool = False


class Watch(TorchDispatchMode):
    """Within it every operation is watched; :meth:`verdict` then says which made the first bad value that mattered.

    Args:
        model: whose modules, parameters and buffers are named.

    Cost: a minimum and a maximum of every result, and a wait for the device each time.
    """

    # Operators that take functions come here as all others do.
    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.modules = {id(m): plain_name(name) for name, m in model.named_modules()}
        self.computes = {plain_name(name): _row_of(m) for name, m in model.named_modules()}
        self.parameters = {plain_name(name) for name, _ in model.named_parameters()}
        self.labels = Labels()
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            self.labels.add(plain_name(name), x)
        self.sources: dict[int, tuple[StorageWeakRef, Source]] = {}
        self.inputs: dict[str, Source] = {}
        self.reached: list[tuple[Source, str]] = []
        self.read: Source | None = None
        self.worst: Source | None = None
        self._count = 0
        # What an operator wrote over, by the copies made before.
        self._copied: dict[int, Tensor] = {}
        # Modules being computed, with the number of the next node when they were entered; (first, end, name) of those done.
        self._path: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        self._handles = [
            self.model.register_forward_pre_hook(self._label_arguments, with_kwargs=True),
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def verdict(self, loss: Any) -> BadValue | None:
        """The earliest source among those that made the loss or a gradient bad; ``None`` where all are finite.

        Args:
            loss: what the step returned: tensors, numbers, or ``None``.
        """
        reached = list(self.reached)
        for value in tree_leaves(loss):
            if isinstance(value, Tensor) and (kinds := kinds_of(value)):
                reached.append((self._source(value, kinds, "the caller"), "the loss"))
            elif isinstance(value, float) and not math.isfinite(value) and (self.read or self.worst):
                reached.append((self.read or self.worst, "the loss"))  # type: ignore[arg-type]
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and (kinds := kinds_of(parameter.grad)):
                reached.append(
                    (self._source(parameter.grad, kinds, "the caller"), f"the gradient of {plain_name(name)}")
                )
        if not reached:
            return None
        source = min((found for found, _ in reached), key=lambda found: found.order)
        ends = [end for found, end in reached if found is source]
        return replace(source.bad, reached="the loss" if "the loss" in ends else ends[0])

    # ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._count += 1
        written, ignored = writes(func)
        operands = named_tensors(func, args, kwargs, ignored)
        # What is about to be written over must be looked at now.
        before = {id(x): x.detach().clone() for name, x in operands if name.partition("[")[0] in written}
        result = func(*args, **kwargs)
        if not is_silent(func):
            self._copied = {id(before[id(x)]): x for _, x in operands if id(x) in before}
            operands = [(name, before.get(id(x), x)) for name, x in operands]
            changed = [x for name, x in named_tensors(func, args, kwargs, ()) if name.partition("[")[0] in written]
            self._judge(func, operands, [*changed, *tree_leaves(result)], (args, kwargs))
        self._note_gradient(args)
        return result

    def _judge(self, func: Any, operands: list[tuple[str, Tensor]], results: list[Any], arguments: Any) -> None:
        """Give every bad result its source."""
        for result in results:
            if not isinstance(result, Tensor):
                if isinstance(result, float) and not math.isfinite(result):
                    self.read = self._origin(func, operands, frozenset({"nan" if result != result else "inf"}))
                continue
            kinds = kinds_of(result)
            if not kinds:
                # Memory is used again; a finite view of a bad tensor was not written as a whole.
                if not writes(func)[0]:
                    self._forget(result)
                continue
            source = self._origin(func, operands, kinds)
            asked = is_asked(func, arguments)
            if source is None or (asked and not any(kinds_of(x) & kinds for _, x in operands)):
                bad = self._describe(func, operands, result, arguments)
                source = Source(self._count, bad, deliberate=asked)
            self._remember(result, source)
            if not source.deliberate and (self.worst is None or source.order < self.worst.order):
                self.worst = source

    def _origin(self, func: Any, operands: list[tuple[str, Tensor]], kinds: Kinds) -> Source | None:
        """The source that explains a result of these kinds; ``None`` where the operation is one itself."""
        bad = [(found, self._source(x, found, name_of(func))) for _, x in operands if (found := kinds_of(x))]
        if "nan" in kinds:
            chosen = [s for found, s in bad if "nan" in found] or [s for _, s in bad if not s.deliberate]
        else:
            chosen = [s for _, s in bad if not s.deliberate] or [s for _, s in bad]
        return min(chosen, key=lambda source: source.order, default=None)

    def _source(self, x: Tensor, kinds: Kinds, reader: str) -> Source:
        """The source of a bad tensor: of the operation that made it, or the tensor itself where none did."""
        there = self._copied.get(id(x), x)
        for _, part in parts_of(there):
            weak, source = self.sources.get(part.untyped_storage()._cdata, (None, None))
            if source is not None and weak is not None and not weak.expired():
                return source
        name, whole = self.labels.find(there) or (None, x)
        if name is not None and name in self.inputs:
            return self.inputs[name]
        is_mask = "nan" not in kinds and name not in self.parameters and (kinds == {"-inf"} or x.ndim == 0)
        whole = whole if kinds_of(whole) else x
        bad = bad_value("input", self._where()[1], reader, whole, [(name or "it", whole)])
        source = Source(self._count, replace(bad, parameter=name), deliberate=is_mask)
        if name is None:
            self._remember(x, source)
        else:
            self.inputs[name] = source
        return source

    def _describe(self, func: Any, operands: list[tuple[str, Tensor]], result: Tensor, arguments: Any) -> BadValue:
        phase, module = self._where()
        named = [(self.labels.name_of(self._copied.get(id(x), x)) or name, x) for name, x in operands]
        bad = bad_value(phase, module, name_of(func), result, named)
        node = _torch.autograd_node()
        variable = getattr(node, "variable", None)
        row = self.computes.get(module)
        casts = [
            f"{place}: {product.left} × {product.right}"
            for place in _CASTS.get(packet(func), PLACES if "mm" in packet(func) else ())
            if row is not None and (product := ROWS[row].products[place])
        ]
        return replace(
            bad,
            operands=bad.operands + bad_numbers(len(bad.operands), *arguments),
            parameter=None if variable is None else self.labels.name_of(variable),
            row=None if row is None else ROWS[row].name,
            casts=tuple(casts),
        )

    def _note_gradient(self, args: Any) -> None:
        """See what arrives at a parameter, whatever becomes of it there."""
        if not _torch.runs_backward():
            return
        variable = getattr(_torch.autograd_node(), "variable", None)
        name = None if variable is None else self.labels.name_of(variable)
        if name in self.parameters:
            for x in tree_leaves(args):
                if isinstance(x, Tensor) and (kinds := kinds_of(x)):
                    self.reached.append((self._source(x, kinds, "autograd"), f"the gradient of {name}"))

    def _remember(self, x: Tensor, source: Source) -> None:
        for _, part in parts_of(x):
            storage = part.untyped_storage()
            self.sources[storage._cdata] = (StorageWeakRef(storage), source)

    def _forget(self, x: Tensor) -> None:
        if self.sources:
            for _, part in parts_of(x):
                self.sources.pop(part.untyped_storage()._cdata, None)

    # ── modules ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _label_arguments(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        try:
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        except TypeError:
            return
        for name, value in given.items():
            for x in tree_leaves(value):
                if isinstance(x, Tensor):
                    self.labels.add(f"argument {name}", x)

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if (name := self.modules.get(id(module))) is not None:
            self._path.append((name, _torch.next_sequence_number()))

    def _leave_module(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self.modules and self._path:
            name, first = self._path.pop()
            if not _torch.runs_backward():
                self._spans.append((first, _torch.next_sequence_number(), name))

    def _where(self) -> tuple[Phase, str]:
        """Phase and innermost module of the operation at work."""
        inside = self._path[-1][0] if self._path else None
        if not _torch.runs_backward():
            return "forward", inside or ""
        if inside is not None:
            return "backward-recompute", inside
        node = _torch.autograd_node()
        # Backward itself builds no graph; what a checkpoint computes again does.
        return "backward-recompute" if torch.is_grad_enabled() else "backward", self._module_of(node)

    def _module_of(self, node: Any) -> str:
        if (variable := getattr(node, "variable", None)) is not None:
            return (self.labels.name_of(variable) or "").rpartition(".")[0]
        number = _torch.sequence_number(node)
        # Inner modules end before those around them.
        return next((name for first, end, name in self._spans if first <= number < end), "")


def _row_of(module: nn.Module) -> str | None:
    """The name by which operators know a narrow layer's row."""
    row = getattr(module, "row", None)
    return row if isinstance(row, str) and row in ROWS else None
