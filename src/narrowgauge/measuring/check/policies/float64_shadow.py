"""Each operation again in float64, without the step's roundings.

Beside every tensor lies its *shadow*. Shadows are kept by memory, so views, writes in place, masks
and saved tensors need no care. A tensor without a shadow is its own. Integers, indices and random
draws are the step's. The shadows of bfloat16 weights give the gradient of their float64 copy, bit for
bit. What an operation without a float64 kernel makes is *not followed*, and all that comes of it.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves, tree_map

from narrowgauge.measuring.check.dispatch import (
    ALLOCATES,
    ByStorage,
    Operation,
    floats_in,
    is_float,
    is_in_autograd_function,
    storage_key,
    tensors_in,
)
from narrowgauge.measuring.unit_roundoff import FINEST, UNITS, unit_of
from narrowgauge.spec.formats import FORMATS, dtype_name

WIDE = torch.float64
_PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "dot", "mv", "addmv", "_scaled_mm",
)  # fmt: skip
_BY_INDEX = ("topk", "sort", "max", "min", "median", "kthvalue", "mode", "cummax", "cummin")
_BY_VALUE = (
    "index", "index_put", "index_put_", "masked_select", "nonzero", "masked_scatter",
    "_local_scalar_dense", "one_hot",
)  # fmt: skip
"""Operations whose results have shapes that depend on values; those are the step's."""
_TO_INTEGERS = ("round", "floor", "ceil", "trunc", "sign")
_PACKED = ("mkldnn_rnn_layer", "_cudnn_rnn")
"""Kernels whose packed weights are no float64, and crash."""
_KINKS = ("relu", "relu_", "leaky_relu", "clamp_min", "threshold_backward", "hardtanh_backward")
_FEWEST = 64
"""Elements of a cast whose range is judged."""


