"""Trace every operation of a training step, forward and backward, with its operands and results.

The first non-finite tensor is often harmless. Attention masks are filled with -inf, and the values discarded by ``where`` can
be anything. Therefore non-finite values are traced. An operation that produces one from finite operands is a *source*. One
that propagates one inherits the source of its operands. Only sources that reach the loss or a gradient count. The earliest is
reported. A requested infinity (a fill, a mask passed as a tensor) is *deliberate*. An operation that turns it into a NaN
is a new source, e.g. the softmax of a fully masked row.

Operations are traced below autograd, which includes backward, autocast and the recomputation of activation checkpointing. A
custom operator is one operation. In forward, hooks identify the module. Backward has no hooks. But PyTorch numbers the
nodes of the autograd graph in order of creation. So a node belongs to the innermost module whose range of numbers contains it.

The schema of a PyTorch operator declares its writes and its views. Three short tables list the undeclared ones.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from narrowgauge import torch_names
from narrowgauge.gauges.nan_origin.bad_value import ALLOCATES, BadValue, Operand, Phase
from narrowgauge.matmul.linear import NarrowLayer
from narrowgauge.numerics.chunks import flat_chunks
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_names import plain_name


@dataclass(frozen=True, slots=True)
class Source:
    """The operation that first produced the non-finite values. ``order`` is its index in execution order."""

    order: int
    bad: BadValue
    deliberate: bool = False


class NanTracer(TorchDispatchMode):
    """A dispatch mode that traces every operation of a model's step. :meth:`first_cause` returns the first faulty one.

    Cost: a minimum and a maximum of every result, and a synchronization each time.
    """

    # Higher-order operators are dispatched here like all others.
    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.modules = {id(m): plain_name(name) for name, m in model.named_modules()}
        self.computes = {plain_name(n): m.compute.name for n, m in model.named_modules() if isinstance(m, NarrowLayer)}
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
        # Tensors that an operator modified in place, by the copies made before.
        self._copied: dict[int, Tensor] = {}
        # Running modules with the number of the next autograd node at entry; (first, end, name) of finished modules.
        self._path: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> NanTracer:
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

    def first_cause(self, loss: Any) -> BadValue | None:
        """Return the earliest source of a non-finite loss or gradient; ``None`` if all are finite.

        ``loss`` is the step's result: tensors, numbers, or ``None``.
        """
        reached = list(self.reached)
        for value in tree_leaves(loss):
            if isinstance(value, Tensor) and (kinds := nonfinite_kinds(value)):
                reached.append((self._source(value, kinds, "the caller"), "the loss"))
            elif isinstance(value, float) and not math.isfinite(value) and (self.read or self.worst):
                reached.append((self.read or self.worst, "the loss"))  # type: ignore[arg-type]
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and (kinds := nonfinite_kinds(parameter.grad)):
                reached.append(
                    (self._source(parameter.grad, kinds, "the caller"), f"the gradient of {plain_name(name)}")
                )
        if not reached:
            return None
        source = min((origin for origin, _ in reached), key=lambda origin: origin.order)
        ends = [end for origin, end in reached if origin is source]
        return replace(source.bad, reached="the loss" if "the loss" in ends else ends[0])

    # ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._count += 1
        written, ignored = writes(func)
        operands = named_tensors(func, args, kwargs, ignored)
        # Copy tensors before they are modified in place.
        before = {id(x): x.detach().clone() for name, x in operands if name.partition("[")[0] in written}
        result = func(*args, **kwargs)
        if getattr(func, "namespace", "") == "c10d":
            # A collective's pending receive buffer is not written yet.
            for work in tree_leaves(result):
                if isinstance(work, torch.ScriptObject):
                    work.wait()  # type: ignore[attr-defined]  # of the class that c10d registers
        if not getattr(func, "is_view", False):  # of a tensor that was already checked
            self._copied = {id(before[id(x)]): x for _, x in operands if id(x) in before}
            operands = [(name, before.get(id(x), x)) for name, x in operands]
            changed = [x for name, x in named_tensors(func, args, kwargs, ()) if name.partition("[")[0] in written]
            self._trace_results(func, operands, [*changed, *tree_leaves(result)], (args, kwargs))
        self._note_gradient(args)
        return result

    def _trace_results(self, func: Any, operands: list[tuple[str, Tensor]], results: list[Any], arguments: Any) -> None:
        """Assign a source to every non-finite result."""
        for result in results:
            if not isinstance(result, Tensor):
                if isinstance(result, float) and not math.isfinite(result):
                    self.read = self._origin(func, operands, frozenset({"nan" if result != result else "inf"}))
                continue
            kinds = nonfinite_kinds(result)
            if not kinds:
                # Memory is reused. A finite view of a non-finite tensor does not cover the whole tensor.
                if not writes(func)[0]:
                    self._forget(result)
                continue
            source = self._origin(func, operands, kinds)
            deliberate = is_deliberate(func, arguments)
            if source is None or (deliberate and not any(nonfinite_kinds(x) & kinds for _, x in operands)):
                bad = self._describe(func, operands, result, arguments)
                source = Source(self._count, bad, deliberate=deliberate)
            self._remember(result, source)
            if not source.deliberate and (self.worst is None or source.order < self.worst.order):
                self.worst = source

    def _origin(self, func: Any, operands: list[tuple[str, Tensor]], kinds: Kinds) -> Source | None:
        """Return the source that explains a result of these kinds. ``None`` if the operation is a source itself."""
        bad = [
            (present, self._source(x, present, operator_name(func)))
            for _, x in operands
            if (present := nonfinite_kinds(x))
        ]
        if "nan" in kinds:
            chosen = [s for present, s in bad if "nan" in present] or [s for _, s in bad if not s.deliberate]
            if packet_name(func) == "where" and all(source.deliberate for source in chosen):
                return self.worst  # a cast gives a group with an infinity the scale NaN
        else:
            chosen = [s for _, s in bad if not s.deliberate] or [s for _, s in bad]
        return min(chosen, key=lambda source: source.order, default=None)

    def _source(self, x: Tensor, kinds: Kinds, reader: str) -> Source:
        """Return the source of a non-finite tensor: the operation that made it, or else the tensor itself."""
        original = self._copied.get(id(x), x)
        for _, part in parts_of(original):
            weak, source = self.sources.get(part.untyped_storage()._cdata, (None, None))
            if source is not None and weak is not None and not weak.expired():
                return source
        name, tensor = self.labels.find(original) or (None, x)
        if name is not None and name in self.inputs:
            return self.inputs[name]
        is_mask = "nan" not in kinds and name not in self.parameters and (kinds == {"-inf"} or x.ndim == 0)
        tensor = tensor if nonfinite_kinds(tensor) else x
        bad = bad_value("input", self._where()[1], reader, tensor, [(name or "it", tensor)])
        source = Source(self._count, replace(bad, parameter=name), deliberate=is_mask)
        if name is None:
            self._remember(x, source)
        else:
            self.inputs[name] = source
        return source

    def _describe(self, func: Any, operands: list[tuple[str, Tensor]], result: Tensor, arguments: Any) -> BadValue:
        phase, module = self._where()
        named = [(self.labels.name_of(self._copied.get(id(x), x)) or name, x) for name, x in operands]
        bad = bad_value(phase, module, operator_name(func), result, named)
        node = torch_names.autograd_node()
        variable = getattr(node, "variable", None)
        return replace(
            bad,
            operands=bad.operands + nonfinite_numbers(len(bad.operands), *arguments),
            parameter=None if variable is None else self.labels.name_of(variable),
            compute=self.computes.get(module),
        )

    def _note_gradient(self, args: Any) -> None:
        """Note non-finite gradients that arrive at a parameter, whatever happens to them afterwards."""
        if not torch_names.runs_backward():
            return
        variable = getattr(torch_names.autograd_node(), "variable", None)
        name = None if variable is None else self.labels.name_of(variable)
        if name in self.parameters:
            for x in tree_leaves(args):
                if isinstance(x, Tensor) and (kinds := nonfinite_kinds(x)):
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
            arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        except TypeError:
            return
        for name, value in arguments.items():
            for x in tree_leaves(value):
                if isinstance(x, Tensor):
                    self.labels.add(f"argument {name}", x)

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if (name := self.modules.get(id(module))) is not None:
            self._path.append((name, torch_names.next_sequence_number()))

    def _leave_module(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self.modules and self._path:
            name, first = self._path.pop()
            if not torch_names.runs_backward():
                self._spans.append((first, torch_names.next_sequence_number(), name))

    def _where(self) -> tuple[Phase, str]:
        """Phase and innermost module of the current operation."""
        inside = self._path[-1][0] if self._path else None
        if not torch_names.runs_backward():
            return "forward", inside or ""
        if inside is not None:
            return "backward-recompute", inside
        node = torch_names.autograd_node()
        # Backward builds no graph; the recomputation of a checkpoint does.
        return "backward-recompute" if torch.is_grad_enabled() else "backward", self._module_of(node)

    def _module_of(self, node: Any) -> str:
        if (variable := getattr(node, "variable", None)) is not None:
            return (self.labels.name_of(variable) or "").rpartition(".")[0]
        number = torch_names.sequence_number(node)
        # Inner modules finish before outer ones.
        return next((name for first, end, name in self._spans if first <= number < end), "")


# ── reads, writes and bad values of an operator ───────────────────────────────────────────────────────────────────────

Kinds = frozenset[str]

# In-place operators that do not read the previous values.
_OVERWRITES = {
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "set_", "_foreach_copy_", "_foreach_zero_",
}  # fmt: skip
# Operators that write given numbers. A given infinity is deliberate.
_FILLS = {
    "full", "full_like", "new_full", "scalar_tensor", "fill", "fill_", "masked_fill", "masked_fill_", "where",
    "constant_pad_nd", "index_fill", "index_fill_",
}  # fmt: skip


def nonfinite_kinds(x: Tensor) -> Kinds:
    """Return the non-finite kinds in a tensor, of ``nan``, ``+inf`` and ``-inf``; only ``nan`` if it holds a NaN."""
    kinds: set[str] = set()
    for _, part in parts_of(x):
        low, high = torch.stack(_wide(part).aminmax()).tolist()
        if math.isfinite(low) and math.isfinite(high):
            continue
        kinds |= {"nan"} if math.isnan(low) else {f"{end:+}" for end in (low, high) if math.isinf(end)}
    return frozenset(kinds)


def parts_of(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of a tensor, by attribute: itself, or the inner tensors of a subclass."""
    if hasattr(x, "__tensor_flatten__"):
        for name in x.__tensor_flatten__()[0]:
            # A DTensor names its mesh as well.
            for inner, part in parts_of(value) if isinstance(value := getattr(x, name), Tensor) else ():
                yield f".{name.lstrip('_')}{inner}", part
    elif x.layout is not torch.strided:
        if x.layout is torch.sparse_coo:
            yield from parts_of(x._values())
    elif is_float(x) and x.numel() and x.device.type != "meta":
        is_fake = type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__  # in a compiler's trace
        yield from () if is_fake else [("", x)]


