"""A step's forward and backward pass in float32, with the roundings of a recipe put in by place.

The model computes in float32 throughout. Where the recipe rounds (the output of a matmul, a norm or a sum of the residual stream,
and the gradients on their way back) the value is rounded to the recipe's dtype and kept in float32, so that each place can be
left out alone. Sums inside a kernel stay float32, as the recipe's kernels keep them. The class of a module says what is rounded
in it: a linear layer, a norm or an attention; everything else is the residual stream.

The three matmuls of a narrow linear layer take the layer's own casts (:mod:`narrowgauge.matmul.layer_matmuls`), with its random
bits and delayed scales; products of the cast values are computed in float32. So one cast can be left out while the others stay,
which no kernel offers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from narrowgauge.matmul.layer_matmuls import cast_to_slot, outlier_columns, scales_to_fold
from narrowgauge.matmul.linear import Linear, is_linear, is_transposed
from narrowgauge.matmul.operand import Operand, drawn_signs
from narrowgauge.numerics.quantization import padded, rotate
from narrowgauge.spec.computes import SLOTS, keeps_outlier_weights, slot_of_cast
from narrowgauge.trainer.session import Session

PLACES = {"input": "inputs", "weight": "weights", "gradient": "output-gradients"}
"""The place of the table of variants at which each tensor of a layer is cast."""


@dataclass(frozen=True, eq=False)
class Casts:
    """The casts of one layer, except at the ``wide`` places.

    The layer's compute, random bits and delayed scales are used, and not changed. ``length`` is the tokens of a sequence.
    """

    layer: Linear
    wide: Collection[str]
    length: int

    def product(self, matmul: str, left: Tensor, right: Tensor) -> Tensor:
        """One of the three matmuls, float32 and with the padding of its operands cut off."""
        slots = f"{matmul}.left", f"{matmul}.right"
        made = self._operand(slots[1], right, None)
        fold = None if made is None else scales_to_fold(made.outer, self.layer.compute, matmul)
        a, b = (
            self._values(slots[0], left, self._operand(slots[0], left, fold), fold),
            self._values(slots[1], right, made),
        )
        compute = self.layer.compute
        if matmul == "output" and made is not None and keeps_outlier_weights(compute):
            b = torch.where(outlier_columns(left, compute.output.left.outliers), right, b)
        rows, columns = left.shape[1 - SLOTS[slots[0]].dim], right.shape[1 - SLOTS[slots[1]].dim]
        a, b = a if SLOTS[slots[0]].dim == 1 else a.t(), b.t() if SLOTS[slots[1]].dim == 1 else b
        return (a @ b)[:rows, :columns]

    def _operand(self, slot: str, x: Tensor, fold: Tensor | None) -> Operand | None:
        """The operand that the layer casts; ``None`` where nothing is cast."""
        compute = self.layer.compute
        made = slot_of_cast(compute, slot)
        if PLACES[SLOTS[slot].tensor] in self.wide or compute.casts[made].is_wide:
            return None
        state, history = self.layer.state, self.layer.amax_history
        if SLOTS[slot].tensor == "input" and self.layer.scale_owner:
            history = self.layer.scale_owner[0].amax_history
        return cast_to_slot(x, compute, made, state=state, history=history, sequence_length=self.length, fold=fold)

    def _values(self, slot: str, x: Tensor, made: Operand | None, fold: Tensor | None = None) -> Tensor:
        """The float32 values of an operand, in the layout of its tensor; padded only where it is rotated."""
        cast = self.layer.compute.casts[slot]
        is_rotated = cast.rotation != "none"
        if made is None:
            return self._rotated(slot, x) if is_rotated else x
        found = made.data.float() if made.outer is None else made.data.float() * made.outer
        if is_rotated:
            return found
        found = found[: x.shape[0], : x.shape[1]]
        found = found if fold is None else found / fold
        return torch.where(outlier_columns(x, cast.outliers), x, found) if cast.outliers else found

    def _rotated(self, slot: str, x: Tensor) -> Tensor:
        """``x`` rotated as the cast of a slot rotates it, and not rounded."""
        cast, dim = self.layer.compute.casts[slot], SLOTS[slot].dim
        signs = drawn_signs(cast, x.shape[dim], dim, self.layer.state, SLOTS[slot].matmul)
        return rotate(padded(x if signs is None else x * signs, cast, dim), dim, cast.rotation)


class EmulatedProduct(torch.autograd.Function):
    """``x · wᵀ + b`` of ``[tokens, in]`` and ``[out, in]``, and its gradients, in a layer's casts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, casts: Casts) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.casts, ctx.has_bias = casts, bias is not None
        y = casts.product("output", x, weight)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        by_input = ctx.casts.product("grad_input", grad, weight)
        by_weight = ctx.casts.product("grad_weight", grad, x)
        return by_input, by_weight, grad.sum(0) if ctx.has_bias else None, None


# ── the passes ──────────────────────────────────────────────────────────────────────────────────────────────────────

