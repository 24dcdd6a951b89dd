"""The experts of a mixture in narrow arithmetic: Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss and similar models.

A mixture stores the weights of its experts in one tensor ``[experts, out, in]``. Tokens are sorted by expert: the rows from one
*offset* to the next belong to one expert. A *grouped linear* is one small matmul per expert, each with its own casts. So each
expert has its own per-tensor scale, delayed or not, and its own key of random bits. An expert without tokens costs nothing and
gets no gradient. ``torch.compile`` leaves the product out of its graph, since the tokens per expert are known only at run time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.layer_matmuls import gradients, output, register
from narrowgauge.matmul.linear import NarrowLayer, plain_dtype
from narrowgauge.matmul.operand import Keys, Operand, layer_keys
from narrowgauge.numerics.widening import is_widened
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.notation import get_compute


def groups_of(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the experts that got tokens, each with its rows."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def _settings(num_experts: int, expert: int, keys: Keys | None, history: Tensor | None) -> dict[str, Any]:
    """Return the keys and the history for one expert's product."""
    return {
        "keys": None if keys is None else Keys(keys.clock, keys.layer[expert]),
        "history": None if history is None else history.unflatten(2, (num_experts, -1))[:, :, expert],
    }


class _Product(torch.autograd.Function):
    """Compute every expert's ``x · wᵀ + b`` and its gradients, in a compute's casts."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor, name: str, keys: Keys | None,
        history: Tensor | None, sequence_length: int, record: bool,
    ) -> Tensor:  # fmt: skip
        result = x.new_zeros((x.shape[0], weights.shape[1]))
        groups, saved = list(groups_of(offsets)), list[Tensor | None]()
        for expert, tokens in groups:
            settings = _settings(len(weights), expert, keys, history)
            expert_bias = None if bias is None else bias[expert]
            result[tokens], kept = output(
                x[tokens],
                weights[expert],
                expert_bias,
                name,
                record=record,
                input_history=settings["history"],
                **settings,
            )
            saved += [*kept]
        ctx.save_for_backward(weights, *(keys or (None, None)), *saved)
        ctx.groups, ctx.x_shape, ctx.history = groups, x.shape, history
        ctx.name, ctx.sequence_length, ctx.record = name, sequence_length, record
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, (weights, clock, key, *saved) = grads[0].contiguous(), ctx.saved_tensors
        keys = None if clock is None else Keys(clock, key)
        by_input, by_weight, by_bias = ctx.needs_input_grad[:3]
        grad_input = grad.new_zeros(ctx.x_shape) if by_input else None
        grad_weights = weights.new_zeros(weights.shape) if by_weight else None
        grad_bias = grad.new_zeros(weights.shape[:2]) if by_bias else None
        for place, (expert, tokens) in enumerate(ctx.groups):
            by_token, by_output = gradients(
                grad[tokens], Operand(*saved[3 * place : 3 * place + 3]), weights[expert], ctx.name, record=ctx.record,
                sequence_length=ctx.sequence_length, needs=(by_input, by_weight),
                **_settings(len(weights), expert, keys, ctx.history),
            )  # fmt: skip
            if grad_input is not None and by_token is not None:
                grad_input[tokens] = by_token
            if grad_weights is not None and by_output is not None:
                grad_weights[expert] = by_output
            if grad_bias is not None:
                grad_bias[expert] = grad[tokens].sum(0)
        return grad_input, grad_weights, grad_bias, *[None] * 6


_product: Callable[..., Tensor] = torch.compiler.disable(cast(Callable[..., Tensor], _Product.apply))


def grouped_linear(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    compute: Compute,
    bias: Tensor | None = None,
    keys: Keys | None = None,
    history: Tensor | None = None,
    sequence_length: int = 1,
    record: bool = False,
) -> Tensor:
    """Return each expert's linear layer over its own tokens, in a compute.

    Invariant: an expert's rows of the output, and its gradients of input and weights, equal bit for bit a
    :class:`~narrowgauge.matmul.linear.Linear` of the same compute on that expert's tokens alone.

    Args:
        x: ``[tokens, in]``, sorted by expert.
        weights: ``[experts, out, in]``, may be a view.
        offsets: int32 ``[experts]``: the end of each expert's tokens. Tokens after the last offset have no expert.
        bias: ``[experts, out]``.
        keys: with a key for each expert; needed for random bits or delayed scales.
        history: for computes with delayed scales, see :class:`GroupedLinear`.
        sequence_length: tokens per sequence. With the index of the first sequence it keys random bits.
        record: write this step's amax into ``history``.
    Returns:
        ``[tokens, out]``, zero for tokens without an expert.
    Cost: one matmul per expert, one after another; on CUDA also a wait for the offsets. bfloat16 uses PyTorch's grouped
        matmul if that takes the operands.
    """
    if x.dtype is plain_dtype(compute):
        weights = weights.to(x.dtype)
        if bias is None and _suits_torch(x, weights):
            return F.grouped_mm(x, weights.transpose(1, 2), offs=offsets)
    return _product(x, weights, bias, offsets, register(compute), keys, history, sequence_length, record)


def _suits_torch(x: Tensor, weights: Tensor) -> bool:
    """Return whether PyTorch's grouped matmul takes the operands: bfloat16, with rows that begin at multiples of 16 bytes.

    Source: ``check_valid_strides_and_return_transposed`` in ``aten/src/ATen/native/GroupedMMUtils.h`` of PyTorch.
    """
    if x.dtype != torch.bfloat16 or is_widened(x.dtype, x.device.type) or not x.shape[0]:
        return False
    sizes = x.shape[1], weights.shape[1], x.storage_offset(), weights.storage_offset()
    is_whole = weights.is_contiguous() or weights.transpose(1, 2).is_contiguous()
    if any(size % 8 for size in sizes) or not (is_whole and x.is_contiguous()):
        return False
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0)


class GroupedLinear(NarrowLayer):
    """One projection of all experts of a mixture, in a compute. The weights stay in the model's own module.

    An expert's key for random bits comes from the name of its weights and its index.
    """

    def __init__(self, num_experts: int, name: str, compute: Compute, device: torch.device | None = None) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.begin(layer_keys([f"{name}.{expert}" for expert in range(num_experts)], device), compute)

    def forward(self, x: Tensor, weights: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``[tokens, in]`` to ``[tokens, out]``; see :func:`grouped_linear`."""
        x = self.cast_stream(x)
        return grouped_linear(
            x, weights, offsets, self.compute, bias, self.keys(), self.amax_history, x.shape[0],
            torch.is_grad_enabled() and self.training,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.num_experts}, compute={self.compute.name!r}"


