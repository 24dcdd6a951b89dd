"""Inference from one-byte weights: the layer stores codes and scales instead of the weight.

In training, a narrow linear layer casts its weight after every step, so the 16-bit weight must stay. Without training one cast
is enough. The layer stores codes and scales. It multiplies its input by them as a compute's ``output`` does.

LLM.int8() multiplies input features with a magnitude of 6 or more in 16 bits, and all others in int8. It has two forms. The
paper's form, ``int8-outlier``, uses 16-bit weights for those features too. So the layer must know beforehand which columns may
hold outliers (:func:`find_outlier_columns` looks at some batches). It stores their weights in 16 bits beside the codes. If
another column holds an outlier, its weights come from the codes, and it is counted. The form of bitsandbytes,
``int8-outlier-codes``, always uses the widened codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from narrowgauge.errors import FormatError, RecipeError, suggestion
from narrowgauge.machine import require_float64
from narrowgauge.matmul.experts import (
    NARROW,
    PROJECTIONS,
    grouped_layers,
    grouped_layers_of,
    groups_of,
    install,
    is_experts,
    require_reachable,
    uninstall,
)
from narrowgauge.matmul.gemm import is_native, warn_if_emulated
from narrowgauge.matmul.layer_matmuls import (
    REGISTERED,
    add_outliers,
    cast_to_slot,
    multiply_slots,
    outlier_columns,
    register,
)
from narrowgauge.matmul.linear import ExactBuffers, is_linear, matrix_of
from narrowgauge.matmul.operand import Operand, block_values
from narrowgauge.matmul.swapping import chooser
from narrowgauge.numerics.quantization import padded, quantize
from narrowgauge.spec.computes import COMPUTES, Cast, Compute, Product, keeps_outlier_weights, stores_codes
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.notation import get_compute

EXACT: tuple[str, ...] = ("weight_codes", "weight_scales")
KEPT: tuple[str, ...] = ("outlier_columns", "outlier_weights")

OutlierColumns = Mapping[str, Sequence[int]] | Literal["all"]
"""The columns whose weights are kept in 16 bits, by the name of the layer; or all columns of all layers."""


# ── the product ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Kept(NamedTuple):
    """16-bit weights that a layer stores beside its codes.

    Attributes:
        columns: int32 ``[kept]``, ascending: columns of the input.
        weights: ``[out, kept]``: the 16-bit weights of these columns.
        missed: int64 ``[]``: count of outlier columns outside ``columns``, over all calls.
    """

    columns: Tensor
    weights: Tensor
    missed: Tensor


def multiply_codes(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, compute: str, wide: Kept | None = None
) -> Tensor:
    """Multiply rows ``[tokens, in]`` by stored codes: ``[tokens, out]`` in the dtype of ``x``. Backward raises.

    ``compute`` is the name of a registered compute. ``wide.missed`` counts outliers outside ``wide``.
    """
    return cast(Tensor, _apply(x, codes, scales, bias, compute, *(wide or (None, None, None))))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, compute: str, columns: Tensor | None,
        weights: Tensor | None, missed: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.x_shape = list(x.shape)
        registered = REGISTERED[compute]
        lhs, rhs = cast_to_slot(x, registered, "output.left"), _operand(codes, scales, registered.output)
        y = multiply_slots(lhs, rhs, registered, "output", (x.shape[0], codes.shape[0]), x.dtype, bias)
        if not registered.output.left.outliers:
            return y
        wide = None if columns is None or weights is None else (columns, weights)
        if columns is not None and missed is not None:
            is_outlier = outlier_columns(x, registered.output.left.outliers)
            missed.add_(is_outlier.sum() - is_outlier[columns].sum())
        return add_outliers(y, x, registered, None, rhs, wide)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return refuse_gradient(grads[0], ctx.x_shape), *[None] * 7


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _apply(*arguments: Any) -> Tensor:
    return cast(Callable[..., Tensor], _Product.apply)(*arguments)


@torch.library.custom_op("narrowgauge::refuse_gradient", mutates_args=())
def refuse_gradient(grad: Tensor, x_shape: list[int]) -> Tensor:
    """Raise that there is no gradient. As an operator, it makes compiled code raise only if backward runs."""
    raise RecipeError(
        "backward() reached a linear layer that was quantized for inference and has no gradients.",
        "Train with swap_linears or prepare, and quantize afterwards; or call the model under torch.no_grad().",
    )


@refuse_gradient.register_fake
def _(grad: Tensor, x_shape: list[int]) -> Tensor:
    return grad.new_empty(x_shape)


def _operand(codes: Tensor, scales: Tensor, product: Product) -> Operand:
    """Return stored codes as the matmul takes them: unchanged, or widened with the scales of their blocks."""
    if product.right.block is not None and is_native(product, codes.device):
        return _in_blocks(codes, scales, product.right)
    return _widened(codes, scales, product.right)


def _widened(codes: Tensor, scales: Tensor, right: Cast) -> Operand:
    return Operand(codes, scales) if right.block is None else Operand(block_values(_in_blocks(codes, scales, right), 1))


def _in_blocks(codes: Tensor, scales: Tensor, right: Cast) -> Operand:
    return Operand(padded(codes.view(torch.int8), right, 1).view(codes.dtype), None, scales)


# ── the layers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class StoredCodes(ExactBuffers):
    """Codes and scales that a linear layer or the experts of a mixture store instead of weights.

    Attributes:
        compute: the layer computes its ``output``.
        weight_codes: ``[out, in]``, for experts ``[experts, out, in]``, in the compute's format.
        weight_scales: float32 ``[out, 1]`` or ``[1, 1]``; for blocks one float8_e8m0fnu each; for experts stacked.
        outlier_columns, outlier_weights, missed: see :class:`Kept`; ``None`` if the compute uses none.
    """

    exact = (*EXACT, *KEPT)
    compute: Compute
    registered_name: str  # the compute's name in graphs
    weight_codes: Tensor
    weight_scales: Tensor
    outlier_columns: Tensor | None
    outlier_weights: Tensor | None
    missed: Tensor | None

    def store(self, codes: Tensor, scales: Tensor, wide: Kept | None, compute: Compute) -> None:
        """Store a compute's codes, and the 16-bit weights beside them."""
        self.registered_name, self.compute = register(compute), compute
        for name, tensor in zip(EXACT, (codes, scales), strict=True):
            self.register_buffer(name, tensor)
        for name, part in zip((*KEPT, "missed"), wide or (None, None, None), strict=True):
            self.register_buffer(name, part, persistent=name != "missed")
        self.register_load_state_dict_pre_hook(_check_formats)  # type: ignore[no-untyped-call]

    @property
    def kept(self) -> Kept | None:
        """Return the 16-bit weights stored beside the codes."""
        columns, weights, missed = self.outlier_columns, self.outlier_weights, self.missed
        return None if columns is None or weights is None or missed is None else Kept(columns, weights, missed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.registered_name = register(self.compute)  # another process does not know it yet


class QuantizedLinear(StoredCodes):
    """A linear layer with codes and scales instead of a weight; made by :func:`quantize_for_inference`.

    Its ``state_dict`` holds ``weight_codes``, ``weight_scales``, ``bias`` and, if the layer has them, ``outlier_columns`` with
    ``outlier_weights``. A change of the model's dtype changes only ``bias``.
    """

    in_features: int
    out_features: int
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``[..., in]`` to ``[..., out]``, in the input's dtype, or autocast's."""
        device = input.device.type
        x = input.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else input
        rows = x.reshape(-1, self.in_features)
        y = multiply_codes(rows, self.weight_codes, self.weight_scales, self.bias, self.registered_name, self.kept)
        return y.view(*x.shape[:-1], self.out_features)

    def dequantize(self) -> Tensor:
        """Return the stored weight, float32 ``[out, in]``. Columns kept in 16 bits have their 16-bit weights."""
        return _dequantized(self.weight_codes, self.weight_scales, self.kept, self.compute)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, compute={self.compute.name!r}"


class QuantizedExperts(StoredCodes):
    """One projection of all experts of a mixture, with codes and scales instead of weights. Experts share outlier columns."""

    def __init__(self, weights: Tensor, compute: Compute, columns: Sequence[int] | None) -> None:
        super().__init__()
        stored = [_codes_of(weight, compute.output.right) for weight in weights.detach()]
        codes, scales = (torch.stack(parts) for parts in zip(*stored, strict=True))
        self.store(codes, scales, None if columns is None else _kept(weights.detach(), columns), compute)

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor, Kept | None]:
        """Return codes, scales and kept weights of one expert."""
        wide = self.kept
        wide = None if wide is None else wide._replace(weights=wide.weights[expert])
        return self.weight_codes[expert], self.weight_scales[expert], wide

    def forward(self, x: Tensor, weights: None, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``[tokens, in]``, sorted by expert, to ``[tokens, out]``: zero for tokens without an expert."""
        result = x.new_zeros((x.shape[0], self.weight_codes.shape[1]))
        for expert, tokens in groups_of(offsets):
            codes, scales, wide = self.of_expert(expert)
            own_bias = None if bias is None else bias[expert]
            result[tokens] = multiply_codes(x[tokens], codes, scales, own_bias, self.registered_name, wide)
        return result

    def dequantize(self) -> Tensor:
        """Return the stored weights, float32 ``[experts, out, in]``."""
        experts = range(len(self.weight_codes))
        return torch.stack([_dequantized(*self.of_expert(expert), self.compute) for expert in experts])

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.weight_codes.shape))}, compute={self.compute.name!r}"