def is_float(x: Tensor) -> bool:
    """Return whether it may hold a NaN or an infinity."""
    return (x.dtype.is_floating_point or x.dtype.is_complex) and "float4" not in str(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """Cast to a dtype with comparisons."""
    x = x.detach()
    if x.dtype.is_complex:
        return torch.view_as_real(x.resolve_conj())
    return x.float() if x.dtype.itemsize == 1 else x


class Labels:
    """Names of parameters, buffers and arguments, by their memory; keeps the tensors alive."""

    def __init__(self) -> None:
        self._named: dict[int, list[tuple[str, Tensor]]] = {}

    def add(self, name: str, x: Tensor) -> None:
        """Name a tensor; the first name of the same memory wins."""
        for _, part in parts_of(x):
            self._named.setdefault(part.untyped_storage()._cdata, []).append((name, part.detach()))

    def find(self, x: Tensor) -> tuple[str, Tensor] | None:
        """Find the tensor that ``x`` is or is a view of. Return its name and the tensor."""
        for _, part in parts_of(x):
            place = part.storage_offset()
            for name, named in self._named.get(part.untyped_storage()._cdata, ()):
                if named.storage_offset() <= place < named.storage_offset() + named.numel():
                    return name, named
        return None

    def name_of(self, x: Tensor) -> str | None:
        named = self.find(x)
        return None if named is None else named[0]


def bad_value(phase: Phase, module: str, operation: str, x: Tensor, operands: list[tuple[str, Tensor]]) -> BadValue:
    """Describe a non-finite tensor and the operands it was made from."""
    part = next(part for _, part in parts_of(x) if nonfinite_kinds(part))
    num_bad, first, has_nan = 0, None, False
    for chunk, start in _chunks(part):
        places = (~chunk.isfinite()).nonzero()
        if first is None and len(places):
            first = start + int(places[0])
        num_bad, has_nan = num_bad + len(places), has_nan or bool(chunk.isnan().any())
    described = [(name + inner, p) for name, operand in operands for inner, p in parts_of(operand)]
    return BadValue(
        phase=phase,
        module=module,
        operation=operation,
        what="nan" if has_nan else "inf",
        shape=tuple(x.shape),
        dtype=dtype_name(x.dtype),
        num_bad=num_bad,
        num_values=part.numel(),
        place=tuple(int(index) for index in torch.unravel_index(torch.tensor(first or 0), part.shape)),
        operands=tuple(_operand(place, name, p) for place, (name, p) in enumerate(described)),
    )


def _operand(position: int, name: str, x: Tensor) -> Operand:
    lows, highs, num_finite = [], [], 0
    for chunk, _ in _chunks(x):
        finite = chunk[chunk.isfinite()].abs()
        positive = finite[finite > 0]
        num_finite += len(finite)
        lows += [positive.min().item()] if len(positive) else []
        highs += [finite.max().item()] if len(finite) else []
    low, high = min(lows, default=None), max(highs, default=None)
    return Operand(position, name, tuple(x.shape), dtype_name(x.dtype), low, high, x.numel() - num_finite)


def _chunks(x: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield chunks of a tensor with their offsets. A full GPU cannot hold copies of the whole."""
    start = 0
    for (chunk,) in flat_chunks(x.detach()):
        yield (chunk.abs() if chunk.dtype.is_complex else _wide(chunk)), start
        start += len(chunk)


def nonfinite_numbers(position: int, args: Any, kwargs: Any) -> tuple[Operand, ...]:
    """Non-finite Python numbers among an operation's arguments, as operands numbered from ``position``."""
    numbers = [v for v in tree_leaves((args, kwargs)) if isinstance(v, float) and not math.isfinite(v)]
    return tuple(Operand(position + k, f"the number {v}", (), "float", None, None, 1) for k, v in enumerate(numbers))


def operator_name(func: Any) -> str:
    """Return the name with its namespace: ``aten.mm``, ``narrowgauge::grouped_output``."""
    space = getattr(func, "namespace", "")
    return f"{space}::{packet_name(func)}" if space == "narrowgauge" else str(getattr(func, "overloadpacket", func))


def packet_name(func: Any) -> str:
    """Return the name without namespace and overload."""
    return str(getattr(func, "overloadpacket", func)).rpartition(".")[2]


@lru_cache(None)
def writes(func: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return the arguments that it writes to, and the subset whose old values it does not read."""
    schema = getattr(func, "_schema", None)
    written = [a for a in (schema.arguments if schema else ()) if a.alias_info is not None and a.alias_info.is_write]
    ignored = [a.name for a in written if a.is_out or packet_name(func) in _OVERWRITES]
    return frozenset(a.name for a in written), frozenset(ignored)


def is_deliberate(func: Any, arguments: Any) -> bool:
    """Return whether a non-finite result is intended: a given infinity, or uninitialized memory."""
    name, numbers = packet_name(func), [value for value in tree_leaves(arguments) if isinstance(value, float)]
    # torch.where makes tensors of its numbers, NaN too.
    has_number = any(math.isinf(value) or (name == "scalar_tensor" and math.isnan(value)) for value in numbers)
    return name in ALLOCATES or (name in _FILLS and has_number)


def named_tensors(func: Any, args: Any, kwargs: Any, but: Any) -> list[tuple[str, Tensor]]:
    """Its operands by the names in its schema, with an index for lists."""
    schema = getattr(func, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else []
    names += [str(place) for place in range(len(names), len(args))]
    tensors = []
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if name not in but:
            leaves = [x for x in tree_leaves(value) if isinstance(x, Tensor) and is_float(x)]
            tensors += [(f"{name}[{k}]" if isinstance(value, (list, tuple)) else name, x) for k, x in enumerate(leaves)]
    return tensors
