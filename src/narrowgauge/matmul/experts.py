"""Experts of a mixture in low-precision matmuls: Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss and similar models.

A mixture stores the weights of its experts in one tensor ``[experts, out, in]``. Sorted by expert, the tokens are a matrix. The
rows from one *offset* to the next belong to one expert. A *grouped linear* is one small matmul per expert, with its own casts.
So each expert has its own scale per tensor, delayed or not, and its own key of random bits. An expert without tokens costs
nothing and gets no gradient. The whole product is one operator. So a compiler does not see how many tokens each expert got, and
the graph does not break.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import layer_matmuls
from narrowgauge.matmul.layer_matmuls import REGISTERED, gradients, output
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


def _settings(
    expert: int,
    experts: int,
    compute: str,
    clock: Tensor | None,
    key: Tensor | None,
    history: Tensor | None,
    record: bool,
) -> dict[str, Any]:
    """Return the arguments of one expert's product, without its tensors."""
    keys = None if clock is None or key is None else Keys(clock, key[expert])
    expert_history = None if history is None else history.unflatten(2, (experts, -1))[:, :, expert]
    return {"name": compute, "keys": keys, "history": expert_history, "record": record}


def _place(compute: str, expert: int, tokens: slice) -> slice:
    """Return the rows of an expert's scales of the input: one per token, or one per expert."""
    return tokens if REGISTERED[compute].output.left.granularity == "row" else slice(expert, expert + 1)


def _keeps_codes(compute: str) -> bool:
    """Return whether backward uses the codes of the input, one row per token, and not the input."""
    registered = REGISTERED[compute]
    return registered.output.left.block is None and registered.cast_slots["grad_weight.right"] == "output.left"


