"""Adapters over a quantized base: frozen linear layers under PEFT's LoRA and others become codes
and scales.

An 8-bit layer multiplies as :func:`narrowgauge.quantize_for_inference` does: its input is cast too
(LLM.int8). A 4-bit layer is widened to its input's format (QLoRA). Backward multiplies the gradient
by the widened weight, so the adapters of earlier layers learn. Adapters stay unchanged. PEFT's
``BaseTunerLayer.get_base_layer`` (0.21) distinguishes them from the base.

Source: Dettmers et al. 2022, LLM.int8() (2208.07339); Dettmers et al. 2023, QLoRA (2305.14314).
"""

from __future__ import annotations

import fnmatch
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowgauge.errors import FormatError, RecipeError
from narrowgauge.matmul import inference
from narrowgauge.matmul.gemm import warn_if_emulated
from narrowgauge.matmul.linear import is_linear, is_transposed, refuse_replaced_forward
from narrowgauge.matmul.roles import roles_of
from narrowgauge.numerics.quantization import (
    four_bit_codes,
    four_bit_values,
    packed_pairs,
    padded,
    quantize,
    spread,
    unpacked_pairs,
)
from narrowgauge.numerics.widening import linear, matmul
from narrowgauge.spec.computes import Cast, Compute
from narrowgauge.spec.notation import get_compute

_ADVICE = (
    "To merge adapters, call dequantize_base(model) first; add adapters before quantize_base; "
    "DoRA, LoHa, LoKr and others need whole weights in each step."
)


class NoWeightError(RecipeError, AttributeError):
    """Says that a frozen layer has no weight.

    It is an ``AttributeError``, so ``hasattr`` is false.
    """


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer = layer
        # PEFT adds to the output in place, which a view from here forbids.
        return layer.multiply(rows).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return matmul(grads[0], ctx.layer.dequantize().to(grads[0].dtype)), None


class FrozenLinear(inference.QuantizedLinear, nn.Linear):  # type: ignore[misc]
    """A frozen linear layer with codes and scales instead of a weight, through which gradients flow
    to its input.
    """

    plain_class: type[nn.Module]  # with a weight: nn.Linear, or transformers' Conv1D

    def product(self, rows: Tensor) -> Tensor:
        y = cast(Tensor, _Product.apply(rows, self))  # type: ignore[no-untyped-call]
        if self.bias is not None and self.bias.requires_grad:
            y = y + self.bias.to(y.dtype)
        return y

    @property
    def frozen_bias(self) -> Tensor | None:
        """Return the bias that the product adds. A trained bias is added after it."""
        if self.bias is None or self.bias.requires_grad:
            return None
        return self.bias

    def multiply(self, rows: Tensor) -> Tensor:
        codes = self.weight_codes
        scales = self.weight_scales
        name = self.registered_name
        return cast(
            Tensor, inference.multiply_codes(rows.detach(), codes, scales, self.frozen_bias, name)
        )

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise NoWeightError(
                f"Cannot use the weight of a layer quantized as '{self.compute.name}' because it "
                "has codes and scales.",
                _ADVICE,
            )
        return super().__getattr__(name)


class PackedLinear(FrozenLinear):
    """A :class:`FrozenLinear` with two codes in a byte.

    Attributes:
        weight_codes: uint8 ``[out, in / 2]``, padded to whole blocks. The lower half is the even
            column.
        tensor_scale: float32 ``[1, 1]``, multiplies all values. It is 1 if the format has no tensor
            scale.
    """

    exact = (*FrozenLinear.exact, "tensor_scale")
    tensor_scale: Tensor

    @classmethod
    def codes_of(cls, weight: Tensor, right: Cast) -> tuple[Tensor, ...]:
        """Return packed codes, the scales of blocks, and the tensor's scale of a weight ``[out,
        in]``.
        """
        cast_weight = quantize(padded(weight, right, 1), right)
        if cast_weight.inner is None:
            raise FormatError(f"{right} has no scales of blocks.")
        scales = cast_weight.inner.to(getattr(torch, right.scale))  # exact: computed in that format
        outer = cast_weight.outer
        if outer is None:
            outer = cast_weight.codes.new_ones(1, 1)
        return packed_pairs(four_bit_codes(cast_weight.codes), 1), scales, outer

    def multiply(self, rows: Tensor) -> Tensor:
        return linear(rows, self.dequantize().to(rows.dtype), self.frozen_bias)

    def dequantize(self) -> Tensor:
        """Return the weight that codes and scales represent: float32 ``[out, in]``."""
        values = four_bit_values(unpacked_pairs(self.weight_codes, 1))
        values = values * spread(self.weight_scales.float(), values.shape) * self.tensor_scale
        return values[: self.out_features, : self.in_features]