def _dequantized(codes: Tensor, scales: Tensor, wide: Kept | None, compute: Compute) -> Tensor:
    operand = _widened(codes, scales, compute.output.right)
    values = operand.data.float() if operand.outer is None else operand.data.float() * operand.outer
    values = values[: codes.shape[0], : codes.shape[1]]
    if wide is not None:
        values[:, wide.columns] = wide.weights.float()
    return values


def _check_formats(module: StoredCodes, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Refuse codes of another format: PyTorch would load them as numbers and round them to the layer's format.

    The saved state determines the number of columns kept in 16 bits.
    """
    columns = state_dict.get(prefix + KEPT[0])
    if columns is not None and module.missed is not None and module.missed.is_meta:
        module.missed = torch.zeros_like(module.missed, device=columns.device)
    for name in module.exact:
        saved, buffer = state_dict.get(prefix + name), module._buffers[name]
        if buffer is None or saved is None:
            continue
        if name in KEPT:
            dtype = buffer.dtype if name == KEPT[0] else saved.dtype
            buffer = module._buffers[name] = buffer.new_empty(saved.shape, dtype=dtype)
        if saved.dtype != buffer.dtype:
            raise FormatError(
                f"'{prefix}{name}' was saved in {saved.dtype}, and a layer quantized as '{module.compute.name}' stores "
                f"{buffer.dtype}.",
                "Quantize the model in the compute that was saved, then load.",
            )


# ── quantizing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def quantize_for_inference(
    model: nn.Module,
    compute: str | Compute = "int8-outlier-codes",
    keep: tuple[str, ...] | None = None,
    outlier_columns: OutlierColumns | None = None,
) -> nn.Module:
    """Replace the weights of a model's linear layers and experts by one-byte codes, in place: 1 byte a parameter.

    Invariant: a layer's output is the compute's matmul of the cast input and the codes. Eager and compiled bits are equal.
    Loading the ``state_dict`` into a model quantized in the same way gives the same bits. Outliers and a per-tensor scale
    depend on all tokens of a call. In other computes tokens are independent.

    ``int8-outlier`` also stores the weights of ``outlier_columns`` in 16 bits, ``2 * out + 4`` bytes a column. An outlier in
    another column multiplies the widened codes, and :func:`missed_outliers` counts it.

    Args:
        model: any module with ``nn.Linear``, transformers' ``Conv1D`` or its mixtures' experts. On the meta device, codes are
            empty: load them with ``load_state_dict(…, assign=True)``.
        compute: a compute, or its name, whose weights are 8-bit codes with their own scales: ``int8-outlier-codes``,
            ``int8-outlier``, ``int8-row``, ``float8-row``, ``float8-tensor``, ``float8-block``, ``mxfp8``.
        keep: name patterns (shell wildcards) of layers to leave alone. ``None``: the compute's own (the language model's head).
        outlier_columns: required by ``int8-outlier``, refused by others. Columns by layer, as
            :func:`find_outlier_columns` returns them (missing layers keep none), or ``"all"``. Optional on the meta device,
            where the loaded ``state_dict`` decides.
    Returns:
        The model, in evaluation mode. It computes in the dtype of its input.
    Raises:
        RecipeError: an unknown compute, or one without such codes; no linear layer to quantize; outlier columns that are
            missing, useless, or not the layers'. Later, backward() raises it too.
    Cost: some float32 copies of one weight at a time. In use, a bfloat16 copy too if the product is emulated or in blocks.
    Source: Dettmers et al. 2022, LLM.int8() (2208.07339).
    Example:
        >>> model = nn.Sequential(nn.Linear(512, 512, bias=False, dtype=torch.bfloat16))
        >>> inference_bytes(model), inference_bytes(quantize_for_inference(model))
        (524288, 264192)
    """
    require_float64(model.parameters())
    compute = with_codes(compute)
    choose = chooser(compute, keep)
    layers = {name: m for name, m in model.named_modules() if is_linear(m) and choose(name) is not None}
    stacks: dict[str, tuple[Any, str, Tensor]] = {}
    for name, module in model.named_modules():
        if is_experts(module) and choose(name) is not None:
            for projection in PROJECTIONS:
                if projection in module._parameters and choose(f"{name}.{projection}") is not None:
                    require_reachable(name, module)
                    weights = getattr(module, projection).detach()
                    weights = weights.transpose(1, 2) if module.is_transposed else weights
                    stacks[f"{name}.{projection}"] = module, projection, weights
    weights = {name: matrix_of(layer).detach() for name, layer in layers.items()}
    weights |= {name: stack for name, (_, _, stack) in stacks.items()}
    if not weights:
        raise RecipeError(
            f"{type(model).__name__} has no linear layer to quantize.",
            "Its layers must be nn.Linear or transformers' Conv1D, and not all be kept.",
        )
    columns = checked_columns(compute, weights, outlier_columns)
    shared: dict[Tensor, tuple[Tensor, Tensor]] = {}
    for name, layer in layers.items():
        quantize_layer(layer, compute, shared, columns[name])
    for name, (module, projection, stack) in stacks.items():
        before = dict(module._modules[NARROW].items()) if NARROW in module._modules else {}
        install(module, {**before, projection: QuantizedExperts(stack, compute, columns[name])})
        del module._parameters[projection]
    warn_if_emulated(compute, next(iter(weights.values())).device)
    return model.eval()


def inference_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, quantized or not. Each storage counts once.

    Args:
        model: any module.
    Returns:
        Bytes.
    Example:
        >>> inference_bytes(nn.Linear(4, 4))
        80
    """
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def with_codes(compute: str | Compute) -> Compute:
    """Return the compute of that name, if its weights can be stored as one-byte codes.

    Raises:
        RecipeError: an unknown compute, or its weights are not such codes.
    """
    compute = get_compute(compute)
    if compute.output.left.smooth:
        raise RecipeError(
            f"compute '{compute.name}' was requested for inference, where each call scales its own input, so that no channel "
            "outgrows a scale and smoothing gains nothing.",
            f"Use '{compute.name.partition('+')[0]}'.",
        )
    if not stores_codes(compute):
        names = ", ".join(name for name, row in COMPUTES.items() if stores_codes(row))
        raise RecipeError(
            f"compute '{compute.name}' was requested for inference, and its weights are not 8-bit codes with scales of their "
            f"own ({compute.output.right}).",
            f"Use one of {names}.",
        )
    return compute


