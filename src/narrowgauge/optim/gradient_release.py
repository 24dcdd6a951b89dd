"""Gradient release: each parameter is stepped as soon as its gradient is there, and the gradient is freed.

Then no two large gradients need be in memory at once, and 2 bytes a parameter are saved: ``word`` takes 6, ``compact`` 5.
The price is what needs all gradients before the first step. Clipping by their norm, scaling the loss, skipping a step and
summing micro-batches are refused.
"""

from __future__ import annotations

import math

from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.optim.optimizer import Optimizer

OFF = {"max_grad_norm": None, "loss_scaler": None, "skip_above": math.inf, "grad_scale": None, "found_inf": None}
"""Options of an optimizer that need all gradients first, and their values where they need nothing."""


class Release:
    """A handle on gradient release: the hooks on the parameters of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._arrived: dict[Tensor, None] = {}  # since the last step
        # Whether a step has gone by. A torch.amp.GradScaler scales the loss before backward() and asks the optimizer only
        # before step(), so the first gradients wait for that.
        self._begun = False
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._arrive) for p in parameters]

    def remove(self) -> None:
        """End the release: gradients are stepped by ``optimizer.step()`` again."""
        for handle in self._handles:
            handle.remove()
        self._optimizer.released.clear()
        self._optimizer.release = None

    def before_step(self) -> None:
        """Step the parameters whose gradients have waited; make their states together, so that small ones share a bucket."""
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
        for group in self._optimizer.param_groups:  # one that was removed is not stepped
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

    Invariant: the same bits as without it. ``optimizer.step()`` is called as ever, after each ``backward()``: it steps the
    small parameters, which share a kernel, and counts. Learning rates are therefore set before ``backward()``. The gradients
    of the first ``backward()`` wait for ``step()``, which learns whether a ``torch.amp.GradScaler`` has scaled the loss.

    Args:
        optimizer: one of ours, with neither ``max_grad_norm`` nor ``loss_scaler``.
    Returns:
        A handle whose ``remove()`` ends it.
    Raises:
        RecipeError: the optimizer clips by the norm of all gradients, or may skip a step because of one. ``backward()`` and
            ``step()`` raise it too, where that is asked for later, a GradScaler is at work, or a second gradient of a
            parameter arrives before ``step()``.

    Cost: as many calls of kernels as there are large parameters.

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
