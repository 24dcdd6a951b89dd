"""Shadow execution: beside every tensor of a training step lies its wide value, computed without
the step's roundings.

The step runs as configured, on the model itself. Each operation runs on its operands, and again on
their shadows. An operation whose operands are wide and have no shadow runs once: its result is its
own shadow. Shadows are kept by storage, so views, in-place writes, masks and saved tensors need no
care. A tensor subclass is declined, and its inner operations are followed. A chosen site rounds its
shadows too: alone, it gives its part of a gradient's difference from float32.

Integers made of floats, sparse tensors, draws that read activations, and kernels that take no wide
operand cut the chain: what follows is *lost*, and is never called equal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from narrowgauge.checks import layer_shadows
from narrowgauge.checks.fit import fit
from narrowgauge.checks.sites import (
    ALLOCATES,
    ByStorage,
    Site,
    Sites,
    is_float,
    storage_key,
    tensors_in,
    written_by,
)
from narrowgauge.checks.units import FINEST, UNITS
from narrowgauge.spec.formats import dtype_name

_OPAQUE = re.compile("mkldnn_rnn_layer|_cudnn_rnn")
"""Kernels whose weights are packed: float32 operands crash them."""
_BY_INDEX = ("topk", "sort", "max", "min", "median", "kthvalue", "mode", "cummax", "cummin")
_PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "multiply_plain", "dot",
    "mv", "_scaled_mm", "_int_mm",
)  # fmt: skip
_KINKS = (
    "relu", "relu_", "leaky_relu", "hardtanh", "clamp", "clamp_min", "maximum", "abs",
    "max_pool2d_with_indices",
)  # fmt: skip
"""Operations with a kink at which a rounding flips a whole element."""
_CONVERTS = ("_to_copy", "copy_", "to")
_BY_SHAPE = re.compile("index$|index_put|masked_select|nonzero|masked_scatter|_local_scalar_dense")
"""Operations whose shapes depend on values; those are the step's."""
_ROUNDS = ("round", "floor", "ceil", "trunc", "sign")

Key = tuple[Site, str]
"""A site and the name of an operation."""


class _Kept(NamedTuple):
    """The shadow of a whole storage, and the format of the tensor that lies there."""

    values: Tensor
    dtype: torch.dtype


