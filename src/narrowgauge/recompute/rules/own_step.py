"""What our own optimizers do within their step: how each value is rounded that they store, unscaling and clipping.

The rule of such an optimizer receives the gradient multiplied by one factor, which is computed again here: the inverse of the
loss scale, times the limit of the norm over the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.numerics.shards import is_sharded
from narrowgauge.optim import codec
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.state import ParameterState
from narrowgauge.recompute.capture import STATES, gradient_of, spread_on_cpu
from narrowgauge.recompute.stored_values import Rounding
from narrowgauge.spec.storages import Code


@dataclass(frozen=True)
class OwnStep:
    """What an optimizer does with its gradients before its rule sees them.

    Args:
        loss_scale: by which it divides them.
        clip: by which it then multiplies them.
        why_not: why the update cannot be computed again, or empty.
    """

    loss_scale: float = 1.0
    clip: float = 1.0
    why_not: str = ""

    @property
    def factor(self) -> float:
        return self.clip / self.loss_scale


def own_step(optimizer: torch.optim.Optimizer, norm: float | None = None) -> OwnStep:
    """What an optimizer is about to do with its gradients; nothing where it is not ours, or has no such option.

    Args:
        norm: of the gradients as they are, over all ranks; of sharded ones this rank alone cannot tell it.
    Cost: where it clips, a pass over all gradients.
    """
    if not isinstance(optimizer, Optimizer):
        return OwnStep()
    scale = getattr(optimizer, "grad_scale", None)
    if optimizer.loss_scaler is not None:
        scale = optimizer.loss_scaler.scale_tensor
    loss_scale = 1.0 if scale is None else float(scale)
    found = getattr(optimizer, "found_inf", None)
    if found is not None and bool(found):
        return OwnStep(loss_scale, 1.0, "a gradient is not finite: the step is skipped")
    if optimizer.max_grad_norm is None and optimizer.loss_scaler is None and optimizer.skip_above == math.inf:
        return OwnStep(loss_scale)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [gradient for p in held if (gradient := gradient_of(p)) is not None]
    if norm is None and any(map(is_sharded, gradients)):
        return OwnStep(loss_scale, 1.0, "the optimizer clips by a norm over all ranks")
    norm = (_norm(gradients) if norm is None else norm) / loss_scale
    if not norm <= min(optimizer.skip_above, 3e38):
        return OwnStep(loss_scale, 1.0, "the norm of the gradients is too large: the step is skipped")
    limit = math.inf if optimizer.max_grad_norm is None else optimizer.max_grad_norm
    return OwnStep(loss_scale, min(1.0, limit / (norm + 1e-6)))


def _norm(gradients: Sequence[Tensor]) -> float:
    norms = [float(torch.linalg.vector_norm(g.detach(), dtype=torch.float64)) for g in gradients]
    return math.sqrt(sum(norm * norm for norm in norms))


def roundings_of(
    optimizer: torch.optim.Optimizer, parameter: Tensor, take: Callable[[Tensor], Tensor] = spread_on_cpu
) -> dict[str, Rounding]:
    """How the weight and the states of a parameter were rounded in the last step; those in float32 or more are left out."""
    state = optimizer.packed_state(parameter) if isinstance(optimizer, Optimizer) else None
    if state is None:
        return {}
    names = ("weight", *(name for name in STATES if name in state.shapes_of_states))
    codes = {name: state.storage.weight if name == "weight" else state.code(name) for name in names}
    return {name: _rounding(state, name, code, take) for name, code in codes.items() if code.mantissa_bits < 23}


def _rounding(state: ParameterState, name: str, code: Code, take: Callable[[Tensor], Tensor]) -> Rounding:
    storage, ends = state.storage, None
    if code.scaled:
        back = codec.multipliers(code, state.bounds[name])[1].double().log2() - (code.lowest + 126)
        rows = back.reshape(*state.parameter.shape[:-1], 1)
        ends = take(rows.expand(state.parameter.shape))
    if storage.arithmetic == "expansion":
        unit = 2.0 ** -(storage.weight.mantissa_bits + 1)
        # Every operation ends at the format's own subnormals, too.
        least = 0.0 if code.scaled else 2.0 ** (storage.weight.lowest - storage.weight.mantissa_bits)
        return Rounding(code, storage, ends, unit, 1 / code.spacings, 2.0**-storage.weight.mantissa_bits, least)
    read = 2.0**-code.mantissa_bits if code.parts > 1 else 0.0
    return Rounding(code, storage, ends, read=read)