# ── the experts of transformers' models ────────────────────────────────────────────────────────────────────────────────
#
# Transformers stores a layer's experts as a module with two 3-D parameters: the projections into and out of the experts' hidden
# width. A name in the module's config selects the function that multiplies them. Swapping registers our own function and sets
# its name in the module's own config. So parameters, names, ``state_dict``, the model's config and the router stay.


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
    """Repeat each row ``copies`` times and reorder the rows. Backward applies the inverse order and adds the copies.

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
    """Return the weighted sum of each token's experts, ``[tokens, hidden]``, by transformers' interface for implementations.

    ``top_k_index`` and ``top_k_weights`` are ``[tokens, k]``: the chosen experts and their weights.
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
    """Apply one projection in its compute, or as PyTorch multiplies it if it was kept."""
    weights: Any = getattr(experts, name, None)  # quantized experts have none
    weights = weights.transpose(1, 2) if experts.is_transposed and weights is not None else weights
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    swapped = experts.get_submodule(NARROW)
    if name in swapped:
        return cast(Tensor, swapped[name](x, weights, offsets, bias))
    return grouped_linear(x, weights, offsets, get_compute(dtype_name(x.dtype)), bias)


def grouped_layers(model: nn.Module, choose: Callable[[str], Compute | None]) -> dict[str, GroupedLinear]:
    """Swap the experts whose projections ``choose`` gives a compute. Return the projections by name."""
    layers: dict[str, GroupedLinear] = {}
    for name, module in list(model.named_modules()):
        if is_experts(module):
            layers |= _swapped(name, module, choose)
    return layers


def grouped_layers_of(model: nn.Module) -> dict[str, GroupedLinear]:
    """Return the swapped projections, by the names that ``choose`` got."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, GroupedLinear))
    return {".".join(part for part in name.split(".") if part != NARROW): module for name, module in named}


def projections(model: nn.Module) -> list[str]:
    return [
        f"{name}.{projection}" if name else projection
        for name, module in model.named_modules()
        if is_experts(module)
        for projection in PROJECTIONS
        if projection in module._parameters
    ]


def is_experts(module: nn.Module) -> bool:
    """Return whether a module stores the weights of several experts as 3-D parameters, swapped or not."""
    return any(parameter.ndim == 3 for parameter in module._parameters.values() if parameter is not None) and any(
        projection in module._parameters for projection in PROJECTIONS
    )


def _swapped(name: str, module: Any, choose: Callable[[str], Compute | None]) -> dict[str, GroupedLinear]:
    names = {p: f"{name}.{p}" if name else p for p in PROJECTIONS if p in module._parameters}
    computes = {p: compute for p, full in names.items() if (compute := choose(full)) is not None}
    if not computes:
        return {}
    require_reachable(name, module)
    layers = {
        p: GroupedLinear(module.num_experts, names[p], compute, module.down_proj.device)
        for p, compute in computes.items()
    }
    install(module, layers)
    return {names[p]: layer for p, layer in layers.items()}


def install(module: Any, projections: Mapping[str, nn.Module]) -> None:
    """Make experts multiply by these projections, called like :class:`GroupedLinear`. Other projections stay PyTorch's."""
    module.add_module(NARROW, _Projections(projections))
    _register()
    # A copy: kept experts, and other models with the same config, use transformers' own function.
    module.config = copy.copy(module.config)
    module.config._experts_implementation = IMPLEMENTATION


def uninstall(module: Any, config: Any) -> None:
    """Undo :func:`install`: restore this config."""
    if NARROW in module._modules:
        del module._modules[NARROW]
    module.config = config


def require_reachable(name: str, module: Any) -> None:
    """Refuse experts that are sharded or that transformers' registry does not reach."""
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