_MOVES = frozenset((
    "view", "reshape", "transpose", "permute", "contiguous", "clone", "cat", "stack", "expand", "repeat",
    "repeat_interleave", "split", "chunk", "unbind", "squeeze", "unsqueeze", "flatten", "unflatten", "__getitem__",
    "index_select", "detach", "to", "float", "type_as", "masked_fill", "where", "narrow", "t", "movedim", "swapaxes",
    "__get__", "neg", "__neg__", "abs", "relu", "embedding", "roll", "flip", "dropout", "apply",
))  # fmt: skip
"""Functions whose results are their arguments' values: nothing is rounded."""
_INSIDE_NORM = "inside a norm"
_KERNEL = "scaled_dot_product_attention"
_AUTOCAST = frozenset((_KERNEL, "matmul", "__matmul__", "bmm", "baddbmm"))
"""Functions that autocast computes in the narrow dtype also where everything between them is float32."""
_CASTS = frozenset(("to", "type", "half", "bfloat16"))
_NAMED = {"half": torch.float16, "bfloat16": torch.bfloat16}


class _Rounded(torch.autograd.Function):
    """A value rounded to one format, and its gradient to another; ``None`` rounds nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: torch.dtype | None, back: torch.dtype | None) -> Tensor:
        ctx.back = back
        return cut(x, to)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return cut(grads[0], ctx.back), None, None


class _LookedUp(torch.autograd.Function):
    """Rows of a weight, whose gradients are added up in a format."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rest = weight.shape[0], -1 if padding is None else padding, dtype
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (ids,), (count, padding, dtype), grad = ctx.saved_tensors, ctx.rest, grads[0]
        narrow = grad if dtype is None else grad.to(dtype)
        found = torch.ops.aten.embedding_dense_backward(narrow, ids, count, padding, False)
        return found.to(grad.dtype), None, None, None


def cut(x: Tensor, to: torch.dtype | None) -> Tensor:
    """``x`` rounded to a format, in its own dtype."""
    return x.clone() if to is None else x.to(to).to(x.dtype)


class EmulatedPasses:
    """The passes of a step.

    Args:
        plain: a session of the same model in float32, whose weights are set by the caller.
        session: the run, whose recipe, narrow layers and scales are read.

    Attributes:
        wide: the places at which nothing is rounded.
        seen: the places at which something was.
    """

    def __init__(self, plain: Session, session: Session) -> None:
        self.plain, self.session = plain, session
        recipe = session.config.recipe
        self.wide: frozenset[str] = frozenset()
        self.seen: set[str] = set()
        self.dtype = None if recipe.dtype == "float32" else cast(torch.dtype, getattr(torch, recipe.dtype))
        self.stream = None if recipe.storage.visible == "float32" else self.dtype  # autocast leaves it in float32
        self._places: list[str | None] = []
        self._entered: Any = None
        self._held = {name: p.dtype for name, p in session.model.named_parameters(remove_duplicate=False)}
        self._length = session.config.sequence_length

    def loss(self, tokens: Tensor) -> Tensor:
        """The summed loss of a micro-batch, to be differentiated."""
        self._places.clear()
        with self._attached(), _Roundings(self):
            return self.plain.loss(tokens)

    @property
    def place(self) -> str | None:
        """Where operations are at present; ``None`` where they round nothing."""
        return self._places[-1] if self._places else None

    def rounded(self, x: Tensor, place: str, dtype: torch.dtype | None) -> Tensor:
        """A value as the recipe has it at a place."""
        if dtype is None:
            return x
        self.seen |= {place, "activation-gradients"}
        to = None if place in self.wide else dtype
        back = None if "activation-gradients" in self.wide else dtype
        with torch._C.DisableTorchFunction():
            return cast(Tensor, _Rounded.apply(x, to, back))  # type: ignore[no-untyped-call]

    def in_norm(self, x: Any, result: Any) -> Any:
        """What a conversion inside a norm gives: norms compute in float32, and convert back before their weight multiplies."""
        is_back = x is not self._entered and _is_value(result) and self.stream is not None
        return self.rounded(result, "norms", self.stream) if is_back else result

    def own_cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A cast in the model's own code, and that of its gradient."""
        self.seen.add("own-casts")
        if "own-casts" in self.wide:
            return x
        with torch._C.DisableTorchFunction():
            return cast(Tensor, _Rounded.apply(x, dtype, dtype))  # type: ignore[no-untyped-call]

    @contextmanager
    def _attached(self) -> Iterator[None]:
        undo: list[Callable[[], Any]] = []
        keeps = self.session.config.recipe.keeps
        kept: list[str] = []
        for name, module in self.plain.model.named_modules():
            if any(name.startswith(f"{outer}.") for outer in kept):
                continue
            if is_kept := bool(name) and keeps(name):
                kept.append(name)
            own = self._linear if is_linear(module) else self._embedding if type(module) is nn.Embedding else None
            if own is not None and not is_kept and "forward" not in vars(module):
                module.forward = partial(own, name, module)
                undo.append(partial(delattr, module, "forward"))
            inside, after = (None, "residual") if is_kept else _places_of(module)
            undo += [
                module.register_forward_pre_hook(partial(self._enter, inside)).remove,
                module.register_forward_hook(partial(self._leave, after)).remove,
            ]
        try:
            yield
        finally:
            for each in reversed(undo):
                each()

    def _enter(self, inside: str | None, module: nn.Module, args: Any) -> None:
        self._places.append(inside)
        if inside == _INSIDE_NORM:
            self._entered = args[0] if args else None

    def _leave(self, after: str | None, module: nn.Module, args: Any, output: Any) -> Any:
        self._places.pop()
        if after is None or self.stream is None:
            return output
        return tree_map(lambda x: self.rounded(x, after, self.stream) if _is_value(x) else x, output)

    def _weight(self, name: str, weight: Tensor) -> Tensor:
        """A weight whose gradient is rounded as it arrives, before those of its other uses are added."""
        dtype = self._dtype_of(name)
        if dtype is None:
            return weight
        with torch._C.DisableTorchFunction():
            return cast(Tensor, _Rounded.apply(weight, None, dtype))  # type: ignore[no-untyped-call]

    def _dtype_of(self, name: str) -> torch.dtype | None:
        """The format in which the gradient of a module's weight is held; ``None`` where nothing is rounded."""
        dtype = self._held[f"{name}.weight"]
        if dtype is torch.float32:
            return None
        self.seen.add("weight-gradients")
        return None if "weight-gradients" in self.wide else dtype

    def _embedding(self, name: str, module: Any, ids: Tensor) -> Tensor:
        """A look-up whose gradient is added up in the format of the weight, token by token."""
        with torch._C.DisableTorchFunction():
            y = cast(Tensor, _LookedUp.apply(module.weight, ids, module.padding_idx, self._dtype_of(name)))  # type: ignore[no-untyped-call]
        return self.rounded(y, "residual", self.stream)

    def _linear(self, name: str, module: Any, x: Tensor) -> Tensor:
        """A linear layer as the recipe computes it."""
        layers = {} if self.session.linears is None else self.session.linears.layers
        layer, weight = layers.get(name), self._weight(name, module.weight)
        weight = weight.t() if is_transposed(module) else weight
        if isinstance(layer, Linear) and not layer.compute.is_wide:
            self.seen |= {PLACES[tensor] for tensor in PLACES}
            rows = x.reshape(-1, x.shape[-1])
            length = x.shape[-2] if x.ndim > 2 else 1
            with torch._C.DisableTorchFunction():
                y = EmulatedProduct.apply(rows, weight, module.bias, Casts(layer, self.wide, length))  # type: ignore[no-untyped-call]
                y = cast(Tensor, y).view(*x.shape[:-1], -1)
        else:
            if self.stream is None:  # autocast
                x, weight = self.rounded(x, "inputs", self.dtype), self.rounded(weight, "weights", self.dtype)
            with torch._C.DisableTorchFunction():
                y = F.linear(x, weight, module.bias)
        is_head = module is self.plain.model.get_output_embeddings()
        return self.rounded(y, "logits" if is_head else "linear-outputs", self.dtype)


