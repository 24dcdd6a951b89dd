"""Gradient release: each parameter is stepped as soon as its gradient is there, and the gradient is freed.

Then no two large gradients need be in memory at once, and 2 bytes a parameter are saved: ``word`` takes 6, ``compact`` 5.
The price is what needs all gradients before the first step. Clipping by their norm and skipping a step that overflowed are
refused; every backward pass steps, so micro-batches cannot be summed.
"""

from __future__ import annotations

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from narrowgauge.errors import RecipeError
from narrowgauge.optim.optimizer import Optimizer


class Release:
    """A handle on gradient release: the hooks on the parameters of an optimizer."""

    def __init__(self, handles: list[RemovableHandle], optimizer: Optimizer) -> None:
        self._handles, self._optimizer = handles, optimizer

    def remove(self) -> None:
        """End the release: gradients are stepped by ``optimizer.step()`` again."""
        for handle in self._handles:
            handle.remove()
        self._optimizer.released.clear()


def release_gradients(optimizer: Optimizer) -> Release:
    """Step each large parameter during ``backward()``, as its gradient arrives, and free the gradient.

    Invariant: the same bits as without it. ``optimizer.step()`` is called as ever, after ``backward()``: it steps the small
    parameters, which share a kernel, and counts. Learning rates are therefore set before ``backward()``.

    Args:
        optimizer: one of ours, with neither ``max_grad_norm`` nor ``loss_scaler``.
    Returns:
        A handle whose ``remove()`` ends it.
    Raises:
        RecipeError: the optimizer clips by the norm of all gradients, or may skip a step because of one.

    Cost: as many calls of kernels as there are large parameters.

    Example:
        >>> import torch, narrowgauge as ng
        >>> layer = torch.nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)
        >>> optimizer = ng.AdamW(layer.parameters(), storage="word")
        >>> handle = ng.optim.release_gradients(optimizer)
        >>> layer(torch.ones(1, 128, dtype=torch.bfloat16)).sum().backward()
        >>> layer.weight.grad is None
        True
        >>> optimizer.step()
        >>> optimizer.bytes_per_param()
        6.0
    """
    for option in ("max_grad_norm", "loss_scaler"):
        if (value := getattr(optimizer, option)) is not None:
            raise RecipeError(
                f"gradients were to be released as they arrive, and {option} = {value} needs all of them first.",
                f"Build the optimizer with {option}=None, or keep the gradients.",
            )
    optimizer._registry.follow()  # states of parameters that were replaced pass on before these are stepped

    def arrived(parameter: Tensor) -> None:
        group = optimizer._registry.group_of(parameter)
        if group is not None:  # one that was removed is not stepped
            optimizer.step_alone(group, parameter)

    everyone = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    wanted = [parameter for parameter in everyone if parameter.requires_grad]
    return Release([p.register_post_accumulate_grad_hook(arrived) for p in wanted], optimizer)
