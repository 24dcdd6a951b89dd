"""Inference from weights of one byte each: the layer stores codes and scales instead of the weight.

In training, a narrow linear layer casts its weight again after every step, so the 16-bit weight must stay. Without training one
cast is enough: the layer stores the codes and the scales, and multiplies its input by them in the casts and the matmul of a
compute's ``output``.

LLM.int8() multiplies features of the input with a magnitude of 6 or more in 16 bits and all others in int8, in two forms.
``int8-outlier`` is the paper's: the weights that those features meet are in 16 bits too. So the layer must know beforehand
which columns may hold outliers (:mod:`narrowgauge.matmul.outlier_search` looks at some batches), and stores their weights in 16
bits beside the codes. Where another column holds an outlier, its weights come from the codes, and that is counted.
``int8-outlier-codes`` is bitsandbytes': the weights are always those of the codes, widened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from narrowgauge.errors import FormatError, RecipeError, suggestion
from narrowgauge.matmul import layer_matmuls
from narrowgauge.matmul.cast_cache import LastCast
from narrowgauge.matmul.experts import NARROW, PROJECTIONS, groups_of, install, is_experts, require_reachable
from narrowgauge.matmul.gemm import is_native, operand_dtype, warn_if_emulated
from narrowgauge.matmul.layer_matmuls import multiply_slots, outlier_columns, widened_columns
from narrowgauge.matmul.linear import ExactBuffers, is_linear, is_transposed
from narrowgauge.matmul.operand import Operand, cast_matrix
from narrowgauge.matmul.swapping import chooser
from narrowgauge.numerics.devices import require_float64
from narrowgauge.numerics.quantization import blocked, padded, quantize
from narrowgauge.numerics.widening import add_product
from narrowgauge.spec.computes import COMPUTES, Cast, Compute, Product, keeps_outlier_weights, stores_codes
from narrowgauge.spec.notation import get_compute

EXACT: tuple[str, ...] = ("weight_codes", "weight_scales")
KEPT: tuple[str, ...] = ("outlier_columns", "outlier_weights")

OutlierColumns = Mapping[str, Sequence[int]] | Literal["all"]
"""The columns whose weights are kept in 16 bits, by the name of the layer; or all columns of all layers."""


class Kept(NamedTuple):
    """What a layer stores in 16 bits beside its codes.

    Attributes:
        columns: int32 ``[kept]``, ascending: of the input.
        weights: ``[out, kept]``: theirs, in 16 bits.
        missed: int64 ``[]``: outlier columns that were not among them, over all calls.
    """

    columns: Tensor
    weights: Tensor
    missed: Tensor


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
    bias: Tensor | None, compute: str, columns: Tensor | None = None, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``output [tokens, out]`` of the cast input and stored codes ``[out, in]``; outliers come from ``x``.

    ``columns`` and ``weights`` are those of :class:`Kept`.
    """
    made = layer_matmuls.REGISTERED[compute]
    left, right = layer_matmuls.pack(data, outer, inner), _operand(codes, scales, made.output)
    result = multiply_slots(left, right, made, "output", (x.shape[0], codes.shape[0]), x.dtype, bias)
    if not made.output.left.outliers:
        return result
    found = is_outlier.nonzero().view(-1)
    if not len(found):
        return result
    thin = _weights_of(found, codes, scales, columns, weights).to(result.dtype)
    return add_product(result, x[:, found], thin.t())


def _weights_of(found: Tensor, codes: Tensor, scales: Tensor, columns: Tensor | None, weights: Tensor | None) -> Tensor:
    """The weights of the columns ``found``, ascending, in float32: those kept in 16 bits, and of the others the codes'."""
    thin = widened_columns(Operand(codes, scales), found)
    if columns is None or weights is None or not len(columns):
        return thin
    place = torch.searchsorted(columns, found.to(columns.dtype)).clamp_(max=len(columns) - 1)
    is_kept = columns[place] == found
    thin[:, is_kept] = weights[:, place[is_kept]].float()
    return thin


def _missed(is_outlier: Tensor, columns: Tensor) -> Tensor:
    """How many outlier columns are not among ``columns``."""
    return is_outlier.sum() - is_outlier[columns].sum()


# Opaque to a compiler, which would repeat the cast at each use and break the graph at the number of outliers.
cast_quantized = torch.library.custom_op("narrowgauge::cast_quantized", mutates_args=())(_cast)
multiply_quantized = torch.library.custom_op("narrowgauge::multiply_quantized", mutates_args=())(_multiply)


