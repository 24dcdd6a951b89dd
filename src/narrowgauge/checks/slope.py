"""Compare the gradient with the slope of the loss, in training mode, on a float64 copy of the model.

Move all tensors along one random direction, forward and back by 1e-5 of their size. The difference of the two losses gives the
slope, which the gradient predicts. Dropout draws the same masks in each pass. Where the two differ, halve the set of tensors
until single tensors are left. A longer step must find the same slope, or nothing is said.

A wrong backward pass differs: a custom autograd function, a recomputed block with other dropout masks, a padding index that is a
token. So does a detached tensor, which may be on purpose.
"""

from __future__ import annotations

import copy
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.set_up import NARROW, inner_name
from narrowgauge.errors import RecipeError
from narrowgauge.matmul import layer_matmuls
from narrowgauge.matmul.linear import NarrowLayer
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.put_back import put_back
from narrowgauge.torch_names import unwrapped_model

Loss = Callable[[nn.Module, Any], Tensor]
Gradients = dict[str, Tensor]
STEPS = (1e-5, 1e-7, 1e-3)
"""Lengths of steps along the direction, in units of each tensor's root mean square. A shorter one crosses fewer kinks, such as
changes of routing. The longest must agree with the first before a tensor is named: float32 inside a loss makes them differ."""
_MOST = 8
"""Tensors that are located; the first in backward."""


def slope_readings(
    model: nn.Module, outside: Mapping[str, Any], batch: Any, loss: Loss
) -> tuple[list[Reading], list[str], float]:
    """Compare the gradient of a float32 copy, and of leaves beside it, with the slope of the loss. Both are float64 meanwhile.

    Returns:
        At most one reading, a line about what was compared, and the loss.
    Raises:
        ArithmeticError: no slope exists, since the loss is not smooth or not the same in each pass.
    """
    plain_dtypes = [(m, m.plain_dtype) for m in model.modules() if isinstance(m, NarrowLayer)]
    default, data = torch.get_default_dtype(), {p: p.data for p in outside.values()}
    try:
        model.double()
        for p in data:
            p.data = p.data.double()
        torch.set_default_dtype(torch.float64)
        for layer, _ in plain_dtypes:
            layer.plain_dtype = torch.float64
        slope = _Slope(model, outside, cast_to(batch, torch.float64, (*NARROW, torch.float32)), loss)
        names = list(slope.parameters)[::-1]  # in the order of backward
        wrong = dict(_located(slope, names)) if slope.difference(names) else {}
    finally:
        torch.set_default_dtype(default)
        model.float()
        for p, values in data.items():
            p.data = values
        for layer, dtype in plain_dtypes:
            layer.plain_dtype = dtype
    if not wrong:
        line = f"slope: the loss changes as the gradient of {len(names)} tensors says, within {slope.largest:.0e}"
        return [], [f"{line}, in training mode"], slope.loss_value
    first, (product, expected, bound) = next(iter(wrong.items()))
    stops = "An output is detached or rounded; if that is on purpose, all is well." if slope.stops else ""
    reading = KINDS["slope"].reading(of_all(wrong), product, expected, bound, first=first, stops=stops)
    return [replace(reading, severity="note") if slope.stops else reading], [], slope.loss_value


class _Difference(NamedTuple):
    """The gradient's product with a direction, and the slope of the loss along it."""

    product: float
    slope: float
    bound: float


def _located(slope: _Slope, names: Sequence[str]) -> Iterator[tuple[str, _Difference]]:
    """Yield tensors whose gradient is not the slope, in the given order."""
    sets, count = [list(names)], 0
    while sets and count < _MOST:
        members = sets.pop()
        with suppress(ArithmeticError):
            if (difference := slope.difference(members)) and len(members) == 1:
                count += 1
                yield members[0], difference
            elif difference:
                half = len(members) // 2
                sets += [members[half:], members[:half]]


