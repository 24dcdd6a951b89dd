"""Gradient release: step each parameter as soon as its gradient arrives, then free the gradient.

Then two large gradients are never in memory at once, which saves 2 bytes a parameter: ``word`` takes 6, ``compact`` 5.
Clipping, loss scaling, skipping and summing micro-batches need all gradients before the first step. They are refused.
"""

from __future__ import annotations

import math

from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.optim.optimizer import Optimizer

OFF = {"max_grad_norm": None, "loss_scaler": None, "skip_above": math.inf, "grad_scale": None, "found_inf": None}
"""Optimizer options that need all gradients first, and their values when unused."""


class Release:
    """Hold the hooks of gradient release on an optimizer's parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._arrived: dict[Tensor, None] = {}  # since the last step
        # True after the first step. A torch.amp.GradScaler scales the loss before backward() but asks the optimizer only before
        # step(), so the first gradients wait.
        self._begun = False
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._arrive) for p in parameters]

    def remove(self) -> None:
        """End the release: ``optimizer.step()`` steps all gradients again."""
        for handle in self._handles:
            handle.remove()
        self._optimizer.released.clear()
        self._optimizer.release = None

    def before_step(self) -> None:
        """Step the parameters whose gradients have waited. Make their states together, so that small ones share a bucket."""
        _check(self._optimizer)
        if not self._begun:
            for group in self._optimizer.param_groups:
                self._optimizer.make_missing(group, [p for p in group["params"] if p in self._arrived])
            for parameter in self._arrived:
                self._step(parameter)
            self._begun = bool(self._arrived)
        self._arrived.clear()

    def _arrive(self, parameter: Tensor) -> None:
        _check(self._optimizer)
        if parameter in self._arrived:
            name = self._optimizer.parameter_names().get(parameter)
            raise RecipeError(
                f"gradients are released as they arrive, and a second one of '{name}' arrived before optimizer.step().",
                "Call optimizer.step() after each backward(), or keep the gradients to sum micro-batches.",
            )
        self._arrived[parameter] = None
        if self._begun:
            self._step(parameter)

    def _step(self, parameter: Tensor) -> None:
        for group in self._optimizer.param_groups:  # a removed parameter is not stepped
            if parameter.grad is not None and any(parameter is p for p in group["params"]):
                self._optimizer.step_alone(group, parameter)


def _check(optimizer: Optimizer) -> None:
    for option, off in OFF.items():
        if (value := getattr(optimizer, option, off)) != off:
            raise RecipeError(
                f"gradients were to be released as they arrive, and {option} = {value} needs all of them first.",
                f"Build the optimizer with {option}={off}, or keep the gradients.",
            )


def release_gradients(optimizer: Optimizer) -> Release:
    """Step each large parameter during ``backward()``, as its gradient arrives, and free the gradient.

    Invariant: the same bits as without it. Call ``optimizer.step()`` as usual after each ``backward()``. It steps the small
    parameters, which share a kernel, and counts. Set learning rates before ``backward()``. The gradients of the first
    ``backward()`` wait for ``step()``. Only then is it known whether a ``torch.amp.GradScaler`` has scaled the loss.

    Args:
        optimizer: a Narrowgauge optimizer without ``max_grad_norm`` and ``loss_scaler``.
    Returns:
        A handle. Its ``remove()`` ends the release.
    Raises:
        RecipeError: the optimizer clips by the norm of all gradients, or may skip a step because of one. ``backward()`` and
            ``step()`` raise it too if these options are set later, with a GradScaler, or if a second gradient of a parameter
            arrives before ``step()``.

    Cost: one kernel call for each large parameter.

    Example:
        >>> import torch, narrowgauge as ng
        >>> layer = torch.nn.Linear(160, 160, bias=False, dtype=torch.bfloat16)
        >>> optimizer = ng.AdamW(layer.parameters(), storage="word")
        >>> handle = ng.optim.release_gradients(optimizer)
        >>> for _ in range(2):
        ...     layer(torch.ones(1, 160, dtype=torch.bfloat16)).sum().backward()
        ...     print(layer.weight.grad is None)
        ...     optimizer.step()
        False
        True
        >>> optimizer.bytes_per_param()
        6.0
    """
    _check(optimizer)
    optimizer.release = handle = Release(optimizer)
    return handle