def _places_of(module: nn.Module) -> tuple[str | None, str | None]:
    """The place of a module's own operations, and of its output; ``None`` where nothing is rounded."""
    kind = type(module).__name__.lower()
    if is_linear(module) or isinstance(module, nn.Embedding):
        return None, None
    if "norm" in kind:
        return _INSIDE_NORM, "norms"
    if "rotary" in kind:
        return None, "attention"
    return ("attention", None) if "attention" in kind else ("residual", None)


def _is_value(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float32


class _Roundings(TorchFunctionMode):
    """Rounds the result of every operation, where the passes do."""

    def __init__(self, passes: EmulatedPasses) -> None:
        super().__init__()
        self.passes = passes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _CASTS and args and _is_value(args[0]):
            asked = [_NAMED.get(name), kwargs.get("dtype"), *args[1:]]
            dtype = next((each for each in asked if isinstance(each, torch.dtype)), None)
            if dtype is not None and dtype.is_floating_point and dtype.itemsize < 4:
                return self.passes.own_cast(args[0], dtype)
        if name == _KERNEL and self.passes.dtype is not None and "attention" not in self.passes.wide:
            # The kernel itself, since it rounds inside: attention weights before they multiply the values, and again in backward.
            self.passes.seen.add("attention")
            args, kwargs = tree_map(self._narrowed, (args, kwargs))
            return func(*args, **kwargs).float()
        result, place = func(*args, **kwargs), self.passes.place
        if place == _INSIDE_NORM:
            return self.passes.in_norm(args[0], result) if name == "to" else result
        dtype = self.passes.dtype if name in _AUTOCAST else self.passes.stream
        if place is None or dtype is None or name in _MOVES or (name.endswith("_") and not name.endswith("__")):
            return result
        return tree_map(
            lambda x: self.passes.rounded(x, place, dtype) if _is_value(x) and x.requires_grad else x, result
        )

    def _narrowed(self, x: Any) -> Any:
        return x.to(self.passes.dtype) if _is_value(x) else x
