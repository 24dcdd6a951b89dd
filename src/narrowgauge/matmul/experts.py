"""The experts of a mixture in narrow arithmetic: Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss and similar models.

A mixture stores the weights of its experts in one tensor ``[experts, out, in]``. Sorted by expert, the tokens are a matrix in
which the rows from one *offset* to the next belong to one expert: a *grouped linear* is one small matmul per expert, each with
its own casts. Each expert thus has its own per-tensor scale, delayed or not, and its own key of random bits; an expert without
tokens costs nothing and gets no gradient. The whole product is one operator, so that a compiler does not see how many tokens
each expert got, and the graph does not break.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import layer_matmuls, operand
from narrowgauge.matmul.layer_matmuls import slot_dtype
from narrowgauge.matmul.linear import NarrowLayer, is_plain
from narrowgauge.matmul.operand import has_outer_scale, outer_dim
from narrowgauge.numerics.widening import is_widened
from narrowgauge.spec.computes import SLOTS, Compute, slot_of_cast
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.notation import get_compute


@torch.library.custom_op("narrowgauge::grouped_output", mutates_args=())
def grouped_output(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    compute: str,
    state: Tensor,
    history: Tensor | None,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``output [tokens, out]``, zero after the last expert's tokens; and of the cast input the data and outer scales to keep."""
    left = layer_matmuls.REGISTERED[compute].output.left
    result = x.new_zeros((x.shape[0], weights.shape[1]))
    data, outer = _empty_kept(x, weights.shape[0], compute)
    for expert, tokens in groups_of(offsets):
        own, by = state[:, expert], _history_of(history, expert, len(weights))
        group = x[tokens]
        values, scale, inner = layer_matmuls.cast_input(group, compute, None if by is None else own, by, record)
        source = group if left.outliers else None
        result[tokens] = layer_matmuls.multiply_output(
            values, scale, inner, source, weights[expert], None if bias is None else bias[expert], compute, own, by,
            record, len(group), x.dtype,
        )  # fmt: skip
        if data.numel():
            data[tokens] = values
        if outer.numel():
            outer[_scales_of("output.left", compute, expert, tokens)] = scale
    return result, data, outer


