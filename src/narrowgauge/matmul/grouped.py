"""All experts of a mixture in one matmul: PyTorch's grouped kernel of float8 with a scale per row,
where an expert multiplies its own rows.

The definition is one linear layer per expert (:mod:`.experts`). Here the codes and scales are the
same, and each of the three products is one launch. The kernel reads groups that begin at multiples
of 16 bytes, so each expert's tokens are laid out in *slots*, and zeros fill its last tile of 16.
Where a token lies is computed on the device from the offsets: the host waits for nothing, and
shapes depend on the number of tokens alone.

The kernel writes bfloat16. So a bias is added to the rounded product, and the gradient of a float32
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
from narrowgauge.matmul.operand import Operand, bound, cast_matrix
from narrowgauge.numerics.quantization import quantize_whole
from narrowgauge.spec.computes import Cast, Product
from narrowgauge.torch_support.compile import fused

_TILE = 16
"""Tokens of an expert, and the other sides of the operands, are multiples of this many codes."""
_CAST = Cast("float8_e4m3fn", "row")


def has_kernels(name: str, x: Tensor, weights: Tensor) -> bool:
    """Return whether this device multiplies all experts of a registered compute at once, for these
    tensors.
    """
    if x.dtype != torch.bfloat16 or not x.shape[0] or not kernels_work(name, x.device):
        return False
    return weights.shape[1] % _TILE == 0 and weights.shape[2] % _TILE == 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def kernels_work(name: str, device: torch.device) -> bool:
    """Return whether a device has a working grouped kernel of a registered compute."""
    architecture = native.architecture_of(device) or ""
    has_kernel = architecture == "sm90" or architecture.startswith("sm10")
    return set(REGISTERED[name].casts.values()) == {_CAST} and has_kernel and works(device)


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


def lay_out(x: Tensor, offsets: Tensor) -> Slots:
    """Return the slots of tokens ``x [tokens, …]``, sorted by expert, that end at ``offsets``."""
    return Slots(*fused(len(x) * len(offsets), _lay_out, x.detach(), offsets))


def _lay_out(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    stops = offsets.long()
    starts = F.pad(stops[:-1], (1, 0))
    counts = stops - starts
    padded_counts = (counts + _TILE - 1) // _TILE * _TILE
    experts = torch.arange(len(stops), device=x.device)
    is_before = experts[None, :] < experts[:, None]
    begins = (padded_counts[None, :] * is_before).sum(1)
    ends = begins + padded_counts
    most = (len(x) + len(stops) * (_TILE - 1) + _TILE - 1) // _TILE * _TILE
    slots = torch.arange(most, device=x.device)
    expert = (slots[:, None] >= ends[None, :]).sum(1).clamp_max(len(stops) - 1)
    place = slots - begins[expert]
    token = torch.where(place < counts[expert], starts[expert] + place, -1)
    tokens = torch.arange(len(x), device=x.device)
    owner = (tokens[:, None] >= stops[None, :]).sum(1)
    expert_of = owner.clamp_max(len(stops) - 1)
    slot = torch.where(owner < len(stops), begins[expert_of] + tokens - starts[expert_of], -1)
    return ends.to(torch.int32), token, slot, expert[::_TILE].contiguous()


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows of ``x`` at the indices, and zeros where an index is -1."""
    rows = x[index.clamp(0, x.shape[0] - 1)]
    return torch.where(index[:, None] < 0, 0, rows)


# ── casts ─────────────────────────────────────────────────────────────────────────────────────────
#
# Each returns codes along the contraction, and a scale for each of their rows, as the kernel reads
# them.


def in_slots(x: Tensor, slots: Slots) -> Tensor:
    """Return tokens ``[tokens, features]`` in their slots: ``[slots, features]``."""
    placed: Tensor = fused(x.numel(), _gathered, x.detach(), slots.token)
    return placed


def cast_tokens(x: Tensor, cast: Cast) -> Operand:
    """Cast ``[slots, features]`` for a product that contracts the features."""
    data, outer, _ = cast_matrix(x, cast, 1, torch.float8_e4m3fn)
    assert outer is not None
    return Operand(data, outer.flatten())


def cast_features(x: Tensor, cast: Cast, slots: Slots) -> Operand:
    """Cast ``[slots, features]``, as ``[features, slots]``, for a product that contracts each
    expert's tokens.
    """
    largest = fused(x.numel(), _tile_amax, x)
    amax = largest.new_zeros(len(slots.ends), x.shape[1])
    amax.scatter_reduce_(0, slots.expert[:, None].expand_as(largest), largest, "amax")
    return Operand(*fused(x.numel(), bound(_cast_columns, cast), x, slots.expert, amax))


