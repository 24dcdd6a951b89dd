"""Inference from weights of one byte each: the layer stores codes and scales instead of the weight.

In training, a narrow linear layer casts its weight again after every step, so the 16-bit weight must stay. Without training one
cast is enough: the layer stores the codes and the scales, and multiplies its input by them in the casts and the matmul of a
compute's ``output``. In ``int8-outlier``, LLM.int8(), features of the input with a magnitude of 6 or more multiply in 16 bits
and all others in int8. The weights that those features meet are the int8 ones too, widened, as in the released bitsandbytes; the
paper stored 16-bit columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from narrowgauge.errors import FormatError, RecipeError
from narrowgauge.matmul import layer_matmuls
from narrowgauge.matmul.cast_cache import LastCast
from narrowgauge.matmul.experts import is_experts
from narrowgauge.matmul.gemm import is_native, operand_dtype, warn_if_emulated
from narrowgauge.matmul.layer_matmuls import multiply_slots, outlier_columns
from narrowgauge.matmul.linear import ExactBuffers, is_linear, is_transposed
from narrowgauge.matmul.operand import Operand, cast_matrix
from narrowgauge.matmul.swapping import chooser
from narrowgauge.numerics.devices import require_float64
from narrowgauge.numerics.quantization import blocked, padded, quantize
from narrowgauge.numerics.widening import add_product
from narrowgauge.spec.computes import COMPUTES, Cast, Compute, Product
from narrowgauge.spec.notation import get_compute

EXACT: tuple[str, ...] = ("weight_codes", "weight_scales")


class InferenceBytes(NamedTuple):
    """The bytes of a model's parameters and buffers, each storage counted once.

    Attributes:
        before: with the weights that were quantized, in their original dtype.
        after: as they are now.
    """

    before: int
    after: int


def _cast(x: Tensor, compute: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x ``[tokens, in]`` cast for ``output``: data, outer and inner scales, and which columns hold outliers (empty without)."""
    product = layer_matmuls.REGISTERED[compute].output
    left, is_outlier = product.left, x.new_empty(0, dtype=torch.bool)
    source = x
    if left.outliers:
        is_outlier = outlier_columns(x, left.outliers)
        source = torch.where(is_outlier, 0, x)
    operand = cast_matrix(source, left, 1, operand_dtype(left, product, x.device))
    return *layer_matmuls.unpack(operand, x), is_outlier


def _multiply(
    data: Tensor, outer: Tensor, inner: Tensor, is_outlier: Tensor, x: Tensor, codes: Tensor, scales: Tensor,
    bias: Tensor | None, compute: str,
) -> Tensor:  # fmt: skip
    """``output [tokens, out]`` of the cast input and stored codes ``[out, in]``; outliers come from ``x``."""
    made = layer_matmuls.REGISTERED[compute]
    left, right = layer_matmuls.pack(data, outer, inner), _operand(codes, scales, made.output)
    result = multiply_slots(left, right, made, "output", (x.shape[0], codes.shape[0]), x.dtype, bias)
    has_outliers = made.output.left.outliers
    return _add_outliers(result, x, codes, scales, is_outlier.nonzero().view(-1)) if has_outliers else result


# Opaque to a compiler, which would repeat the cast at each use and break the graph at the number of outliers.
cast_quantized = torch.library.custom_op("narrowgauge::cast_quantized", mutates_args=())(_cast)
multiply_quantized = torch.library.custom_op("narrowgauge::multiply_quantized", mutates_args=())(_multiply)


@torch.library.custom_op("narrowgauge::refuse_gradient", mutates_args=())
def refuse_gradient(grad: Tensor, x_shape: list[int]) -> Tensor:
    """Raise that there is no gradient: an operator, so that compiled code raises only where backward runs."""
    raise RecipeError(
        "backward() reached a linear layer that was quantized for inference and has no gradients.",
        "Train with swap_linears or prepare, and quantize afterwards; or call the model under torch.no_grad().",
    )


