"""One Linear for every format: three matmuls, six casts, and what is kept between forward and backward.

A narrow linear layer is an ``nn.Linear`` (or transformers' ``Conv1D``) whose matmuls follow a compute of
:mod:`narrowgauge.spec.computes`. Parameters, names and ``state_dict`` are the plain layer's. A model's layers are swapped in
place by :func:`narrowgauge.matmul.swapping.swap_linears`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import layer_matmuls, operand
from narrowgauge.matmul.cast_cache import LastCast
from narrowgauge.matmul.delayed_scaling import history_for
from narrowgauge.numerics.devices import require_float64
from narrowgauge.numerics.rounding import step_seed
from narrowgauge.numerics.widening import bias_gradient, linear
from narrowgauge.spec import computes
from narrowgauge.spec.computes import Compute, slot_of_cast
from narrowgauge.spec.formats import dtype_name

_cast_input, _cast_kept = LastCast(layer_matmuls.cast_input), LastCast(layer_matmuls.cast_kept)


class _Product(torch.autograd.Function):
    """``x · wᵀ + b`` and its gradients, in a compute's casts.

    ``scale_owner`` is the state and amax history of the layer whose delayed scale casts the input: the first of several
    layers that get the same input.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, name: str, state: Tensor, history: Tensor | None,
        scale_owner: tuple[Tensor | None, Tensor | None], sequence_length: int, record: bool, unit: Tensor | None,
    ) -> Tensor:  # fmt: skip
        compute = layer_matmuls.REGISTERED[name]
        data, outer, inner = _cast_input(state, x, name, *scale_owner, record)
        source = x if compute.output.left.outliers else None
        y: Tensor = layer_matmuls.multiply_output(
            data, outer, inner, source, weight, bias, name, state, history, record, x.shape[0], x.dtype, unit
        )
        kept = (data, outer, inner) if slot_of_cast(compute, "grad_weight.right") == "output.left" else (x, None, None)
        ctx.save_for_backward(*kept, weight, state, history, unit)
        ctx.name, ctx.sequence_length, ctx.record, ctx.has_bias = name, sequence_length, record, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        data, outer, inner, weight, state, history, unit = ctx.saved_tensors
        compute, grad = layer_matmuls.REGISTERED[ctx.name], grads[0].contiguous()
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1]]
        given: list[Tensor | None] = [None, None]
        if outer is None:
            outer = inner = grad.new_empty(0, dtype=torch.float32)
            right = compute.grad_weight.right
            if wanted[1] and not right.is_wide:
                drawn = state if right.needs_bits else None
                data, outer, inner = _cast_kept(state, data, ctx.name, drawn)
        if any(wanted):
            found = layer_matmuls.gradients(
                grad,
                data,
                outer,
                inner,
                weight,
                ctx.name,
                state,
                history,
                ctx.sequence_length,
                wanted,
                ctx.record,
                unit,
            )
            given = [gradient if needed else None for gradient, needed in zip(found, wanted, strict=True)]
        by_bias = bias_gradient(grad) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return (*given, by_bias, None, None, None, None, None, None, None)


class ExactBuffers(nn.Module):
    """A module whose buffers named in ``exact`` keep their dtype when the model's dtype changes; it stays where float64 is."""

    exact: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: self._buffers[name] for name in self.exact}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        require_float64(self._buffers.values())
        return self


