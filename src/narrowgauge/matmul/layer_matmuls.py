"""The three matmuls of a linear layer, each from the tensors that enter it: the only code that carries out a compute's six casts.

:mod:`narrowgauge.spec.computes` says which tensor fills which slot; how it is cast there, and what the matmul does with the two
operands, is here. The operators, inference and the profiler call these functions.

*Outlier features* are the few columns of an input that int8 cannot hold together with the others. In large language models some
features are hundreds of times larger than the rest, in every token; a scale per row that covers them leaves the others a handful
of codes. Without those columns a row fits int8, and a thin 16-bit matmul adds them: times the weights in 16 bits (the paper), or
times the codes of the weights, widened (bitsandbytes), as the cast says.
Source: Dettmers et al. 2022, LLM.int8() (2208.07339), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.cast_cache import cast_weight
from narrowgauge.matmul.delayed_scaling import delayed_amax
from narrowgauge.matmul.gemm import multiply, operand_dtype, with_channels_back
from narrowgauge.matmul.operand import STEP, Operand, cast_matrix, drawn_signs, empty_operand, random_words
from narrowgauge.numerics.tensor_stats import power_of_rms
from narrowgauge.numerics.widening import add_product
from narrowgauge.spec.computes import COMPUTES, SLOTS, Compute, keeps_outlier_weights, slot_of_cast


def slot_dtype(compute: Compute, slot: str, device: torch.device) -> torch.dtype:
    product = compute.products[SLOTS[slot].matmul]
    # Codes that are kept for backward stay codes, even where this matmul widens them.
    as_codes = slot == "output.left" and compute.keeps_codes
    return operand_dtype(compute.casts[slot], product, device, as_codes=as_codes)


def cast_to_slot(
    x: Tensor,
    compute: Compute,
    slot: str,
    *,
    state: Tensor | None = None,
    history: Tensor | None = None,
    record: bool = False,
    sequence_length: int = 1,
    fold: Tensor | None = None,
) -> Operand:
    """Cast a tensor of a layer to the operand that a slot takes.

    Args:
        state: the layer's; needed where the cast takes random bits or is delayed.
        history: the layer's amax history; without one, a delayed scale comes from ``x``.
        record: write the amax of ``x`` into the history.
        sequence_length: rows per sequence, which key random bits.
        fold: multiplied into ``x`` first, see :func:`scales_to_fold`.
    """
    which, cast = SLOTS[slot], compute.casts[slot]
    amax = None
    if history is not None and state is not None:
        amax = delayed_amax(x, cast, history, which.history_index, state[STEP], record)
    words = None
    if state is not None:
        length = 0 if which.tensor == "weight" else sequence_length
        words = random_words(cast, x, which.dim, state, which.random_key, length)
    signs = drawn_signs(cast, x.shape[which.dim], which.dim, state, which.matmul)
    if signs is not None:
        fold = signs if fold is None else fold * signs
    source = without_outliers(x, cast.outliers) if cast.outliers else x
    return cast_matrix(source, cast, which.dim, slot_dtype(compute, slot, x.device), words=words, fold=fold, amax=amax)


def cast_weight_to_slot(
    weight: Tensor,
    compute: Compute,
    slot: str,
    *,
    state: Tensor,
    history: Tensor | None,
    record: bool = False,
    unit: Tensor | None = None,
) -> Operand:
    """:func:`cast_to_slot` for a weight ``[out, in]``, or ``weight / unit``; from the cache where it holds the cast."""
    made = slot_of_cast(compute, slot)

    def make() -> Operand:
        source = weight if unit is None else weight.detach() / unit
        return cast_to_slot(source, compute, made, state=state, history=history, record=record)

    return cast_weight(weight, (compute.casts[made], SLOTS[made].dim), make)


def scales_to_fold(right: Tensor | None, compute: Compute, matmul: str) -> Tensor | None:
    """The right operand's outer scales where each belongs to one term of the sum, shaped to multiply the left tensor."""
    if right is None or compute.products[matmul].right.granularity != "column":
        return None
    return right.view((1, -1) if SLOTS[f"{matmul}.left"].dim == 1 else (-1, 1))