@cast_quantized.register_fake
def _(x: Tensor, compute: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = layer_matmuls.REGISTERED[compute]
    dtype = operand_dtype(made.output.left, made.output, x.device)
    operand = layer_matmuls.unpacked_empty(x, made, "output.left", dtype)
    return *operand, x.new_empty(x.shape[1] if made.output.left.outliers else 0, dtype=torch.bool)


@multiply_quantized.register_fake
def _(
    data: Tensor, outer: Tensor, inner: Tensor, is_outlier: Tensor, x: Tensor, codes: Tensor, scales: Tensor,
    bias: Tensor | None, compute: str,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], codes.shape[0]))


@refuse_gradient.register_fake
def _(grad: Tensor, x_shape: list[int]) -> Tensor:
    return grad.new_empty(x_shape)


class _Product(torch.autograd.Function):
    """The product of an input with stored codes; its gradient is refused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, compute: str) -> Tensor:
        ctx.x_shape = list(x.shape)
        y: Tensor = multiply_quantized(*cast_quantized(x, compute), x, codes, scales, bias, compute)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return refuse_gradient(grads[0], ctx.x_shape), None, None, None, None


_with_refusal = cast(Callable[..., Tensor], _Product.apply)
_last_cast = LastCast(cast(Any, _cast))


def multiply_codes(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, compute: str) -> Tensor:
    """The product of rows ``[tokens, in]`` with stored codes, ``[tokens, out]`` in the dtype of ``x``; its backward pass raises.

    It calls no operators where possible: for a single token they cost more than the product. ``compute`` is the name under which
    the operators know the compute.
    """
    needs_grad = x.requires_grad or (bias is not None and bias.requires_grad)
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and needs_grad):
        return _with_refusal(x, codes, scales, bias, compute)
    data, outer, inner, is_outlier = _last_cast(codes, x, compute)
    return _multiply(data, outer, inner, is_outlier, x, codes, scales, bias, compute)


def _operand(codes: Tensor, scales: Tensor, product: Product) -> Operand:
    """Stored codes as the matmul takes them: as they are, or widened with the scales of their blocks."""
    if product.right.block is not None and is_native(product, codes.device):
        return Operand(padded(codes.view(torch.int8), product.right, 1).view(codes.dtype), None, scales)
    return _widened(codes, scales, product.right)


def _widened(codes: Tensor, scales: Tensor, right: Cast) -> Operand:
    if right.block is None:
        return Operand(codes, scales)
    values = padded(codes.to(torch.bfloat16), right, 1)
    blocks = blocked(values, right.block) * scales.to(torch.bfloat16)[:, None, :, None]
    return Operand(blocks.view(values.shape), None)


def _add_outliers(result: Tensor, x: Tensor, codes: Tensor, scales: Tensor, columns: Tensor) -> Tensor:
    if not len(columns):
        return result
    weight = (codes[:, columns] * scales).to(result.dtype)
    return add_product(result, x[:, columns], weight.t())


class QuantizedLinear(ExactBuffers):
    """A linear layer with codes and scales instead of a weight; made by :func:`quantize_for_inference`.

    Its ``state_dict`` holds ``weight_codes``, ``weight_scales`` and, where the layer has one, ``bias``. A change of the model's
    dtype does not change codes and scales.

    Attributes:
        compute: whose ``output`` it computes.
        weight_codes: ``[out, in]``, in the compute's format.
        weight_scales: float32 ``[out, 1]`` or ``[1, 1]``; for blocks float8_e8m0fnu, one for each.
        replaced_bytes: the bytes of the weight that was replaced.
    """

    exact = EXACT
    compute: Compute
    registered_name: str  # by which the operators know the compute
    in_features: int
    out_features: int
    weight_codes: Tensor
    weight_scales: Tensor
    bias: Tensor | None
    replaced_bytes: int

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, in the input's dtype, or autocast's."""
        device = input.device.type
        x = input.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else input
        rows = x.reshape(-1, self.in_features)
        y = multiply_codes(rows, self.weight_codes, self.weight_scales, self.bias, self.registered_name)
        return y.view(*x.shape[:-1], self.out_features)

    def dequantize(self) -> Tensor:
        """The weight that codes and scales represent: float32 ``[out, in]``."""
        operand = _widened(self.weight_codes, self.weight_scales, self.compute.output.right)
        values = operand.data.float() if operand.outer is None else operand.data.float() * operand.outer
        return values[: self.out_features, : self.in_features]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.registered_name = layer_matmuls.register(self.compute)  # another process does not know it yet

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, compute={self.compute.name!r}"


