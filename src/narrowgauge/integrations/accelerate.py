"""Accelerate: its FSDP2 replaces parameters by shards, and this module moves their states along.

``accelerator.prepare`` replaces each parameter in the param groups by its shard. Torch's optimizers
have no states by then. Our optimizers have stored the bits of the weights since
:func:`narrowgauge.prepare`.
"""

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import is_sharded, local_of, own_part
from narrowgauge.torch_support.torch_hooks import members_of
from narrowgauge.torch_support.torch_names import unwrapped_optimizer


@torch.no_grad()
def pass_states_on(optimizer: torch.optim.Optimizer) -> None:
    """Give the states of replaced parameters to their replacements.

    Call it after ``accelerator.prepare``.

    Args:
        optimizer: ours, or Accelerate's around it.
    Raises:
        RecipeError: a parameter differs from the replaced one in shape, format or values.
    """
    ours = unwrapped_optimizer(optimizer)
    present = dict.fromkeys(members_of(ours))
    old = [p for p in ours.state if isinstance(p, Tensor) and p not in present]
    new = [p for p in present if not ours.has_state(p)]
    is_same = len(old) == len(new)
    for before, parameter in zip(old, new, strict=False):
        is_same &= before.shape == parameter.shape and before.dtype is parameter.dtype
        if is_same:
            shard = local_of(parameter.detach())
            part = own_part(parameter, before.detach().to(shard.device))
            is_same = torch.equal(part, shard)
    if not is_same:
        raise RecipeError(
            f"Cannot pass on the states of {len(old)} parameters because the {len(new)} in their "
            "places have other shapes, formats or values.",
            "Load weights before ng.prepare, and leave Accelerate's mixed_precision at 'no': the "
            "recipe says what to compute in.",
        )
    for group in ours.param_groups:
        ours.make_missing(group, group["params"])
    for before, parameter in zip(old, new, strict=True):
        source = ours.state.pop(before)
        target = ours.state[parameter]
        for name, tensor in target.items():
            value = source[name].to(tensor.device)
            if is_sharded(tensor):  # a matrix rule's own states are whole on every rank
                value = own_part(parameter, value)
            local_of(tensor).copy_(value)