@torch.library.custom_op("narrowgauge::grouped_gradients", mutates_args=())
def grouped_gradients(
    grad: Tensor,
    data: Tensor,
    outer: Tensor,
    weights: Tensor,
    offsets: Tensor,
    compute: str,
    state: Tensor,
    history: Tensor | None,
    sequence_length: int,
    wanted: list[bool],
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weights and bias; empty where not wanted, zero for experts without tokens."""
    right = layer_matmuls.REGISTERED[compute].grad_weight.right
    grad_input, grad_weights, grad_bias = _empty_gradients(grad, weights, wanted)
    for expert, tokens in groups_of(offsets):
        own, by = state[:, expert], _history_of(history, expert, len(weights))
        group, kept, scale, inner = grad[tokens], data[tokens], outer, outer.new_empty(0)
        if outer.numel():
            scale = outer[_scales_of("grad_weight.right", compute, expert, tokens)]
        elif wanted[1] and not _keeps_data(compute) and not right.is_wide:
            kept, scale, inner = layer_matmuls.cast_kept(kept, compute, own if right.needs_bits else None)
        by_token, by_output = layer_matmuls.gradients(
            group, kept, scale, inner, weights[expert], compute, own, by, sequence_length, wanted[:2], record
        )
        if wanted[0]:
            grad_input[tokens] = by_token
        if wanted[1]:
            grad_weights[expert] = by_output
        if wanted[2]:
            grad_bias[expert] = group.sum(0)
    return grad_input, grad_weights, grad_bias


@grouped_output.register_fake
def _(
    x: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor, compute: str, state: Tensor, history: Tensor | None,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return x.new_empty((x.shape[0], weights.shape[1])), *_empty_kept(x, weights.shape[0], compute)


@grouped_gradients.register_fake
def _(
    grad: Tensor, data: Tensor, outer: Tensor, weights: Tensor, offsets: Tensor, compute: str, state: Tensor,
    history: Tensor | None, sequence_length: int, wanted: list[bool], record: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty_gradients(grad, weights, wanted)


def groups_of(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def _history_of(history: Tensor | None, expert: int, num_experts: int) -> Tensor | None:
    return None if history is None else history.unflatten(2, (num_experts, -1))[:, :, expert]


def _keeps_data(compute: str) -> bool:
    """Whether ``grad_weight`` takes the input as cast for ``output``, with one row per token."""
    made = layer_matmuls.REGISTERED[compute]
    return made.output.left.block is None and slot_of_cast(made, "grad_weight.right") == "output.left"


def _scales_of(slot: str, compute: str, expert: int, tokens: slice) -> slice:
    """Where an expert's scales of the input are kept: one per token, or one row per expert."""
    cast = layer_matmuls.REGISTERED[compute].casts[slot]
    return tokens if outer_dim(cast, SLOTS[slot].dim) == 0 else slice(expert, expert + 1)


def _empty_kept(x: Tensor, num_experts: int, compute: str) -> tuple[Tensor, Tensor]:
    """Uninitialized data and scales to keep of the cast input; entries that belong to no expert are never read."""
    left = layer_matmuls.REGISTERED[compute].output.left
    if not _keeps_data(compute):
        return x.new_empty(0), x.new_empty(0, dtype=torch.float32)
    along = outer_dim(left, 1)
    scales = (x.shape[0] if along == 0 else num_experts) if has_outer_scale(left) else 0
    data = x.new_empty(x.shape, dtype=slot_dtype(layer_matmuls.REGISTERED[compute], "output.left", x.device))
    return data, x.new_empty((scales, x.shape[1] if along == 1 else 1), dtype=torch.float32)


def _empty_gradients(grad: Tensor, weights: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    return (
        grad.new_zeros((grad.shape[0], weights.shape[2])) if wanted[0] else grad.new_empty(0),
        weights.new_zeros(weights.shape) if wanted[1] else grad.new_empty(0),
        grad.new_zeros(weights.shape[:2]) if wanted[2] else grad.new_empty(0),
    )


class _Product(torch.autograd.Function):
    """Every expert's ``x · wᵀ + b`` and its gradients, in a compute's casts."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor, name: str, state: Tensor,
        history: Tensor | None, sequence_length: int, record: bool,
    ) -> Tensor:  # fmt: skip
        y: Tensor
        y, data, outer = grouped_output(x, weights, bias, offsets, name, state, history, record)
        ctx.save_for_backward(data if _keeps_data(name) else x, outer, weights, offsets, state, history)
        ctx.name, ctx.sequence_length, ctx.record = name, sequence_length, record
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        data, outer, weights, offsets, state, history = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        found = grouped_gradients(
            grads[0].contiguous(), data, outer, weights, offsets, ctx.name, state, history, ctx.sequence_length, wanted,
            ctx.record,
        )  # fmt: skip
        given = [grad if needed else None for grad, needed in zip(found, wanted, strict=True)]
        return (*given, None, None, None, None, None, None)


def grouped_linear(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    compute: str | Compute,
    *,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    history: Tensor | None = None,
    sequence_length: int = 1,
    record: bool = False,
) -> Tensor:
    """Each expert's linear layer over its own tokens, in a compute.

    Invariant: an expert's rows of the output, of the input's gradient and of the weights' are those of a
    :class:`~narrowgauge.matmul.linear.Linear` of the same compute on that expert's tokens alone, bit for bit.

    Args:
        x: ``[tokens, in]``, sorted by expert.
        weights: ``[experts, out, in]``, a view or not.
        offsets: int32 ``[experts]``: the end of each expert's tokens. Tokens after the last offset have no expert.
        bias: ``[experts, out]``.
        state: int32 ``[4, experts]``, see :func:`new_state`; ``None``: step 0 and seed 0.
        history: for computes with delayed scales, see :class:`GroupedLinear`.
        sequence_length: tokens per sequence; with the index of the first sequence it keys random bits.
        record: write the amax of this step into ``history``.
    Returns:
        ``[tokens, out]``, zero for tokens without an expert.
    Raises:
        RecipeError: no such compute, or delayed scales without a history.
    Cost: one matmul per expert, one after another, and on CUDA a wait for the offsets; bfloat16 uses PyTorch's grouped
        matmul where that takes the operands.
    Example:
        >>> x, weights = torch.randn(5, 32), torch.randn(3, 16, 32)
        >>> grouped_linear(x, weights, torch.tensor([2, 2, 5], dtype=torch.int32), "float8-row").shape
        torch.Size([5, 16])
    """
    made = get_compute(compute)
    if made.is_delayed and history is None:
        raise RecipeError(
            f"compute '{made.name}' takes its scales from earlier steps, and grouped_linear got no history of them.",
            "Use a GroupedLinear, which has one.",
        )
    name = layer_matmuls.register(made)
    weights = weights.to(x.dtype) if is_plain(made, x.dtype) else weights
    if is_plain(made, x.dtype) and bias is None and _suits_torch(x, weights):
        return F.grouped_mm(x, weights.transpose(1, 2), offs=offsets)
    state = new_state(len(weights), device=x.device) if state is None else state
    apply = cast(Callable[..., Tensor], _Product.apply)
    return apply(x, weights, bias, offsets, name, state, history, sequence_length, record)


def _suits_torch(x: Tensor, weights: Tensor) -> bool:
    """Whether PyTorch's grouped matmul takes the operands, compiled too: bfloat16 in rows that begin at multiples of 16 bytes."""
    if is_widened(x.dtype, x.device.type):
        return False
    if x.dtype != torch.bfloat16 or x.shape[1] % 8 or weights.shape[1] % 8 or not x.shape[0]:
        return False
    if not all(map(_is_aligned, (x, weights))):
        return False
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0)


def _is_aligned(x: Tensor) -> bool:
    """Whether a bfloat16 tensor and its matrices' rows, or columns, begin at multiples of 16 bytes, and elements are neighbours.

    Source: ``check_valid_strides_and_return_transposed`` in ``aten/src/ATen/native/GroupedMMUtils.h`` of PyTorch.
    """
    (rows, columns), (by_row, by_column) = x.shape[-2:], x.stride()[-2:]
    lies = (by_column == 1 and by_row >= columns) or (by_row == 1 and by_column >= rows)
    return lies and not any(number % 8 for number in (x.storage_offset(), *x.stride()) if number != 1)


def new_state(num_experts: int, name: str = "", device: torch.device | None = None) -> Tensor:
    """Int32 ``[4, experts]``: the state that a :class:`~narrowgauge.matmul.linear.Linear` has, for each expert.

    An expert's key, and so its random bits, comes from the name of its weights and its index.
    """
    return operand.new_state([f"{name}.{expert}" for expert in range(num_experts)], device)


class GroupedLinear(NarrowLayer):
    """One projection of all experts of a mixture, in a compute; the weights stay in the model's own module."""

    def __init__(self, num_experts: int, name: str, compute: Compute, device: torch.device | None = None) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.begin(new_state(num_experts, name, device), compute)

    def forward(self, x: Tensor, weights: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``; see :func:`grouped_linear`."""
        x = self.as_streamed(x)
        return grouped_linear(
            x, weights, offsets, self.compute, bias=bias, state=self.state, history=self.amax_history,
            sequence_length=x.shape[0], record=torch.is_grad_enabled() and self.training,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.num_experts}, compute={self.compute.name!r}"


# ── the experts of transformers' models ────────────────────────────────────────────────────────────────────────────────
#
# Transformers stores the experts of a layer as a module with two 3-D parameters, the projection into the experts' hidden width
# and the one out of it, and a name in the module's config selects the function that multiplies them. Swapping registers a
# function of ours and sets its name in a config of the module's own, so parameters, names, ``state_dict`` and the model's config
# stay. The router is not an expert and stays as it is.


IMPLEMENTATION = "narrowgauge"
"""The name in transformers' registry, next to its own ``eager``, ``batched_mm`` and ``grouped_mm``."""
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
NARROW = "narrow"
"""The submodule that holds the swapped projections: no parameters, nothing in the ``state_dict``."""


class _Projections(nn.ModuleDict):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _register()  # a process that unpickles it may have swapped no experts


class _Permuted(torch.autograd.Function):
    """Rows in another order, each first repeated ``copies`` times; backward applies the inverse order and adds the copies.

    PyTorch's own indexing adds up gradients row by row, on CUDA in no fixed order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        grad = grads[0][inverse]
        return grad if ctx.copies == 1 else grad.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


_permuted = cast(Callable[..., Tensor], _Permuted.apply)


def multiply_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of each token's experts, ``[tokens, hidden]``: transformers' interface of an implementation.

    ``top_k_index`` and ``top_k_weights`` are ``[tokens, k]``: which experts, and how much of each.
    """
    experts: Any = module
    tokens, top_k = top_k_index.shape
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
    inverse = torch.argsort(order)
    offsets = torch.searchsorted(
        chosen, torch.arange(experts.num_experts, device=chosen.device, dtype=chosen.dtype), right=True, out_int32=True
    )
    x = _permuted(hidden_states, order, inverse, top_k)
    if experts.has_gate:
        x = experts._apply_gate(_project(experts, "gate_up_proj", x, chosen, offsets))
    else:
        x = experts.act_fn(_project(experts, "up_proj", x, chosen, offsets))
    x = _project(experts, "down_proj", x, chosen, offsets)
    if experts.has_post_expert_norm:
        x = experts.post_expert_norm(x)
    y = _permuted(x, inverse, order, 1).view(tokens, top_k, -1)
    return (y * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def _project(experts: Any, name: str, x: Tensor, chosen: Tensor, offsets: Tensor) -> Tensor:
    """One projection, in its compute or, where it was kept, as PyTorch multiplies it."""
    weights: Any = getattr(experts, name, None)  # quantized experts have none
    weights = weights.transpose(1, 2) if experts.is_transposed and weights is not None else weights
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    swapped = experts.get_submodule(NARROW)
    if name in swapped:
        return cast(Tensor, swapped[name](x, weights, offsets, bias))
    return grouped_linear(x, weights, offsets, dtype_name(x.dtype), bias=bias)


def grouped_layers(model: nn.Module, choose: Callable[[str], Compute | None]) -> dict[str, GroupedLinear]:
    """Swap the experts whose projections ``choose`` gives a compute, and return the projections by name."""
    layers: dict[str, GroupedLinear] = {}
    for name, module in list(model.named_modules()):
        if is_experts(module):
            layers |= _swapped(name, module, choose)
    return layers


def grouped_layers_of(model: nn.Module) -> dict[str, GroupedLinear]:
    """The projections that are already swapped, by the names that ``choose`` got."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, GroupedLinear))
    return {".".join(part for part in name.split(".") if part != NARROW): module for name, module in named}


def projections(model: nn.Module) -> list[str]:
    return [
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        if is_experts(module)
        for own in PROJECTIONS
        if own in module._parameters
    ]


def is_experts(module: nn.Module) -> bool:
    """Whether a module stores the weights of several experts as 3-D parameters, swapped or not."""
    return any(parameter.ndim == 3 for parameter in module._parameters.values() if parameter is not None) and any(
        projection in module._parameters for projection in PROJECTIONS
    )


def _swapped(name: str, module: Any, choose: Callable[[str], Compute | None]) -> dict[str, GroupedLinear]:
    names = {own: f"{name}.{own}" if name else own for own in PROJECTIONS if own in module._parameters}
    computes = {own: compute for own, full in names.items() if (compute := choose(full)) is not None}
    if not computes:
        return {}
    require_reachable(name, module)
    layers = {
        own: GroupedLinear(module.num_experts, names[own], compute, module.down_proj.device)
        for own, compute in computes.items()
    }
    install(module, layers)
    return {names[own]: layer for own, layer in layers.items()}


def install(module: Any, projections: Mapping[str, nn.Module]) -> None:
    """Let experts multiply by these projections, each called as a :class:`GroupedLinear` is; others stay PyTorch's."""
    module.add_module(NARROW, _Projections(projections))
    _register()
    # A copy: another model of the same config, and experts that are kept, use transformers' own function.
    module.config = copy.copy(module.config)
    module.config._experts_implementation = IMPLEMENTATION


def uninstall(module: Any, config: Any) -> None:
    """Let experts multiply as they did with this config, before :func:`install`."""
    if NARROW in module._modules:
        del module._modules[NARROW]
    module.config = config


def require_reachable(name: str, module: Any) -> None:
    """Refuse experts that transformers' registry does not reach, or that are sharded."""
    if not hasattr(module, "is_concatenated") or not hasattr(module.config, "_experts_implementation"):
        raise RecipeError(
            f"'{name}', a {type(module).__name__}, multiplies its experts by its own code, which cannot be replaced.",
            f'Leave them as they are with keep = ["{name}.*"].',
        )
    if module._is_expert_parallel:
        raise RecipeError(
            f"the experts of '{name}' are sharded by expert parallelism, which narrow experts do not support.",
            "Load the model without it.",
        )


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, multiply_experts)
