"""Shadow execution: beside every tensor of a training step lies its float32 value, computed without
the step's roundings.

The step runs as configured, on the model itself. Each operation runs on its operands, and again on
their shadows. Shadows are kept by storage, so views, in-place writes and saved tensors need no
care. A *site* is a line of the user's code, in forward or in backward. A chosen site rounds its
shadows too. Alone, it gives its part of a gradient's difference from float32.

Our own layers hand their operands to the shadow before the cast. Integers made of floats, and
kernels that take no float32, cut the chain: what follows is *lost*, and is never called equal.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from narrowgauge.matmul import layer_matmuls
from narrowgauge.spec.formats import FORMATS, dtype_name
from narrowgauge.torch_support import torch_names

NARROW = {
    torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}  # fmt: skip
"""Formats whose roundings count, each with its unit roundoff."""
_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OURS = tuple(f"{_HERE}{name}" for name in ("matmul", "numerics", "torch_support", "transforms"))
_CHECKS = f"{_HERE}checks{os.sep}"
_RANDOM = re.compile("bernoulli|normal_|uniform|rand|multinomial|exponential|cauchy|geometric")
_ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
_OPAQUE = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward")
"""Kernels whose weights are packed: float32 operands crash them."""
_OVERWRITES = (
    "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "set_",
    "_foreach_zero_",
)  # fmt: skip
"""Operations that do not read what they write to."""
_BY_INDEX = ("topk", "sort", "max", "min", "median", "kthvalue", "mode", "cummax", "cummin")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "multiply_plain", "dot", "mv")
_INDICES = (*_BY_INDEX, "argmax", "argmin", "argsort")
_CONVERTS = ("_to_copy", "copy_", "to")
# The shadows make their own elementwise choices. Shapes that depend on values are the step's.
_CHOICES = (
    "gt", "lt", "ge", "le", "eq", "ne", "logical_and", "logical_or", "logical_not", "bitwise_and",
    "bitwise_or", "bitwise_not",
)  # fmt: skip
_UNITS = (
    "relu",
    "relu_",
    "leaky_relu",
    "hardtanh",
    "clamp",
    "clamp_min",
    "maximum",
    "abs",
    "max_pool2d_with_indices",
)
"""Operations with a kink at which a rounding flips a whole element."""
_BY_SHAPE = (
    "index", "index_put", "index_put_", "_unsafe_index_put", "masked_select", "nonzero",
    "masked_scatter", "_local_scalar_dense",
)  # fmt: skip
SUM = "sum over micro-batches or uses (AccumulateGrad)"


class Site(NamedTuple):
    """A line of the user's code. Layers that share a line are one site."""

    line: str
    is_backward: bool

    def __str__(self) -> str:
        if self.is_backward:
            return f"{self.line}, backward"
        return self.line


Key = tuple[Site, str]
"""A site and the name of an operation."""


class FirstBad(NamedTuple):
    """The operation that first made a value that is not finite."""

    order: int
    words: str
    is_deliberate: bool