class _Slope:
    """The loss along a random direction, and what the gradient says of it.

    Attributes:
        stops: a forward pass detached a tensor that needs a gradient.
        largest: the largest distance that is no difference.
    """

    def __init__(self, model: nn.Module, outside: Mapping[str, Any], batch: Any, loss: Loss) -> None:
        self.model, self.batch, self.loss = model, batch, loss
        self.parameters = {inner_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters |= outside
        self.start = {name: p.detach().clone() for name, p in self.parameters.items()}
        stops = _Stops()

        def watched(model: nn.Module, batch: Any) -> Tensor:
            with stops:
                return loss(model, batch)

        gradients, self.loss_value = gradients_of(model, self.parameters, batch, watched, Widened(torch.float64))
        self.stops, self.largest = bool(stops.count), 0.0
        self.products, self.squares = dict[str, float](), dict[str, float]()
        for place, (name, gradient) in enumerate(gradients.items()):
            direction = self._direction(name, place)
            self.products[name] = float((gradient * direction).sum())
            self.squares[name] = float(gradient.square().sum() * direction.square().mean())

    def _direction(self, name: str, place: int) -> Tensor:
        start = self.start[name]
        generator = torch.Generator(start.device).manual_seed(place)
        noise = torch.randn(start.shape, generator=generator, device=start.device)
        return noise * (float(start.square().mean().sqrt()) or 0.02)

    def _loss_at(self, names: Sequence[str], step: float) -> float:
        chosen = set(names)
        with torch.no_grad():
            for place, (name, p) in enumerate(self.parameters.items()):
                if name in chosen:
                    p.copy_(self.start[name] + step * self._direction(name, place))
        try:
            with put_back(self.model), Widened(torch.float64):
                return float(scalar(self.loss(self.model, self.batch)).detach())
        finally:
            with torch.no_grad():
                for name in chosen:
                    self.parameters[name].copy_(self.start[name])

    def difference(self, names: Sequence[str]) -> _Difference | None:
        """Compare the slope along some tensors with their gradient; ``None`` within the bound.

        Raises:
            ArithmeticError: no slope exists, since the loss is not smooth or not the same in each pass.
        """
        product, size = sum(self.products[n] for n in names), math.sqrt(sum(self.squares[n] for n in names))
        slopes, slope, bound = list[float](), math.nan, 0.0
        for step in STEPS:
            slope = (self._loss_at(names, step) - self._loss_at(names, -step)) / (2 * step)
            slopes.append(slope)
            scale = max(size, abs(slope), 1e-300)
            bound = KINDS["slope"].bound * scale + 64 * abs(self.loss_value) * 2.0**-53 / step
            if abs(slope - product) <= bound:
                self.largest = max(self.largest, abs(slope - product) / scale)
                return None
        if not abs(slopes[0] - slope) <= abs(slope - product) / 4 < math.inf:
            raise ArithmeticError("the loss is not smooth, differs from pass to pass, or is computed in float32")
        return _Difference(product, slopes[0], bound)


class _Stops(TorchFunctionMode):
    """Count results of a forward pass that need a gradient and are detached or rounded, perhaps on purpose."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_tensor = isinstance(result, Tensor) and result.numel() > 1 and result.is_floating_point()
        if is_tensor and not result.requires_grad:
            needs = any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(args))
            is_rounded = func.__name__ in ("round", "sign") or result.element_size() == 1
            self.count += needs and (is_rounded or not _is_called_by(_in_autograd_function))
        return result


# ── passes of a copy ────────────────────────────────────────────────────────────────────────────────────────────────────


def float32_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy in float32, unsharded, without wrappers, compiled code or FSDP2 hooks.

    All ranks of a sharded model make the call. Our low-precision layers keep their casts.
    """
    model, memo, classes = unwrapped_model(model), dict[int, Any](), dict[nn.Module, type]()
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(whole(p.detach()).float().clone(), requires_grad=p.requires_grad)
    for module in model.modules():
        if type(module).__name__.startswith("FSDP") and len(type(module).__mro__) > 2:
            classes[module] = type(module)
            names = [name for name in module.__dict__ if "_hooks" in name or name.startswith("__composable_api_state")]
            memo |= {id(module.__dict__[name]): OrderedDict() for name in names}
        # Such as auxiliary losses and attention maps of an earlier forward pass: only leaves can be copied.
        results = [
            t for t in tree_leaves(list(vars(module).values())) if isinstance(t, Tensor) and t.grad_fn is not None
        ]
        memo |= {id(tensor): tensor.detach().clone() for tensor in results}
    try:
        for module, kind in classes.items():
            module.__class__ = kind.__mro__[2]
        twin = copy.deepcopy(model, memo)
    finally:
        for module, kind in classes.items():
            module.__class__ = kind
    if callable(choose := getattr(twin, "set_experts_implementation", None)):
        choose("eager")  # the grouped products of transformers take no float64
    for module in twin.modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            module._compiled_call_impl = None
        if isinstance(module, NarrowLayer):
            module.register_forward_hook(lambda module, args, output: output * 1.0)  # a result that can be rounded
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in NARROW:
                module._buffers[name] = buffer.float()
    return twin


def whole(tensor: Any) -> Tensor:
    """Return a tensor with the parts of all ranks."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def cast_to(values: Any, dtype: torch.dtype, narrower: Sequence[torch.dtype]) -> Any:
    """Return values with their tensors of narrower formats cast."""
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.dtype in narrower else x, values)


class Widened(TorchDispatchMode):
    """Compute in a wide format instead of narrower ones, for casts by autocast or by the model. Round results at random.

    Args:
        dtype: float32 or float64.
        unit: the largest relative rounding of a result; 0 rounds nothing.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, unit: float = 0.0, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.unit, self.seed = dtype, unit, seed
        self.narrower = NARROW if dtype is torch.float32 else (*NARROW, torch.float32)
        self.generators = dict[torch.device, torch.Generator]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # In float32 our low-precision products keep their own casts. In float64 they are plain.
        is_ours = self.dtype is torch.float32 and _is_called_by(_in_cast)
        if kwargs.get("dtype") in self.narrower and not is_ours:
            kwargs["dtype"] = self.dtype
        is_fresh = not is_ours and all(value.alias_info is None for value in func._schema.returns)
        if is_fresh and any(x.dtype is self.dtype for x in tensors):  # such as a plain attribute beside the weights
            args, kwargs = cast_to((args, kwargs), self.dtype, self.narrower)
        result = func(*args, **kwargs)
        return tree_map(self._rounded, result) if self.unit and is_fresh else result

    def _rounded(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return x
        if x.device not in self.generators:
            self.generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        noise = torch.rand(x.shape, generator=self.generators[x.device], device=x.device, dtype=torch.float32)
        return x * (1 + self.unit * (2 * noise - 1)).to(x.dtype)


def _is_called_by(is_in: Callable[[CodeType], bool]) -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None and not is_in(frame.f_code):
        frame = frame.f_back
    return frame is not None


def _in_autograd_function(code: CodeType) -> bool:
    """Return whether a custom autograd function computes its forward pass, without gradients."""
    return code.co_name == "apply" and code.co_filename == torch.autograd.function.__file__


def _in_cast(code: CodeType) -> bool:
    """Return whether one of our low-precision products computes. Its emulated casts are exact."""
    return code.co_filename == layer_matmuls.__file__


def gradients_of(
    model: nn.Module, parameters: dict[str, Any], batch: Any, loss: Loss, mode: Widened
) -> tuple[Gradients, float]:
    """Return the gradients of named leaves, float64 on their device, and the loss. Zeros stand for no gradient."""
    with put_back(model, parameters.values()), mode:
        value = scalar(loss(model, batch))
        value.backward()
        gradients = {
            name: torch.zeros_like(p, dtype=torch.float64) if p.grad is None else p.grad.detach().to_dense().double()
            for name, p in parameters.items()
        }
    return gradients, float(value.detach())


def scalar(result: Any) -> Tensor:
    """Return what the user's ``loss`` returned, if a backward pass can begin there."""
    if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
        kind = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        kind += ", without a graph" if isinstance(result, Tensor) and not result.requires_grad else ""
        raise RecipeError(
            f"Cannot compare gradients because loss(model, batch) returned {kind}.",
            "Return the mean loss over the batch, a tensor of one element.",
        )
    return result
