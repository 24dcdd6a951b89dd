"""Each operation again in float64, without the step's roundings.

Beside every tensor lies its *shadow*. Shadows are kept by memory, so views, writes in place, masks
and saved tensors need no care. A tensor without a shadow is its own. Integers, indices and random
draws are the step's. The shadows of bfloat16 weights give the gradient of their float64 copy, bit for
bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from narrowgauge.measuring.beside import (
    ALLOCATES,
    ByStorage,
    Operation,
    Site,
    floats_in,
    is_float,
    storage_key,
    tensors_in,
)
from narrowgauge.measuring.units import FINEST, UNITS, unit_of
from narrowgauge.spec.formats import FORMATS

WIDE = torch.float64
_PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "dot", "mv", "addmv", "_scaled_mm",
)  # fmt: skip
_CASTS = ("_to_copy", "copy_")
_BY_INDEX = ("topk", "sort", "max", "min", "median", "kthvalue", "mode", "cummax", "cummin")
_BY_VALUE = (
    "index", "index_put", "index_put_", "masked_select", "nonzero", "masked_scatter",
    "_local_scalar_dense", "one_hot",
)  # fmt: skip
"""Operations whose results have shapes that depend on values; those are the step's."""
_TO_INTEGERS = ("round", "floor", "ceil", "trunc", "sign")
_KINKS = ("relu", "relu_", "leaky_relu", "clamp_min", "hardtanh", "threshold_backward")
_PACKED = ("mkldnn_rnn_layer", "_cudnn_rnn")
"""Kernels whose packed weights are no float64, and crash."""
_FEWEST = 64
"""Elements of a cast whose range is judged."""

Place = tuple[Site, str]
"""A site and the name of an operation."""


class Cast:
    """What a cast loses: shares of its values beyond the end of an 8-bit format and flushed to zero,
    and its error in roundings.
    """

    def __init__(self) -> None:
        self.at_end = 0.0
        self.zeros = 0.0
        self.roundings = 0.0

    def add(self, values: Tensor, exact: Tensor, source: Tensor) -> None:
        """Take the largest shares over the calls of a cast.

        Args:
            exact: the shadow of the result.
            source: what was cast, of the same shape.
        """
        wide = values.to(WIDE)
        largest = torch.finfo(values.dtype).max
        if values.element_size() == 1:  # in 16 bits a mask ends there, and infinity is told
            beyond = exact.abs() > largest * (1 + 2.0**-12)
            self.at_end = max(self.at_end, float(beyond.double().mean()))
        zeros = (wide == 0) & (exact != 0)
        self.zeros = max(self.zeros, float(zeros.double().mean()))
        if source.shape != values.shape:
            return
        finite = wide.isfinite() & source.isfinite()  # a mask may overflow; infinity is told
        length = float(source[finite].norm())
        if length:
            error = float((wide - source)[finite].norm()) / length
            self.roundings = max(self.roundings, error / UNITS[values.dtype])


