"""The hook of the gauges on a layer's forward pass.

One function hooks all layers, so that they share compiled code. Differences between layers are in
an attribute of the module, ``gauge_entries``: of its input, of its output's gradient (``None`` if
not watched), of its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.gauges.sampling import is_sampled, record_gradient, record_tensor
from narrowgauge.matmul.experts import GroupedLinear, grouped_layers_of
from narrowgauge.torch_support.torch_names import is_transformed, plain_name


def record_module(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Record the input, the output and the gradient of the output of a watched module, as its
    forward hook.
    """
    if not is_sampled(module) or is_transformed():
        return None
    input_entry, gradient_entry, *output_entries = module.gauge_entries
    if input_entry is not None:
        x = args[0] if args else kwargs["input"]
        device = x.device.type
        if x.dtype == torch.float32 and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))  # as the matmul reads it
        record_tensor(x, input_entry)
    if type(output) is Tensor:
        for entry in output_entries:
            record_tensor(output, entry)
    return record_gradient(output, gradient_entry)


def multiplies(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, transformers' ``Conv1D`` or a projection of
    low-precision experts.
    """
    # nn.MultiheadAttention reads the weight of such a layer and never calls it.
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    if isinstance(module, (nn.Linear, GroupedLinear)):
        return True
    return "Conv1D" in {kind.__name__ for kind in type(module).__mro__}


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by name.

    Projections of low-precision experts are named like their weights.
    """
    names = {id(module): name for name, module in grouped_layers_of(model).items()}
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules[plain_name(names.get(id(module), name))] = module
    return modules
