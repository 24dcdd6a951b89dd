"""Samples of an optimizer's parameters around a step, in bounded memory.

The update of most optimizers is elementwise. So a few thousand elements of each parameter are enough to recompute it:
the weight and the states before and after, and the gradient. Nothing here changes a tensor of the run. Samples are on the CPU.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgauge.checks.stored import Rounding
from narrowgauge.numerics.dtensor import is_sharded, local_of
from narrowgauge.optim import codes
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.state import ParameterState
from narrowgauge.spec.storages import Code

ELEMENTS = 1 << 12
"""Elements that are kept of each parameter."""
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
SETTINGS = (
    "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "amsgrad", "decoupled_weight_decay",
)  # fmt: skip
RULES = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "Lion": "lion", "Muon": "muon"}
"""The optimizer classes that are recomputed. Derived classes are too, unless they replace the step under another name."""


def spread(tensor: Tensor) -> Tensor:
    """Copy evenly spread elements of this rank's shard to the CPU; 1-D, the same places at every call.

    The stride is coprime to the last dim, so the elements cover every column.
    """
    flat = local_of(tensor.detach()).reshape(-1)
    stride = max(1, -(-flat.numel() // ELEMENTS))
    columns = tensor.shape[-1] if tensor.ndim else 1
    while stride > 1 and math.gcd(stride, columns) > 1:
        stride += 1
    return flat[::stride].clone().cpu()


@dataclass
class Sample:
    """Some elements of one parameter around a step, on the CPU.

    Args:
        name: in the model, or its place in the optimizer's groups.
        dtype: of the parameter.
        settings: the settings of its group that the rule reads.
        rule: a key of ``narrowgauge.checks.step_rules.DEFINITIONS``, or empty.
        weight, states: before the step, 1-D.
        gradient: the input of the rule, after the optimizer's own scaling and clipping; ``None`` without a gradient.
        weight_after, states_after: after the step.
        count, count_before: the optimizer's count of steps for the parameter, after this step and before.
        is_counted: whether the optimizer keeps a count.
        listed: how often the groups list it.
        roundings: of the weight and the states stored below float32, by name.
    """

    name: str
    dtype: torch.dtype
    settings: dict[str, Any]
    rule: str
    weight: Tensor
    states: dict[str, Tensor]
    gradient: Tensor | None = None
    weight_after: Tensor | None = None
    states_after: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0
    count_before: int = 0
    is_counted: bool = False
    requires_grad: bool = True
    listed: int = 1
    roundings: dict[str, Rounding] = field(default_factory=dict)


@dataclass
class SampledStep:
    """A step: its samples by name, the norm of all gradients, the optimizer's clip factor, and why nothing is compared."""

    step: int
    samples: dict[str, Sample] = field(default_factory=dict)
    grad_norm: float | None = None
    clip: float = 1.0
    why_not: str = ""


