"""The experts of transformers' mixtures in narrow arithmetic: Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss and their like.

Transformers keeps the experts of a layer as a module with two 3-D parameters, the projection into the experts' hidden width and
the one out of it, and looks up by a name in the module's config which function multiplies them. :func:`swap_experts` registers
a function of ours and names it, for each module it swaps, in a config of the module's own: parameters, names, ``state_dict``
and the model's config stay. The router is not an expert, and stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.choosing import Choice, row_chooser, tell_emulation
from narrowgauge.matmul.grouped import GroupedLinear, grouped_linear
from narrowgauge.matmul.linears import Linears
from narrowgauge.spec.computes import Compute

IMPLEMENTATION = "narrowgauge"
"""What transformers calls these experts, beside its own ``eager``, ``batched_mm`` and ``grouped_mm``."""
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
NARROW = "narrow"
"""The submodule that holds the projections' rows: no parameters, nothing in the ``state_dict``."""


class _Rows(nn.ModuleDict):
    """The projections of one module by name."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _register()  # a pickle may come to a process that has swapped no experts


class _Permuted(torch.autograd.Function):
    """Rows in another order, each first repeated ``copies`` times; backward takes the opposite order and adds the copies.

    PyTorch's own indexing adds up gradients row by row, on CUDA in no fixed order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, opposite: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(opposite)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient of ``x``."""
        (opposite,) = ctx.saved_tensors
        grad = grads[0][opposite]
        return grad if ctx.copies == 1 else grad.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


_permuted = cast(Callable[..., Tensor], _Permuted.apply)


def multiply_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The sum of each token's experts, each times its weight: what transformers asks of an implementation.

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
    opposite = torch.argsort(order)
    offsets = torch.searchsorted(
        chosen, torch.arange(experts.num_experts, device=chosen.device, dtype=chosen.dtype), right=True, out_int32=True
    )
    x = _permuted(hidden_states, order, opposite, top_k)
    if experts.has_gate:
        x = experts._apply_gate(_project(experts, "gate_up_proj", x, chosen, offsets))
    else:
        x = experts.act_fn(_project(experts, "up_proj", x, chosen, offsets))
    x = _project(experts, "down_proj", x, chosen, offsets)
    if experts.has_post_expert_norm:
        x = experts.post_expert_norm(x)
    y = _permuted(x, opposite, order, 1).view(tokens, top_k, -1)
    return (y * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def _project(experts: Any, name: str, x: Tensor, chosen: Tensor, offsets: Tensor) -> Tensor:
    """One projection, in its own row or, where that was kept, as PyTorch multiplies it."""
    weights = getattr(experts, name).transpose(1, 2) if experts.is_transposed else getattr(experts, name)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    rows = experts.get_submodule(NARROW)
    if name in rows:
        return cast(Tensor, rows[name](x, weights, offsets, bias))
    return grouped_linear(x, weights, offsets, str(x.dtype).removeprefix("torch."), bias=bias)


def swap_experts(
    model: nn.Module,
    compute: Choice,
    *,
    keep: tuple[str, ...] | None = None,
    seed: int = 0,
) -> Linears:
    """Let the experts of a transformers model compute in a row of ``COMPUTES``, in place.

    Law: as for :func:`~narrowgauge.matmul.swapping.swap_linears`; an expert's values are those of a linear layer of the row
    on that expert's tokens.

    Args:
        model: with experts as transformers 5 keeps them.
        compute: a row, its name, or a function from a projection's name (``…experts.down_proj``) to either, or ``None``.
        keep: patterns of names to leave alone; ``None`` takes the row's own.
        seed: of stochastic casts.
    Returns:
        A handle on the swapped projections.
    Raises:
        RecipeError: no such row; no experts to swap; experts of a kind that cannot be, or that are spread over machines.

    Cost: as :func:`~narrowgauge.matmul.grouped.grouped_linear`.
    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> small = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        ...                       num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> sorted(swap_experts(MixtralForCausalLM(small), "int8-row").layers)
        ['model.layers.0.mlp.experts.down_proj', 'model.layers.0.mlp.experts.gate_up_proj']
    """
    layers = grouped_layers(model, row_chooser(compute, keep))
    if not layers:
        raise RecipeError(
            f"{type(model).__name__} has no experts to compute narrowly.",
            "They must lie in one 3-D parameter as transformers 5 keeps them, and not all be kept.",
        )
    for layer in {layer.compute.name: layer for layer in layers.values()}.values():
        tell_emulation(layer.compute, layer.state.device)
    linears = Linears(layers, seed)
    linears.follow_any()
    return linears


def grouped_layers(model: nn.Module, choose: Callable[[str], Compute | None]) -> dict[str, GroupedLinear]:
    """Swap the experts whose projections get a row, and return the projections by name: for whoever swaps a whole model."""
    layers: dict[str, GroupedLinear] = {}
    for name, module in list(model.named_modules()):
        if is_experts(module):
            layers |= _swapped(name, module, choose)
    return layers


def grouped_layers_of(model: nn.Module) -> dict[str, GroupedLinear]:
    """The projections that are swapped already, by the names that ``choose`` got."""
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
    """Whether a module keeps the weights of several experts as 3-D parameters, swapped or not."""
    return any(parameter.ndim == 3 for parameter in module._parameters.values() if parameter is not None) and any(
        projection in module._parameters for projection in PROJECTIONS
    )


def _swapped(name: str, module: Any, choose: Callable[[str], Compute | None]) -> dict[str, GroupedLinear]:
    names = {own: f"{name}.{own}" if name else own for own in PROJECTIONS if own in module._parameters}
    rows = {own: row for own, full in names.items() if (row := choose(full)) is not None}
    if not rows:
        return {}
    _check(name, module)
    layers = {
        own: GroupedLinear(module.num_experts, names[own], row, module.down_proj.device) for own, row in rows.items()
    }
    module.add_module(NARROW, _Rows(layers))
    _register()
    # Another model made of the same config, and experts that are kept, go on with transformers' own function.
    module.config = copy.copy(module.config)
    module.config._experts_implementation = IMPLEMENTATION
    return {names[own]: layer for own, layer in layers.items()}


def _check(name: str, module: Any) -> None:
    """Refuse experts that transformers' registry does not reach, or that know only some of themselves."""
    if not hasattr(module, "is_concatenated") or not hasattr(module.config, "_experts_implementation"):
        raise RecipeError(
            f"'{name}', a {type(module).__name__}, multiplies its experts in its own way, which takes no other.",
            f'Leave them as they are with keep = ["{name}.*"].',
        )
    if module._is_expert_parallel:
        raise RecipeError(
            f"the experts of '{name}' are spread over machines by expert parallelism, which narrow experts do not know.",
            "Load the model without it.",
        )


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, multiply_experts)