def multiply_slots(
    left: Operand,
    right: Operand,
    compute: Compute,
    matmul: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """One of the three matmuls of its two operands: ``shape``, without the padding, in ``dtype``."""
    product = compute.products[matmul]
    if product.right.granularity == "column":
        right = right._replace(outer=None)  # its scales are in the left one, see scales_to_fold
    if product.left.smooth:
        left, right = with_channels_back(left, right)
    dims = SLOTS[f"{matmul}.left"].dim, SLOTS[f"{matmul}.right"].dim
    return multiply(left, right, dims, product, dtype, bias)[: shape[0], : shape[1]].contiguous()


def outlier_columns(x: Tensor, threshold: float) -> Tensor:
    """Which columns of ``[rows, columns]`` hold a magnitude of ``threshold`` or more (or a NaN): bool ``[columns]``."""
    # In float32: PyTorch would round the threshold to the format of x first.
    return ~(x.abs().amax(0).float() < threshold) if len(x) else x.new_zeros(x.shape[1], dtype=torch.bool)


def without_outliers(x: Tensor, threshold: float) -> Tensor:
    """``x`` with zeros in its outlier columns."""
    return torch.where(outlier_columns(x, threshold), 0, x)


def multiply_outliers(result: Tensor, x: Tensor, weight: Tensor | Operand, threshold: float) -> Tensor:
    """``result`` plus the product of the outlier columns of ``x`` with those of ``weight [out, in]``, or of its codes widened.

    Cost: a thin matmul; on CUDA one synchronization, for the number of columns.
    """
    columns = outlier_columns(x, threshold).nonzero().view(-1)
    if not len(columns):
        return result
    thin = widened_columns(weight, columns) if isinstance(weight, Operand) else weight[:, columns]
    return add_product(result, x[:, columns].to(result.dtype), thin.to(result.dtype).t())


def widened_columns(codes: Operand, columns: Tensor) -> Tensor:
    """Some columns of the weight ``[out, in]`` that codes with a scale per row stand for, in float32."""
    assert codes.outer is not None
    return codes.data[:, columns].float() * codes.outer


def met_by_outliers(compute: Compute, weight: Tensor, codes: Operand) -> Tensor | Operand:
    """What the outlier columns of the input multiply in ``output``: the weight, or its codes."""
    return weight if keeps_outlier_weights(compute) else codes


# ── custom operators: what a compiled model sees of a narrow linear layer ──────────────────────────────────────────────
#
# Four opaque functions: cast the input for ``output``, multiply it with the weight, cast the input for ``grad_weight``, and
# compute both gradients. They are opaque because a compiler that sees the casts recomputes their producers at each use. They are
# few, so that the weight's casts and their cache stay out of the graph. The casts of the input are separate operators, so that
# the compiler merges equal ones: q, k and v share one.
#
# A compute is passed by name and everything that differs between layers or steps as tensors: layers of one shape share a graph,
# and no step recompiles.


REGISTERED: dict[str, Compute] = dict(COMPUTES)
"""Computes by the name that operators get: the table's, and those that :func:`register` adds."""


def register(compute: Compute) -> str:
    """Make a compute known to the operators, and return the name by which they find it.

    That is its own name, with a number where another compute has it.

    Raises:
        RecipeError: the cast of the input for ``output``, which layers share, would need random bits or scales of one layer.
    """
    if compute.output.left.needs_bits:
        raise RecipeError(
            f"compute '{compute.name}' takes random bits for the input of output, in a cast that several layers share.",
            "Round it to nearest, rotated without random signs or not at all; weights and gradients may be stochastic.",
        )
    if compute.output.right.granularity == "column":
        raise RecipeError(
            f"compute '{compute.name}' scales the weight of output per column, and such scales would have to enter the cast "
            "of the input, which several layers share.",
            "Scale that weight per row, tensor or block.",
        )
    name, number = compute.name, 1
    while REGISTERED.setdefault(name, compute) != compute:
        number += 1
        name = f"{compute.name} ({number})"
    return name


@torch.library.custom_op("narrowgauge::cast_input", mutates_args=())
def cast_input(
    x: Tensor, compute: str, state: Tensor | None, history: Tensor | None, record: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x ``[tokens, in]`` cast for ``output``: data, the outer and the inner scales (empty without them).

    It takes nothing of the layer except delayed scales, so that layers with the same input share one call.
    """
    cast = cast_to_slot(x, REGISTERED[compute], "output.left", state=state, history=history, record=record)
    return unpack(cast, x)


@torch.library.custom_op("narrowgauge::multiply_output", mutates_args=())
def multiply_output(
    data: Tensor,
    outer: Tensor,
    inner: Tensor,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    compute: str,
    state: Tensor,
    history: Tensor | None,
    record: bool,
    rows: int,
    dtype: torch.dtype,
    unit: Tensor | None = None,
) -> Tensor:
    """``output [rows, out]`` of the cast input and the weight ``[out, in]``; ``x`` is where outliers are taken from.

    With a ``unit`` it is the product with ``weight / unit``; the cast is cached under the weight itself.
    """
    made = REGISTERED[compute]
    right = cast_weight_to_slot(weight, made, "output.right", state=state, history=history, record=record, unit=unit)
    result = multiply_slots(pack(data, outer, inner), right, made, "output", (rows, weight.shape[0]), dtype, bias)
    threshold = made.output.left.outliers
    if not threshold or x is None:
        return result
    return multiply_outliers(result, x, met_by_outliers(made, weight, right), threshold).contiguous()


@torch.library.custom_op("narrowgauge::weight_unit", mutates_args=())
def weight_unit(weight: Tensor) -> Tensor:
    """The power of two at or below a weight's root mean square, 0-d float32: measured once per version of the weight."""
    unit = cast_weight(weight, ("unit",), lambda: Operand(power_of_rms(weight), None)).data
    return unit.clone()


@weight_unit.register_fake
def _(weight: Tensor) -> Tensor:
    return weight.new_empty((), dtype=torch.float32)


@torch.library.custom_op("narrowgauge::cast_kept", mutates_args=())
def cast_kept(x: Tensor, compute: str, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """x ``[tokens, in]`` cast for ``grad_weight``, which contracts the tokens."""
    return unpack(cast_to_slot(x, REGISTERED[compute], "grad_weight.right", state=state), x)


@torch.library.custom_op("narrowgauge::gradients", mutates_args=())
def gradients(
    grad: Tensor,
    data: Tensor,
    outer: Tensor,
    inner: Tensor,
    weight: Tensor,
    compute: str,
    state: Tensor,
    history: Tensor | None,
    sequence_length: int,
    wanted: list[bool],
    record: bool,
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``grad_input [tokens, in]`` and ``grad_weight [out, in]`` of the output's gradient; empty where not wanted.

    With a ``unit`` they are those of the product with ``weight / unit``.
    """
    made = REGISTERED[compute]
    grad_input, grad_weight = grad.new_empty(0), grad.new_empty(0)
    left = None

    def cast_grad(slot: str, right: Operand) -> Operand:
        fold = scales_to_fold(right.outer, made, SLOTS[slot].matmul)
        return cast_to_slot(
            grad, made, slot, state=state, history=history, record=record, sequence_length=sequence_length, fold=fold
        )

    if wanted[0]:
        right = cast_weight_to_slot(weight, made, "grad_input.right", state=state, history=history, unit=unit)
        left = cast_grad("grad_input.left", right)
        shape = grad.shape[0], weight.shape[1]
        grad_input = multiply_slots(left, right, made, "grad_input", shape, grad.dtype)
    if wanted[1]:
        is_cast = not made.grad_weight.right.is_wide
        right = pack(data, outer, inner) if is_cast else cast_to_slot(data, made, "grad_weight.right")
        if left is None or slot_of_cast(made, "grad_weight.left") == "grad_weight.left":
            left = cast_grad("grad_weight.left", right)
        shape = weight.shape[0], weight.shape[1]
        grad_weight = multiply_slots(left, right, made, "grad_weight", shape, weight.dtype)
    return grad_input, grad_weight


@cast_input.register_fake
def _(
    x: Tensor, compute: str, state: Tensor | None, history: Tensor | None, record: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return unpacked_empty(x, REGISTERED[compute], "output.left")


@multiply_output.register_fake
def _(
    data: Tensor, outer: Tensor, inner: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor | None, compute: str,
    state: Tensor, history: Tensor | None, record: bool, rows: int, dtype: torch.dtype, unit: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return data.new_empty((rows, weight.shape[0]), dtype=dtype)


@cast_kept.register_fake
def _(x: Tensor, compute: str, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return unpacked_empty(x, REGISTERED[compute], "grad_weight.right")


@gradients.register_fake
def _(
    grad: Tensor, data: Tensor, outer: Tensor, inner: Tensor, weight: Tensor, compute: str, state: Tensor,
    history: Tensor | None, sequence_length: int, wanted: list[bool], record: bool, unit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    grad_input = grad.new_empty((grad.shape[0], weight.shape[1])) if wanted[0] else grad.new_empty(0)
    grad_weight = weight.new_empty(weight.shape) if wanted[1] else grad.new_empty(0)
    return grad_input, grad_weight


def unpack(operand: Operand, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Data and scales as an operator must return them: never its own input, never ``None``."""
    data = operand.data.contiguous()
    data = data.clone() if data.data_ptr() == source.data_ptr() else data
    outer, inner = (
        source.new_empty(0, dtype=torch.float32) if x is None else x for x in (operand.outer, operand.inner)
    )
    return data, outer, inner.contiguous()


def pack(data: Tensor, outer: Tensor, inner: Tensor) -> Operand:
    """The operand that :func:`unpack` took apart."""
    return Operand(data, outer if outer.numel() else None, inner if inner.numel() else None)


def unpacked_empty(
    x: Tensor, compute: Compute, slot: str, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What the cast of ``x`` to a slot returns, without values; ``dtype`` where it is not the slot's."""
    made = empty_operand(x, compute.casts[slot], SLOTS[slot].dim, dtype or slot_dtype(compute, slot, x.device))
    outer, inner = (x.new_empty(0, dtype=torch.float32) if part is None else part for part in (made.outer, made.inner))
    return made.data, outer, inner
