"""The hooks on a model's forward and backward.

Hooks on the optimizer's step are in :mod:`narrowgauge.torch_support.torch_hooks`.

Gauges hook with one function, so that layers share compiled code. Differences between layers are in
an attribute of the module, ``gauge_entries``: of its input, of its output's gradient (``None`` if
not watched), of its output. The recorder follows outputs and gradients of eager steps. A compiler
skips its hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.gauges.sampling import is_sampled, record_gradient, record_tensor
from narrowgauge.matmul.experts import GroupedLinear, grouped_layers_of
from narrowgauge.torch_support.torch_hooks import OwnHook
from narrowgauge.torch_support.torch_names import is_transformed, plain_name

# ── gauges ────────────────────────────────────────────────────────────────────────────────────────


def record_module(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Record the input, the output and the gradient of the output of a watched module, as its
    forward hook.
    """
    if not is_sampled(module) or is_transformed():
        return None
    input_entry, gradient_entry, *output_entries = module.gauge_entries
    if input_entry is not None:
        x = args[0] if args else kwargs["input"]
        if x.dtype == torch.float32 and torch.is_autocast_enabled(
            x.device.type
        ):  # as the matmul reads it
            x = x.to(torch.get_autocast_dtype(x.device.type))
        record_tensor(x, input_entry)
    for entry in output_entries if type(output) is Tensor else ():
        record_tensor(output, entry)
    return record_gradient(output, gradient_entry)


def multiplies(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, transformers' ``Conv1D`` or a projection of
    low-precision experts.
    """
    kinds = type(module).__mro__
    if isinstance(
        module, NonDynamicallyQuantizableLinear
    ):  # nn.MultiheadAttention reads its weight and never calls it
        return False
    return isinstance(module, (nn.Linear, GroupedLinear)) or any(
        kind.__name__ == "Conv1D" for kind in kinds
    )


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by name.

    Projections of low-precision experts are named like their weights.
    """
    names = {id(module): name for name, module in grouped_layers_of(model).items()}
    return {
        plain_name(names.get(id(module), name)): module for name, module in model.named_modules()
    }


# ── outputs and gradients ─────────────────────────────────────────────────────────────────────────


def follow_outputs(
    stack: ExitStack,
    model: nn.Module,
    see: Callable[[str, Tensor], object],
    names: Collection[str] = (),
) -> None:
    """Call a function with the first output of each module of these names that has parameters,
    until the stack closes.

    Without names, of each module with parameters of its own.
    """

    def hook(name: str) -> Any:
        def take(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if (
                type(first) is Tensor
                and first.is_floating_point()
                and not torch.compiler.is_compiling()
            ):
                see(name, first.detach())

        return OwnHook(take)

    for name, module in model.named_modules():
        if (not names or name in names) and any(
            True for _ in module.parameters(recurse=bool(names))
        ):
            stack.callback(module.register_forward_hook(hook(plain_name(name))).remove)


def follow_gradients(stack: ExitStack, model: nn.Module, see: Callable[[Tensor], object]) -> None:
    """Call a function with each parameter gradient that a backward pass computes, until the stack
    closes.

    The loop's own hooks run first. FSDP2 sums gradients of other tensors, out of reach of hooks.
    """
    hook = OwnHook(lambda gradient: None if torch.compiler.is_compiling() else see(gradient))
    for parameter in model.parameters():
        if parameter.requires_grad:
            stack.callback(parameter.register_hook(hook).remove)
