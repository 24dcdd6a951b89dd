"""Inference from one-byte weights: the layer stores codes and scales instead of the weight.

The layer multiplies its input by the stored codes as a compute's ``output`` does.

``int8-outlier-codes`` is LLM.int8() as bitsandbytes does it: input features with a magnitude of 6
or more multiply the widened codes in 16 bits, all others multiply in int8. ``int8-outlier`` is the
paper's form: those features multiply the 16-bit weight. Which features they are depends on the
input. So the layer keeps the whole weight beside the codes: three bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowgauge.errors import FormatError, RecipeError
from narrowgauge.matmul.gemm import warn_if_emulated
from narrowgauge.matmul.layer_matmuls import (
    REGISTERED,
    Call,
    add_outliers,
    cast_to_slot,
    multiply_slots,
    register,
)
from narrowgauge.matmul.linear import (
    is_linear,
    keep_from_fused_kernels,
    matrix_of,
    refuse_replaced_forward,
)
from narrowgauge.matmul.operand import Operand
from narrowgauge.matmul.roles import roles_of
from narrowgauge.matmul.swapping import chooser
from narrowgauge.numerics.quantization import quantize
from narrowgauge.numerics.widening import bias_gradient, matmul
from narrowgauge.spec.computes import COMPUTES, Cast, Compute, keeps_outlier_weights, stores_codes
from narrowgauge.spec.notation import get_compute
from narrowgauge.torch_support.anatomy import parts
from narrowgauge.torch_support.machine import require_float64

# ── the product ───────────────────────────────────────────────────────────────────────────────────


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, compute: str, weight: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(codes, scales, weight)
        registered = REGISTERED[compute]
        lhs = cast_to_slot(x, Call(compute), "output.left")
        rhs = Operand(codes, scales)
        y = multiply_slots(lhs, rhs, compute, "output", (x.shape[0], codes.shape[0]), x.dtype, bias)
        if registered.output.left.outliers:
            return add_outliers(y, x, registered, weight, rhs)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        codes, scales, weight = ctx.saved_tensors
        if weight is None:
            weight = codes.float() * scales
        by_bias = None
        if ctx.needs_input_grad[3]:
            by_bias = bias_gradient(grads[0])
        return matmul(grads[0], weight.to(grads[0].dtype)), None, None, by_bias, None, None


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def multiply_codes(*arguments: Any) -> Tensor:
    """Multiply rows ``[tokens, in]`` by stored codes, with the arguments of ``_Product.forward``:
    ``[tokens, out]``.

    The gradient of ``x`` is the output's gradient times the weight, or the widened codes, as of a
    frozen weight.
    """
    return cast(Callable[..., Tensor], _Product.apply)(*arguments)


# ── the layer ─────────────────────────────────────────────────────────────────────────────────────


class QuantizedLinear(nn.Module):
    """A linear layer with codes and scales instead of a weight; made by
    :func:`quantize_for_inference`.

    A change of the model's dtype changes only ``bias``.

    Attributes:
        compute: the layer computes its ``output``.
        weight_codes: ``[out, in]`` in the compute's format.
        weight_scales: float32 ``[out, 1]`` or ``[1, 1]``.
    """

    exact: tuple[str, ...] = ("weight_codes", "weight_scales")
    compute: Compute
    registered_name: str  # the compute's name in graphs
    weight_codes: Tensor
    weight_scales: Tensor
    in_features: int
    out_features: int
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``[..., in]`` to ``[..., out]``, in the input's dtype, or autocast's."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            x = input.to(torch.get_autocast_dtype(device))
        else:
            x = input
        if not x.numel():  # no tokens, as of an expert that gets none
            return x.new_zeros(*x.shape[:-1], self.out_features) + x.sum()
        y = self.product(x.reshape(-1, self.in_features))
        return y.view(*x.shape[:-1], self.out_features)

    def product(self, rows: Tensor) -> Tensor:
        """Multiply ``[tokens, in]`` by the codes, and add the bias: ``[tokens, out]``."""
        weight = getattr(self, "weight", None)
        y: Tensor = multiply_codes(
            rows, self.weight_codes, self.weight_scales, self.bias, self.registered_name, weight
        )
        return y

    @classmethod
    def codes_of(cls, weight: Tensor, right: Cast) -> tuple[Tensor, ...]:
        """Return the buffers that store a weight ``[out, in]`` in a cast, in the order of
        ``exact``.
        """
        quantized = quantize(weight, right)
        assert quantized.outer is not None
        return quantized.codes.to(getattr(torch, right.format)).contiguous(), quantized.outer

    def dequantize(self) -> Tensor:
        """Return the stored weight, float32 ``[out, in]``."""
        return self.weight_codes.float() * self.weight_scales

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: cast(Tensor, self._buffers[name]) for name in self.exact}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            after = cast(Tensor, self._buffers[name])
            if after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        require_float64(self._buffers.values())
        return self

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, compute={self.compute.name!r}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.registered_name = register(self.compute)  # another process does not know it yet


class OutlierLinear(QuantizedLinear):
    """A :class:`QuantizedLinear` that keeps its weight ``[out, in]``, too, for input features with
    outliers.
    """

    exact = (*QuantizedLinear.exact, "weight")
    weight: Tensor

    @classmethod
    def codes_of(cls, weight: Tensor, right: Cast) -> tuple[Tensor, ...]:
        """Return codes, scales and the weight."""
        return *super().codes_of(weight, right), weight.contiguous()

    def dequantize(self) -> Tensor:
        """Return the weight in float32."""
        return self.weight.float()


def _check_formats(
    module: QuantizedLinear, state_dict: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    """Refuse codes of another format: PyTorch would load them as numbers and round them to the
    layer's format.
    """
    for name in module.exact:
        saved = state_dict.get(prefix + name)
        buffer = cast(Tensor, module._buffers[name])
        if saved is not None and saved.dtype != buffer.dtype:
            raise FormatError(
                f"'{prefix}{name}' was saved in {saved.dtype}, and a layer quantized as "
                f"'{module.compute.name}' stores "
                f"{buffer.dtype}.",
                "Quantize the model in the compute that was saved, then load.",
            )


# ── quantizing ────────────────────────────────────────────────────────────────────────────────────


def quantize_for_inference(
    model: nn.Module,
    compute: str | Compute = "int8-outlier-codes",
    keep: tuple[str, ...] | None = None,
) -> nn.Module:
    """Replace the weights of a model's linear layers by one-byte codes, in place: 1 byte a
    parameter (3 in ``int8-outlier``).

    Invariant: a layer's output is the compute's matmul of the cast input and the codes. Eager and
    compiled bits are equal. Loading the ``state_dict`` into a model quantized in the same way gives
    the same bits. Outliers and a per-tensor scale depend on all tokens of a call. In other computes
    tokens are independent.

    Args:
        model: any module with ``nn.Linear`` or transformers' ``Conv1D``. On the meta device, codes
            are empty: load them with ``load_state_dict(…, assign=True)``.
        compute: a compute, or its name, whose weights are 8-bit codes with their own scales:
            ``int8-outlier-codes``, ``int8-row``, ``float8-row``, ``float8-tensor``.
            ``int8-outlier`` keeps the weights beside the codes.
        keep: name patterns (shell wildcards) of layers to leave alone. ``None``: the compute's own
            (the language model's head).
    Returns:
        The model, in evaluation mode. It computes in the dtype of its input. Its weights are
            frozen.
    Raises:
        RecipeError: an unknown compute, or one without such codes; no linear layer to quantize;
            experts of a mixture.
    Cost: some float32 copies of one weight at a time. In use, a bfloat16 copy too if the product is emulated.
    Source: Dettmers et al. 2022, LLM.int8() (2208.07339).
    Example:
        >>> model = quantize_for_inference(nn.Sequential(nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)))
        >>> model[0].weight_codes.nbytes, model[0].weight_scales.nbytes
        (262144, 2048)
    """
    require_float64(model.parameters())
    compute = with_codes(compute, with_weight=True)
    choose = chooser(compute, keep, roles_of(model) if keep is None else {})
    stacks = parts(model).stacks()
    for name, module in model.named_modules():
        if module in stacks and choose(name) is not None:
            raise RecipeError(
                f"Cannot quantize '{name}', a {type(module).__name__}, because only linear layers "
                "are stored as codes.",
                f'Leave the experts as they are with keep = ("lm_head", "{name}").',
            )
    layers = []
    for name, module in model.named_modules():
        if is_linear(module) and choose(name) is not None:
            refuse_replaced_forward(name, module, compute)
            layers.append(module)
    if not layers:
        raise RecipeError(
            f"{type(model).__name__} has no linear layer to quantize.",
            "Its layers must be nn.Linear or transformers' Conv1D, and not all be kept.",
        )
    if computed := [layer for layer in layers if "weight" not in layer._parameters]:
        raise RecipeError(
            f"Cannot quantize a {type(computed[0]).__name__} because its weight is computed in "
            "every call.",
            "Remove its weight norm or parametrization first.",
        )
    keep_from_fused_kernels(model)
    shared: dict[Tensor, tuple[Tensor, ...]] = {}
    for layer in layers:
        quantize_layer(
            layer,
            compute,
            shared,
            OutlierLinear if keeps_outlier_weights(compute) else QuantizedLinear,
        )
    warn_if_emulated(compute, cast(QuantizedLinear, layers[0]).weight_codes.device)
    return model.eval()


def with_codes(compute: str | Compute, with_weight: bool = False) -> Compute:
    """Return the compute of that name, if its weights can be stored as one-byte codes, with the
    weights beside them or not.

    Raises:
        RecipeError: an unknown compute, or its weights are not such codes.
    """
    compute = get_compute(compute)
    if not stores_codes(compute, with_weight):
        names = ", ".join(name for name, row in COMPUTES.items() if stores_codes(row, with_weight))
        raise RecipeError(
            f"Cannot store weights as codes of compute '{compute.name}' because its output takes "
            "more than 8-bit codes with "
            f"a scale per row or tensor: it multiplies ({compute.output.left}) by "
            f"({compute.output.right}).",
            f"Use one of {names}.",
        )
    return compute


def quantize_layer(
    module: Any,
    compute: Compute,
    shared: dict[Tensor, tuple[Tensor, ...]],
    kind: type[QuantizedLinear] = QuantizedLinear,
) -> None:
    """Make a linear layer a :class:`QuantizedLinear`.

    It stays the same object, so hooks and references stay valid.

    ``module`` is ``nn.Linear`` or transformers' ``Conv1D``, ``kind`` its new class. Tied layers
    share one entry of ``shared``.
    """
    weight = module._parameters["weight"]
    bias = module._parameters["bias"]
    matrix = matrix_of(module)
    if weight not in shared:
        shared[weight] = kind.codes_of(matrix.detach(), compute.output.right)
    for entries in (module._parameters, module._buffers, module._non_persistent_buffers_set):
        entries.clear()
    module.__class__ = kind
    module.out_features, module.in_features = matrix.shape
    module.compute, module.registered_name = compute, register(compute)
    for name, tensor in zip(kind.exact, shared[weight], strict=True):
        module.register_buffer(name, tensor)
    module.register_load_state_dict_pre_hook(_check_formats)
    module.register_parameter("bias", bias)
