"""Samples of an optimizer's parameters around a step, in bounded memory.

The update of most optimizers is elementwise. So a few thousand elements of each parameter are
enough to recompute it: the weight and the states before and after, and the gradient. Nothing here
changes a tensor of the run. Samples are on the CPU.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgauge.checks.stored import Rounding
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of
from narrowgauge.optim import codes
from narrowgauge.optim.optimizer import Optimizer

ELEMENTS = 1 << 12
"""Elements that are kept of each parameter."""
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
RULES = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd"}
"""The optimizer classes that are recomputed.

Derived classes are too, unless they replace the step under another name.
"""


def plain(value: Any) -> Any:
    """Return a value of an optimizer's state as it can be read: a plain tensor, dequantized if it
    holds codes.

    A tensor of another class is ``None``: its elements are unknown.
    """
    if not isinstance(value, Tensor) or type(value) in (Tensor, torch.nn.Parameter):
        return value
    if is_sharded(value):
        return value
    if type(value).dequantize is not Tensor.dequantize:
        return value.dequantize()
    return None


def evenly_spread(tensor: Tensor) -> Tensor:
    """Return evenly spread elements of this rank's shard, 1-D: a view where possible, the same
    places at every call.

    The stride is coprime to the last dim, so the elements cover every column.
    """
    flat = local_of(tensor.detach()).reshape(-1)
    stride = max(1, -(-flat.numel() // ELEMENTS))
    columns = tensor.shape[-1] if tensor.ndim else 1
    while stride > 1 and math.gcd(stride, columns) > 1:
        stride += 1
    return flat[::stride]


def spread(tensor: Tensor) -> Tensor:
    """Copy evenly spread elements of this rank's shard to the CPU, 1-D."""
    return evenly_spread(tensor).clone().cpu()


@dataclass
class Sample:
    """Some elements of one parameter around a step, on the CPU.

    Args:
        name: in the model, or its place in the optimizer's groups.
        settings: of its group.
        before: weight and states before the step, 1-D, by name.
        gradient: the input of the rule, after the optimizer's own scaling and clipping; ``None``
            without a gradient.
        after: weight and states after the step.
        count, count_before: the optimizer's count of steps for the parameter, after this step and
            before; ``None`` without one.
        roundings: of the values that a storage rounds; empty for formats of torch.
        why_not: why the step cannot be recomputed.
    """

    name: str
    parameter: Tensor
    optimizer: torch.optim.Optimizer
    settings: dict[str, Any]
    rule: str
    gradient: Tensor | None
    before: dict[str, Tensor] = field(init=False)
    count_before: int | None = field(init=False)
    after: dict[str, Tensor] = field(default_factory=dict)
    count: int | None = None
    roundings: dict[str, Rounding] = field(default_factory=dict)
    why_not: str = ""

    def __post_init__(self) -> None:
        self.before, self.count_before = self.values(), self.num_steps()

    def values(self) -> dict[str, Tensor]:
        """Return samples of the weight and of the states in its shape; none before the first step."""
        stored = {"weight": self.parameter} | stored_by(self.optimizer, self.parameter)
        values = {}
        for name, x in stored.items():
            if isinstance(x, Tensor) and x.shape == self.parameter.shape:
                values[name] = spread(x)
        return values

    def num_steps(self) -> int | None:
        """Return the optimizer's count of steps for the parameter, or ``None`` without a count."""
        if isinstance(self.optimizer, Optimizer):
            return self.optimizer.num_steps(self.parameter)
        count = self.optimizer.state.get(self.parameter, {}).get("step")
        if count is None:
            return None
        return int(count)

    def complete(self, factor: float) -> None:
        """Add the results of the step, which multiplied the gradient by a factor."""
        self.after = self.values()
        self.count = self.num_steps()
        if self.gradient is not None:
            self.gradient = _times(self.optimizer, self.gradient, factor)
        if not isinstance(self.optimizer, Optimizer):
            return
        state = self.optimizer.state_of(self.parameter)
        if state is None:
            return
        for name in self.after:
            code = state.storage.weight if name == "weight" else state.code(name)
            if code.parts > 1 or state.storage.arithmetic == "expansion":
                self.why_not = f"storage '{state.storage.name}' keeps sums of several numbers"
            elif code.mantissa_bits < 23:
                ends = None
                if code.scaled:
                    end = codes.multipliers(state.bounds[name])[1].double().log2()
                    shape = self.parameter.shape
                    ends = spread(end.reshape(*shape[:-1], 1).expand(shape))
                self.roundings[name] = Rounding(code, ends)