@torch.library.custom_op("narrowgauge::grouped_output", mutates_args=("history",))
def _grouped_output(
    x: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor, compute: str, clock: Tensor | None, key: Tensor | None,
    history: Tensor | None, record: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return ``output [tokens, out]``, zero after the last expert's tokens, and data and outer scales of the cast input."""
    result, data, outer = _empty_output(x, weights, compute)
    for expert, tokens in groups_of(offsets):
        settings = _settings(expert, len(weights), compute, clock, key, history, record)
        own_bias = None if bias is None else bias[expert]
        y, saved = output(x[tokens], weights[expert], own_bias, input_history=settings["history"], **settings)
        result[tokens] = y
        if data.numel():
            data[tokens] = saved.data
        if outer.numel() and saved.outer is not None:
            outer[_place(compute, expert, tokens)] = saved.outer
    return result, data, outer


@torch.library.custom_op("narrowgauge::grouped_gradients", mutates_args=("history",))
def _grouped_gradients(
    grad: Tensor, data: Tensor, outer: Tensor, weights: Tensor, offsets: Tensor, compute: str, clock: Tensor | None,
    key: Tensor | None, history: Tensor | None, sequence_length: int, needs: list[bool], record: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of input, weights and bias; empty where not needed, zero for experts without tokens."""
    grad_input, grad_weights, grad_bias = _empty_gradients(grad, weights, needs)
    for expert, tokens in groups_of(offsets):
        settings = _settings(expert, len(weights), compute, clock, key, history, record)
        saved = Operand(data[tokens], outer[_place(compute, expert, tokens)] if outer.numel() else None)
        if not _keeps_codes(compute) and REGISTERED[compute].cast_slots["grad_weight.right"] == "output.left":
            saved = layer_matmuls.cast_to_slot(saved.data, REGISTERED[compute], "output.left")
        by_token, by_output = gradients(
            grad[tokens],
            saved,
            weights[expert],
            sequence_length=sequence_length,
            needs=(needs[0], needs[1]),
            **settings,
        )
        if by_token is not None:
            grad_input[tokens] = by_token
        if by_output is not None:
            grad_weights[expert] = by_output
        if needs[2]:
            grad_bias[expert] = grad[tokens].sum(0)
    return grad_input, grad_weights, grad_bias


@_grouped_output.register_fake
def _(x: Tensor, weights: Tensor, bias: Any, offsets: Any, compute: str, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_output(x, weights, compute)


@_grouped_gradients.register_fake
def _(grad: Tensor, data: Any, outer: Any, weights: Tensor, offsets: Any, compute: str, clock: Any, key: Any, history: Any,
      sequence_length: int, needs: list[bool], record: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty_gradients(grad, weights, needs)


def _empty_output(x: Tensor, weights: Tensor, compute: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the results of an output. Entries that belong to no expert are never read."""
    result, data, outer = x.new_zeros((x.shape[0], weights.shape[1])), x.new_empty(0), None
    if _keeps_codes(compute):
        specimen = layer_matmuls.cast_to_slot(x.new_zeros((1, x.shape[1])), REGISTERED[compute], "output.left")
        data = x.new_empty(x.shape, dtype=specimen.data.dtype)
        if specimen.outer is not None:
            scales = x.shape[0] if REGISTERED[compute].output.left.granularity == "row" else len(weights)
            outer = specimen.outer.new_empty((scales, specimen.outer.shape[1]))
    return result, data, x.new_empty(0, dtype=torch.float32) if outer is None else outer


def _empty_gradients(grad: Tensor, weights: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    return (
        grad.new_zeros((grad.shape[0], weights.shape[2])) if needs[0] else grad.new_empty(0),
        weights.new_zeros(weights.shape) if needs[1] else grad.new_empty(0),
        grad.new_zeros(weights.shape[:2]) if needs[2] else grad.new_empty(0),
    )


class _Product(torch.autograd.Function):
    """Compute every expert's ``x · wᵀ + b`` and its gradients, in a compute's casts."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor, name: str, clock: Tensor | None,
        key: Tensor | None, history: Tensor | None, sequence_length: int, record: bool,
    ) -> Tensor:  # fmt: skip
        y, data, outer = _grouped_output(x, weights, bias, offsets, name, clock, key, history, record)
        ctx.save_for_backward(data if _keeps_codes(name) else x, outer, weights, offsets, clock, key)
        ctx.history = history
        ctx.name, ctx.sequence_length, ctx.record = name, sequence_length, record
        return cast(Tensor, y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        data, outer, weights, offsets, clock, key = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        results = _grouped_gradients(
            grads[0].contiguous(), data, outer, weights, offsets, ctx.name, clock, key, ctx.history, ctx.sequence_length,
            needs, ctx.record,
        )  # fmt: skip
        return *(grad if needed else None for grad, needed in zip(results, needs, strict=True)), *[None] * 7


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

    Invariant: an expert's output and gradients have the bits of a :class:`~narrowgauge.matmul.linear.Linear` of the same compute
    on that expert's tokens alone.

    Args:
        x: ``[tokens, in]``, sorted by expert.
        weights: ``[experts, out, in]``, a view or not.
        offsets: int32 ``[experts]``: the end of each expert's tokens. Tokens after the last offset have no expert.
        bias: ``[experts, out]``.
        keys: with a key for each expert. Needed for random bits or delayed scales.
        history: for computes with delayed scales, see :class:`GroupedLinear`.
        sequence_length: tokens per sequence. With the index of the first sequence it keys random bits.
        record: write the amax of this step into ``history``.
    Returns:
        ``[tokens, out]``, zero for tokens without an expert.
    Cost: one matmul per expert, one after another, and on CUDA a wait for the offsets. Bfloat16 uses PyTorch's grouped matmul if
        that takes the operands.
    """
    if x.dtype is plain_dtype(compute):
        weights = weights.to(x.dtype)
        if bias is None and _suits_torch(x, weights):
            return F.grouped_mm(x, weights.transpose(1, 2), offs=offsets)
    apply = cast(Callable[..., Tensor], _Product.apply)
    name, (clock, key) = layer_matmuls.register(compute), keys or (None, None)
    return apply(x, weights, bias, offsets, name, clock, key, history, sequence_length, record)


def _suits_torch(x: Tensor, weights: Tensor) -> bool:
    """Return whether PyTorch's grouped matmul takes the operands: bfloat16, in rows that begin at multiples of 16 bytes.

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
    """Multiply by one projection of all experts, in a compute. The weights stay in the model's own module.

    An expert's key, and so its random bits, comes from the name of its weights and its index.
    """

    def __init__(self, num_experts: int, name: str, compute: Compute, device: torch.device | None = None) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.begin(layer_keys([f"{name}.{expert}" for expert in range(num_experts)], device), compute)

    def forward(self, x: Tensor, weights: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``[tokens, in]`` to ``[tokens, out]``, see :func:`grouped_linear`."""
        x = self.cast_stream(x)
        return grouped_linear(
            x, weights, offsets, self.compute, bias, self.keys(), self.amax_history, x.shape[0],
            torch.is_grad_enabled() and self.training,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.num_experts}, compute={self.compute.name!r}"


# ── the experts of transformers' models ────────────────────────────────────────────────────────────────────────────────
#
# Transformers stores the experts of a layer as a module with two 3-D parameters: the projection into the experts' hidden width,
# and the one out of it. A name in the module's config selects the function that multiplies them. Swapping registers our
# function, and sets its name in a config of the module's own. So parameters, names, ``state_dict`` and the model's config stay.
# The router does not change.


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
    """Reorder rows, each first repeated ``copies`` times. Backward applies the inverse order and adds the copies.

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
    """Return the weighted sum of each token's experts, ``[tokens, hidden]``. Transformers calls it.

    ``top_k_index`` and ``top_k_weights`` are ``[tokens, k]``: the experts of a token, and their weights.
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
    """Multiply by one projection, in its compute, or as PyTorch does if it was not swapped."""
    weights: Any = getattr(experts, name, None)  # quantized experts have none
    weights = weights.transpose(1, 2) if experts.is_transposed and weights is not None else weights
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    swapped = experts.get_submodule(NARROW)
    if name in swapped:
        return cast(Tensor, swapped[name](x, weights, offsets, bias))
    return grouped_linear(x, weights, offsets, get_compute(dtype_name(x.dtype)), bias)


def grouped_layers(model: nn.Module, choose: Callable[[str], Compute | None]) -> dict[str, GroupedLinear]:
    """Swap the experts whose projections get a compute from ``choose``. Return the projections by name."""
    layers: dict[str, GroupedLinear] = {}
    for name, module in list(model.named_modules()):
        if is_experts(module):
            layers |= _swapped(name, module, choose)
    return layers


def grouped_layers_of(model: nn.Module) -> dict[str, GroupedLinear]:
    """Return the projections that are already swapped, by the names that ``choose`` got."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, GroupedLinear))
    return {".".join(part for part in name.split(".") if part != NARROW): module for name, module in named}


def projections(model: nn.Module) -> list[str]:
    """Return the names of the projections of all experts."""
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
    names = {
        projection: f"{name}.{projection}" if name else projection
        for projection in PROJECTIONS
        if projection in module._parameters
    }
    computes = {projection: compute for projection, full in names.items() if (compute := choose(full)) is not None}
    if not computes:
        return {}
    require_reachable(name, module)
    layers = {
        projection: GroupedLinear(module.num_experts, names[projection], compute, module.down_proj.device)
        for projection, compute in computes.items()
    }
    install(module, layers)
    return {names[projection]: layer for projection, layer in layers.items()}


def install(module: Any, projections: Mapping[str, nn.Module]) -> None:
    """Make experts multiply by these projections, called like :class:`GroupedLinear`. Others stay PyTorch's."""
    module.add_module(NARROW, _Projections(projections))
    _register()
    # A copy: other models of this config, and experts that are not swapped, use transformers' own function.
    module.config = copy.copy(module.config)
    module.config._experts_implementation = IMPLEMENTATION


def uninstall(module: Any, config: Any) -> None:
    """Undo :func:`install`. ``config`` is the module's config before it."""
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