def checked_columns(
    compute: Compute, layers: Mapping[str, Tensor], requested: OutlierColumns | None
) -> dict[str, Sequence[int] | None]:
    """Return the columns to keep for each layer with weights ``[…, out, in]``; ``None`` if the compute keeps none."""
    if not keeps_outlier_weights(compute):
        if requested is not None:
            raise RecipeError(
                f"outlier columns were given for compute '{compute.name}', which stores no weights in 16 bits.",
                "Leave them out, or use int8-outlier.",
            )
        return dict.fromkeys(layers)
    sides = {name: weight.shape[-1] for name, weight in layers.items()}
    if requested is None:
        if all(weight.is_meta for weight in layers.values()):
            return dict.fromkeys(layers, ())
        raise RecipeError(
            f"compute '{compute.name}' keeps the weights of outlier columns in 16 bits, and no columns were given.",
            "Pass outlier_columns=find_outlier_columns(model, batches), or use int8-outlier-codes, which stores codes alone.",
        )
    if isinstance(requested, str):
        if requested != "all":
            raise RecipeError(
                f"outlier_columns = {requested!r} was given.", "It is 'all', or columns by the name of the layer."
            )
        return {name: range(side) for name, side in sides.items()}
    for name, columns in requested.items():
        if name not in layers:
            advice = suggestion(name, list(layers)) or "Leave it out."
            raise RecipeError(f"outlier columns were given for '{name}', which is not quantized.", advice)
        if wrong := [column for column in columns if not 0 <= column < sides[name]]:
            raise RecipeError(
                f"'{name}' has {sides[name]} columns, and outlier column {wrong[0]} was given.", "They count from 0."
            )
    return {name: sorted(set(requested.get(name, ()))) for name in layers}


