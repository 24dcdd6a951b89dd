"""The three matmuls of a linear layer, each from the tensors that enter it: the one place that obeys a compute's six casts.

Which tensor fills which slot is :mod:`narrowgauge.spec.slots`; how it is cast there, and what the matmul does with the two
operands, is here. The operators call these functions, inference and the profiler do too.

*Outlier features* are the few columns of an input that int8 cannot hold together with the others. In large language models some
features are hundreds of times larger than the rest, in every token; a scale per row that covers them leaves the others a handful
of codes. Without those columns a row fits int8, and a thin 16-bit matmul adds them.
Source: Dettmers et al. 2022, LLM.int8() (2208.07339), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.matmul.cast_cache import cast_weight
from narrowgauge.matmul.delayed_scaling import delayed_amax
from narrowgauge.matmul.gemm import multiply, operand_dtype, with_channels_back
from narrowgauge.matmul.operand import Operand, cast_matrix
from narrowgauge.matmul.rng import STEP, random_words
from narrowgauge.numerics.widening import add_product
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.slots import SLOTS, slot_of_cast


def slot_dtype(compute: Compute, slot: str, device: torch.device) -> torch.dtype:
    """The dtype of a slot's operand."""
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
        x: the slot's tensor.
        compute: whose cast.
        slot: its name.
        state: the layer's; needed where the cast is stochastic or delayed.
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
    """The right operand's scales where each belongs to one term of the sum, shaped to be multiplied into the left tensor.

    Args:
        right: the right operand's outer scale.
        compute: whose cast made it.
        matmul: which of the three.
    """
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
        right = Operand(right.data, None)  # its scales are in the left one, see scales_to_fold
    if product.left.smooth:
        left, right = with_channels_back(left, right)
    dims = SLOTS[f"{matmul}.left"].dim, SLOTS[f"{matmul}.right"].dim
    return multiply(left, right, dims, product, dtype, bias)[: shape[0], : shape[1]].contiguous()


def outlier_columns(x: Tensor, threshold: float) -> Tensor:
    """Which columns of ``[rows, columns]`` hold a magnitude of ``threshold`` or more (or a NaN): bool ``[columns]``."""
    return ~(x.abs().amax(0) < threshold) if len(x) else x.new_zeros(x.shape[1], dtype=torch.bool)


def without_outliers(x: Tensor, threshold: float) -> Tensor:
    """``x`` with zeros in its outlier columns."""
    return torch.where(outlier_columns(x, threshold), 0, x)


def multiply_outliers(result: Tensor, x: Tensor, weight: Tensor, threshold: float) -> Tensor:
    """``result`` plus the product of the outlier columns of ``x`` with those of ``weight [out, in]``.

    Cost: a thin matmul; on CUDA one synchronization, for the number of columns.
    """
    columns = outlier_columns(x, threshold).nonzero().view(-1)
    if not len(columns):
        return result
    return add_product(result, x[:, columns].to(result.dtype), weight[:, columns].to(result.dtype).t())
