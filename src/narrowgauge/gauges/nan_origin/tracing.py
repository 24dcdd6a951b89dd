"""Trace every operation of a training step, forward and backward, with its operands and results.

The first non-finite tensor is often harmless: attention masks are filled with -inf, and the values discarded by ``where`` can
be anything. So non-finite values are traced. An operation that makes one from finite operands is a *source*. An operation that
propagates one inherits the source of its operands. The earliest source that reaches the loss or a gradient is reported. A
requested infinity (a fill, a mask passed as a tensor) is *deliberate*. An operation that turns it into a NaN is a new source,
e.g. the softmax of a fully masked row.

Operations are traced below autograd, which includes backward, autocast and recomputation. In forward, hooks identify the module.
Backward has no hooks, but PyTorch numbers the nodes of the autograd graph in order of creation. So a node belongs to the
innermost module whose range of numbers contains it.

Nothing is traced until a step has failed. Then the same step runs once more, eagerly even if the model is compiled, because the
inside of a fused kernel cannot be traced. The step must be repeatable: the same batch, the same weights, no update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

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
from narrowgauge.put_back import put_back
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_names import plain_name

Kinds = frozenset[str]


def first_bad_value(model: nn.Module, step: Callable[[], Any]) -> BadValue | None:
    """Return the operation that made the first NaN or infinity to reach a step's loss or gradients.

    Invariant: the step runs eagerly, including compiled parts. Gradients, buffers and PyTorch's random state are restored
    bit for bit. No hooks remain, and nothing is recompiled. An infinity that reaches neither the loss nor a gradient (an
    attention mask) is not reported.

    Args:
        model: the report names its modules, parameters and buffers.
        step: computes forward and backward of the whole step, with all its micro-batches, from gradients that are ``None``.
            Returns the loss, or several, as tensors. It must not change the weights.
    Returns:
        The description of the operation, or ``None`` if loss and gradients are finite.

    Cost: nothing until called. Then one eager step with another read of every result and, on a GPU, a synchronization
    per operation. An eager step may need more memory than a compiled one.
    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).half()
        >>> with torch.no_grad():
        ...     _ = model[2].weight.fill_(6e4)
        >>> def step():
        ...     loss = model(torch.ones(2, 4).half() * 100).sum()
        ...     loss.backward()
        ...     return loss
        >>> bad = first_bad_value(model, step)
        >>> bad.module, bad.operation, bad.what, bad.operands[2].name, bad.operands[2].amax
        ('2', 'aten.addmm', 'inf', '2.weight', 60000.0)
    """
    with put_back(model):
        with torch.compiler.set_stance("force_eager"), NanTracer(model) as tracer:
            loss = step()
        return tracer.first_cause(loss)


class Source(NamedTuple):
    """The operation that first produced the non-finite values. ``order`` is its index in execution order."""

    order: int
    bad: BadValue
    deliberate: bool = False


class Read(NamedTuple):
    """An operand under its name in the schema, and its values when the operation read them."""

    name: str
    tensor: Tensor
    values: Tensor


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
        self.computes = {
            plain_name(n): m.compute.name
            for n, m in model.named_modules()
            if isinstance(m, NarrowLayer)
        }
        self.parameters = {plain_name(name): p for name, p in model.named_parameters()}
        # Names of parameters, buffers and arguments, by their memory. They keep the tensors alive.
        self._named: dict[int, list[tuple[str, Tensor]]] = {}
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            self._name(plain_name(name), x)
        self.sources: dict[int, tuple[StorageWeakRef, Source]] = {}
        self.reached: list[tuple[Source, str]] = []
        self.earliest: Source | None = None
        self._count = 0
        # Running modules with the number of the next autograd node at entry; (first, end, name) of finished modules.
        self._path: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []
        self._hooks = ExitStack()

    def __enter__(self) -> NanTracer:
        self._hooks.callback(
            self.model.register_forward_pre_hook(self._name_arguments, with_kwargs=True).remove
        )
        self._hooks.callback(register_module_forward_pre_hook(self._enter_module).remove)
        self._hooks.callback(
            register_module_forward_hook(self._leave_module, always_call=True).remove
        )
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def first_cause(self, loss: Any) -> BadValue | None:
        """Return the earliest source of a non-finite loss or gradient; ``None`` if all are finite.

        ``loss`` is the step's result: tensors, or ``None``.
        """
        for value in tree_leaves(loss):
            self._note_end(value, "the loss", "the caller")
        for name, p in self.parameters.items():
            self._note_end(p.grad, f"the gradient of {name}", "the caller")
        if not self.reached:
            return None
        source = min((origin for origin, _ in self.reached), key=lambda origin: origin.order)
        names = [end for origin, end in self.reached if origin is source]
        return replace(source.bad, reached="the loss" if "the loss" in names else names[0])

    def _note_end(self, x: Any, end: str, reader: str) -> None:
        """Note the source of a loss or gradient that is not finite."""
        if isinstance(x, Tensor) and (kinds := nonfinite_kinds(x)):
            self.reached.append((self._source(x, x, kinds, reader), end))

    # ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._count += 1
        written, ignored = writes(func)
        tensors = named_tensors(func, args, kwargs)
        # Copy tensors before they are modified in place.
        copies = {id(x): x.detach().clone() for name, x in tensors if name in written - ignored}
        result = func(*args, **kwargs)
        if getattr(func, "namespace", "") == "c10d":
            # A collective's pending receive buffer is not written yet.
            for work in tree_leaves(result):
                if isinstance(work, torch.ScriptObject):
                    work.wait()  # type: ignore[attr-defined]  # of the class that c10d registers
        if not getattr(func, "is_view", False):  # of a tensor that was already checked
            operands = [
                Read(name, x, copies.get(id(x), x)) for name, x in tensors if name not in ignored
            ]
            results = [*(x for name, x in tensors if name in written), *tree_leaves(result)]
            self._trace_results(func, operands, results, is_deliberate(func, (args, kwargs)))
        # Note a gradient that arrives at a parameter, whatever happens to it afterwards.
        if torch_names.runs_backward() and (name := self._accumulated()) in self.parameters:
            for x in tree_leaves(args):
                self._note_end(x, f"the gradient of {name}", "autograd")
        return result

    def _trace_results(
        self, func: Any, operands: list[Read], results: list[Any], deliberate: bool
    ) -> None:
        for result in results:
            if not isinstance(result, Tensor):
                continue
            kinds = nonfinite_kinds(result)
            if not kinds:
                # Memory is reused. A finite view of a non-finite tensor does not cover the whole tensor.
                if not writes(func)[0]:
                    for storage in self._storages(result) if self.sources else ():
                        self.sources.pop(storage._cdata, None)
                continue
            source = self._origin(func, operands, kinds)
            if source is None or (
                deliberate and not any(nonfinite_kinds(x.values) & kinds for x in operands)
            ):
                source = Source(self._count, self._describe(func, operands, result), deliberate)
            self._remember(result, source)
            if not source.deliberate and (
                self.earliest is None or source.order < self.earliest.order
            ):
                self.earliest = source

    def _origin(self, func: Any, operands: list[Read], kinds: Kinds) -> Source | None:
        """Return the source that explains a result of these kinds. ``None`` if the operation is a source itself."""
        bad = [
            (present, self._source(x.values, x.tensor, present, operator_name(func)))
            for x in operands
            if (present := nonfinite_kinds(x.values))
        ]
        faults = [source for _, source in bad if not source.deliberate]
        if "nan" in kinds:
            chosen = [source for present, source in bad if "nan" in present] or faults
            if packet_name(func) == "where" and all(source.deliberate for source in chosen):
                return self.earliest  # a cast gives a group with an infinity the scale NaN
        else:
            chosen = faults or [source for _, source in bad]
        return min(chosen, key=lambda source: source.order, default=None)

    def _source(self, values: Tensor, tensor: Tensor, kinds: Kinds, reader: str) -> Source:
        """Return the source of a tensor whose values were not finite: the operation that made it, or else itself."""
        for storage in self._storages(tensor):
            weak, source = self.sources.get(storage._cdata, (None, None))
            if source is not None and weak is not None and not weak.expired():
                return source
        name, content = self._find(tensor) or (None, values)
        is_mask = (
            "nan" not in kinds
            and name not in self.parameters
            and (kinds == {"-inf"} or values.ndim == 0)
        )
        bad = bad_value(
            "input",
            self._where()[1],
            reader,
            content if nonfinite_kinds(content) else values,
            name or "it",
        )
        source = Source(self._count, replace(bad, parameter=name), is_mask)
        self._remember(tensor, source)
        return source

    def _describe(self, func: Any, operands: list[Read], result: Tensor) -> BadValue:
        phase, module = self._where()
        bad = bad_value(phase, module, operator_name(func), result)
        named = [(self._name_of(x.tensor) or x.name, x.values) for x in operands]
        described = tuple(
            summary(name + inner, part) for name, x in named for inner, part in parts_of(x)
        )
        return replace(
            bad,
            operands=described,
            parameter=self._accumulated(),
            compute=self.computes.get(module),
        )

    def _storages(self, x: Tensor) -> list[Any]:
        return [part.untyped_storage() for _, part in parts_of(x)]

    def _remember(self, x: Tensor, source: Source) -> None:
        for storage in self._storages(x):
            self.sources[storage._cdata] = (StorageWeakRef(storage), source)

    # ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _name(self, name: str, x: Tensor) -> None:
        """Name a tensor; the first name of the same memory wins."""
        for _, part in parts_of(x):
            self._named.setdefault(part.untyped_storage()._cdata, []).append((name, part.detach()))

    def _name_arguments(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for name, value in [*enumerate(args), *kwargs.items()]:
            for x in tree_leaves(value):
                if isinstance(x, Tensor):
                    self._name(f"argument {name}", x)

    def _find(self, x: Tensor) -> tuple[str, Tensor] | None:
        """Find the tensor that ``x`` is or is a view of. Return its name and the tensor."""
        for _, part in parts_of(x):
            place = part.storage_offset()
            for name, named in self._named.get(part.untyped_storage()._cdata, ()):
                if named.storage_offset() <= place < named.storage_offset() + named.numel():
                    return name, named
        return None

    def _name_of(self, x: Tensor) -> str | None:
        named = self._find(x)
        return None if named is None else named[0]

    def _accumulated(self) -> str | None:
        """Return the parameter whose gradient backward accumulates now."""
        variable = getattr(torch_names.autograd_node(), "variable", None)
        return None if variable is None else self._name_of(variable)

    # ── modules ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if (name := self.modules.get(id(module))) is not None:
            self._path.append((name, torch_names.next_sequence_number()))

    def _leave_module(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self.modules and self._path:
            name, first = self._path.pop()
            if not torch_names.runs_backward():
                self._spans.append((first, torch_names.next_sequence_number(), name))

    def _where(self) -> tuple[Phase, str]:
        """Return the phase and the innermost module of the current operation."""
        phase: Phase = "backward" if torch_names.runs_backward() else "forward"
        if self._path or phase == "forward":  # in backward a checkpoint runs its modules again
            return phase, self._path[-1][0] if self._path else ""
        if (parameter := self._accumulated()) is not None:
            return phase, parameter.rpartition(".")[0]
        number = torch_names.sequence_number(torch_names.autograd_node())
        # Inner modules finish before outer ones.
        return phase, next((name for first, end, name in self._spans if first <= number < end), "")


# ── reads, writes and bad values of an operator ───────────────────────────────────────────────────────────────────────

# In-place operators that do not read the previous values.
_OVERWRITES = {
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "set_", "_foreach_copy_", "_foreach_zero_",
}  # fmt: skip


def nonfinite_kinds(x: Tensor) -> Kinds:
    """Return the non-finite kinds in a tensor, of ``nan``, ``+inf`` and ``-inf``; only ``nan`` if it holds a NaN."""
    kinds: set[str] = set()
    for _, part in parts_of(x):
        # float8 has no comparisons.
        low, high = torch.stack(
            (part.float() if part.dtype.itemsize == 1 else part).aminmax()
        ).tolist()
        if math.isfinite(low) and math.isfinite(high):
            continue
        kinds |= (
            {"nan"} if math.isnan(low) else {f"{end:+}" for end in (low, high) if math.isinf(end)}
        )
    return frozenset(kinds)


def parts_of(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the real tensors of a tensor, by attribute: itself, or the inner tensors of a subclass."""
    if hasattr(x, "__tensor_flatten__"):
        for name in x.__tensor_flatten__()[0]:
            # A DTensor names its mesh as well.
            for inner, part in (
                parts_of(value) if isinstance(value := getattr(x, name), Tensor) else ()
            ):
                yield f".{name.lstrip('_')}{inner}", part
    elif x.layout is torch.strided and is_float(x) and x.numel() and x.device.type != "meta":
        x = x.detach()
        is_fake = (
            type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
        )  # in a compiler's trace
        yield from (
            () if is_fake else [("", torch.view_as_real(x.resolve_conj()) if x.is_complex() else x)]
        )