def quantize_layer(
    module: Any, compute: Compute, shared: dict[Tensor, tuple[Tensor, Tensor]], columns: Sequence[int] | None = None
) -> None:
    """Make a linear layer a :class:`QuantizedLinear`. It stays the same object, so hooks and references stay valid.

    Args:
        module: ``nn.Linear`` or transformers' ``Conv1D``; changed in place.
        compute: from :func:`with_codes`.
        shared: codes and scales by weight. Tied layers share one entry.
        columns: ascending columns whose weights stay in 16 bits; ``None`` if the compute keeps none.
    """
    weight, bias, matrix = module._parameters["weight"], module._parameters["bias"], matrix_of(module)
    if weight not in shared:
        shared[weight] = _codes_of(matrix.detach(), compute.output.right)
    wide = None if columns is None else _kept(matrix.detach(), columns)
    for entries in (module._parameters, module._buffers, module._non_persistent_buffers_set):
        entries.clear()
    module.__class__ = QuantizedLinear
    module.out_features, module.in_features = matrix.shape
    module.store(*shared[weight], wide, compute)
    module.register_parameter("bias", bias)


def _codes_of(weight: Tensor, right: Cast) -> tuple[Tensor, Tensor]:
    quantized = quantize(padded(weight, right, 1), right)
    codes = quantized.codes[: weight.shape[0], : weight.shape[1]].to(getattr(torch, right.format)).contiguous()
    if quantized.inner is not None:
        return codes, quantized.inner.to(torch.float8_e8m0fnu)  # exact: all are powers of two
    assert quantized.outer is not None
    return codes, quantized.outer


