"""All experts of a mixture in one matmul: PyTorch's grouped kernels, where an expert multiplies its
own rows.

The definition is one linear layer per expert (:mod:`.experts`). Here the codes and scales are the
same, and each of the three products is one launch. Kernels read groups that begin at whole tiles,
so each expert's tokens are laid out in *slots*, and zeros fill its last tile. Where a token lies is
computed on the device from the offsets: the host waits for nothing, and shapes depend on the number
of tokens alone.

The kernels write bfloat16. So a bias is added to the rounded product, and the gradient of a float32
weight under autocast is rounded to bfloat16 first.

Source: ``GroupedBlas.cpp`` in ``aten/src/ATen/native/cuda`` of PyTorch, and its tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.matmul import cast_cache, native
from narrowgauge.matmul.layer_matmuls import REGISTERED, FirstOrder, once
from narrowgauge.matmul.operand import Operand, bound, cast_blocks, cast_whole
from narrowgauge.numerics.quantization import (
    blocked,
    quantize_whole,
    sides_of,
    tiled_scales,
)
from narrowgauge.spec.computes import Cast, Product
from narrowgauge.torch_support.compile import fused
from narrowgauge.torch_support.torch_names import is_traced

ALIGN = {"wide": 16, "rows": 16, "mx": 128}
"""Tokens of an expert fill whole multiples of this: 16 bytes of codes, or a tile of 128 scales."""
_SIDE = {"wide": 16, "rows": 16, "mx": 32}
"""The other sides of the operands are multiples of this, or the loop over experts is used."""
_TILE = 128


def kind_of(product: Product) -> str:
    """Return the grouped kernel that multiplies a product's codes: ``rows`` for float8 with a scale
    per row, ``mx`` for MXFP8, ``wide`` for bfloat16; empty if there is none.
    """
    casts = (product.left, product.right)
    if all(cast == Cast("bfloat16") for cast in casts):
        return "wide"
    if all(cast == Cast("float8_e4m3fn", "row") for cast in casts):
        return "rows"
    is_mx = all(
        cast.format == "float8_e4m3fn"
        and cast.granularity == "1x32"
        and cast.scale == "float8_e8m0fnu"
        and not cast.needs_bits
        for cast in casts
    )
    return "mx" if is_mx else ""


def has_kernels(name: str, x: Tensor, weights: Tensor) -> bool:
    """Return whether this device multiplies all experts of a registered compute at once, for these
    tensors.
    """
    if x.dtype != torch.bfloat16 or not x.shape[0] or not kernels_work(name, x.device):
        return False
    side = max(_SIDE[kind_of(product)] for product in REGISTERED[name].products.values())
    return weights.shape[1] % side == 0 and weights.shape[2] % side == 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def kernels_work(name: str, device: torch.device) -> bool:
    """Return whether a device has a working grouped kernel for each product of a compute."""
    architecture = native.architecture_of(device)
    compute = REGISTERED[name]
    if architecture is None or compute.is_wide or not architecture.startswith(("sm90", "sm10")):
        return False
    for product in compute.products.values():
        kind = kind_of(product)
        if not kind or (kind == "mx" and architecture == "sm90"):
            return False
        if kind != "wide" and not works(kind, device):
            return False
    return True


# ── slots: where each expert's tokens lie ─────────────────────────────────────────────────────────


class Slots(NamedTuple):
    """The places of sorted tokens when each expert's tokens fill whole tiles.

    Attributes:
        ends: int32 ``[experts]``: the end of each expert's slots.
        token: int64 ``[slots]``: the token in a slot; -1 for none.
        slot: int64 ``[tokens]``: the slot of a token; -1 for a token without an expert.
        expert: int64 ``[slots / 16]``: the expert of each 16 slots.
    """

    ends: Tensor
    token: Tensor
    slot: Tensor
    expert: Tensor


def lay_out(x: Tensor, offsets: Tensor, align: int) -> Slots:
    """Return the slots of tokens ``x [tokens, …]``, sorted by expert, that end at ``offsets``."""
    return Slots(*fused(len(x) * len(offsets), bound(_lay_out, align), x.detach(), offsets))


def _lay_out(align: int, x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    stops = offsets.long()
    starts = F.pad(stops[:-1], (1, 0))
    counts = stops - starts
    padded_counts = (counts + align - 1) // align * align
    experts = torch.arange(len(stops), device=x.device)
    is_before = experts[None, :] < experts[:, None]
    begins = (padded_counts[None, :] * is_before).sum(1)
    ends = begins + padded_counts
    most = (len(x) + len(stops) * (align - 1) + align - 1) // align * align
    slots = torch.arange(most, device=x.device)
    expert = (slots[:, None] >= ends[None, :]).sum(1).clamp_max(len(stops) - 1)
    place = slots - begins[expert]
    token = torch.where(place < counts[expert], starts[expert] + place, -1)
    tokens = torch.arange(len(x), device=x.device)
    owner = (tokens[:, None] >= stops[None, :]).sum(1)
    expert_of = owner.clamp_max(len(stops) - 1)
    slot = torch.where(owner < len(stops), begins[expert_of] + tokens - starts[expert_of], -1)
    return ends.to(torch.int32), token, slot, expert[:: ALIGN["rows"]].contiguous()


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows of ``x`` at the indices, and zeros where an index is -1."""
    rows = x[index.clamp(0, x.shape[0] - 1)]
    return torch.where(index[:, None] < 0, 0, rows)