class Float64Shadow:
    """Keep the float64 shadow of each tensor of a step.

    Args:
        chosen: sites whose shadows are rounded as the step's values are.
        shifts: tensors, and what is added to their shadows at the beginning.
        is_smooth: leave out roundings to integers too, so that the loss has a slope. Otherwise they are
            choices, and the shadow takes the step's.

    Attributes:
        rounds: names of the operations that round, by site.
        layers: sites of our own narrow layers.
        at_end: largest fraction of a cast's values that reach the end of an 8-bit format, by site.
        cast_errors: largest error of a cast, in roundings of its format, by site.
        coarsest: unit roundoff and name of the coarsest format of a product in forward, or of a cast to
            8 bits.
        cuts: operations that are not followed.
        quantizers: sites where an autograd function rounds to integers or 8 bits, if that is left out.
        draws: whether an operation drew random numbers.
        flips: whether a choice, or a unit of a kink, is another one without roundings.
    """

    def __init__(
        self,
        chosen: Collection[str] = (),
        shifts: Iterable[tuple[Tensor, Tensor]] = (),
        *,
        is_smooth: bool = False,
    ) -> None:
        self.chosen = chosen
        self.is_smooth = is_smooth
        self.rounds: dict[str, set[str]] = {}
        self.layers: set[str] = set()
        self.at_end: dict[str, float] = {}
        self.cast_errors: dict[str, float] = {}
        self.coarsest = (FINEST, "float32")
        self.cuts: dict[str, None] = {}
        self.quantizers: dict[str, None] = {}
        self.draws = self.flips = False
        self._shadows = ByStorage()
        """By memory: its format, and the flat shadow; ``None`` if it is not followed."""
        self._inputs = ByStorage()
        for x, shift in shifts:
            self._give_shadow(x)
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
        shadow = flat.as_strided(x.size(), x.stride(), x.storage_offset())
        return shadow.conj() if x.is_conj() else shadow  # lazy, as in the step

    def _flat(self, x: Tensor) -> Tensor | None:
        """Return the shadow of the memory of a tensor, if that was written in its format."""
        dtype, flat = self._shadows.of(x) or (None, None)
        return flat if dtype is x.dtype.to_real() else None

    def _give_shadow(self, x: Tensor) -> None:
        """Give the memory of a tensor a shadow that can be written."""
        if self._flat(x) is None:
            dtype = x.dtype.to_real()
            values = torch.empty(0, dtype=dtype, device=x.device).set_(x.untyped_storage())
            self._shadows.put(x, (dtype, values.to(_widened(dtype), copy=True)))

    def keep(self, x: Tensor, value: Tensor) -> None:
        """Keep a value as the shadow of a tensor."""
        self.forget(x)
        self._give_shadow(x)
        self.of(x).copy_(value)

    def forget(self, x: Tensor) -> None:
        """Make a tensor its own shadow."""
        self._shadows.pop(x.untyped_storage(), None)

    def follows(self, x: Tensor) -> bool:
        """Return whether the shadow of a tensor is known."""
        entry = self._shadows.of(x)
        return entry is None or entry[1] is not None

    def _lose(self, tensors: Iterable[Tensor], cut: str = "") -> None:
        """Follow tensors no further. ``cut`` names the operation that cannot be followed."""
        if cut:
            self.cuts[cut] = None
        for x in tensors:
            self._shadows.put(x, (x.dtype.to_real(), None))

    # ── an operation ──────────────────────────────────────────────────────────────────────────────

    def before(self, op: Operation) -> Any:
        """Return the arguments with shadows, before what is written in place is written.

        Nothing where no tensor has a shadow; no arguments where one is not followed.
        """
        has_shadows = any(_has_shadow(x) or self._shadows.of(x) for x in op.operands)
        # Integers that a narrow format rounds.
        has_shadows |= op.name == "_to_copy" and op.arguments.get("dtype") in UNITS
        if op.layer or op.draws or op.name in ALLOCATES or not has_shadows:
            return None
        if not all(map(self.follows, op.operands)):
            return ()
        for x in filter(_has_shadow, op.written):
            self._give_shadow(x)
        takes_values = op.name in _BY_VALUE

        def wide(x: Any) -> Any:
            if isinstance(x, torch.dtype):
                return _widened(x)
            return x if takes_values and not is_float(x) else self.of(x)

        return tree_map(wide, (op.args, op.kwargs))

    def after(self, op: Operation, arguments: Any) -> None:
        """Run the operation on shadows, and keep its results."""
        if op.layer is not None:
            self._follow_layer(op)
        elif op.draws:
            self._drawn(op)
        if arguments is None or op.is_view:
            return
        results = tensors_in(op.result)
        if self.is_smooth and _has_no_slope(op, results) and is_in_autograd_function():
            self.quantizers[op.site] = None
        targets = [x for x in op.written or results if _has_shadow(x)]
        if not arguments or not targets:
            self._lose(targets)
            return
        try:
            shadows = tensors_in(self._on_wide(op, *arguments))
        except Exception:  # whatever a kernel raises that takes no float64
            self._lose(targets, op.name)
            return
        if not op.written:
            for x, value in zip(targets, filter(_has_shadow, shadows), strict=False):
                self.keep(x, value)
        for x in targets:
            if x.dtype is torch.bool or op.name in _KINKS:
                self.flips |= bool(((x == 0) != (self.of(x) == 0)).any())
        self._note(op, [x for x in targets if x.dtype in UNITS])

    def _drawn(self, op: Operation) -> None:
        """Make random numbers the step's. Those that are drawn from activations cut the chain."""
        self.draws = True
        targets = floats_in([op.written, op.result])
        storages = set(map(storage_key, op.written))
        for x in targets:
            self.forget(x)
        reads = any(storage_key(x) not in storages for x in floats_in(op.operands))
        if reads and not op.name.endswith("_like"):
            self._lose(targets, op.name)

    def _on_wide(self, op: Operation, args: Any, kwargs: Any) -> Any:
        """Return what an operation gives for wide operands."""
        name = op.name
        is_torchs = op.is_collective or op.func.namespace in ("aten", "prims")
        if name in _PACKED or not is_torchs:  # another's may compute in less than float64
            raise NotImplementedError
        if name == "native_dropout" and args[2]:
            self.draws = True
            return args[0] * op.result[1] / (1 - args[1])
        if name in _TO_INTEGERS and not op.written:
            return args[0] if self.is_smooth and name != "sign" else op.result
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return [x.mul_(args[2]) for x in args[0]]
        if name == "_scaled_mm":
            a, b, scale_a, scale_b, bias = [*args, None][:5]
            return linear(a * scale_a, (b * scale_b).t(), bias)
        if name in _BY_INDEX and isinstance(op.result, (tuple, list)):
            indices = op.result[1]
            dim = op.arguments.get("dim", -1)
            if indices.ndim == args[0].ndim:
                return args[0].gather(dim, indices)
            return args[0].gather(dim, indices.unsqueeze(dim)).squeeze(dim)
        result = op.func(*args, **kwargs)
        for work in tree_leaves(result):
            if op.is_collective and hasattr(work, "wait"):
                work.wait()
        return result

    def _note(self, op: Operation, narrow: list[Tensor]) -> None:
        """Note what an operation rounds, and round the shadow of a chosen site."""
        if not narrow:
            return
        first = narrow[0]
        self.rounds.setdefault(op.site, set()).add(op.name)
        is_product = op.name in _PRODUCTS and not op.is_backward
        if is_product or first.element_size() == 1:
            self._take_format(first.dtype)
        if op.site in self.chosen:
            for x in narrow:
                self.of(x).copy_(self.of(x).to(x.dtype))
        if op.name in ("_to_copy", "copy_") and first.numel() >= _FEWEST:
            self._judge_cast(op.site, first, op.operands[-1].to(WIDE).expand_as(first))

    def _take_format(self, dtype: torch.dtype) -> None:
        self.coarsest = max(self.coarsest, (unit_of(dtype), dtype_name(dtype)))

    def _judge_cast(self, site: str, values: Tensor, source: Tensor) -> None:
        """Note what a cast loses at the ends of its format."""
        if values.element_size() == 1:  # 16-bit masks end there; infinities are reported elsewhere
            # Values that a clamp has put there are at the end.
            end = torch.finfo(values.dtype).max * (1 - 2.0**-12)
            share = float((self.of(values).abs() >= end).double().mean())
            self.at_end[site] = max(share, self.at_end.get(site, 0.0))
        wide = values.to(WIDE)
        # A mask may overflow, and infinities are reported elsewhere.
        finite = wide.isfinite() & source.isfinite()
        length = float(source[finite].norm()) or 1.0
        error = float((wide - source)[finite].norm()) / length / unit_of(values.dtype)
        self.cast_errors[site] = max(error, self.cast_errors.get(site, 0.0))

    # ── the products of our own layers ────────────────────────────────────────────────────────────

    def _follow_layer(self, op: Operation) -> None:
        """Multiply the shadows of a narrow layer's operands, as they are before the casts."""
        self._take_format(op.operands[0].dtype)
        for cast in op.layer.compute.casts.values():
            if cast is not None:
                row = FORMATS[cast.format]
                unit = 0.5 / row.max if cast.format.startswith("int") else row.epsilon / 2
                self.coarsest = max(self.coarsest, (float(unit), cast.format))
        self.layers.add(op.site)
        self.rounds.setdefault(op.site, set()).add(op.name)
        first, second, third = op.args[:3]
        is_forward = isinstance(second, Tensor)  # x, weight, bias
        results = op.result
        if is_forward:
            results = results[:1]
            self._inputs.put(op.result[1].data, self.of(first).clone())
        if not all(map(self.follows, op.operands)):
            self._lose(tensors_in(results))
            return
        if op.site in self.chosen:
            shadows = op.func(*(self.of(x).to(x.dtype) if is_float(x) else x for x in op.args))
        elif is_forward:
            shadows = [linear(*map(self.of, op.args[:3]))]
        else:  # gradient, saved operand, weight
            grad = self.of(first)
            x = self._inputs.of(second.data)
            shadows = [grad @ self.of(third), grad.t() @ x, grad.sum(0)]
        for x, value in zip(results, shadows, strict=False):
            if x is not None:
                self.keep(x, value)


def _has_no_slope(op: Operation, results: list[Tensor]) -> bool:
    """Return whether an operation rounds to integers, or cuts values off. Casts to floating formats are
    left out of a smooth shadow.
    """
    if op.name == "_to_copy":
        return not is_float(results[0])
    if op.name in ("clamp", "clamp_min", "clamp_max") and is_float(results[0]):
        is_same = torch.allclose(results[0], op.operands[0], 2.0**-10, 0.0, equal_nan=True)
        return not is_same and not op.is_backward
    return op.name in _TO_INTEGERS


def _has_shadow(x: Any) -> bool:
    return is_float(x) or (isinstance(x, Tensor) and x.dtype is torch.bool)


def _widened(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return WIDE if dtype.is_floating_point else dtype