def is_float(x: Tensor) -> bool:
    """Return whether it may hold a NaN or an infinity."""
    return (x.dtype.is_floating_point or x.dtype.is_complex) and "float4" not in str(x.dtype)


def bad_value(phase: Phase, module: str, operation: str, x: Tensor, name: str = "") -> BadValue:
    """Describe a non-finite tensor."""
    part = next(part for _, part in parts_of(x) if nonfinite_kinds(part))
    what: Literal["nan", "inf"] = "nan" if "nan" in nonfinite_kinds(part) else "inf"
    return BadValue(phase, module, operation, what, summary(name, part))


def summary(name: str, x: Tensor) -> Operand:
    """Return what a report says of a tensor. Read chunks: a full GPU cannot hold copies of the whole."""
    first, num_bad, start, lows, highs = 0, 0, 0, [], []
    for (chunk,) in flat_chunks(x):
        magnitudes = chunk.double().abs()
        is_finite = magnitudes.isfinite()
        bad, finite = (~is_finite).nonzero(), magnitudes[is_finite]
        if len(bad) and not num_bad:
            first = start + int(bad[0])
        num_bad, start = num_bad + len(bad), start + len(chunk)
        highs += [finite.max().item()] if len(finite) else []
        lows += [finite[finite > 0].min().item()] if bool((finite > 0).any()) else []
    place = torch.unravel_index(torch.tensor(first, device="cpu"), x.shape) if num_bad else ()
    low, high = min(lows, default=None), max(highs, default=None)
    return Operand(
        name, tuple(x.shape), dtype_name(x.dtype), low, high, num_bad, tuple(map(int, place))
    )