def quantize_for_inference(
    model: nn.Module, compute: str | Compute = "int8-outlier", keep: tuple[str, ...] | None = None
) -> nn.Module:
    """Replace the weights of a model's linear layers by one-byte codes, in place: 1 byte a parameter.

    Invariant: a layer's output is the compute's matmul of the cast input and the codes, the same bits eager and compiled;
    loading the ``state_dict`` into a model quantized in the same way gives the same bits again. Outliers and a per-tensor scale
    depend on all tokens of a call; in the other computes tokens are independent.

    Args:
        model: any module with ``nn.Linear`` or transformers' ``Conv1D`` layers; on the meta device, codes come out empty, to be
            loaded with ``load_state_dict(…, assign=True)``.
        compute: a compute, or its name, whose weights are 8-bit codes with scales of their own: ``int8-outlier``,
            ``int8-row``, ``float8-row``, ``float8-tensor``, ``float8-block``, ``mxfp8``.
        keep: patterns of names (shell wildcards) of layers to leave alone; ``None`` uses the compute's own, which is the
            language model's head.
    Returns:
        The model, in evaluation mode. It computes in the dtype of its input.
    Raises:
        RecipeError: no such compute, or one without such codes; no linear layer to quantize. Later, backward() raises it too.
    Cost: some float32 copies of one weight at a time. In use, where the product is emulated or in blocks, a bfloat16 copy of
        one weight at a time.
    Source: Dettmers et al. 2022, LLM.int8() (2208.07339).
    Example:
        >>> model = nn.Sequential(nn.Linear(512, 512, bias=False, dtype=torch.bfloat16))
        >>> inference_bytes(quantize_for_inference(model))
        InferenceBytes(before=524288, after=264192)
    """
    require_float64(model.parameters())
    made = with_codes(compute)
    choose = chooser(made, keep)
    layers: dict[str, Any] = {
        name: each for name, each in model.named_modules() if is_linear(each) and choose(name) is not None
    }
    _check(model, layers, choose)
    uses = Counter(id(own) for each in model.modules() for own in each._parameters.values())
    uses.subtract(id(each.weight) for each in layers.values())
    shared: dict[int, tuple[Tensor, Tensor]] = {}
    for each in layers.values():
        weight = cast(Tensor, each.weight)
        is_gone = not uses[id(weight)] and id(weight) not in shared
        quantize_layer(each, made, shared, weight.nbytes if is_gone else 0)
    warn_if_emulated(made, next(iter(layers.values())).weight_codes.device)
    return model.eval()


def inference_bytes(model: nn.Module) -> InferenceBytes:
    """The bytes of a model's parameters and buffers, before and after :func:`quantize_for_inference`.

    Args:
        model: any module, quantized or not.
    Returns:
        Equal numbers where nothing was quantized.
    Example:
        >>> inference_bytes(nn.Linear(4, 4))
        InferenceBytes(before=80, after=80)
    """
    codes: dict[int, int] = {}
    everything: dict[int, int] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                everything[tensor.untyped_storage()._cdata] = size = tensor.untyped_storage().nbytes()
                if isinstance(module, QuantizedLinear) and name in EXACT:
                    codes[tensor.untyped_storage()._cdata] = size
    after = sum(everything.values())
    replaced = sum(module.replaced_bytes for module in model.modules() if isinstance(module, QuantizedLinear))
    return InferenceBytes(after - sum(codes.values()) + replaced, after)