def cast_weights(weights: Tensor, cast: Cast, dim: int) -> Operand:
    """Cast ``[experts, out, in]`` for a product that contracts ``in`` (dim 1) or ``out`` (dim 0).

    The codes are ``[experts, columns, contraction]``. Use the cached cast if there is one.
    """

    def make() -> Operand:
        turned = weights.detach()
        if dim == 0:
            turned = turned.transpose(1, 2)
        rows = turned.contiguous().flatten(0, 1)  # of one expert, flatten keeps a transposed view
        codes, scales = cast_tokens(rows, cast)[:2]
        assert scales is not None
        return Operand(codes.view(turned.shape), scales.view(turned.shape[:2]))

    return cast_cache.cast_weight(weights, (cast, dim), make)


def _tile_amax(x: Tensor) -> Tensor:
    """Return the largest magnitudes of each tile of slots: float32 ``[tiles, features]``."""
    tiles: Tensor = x.float().abs().unflatten(0, (-1, _TILE))
    return tiles.amax(1)


def _cast_columns(cast: Cast, x: Tensor, expert: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    valid_expert = expert.clamp(0, amax.shape[0] - 1)
    largest = amax[valid_expert].repeat_interleave(_TILE, 0)
    codes, _ = quantize_whole(x, cast, 0, None, None, largest)
    _, outer = quantize_whole(amax, cast, 0, None, None, amax)
    assert outer is not None
    return codes.to(torch.float8_e4m3fn).t().contiguous(), outer.flatten()


# ── products ──────────────────────────────────────────────────────────────────────────────────────


def multiply_groups(lhs: Operand, rhs: Operand, ends: Tensor, product: Product) -> Tensor:
    """Multiply the groups of an operand by those of another one, in bfloat16.

    Codes ``[slots, contraction]`` and ``[experts, columns, contraction]`` give ``[slots,
    columns]``. Codes ``[rows, slots]`` and ``[columns, slots]`` give ``[experts, rows, columns]``.
    """
    assert lhs.outer is not None and rhs.outer is not None
    # The older of two functions: only it has a rule for tracing.
    return torch._scaled_grouped_mm(
        lhs.data,
        rhs.data.transpose(-2, -1),
        lhs.outer,
        rhs.outer,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=product.accumulation == "fast",
    )


class _Experts(FirstOrder):
    """Compute ``x · wᵀ + b`` of all experts and its gradients, on grouped kernels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor, name: str
    ) -> Tensor:
        compute = REGISTERED[name]
        slots = lay_out(x, offsets)
        lhs = cast_tokens(in_slots(x, slots), compute.output.left)
        rhs = cast_weights(weights, compute.output.right, 1)
        sums = multiply_groups(lhs, rhs, slots.ends, compute.output)
        ctx.save_for_backward(x, weights, bias, offsets, *slots)
        ctx.compute_name = name
        y: Tensor = fused(len(x) * weights.shape[1], _gathered, sums, slots.slot)
        if bias is None:
            return y
        row_expert = slots.expert[slots.slot.clamp_min(0) // _TILE]
        return y + _gathered(bias.detach().to(y.dtype), torch.where(slots.slot < 0, -1, row_expert))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        needs = ctx.needs_input_grad[:3]
        gradients = once(expert_gradients, grads[0], *ctx.saved_tensors, ctx.compute_name, needs)
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
    placed = in_slots(grad, slots)
    grad_x = grad_weights = grad_bias = None
    if needs[0]:
        product = compute.grad_input
        rhs = cast_weights(weights, product.right, 0)
        sums = multiply_groups(cast_tokens(placed, product.left), rhs, ends, product)
        grad_x = fused(x.numel(), _gathered, sums, slot)
    if needs[1]:
        product = compute.grad_weight
        lhs = cast_features(placed, product.left, slots)
        rhs = cast_features(in_slots(x, slots), product.right, slots)
        grad_weights = multiply_groups(lhs, rhs, ends, product).to(weights.dtype)
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
def works(device: torch.device) -> bool:
    """Return whether the kernel multiplies small groups without error, an empty one included.

    It waits for the device once, so the first call must not happen during CUDA graph capture.
    """
    cast = _CAST
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
        slots = lay_out(x, offsets)
        lhs = cast_tokens(in_slots(x, slots), cast)
        sums = multiply_groups(lhs, cast_weights(weights, cast, 1), slots.ends, product)
        if not torch.equal(sums[slots.slot].cpu(), torch.cat(forward).bfloat16()):
            return False
        sides = [cast_features(in_slots(tensor, slots), cast, slots) for tensor in (grad, features)]
        sums = multiply_groups(sides[0], sides[1], slots.ends, product)
        return torch.equal(sums.cpu(), torch.stack(backward).bfloat16())

    return native.is_exact(trial)