class _Call(NamedTuple):
    """An operation with its arguments, the tensors among them, and those that it writes."""

    func: Any
    name: str
    args: Any
    kwargs: Any
    tensors: list[Tensor]
    written: list[Tensor]
    known: list[Tensor]
    is_lost: bool

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def has_storages_of(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether tensors lie in the storages of its operands."""
        storages = set(map(storage_key, self.tensors))
        return all(storage_key(x) in storages for x in tensors)

    def view(self) -> Any:
        """Return the result of a view; ``None`` for other operations. "to" is only sometimes one."""
        returns = self.func._schema.returns
        if self.written or not returns or any(r.alias_info is None for r in returns):
            return None
        result = self.run()
        return result if self.has_storages_of(tensors_in(result)) else None

    def wide_result(self, wide: Any, result: Any) -> Any:
        """Return the result for wide operands.

        Raises:
            NotImplementedError: the kernel takes no wide operands, or misreads them.
        """
        if _OPAQUE.search(self.name):
            raise NotImplementedError
        shadow = _on_wide(self.func, self.name, wide, result)
        is_own = self.func.namespace != "aten"
        if is_own and not all(map(_is_near, tensors_in(result), tensors_in(shadow))):
            raise NotImplementedError
        return shadow


class Shadow(Sites):
    """Run each operation on its operands and on their wide shadows.

    Args:
        wide: format of the shadows.
        chosen: sites whose shadows are rounded like the step's values.
        measures: note which operations err on the step's own values. Moving values does not.
        shifts: what is added to the shadows of tensors from the start.

    Attributes:
        units: unit roundoff of each site and operation that rounds. ``errs`` are those that err.
        casts: of each cast, its error in roundings of the format that it casts to, and the format.
        working: unit roundoff of the coarsest product of 16 bits or more in forward.
        products: number of products by the format of their operands.
        cuts: operations that cut the chain, with their number.
        flips: elementwise choices, and units of a kink, that are others in the shadow.
        indices: chosen indices that are others. The shadow takes the step's.
        stops: operations that round to integers on purpose.
        misread: lines where bytes of one format are read as another's.
    """

    def __init__(
        self,
        wide: torch.dtype = torch.float32,
        chosen: Iterable[Site] = (),
        *,
        measures: bool = False,
        shifts: Iterable[tuple[Tensor, Tensor]] = (),
    ) -> None:
        super().__init__()
        self.wide = wide
        self.chosen = set(chosen)
        self.measures = measures
        self.units = dict[Key, float]()
        self.errs = set[Key]()
        self.casts = dict[Key, tuple[float, torch.dtype]]()
        self.working = FINEST
        self.products = Counter[str]()
        self.cuts = Counter[str]()
        self.flips = Counter[Key]()
        self.indices = Counter[Key]()
        self.stops = list[str]()
        self.misread = dict[str, str]()
        self._kept = ByStorage()
        self._lost = ByStorage()
        self.sources = ByStorage()
        for x, shift in shifts:
            self._own(x)
            self.of(x).add_(shift)

    # ── shadows ─────────────────────────────────────────────────────────────────────────────────

    def of(self, x: Any) -> Any:
        """Return the shadow of a tensor: a view with its shape, or its value where none is kept."""
        if not _has_shadow(x):
            return x
        entry = self._entry(x)
        if entry is None:
            return x.to(self.wide) if self._is_narrow(x.dtype) else x
        return entry.values.as_strided(x.size(), x.stride(), x.storage_offset())

    def follows(self, x: Tensor) -> bool:
        """Return whether no operation that made a tensor cut the chain of shadows."""
        return not self._lost.get(x)

    def _is_narrow(self, dtype: Any) -> bool:
        if self.wide is torch.float64 and dtype is torch.float32:
            return True
        return dtype in UNITS

    def _entry(self, x: Tensor) -> _Kept | None:
        entry: _Kept | None = self._kept.get(x)
        if entry is None or entry.dtype.itemsize != x.element_size():
            return None
        return entry

    def keep(self, x: Tensor, value: Tensor) -> None:
        """Keep a value as the shadow of a tensor."""
        self._own(x, reads=False)
        self.of(x).copy_(value)
        self._lost.drop(x)

    def _own(self, x: Tensor, *, reads: bool = True) -> None:
        """Keep a shadow of a whole storage that is about to be written."""
        if self._entry(x) is not None:
            return
        values = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
        dtype = self.wide if self._is_narrow(x.dtype) else x.dtype
        if reads:
            flat = values.to(dtype, copy=True)
        else:
            flat = torch.empty_like(values, dtype=dtype)
        self._kept.set(x, _Kept(flat, x.dtype))

    def lose(self, tensors: Iterable[Tensor]) -> None:
        """Note that the shadows of tensors are not known."""
        for x in tensors:
            if x.layout is torch.strided:
                self._lost.set(x, True)

    def _cut(self, name: str, targets: Iterable[Tensor]) -> None:
        self.cuts[name] += 1
        targets = list(targets)
        for x in targets:
            self._kept.drop(x)
        self.lose(targets)

    # ── an operation ────────────────────────────────────────────────────────────────────────────

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a subclass, whose inner operations come here again
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if name in _PRODUCTS:
            self.products[dtype_name(tensors[0].dtype)] += 1
        known = [x for x in tensors if _has_shadow(x) and self._entry(x) is not None]
        written = [x for x in written_by(func._schema, args, kwargs) if _has_shadow(x)]
        is_lost = not all(map(self.follows, tensors))
        dtypes = {x.dtype if isinstance(x, Tensor) else x for x in leaves if _has_dtype(x)}
        is_exact = not known and not is_lost and not any(map(self._is_narrow, dtypes))
        call = _Call(func, name, args, kwargs, tensors, written, known, is_lost)
        if is_exact or name in ALLOCATES:
            return call.run()
        view = call.view()
        if view is not None:
            return view
        if torch.Tag.nondeterministic_seeded in func.tags and name != "native_dropout":
            return self._drawn(call)
        return self._followed(call)

    def _drawn(self, call: _Call) -> Any:
        """Run an operation that draws random numbers: its results have no shadow."""
        result = call.run()
        drawn = [*call.written, *filter(_has_shadow, tensors_in(result))]
        for x in drawn:
            self._kept.drop(x)
            self._lost.drop(x)
        read = [x for x in call.known if not any(x is y for y in call.written)]
        if read:  # probabilities, say
            self._cut(call.name, filter(is_float, drawn))
        return result

    def _followed(self, call: _Call) -> Any:
        """Run an operation, and keep the shadows of its results."""
        name = call.name
        for x in call.written:
            self._own(x)
        wide = tree_map(lambda x: self._wider(name, x), (call.args, call.kwargs))
        alone = None
        if self.measures:
            alone = tree_map(_in_float32, (call.args, call.kwargs))
        result = call.run()
        results = tensors_in(result)
        targets = call.written or [x for x in results if _has_shadow(x)]
        codes = [x for x in results if x.is_complex()]
        if call.known and name in _CONVERTS:
            codes += filter(is_integer, results)
        if codes:
            self.cuts[name] += 1
            self.lose(codes)
        elif call.is_lost and not call.written:
            self.lose(results)
        if not call.written and call.has_storages_of(targets):
            return result
        site = self.site()
        try:
            shadow = call.wide_result(wide, result)
        except Exception:  # a kernel that takes no such format, whatever it raises
            self._cut(name, targets)
            return result
        if not call.written:
            for x, value in zip(targets, filter(_has_shadow, tensors_in(shadow)), strict=False):
                self.keep(x, value)
        self._round(site, name, targets)
        if self.measures:
            self._measure(call, site, targets, alone, result, shadow)
        if call.is_lost:
            self.lose(targets)
        return result

    def _wider(self, name: str, x: Any) -> Any:
        if _BY_SHAPE.search(name) and not is_float(x):
            return x
        if is_float(x) and x.element_size() == 1:
            entry = self._entry(x)
            if entry is not None and entry.dtype is not x.dtype:
                words = f"bytes of {dtype_name(entry.dtype)} are read as {dtype_name(x.dtype)}"
                self.misread[str(self.site())] = words
        return widened(self.of(x), self.wide)

    def _round(self, site: Site, name: str, targets: list[Tensor]) -> None:
        """Note what an operation rounds, and round the shadow of a chosen site."""
        if name in _ROUNDS:
            self.stops.append(f"{name} in {site}")
        for x in targets:
            if x.dtype not in UNITS:
                continue
            unit = UNITS[x.dtype]
            self.units[site, name] = max(self.units.get((site, name), 0.0), unit)
            if site in self.chosen:
                self.of(x).copy_(self.of(x).to(x.dtype))
            if name in _PRODUCTS and not site.is_backward:
                self.working = max(self.working, min(unit, UNITS[torch.bfloat16]))

    def _measure(
        self, call: _Call, site: Site, targets: list[Tensor], alone: Any, result: Any, shadow: Any
    ) -> None:
        """Note what an operation errs on the step's own values, and what the shadow chooses."""
        key = (site, call.name)
        if any(x.dtype in UNITS for x in targets):
            results = tensors_in(_on_wide(call.func, call.name, alone, result))
            exact = [x for x in results if _has_shadow(x)]
            if any(
                not torch.equal(x.float(), y.float()) for x, y in zip(targets, exact, strict=False)
            ):
                self.errs.add(key)
                if call.name in _CONVERTS and targets[0].dtype in UNITS:
                    self._measure_cast(key, targets[0], exact[0])
        for x, y in zip(tensors_in(result), tensors_in(shadow), strict=False):
            if call.known and x.dtype is torch.bool:
                self.flips[key] += int((x != y).sum())
            elif call.known and is_integer(x):
                self.indices[key] += int((x != y).sum())
            elif call.name in _KINKS and x.shape == y.shape:
                self.flips[key] += int(((x == 0) != (y == 0)).sum())

    def _measure_cast(self, key: Key, x: Tensor, exact: Tensor) -> None:
        roundings = fit(exact, x.to(exact.dtype)).relative / UNITS[x.dtype]
        if roundings > self.casts.get(key, (0.0, x.dtype))[0]:
            self.casts[key] = roundings, x.dtype

    def layer_output(self, run: Any, x: Tensor, weight: Tensor, bias: Any, call: Any) -> Any:
        """Follow a product of our own layers."""
        return layer_shadows.output(self, run, x, weight, bias, call)

    def layer_gradients(
        self, run: Any, grad: Tensor, saved: Any, weight: Tensor, call: Any, needs: Any
    ) -> Any:
        """Follow its two products in backward."""
        return layer_shadows.gradients(self, run, grad, saved, weight, call, needs)


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled parts eagerly, and attention by operations that take any format."""
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH):
        yield


def _on_wide(func: Any, name: str, wide: Any, result: Any) -> Any:
    """Return what an operation gives for wide operands. Masks of dropout and indices are the
    step's.
    """
    args, kwargs = wide
    if name == "native_dropout":
        x, probability, trains = args
        return x * result[1] / (1 - probability) if trains else x
    if name == "multiply_plain":  # ours computes in float32
        a, b, bias, _ = args
        return a @ b if bias is None else a @ b + bias
    if name not in _BY_INDEX or not isinstance(result, (tuple, list)):
        return func(*args, **kwargs)
    numbers = [a for a in args[1:] if isinstance(a, int) and not isinstance(a, bool)]
    if name in ("topk", "kthvalue"):
        numbers = numbers[1:]
    dim = numbers[0] if numbers else kwargs.get("dim", -1)
    indices = result[1]
    chosen = func(*args, **kwargs)[1]
    if indices.ndim == args[0].ndim:
        return args[0].gather(dim, indices), chosen
    return args[0].gather(dim, indices.unsqueeze(dim)).squeeze(dim), chosen


def widened(x: Any, wide: torch.dtype) -> Any:
    """Return the wide format for the name of a narrower one; anything else as it is."""
    if isinstance(x, torch.dtype) and (x in UNITS or x is torch.float32):
        return wide
    return x


def _in_float32(x: Any) -> Any:
    return x.float() if is_float(x) else widened(x, torch.float32)


def _has_dtype(x: Any) -> bool:
    return isinstance(x, (Tensor, torch.dtype))


def _has_shadow(x: Any) -> bool:
    return is_float(x) or (isinstance(x, Tensor) and x.dtype is torch.bool)


def is_integer(x: Any) -> bool:
    """Return whether a value is a tensor of integers."""
    if not isinstance(x, Tensor) or x.dtype is torch.bool:
        return False
    return not x.is_floating_point() and not x.is_complex()


def _is_near(x: Tensor, y: Tensor) -> bool:
    """Return whether a kernel's result for wide operands is roughly the step's."""
    if not is_float(x):
        return True
    return fit(x, y).relative <= 0.5