def named_parameters(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the parameters of an optimizer by name, each once.

    Args:
        names: of the model's parameters, by their id. Other parameters are named by their place in the optimizer.

    Example:
        >>> weight, other = torch.zeros(1), torch.zeros(1)
        >>> list(named_parameters(torch.optim.SGD([weight, other]), {id(weight): "weight"}))
        ['weight', 'group 0, parameter 1']
    """
    named: dict[str, Tensor] = {}
    seen = set()
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                named[names.get(id(parameter), f"group {index}, parameter {place}")] = parameter
    return named


def rule_of(optimizer: torch.optim.Optimizer, parameter: Tensor | None = None) -> str:
    """Return the rule of an optimizer's class, or of the class that it is derived from.

    A derived class with another name has a rule of its own, unknown here, if its step does not call its parent's.

    Args:
        parameter: one of the optimizer's. Our optimizers may step vectors by another rule than matrices.
    """
    kinds = type(optimizer).__mro__
    for place, kind in enumerate(kinds):
        if kind.__name__ in RULES and kind.__module__.partition(".")[0] in ("torch", "narrowgauge"):
            if kind.__name__ != kinds[0].__name__ and any(map(_replaces_step, kinds[:place])):
                return ""
            if parameter is not None and isinstance(optimizer, Optimizer) and optimizer.rule_of(parameter) == "adamw":
                return "adamw"
            return RULES[kind.__name__]
    return ""


def _replaces_step(kind: type) -> bool:
    """Return whether a class has a step of its own that does not call its parent's."""
    code = getattr(inspect.unwrap(vars(kind)["step"]), "__code__", None) if "step" in vars(kind) else None
    return code is not None and "super" not in code.co_names


def weight_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """Return the stored weight. For our optimizers include its tail or other low bits."""
    return optimizer.stored(parameter) if isinstance(optimizer, Optimizer) else parameter


def stored_by(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the stored tensors of a parameter by name: any optimizer's states, and the weight with its tail for ours."""
    if not isinstance(optimizer, Optimizer):
        return dict(optimizer.state.get(parameter, {}))
    stored: dict[str, Any] = {}
    for name in ("weight", *STATES) if optimizer.num_steps(parameter) else ("weight",):
        with suppress(KeyError):  # another rule has other states, and a frozen parameter none
            stored[name] = optimizer.stored(parameter, name)
    return stored


def states_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return samples of the states that rules read; empty before the first step."""
    stored = stored_by(optimizer, parameter)
    tensors = {name: stored.get(name) for name in STATES}
    return {name: spread(t) for name, t in tensors.items() if isinstance(t, Tensor) and t.shape == parameter.shape}


def count_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
    """Return an optimizer's count of steps for a parameter, or 0 without a count."""
    if isinstance(optimizer, Optimizer):
        state = optimizer.state_of(parameter)
        return 0 if state is None else state.step
    return int(optimizer.state.get(parameter, {}).get("step", 0))


def sampled_step(number: int, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> SampledStep:
    """Sample a step that is about to be taken.

    Args:
        number: of the step, from 1.
        parameters: the optimizer's, by name.
    """
    step = SampledStep(number)
    # GradScaler sets these two during a step. Our optimizers report skips and factors afterwards.
    found_inf, grad_scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found_inf is not None and bool(found_inf):
        step.why_not = "a gradient is not finite: the step is skipped"
    loss_scale = 1.0 if grad_scale is None or isinstance(optimizer, Optimizer) else float(grad_scale)
    gradients = [g for p in parameters.values() if (g := _gradient_of(p)) is not None]
    if not any(map(is_sharded, gradients)):
        squares = (float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in gradients)
        step.grad_norm = math.sqrt(sum(squares)) / loss_scale
    listed = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        group, gradient = groups[id(parameter)], _gradient_of(parameter)
        step.samples[name] = Sample(
            name,
            parameter.dtype,
            settings={key: _plain(group[key]) for key in SETTINGS if key in group},
            rule=rule_of(optimizer, parameter),
            weight=spread(weight_of(optimizer, parameter)),
            states=states_of(optimizer, parameter),
            gradient=None if gradient is None else _times(optimizer, spread(gradient), 1 / loss_scale),
            count_before=count_of(optimizer, parameter),
            requires_grad=parameter.requires_grad,
            listed=listed[id(parameter)],
        )
    return step


def complete(step: SampledStep, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Add the results of the step for each parameter. Multiply gradients by the optimizer's clip factor."""
    if isinstance(optimizer, Optimizer) and optimizer.last_control is not None:
        step.clip, is_skipped = optimizer.last_control.tolist()
        if is_skipped:
            step.why_not = "the norm of the gradients is too large: the step is skipped"
    for name, sample in step.samples.items():
        if (parameter := parameters.get(name)) is not None:
            sample.weight_after = spread(weight_of(optimizer, parameter))
            sample.states_after = states_of(optimizer, parameter)
            sample.count = count_of(optimizer, parameter)
            sample.is_counted = sample.count > 0 or "step" in optimizer.state.get(parameter, {})
            sample.roundings = _roundings_of(optimizer, parameter)
            if sample.gradient is not None:
                sample.gradient = _times(optimizer, sample.gradient, step.clip)


def _gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient. Return ``None`` if it is sparse, since its places change in each step."""
    gradient = parameter.grad
    return None if gradient is None or gradient.layout is not torch.strided else gradient


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else value


# ── scaling and rounding in our optimizers' step ────────────────────────────────────────────────────────────────────────────


def _times(optimizer: torch.optim.Optimizer, gradient: Tensor, factor: float) -> Tensor:
    """Return the gradient times the optimizer's factor. Our optimizers multiply in float32 for every format."""
    if isinstance(optimizer, Optimizer):
        return (gradient.double() * factor).to(torch.promote_types(gradient.dtype, torch.float32))
    return gradient if factor == 1 else (gradient.double() * factor).to(gradient.dtype)


def _roundings_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Rounding]:
    """Return how the last step rounded the weight and the states. Skip tensors in float32 or more."""
    state = optimizer.state_of(parameter) if isinstance(optimizer, Optimizer) else None
    if state is None:
        return {}
    names = ("weight", *(name for name in STATES if name in state.shapes_of_states))
    codes = {name: state.storage.weight if name == "weight" else state.code(name) for name in names}
    return {name: _rounding(state, name, code) for name, code in codes.items() if code.mantissa_bits < 23}


def _rounding(state: ParameterState, name: str, code: Code) -> Rounding:
    storage, ends = state.storage, None
    if code.scaled:
        back = codes.multipliers(code, state.bounds[name])[1].double().log2() - (code.lowest + 126)
        ends = spread(back.reshape(*state.parameter.shape[:-1], 1).expand(state.parameter.shape))
    if storage.arithmetic == "expansion":
        unit = 2.0 ** -(storage.weight.mantissa_bits + 1)
        # Every operation ends at the format's own subnormals, too.
        least = 0.0 if code.scaled else 2.0 ** (storage.weight.lowest - storage.weight.mantissa_bits)
        return Rounding(code, storage, ends, unit, 1 / code.spacings, 2.0**-storage.weight.mantissa_bits, least)
    return Rounding(code, storage, ends, read=2.0**-code.mantissa_bits if code.parts > 1 else 0.0)