def _gathered_plus(x: Tensor, index: Tensor, bias: Tensor, expert: Tensor) -> Tensor:
    """Return :func:`_gathered` plus the bias of the expert whose slot each row is."""
    row_expert = expert[index.clamp_min(0) // ALIGN["rows"]]
    return torch.where(index[:, None] < 0, 0, _gathered(x, index) + bias[row_expert].to(x.dtype))


# ── casts ─────────────────────────────────────────────────────────────────────────────────────────
#
# Each returns an operand as its kernel reads it: codes along the contraction, scales in tiles.


def cast_tokens(x: Tensor, cast: Cast, slots: Slots, kind: str) -> Operand:
    """Cast ``[tokens, features]`` for a product that contracts the features."""
    if kind == "wide":
        return Operand(fused(x.numel(), _gathered, x, slots.token))
    function = _cast_rows if kind == "rows" else _cast_row_blocks
    return Operand(*fused(x.numel(), bound(function, cast), x.detach(), slots.token))


def cast_features(x: Tensor, cast: Cast, slots: Slots, kind: str) -> Operand:
    """Cast ``[tokens, features]``, as ``[features, slots]``, for a product that contracts each
    expert's tokens.
    """
    x = x.detach()
    if kind == "wide":
        return Operand(fused(x.numel(), _gathered, x, slots.token).t())
    if kind == "mx":
        columns = bound(_cast_column_blocks, cast)
        return Operand(*fused(x.numel(), columns, x, slots.token, slots.ends))
    largest = fused(x.numel(), bound(_tile_amax, ALIGN["rows"]), x, slots.token)
    amax = largest.new_zeros(len(slots.ends), x.shape[1])
    amax.scatter_reduce_(0, slots.expert[:, None].expand_as(largest), largest, "amax")
    columns = bound(_cast_columns, cast, ALIGN["rows"])
    return Operand(*fused(x.numel(), columns, x, slots.token, slots.expert, amax))


def cast_weights(weights: Tensor, cast: Cast, dim: int, kind: str) -> Operand:
    """Cast ``[experts, out, in]`` for a product that contracts ``in`` (dim 1) or ``out`` (dim 0).

    The codes are ``[experts, columns, contraction]``. Use the cached cast if there is one.
    """
    if kind == "wide":
        plain = weights.detach().to(torch.bfloat16)
        return Operand(plain if dim == 1 else plain.transpose(1, 2))

    def make() -> Operand:
        if dim == 1:
            turned = weights.detach()
        else:
            turned = weights.detach().transpose(1, 2)
        function = _cast_expert_rows if kind == "rows" else _cast_expert_blocks
        return Operand(*fused(weights.numel(), bound(function, cast), turned))

    if is_traced():
        return make()
    operand: Operand = cast_cache.cast_weight(weights, (cast, dim), make)
    return operand


def _cast_rows(cast: Cast, x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    rows = _gathered(x, token)
    codes, outer = cast_whole(cast, 1, torch.float8_e4m3fn, rows, None, None, None, None)
    return codes, outer.flatten()


def _tile_amax(align: int, x: Tensor, token: Tensor) -> Tensor:
    """Return the largest magnitudes of each tile of slots: float32 ``[tiles, features]``."""
    tiles: Tensor = _gathered(x, token).float().abs().unflatten(0, (-1, align))
    return tiles.amax(1)


def _cast_columns(
    cast: Cast, align: int, x: Tensor, token: Tensor, expert: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor]:
    valid_expert = expert.clamp(0, amax.shape[0] - 1)
    largest = amax[valid_expert].repeat_interleave(align, 0)
    codes, _ = quantize_whole(_gathered(x, token), cast, 0, None, None, largest)
    _, outer = quantize_whole(amax, cast, 0, None, None, amax)
    assert outer is not None
    return codes.to(torch.float8_e4m3fn).t().contiguous(), outer.flatten()


def _cast_expert_rows(cast: Cast, weights: Tensor) -> tuple[Tensor, Tensor]:
    largest = weights.float().abs().amax(2, keepdim=True)
    codes, outer = quantize_whole(weights, cast, 1, None, None, largest)
    assert outer is not None
    return codes.to(torch.float8_e4m3fn).contiguous(), outer.squeeze(2)


def _blocks_of(cast: Cast, dim: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of a matrix in blocks, and their scales as exponents, uint8."""
    blocks = blocked(x, sides_of(cast, dim))
    codes, exponents, *_ = cast_blocks(cast, dim, torch.float8_e4m3fn, blocks, None, None, None)
    return codes, exponents


def _cast_row_blocks(cast: Cast, x: Tensor, token: Tensor) -> tuple[Tensor, None, Tensor]:
    codes, exponents = _blocks_of(cast, 1, _gathered(x, token))
    return codes, None, tiled_scales(exponents).view(len(codes), -1)


def _cast_column_blocks(
    cast: Cast, x: Tensor, token: Tensor, ends: Tensor
) -> tuple[Tensor, None, Tensor]:
    codes, exponents = _blocks_of(cast, 0, _gathered(x, token))
    return codes.t().contiguous(), None, tiled_by_group(exponents.t(), ends)


def _cast_expert_blocks(cast: Cast, weights: Tensor) -> tuple[Tensor, None, Tensor]:
    rows = weights.contiguous().flatten(0, 1)  # of one expert, flatten keeps a transposed view
    codes, exponents = _blocks_of(cast, 1, rows)
    scales = exponents.view(len(weights), weights.shape[1], -1)
    return codes.view(weights.shape), None, _tiled_by_expert(scales)


def _tiled_by_expert(scales: Tensor) -> Tensor:
    """Arrange one-byte scales ``[experts, rows, blocks]`` in tiles, each expert's for itself."""
    padded = F.pad(scales, (0, 0, 0, -scales.shape[1] % _TILE))
    return tiled_scales(padded.flatten(0, 1)).view(len(scales), -1)


def tiled_by_group(scales: Tensor, ends: Tensor) -> Tensor:
    """Arrange one-byte scales ``[rows, blocks of the contraction]`` in tiles of 128 × 4, one group
    of the contraction after the other.

    The tiles of a group are counted row by row. ``ends`` are the groups' ends in slots: multiples
    of 128.
    """
    rows = -(-scales.shape[0] // _TILE)
    columns = scales.shape[1] // 4
    tiles = tiled_scales(scales).view(rows * columns, -1)
    stops = ends.long() // _TILE
    starts = F.pad(stops[:-1], (1, 0))
    place = torch.arange(rows * columns, device=scales.device)
    group = (place[:, None] >= rows * stops[None, :]).sum(1).clamp_max(len(stops) - 1)
    width = (stops - starts)[group].clamp_min(1)
    within = place - rows * starts[group]
    tile = within // width * columns + starts[group] + within % width
    is_used = place < rows * stops[-1]
    index = torch.where(is_used, tile, place).clamp(0, rows * columns - 1)
    return tiles[index].view(rows * _TILE, -1)


# ── products ──────────────────────────────────────────────────────────────────────────────────────


def multiply_groups(lhs: Operand, rhs: Operand, ends: Tensor, kind: str, fast: bool) -> Tensor:
    """Multiply the groups of an operand by those of another one, in bfloat16.

    Codes ``[slots, contraction]`` and ``[experts, columns, contraction]`` give ``[slots,
    columns]``. Codes ``[rows, slots]`` and ``[columns, slots]`` give ``[experts, rows, columns]``.
    """
    right = rhs.data.transpose(-2, -1)
    if kind == "wide":
        return F.grouped_mm(lhs.data, right, offs=ends)
    # The older of two functions: only it has a rule for tracing.
    first = _scales_of(lhs)
    second = _scales_of(rhs)
    return torch._scaled_grouped_mm(
        lhs.data, right, first, second, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _scales_of(operand: Operand) -> Tensor:
    if operand.inner is not None:
        return operand.inner.view(torch.float8_e8m0fnu)
    assert operand.outer is not None
    return operand.outer


def _multiply(product: Product, lhs: Operand, rhs: Operand, ends: Tensor) -> Tensor:
    is_fast = product.accumulation == "fast"
    return multiply_groups(lhs, rhs, ends, kind_of(product), is_fast)


class _Experts(FirstOrder):
    """Compute ``x · wᵀ + b`` of all experts and its gradients, on grouped kernels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor, name: str
    ) -> Tensor:
        compute = REGISTERED[name]
        align = max(ALIGN[kind_of(product)] for product in compute.products.values())
        slots = lay_out(x, offsets, align)
        kind = kind_of(compute.output)
        lhs = cast_tokens(x, compute.output.left, slots, kind)
        rhs = cast_weights(weights, compute.output.right, 1, kind)
        sums = _multiply(compute.output, lhs, rhs, slots.ends)
        ctx.save_for_backward(x, weights, bias, offsets, *slots)
        ctx.name = name
        size = len(x) * weights.shape[1]
        if bias is None:
            y = fused(size, _gathered, sums, slots.slot)
        else:
            y = fused(size, _gathered_plus, sums, slots.slot, bias.detach(), slots.expert)
        return cast(Tensor, y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        needs = ctx.needs_input_grad[:3]
        gradients = once(expert_gradients, grads[0], *ctx.saved_tensors, ctx.name, needs)
        return (*gradients, None, None)


def expert_gradients(
    grad: Tensor, x: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor,
    ends: Tensor, token: Tensor, slot: Tensor, expert: Tensor,
    name: str, needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of tokens, weights and biases, each if needed."""
    slots = Slots(ends, token, slot, expert)
    compute = REGISTERED[name]
    grad = grad.contiguous()
    grad_x = grad_weights = grad_bias = None
    if needs[0]:
        product = compute.grad_input
        kind = kind_of(product)
        lhs = cast_tokens(grad, product.left, slots, kind)
        rhs = cast_weights(weights, product.right, 0, kind)
        sums = _multiply(product, lhs, rhs, ends)
        grad_x = fused(x.numel(), _gathered, sums, slot)
    if needs[1]:
        product = compute.grad_weight
        kind = kind_of(product)
        lhs = cast_features(grad, product.left, slots, kind)
        rhs = cast_features(x, product.right, slots, kind)
        grad_weights = _multiply(product, lhs, rhs, ends).to(weights.dtype)
    if needs[2] and bias is not None:
        grad_bias = _sums_by_expert(grad, offsets).to(bias.dtype)
    return grad_x, grad_weights, grad_bias


def _sums_by_expert(grad: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of each expert's rows, float32, in a fixed order: a matmul by zeros and ones."""
    rows = torch.arange(len(grad), device=grad.device)
    starts = F.pad(offsets[:-1], (1, 0))
    is_own = (rows[None, :] >= starts[:, None]) & (rows[None, :] < offsets[:, None])
    return is_own.float() @ grad.float()


# As for one layer: Dynamo puts the call into its graph, and AOTAutograd traces the operations.
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def multiply_experts_at_once(
    x: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor, name: str
) -> Tensor:
    """Return each expert's linear layer over its own tokens, as
    :func:`~narrowgauge.matmul.experts.grouped_linear` does.
    """
    return cast(Callable[..., Tensor], _Experts.apply)(x, weights, bias, offsets, name)


# ── the trial of a kernel ─────────────────────────────────────────────────────────────────────────


@lru_cache(None)
def works(kind: str, device: torch.device) -> bool:
    """Return whether a grouped kernel multiplies small groups without error, an empty one included.

    It waits for the device once, so the first call must not happen during CUDA graph capture.
    """
    cast = Cast("float8_e4m3fn", "row")
    if kind == "mx":
        cast = Cast("float8_e4m3fn", "1x32", "float8_e8m0fnu")
    product = Product(cast, cast)

    def trial() -> bool:
        groups = (slice(0, 128), slice(128, 128), slice(128, 384))
        x = native.exact_matrix(cast, 384, 256, 0)
        weights = native.exact_matrix(cast, len(groups) * 160, 256, 1).view(len(groups), 160, 256)
        grad = native.exact_matrix(cast, 160, 384, 0).t()
        features = native.exact_matrix(cast, 256, 384, 1).t()
        forward = []
        backward = []
        for group, weight in zip(groups, weights, strict=True):
            forward.append(x[group].double() @ weight.double().t())
            backward.append(grad[group].double().t() @ features[group].double())
        offsets = torch.tensor([group.stop for group in groups], dtype=torch.int32, device=device)
        x, weights, grad, features = (
            tensor.bfloat16().contiguous().to(device) for tensor in (x, weights, grad, features)
        )
        slots = lay_out(x, offsets, ALIGN[kind])
        lhs = cast_tokens(x, cast, slots, kind)
        sums = _multiply(product, lhs, cast_weights(weights, cast, 1, kind), slots.ends)
        if not torch.equal(sums[slots.slot].cpu(), torch.cat(forward).bfloat16()):
            return False
        lhs = cast_features(grad, cast, slots, kind)
        sums = _multiply(product, lhs, cast_features(features, cast, slots, kind), slots.ends)
        return torch.equal(sums.cpu(), torch.stack(backward).bfloat16())

    return native.is_exact(trial)