def quantize_base(
    model: nn.Module,
    compute: str | Compute = "int8-outlier-codes",
    keep: tuple[str, ...] | None = None,
) -> nn.Module:
    """Store the frozen linear layers of a model with adapters as codes and scales, in place.

    Args:
        model: a ``PeftModel``, or any model whose frozen weights have ``requires_grad=False``;
            float32 or 16 bits.
        compute: its weights' cast is stored. Any compute of
            :func:`narrowgauge.quantize_for_inference`, such as ``int8-outlier-codes``, takes 1 byte
            a parameter; ``nvfp4`` takes 0.56 and ``mxfp4`` 0.53.
        keep: patterns of base model names of layers to leave alone. ``None``: the compute's own
            (the language model's head).
    Returns:
        The model, which trains and saves its adapters as before.
    Raises:
        RecipeError: an unknown compute, or one whose weights cannot be stored; no frozen linear
            layer.
    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8))
        >>> model[0].requires_grad_(False)
        Linear(in_features=64, out_features=64, bias=False)
        >>> quantize_base(model, "nvfp4")[0].weight_codes.shape
        torch.Size([64, 32])
    """
    chosen = get_compute(compute)
    right = chosen.output.right
    patterns = keep
    if patterns is None:
        patterns = chosen.keep
        if patterns:
            patterns = (*patterns, *map(_base_name, roles_of(model)))
    is_packed = right.format == "float4_e2m1fn" and right.block is not None
    kind = PackedLinear if is_packed else FrozenLinear
    if not is_packed:
        inference.with_codes(chosen)
    layers = []
    for name, layer in _frozen(model):
        if not any(map(partial(fnmatch.fnmatchcase, name), patterns)):
            refuse_replaced_forward(name, layer, chosen)
            layers.append(layer)
    if not layers:
        raise RecipeError(
            f"Cannot quantize this {type(model).__name__} because it has no frozen linear layer.",
            "Give the model that get_peft_model returns, or freeze its base with "
            "requires_grad_(False).",
        )
    shared: dict[Tensor, tuple[Tensor, ...]] = {}
    for layer in layers:
        # PEFT adds a transposed update to a Conv1D, even after its weight has come back.
        layer.plain_class = type(layer) if type(layer).__name__ == "Conv1D" else nn.Linear
        inference.quantize_layer(layer, chosen, shared, kind)
    if not is_packed:
        warn_if_emulated(chosen, layers[0].weight_codes.device)
    return model


def dequantize_base(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Turn the codes of :func:`quantize_base` back into weights of a dtype, in place, so that
    adapters can be merged.
    """
    for layer in [module for module in model.modules() if isinstance(module, FrozenLinear)]:
        matrix = layer.dequantize().to(dtype)
        bias = layer._parameters["bias"]
        layer._parameters.clear()
        layer._buffers.clear()
        layer._load_state_dict_pre_hooks.clear()
        layer.__class__ = layer.plain_class  # type: ignore[assignment]
        weight = matrix.t().contiguous() if is_transposed(layer) else matrix
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        layer.register_parameter("bias", bias)
    return model


def _frozen(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the frozen linear layers that belong to no adapter, under the names of the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapters: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            adapters |= set(module.modules()) - set(module.get_base_layer().modules())
    frozen = []
    for path, module in model.named_modules():
        is_base = is_linear(module) and module not in adapters
        if is_base and not cast(Tensor, module.weight).requires_grad:
            frozen.append((_base_name(path), module))
    return frozen


def _base_name(path: str) -> str:
    """Return the name of a module in the base model."""
    return path.removeprefix("base_model.model.").removesuffix(".base_layer")