def operator_name(func: Any) -> str:
    """Return the name with its namespace: ``aten.mm``, ``narrowgauge::grouped_output``."""
    space = getattr(func, "namespace", "")
    return (
        f"{space}::{packet_name(func)}"
        if space == "narrowgauge"
        else str(getattr(func, "overloadpacket", func))
    )


def packet_name(func: Any) -> str:
    """Return the name without namespace and overload."""
    return str(getattr(func, "overloadpacket", func)).rpartition(".")[2]


@lru_cache(None)
def writes(func: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return the arguments that it writes to, and the subset whose old values it does not read."""
    schema = getattr(func, "_schema", None)
    written = [
        a
        for a in (schema.arguments if schema else ())
        if a.alias_info is not None and a.alias_info.is_write
    ]
    ignored = [a.name for a in written if a.is_out or packet_name(func) in _OVERWRITES]
    return frozenset(a.name for a in written), frozenset(ignored)


def is_deliberate(func: Any, arguments: Any) -> bool:
    """Return whether a non-finite result is intended: of a given infinity, or uninitialized memory."""
    name, numbers = (
        packet_name(func),
        [value for value in tree_leaves(arguments) if isinstance(value, float)],
    )
    # torch.where makes tensors of its numbers, NaN too.
    is_given = any(
        math.isinf(value) or (name == "scalar_tensor" and math.isnan(value)) for value in numbers
    )
    return is_given or name in ALLOCATES


def named_tensors(func: Any, args: Any, kwargs: Any) -> list[tuple[str, Tensor]]:
    """Return its operands by the names in its schema."""
    schema = getattr(func, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else []
    names += [str(place) for place in range(len(names), len(args))]
    return [
        (name, x)
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]
        for x in tree_leaves(value)
        if isinstance(x, Tensor) and is_float(x)
    ]
