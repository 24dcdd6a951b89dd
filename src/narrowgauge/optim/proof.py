"""The proof of a printed step: at its first use it is compared with its definition on ordinary and
edge values. If a bit differs, the definition runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.optim import cpp_step
from narrowgauge.optim.definition import average_gradient, run
from narrowgauge.optim.kernel import Kernel, Numbers
from narrowgauge.optim.multi_tensor import Table
from narrowgauge.optim.rules.matrix import AnyRule
from narrowgauge.optim.state import LocalState, new_state
from narrowgauge.optim.values import begin
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support import proven, triton
from narrowgauge.torch_support.cpp import CPP
from narrowgauge.torch_support.edge_values import draw, same_numbers, with_nan
from narrowgauge.torch_support.proven import language_on
from narrowgauge.torch_support.torch_names import to_device

MANY_ROWS = 258
"""Rows of 256 weights in a proof."""
GRADIENT = 2
"""The seed of the gradients of a proof."""


def why_not_printed(rule: AnyRule, storage: Storage, device: torch.device) -> str:
    """Return why the printed step cannot be used on a device, or an empty string."""
    if storage.arithmetic == "float64":
        return "float64 is a reference"
    name = f"the step of all tensors of {rule.name}/{storage.name}"
    key = rule, storage
    return proven.why_not_printed(name, key, device, lambda: _has_the_bits(rule, storage, device))


def _has_the_bits(rule: AnyRule, storage: Storage, device: torch.device) -> bool:
    """Return whether a launch, plain and audited, gives the bits of the definition, which runs on
    the CPU.
    """
    if language_on(device) == CPP.name:
        cpp_step.build_all(rule, storage)
    kernel = Kernel(rule, storage)
    scalars = np.linspace(0.1, 0.9, len(rule.scalars), dtype=np.float32).tolist()
    control = torch.tensor([1.0, 0.0], dtype=torch.float32)
    numbers = Numbers(kernel, control, scalars, 12345, 0)
    expected = _cases(rule, storage, torch.device("cpu"), device)
    expected_sums: list[Any] = []
    for state in expected:
        if kernel.is_matrix:
            average_gradient(state, numbers)
        expected_sums.append(run(state, numbers))
    for audited in (False, True):
        actual = _cases(rule, storage, device, device)
        table = Table(rule, storage, device)
        turn = 0 if audited else None
        table.set(dict.fromkeys(actual, replace(numbers, turn=turn)), audits_all=True)
        table.send()
        if kernel.is_matrix:
            table.launch(to_device(control, device), averages=True)
        audit = table.launch(to_device(control, device))
        for ours, theirs in zip(actual, expected, strict=True):
            pairs = zip(_tensors_of(ours), _tensors_of(theirs), strict=True)
            if not all(same_numbers(actual_x.cpu(), expected_x) for actual_x, expected_x in pairs):
                return False
        # Sums with infinities and NaN say nothing. Only the first case is free of them.
        if audit is not None:
            first = audit[1][0, : kernel.num_sums].cpu()
            if not torch.allclose(first, expected_sums[0], rtol=1e-3, atol=1e-30, equal_nan=True):
                return False
    return True


def _tensors_of(state: LocalState) -> list[Tensor]:
    return [state.parameter, state.change, *state.tensors().values()]


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
            shape_drawn = (*shape[:1], 1) if name.endswith("_bound") else shape
            value = drawn(tensor.dtype, shape_drawn, 3, edges)
            tensor.copy_(value.abs() if value.is_floating_point() else value)
        gradient = drawn(dtype, shape, GRADIENT, edges)
        state.gradient = (gradient.float() if wide else gradient).to(device)
        state.change = torch.zeros(shape, dtype=torch.float32, device=device)
        states.append(state)
    return states