def with_codes(compute: str | Compute) -> Compute:
    """The compute of that name, if its weights can be stored as codes of one byte.

    Raises:
        RecipeError: no such compute, or its weights are not such codes.
    """
    made = get_compute(compute)
    if made.output.left.smooth:
        raise RecipeError(
            f"compute '{made.name}' was requested for inference, where each call scales its own input, so that no channel "
            "outgrows a scale and smoothing gains nothing.",
            f"Use '{made.name.partition('+')[0]}'.",
        )
    if not _can_quantize(made):
        names = ", ".join(name for name, each in COMPUTES.items() if _can_quantize(each))
        raise RecipeError(
            f"compute '{made.name}' was requested for inference, and its weights are not 8-bit codes with scales of their "
            f"own ({made.output.right}).",
            f"Use one of {names}.",
        )
    return made


def _can_quantize(compute: Compute) -> bool:
    """Whether a weight can be stored as one byte a value, and an input cast without knowing anything else."""
    right, left = compute.output.right, compute.output.left
    is_one_level = right.scale != "float8_e4m3fn" and right.rotation == "none"
    return right.element.bits == 8 and is_one_level and right.scaling == left.scaling == "current"


def _check(model: nn.Module, layers: dict[str, Any], choose: Callable[[str], Compute | None]) -> None:
    for name, module in model.named_modules():
        if is_experts(module) and choose(name) is not None:
            raise RecipeError(
                f"the experts '{name}' would stay as they are: only single linear layers are quantized for inference.",
                f'Say so with keep = ["lm_head", "*{name[name.rfind(".") :]}"].',
            )
    if not layers:
        raise RecipeError(
            f"{type(model).__name__} has no linear layer to quantize.",
            "Its layers must be nn.Linear or transformers' Conv1D, and not all be kept.",
        )


def quantize_layer(
    module: Any, compute: Compute, shared: dict[int, tuple[Tensor, Tensor]], replaced_bytes: int
) -> None:
    """Make a linear layer a :class:`QuantizedLinear`: the same object, so that hooks and references to it hold.

    Args:
        module: ``nn.Linear`` or transformers' ``Conv1D``; changed in place.
        compute: of :func:`with_codes`.
        shared: codes and scales by the id of the weight that they store; tied layers share one entry.
        replaced_bytes: what :func:`inference_bytes` counts as saved here.
    """
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    matrix = weight.t() if is_transposed(module) else weight
    if id(weight) not in shared:
        shared[id(weight)] = _codes_of(matrix.detach(), compute.output.right)
    for own in (module._parameters, module._buffers, module._non_persistent_buffers_set):
        own.clear()
    module.__class__ = QuantizedLinear
    module.registered_name, module.compute = layer_matmuls.register(compute), compute
    module.replaced_bytes = replaced_bytes
    module.out_features, module.in_features = matrix.shape
    for name, tensor in zip(EXACT, shared[id(weight)], strict=True):
        module.register_buffer(name, tensor)
    module.register_parameter("bias", bias)
    module.register_load_state_dict_pre_hook(_check_formats)


def _codes_of(weight: Tensor, right: Cast) -> tuple[Tensor, Tensor]:
    found = quantize(padded(weight, right, 1), right)
    codes = found.codes[: weight.shape[0], : weight.shape[1]].to(getattr(torch, right.format)).contiguous()
    if found.inner is not None:
        return codes, found.inner.to(torch.float8_e8m0fnu)  # exact: all are powers of two
    assert found.outer is not None
    return codes, found.outer


def _check_formats(module: QuantizedLinear, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Refuse codes of another format: PyTorch would load them as numbers and round them to the layer's format."""
    for name in EXACT:
        given, own = state_dict.get(prefix + name), module.get_buffer(name)
        if given is not None and given.dtype != own.dtype:
            raise FormatError(
                f"'{prefix}{name}' was saved in {given.dtype}, and a layer quantized as '{module.compute.name}' stores "
                f"{own.dtype}.",
                "Quantize the model in the compute that was saved, then load.",
            )