class NarrowLayer(ExactBuffers):
    """What a linear layer and the experts of a mixture have in common: a compute, a step and delayed scales.

    Attributes:
        compute: the compute in force.
        is_keyed: whether this or an earlier compute takes random bits, which the step keys.
        state: int32 ``[4]``, or ``[4, experts]``: seed of the step, step, first sequence, key of the layer's random bits.
        amax_history: see :func:`narrowgauge.matmul.delayed_scaling.new_history`; ``None`` where no scale was ever delayed.
        step: optimizer steps done.
        seed: of stochastic casts.
        variant: set by a transform of the model: the variant of each compute that the layer takes where there is one.
    """

    exact = ("amax_history",)
    num_experts: int = 1
    compute: Compute
    is_keyed: bool = False
    state: Tensor
    amax_history: Tensor | None
    step: int = 0
    seed: int = 0
    variant: str = ""

    def begin(self, state: Tensor, compute: Compute) -> None:
        self.register_buffer("state", state, persistent=False)
        self.register_buffer("amax_history", None, persistent=False)
        self.set_compute(compute)

    def set_step(self, step: int, seed: int) -> None:
        """Set the number of optimizer steps done, and the seed of stochastic casts."""
        self.step, self.seed = step, seed
        self.state[operand.STEP_SEED] = step_seed(seed, step)
        self.state[operand.STEP] = step

    def set_compute(self, compute: Compute) -> None:
        """Continue in another compute, or in the layer's variant of it."""
        self.compute = (computes.find(compute.name + self.variant) if self.variant else None) or compute
        self.is_keyed = self.is_keyed or self.compute.is_stochastic
        history = history_for(self.compute, self.state.device, self.num_experts)
        # A longer history than the compute needs is kept: it holds the same amax values.
        if history is not None and (self.amax_history is None or self.amax_history.shape[-1] < history.shape[-1]):
            self.amax_history = history

    def load_history(self, history: Tensor) -> None:
        if self.amax_history is None or self.amax_history.shape[-1] < history.shape[-1]:
            self.amax_history = history.detach().to(self.state.device, copy=True)
        else:
            self.amax_history.copy_(history)

    def as_streamed(self, x: Tensor) -> Tensor:
        """The input in the dtype in which the model computes around the layer: autocast's, which must be the compute's."""
        if not torch.is_autocast_enabled(x.device.type):
            return x
        dtype = torch.get_autocast_dtype(x.device.type)
        if dtype != getattr(torch, self.compute.dtype):
            raise RecipeError(
                f"a layer of compute '{self.compute.name}' computes in {self.compute.dtype}, and was called under autocast "
                f"to {str(dtype).removeprefix('torch.')}.",
                f"Use torch.autocast(…, torch.{self.compute.dtype}).",
            )
        return x.to(dtype)


class Linear(NarrowLayer, nn.Linear):
    """A linear layer in the arithmetic of a compute; made by :func:`swap_linears`.

    Invariant: the output and both gradients are the compute's matmuls of its casts, the same bits eager and compiled;
    backward keeps what ``Compute.kept_bytes`` says.
    """

    # The name by which the operators know the compute.
    registered_name: str
    # The layer whose state and history give the delayed scale of the input: the first that gets the same input, else itself.
    scale_owner: tuple[Linear, ...] = ()
    # Whether the weight is [in, out], as in transformers' Conv1D.
    is_transposed: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return self.multiply(input, self.weight, self.bias)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, unit: Tensor | None = None) -> Tensor:
        """The layer's product with a weight of the caller's: ``[..., in]``, ``[out, in]`` to ``[..., out]``.

        With a ``unit`` (0-d, a power of two; not in wide computes) it is the product with ``weight / unit``, and the weight's
        gradient is that of the quotient; the cast is cached under the weight itself.

        Raises:
            RecipeError: autocast requests a dtype that is not the compute's.
        """
        weight = weight.t() if self.is_transposed else weight
        x = self.as_streamed(x)
        if is_plain(self.compute, x.dtype):
            return linear(x, weight, bias)
        length = x.shape[-2] if x.ndim > 2 else 1
        y = _Product.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, x.shape[-1]), weight, bias, self.registered_name, self.state, self.amax_history,
            self._input_scale(), length,
            torch.is_grad_enabled() and self.training, unit,
        )  # fmt: skip
        return cast(Tensor, y).view(*x.shape[:-1], weight.shape[0])

    def unit_of(self, weight: Tensor) -> Tensor:
        """The power of two at or below a weight's root mean square, measured once within ``cached_weights``."""
        return cast(Tensor, layer_matmuls.weight_unit(weight.detach()))

    def _input_scale(self) -> tuple[Tensor | None, Tensor | None]:
        """The state and history that give the input's delayed scale; nothing where the scale is not delayed."""
        if self.compute.output.left.scaling != "delayed":
            return None, None
        owner = self.scale_owner[0] if self.scale_owner else self
        return owner.state, owner.amax_history

    def set_compute(self, compute: Compute) -> None:
        super().set_compute(compute)
        self.registered_name = layer_matmuls.register(self.compute)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.registered_name = layer_matmuls.register(self.compute)  # another process does not know it yet

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, compute={self.compute.name!r}"