class Shadow(TorchDispatchMode):
    """Run each operation on its operands and on their float32 shadows.

    Args:
        chosen: sites and operations whose shadows are rounded like the step's values.
        measures: note which operations err, by a second result of float32 operands with the step's
            values.
        traces: follow values that are not finite to the operation that made them.
        model: gives the names of weights and buffers that hold such values.

    Attributes:
        units: unit roundoff of each site and operation that rounds.
        errs: those that ``measures`` found to err. Moving values does not.
        working: unit roundoff of the coarsest product in forward; of float32 if all are wide.
        cuts: operations that cut the chain, with their number.
        others: elementwise choices that are others in float32, by site and operation; units of a
            kink too.
        indices: chosen indices that are others in float32. The shadows take the step's.
    """

    def __init__(
        self,
        chosen: Any = (),
        *,
        measures: bool = False,
        traces: bool = False,
        model: nn.Module | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = dict[int, str]()
        if model is not None and traces:
            for name, x in (*model.named_parameters(), *model.named_buffers()):
                self._names[_key(x)] = torch_names.plain_name(name)
        self.chosen = set(chosen)
        self.measures = measures
        self.traces = traces
        self.units = dict[Key, float]()
        self.errs = set[Key]()
        self.working = 2.0**-24
        self.cuts = Counter[str]()
        self.others = Counter[Key]()
        self.indices = Counter[Key]()
        self._shadows: dict[int, tuple[StorageWeakRef, Tensor, int, torch.dtype]] = {}
        self._lost: dict[int, StorageWeakRef] = {}
        self._sources: dict[int, tuple[StorageWeakRef, Tensor]] = {}
        self._bad: dict[int, tuple[StorageWeakRef, FirstBad]] = {}
        self._lines = dict[int, str]()
        self._count = 0

    # ── shadows ─────────────────────────────────────────────────────────────────────────────────

    def of(self, x: Any) -> Any:
        """Return the shadow of a tensor: a view with its shape, or its value where none is kept."""
        if not is_float(x) and not (isinstance(x, Tensor) and x.dtype is torch.bool):
            return x
        stored = self._shadows.get(_key(x))
        if stored is None or stored[2] != x.element_size():
            if x.dtype in NARROW:
                return x.float()
            return x
        return stored[1].as_strided(x.size(), x.stride(), x.storage_offset())

    def follows(self, x: Tensor) -> bool:
        """Return whether no operation that made a tensor cut the chain of shadows."""
        weak = self._lost.get(_key(x))
        return weak is None or weak.expired()

    def first_bad(self, x: Tensor) -> FirstBad | None:
        """Return the operation that made a tensor's first value that is not finite, if it is known."""
        weak, bad = self._bad.get(_key(x), (None, None))
        if weak is not None and not weak.expired():
            return bad
        return None

    def _was_rounded(self, x: Tensor) -> bool:
        """Return whether the storage of a tensor holds floats that differ from their shadow."""
        stored = self._shadows.get(_key(x))
        if stored is None:
            return False
        storage = x.untyped_storage()
        dtype = stored[3]
        values = torch.empty(0, dtype=dtype, device=x.device).set_(storage)
        return not torch.equal(values.to(stored[1].dtype), stored[1])

    def _keep(self, x: Tensor, value: Tensor) -> None:
        storage = x.untyped_storage()
        count = storage.nbytes() // x.element_size()
        is_whole = x.is_contiguous() and value.is_contiguous() and value.numel() == count
        if is_whole and not value._is_view():
            flat = value.view(-1)
        else:
            flat = torch.empty(count, device=x.device, dtype=value.dtype)
            flat.as_strided(x.size(), x.stride(), x.storage_offset()).copy_(value)
        self._shadows[storage._cdata] = StorageWeakRef(storage), flat, x.element_size(), x.dtype
        self._lost.pop(storage._cdata, None)
        self._count += 1
        if self._count % 64 == 0:
            _drop_expired(self._shadows)
            _drop_expired(self._sources)

    def _own(self, x: Tensor) -> None:
        """Keep a shadow of a whole storage that is about to be written in place."""
        stored = self._shadows.get(_key(x))
        if stored is None or stored[2] != x.element_size():
            storage = x.untyped_storage()
            values = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage)
            values = values.float() if x.dtype in NARROW else values.clone()
            stored = StorageWeakRef(storage), values, x.element_size(), x.dtype
            self._shadows[storage._cdata] = stored

    def _forget(self, x: Tensor) -> None:
        self._shadows.pop(_key(x), None)

    def _lose(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self._lost[storage._cdata] = StorageWeakRef(storage)

    # ── an operation ────────────────────────────────────────────────────────────────────────────

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a subclass, whose inner operations come here again
        kwargs = dict(kwargs or {})
        schema = func._schema
        name = schema.name.split("::")[1]
        values = _by_name(schema, args, kwargs)
        written = []
        outs = set[int]()
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += floats_of(values[argument.name])
            if argument.is_out:
                outs.add(id(values[argument.name]))
        is_view = bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
        if (is_view and not written) or name in _ALLOCATES:
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if not self.traces:
            return self._followed(func, name, args, kwargs, tensors, written)
        read = tensors[1:] if name == "copy_" else tensors
        if name in _OVERWRITES:
            read = []
        bad = self._bad_operands([x for x in read if id(x) not in outs])
        result = self._followed(func, name, args, kwargs, tensors, written)
        self._trace(name, tensors, bad, [*written, *floats_of(result)], (args, kwargs))
        return result

    def _followed(
        self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor], written: list[Tensor]
    ) -> Any:  # fmt: skip
        """Run an operation, and keep the shadows of its results."""
        is_random = _RANDOM.search(name) is not None and "backward" not in name
        is_lost = not all(map(self.follows, tensors))
        has_codes = any(is_integer(x) and self._was_rounded(x) for x in tensors)
        if not is_random:
            for x in written:
                self._own(x)

        def wider(x: Any) -> Any:
            if name in _BY_SHAPE and not is_float(x):
                return x
            return self.of(x)

        wide = tree_map(wider, (args, kwargs))
        alone = tree_map(_float32, (args, kwargs)) if self.measures else None
        storages = set(map(_key, tensors))
        result = func(*args, **kwargs)
        results = tensors_in(result)
        floats = floats_of(result)
        if is_random and name != "native_dropout":
            for x in (*written, *floats):
                self._forget(x)
            return result
        for x in results:  # integers made of rounded floats are codes, unless they are indices
            is_code = name in _CONVERTS and any(map(self._was_rounded, tensors))
            if is_integer(x) and (has_codes or is_lost or is_code):
                self._lose(x)
                if is_code:
                    self.cuts[name] += 1
        if name in _CHOICES and storages & self._shadows.keys():
            self._choose(func, name, wide, result)
        is_alias = not written and all(_key(x) in storages for x in floats)
        if not (floats or written) or is_alias:
            return result
        site = self.site()
        try:
            if name in _OPAQUE:
                raise NotImplementedError
            shadow = self._widened(func, name, wide, result)
        except (RuntimeError, NotImplementedError):
            self.cuts[name] += 1
            for x in (*written, *floats):
                self._forget(x)
                self._lose(x)
            return result
        key = (site, name)
        targets = written or floats
        narrow = [x for x in targets if x.dtype in NARROW]
        for x in narrow:
            self.units[key] = max(self.units.get(key, 0.0), NARROW[x.dtype])
        if alone is not None and narrow:
            exact = floats_of(self._widened(func, name, alone, result))
            for x, y in zip(targets, exact, strict=False):
                if not torch.equal(x.float(), y.float()):
                    self.errs.add(key)
        if name in _PRODUCTS and narrow and not site.is_backward:
            self.working = max(self.working, NARROW[narrow[0].dtype])
        if name in _UNITS:
            self.others[key] += _num_flips(tensors[0] if not written else None, shadow, floats)
        if name in _INDICES and storages & self._shadows.keys():
            self._compare_indices(func, key, wide, result)
        if not written:
            for x, value in zip(floats, floats_of(shadow), strict=False):
                self._keep(x, value)
        if key in self.chosen:
            for x in narrow:
                self.of(x).copy_(self.of(x).to(x.dtype))
        if has_codes:
            self.cuts[name] += 1
        if is_lost or has_codes:
            for x in targets:
                self._lose(x)
        return result

    def _widened(self, func: Any, name: str, wide: Any, result: Any) -> Any:
        """Return what an operation gives for wide operands. Masks and indices are the step's."""
        args, kwargs = tree_map(_wide_dtype, wide)
        if name == "native_dropout":
            x, probability, trains = args
            if trains:
                return x * result[1] / (1 - probability)
            return x
        if name in _BY_INDEX and isinstance(result, (tuple, list)):
            x = args[0]
            indices = result[1]
            numbers = [a for a in args[1:] if isinstance(a, int) and not isinstance(a, bool)]
            if name in ("topk", "kthvalue"):
                numbers = numbers[1:]
            dim = numbers[0] if numbers else kwargs.get("dim", -1)
            if indices.ndim == x.ndim:
                return x.gather(dim, indices)
            return x.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
        return func(*args, **kwargs)

    def _choose(self, func: Any, name: str, wide: Any, result: Any) -> None:
        if isinstance(result, Tensor) and result.dtype is torch.bool:
            args, kwargs = wide
            shadow_result = func(*args, **kwargs)
            self.others[self.site(), name] += int((shadow_result != result).sum())
            self._keep(result, shadow_result)

    def _compare_indices(self, func: Any, key: Key, wide: Any, result: Any) -> None:
        args, kwargs = wide
        for x, y in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(result), strict=True):
            if is_integer(x):
                self.indices[key] += int((x != y).sum())

    # ── our own layers ──────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Shadow:
        self._undo = ExitStack()
        for name, follow in (("output", self._output), ("gradients", self._gradients)):
            before = getattr(layer_matmuls, name)
            self._undo.callback(setattr, layer_matmuls, name, before)
            setattr(layer_matmuls, name, _bound(follow, before))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._undo.close()

    def _output(
        self, run: Callable[..., Any], x: Tensor, weight: Tensor, bias: Any, call: Any
    ) -> Any:
        """Follow a layer's product.

        The shadow multiplies the operands as they are before the casts.
        """
        wide = self.of(x), self.of(weight), None if bias is None else self.of(bias)
        with torch_names.no_modes(), torch.autocast(x.device.type, enabled=False):
            y, *saved = run(x, weight, bias, call)
            shadow = torch.nn.functional.linear(*wide)
            if self._layer_rounds(call, y.dtype):
                narrow = [None if t is None else t.to(x.dtype) for t in wide]
                shadow = run(*narrow, call)[0].float()
            self._keep(y, shadow)
            storage = saved[0].untyped_storage()
            self._sources[storage._cdata] = StorageWeakRef(storage), wide[0]
            self._trace_layer(call, [x, weight], [y])
        self._lose_after(y, x, weight)
        return y, *saved

    def _gradients(
        self, run: Callable[..., Any], grad: Tensor, saved: Any, weight: Tensor, call: Any, needs: Any
    ) -> Any:  # fmt: skip
        """Follow a layer's two products in backward."""
        weak, source = self._sources.get(_key(saved.data), (None, None))
        if source is None or weak is None or weak.expired():
            source = self.of(saved.data)
        wide = self.of(grad), self.of(weight)
        rounds = self._layer_rounds(call, grad.dtype)
        with torch_names.no_modes(), torch.autocast(grad.device.type, enabled=False):
            results = run(grad, saved, weight, call, needs)
            if rounds:
                narrow_saved = saved
                if saved.data.shape == source.shape and saved.data.dtype == grad.dtype:
                    narrow_saved = saved._replace(data=source.to(grad.dtype))
                narrow = wide[0].to(grad.dtype), narrow_saved, wide[1].to(weight.dtype)
                shadows = run(*narrow, call, needs)
            else:
                shadows = (wide[0] @ wide[1], wide[0].t() @ source, wide[0].sum(0))
            gradients = []
            for x, value in zip(results, shadows, strict=True):
                if x is not None:
                    self._keep(x, value.float())
                    gradients.append(x)
            self._trace_layer(call, [grad, weight], gradients)
        for x in gradients:
            self._lose_after(x, grad, weight)
        return results

    def _layer_rounds(self, call: Any, dtype: torch.dtype) -> bool:
        """Note a layer's casts as a site, and return whether it is chosen."""
        key = (self.site(), call.compute.name)
        unit = _unit(dtype_name(dtype))
        for cast in call.compute.casts.values():
            if cast is not None:
                unit = max(unit, _unit(cast.format))
        self.units[key] = unit
        self.working = max(self.working, unit)
        self.errs.add(key)
        return key in self.chosen

    def _trace_layer(self, call: Any, operands: list[Tensor], results: list[Tensor]) -> None:
        if self.traces:
            bad = self._bad_operands(operands)
            self._trace(f"the product in {call.compute.name}", operands, bad, results, ())

    def _lose_after(self, result: Tensor, *operands: Tensor) -> None:
        if not all(map(self.follows, operands)):
            self._lose(result)

    # ── values that are not finite ──────────────────────────────────────────────────────────────

    def _bad_operands(self, tensors: list[Tensor]) -> list[tuple[Tensor, FirstBad | None]]:
        return [(x, self.first_bad(x)) for x in tensors if is_float(x) and not is_finite(x)]

    def _trace(
        self, name: str, tensors: list[Tensor], bad: list[Any], results: list[Tensor], arguments: Any
    ) -> None:  # fmt: skip
        """Note the operation that made a result that is not finite, or hand on where its operands'
        came from.
        """
        self._count += 1
        numbers = [x for x in tree_leaves(arguments) if isinstance(x, float)]
        is_asked_for = any(map(math.isinf, numbers)) or name in _ALLOCATES
        for x in results:
            if is_finite(x):
                self._bad.pop(_key(x), None)
                continue
            causes = []
            masks = []
            unknown = []
            for operand, cause in bad:
                if cause is None:
                    unknown.append(operand)
                elif cause.is_deliberate:
                    masks.append(cause)
                else:
                    causes.append(cause)
            has_nan = bool(x.isnan().any())
            if causes:
                first = min(causes)
            elif unknown and not (_is_mask(unknown[0]) and not has_nan):
                holder = f"an operand of shape {list(unknown[0].shape)}"
                holder = self._names.get(_key(unknown[0]), holder)
                words = f"{_bad_value(unknown[0])} in {holder} before any operation, read by {name}"
                first = FirstBad(self._count, f"{words} in {self.site()}", False)
            elif (masks or unknown) and not has_nan:
                first = min(masks, default=FirstBad(self._count, "a mask", True))
            else:
                first = FirstBad(self._count, self._described(name, tensors, x), is_asked_for)
            self._bad[_key(x)] = StorageWeakRef(x.untyped_storage()), first

    def _described(self, name: str, tensors: list[Tensor], result: Tensor) -> str:
        count = int((~result.isfinite()).sum())
        sizes = []
        for x in tensors:
            if is_float(x) and x.numel():
                sizes.append(f"{dtype_name(x.dtype)} {list(x.shape)} up to {_largest(x):.3g}")
        bad_values = f"{_bad_value(result)} in {count} of {result.numel()} values"
        bad_values += f" ({dtype_name(result.dtype)})"
        return (
            f"{name} in {self.site()} made {bad_values}, from {'; '.join(sizes[:4]) or 'nothing'}"
        )

    # ── places ──────────────────────────────────────────────────────────────────────────────────

    def site(self) -> Site:
        """Return the site of the current operation.

        Backward operations get the line of their forward.
        """
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


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled parts eagerly, and attention by operations that take any format."""
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH):
        yield


def is_float(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return False  # sparse tensors are not followed
    return x.is_floating_point()


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def floats_of(tree: Any) -> list[Tensor]:
    """Return the tensors of floats in a tree."""
    return [x for x in tree_leaves(tree) if is_float(x)]


def _float32(x: Any) -> Any:
    if is_float(x):
        return x.float()
    return x


def _bad_value(x: Tensor) -> str:
    if bool(x.isnan().any()):
        return "NaN"
    return "infinity"


def is_integer(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.dtype is torch.bool:
        return False
    return not x.is_floating_point() and not x.is_complex()


def _key(x: Tensor) -> int:
    if x.layout is not torch.strided:
        return 0  # they have no storage
    return int(x.untyped_storage()._cdata)


def _drop_expired(places: dict[int, Any]) -> None:
    """Forget the storages that are gone."""
    for key, (weak, *_) in list(places.items()):
        if weak.expired():
            del places[key]


def _bound(follow: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: follow(run, *args)


def _by_name(schema: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    values = dict(kwargs)
    for argument, value in zip(schema.arguments, args, strict=False):
        values[argument.name] = value
    return {argument.name: values.get(argument.name) for argument in schema.arguments}


def _num_flips(x: Tensor | None, shadow: Any, results: list[Tensor]) -> int:
    """Count the elements on the other side of a kink: exactly zero, or cut, in one of both results
    alone.
    """
    if x is None or not isinstance(shadow, Tensor) or not results:
        return 0
    return int(((results[0] == 0) != (shadow == 0)).sum())


def _wide_dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value in NARROW:
        return torch.float32
    return value


def _unit(name: str) -> float:
    """Return a format's unit roundoff; of an integer format, half a step of its largest value."""
    number_format = FORMATS[name]
    if name.startswith("int"):
        return float(0.5 / number_format.max)
    return float(number_format.epsilon / 2)


def is_finite(x: Tensor) -> bool:
    """Return whether all values are finite."""
    values = x.detach()
    values = values.float() if values.element_size() == 1 else values
    return not values.numel() or bool(torch.isfinite(values.sum())) or bool(values.isfinite().all())


def _is_mask(x: Tensor) -> bool:
    return x.ndim == 0 or bool((x.isfinite() | (x == -math.inf)).all())


def _largest(x: Tensor) -> float:
    values = x.detach().float().abs()
    return float(values.where(values.isfinite(), 0.0).amax())


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
        if file.startswith(_CHECKS) and file != __file__:
            return "the division by the number of micro-batches", False
        if not file.startswith((_TORCH, *_OURS, __file__)):
            name = code.co_qualname.replace("<locals>.", "")
            line = f"{name} ({os.path.basename(file)}:{frame.f_lineno})"
            is_backward = code.co_name == "backward" and "ctx" in code.co_varnames[:1]
            return f"{layer} in {line}" if layer else line, is_backward
        owner = frame.f_locals.get("self") if code.co_name == "forward" else None
        if not layer and isinstance(owner, nn.Module):
            layer = type(owner).__name__
        frame = frame.f_back
    return "an unknown line", False
