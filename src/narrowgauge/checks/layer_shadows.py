"""Follow the products of our own layers: a shadow multiplies the operands as before the casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.checks.units import UNITS, unit_of, unit_of_row
from narrowgauge.torch_support import torch_names


def output(mode: Any, run: Any, x: Tensor, weight: Tensor, bias: Any, call: Any) -> Any:
    """Follow a layer's product."""
    wide = mode.of(x), mode.of(weight), mode.of(bias)
    mode.products[call.compute.name] += 1
    with torch_names.no_modes(), torch.autocast(x.device.type, enabled=False):
        y, *saved = run(x, weight, bias, call)
        shadow = nn.functional.linear(*wide)
        if _rounds(mode, call, y.dtype):
            narrow = [None if t is None else t.to(x.dtype) for t in wide]
            shadow = run(*narrow, call)[0]
        _keep(mode, y, shadow, (x, weight))
        mode.sources.set(saved[0], wide[0])
    return y, *saved


def gradients(
    mode: Any, run: Any, grad: Tensor, saved: Any, weight: Tensor, call: Any, needs: Any
) -> Any:
    """Follow a layer's two products in backward."""
    mode.products[call.compute.name] += 2
    source = mode.sources.get(saved.data)
    if source is None:
        source = mode.of(saved.data)
    wide = mode.of(grad)
    wide_weight = mode.of(weight)
    rounds = _rounds(mode, call, grad.dtype)
    with torch_names.no_modes(), torch.autocast(grad.device.type, enabled=False):
        results = run(grad, saved, weight, call, needs)
        if rounds:
            if saved.data.shape == source.shape and saved.data.dtype == grad.dtype:
                saved = saved._replace(data=source.to(grad.dtype))
            shadows = run(wide.to(grad.dtype), saved, wide_weight.to(weight.dtype), call, needs)
        else:
            shadows = (wide @ wide_weight, wide.t() @ source, wide.sum(0))
        for x, value in zip(results, shadows, strict=True):
            if x is not None:
                _keep(mode, x, value, (grad, weight))
    return results


def _keep(mode: Any, x: Tensor, value: Tensor, operands: tuple[Tensor, ...]) -> None:
    mode.keep(x, value)
    if not all(map(mode.follows, operands)):
        mode.lose([x])


def _rounds(mode: Any, call: Any, dtype: torch.dtype) -> bool:
    """Note a layer's casts as a site, and return whether it is chosen."""
    key = (mode.site(), call.compute.name)
    unit = unit_of(dtype)
    for cast in call.compute.casts.values():
        if cast is not None:
            unit = max(unit, unit_of_row(cast.format))
    mode.units[key] = unit
    mode.working = max(mode.working, min(unit, UNITS[torch.bfloat16]))
    mode.errs.add(key)
    return key[0] in mode.chosen
