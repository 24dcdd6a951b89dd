"""Second moments beside exact ones, on the first values of some parameters.

A float32 reference (*shadow*) of the second moments of a few hundred values is updated on every step. Second moments rounded
to nearest in too few bits stop following the reference. The ratio of their sums shows this long before the loss does.

The reference starts from the stored moments when it is attached, so it restarts after a resume. For sharded parameters each
rank measures the first values of its own shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.gauges.tensor_metrics import rounded
from narrowgauge.numerics import metrics
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.schema import Row

NUM_VALUES = 64
"""Number of values measured per parameter."""

MAX_SHADOWED = 24
"""Maximum number of parameters with a reference, evenly spaced. A reference costs time on every step."""


def leading_states(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], name: str
) -> dict[Tensor, Tensor | None]:
    """Return at most ``NUM_VALUES`` float32 values of a state by parameter; ``None`` before the state exists."""
    parameters = list(parameters)
    if isinstance(optimizer, Optimizer):
        values = [None if (s := optimizer.state_of(p)) is None else s.leading(NUM_VALUES, name) for p in parameters]
    else:
        states = [optimizer.state.get(p, {}).get(name) for p in parameters]
        values = [leading_of(x) if isinstance(x, Tensor) else None for x in states]
    return {p: None if x is None else x.float() for p, x in zip(parameters, values, strict=True)}


class MomentShadow:
    """Exact second moments of the first values of some parameters, float32 ``[parameters, NUM_VALUES]``.

    The parameters are chosen after the first step, among those with ``exp_avg_sq`` in their state. Without any,
    later steps do nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        self.optimizer, self.candidates = optimizer, dict(parameters)
        self.forget()

    def forget(self) -> None:
        """Restart from the stored moments after the next step."""
        self.parameters: dict[str, Tensor] | None = None
        self.exact: Tensor | None = None
        self._last: tuple[Tensor, Tensor] | None = None
        self._weight: Tensor | None = None

    def step(self) -> None:
        """Apply the optimizer's last step, from the gradients, which still exist."""
        if self.parameters is None:
            self._begin()
            return
        weight = self._weight
        if self.exact is None or weight is None:
            return
        gradients = [
            p.grad if p.grad is not None and p.grad.layout is torch.strided else None for p in self.parameters.values()
        ]
        if None in gradients:  # a parameter without a gradient takes no step
            weight = weight * torch.tensor([[float(g is not None)] for g in gradients], device=weight.device)
        gradient = _joined([weight.new_zeros(0) if g is None else leading_of(g) for g in gradients])
        # Our optimizers say by what they multiplied the gradients, and whether they skipped the step. A fused torch optimizer
        # writes the gradients back unscaled, and torch.amp.GradScaler sets found_inf on it.
        control = getattr(self.optimizer, "last_control", None)
        scale, skip = (1.0, getattr(self.optimizer, "found_inf", None)) if control is None else control[:2]
        gradient.mul_(scale)
        if skip is not None:
            weight = torch.where(skip != 0, 0.0, weight)
        # A non-finite gradient times a weight of 0 would be NaN.
        gradient = torch.where(weight == 0, 0.0, gradient)
        self.exact = torch.lerp(self.exact, gradient.square_(), weight)

    def _begin(self) -> None:
        """Choose the parameters and start from the stored moments."""
        # Loading a state replaces the groups.
        groups = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        moments = leading_states(self.optimizer, self.candidates.values(), "exp_avg_sq")
        shadowed = {
            name: p
            for name, p in self.candidates.items()
            # Some optimizers have one second moment for the whole tensor.
            if self._squares_gradients(groups.get(p, {}))
            and (m := moments[p]) is not None
            and len(m) == len(leading_of(p.detach()))
        }
        self.parameters = dict(list(shadowed.items())[:: max(1, -(-len(shadowed) // MAX_SHADOWED))])
        self.exact = self.stored()
        if self.exact is not None:
            factors = [[1 - float(groups[p]["betas"][1])] for p in self.parameters.values()]
            self._weight = torch.tensor(factors, dtype=torch.float32, device=self.exact.device)

    def _squares_gradients(self, group: Mapping[str, Any]) -> bool:
        """Return whether the second moments of a group are of the gradients alone. Adam adds its decay to them.

        Other rules may square something else. Adam is known by the start of its name: ``AdamW8bit`` counts, ``NAdam`` not.
        """
        name = type(self.optimizer).__name__
        is_decoupled = name.startswith("AdamW") or group.get("decoupled_weight_decay")
        return name.startswith("Adam") and "betas" in group and bool(is_decoupled or not group.get("weight_decay"))

    def stored(self) -> Tensor | None:
        """Return the stored second moments; ``None`` without a shadow."""
        moments = leading_states(self.optimizer, (self.parameters or {}).values(), "exp_avg_sq").values()
        parts = [moment for moment in moments if moment is not None]
        return _joined(parts) if parts and len(parts) == len(moments) else None

    def measure(self) -> Tensor | None:
        """Return bias and frozen fraction of each parameter with a shadow, float64 ``[parameters, 2]``."""
        stored, exact = self.stored(), self.exact
        if stored is None or exact is None:
            return None
        (last_stored, last_exact), self._last = self._last or (stored, exact), (stored, exact)
        # A change of one ulp of bfloat16, which bfloat16 could represent.
        moved = (exact - last_exact).abs() > last_exact * 2.0**-7
        frozen = (moved & (stored == last_stored)).sum(1) / moved.sum(1)  # NaN in the first sample
        return torch.stack([metrics.moment_bias(stored, exact), frozen.double()], 1)

    def rows(self, measured: Tensor) -> Row:
        """Return the table ``moments`` of a record."""
        rows = {n: [rounded(v) for v in pair] for n, pair in zip(self.parameters or {}, measured.tolist(), strict=True)}
        return {name: row for name, row in rows.items() if row != [None, None]}


def leading_of(x: Tensor) -> Tensor:
    """Return the first values of a tensor, or of its local shard."""
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        x = local_of(x)
    if type(x).dequantize is not Tensor.dequantize:  # quantized states, e.g. torchao's
        x = x.dequantize()
    if x.is_contiguous():  # one call: there are hundreds of tensors on every step
        return x.as_strided((min(NUM_VALUES, x.numel()),), (1,))
    return x.reshape(-1)[:NUM_VALUES]


def _joined(parts: list[Tensor]) -> Tensor:
    """Values of many tensors as float32 ``[tensors, NUM_VALUES]``, zero-padded; the metrics ignore zeros."""
    return torch.stack([torch.nn.functional.pad(part.float(), (0, NUM_VALUES - len(part))) for part in parts])