@dataclass
class SampledStep:
    """A step: its samples by name, the norm of all gradients, the optimizer's clip factor, and why
    nothing is compared.

    Args:
        strays: parameters with a gradient that are new in the model and in no group, and samples of
            them.
    """

    step: int
    samples: dict[str, Sample] = field(default_factory=dict)
    strays: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    is_compared: bool = True
    grad_norm: float | None = None
    clip: float = 1.0
    why_not: str = ""


def rule_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the rule of an optimizer's class, or of the class that it is derived from; empty for
    an unknown rule.

    A derived class with another name has a rule of its own, unknown here, if its step does not call
    its parent's.
    """
    kinds = type(optimizer).__mro__
    for place, kind in enumerate(kinds):
        name = kind.__name__
        if name in RULES and kind.__module__.partition(".")[0] in ("torch", "narrowgauge"):
            is_renamed = name != kinds[0].__name__
            if is_renamed and any(map(_replaces_step, kinds[:place])):
                return ""
            return RULES[name]
    return ""


def _replaces_step(kind: type) -> bool:
    """Return whether a class has a step of its own that does not call its parent's."""
    step = vars(kind).get("step")
    code = getattr(inspect.unwrap(step), "__code__", None) if step is not None else None
    return code is not None and "super" not in code.co_names


def weight_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """Return the stored weight. For our optimizers include its tail or other low bits."""
    if isinstance(optimizer, Optimizer):
        return optimizer.stored(parameter)
    return parameter


def stored_by(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the stored tensors of a parameter by name: any optimizer's states, and the weight with
    its tail for ours.
    """
    if not isinstance(optimizer, Optimizer):
        return {k: plain(value) for k, value in optimizer.state.get(parameter, {}).items()}
    stored: dict[str, Any] = {}
    for name in ("weight", *STATES) if optimizer.num_steps(parameter) else ("weight",):
        with suppress(KeyError):  # another rule has other states, and a frozen parameter none
            stored[name] = optimizer.stored(parameter, name)
    return stored


def sampled_step(
    number: int, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> SampledStep:
    """Sample a step that is about to be taken.

    Args:
        number: of the step, from 1.
        names: of the model's parameters, by their id. Other parameters are named by their place in
            the optimizer.
    """
    step = SampledStep(number)
    rule = rule_of(optimizer)
    # GradScaler sets these two during a step. Our optimizers report skips and factors afterwards.
    found_inf = getattr(optimizer, "found_inf", None)
    grad_scale = getattr(optimizer, "grad_scale", None)
    if found_inf is not None and bool(found_inf):
        step.why_not = "a gradient is not finite: the step is skipped"
    loss_scale = 1.0
    if grad_scale is not None and not isinstance(optimizer, Optimizer):
        loss_scale = float(grad_scale)
    square = 0.0
    is_whole = True
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        for place, p in enumerate(group["params"]):
            name = names.get(id(p), f"group {index}, parameter {place}")
            if name in step.samples:
                continue
            gradient = gradient_of(p)
            sampled = None
            if gradient is not None:
                if is_sharded(gradient):
                    is_whole = False
                elif gradient.layout is torch.strided:
                    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
                    square += float(norm) ** 2
                # The places of a sparse gradient change in each step.
                if gradient.layout is torch.strided:
                    sampled = _times(optimizer, spread(gradient), 1 / loss_scale)
            step.samples[name] = Sample(name, p, optimizer, settings, rule, sampled)
    if is_whole:
        step.grad_norm = math.sqrt(square) / loss_scale
    return step


def complete(step: SampledStep, optimizer: torch.optim.Optimizer) -> None:
    """Add the results of the step for each parameter.

    Multiply gradients by the optimizer's clip factor.
    """
    if isinstance(optimizer, Optimizer) and optimizer.last_control is not None:
        step.clip, is_skipped = optimizer.last_control.tolist()
        if is_skipped:
            step.why_not = "the norm of the gradients is too large: the step is skipped"
    for sample in step.samples.values():
        sample.complete(step.clip)


def _times(optimizer: torch.optim.Optimizer, gradient: Tensor, factor: float) -> Tensor:
    """Return the gradient times the optimizer's factor.

    Our optimizers multiply in float32 for every format.
    """
    if isinstance(optimizer, Optimizer):
        return (gradient.double() * factor).to(torch.promote_types(gradient.dtype, torch.float32))
    if factor == 1:
        return gradient
    return (gradient.double() * factor).to(gradient.dtype)
