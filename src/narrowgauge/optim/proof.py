"""The proof of a kernel: at its first use it is compared with its definition on ordinary and edge
values. If a bit differs, the definition runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from narrowgauge.optim.definition import average_gradient, run
from narrowgauge.optim.kernel import Kernel, Numbers
from narrowgauge.optim.planes import planes_of
from narrowgauge.optim.rules.matrix import AnyRule
from narrowgauge.optim.state import LocalState, new_state
from narrowgauge.optim.table import Table
from narrowgauge.optim.values import begin
from narrowgauge.optim.walk import integers_of
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support import proof, triton
from narrowgauge.torch_support.edge_values import draw, with_nan
from narrowgauge.torch_support.torch_names import to_device

MANY_ROWS = 258
"""Rows of 256 weights in a proof."""
GRADIENT = 2
"""The seed of the gradients of a proof."""


def why_not(rule: AnyRule, storage: Storage, device: torch.device) -> str:
    """Return why no kernel steps a (rule, storage) on a device, or an empty string."""
    name = f"the step of {rule.name}/{storage.name}"
    key = rule, storage
    return proof.why_not(name, key, device, lambda: _has_the_bits(rule, storage, device))


def _has_the_bits(rule: AnyRule, storage: Storage, device: torch.device) -> bool:
    """Return whether a launch gives the bits of the definition, which runs on the CPU."""
    kernel = Kernel(rule, storage)
    scalars = np.linspace(0.1, 0.9, len(rule.scalars), dtype=np.float32).tolist()
    control = torch.tensor([1.0, 0.0], dtype=torch.float32)
    numbers = Numbers(kernel, control, scalars, 12345, None)
    expected = _cases(rule, storage, torch.device("cpu"), device)
    for state in expected:
        if kernel.is_matrix:
            average_gradient(state, numbers)
        run(state, numbers)
    actual = _cases(rule, storage, device, device)
    table = Table(rule, storage, device)
    for ours, theirs in zip(actual, expected, strict=True):
        ours.change = to_device(theirs.change, device)
    table.set(dict.fromkeys(actual, numbers))
    table.launch(to_device(control, device))
    for ours, theirs in zip(actual, expected, strict=True):
        for actual_x, expected_x in zip(_tensors_of(ours), _tensors_of(theirs), strict=True):
            if not torch.equal(integers_of(actual_x.cpu()), integers_of(expected_x)):
                return False
    return True


def _tensors_of(state: LocalState) -> list[Tensor]:
    """Return what a step stores. A stored NaN has one pattern of bits."""
    return [state.parameter, *state.tensors().values()]


def _cases(
    rule: AnyRule, storage: Storage, device: torch.device, proven: torch.device
) -> list[LocalState]:
    """Draw tensors: ordinary values, odd ends, and in the last two rows edge values.

    A fault of a division's last bit shows in one of a thousand weights of 16 bits. An interpreter
    is too slow for as many.
    """
    kernel = Kernel(rule, storage)
    dtype = getattr(torch, storage.visible)
    states = []
    rows = 4 if triton.INTERPRET and proven.type == "cpu" else MANY_ROWS

    def drawn(dtype: torch.dtype, shape: Sequence[int], seed: int, edges: bool) -> Tensor:
        if not edges:
            return draw(dtype, shape, edges=False, seed=seed)
        ordinary = draw(dtype, (shape[0] - 2, shape[1]), edges=False, seed=seed)
        last = draw(dtype, (2, shape[1]), edges=True, seed=seed)
        if seed == GRADIENT:
            last = with_nan(last)
        return torch.cat([ordinary, last])

    for shape, edges, wide in (
        ((3, 67), False, False),
        ((3, 67), True, True),
        ((rows, 256), True, False),
    ):
        weight = drawn(dtype, shape, 1, edges)
        if edges and storage.visible != "float16":  # which reads infinity as 65536
            weight[-1, :2] = torch.tensor([math.inf, -math.inf])
        weight = weight.to(device)
        state = LocalState(weight, new_state(weight, storage, {}), kernel, {})
        begin(state)
        for name, tensor in state.tensors().items():
            drawn_shape = (*shape[:1], 1) if name.endswith("_bound") else shape
            value = drawn(tensor.dtype, drawn_shape, 3, edges)
            if value.is_floating_point():
                value = value.abs()
            if edges:
                value[-1] = _at_ends(value[-1], storage, name)
            tensor.copy_(value)
        gradient = drawn(dtype, shape, GRADIENT, edges)
        state.gradient = (gradient.float() if wide else gradient).to(device)
        state.change = torch.zeros(shape, dtype=torch.float32, device=device)
        states.append(state)
    return states


def _at_ends(values: Tensor, storage: Storage, name: str) -> Tensor:
    """Return values with some at the ends of a range: infinities, or the smallest codes."""
    if values.is_floating_point():
        return torch.where(torch.arange(len(values)) % 7 == 0, torch.inf, values)
    lowest = 0
    for plane in planes_of(storage):
        if plane.name == name:
            for _, shift, _ in plane.fields:
                lowest |= 1 << shift
    return values & lowest
