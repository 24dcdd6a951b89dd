"""One Linear for every format: three matmuls, six casts, and what is kept between forward and backward.

A narrow linear layer is an ``nn.Linear`` (or transformers' ``Conv1D``) whose product is computed as a row of
:mod:`narrowgauge.spec.computes` says; parameters, names and ``state_dict`` are the plain layer's. A model's layers are swapped in
place by :func:`narrowgauge.matmul.swapping.swap_linears`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import custom_ops, rng
from narrowgauge.matmul.delayed_scaling import new_history
from narrowgauge.matmul.sharing import cast_input, cast_kept
from narrowgauge.numerics.plain import linear
from narrowgauge.numerics.rounding import step_seed
from narrowgauge.spec import variants
from narrowgauge.spec.computes import Compute

# Layers that get the same input, by their names beside each other: they share its delayed scale, and so its cast.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Product(torch.autograd.Function):
    """``x · wᵀ + b`` and its gradients, in a row's casts.

    ``elder`` is the state and history that the cast of the input goes by: those of the first of several layers that get
    the same one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, row: str, state: Tensor, history: Tensor | None,
        elder: tuple[Tensor | None, Tensor | None], sequence_length: int, record: bool, unit: Tensor | None,
    ) -> Tensor:  # fmt: skip
        compute = custom_ops.ROWS[row]
        data, outer = cast_input(state, x, row, *elder, record)
        source = x if compute.output.left.outliers else None
        y: Tensor = custom_ops.multiply_output(
            data, outer, source, weight, bias, row, state, history, record, x.shape[0], x.dtype, unit
        )
        kept = (data, outer) if compute.output.left.serves(compute.grad_weight.right) else (x, None)
        ctx.save_for_backward(*kept, weight, state, history, unit)
        ctx.row, ctx.sequence_length, ctx.record, ctx.has_bias = row, sequence_length, record, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The three gradients."""
        data, outer, weight, state, history, unit = ctx.saved_tensors
        compute, grad = custom_ops.ROWS[ctx.row], grads[0].contiguous()
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1]]
        given: list[Tensor | None] = [None, None]
        if outer is None:
            outer = grad.new_empty(0, dtype=torch.float32)
            right = compute.grad_weight.right
            if wanted[1] and not right.is_wide:
                drawn = state if right.rounding == "stochastic" else None
                data, outer = cast_kept(state, data, ctx.row, drawn)
        if any(wanted):
            found = custom_ops.gradients(
                grad, data, outer, weight, ctx.row, state, history, ctx.sequence_length, wanted, ctx.record, unit
            )
            given = [gradient if asked else None for gradient, asked in zip(found, wanted, strict=True)]
        by_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return (*given, by_bias, None, None, None, None, None, None, None)


class Linear(nn.Linear):
    """A linear layer computed in a row of computes; made by :func:`swap_linears`.

    Law: the output and both gradients are the row's products of the row's casts, the same bits eager and compiled; what
    is kept for backward is what ``Compute.kept_bytes`` says.

    Attributes:
        compute: the row in force.
        state: int32 ``[seed of the step, step, first sequence, layer]``.
    """

    compute: Compute
    # The name by which operators know it.
    row: str
    state: Tensor
    amax_history: Tensor | None
    # By whose state and history the input is cast where its scale is delayed: those of a sibling, else its own.
    elder: tuple[Linear, ...] = ()
    step: int = 0
    seed: int = 0
    # What a transform of the model made of it: a row's variant that it takes where there is one.
    variant: str = ""
    # Of transformers' Conv1D: whether the weight is [in, out].
    is_transposed: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return self.multiply(input, self.weight, self.bias)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, unit: Tensor | None = None) -> Tensor:
        """The layer's product with a weight of the caller's: ``[..., in]``, ``[out, in]`` to ``[..., out]``.

        With a ``unit`` (0-d, a power of two; not in wide rows) it is the product with ``weight / unit``, and the weight's
        gradient is that of the quotient; a cast that is kept is kept for the weight itself.

        Raises:
            RecipeError: autocast asks for another dtype than the row's.
        """
        weight = weight.t() if self.is_transposed else weight
        x = self._streamed(x)
        if is_plain(self.compute, x.dtype):
            return linear(x, weight, bias)
        length = x.shape[-2] if x.ndim > 2 else 1
        y = _Product.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, x.shape[-1]), weight, bias, self.row, self.state, self.amax_history,
            self._cast_by(), length,
            torch.is_grad_enabled() and self.training, unit,
        )  # fmt: skip
        return cast(Tensor, y).view(*x.shape[:-1], weight.shape[0])

    def unit_of(self, weight: Tensor) -> Tensor:
        """The power of two at or below a weight's root mean square, measured once within ``cached_weights``."""
        return cast(Tensor, custom_ops.weight_unit(weight.detach()))

    def _cast_by(self) -> tuple[Tensor | None, Tensor | None]:
        """The state and the history that the cast of the input goes by; nothing where its scale is not delayed."""
        if self.compute.output.left.scaling != "delayed":
            return None, None
        elder = self.elder[0] if self.elder else self
        return elder.state, elder.amax_history

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        history = self.amax_history
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if history is not None and self.amax_history is not None and self.amax_history.dtype != history.dtype:
            # A cast of the model is none of its histories.
            self.amax_history = history.to(self.amax_history.device)
        return self

    def _streamed(self, x: Tensor) -> Tensor:
        """The input in the dtype in which the model computes around the layer."""
        if not torch.is_autocast_enabled(x.device.type):
            return x
        dtype = torch.get_autocast_dtype(x.device.type)
        if dtype != getattr(torch, self.compute.dtype):
            raise RecipeError(
                f"a layer of compute '{self.compute.name}' works in {self.compute.dtype}, and was called under autocast to "
                f"{str(dtype).removeprefix('torch.')}.",
                f"Take torch.autocast(…, torch.{self.compute.dtype}).",
            )
        return x.to(dtype)

    def set_step(self, step: int, seed: int) -> None:
        """Say how many optimizer steps are done, and what seeds the stochastic casts."""
        self.step, self.seed = step, seed
        self.state[rng.STEP_SEED] = step_seed(seed, step)
        self.state[rng.STEP] = step

    def set_compute(self, row: Compute) -> None:
        """Go on in another row, or in the variant of it that the layer was marked for."""
        row = variants.find(row.name + self.variant) or row
        self.row, self.compute = custom_ops.register(row), row
        length = max(c.history for c in row.casts.values())
        if row.is_delayed and (self.amax_history is None or self.amax_history.shape[-1] < length):
            self.amax_history = new_history(length, self.weight.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.row = custom_ops.register(self.compute)  # another process does not know it yet

    def extra_repr(self) -> str:
        """The plain layer's, and the row."""
        return f"{super().extra_repr()}, compute={self.compute.name!r}"


def is_plain(row: Compute, dtype: torch.dtype) -> bool:
    """Whether the row is that of a plain linear layer in a stream of that dtype: nothing is cast."""
    formats = {c.format for c in row.casts.values()}
    return row.is_wide and formats == {str(dtype).removeprefix("torch.")}


def has_plain_product(module: nn.Module) -> bool:
    """Whether a linear layer is :func:`~narrowgauge.numerics.plain.linear` of its input and its weight, and nothing else."""
    if type(module) is Linear:
        return is_plain(module.compute, getattr(torch, module.compute.dtype)) and not module.is_transposed
    return type(module) is nn.Linear


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer of a kind we can compute."""
    return type(module) in (nn.Linear, Linear) or type(module).__name__ == "Conv1D"


def narrowed(name: str, module: nn.Module, row: Compute) -> Linear:
    """The module as a :class:`Linear`; the same object, so that hooks and references to it hold."""
    transposed = type(module).__name__ == "Conv1D" or getattr(module, "is_transposed", False)
    weight = cast(Tensor, module.weight)
    sides = weight.shape if transposed else weight.shape[::-1]
    module.__class__ = Linear
    layer = cast(Linear, module)
    layer.in_features, layer.out_features = sides
    layer.is_transposed = transposed
    state = torch.zeros(4, dtype=torch.int32, device=weight.device)
    state[rng.LAYER] = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little", signed=True)
    layer.register_buffer("state", state, persistent=False)
    layer.register_buffer("amax_history", None, persistent=False)
    layer.set_compute(row)
    return layer
