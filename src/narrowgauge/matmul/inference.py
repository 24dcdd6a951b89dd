"""Stored codes: linear layers and experts that hold codes and scales instead of a weight, for
inference and under adapters.

A layer with a scale per row or tensor multiplies its input by the stored codes as a compute's
``output`` does. ``int8-outlier-codes`` is LLM.int8() as bitsandbytes does it: input features with a
magnitude of 6 or more multiply the widened codes in 16 bits, all others multiply in int8. Backward
multiplies the gradient by the widened weight, so adapters of earlier layers learn.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import FormatError, RecipeError
from narrowgauge.matmul.experts import PRODUCTS, Projection, take_over
from narrowgauge.matmul.gemm import warn_if_emulated
from narrowgauge.matmul.grouped import grouped
from narrowgauge.matmul.kept_layers import multiplied, roles_of
from narrowgauge.matmul.layer_matmuls import Call, output
from narrowgauge.matmul.linear import (
    Computed,
    NarrowLayer,
    is_linear,
    is_transposed,
    keep_from_fused_kernels,
    matrix_of,
)
from narrowgauge.matmul.operand import Operand, cast_matrix, values_of
from narrowgauge.matmul.swapping import chosen_layers
from narrowgauge.numerics.float32_matmul import bias_gradient, matmul
from narrowgauge.spec.computes import COMPUTES, Cast, Compute, stores_codes
from narrowgauge.spec.parse import get_compute
from narrowgauge.torch_support.model_parts import parts
from narrowgauge.torch_support.torch_names import tree_map_only

NAMES = ("weight_codes", "weight_scales")
"""The buffers of a stored weight ``[out, in]``, the parts of an operand: codes of one byte, and scales of
rows or of the tensor."""
METHOD = "narrowgauge (import narrowgauge.integrations.huggingface)"
"""The name of the quantization in transformers' configs: where it is not registered, transformers'
warning of an unknown type says what to import."""


def codes_of(weight: Tensor, right: Cast) -> Operand:
    """Return a weight ``[out, in]`` in a cast."""
    return cast_matrix(weight, right, 1, getattr(torch, right.format))


# ── the product ───────────────────────────────────────────────────────────────────────────────────


@torch.compiler.allow_in_graph
class _Product(torch.autograd.Function):
    """Multiply rows ``[tokens, in]`` by stored codes: ``[tokens, out]``.

    The gradient of ``x`` is the output's gradient times the widened codes, as of a frozen weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, name: str, *weight: Any) -> Tensor:
        ctx.save_for_backward(*weight)
        return output(x, Operand(*weight), len(weight[0]), bias, Call(name))[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        by_x = matmul(grad, values_of(Operand(*ctx.saved_tensors)).to(grad.dtype))
        by_bias = bias_gradient(grad) if ctx.needs_input_grad[1] else None
        return by_x, by_bias, None, None, None


# ── the layers ────────────────────────────────────────────────────────────────────────────────────


class _Stored(Computed):
    """A layer with codes and scales instead of a weight, which computes a compute's ``output``.

    Attributes:
        dtype: of the weight; a change of the model's dtype changes it and ``bias``.
        shape: of the weight, ``[out, in]`` or ``[experts, out, in]``.
        is_transposed: whether the model's weight was ``[…, in, out]``.
    """

    weight_codes: Tensor
    weight_scales: Tensor
    dtype: torch.dtype
    shape: torch.Size
    is_transposed: bool

    def store(self, weight: Operand, like: Tensor, compute: Compute) -> None:
        """Keep the codes and scales of a weight, and the shape and dtype of ``like``."""
        self.dtype = like.dtype
        self.shape = like.shape
        self.compute_as(compute)
        for name, tensor in zip(NAMES, weight, strict=True):
            self.register_buffer(name, tensor)

    def stand_in(self) -> Tensor:
        """Return a tensor of the model's weight's shape and dtype, without memory."""
        matrix = torch.empty((), dtype=self.dtype, device=self.weight_codes.device)
        matrix = matrix.expand(self.shape)
        return matrix.mT if self.is_transposed else matrix

    def entered(self, x: Tensor) -> Tensor:
        """Return an input in its dtype, or autocast's."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x

    def multiply(self, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply ``[..., in]`` to ``[..., out]``, in the input's dtype, or autocast's."""
        x = self.entered(x)
        if not x.numel():  # no tokens, as of an expert that gets none
            return x.new_zeros(*x.shape[:-1], len(codes)) + x.sum()
        run: Any = _Product.apply
        y = run(x.reshape(-1, x.shape[-1]), bias, self.registered_name, codes, scales)
        return y.view(*x.shape[:-1], len(codes))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def of_tensor(x: Tensor) -> Tensor:
            """Change a bias as asked, and codes and scales but for their dtype."""
            changed = fn(x)
            if x.dtype == changed.dtype or isinstance(x, nn.Parameter):
                return changed
            return x.to(changed.device)

        super()._apply(of_tensor, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Refuse codes of another format: PyTorch would load them as numbers and round them."""
        for name, buffer in self._buffers.items():
            saved = state_dict.get(prefix + name)
            if saved is not None and buffer is not None and saved.dtype != buffer.dtype:
                raise FormatError(
                    f"'{prefix}{name}' was saved in {saved.dtype}, and a layer quantized as "
                    f"'{self.compute.name}' stores {buffer.dtype}.",
                    "Quantize the model in the compute that was saved, then load.",
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


_OF_SHAPE = {
    "__len__", "dim", "element_size", "get_device", "is_complex", "is_floating_point", "numel", "size",
}  # fmt: skip
"""What a weight answers without its values, beside its attributes."""
_CASTS = {"bfloat16", "float", "half", "to", "type"}
_VIEWS = {"T", "detach", "mT", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view"}
_PRODUCTS = (*PRODUCTS, torch.addmm, torch.einsum, torch.mm, Tensor.mm)


class _LazyWeight(Tensor):
    """The weight of a layer that stores codes, or another form of it: widened in each function that
    needs its values.

    A change of such values would change nothing, so it is refused.

    Attributes:
        layer: whose weight it is.
        widen: returns its values.
    """

    layer: QuantizedLinear
    widen: Callable[[], Tensor]
    _is_hf_initialized = True  # transformers draws no values for it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads = []

        def read(weight: _LazyWeight) -> Tensor:
            with torch.inference_mode(False):  # else a change would not be counted
                values = weight.widen()
            reads.append((weight.layer, values, values._version))
            return values

        with torch._C.DisableTorchFunctionSubclass():
            if args and isinstance(args[0], cls):
                answer = args[0]._answer(func, args[1:], kwargs)
                if answer is not NotImplemented:
                    return answer
            args, kwargs = tree_map_only(cls, read, (args, kwargs))
            result = func(*args, **kwargs)
        for layer, values, version in reads:
            if func == Tensor.data.__set__ or values._version != version:  # type: ignore[attr-defined]
                raise RecipeError(
                    "Cannot change the weight of a layer that stores codes and scales.",
                    "Change a copy: weight.clone(). To merge adapters, load the base again in 16 bits; add "
                    "adapters before quantize_for_inference.",
                )
            if func in _PRODUCTS:
                _warn_of_product(layer)
        return result

    def _answer(self, func: Any, rest: Any, options: Any) -> Any:
        """Return what a function of the weight gives without its values, if it does not need them."""
        name = func.__name__
        is_attribute = name == "__get__"
        if is_attribute:
            name = getattr(func.__self__, "__name__", "")
        if name == "data":
            return self
        if name == "data_ptr":
            return self.layer.weight_codes.data_ptr()
        is_scaled = name in ("div_", "mul_") and len(rest) == 1 and not options
        is_whole = self.widen == self.layer.read
        if is_scaled and is_whole and isinstance(rest[0], int | float):
            func(self.layer.weight_scales, *rest)  # as RWKV does in its first pass
            return self
        look: Any = self
        if name in _CASTS:
            look = self.new_empty(())  # a cast of the whole would take memory
        elif not is_attribute and name not in _VIEWS | _OF_SHAPE:
            return NotImplemented
        result = func(look, *rest, **options)
        if not isinstance(result, Tensor):
            return result
        if name in _CASTS:
            result = result.expand(self.shape)
        elif name not in _VIEWS:
            return NotImplemented
        return _lazy(result, self.layer, lambda: func(self.widen(), *rest, **options))


def _lazy(look: Tensor, layer: QuantizedLinear, widen: Callable[[], Tensor]) -> _LazyWeight:
    """Return the weight of a layer in some form, which looks like a tensor without memory."""
    weight = look.as_subclass(_LazyWeight)
    weight.layer = layer
    weight.widen = widen
    return weight


def _warn_of_product(layer: QuantizedLinear) -> None:
    # Without the layer's own name, so that Python shows the line once for all blocks.
    pattern = "*." + layer.layer_name.rpartition(".")[2]
    warnings.warn(
        f"The model's own code multiplies by the weights of '{pattern}', which are stored as codes: "
        "they are widened in each call, and the product is not the one that was trained. Leave such "
        f'layers wide with keep=("{pattern}",).',
        stacklevel=4,
    )


class QuantizedLinear(_Stored, nn.Linear):
    """A linear layer with codes and scales instead of a weight.

    Attributes:
        layer_name: its name in the model.
    """

    layer_name: str

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return a weight that is widened when its values are needed, for code that reads it."""
        if torch.compiler.is_compiling():  # a compiler drops what is not used
            return self.read()
        return _lazy(self.stand_in(), self, self.read)

    def stored_weights(self) -> dict[str, Tensor]:
        """Return a stand-in for the weight."""
        return {"weight": self.stand_in()}

    def read(self) -> Tensor:
        """Return the values of the weight."""
        matrix = self.dequantize().to(self.dtype)
        return matrix.t() if self.is_transposed else matrix

    def dequantize(self) -> Tensor:
        """Return the stored weight, float32 ``[out, in]``."""
        return values_of(Operand(self.weight_codes, self.weight_scales))

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input, self.weight_codes, self.weight_scales, self.bias)


class QuantizedExperts(_Stored, Projection):
    """One projection of all experts: codes ``[experts, out, in]`` and scales."""

    def of_expert(self, x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
        return self.multiply(x, self.weight_codes[expert], self.weight_scales[expert], bias)

    def forward(self, x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        codes, scales = self.weight_codes, self.weight_scales
        return grouped(self.entered(x), codes, offsets, self.registered_name, None, scales)


# ── quantizing ────────────────────────────────────────────────────────────────────────────────────


def quantize_for_inference(
    model: nn.Module,
    compute: str | Compute = "int8-outlier-codes",
    keep: tuple[str, ...] = (),
) -> nn.Module:
    """Replace the weights of a model's linear layers and experts by one-byte codes, in place: 1
    byte a parameter.

    Invariant: a layer's output is the compute's matmul of the cast input and the codes. Eager and
    compiled bits are equal. Loading the ``state_dict`` into a model quantized in the same way gives
    the same bits. Outliers and a per-tensor scale depend on all tokens of a call. In other computes
    tokens are independent.

    Args:
        model: any module with ``nn.Linear``, transformers' ``Conv1D`` or a mixture's experts. With
            adapters of PEFT, only frozen layers are stored: call ``model.train()``, and the adapters
            train. On the meta device, codes are empty: load them with ``load_state_dict(…,
            assign=True)``.
        compute: a compute, or its name, whose weights are 8-bit codes with their own scales:
            ``int8-outlier-codes``, ``int8-row``, ``float8-row``, ``float8-tensor``.
        keep: name patterns (shell wildcards) of layers to leave alone, beside heads, routers and
            adapters.
    Returns:
        The model, in evaluation mode. It computes in the dtype of its input. Codes do not train;
            embeddings, norms, biases and layers that stay wide are as they were.
    Raises:
        RecipeError: an unknown compute, or one without such codes; no linear layer to quantize;
            experts whose module does not say how its weights lie.
    Cost: some float32 copies of one weight at a time. In use, a bfloat16 copy too if the product is emulated.
    Source: Dettmers et al. 2022, LLM.int8() (2208.07339).
    Example:
        >>> model = quantize_for_inference(nn.Sequential(nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)))
        >>> model[0].weight_codes.nbytes, model[0].weight_scales.nbytes
        (262144, 2048)
    """
    compute = get_compute(compute)
    if not stores_codes(compute):
        names = ", ".join(name for name, row in COMPUTES.items() if stores_codes(row))
        raise RecipeError(
            f"Cannot store weights as codes of compute '{compute.name}' because its weights are no "
            "8-bit codes with a scale per row or tensor.",
            f"Use one of {names}.",
        )
    roles = roles_of(model, warns=True)
    has_adapters = bool(parts(model).adapters)
    for name, module in multiplied(model).items() if has_adapters else ():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            roles.setdefault(name, "trained")
    layers = chosen_layers(model, compute, keep, roles)
    _require_storable({name: module for name, (module, _) in layers.items()})
    keep_from_fused_kernels(model)
    device = next(model.parameters()).device
    for name, (module, _) in layers.items():
        if is_linear(module):
            _quantize_linear(name, module, compute)
        else:
            _quantize_experts(module, name.rpartition(".")[2], compute)
    warn_if_emulated(compute, device)
    if "transformers" in sys.modules and hasattr(model, "save_pretrained") and not has_adapters:
        _describe(model, compute, keep)
    return model.eval()


def _describe(model: Any, compute: Compute, keep: tuple[str, ...]) -> None:
    """Let ``save_pretrained`` write what a transformers model's codes are, so that
    ``from_pretrained`` loads them.
    """
    importlib.import_module("narrowgauge.integrations.quantizer")  # by name: it imports this module
    model.config.quantization_config = {
        "quant_method": METHOD, "compute": compute.name, "keep": list(keep),
    }  # fmt: skip


def _require_storable(layers: dict[str, nn.Module]) -> None:
    """Refuse weights that codes cannot stand for."""
    for name, module in layers.items():
        if is_linear(module) and "weight" not in module._parameters:
            raise RecipeError(
                f"Cannot quantize '{name}' because its weight is computed in every call.",
                "Remove its weight norm or parametrization first.",
            )
        if not is_linear(module) and not hasattr(module, "is_transposed"):
            raise RecipeError(
                f"Cannot quantize '{name}' because its {type(module).__name__} does not say, "
                "as is_transposed, whether its weights are [experts, in, out].",
                f'Leave the experts as they are with keep=("*.{name.split(".")[-2]}",).',
            )


def _quantize_experts(owner: Any, name: str, compute: Compute) -> None:
    """Store a module's stack of weights as codes, and let its code multiply by them."""
    weights = owner._parameters[name]
    layer = QuantizedExperts()
    layer.is_transposed = owner.is_transposed
    matrices = weights.detach()
    if layer.is_transposed:
        matrices = matrices.transpose(1, 2)
    operands = [codes_of(matrix, compute.output.right) for matrix in matrices]
    codes, scales = map(list, zip(*operands, strict=True))
    layer.store(Operand(torch.stack(codes), torch.stack(scales)), matrices, compute)
    owner._parameters[name] = None
    take_over(owner, name, layer)


def _quantize_linear(name: str, module: Any, compute: Compute) -> None:
    """Make a linear layer a :class:`QuantizedLinear`.

    It stays the same object, so hooks and references stay valid.
    """
    matrix = matrix_of(module).detach()
    module.is_transposed = is_transposed(module)
    if isinstance(module, NarrowLayer):
        del module.key
    del module.weight
    module.__class__ = QuantizedLinear
    module.layer_name = name
    module.out_features, module.in_features = matrix.shape
    module.store(codes_of(matrix, compute.output.right), matrix, compute)