@torch.library.custom_op("narrowgauge::count_missed_outliers", mutates_args=("missed",))
def count_missed_outliers(missed: Tensor, x: Tensor, columns: Tensor, compute: str) -> None:
    """Add to ``missed`` the number of outlier columns of ``x`` that are not among ``columns``."""
    threshold = layer_matmuls.REGISTERED[compute].output.left.outliers
    missed.add_(_missed(outlier_columns(x, threshold), columns))


@count_missed_outliers.register_fake
def _(missed: Tensor, x: Tensor, columns: Tensor, compute: str) -> None:
    return None


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
    bias: Tensor | None, compute: str, columns: Tensor | None = None, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], codes.shape[0]))


@refuse_gradient.register_fake
def _(grad: Tensor, x_shape: list[int]) -> Tensor:
    return grad.new_empty(x_shape)


class _Product(torch.autograd.Function):
    """The product of an input with stored codes; its gradient is refused."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, compute: str, columns: Tensor | None,
        weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.x_shape = list(x.shape)
        y: Tensor = multiply_quantized(*cast_quantized(x, compute), x, codes, scales, bias, compute, columns, weights)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return refuse_gradient(grads[0], ctx.x_shape), None, None, None, None, None, None


_with_refusal = cast(Callable[..., Tensor], _Product.apply)
_last_cast = LastCast(cast(Any, _cast))


def multiply_codes(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, compute: str, kept: Kept | None = None
) -> Tensor:
    """The product of rows ``[tokens, in]`` with stored codes, ``[tokens, out]`` in the dtype of ``x``; its backward pass raises.

    It calls no operators where possible: for a single token they cost more than the product. ``compute`` is the name under which
    the operators know the compute; outliers that ``kept`` lacks are counted in it.
    """
    columns, weights, missed = (None, None, None) if kept is None else kept
    needs_grad = x.requires_grad or (bias is not None and bias.requires_grad)
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and needs_grad):
        if columns is not None:
            count_missed_outliers(missed, x.detach(), columns, compute)
        return _with_refusal(x, codes, scales, bias, compute, columns, weights)
    data, outer, inner, is_outlier = _last_cast(codes, x, compute)
    if columns is not None and missed is not None:
        missed.add_(_missed(is_outlier, columns))
    return _multiply(data, outer, inner, is_outlier, x, codes, scales, bias, compute, columns, weights)


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


class StoredCodes(ExactBuffers):
    """What a linear layer and the experts of a mixture store instead of weights."""

    exact = (*EXACT, *KEPT)
    compute: Compute
    registered_name: str  # by which the operators know the compute
    weight_codes: Tensor
    weight_scales: Tensor
    outlier_columns: Tensor | None
    outlier_weights: Tensor | None
    missed: Tensor | None
    replaced_bytes: int

    def store(self, codes: Tensor, scales: Tensor, kept: Kept | None, compute: Compute, replaced_bytes: int) -> None:
        """Take these codes of a compute, and what is kept in 16 bits beside them."""
        self.registered_name, self.compute = layer_matmuls.register(compute), compute
        self.replaced_bytes = replaced_bytes
        for name, tensor in zip(EXACT, (codes, scales), strict=True):
            self.register_buffer(name, tensor)
        for name, part in zip((*KEPT, "missed"), kept or (None, None, None), strict=True):
            self.register_buffer(name, part, persistent=name != "missed")
        self.register_load_state_dict_pre_hook(_check_formats)  # type: ignore[no-untyped-call]

    @property
    def kept(self) -> Kept | None:
        """What is stored in 16 bits beside the codes; ``None`` in a compute that uses none."""
        columns, weights, missed = self.outlier_columns, self.outlier_weights, self.missed
        return None if columns is None or weights is None or missed is None else Kept(columns, weights, missed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in (*KEPT, "missed"):
            state["_buffers"].setdefault(name, None)  # a layer that an earlier version pickled
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.registered_name = layer_matmuls.register(self.compute)  # another process does not know it yet


class QuantizedLinear(StoredCodes):
    """A linear layer with codes and scales instead of a weight; made by :func:`quantize_for_inference`.

    Its ``state_dict`` holds ``weight_codes``, ``weight_scales`` and, where the layer has them, ``outlier_columns`` with
    ``outlier_weights``, and ``bias``. A change of the model's dtype changes none of these but ``bias``.

    Attributes:
        compute: whose ``output`` it computes.
        weight_codes: ``[out, in]``, in the compute's format.
        weight_scales: float32 ``[out, 1]`` or ``[1, 1]``; for blocks float8_e8m0fnu, one for each.
        outlier_columns: int32 ``[kept]``: the columns whose weights are kept in 16 bits too, ascending; ``None`` in a compute
            that uses none.
        outlier_weights: ``[out, kept]``, in 16 bits.
        missed: int64 ``[]``: see :class:`Kept`.
        replaced_bytes: the bytes of the weight that was replaced.
    """

    in_features: int
    out_features: int
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, in the input's dtype, or autocast's."""
        device = input.device.type
        x = input.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else input
        rows = x.reshape(-1, self.in_features)
        y = multiply_codes(rows, self.weight_codes, self.weight_scales, self.bias, self.registered_name, self.kept)
        return y.view(*x.shape[:-1], self.out_features)

    def dequantize(self) -> Tensor:
        """The weight that is stored: float32 ``[out, in]``; of columns that are kept in 16 bits these, of others the codes'."""
        return _dequantized(self.weight_codes, self.weight_scales, self.kept, self.compute)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, compute={self.compute.name!r}"


