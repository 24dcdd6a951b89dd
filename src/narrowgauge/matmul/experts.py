"""The experts of transformers' mixtures in narrow arithmetic: Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss and similar models.

Transformers stores the experts of a layer as a module with two 3-D parameters, the projection into the experts' hidden width and
the one out of it, and a name in the module's config selects the function that multiplies them. Swapping registers a
function of ours and sets its name in a config of the module's own, so parameters, names, ``state_dict`` and the model's config
stay. The router is not an expert and stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.grouped import GroupedLinear, grouped_linear
from narrowgauge.spec.computes import Compute

IMPLEMENTATION = "narrowgauge"
"""The name in transformers' registry, next to its own ``eager``, ``batched_mm`` and ``grouped_mm``."""
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
NARROW = "narrow"
"""The submodule that holds the swapped projections: no parameters, nothing in the ``state_dict``."""


class _Projections(nn.ModuleDict):
    """The swapped projections of one module, by name."""

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
        """The gradient of ``x``."""
        (inverse,) = ctx.saved_tensors
        grad = grads[0][inverse]
        return grad if ctx.copies == 1 else grad.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


_permuted = cast(Callable[..., Tensor], _Permuted.apply)


def multiply_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The sum of each token's experts, each times its weight: transformers' interface of an implementation.

    Args:
        module: the experts.
        hidden_states: ``[tokens, hidden]``.
        top_k_index, top_k_weights: ``[tokens, k]``: which experts, and how much of each.
    Returns:
        ``[tokens, hidden]``.
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
    weights = getattr(experts, name).transpose(1, 2) if experts.is_transposed else getattr(experts, name)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    swapped = experts.get_submodule(NARROW)
    if name in swapped:
        return cast(Tensor, swapped[name](x, weights, offsets, bias))
    return grouped_linear(x, weights, offsets, str(x.dtype).removeprefix("torch."), bias=bias)


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
    """The names of a model's experts' projections."""
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
    _check(name, module)
    layers = {
        own: GroupedLinear(module.num_experts, names[own], compute, module.down_proj.device)
        for own, compute in computes.items()
    }
    module.add_module(NARROW, _Projections(layers))
    _register()
    # A copy: another model of the same config, and experts that are kept, use transformers' own function.
    module.config = copy.copy(module.config)
    module.config._experts_implementation = IMPLEMENTATION
    return {names[own]: layer for own, layer in layers.items()}


def _check(name: str, module: Any) -> None:
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