class Wide:
    """Keep the float64 shadow of each tensor of a step.

    Args:
        chosen: sites whose shadows are rounded as the step's values are.
        shifts: tensors, and what is added to their shadows at the beginning.
        is_smooth: leave out roundings to integers too, so that the loss has a slope. Otherwise they are
            choices, and the shadow takes the step's.

    Attributes:
        rounds: unit roundoff of each place that rounds.
        casts: what each cast to a narrow format loses.
        working: unit roundoff of the coarsest product in forward, or of a cast to 8 bits.
        cuts: operations that are not followed, with their number.
        flips: number of choices, and of units of a kink, that are others without roundings.
        draws: number of operations that drew random numbers.
        misread: sites where bytes of one format are read as another's.
    """

    def __init__(
        self,
        chosen: Collection[Site] = (),
        shifts: Iterable[tuple[Tensor, Tensor]] = (),
        *,
        is_smooth: bool = False,
    ) -> None:
        self.chosen = set(chosen)
        self.is_smooth = is_smooth
        self.rounds: dict[Place, float] = {}
        self.casts: dict[Place, Cast] = {}
        self.working = FINEST
        self.cuts = Counter[str]()
        self.draws = 0
        self.flips = 0
        self.misread: dict[Site, str] = {}
        self._shadows = ByStorage()
        self._formats = ByStorage()
        self._lost = ByStorage()
        self._sources = ByStorage()
        for x, shift in shifts:
            self._own(x)
            self.of(x).add_(shift)

    # ── shadows ───────────────────────────────────────────────────────────────────────────────────

    def of(self, x: Any) -> Any:
        """Return the shadow of a tensor: a view of its shape, or its own values in float64."""
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            return x
        flat = self._flat(x)
        if flat is None:
            return x.to(_widened(x.dtype))
        if x.is_complex():
            flat = torch.view_as_complex(flat.view(-1, 2))
        return flat.as_strided(x.size(), x.stride(), x.storage_offset())

    def _flat(self, x: Tensor) -> Tensor | None:
        """Return the shadow of a tensor's whole memory; ``None`` without one of its size of elements."""
        size, flat = self._shadows.get(x) or (0, None)
        return flat if size == _size(x) else None

    def _own(self, x: Tensor, *, reads: bool = True) -> None:
        """Give the memory of a tensor a shadow that can be written."""
        if self._flat(x) is not None:
            return
        values = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
        if values.is_complex():
            values = torch.view_as_real(values).flatten()
        dtype = values.dtype if values.dtype is torch.bool else WIDE
        if reads:
            flat = values.to(dtype, copy=True)
        else:
            flat = torch.empty_like(values, dtype=dtype)
        self._shadows.set(x, (_size(x), flat))

    def keep(self, x: Tensor, value: Tensor) -> None:
        """Keep a value as the shadow of a tensor."""
        self._lost.drop(x)
        self._own(x, reads=False)
        self._formats.set(x, x.dtype)
        self.of(x).copy_(value)

    def forget(self, x: Tensor) -> None:
        """Make a tensor its own shadow."""
        self._shadows.drop(x)

    def follows(self, x: Tensor) -> bool:
        """Return whether no operation that made a tensor cut the chain of shadows."""
        return self._lost.get(x) is None

    def _lose(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            self._lost.set(x, True)

    def _cut(self, name: str, targets: list[Tensor]) -> None:
        self.cuts[name] += 1
        for x in targets:
            self.forget(x)
        self._lose(targets)

    # ── an operation ──────────────────────────────────────────────────────────────────────────────

    def before(self, op: Operation) -> None:
        """Take the shadows of the operands, before what is written in place is written."""
        if op.layer is not None:
            return
        is_known = any(_has_shadow(x) or self._flat(x) is not None for x in op.operands)
        if op.name in ALLOCATES or not is_known or (op.draws and op.name != "native_dropout"):
            return
        self._note_misread(op)
        for x in op.written:
            if _has_shadow(x):
                self._own(x)
        takes_values = op.name in _BY_VALUE

        def wide(x: Any) -> Any:
            if isinstance(x, torch.dtype):
                return _widened(x)
            if takes_values and not is_float(x):
                return x
            return self.of(x)

        op.notes[self] = tree_map(wide, (op.args, op.kwargs))

    def after(self, op: Operation) -> None:
        """Run the operation on shadows, and keep its results."""
        if op.layer is not None:
            self._follow_layer(op)
            return
        results = tensors_in(op.result)
        if self not in op.notes:
            if op.draws and op.name != "native_dropout":
                self._drawn(op, results)
            return
        targets = op.written or [x for x in results if _has_shadow(x)]
        if self.is_smooth and op.name == "_to_copy":
            targets = targets or [x for x in results if x.dtype in (torch.int8, torch.uint8)]
        is_lost = not all(map(self.follows, op.read))
        if op.is_view or not targets:
            return
        try:
            shadows = tensors_in(self._on_wide(op, *op.notes[self]))
            if not op.is_collective and not _are_alike(op, results, shadows):
                raise NotImplementedError
        except Exception:  # a kernel that takes no float64, whatever it raises
            self._cut(op.name, targets)
            return
        if not op.written:
            values = [x for x in shadows if _has_shadow(x)]
            for x, value in zip(targets, values, strict=False):
                self.keep(x, value)
        if is_lost:
            self._lose(targets)
        self._count_flips(op, targets)
        self._note(op, floats_in(targets))

    def _drawn(self, op: Operation, results: list[Tensor]) -> None:
        """Make random numbers the step's. Those that are drawn from activations cut the chain."""
        self.draws += 1
        targets = floats_in([*op.written, *results])
        storages = set(map(storage_key, op.written))
        reads = any(storage_key(x) not in storages for x in floats_in(op.operands))
        if reads and not op.name.endswith("_like"):
            self._cut(op.name, targets)
        for x in targets:
            self.forget(x)

    def _on_wide(self, op: Operation, args: Any, kwargs: Any) -> Any:
        """Return what an operation gives for wide operands."""
        name = op.name
        if name in _PACKED:
            raise NotImplementedError
        if name == "native_dropout":
            x, probability, trains = args
            if not trains:
                return x
            self.draws += 1
            return x * op.result[1] / (1 - probability)
        if name in _TO_INTEGERS and not op.written:
            if self.is_smooth and name != "sign":
                return args[0]
            return op.result
        if name in ("clamp", "hardtanh") and not op.written and _is_part_of_cast(args):
            return args[0]
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return [x.mul_(args[2]) for x in args[0]]
        if name == "_scaled_mm":
            return _scaled_product(*args)
        if name == "multiply_plain":  # ours computes in float32
            a, b, bias, _ = args
            return _scaled_product(a, b, 1.0, 1.0, bias)
        if name in _BY_INDEX and isinstance(op.result, (tuple, list)):
            return _chosen(name, op.result[1], args, kwargs)
        result = op.func(*args, **kwargs)
        if op.is_collective:
            for work in result if isinstance(result, (tuple, list)) else [result]:
                if hasattr(work, "wait"):
                    work.wait()
        return result

    # ── what is rounded ───────────────────────────────────────────────────────────────────────────

    def _note(self, op: Operation, targets: list[Tensor]) -> None:
        """Note what an operation rounds, and round the shadow of a chosen place."""
        narrow = [x for x in targets if x.dtype in UNITS]
        if not narrow:
            return
        first = narrow[0]
        unit = UNITS[first.dtype]
        is_product = op.name in _PRODUCTS and not op.site.is_backward
        if is_product or first.element_size() == 1:
            self.working = max(self.working, unit)
        place = op.site, op.name
        if op.site in self.chosen:
            for x in narrow:
                self.of(x).copy_(self.of(x).to(x.dtype))
        self.rounds[place] = max(unit, self.rounds.get(place, 0.0))
        if op.name in _CASTS and first.numel() >= _FEWEST:
            source = op.operands[-1] if op.written else op.operands[0]
            cast = self.casts.setdefault(place, Cast())
            cast.add(first, self.of(first), source.to(WIDE))

    def _count_flips(self, op: Operation, targets: list[Tensor]) -> None:
        for x in targets:
            if x.dtype is torch.bool:
                self.flips += int((x != self.of(x)).sum())
            elif op.name in _KINKS:
                self.flips += int(((x == 0) != (self.of(x) == 0)).sum())

    def _note_misread(self, op: Operation) -> None:
        for x in op.read:
            if is_float(x) and x.element_size() == 1:
                written = self._formats.get(x)
                if written is not None and written is not x.dtype and written.is_floating_point:
                    self.misread[op.site] = f"bytes of {written} are read as {x.dtype}"

    # ── the products of our own layers ────────────────────────────────────────────────────────────

    def _follow_layer(self, op: Operation) -> None:
        """Multiply the shadows of a narrow layer's operands, as they are before the casts."""
        compute = op.layer.compute
        unit = _unit_of(compute, op.operands[0].dtype)
        self.working = max(self.working, unit)
        self.rounds[op.site, op.name] = unit
        shadows = self._layer_shadows(op, *op.args)
        if op.site in self.chosen:
            args = [self._narrowed(x) for x in op.args]
            shadows = op.func(*args)
        is_forward = isinstance(op.args[1], Tensor)
        results = op.result[:1] if is_forward else op.result
        is_lost = not all(map(self.follows, floats_in(op.args)))
        for x, value in zip(results, shadows, strict=False):
            if x is not None:
                self.keep(x, value)
                if is_lost:
                    self._lose([x])

    def _layer_shadows(self, op: Operation, first: Any, second: Any, third: Any, *_: Any) -> Any:
        if isinstance(second, Tensor):  # forward: x, weight, bias
            x = self.of(first)
            self._sources.set(op.result[1], x.clone())
            return [torch.nn.functional.linear(x, self.of(second), self.of(third))]
        source = self._sources.get(second.data)  # backward: gradient, saved operand, weight
        if source is None:
            source = self.of(second.data)
        grad = self.of(first)
        return [grad @ self.of(third), grad.t() @ source, grad.sum(0)]

    def _narrowed(self, x: Any) -> Any:
        """Return an argument of a layer with the values of its shadow, in its own format."""
        if is_float(x):
            return self.of(x).to(x.dtype)
        if isinstance(getattr(x, "data", None), Tensor):
            source = self._sources.get(x.data)
            if source is not None and source.shape == x.data.shape and is_float(x.data):
                return x._replace(data=source.to(x.data.dtype))
        return x


def _unit_of(compute: Any, dtype: torch.dtype) -> float:
    """Return the unit roundoff of a layer's coarsest cast or of its results."""
    unit = unit_of(dtype)
    for cast in compute.casts.values():
        if cast is not None:
            row = FORMATS[cast.format]
            step = 0.5 / row.max if cast.format.startswith("int") else row.epsilon / 2
            unit = max(unit, float(step))
    return unit


def _size(x: Tensor) -> int:
    return x.element_size() // 2 if x.is_complex() else x.element_size()


def _has_shadow(x: Any) -> bool:
    return is_float(x) or (isinstance(x, Tensor) and x.dtype is torch.bool)


def _widened(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    if dtype.is_floating_point:
        return WIDE
    return dtype


def _is_part_of_cast(args: Any) -> bool:
    """Return whether a clamp ends where a narrow format does: it belongs to the cast that follows."""
    ends = [abs(a) for a in args[1:] if isinstance(a, (int, float))]
    largest = {torch.finfo(dtype).max for dtype in UNITS}
    return len(ends) == 2 and ends[0] == ends[1] and ends[0] in largest


def _scaled_product(
    a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, bias: Tensor | None = None, *_: Any
) -> Tensor:
    product = (a * scale_a) @ (b * scale_b)
    if bias is not None:
        product = product + bias
    return product


def _chosen(name: str, indices: Tensor, args: Any, kwargs: Any) -> Tensor:
    """Return the shadow's values at the indices that the step chose."""
    numbers = [a for a in args[1:] if isinstance(a, int) and not isinstance(a, bool)]
    if name in ("topk", "kthvalue"):
        numbers = numbers[1:]
    dim = numbers[0] if numbers else kwargs.get("dim", -1)
    x: Tensor = args[0]
    if indices.ndim == x.ndim:
        return x.gather(dim, indices)
    return x.gather(dim, indices.unsqueeze(dim)).squeeze(dim)


def _are_alike(op: Operation, results: list[Tensor], shadows: list[Tensor]) -> bool:
    """Return whether a kernel that is not torch's own takes float64 for what it is."""
    if op.func.namespace in ("aten", "prims"):
        return True
    for x, y in zip(results, shadows, strict=False):
        if is_float(x):
            wide = x.to(WIDE)
            if float((wide - y).norm()) > 0.5 * float(wide.norm()):
                return False
    return True