def _dequantized(codes: Tensor, scales: Tensor, kept: Kept | None, compute: Compute) -> Tensor:
    operand = _widened(codes, scales, compute.output.right)
    values = operand.data.float() if operand.outer is None else operand.data.float() * operand.outer
    values = values[: codes.shape[0], : codes.shape[1]]
    if kept is not None:
        values[:, kept.columns] = kept.weights.float()
    return values


def quantize_for_inference(
    model: nn.Module,
    compute: str | Compute = "int8-outlier-codes",
    keep: tuple[str, ...] | None = None,
    outlier_columns: OutlierColumns | None = None,
) -> nn.Module:
    """Replace the weights of a model's linear layers and experts by one-byte codes, in place: 1 byte a parameter.

    Invariant: a layer's output is the compute's matmul of the cast input and the codes, the same bits eager and compiled;
    loading the ``state_dict`` into a model quantized in the same way gives the same bits again. Outliers and a per-tensor scale
    depend on all tokens of a call; in the other computes tokens are independent.

    ``int8-outlier`` also stores the weights of ``outlier_columns`` in 16 bits, at ``2 * out + 4`` bytes a column. An outlier in
    another column multiplies the widened codes, and :func:`missed_outliers` counts it.

    Args:
        model: any module with ``nn.Linear``, transformers' ``Conv1D`` or its mixtures' experts; on the meta device, codes are
            empty, to be loaded with ``load_state_dict(…, assign=True)``.
        compute: a compute, or its name, whose weights are 8-bit codes with scales of their own: ``int8-outlier-codes``,
            ``int8-outlier``, ``int8-row``, ``float8-row``, ``float8-tensor``, ``float8-block``, ``mxfp8``.
        keep: patterns of names (shell wildcards) of layers to leave alone; ``None`` uses the compute's own, which is the
            language model's head.
        outlier_columns: required by ``int8-outlier`` and refused by others: columns by layer, as
            :func:`find_outlier_columns` returns them (layers that it lacks keep none), or ``"all"``. On the meta device they may
            be left out: the ``state_dict`` that is loaded says them.
    Returns:
        The model, in evaluation mode. It computes in the dtype of its input.
    Raises:
        RecipeError: no such compute, or one without such codes; no linear layer to quantize; outlier columns that are missing,
            useless, or not the layers'. Later, backward() raises it too.
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
    experts = _chosen_experts(model, choose)
    weights = {name: matrix_of(each).detach() for name, each in layers.items()}
    weights |= {f"{name}.{own}": stack for name, found in experts.items() for own, stack in _stacks(*found).items()}
    if not weights:
        raise RecipeError(
            f"{type(model).__name__} has no linear layer to quantize.",
            "Its layers must be nn.Linear or transformers' Conv1D, and not all be kept.",
        )
    columns = checked_columns(made, weights, outlier_columns)
    uses = Counter(id(own) for each in model.modules() for own in each._parameters.values())
    uses.subtract(id(each.weight) for each in layers.values())
    shared: dict[int, tuple[Tensor, Tensor]] = {}
    for name, each in layers.items():
        weight = cast(Tensor, each.weight)
        is_gone = not uses[id(weight)] and id(weight) not in shared
        quantize_layer(each, made, shared, weight.nbytes if is_gone else 0, columns[name])
    for name, (module, chosen) in experts.items():
        _quantize_experts(module, made, chosen, {own: columns[f"{name}.{own}"] for own in chosen})
    warn_if_emulated(made, next(iter(weights.values())).device)
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
                if isinstance(module, StoredCodes) and name in (*EXACT, *KEPT, "missed"):
                    codes[tensor.untyped_storage()._cdata] = size
    after = sum(everything.values())
    replaced = sum(module.replaced_bytes for module in model.modules() if isinstance(module, StoredCodes))
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
    if not stores_codes(made):
        names = ", ".join(name for name, each in COMPUTES.items() if stores_codes(each))
        raise RecipeError(
            f"compute '{made.name}' was requested for inference, and its weights are not 8-bit codes with scales of their "
            f"own ({made.output.right}).",
            f"Use one of {names}.",
        )
    return made


def checked_columns(
    compute: Compute, layers: Mapping[str, Tensor], given: OutlierColumns | None
) -> dict[str, Sequence[int] | None]:
    """The columns to keep of each layer, whose weights are ``[…, out, in]``: ``None`` where the compute keeps none."""
    if not keeps_outlier_weights(compute):
        if given is not None:
            raise RecipeError(
                f"outlier columns were given for compute '{compute.name}', which stores no weights in 16 bits.",
                "Leave them out, or use int8-outlier.",
            )
        return dict.fromkeys(layers)
    sides = {name: weight.shape[-1] for name, weight in layers.items()}
    if given is None:
        if all(weight.is_meta for weight in layers.values()):
            return dict.fromkeys(layers, ())
        raise RecipeError(
            f"compute '{compute.name}' keeps the weights of outlier columns in 16 bits, and no columns were given.",
            "Pass outlier_columns=find_outlier_columns(model, batches), or use int8-outlier-codes, which stores codes alone.",
        )
    if isinstance(given, str):
        if given != "all":
            raise RecipeError(
                f"outlier_columns = {given!r} was given.", "It is 'all', or columns by the name of the layer."
            )
        return {name: range(side) for name, side in sides.items()}
    for name, columns in given.items():
        if name not in layers:
            near = suggestion(name, list(layers))
            raise RecipeError(
                f"outlier columns were given for '{name}', which is not quantized.", near or "Leave it out."
            )
        if wrong := [column for column in columns if not 0 <= column < sides[name]]:
            raise RecipeError(
                f"'{name}' has {sides[name]} columns, and outlier column {wrong[0]} was given.", "They count from 0."
            )
    return {name: sorted(set(given.get(name, ()))) for name in layers}


def quantize_layer(
    module: Any,
    compute: Compute,
    shared: dict[int, tuple[Tensor, Tensor]],
    replaced_bytes: int,
    columns: Sequence[int] | None = None,
) -> None:
    """Make a linear layer a :class:`QuantizedLinear`: the same object, so that hooks and references to it hold.

    Args:
        module: ``nn.Linear`` or transformers' ``Conv1D``; changed in place.
        compute: of :func:`with_codes`.
        shared: codes and scales by the id of the weight that they store; tied layers share one entry.
        replaced_bytes: what :func:`inference_bytes` counts as saved here.
        columns: ascending, of those whose weights are kept in 16 bits; ``None`` where the compute keeps none.
    """
    weight, bias, matrix = module._parameters["weight"], module._parameters["bias"], matrix_of(module)
    if id(weight) not in shared:
        shared[id(weight)] = _codes_of(matrix.detach(), compute.output.right)
    kept = None if columns is None else _kept(matrix.detach(), columns)
    for own in (module._parameters, module._buffers, module._non_persistent_buffers_set):
        own.clear()
    module.__class__ = QuantizedLinear
    module.out_features, module.in_features = matrix.shape
    module.store(*shared[id(weight)], kept, compute, replaced_bytes)
    module.register_parameter("bias", bias)


def _codes_of(weight: Tensor, right: Cast) -> tuple[Tensor, Tensor]:
    found = quantize(padded(weight, right, 1), right)
    codes = found.codes[: weight.shape[0], : weight.shape[1]].to(getattr(torch, right.format)).contiguous()
    if found.inner is not None:
        return codes, found.inner.to(torch.float8_e8m0fnu)  # exact: all are powers of two
    assert found.outer is not None
    return codes, found.outer


def _kept(weight: Tensor, columns: Sequence[int]) -> Kept:
    """The weights of some columns in 16 bits: as they are, or of a float32 weight in bfloat16."""
    with torch.inference_mode(False):  # a tensor of inference mode could not be counted in outside it
        index = torch.tensor(list(columns), dtype=torch.int32, device=weight.device)
        dtype = weight.dtype if weight.element_size() == 2 else torch.bfloat16
        missed = torch.zeros((), dtype=torch.int64, device=weight.device)
        return Kept(index, weight[..., index].to(dtype).contiguous(), missed)


def matrix_of(module: Any) -> Tensor:
    """The weight ``[out, in]`` of a linear layer."""
    weight: Tensor = module.weight
    return weight.t() if is_transposed(module) else weight


# ── experts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class QuantizedExperts(StoredCodes):
    """One projection of all experts of a mixture, with codes and scales instead of the weights.

    Attributes:
        weight_codes: ``[experts, out, in]``, and so on, as of :class:`QuantizedLinear`; ``outlier_columns`` are shared.
    """

    def __init__(self, weights: Tensor, compute: Compute, columns: Sequence[int] | None) -> None:
        super().__init__()
        found = [_codes_of(weight, compute.output.right) for weight in weights.detach()]
        codes, scales = (torch.stack(parts) for parts in zip(*found, strict=True))
        self.store(
            codes, scales, None if columns is None else _kept(weights.detach(), columns), compute, weights.nbytes
        )

    def forward(self, x: Tensor, weights: None, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
        """``[tokens, in]``, sorted by expert, to ``[tokens, out]``; zero for tokens without an expert."""
        result = x.new_zeros((x.shape[0], self.weight_codes.shape[1]))
        for expert, tokens in groups_of(offsets):
            kept = self.kept
            result[tokens] = multiply_codes(
                x[tokens], self.weight_codes[expert], self.weight_scales[expert], None if bias is None else bias[expert],
                self.registered_name, None if kept is None else kept._replace(weights=kept.weights[expert]),
            )  # fmt: skip
        return result

    def dequantize(self) -> Tensor:
        """The weights that are stored: float32 ``[experts, out, in]``."""
        kept = self.kept
        each = [kept and kept._replace(weights=kept.weights[expert]) for expert in range(len(self.weight_codes))]
        parts = zip(self.weight_codes, self.weight_scales, each, strict=True)
        return torch.stack([_dequantized(*part, self.compute) for part in parts])

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.weight_codes.shape))}, compute={self.compute.name!r}"


def _chosen_experts(model: nn.Module, choose: Callable[[str], Compute | None]) -> dict[str, tuple[Any, list[str]]]:
    """The modules of experts by name, each with the projections to quantize; none of a module that is kept."""
    found: dict[str, tuple[Any, list[str]]] = {}
    for name, module in model.named_modules():
        if is_experts(module) and choose(name) is not None:
            own = [each for each in PROJECTIONS if each in module._parameters and choose(f"{name}.{each}") is not None]
            if own:
                require_reachable(name, module)
                found[name] = module, own
    return found


def _stacks(module: Any, chosen: Sequence[str]) -> dict[str, Tensor]:
    """The weights of projections, ``[experts, out, in]``."""
    given = {own: getattr(module, own).detach() for own in chosen}
    return {own: each.transpose(1, 2) if module.is_transposed else each for own, each in given.items()}


def _quantize_experts(
    module: Any, compute: Compute, chosen: Sequence[str], columns: Mapping[str, Sequence[int] | None]
) -> None:
    """Let experts multiply the codes of the chosen projections, in place; the weights go."""
    layers = {own: QuantizedExperts(each, compute, columns[own]) for own, each in _stacks(module, chosen).items()}
    for own in chosen:
        del module._parameters[own]
    before = dict(module._modules[NARROW].items()) if NARROW in module._modules else {}
    install(module, {**before, **layers})


def _check_formats(module: StoredCodes, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Refuse codes of another format: PyTorch would load them as numbers and round them to the layer's format.

    How many columns were kept in 16 bits is what was saved.
    """
    columns = state_dict.get(prefix + KEPT[0])
    if columns is not None and module.missed is not None and module.missed.is_meta:
        module.missed = torch.zeros_like(module.missed, device=columns.device)
    for name in module.exact:
        given, own = state_dict.get(prefix + name), module._buffers[name]
        if own is None:
            continue
        if given is not None and name in KEPT:
            own = module._buffers[name] = own.new_empty(
                given.shape, dtype=own.dtype if name == KEPT[0] else given.dtype
            )
        if given is not None and given.dtype != own.dtype:
            raise FormatError(
                f"'{prefix}{name}' was saved in {given.dtype}, and a layer quantized as '{module.compute.name}' stores "
                f"{own.dtype}.",
                "Quantize the model in the compute that was saved, then load.",
            )