def is_plain(compute: Compute, dtype: torch.dtype) -> bool:
    """Whether a compute equals a plain linear layer where the model computes in ``dtype``: nothing is cast."""
    formats = {c.format for c in compute.casts.values()}
    return compute.is_wide and formats == {dtype_name(dtype)}


def has_plain_product(module: nn.Module) -> bool:
    """Whether a linear layer is :func:`~narrowgauge.numerics.widening.linear` of its input and its weight, and nothing else."""
    if isinstance(module, Linear):
        return is_plain(module.compute, getattr(torch, module.compute.dtype)) and not module.is_transposed
    return type(module) is nn.Linear


class DeferredLinear(nn.Linear):
    """A plain linear layer for frameworks that bind ``forward`` to a layer before it can be swapped.

    Swapped, it computes narrowly through the method that was bound, too.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return Linear.forward(self, input) if isinstance(self, Linear) else nn.Linear.forward(self, input)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of a kind that can be swapped.

    A subclass of ``nn.Linear`` is one if its product is ``nn.Linear``'s own: a framework's, or one that FSDP2 has wrapped.
    """
    if isinstance(module, nn.Linear):
        inherits = type(module).forward in (nn.Linear.forward, Linear.forward, DeferredLinear.forward)
        return inherits and not isinstance(module, NonDynamicallyQuantizableLinear)
    return type(module).__name__ == "Conv1D"


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer's weight is ``[in, out]``."""
    return type(module).__name__ == "Conv1D" or bool(getattr(module, "is_transposed", False))


@functools.cache
def _narrow_class(plain: type[Any]) -> type[Linear]:
    """:class:`Linear`, for a layer of that class; one that keeps what a subclass adds, such as FSDP2's methods."""
    if issubclass(plain, Linear):
        return plain
    if plain is nn.Linear or not issubclass(plain, nn.Linear):
        return Linear
    return type(plain.__name__, (Linear, plain), {"__reduce_ex__": _reduced, "_plain_class": plain})


def _reduced(layer: Any, protocol: Any) -> tuple[Any, ...]:
    """How a layer of such a class is pickled and copied: no module has the class, so it is made again from the plain one."""
    found = cast(tuple[Any, ...], object.__reduce_ex__(layer, max(2, protocol)))
    return (_empty_layer, (layer._plain_class,), *found[2:])


def _empty_layer(plain: Any) -> Linear:
    made = _narrow_class(plain)
    return made.__new__(made)


def narrowed(name: str, module: nn.Module, compute: Compute) -> Linear:
    """The module as a :class:`Linear`; the same object, so that hooks and references to it hold.

    One whose ``forward`` was replaced on the object itself is refused: it would go on computing as before.
    """
    if "forward" in vars(module) and not isinstance(module, (Linear, DeferredLinear)):
        raise RecipeError(
            f"layer '{name}' was to compute as '{compute.name}', and a framework has replaced its forward, which would go on as "
            "before.",
            "Prepare the model before the framework gets it; in torchtitan, use with_recipe or NarrowgaugeConverter.",
        )
    transposed = is_transposed(module)
    weight = cast(Tensor, module.weight)
    sides = weight.shape if transposed else weight.shape[::-1]
    kind: Any = type(module)
    module.__class__ = _narrow_class(kind)
    layer = cast(Linear, module)
    layer.in_features, layer.out_features = sides
    layer.is_transposed = transposed
    layer.begin(operand.new_state([name], weight.device)[:, 0].contiguous(), compute)
    return layer
