"""Second moments beside exact ones, on the first values of each tensor.

A second moment is a linear sum of squared gradients. So the sum of a tensor's second moments follows from one number a step,
the sum of its squared gradients. Second moments rounded to nearest in too few bits stop following it. The ratio of the two
shows this long before the loss does.

The exact sums start from the stored moments when they are attached, so they restart after a resume. For sharded parameters each
rank measures the first values of its own shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import gradient_of, local_of
from narrowgauge.optim.optimizer import Optimizer

NUM_VALUES = 64
"""Number of values measured per parameter."""


def leading_states(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], name: str
) -> dict[Tensor, Tensor]:
    """Return at most ``NUM_VALUES`` float32 values of a state, of each parameter that has it."""
    states = dict[Tensor, Tensor]()
    for p in parameters:
        if isinstance(optimizer, Optimizer):
            values = (
                None
                if (state := optimizer.state_of(p)) is None
                else state.leading(NUM_VALUES, name)
            )
        else:
            stored = optimizer.state.get(p, {}).get(name)
            values = leading_of(stored) if isinstance(stored, Tensor) else None
        if values is not None:
            states[p] = values.float()
    return states


class MomentShadow:
    """Exact sums of the first second moments of each parameter, float64 ``[parameters]``.

    The parameters are chosen after the first step, among those with ``exp_avg_sq`` in their state. Without any,
    later steps do nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        self.optimizer, self.candidates = optimizer, dict(parameters)
        self.forget()

    def forget(self) -> None:
        """Restart from the stored moments after the next step."""
        self.parameters, self._has_begun = dict[str, Tensor](), False
        self._exact, self._weight = torch.zeros(0), torch.zeros(0)

    def step(self) -> None:
        """Apply the optimizer's last step, from the gradients, which still exist."""
        if not self._has_begun:
            self._begin()
        elif self.parameters:
            placed = [gradient_of(p) for p in self.parameters.values()]
            grads = [None if gradient is None else local_of(gradient) for gradient in placed]
            parts = [leading_of(g) for g in grads if g is not None and g.layout is torch.strided]
            is_stepped = [g is not None and g.layout is torch.strided for g in grads]
            weight = self._weight * torch.tensor(is_stepped, device=self._weight.device)
            squares = torch.zeros_like(self._exact)
            if parts:
                squares[weight != 0] = torch.stack(
                    torch._foreach_norm(parts, dtype=torch.float64)
                ).square()
            # Our optimizers say by what they multiplied the gradients, and whether they skipped the step. A fused torch
            # optimizer writes the gradients back unscaled, and torch.amp.GradScaler sets found_inf on it.
            control = getattr(self.optimizer, "last_control", None)
            scale, skip = (
                (1.0, getattr(self.optimizer, "found_inf", None))
                if control is None
                else control[:2]
            )
            weight = weight if skip is None else torch.where(skip != 0, 0.0, weight)
            # A non-finite gradient times a weight of 0 would be NaN.
            self._exact = torch.where(
                weight == 0, self._exact, torch.lerp(self._exact, squares * scale**2, weight)
            )

    def _begin(self) -> None:
        """Choose the parameters and start from the stored moments."""
        # Loading a state replaces the groups.
        groups = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        moments = leading_states(self.optimizer, self.candidates.values(), "exp_avg_sq")
        self._has_begun, self.parameters = (
            True,
            {
                name: p
                for name, p in self.candidates.items()
                # Some optimizers have one second moment for the whole tensor.
                if p in moments
                and len(moments[p]) == len(leading_of(p.detach()))
                and self._squares_gradients(groups.get(p, {}))
            },
        )
        if (stored := self._stored()) is not None:
            factors = [1 - float(groups[p]["betas"][1]) for p in self.parameters.values()]
            self._exact, self._weight = stored, stored.new_tensor(factors)

    def _squares_gradients(self, group: Mapping[str, Any]) -> bool:
        """Return whether the second moments of a group are of the gradients alone. Adam adds its decay to them.

        Other rules may square something else. Adam is known by the start of its name: ``AdamW8bit`` counts, ``NAdam`` not.
        """
        name = type(self.optimizer).__name__
        is_decoupled = name.startswith("AdamW") or group.get("decoupled_weight_decay")
        return (
            name.startswith("Adam")
            and "betas" in group
            and bool(is_decoupled or not group.get("weight_decay"))
        )

    def _stored(self) -> Tensor | None:
        """Return the sums of the stored second moments; ``None`` without any."""
        moments = leading_states(self.optimizer, self.parameters.values(), "exp_avg_sq")
        is_whole = moments and len(moments) == len(self.parameters)
        return (
            torch.stack([moment.double().sum() for moment in moments.values()])
            if is_whole
            else None
        )

    def bias(self) -> Tensor | None:
        """Return the stored sum over the exact one of each of ``parameters``, float64."""
        stored = self._stored()
        return None if stored is None else stored / self._exact


def leading_of(x: Tensor) -> Tensor:
    """Return the first values of a tensor, or of its local shard."""
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        x = local_of(x)
    if type(x).dequantize is not Tensor.dequantize:  # quantized states, e.g. torchao's
        x = x.dequantize()
    if x.is_contiguous():  # one call: there are hundreds of tensors on every step
        return x.as_strided((min(NUM_VALUES, x.numel()),), (1,))
    return x.reshape(-1)[:NUM_VALUES]
