"""Swapping: a model's linear layers and experts go on in a row of the computes, in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import experts
from narrowgauge.matmul.choosing import Choice, row_chooser, row_of, tell_emulation
from narrowgauge.matmul.fused_attention import widen_attention
from narrowgauge.matmul.linear import Linear, is_linear, narrowed
from narrowgauge.matmul.linears import Layer, Linears
from narrowgauge.numerics.widening import is_widened
from narrowgauge.spec import variants
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.processor import care_for


def swap_linears(
    model: nn.Module,
    compute: Choice,
    *,
    keep: tuple[str, ...] | None = None,
    seed: int = 0,
) -> Linears:
    """Let a model's linear layers compute in a row of ``COMPUTES``, in place.

    Law: parameters, buffers of the ``state_dict`` and names stay; a layer is swapped unless its name matches ``keep``. On a
    CPU that does not multiply bfloat16, the bfloat16 layers that are left alone go by float32 products, with the same values.

    Args:
        model: any module with ``nn.Linear``, transformers' ``Conv1D`` or its mixtures' experts.
        compute: a row, its name, or a function from a layer's name to either (``None`` leaves it alone).
        keep: patterns of names (shell wildcards) of layers to leave alone; ``None`` takes the row's own, which is the
            language model's head.
        seed: of stochastic casts.
    Returns:
        A handle on the swapped layers.
    Raises:
        RecipeError: no such row, or the model has no linear layer to swap.

    Cost: none until the layers are used; the first use of a row compiles its casts, some seconds for each.
    Example:
        >>> model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16()
        >>> linears = swap_linears(model, "bfloat16")
        >>> sorted(linears.layers)
        ['0', '2']
    """
    choose = row_chooser(compute, keep)
    if isinstance(compute, (str, Compute)):
        variants.check_layers(row_of(compute), linear_names(model), type(model).__name__)
    layers: dict[str, Layer] = {}
    for name, module in list(model.named_modules()):
        row = choose(name) if is_linear(module) else None
        if row is not None:
            layers[name] = narrowed(name, module, row)
    layers |= experts.grouped_layers(model, choose)
    if not layers:
        raise RecipeError(
            f"{type(model).__name__} has no linear layer to compute narrowly.",
            "Its layers must be nn.Linear or transformers' Conv1D, and not all be kept.",
        )
    left = _take_plain(model)
    if is_widened(torch.bfloat16, next(iter(layers.values())).state.device.type):
        widen_attention()
        care_for("bfloat16")
    for row in {layer.compute.name: layer.compute for layer in (*layers.values(), *left)}.values():
        tell_emulation(row, next(iter(layers.values())).state.device)
    linears = Linears(layers, seed)
    linears.share_histories()
    linears.follow_any()
    for layer in left:
        layer.set_step(linears.step, seed)
    return linears


def linear_names(model: nn.Module) -> list[str]:
    """The names of linear layers, and of mixtures' experts' projections."""
    return [*(name for name, module in model.named_modules() if is_linear(module)), *experts.projections(model)]


def _take_plain(model: nn.Module) -> list[Linear]:
    """Swap the plain layers that are left where PyTorch's own product of their format is slow."""
    slow = {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) and type(module) is not Linear and _is_slow(module.weight)
    }
    return [narrowed(name, module, COMPUTES["bfloat16"]) for name, module in slow.items()]


def _is_slow(weight: Tensor) -> bool:
    return weight.dtype is torch.bfloat16 and is_widened(weight.dtype, weight.device.type)


def linears_of(model: nn.Module) -> Linears | None:
    """A handle on the narrow layers of a model, for a loop that has only the model.

    Args:
        model: any module.
    Returns:
        The handle, with the seed and at the step that the layers have, or ``None`` where there are none.
    Example:
        >>> linears_of(nn.Linear(2, 2)) is None
        True
    """
    layers: dict[str, Layer] = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    layers |= experts.grouped_layers_of(model)
    return Linears(layers, next(iter(layers.values())).seed) if layers else None