def _kept(weight: Tensor, columns: Sequence[int]) -> Kept:
    """Return the weights of some columns in 16 bits. Float32 weights become bfloat16."""
    with torch.inference_mode(False):  # outside inference mode, its tensors cannot be changed in place
        index = torch.tensor(list(columns), dtype=torch.int32, device=weight.device)
        dtype = weight.dtype if weight.element_size() == 2 else torch.bfloat16
        missed = torch.zeros((), dtype=torch.int64, device=weight.device)
        return Kept(index, weight[..., index].to(dtype).contiguous(), missed)


# ── outlier columns ────────────────────────────────────────────────────────────────────────────────────────────────────
#
# In LLM.int8() each call decides on its columns. A model in training has all its weights. A quantized model has 16-bit weights
# only for columns that are expected to hold outliers. Some batches find these: such features are few and hold outliers in every
# text (Dettmers et al. 2022, 2208.07339, section 4: at most 7 of thousands, in nearly all layers at once).


@torch.no_grad()
def find_outlier_columns(
    model: nn.Module,
    batches: Iterable[Any],
    compute: str | Compute = "int8-outlier",
    keep: tuple[str, ...] | None = None,
) -> dict[str, list[int]]:
    """Find input columns of linear layers that hold outliers in some batches, to keep their weights in 16 bits.

    A column is found if one of its values reaches the compute's threshold in any batch, by the layer's own test. The experts of
    a mixture share the columns of a projection.

    Args:
        model: before it is quantized.
        batches: each a tensor, or a dict of keyword arguments, to call the model with.
        compute, keep: as for :func:`quantize_for_inference`.
    Returns:
        Ascending columns by the name of the layer. A layer without outliers has an empty list.
    Raises:
        RecipeError: the compute separates no outliers, or no layer was called.
    Cost: a forward pass for each batch.
    Example:
        >>> model, x = nn.Sequential(nn.Linear(4, 2)), torch.tensor([[0.5, 7.0, -1.0, -6.0]])
        >>> find_outlier_columns(model, [x])
        {'0': [1, 3]}
    """
    compute = get_compute(compute)
    threshold = compute.output.left.outliers
    if not threshold:
        raise RecipeError(f"compute '{compute.name}' separates no outliers.", "Use int8-outlier.")
    choose = chooser(compute, keep)
    columns: dict[str, Tensor] = {}

    def watch(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen = outlier_columns(inputs[0].reshape(-1, inputs[0].shape[-1]), threshold)
        columns[name] = columns[name] | seen if name in columns else seen

    with ExitStack() as stack:
        projections = stack.enter_context(_visible_experts(model))
        linears = {name: module for name, module in model.named_modules() if is_linear(module)}
        for name, module in {**linears, **projections}.items():
            if choose(name) is not None:
                stack.callback(module.register_forward_pre_hook(partial(watch, name)).remove)
        for batch in batches:
            model(**batch) if isinstance(batch, Mapping) else model(batch)
    if not columns:
        raise RecipeError(
            f"No linear layer of {type(model).__name__} was called: there was no batch, or no layer to quantize.",
            "Give at least one batch, before the model is quantized.",
        )
    return {name: is_outlier.nonzero().view(-1).tolist() for name, is_outlier in columns.items()}


@contextmanager
def _visible_experts(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Yield the projections of all experts by name, as modules called with their input. Swap only within the context."""
    added: list[Any] = [m for m in model.modules() if is_experts(m) and not hasattr(m, NARROW)]

    def plain_compute(name: str) -> Compute | None:
        module = model.get_submodule(name.rpartition(".")[0])
        return COMPUTES[dtype_name(next(module.parameters()).dtype)] if module in added else None

    configs = [module.config for module in added if hasattr(module, "config")]
    try:
        grouped_layers(model, plain_compute)
        yield dict(grouped_layers_of(model))
    finally:
        for module, config in zip(added, configs, strict=True):
            uninstall(module, config)


def missed_outliers(model: nn.Module) -> dict[str, int]:
    """Count outlier columns whose weights came from the codes instead of 16 bits, since the model was quantized.

    Args:
        model: quantized by :func:`narrowgauge.quantize_for_inference` or not.
    Returns:
        Counts by layer name, summed over calls. Only layers of ``int8-outlier`` are listed.
    Example:
        >>> missed_outliers(nn.Linear(2, 2))
        {}
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, StoredCodes)}
    return {name.replace(f".{NARROW}.", "."): int(m.missed) for name, m in layers.items() if m.missed is not None}
