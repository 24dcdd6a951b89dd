"""The proof of a kernel: at its first use it is compared with its definition on ordinary and edge
values. If a bit differs, a warning says where, and the definition runs.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from narrowgauge.optim.rules.matrix import AnyRule
from narrowgauge.optim.step.bit_layout import roles
from narrowgauge.optim.step.launch import Batch, addresses_of, streams_of
from narrowgauge.optim.step.run_definition import average_gradient, run
from narrowgauge.optim.step.state import LocalState, new_state
from narrowgauge.optim.step.state_chunks import integers_of
from narrowgauge.optim.step.state_values import stored
from narrowgauge.optim.step.step_definition import StepDefinition, StepScalars
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support import proof, triton
from narrowgauge.torch_support.torch_names import to_device

MANY_ROWS = 129
"""Rows of 512 weights in a proof: a fault of a division's last bit shows in one of a thousand
weights of 16 bits. An interpreter is too slow for as many.
"""


def why_no_kernel(rule: AnyRule, storage: Storage, device: torch.device) -> str:
    """Return why no kernel steps a (rule, storage) on a device, or an empty string."""
    name = f"the step of {rule.name}/{storage.name}"
    key = rule, storage
    return proof.why_not(name, key, device, lambda: difference(rule, storage, device))


def difference(rule: AnyRule, storage: Storage, device: torch.device) -> str:
    """Return the first difference of a launch from the definition, which runs on the CPU."""
    kernel = StepDefinition(rule, storage)
    scalars = np.linspace(0.1, 0.9, len(rule.scalars), dtype=np.float32).tolist()
    if rule.decay:  # an infinite weight less its decay would be NaN
        scalars[rule.scalars.index(rule.decay)] *= -1.0
    control = torch.tensor([1.0, 0.0], dtype=torch.float32)
    numbers = StepScalars(kernel, control, scalars, 12345)
    rows = MANY_ROWS
    if triton.INTERPRET and device.type == "cpu":
        rows = 3
    pairs = []
    for shape, edges in (((3, 67), 3), ((2, 300), 1), ((rows, 512), 2)):
        expected, actual = [_drawn(kernel, shape, edges, place) for place in ("cpu", device)]
        if kernel.is_matrix:
            expected.change = torch.zeros(shape, dtype=torch.float32)
            average_gradient(expected, numbers)
            actual.change = to_device(expected.change, device)
        run(expected, numbers)
        pairs.append((actual, expected))
    states = [actual for actual, _ in pairs]
    tensors = streams_of(states)
    batch = Batch(0, states)
    batch.numbers = replace(numbers, control=to_device(control, device))
    batch.lay_out()
    batch.read(tensors, addresses_of(tensors))
    batch.run()
    for ours, theirs in pairs:
        found = _difference_of(ours, theirs)
        if found:
            return found
    return ""


def _difference_of(actual: LocalState, expected: LocalState) -> str:
    """Return where what a step has stored differs. A stored NaN has one pattern of bits."""
    pairs = {}
    for name in roles(expected.storage):
        pairs[name] = stored(actual, name).cpu(), stored(expected, name)
    for name, tensor in {"parameter": expected.parameter, **expected.tensors}.items():
        other = actual.tensors.get(name, actual.parameter)
        pairs[f"the integer of {name}"] = integers_of(other.cpu()), integers_of(tensor)
    for name, (ours, theirs) in pairs.items():
        text = proof.first_difference(name, ours, theirs)
        if text:
            return text
    return ""


def _drawn(
    kernel: StepDefinition, shape: tuple[int, int], edges: int, device: torch.device | str
) -> LocalState:
    """Draw a weight, its state and its gradient. The last rows have edge values: then the
    gradient of a narrow case is float32.
    """
    dtype = getattr(torch, kernel.storage.visible)
    weight = _values(dtype, shape, edges, 1, finite=True)
    if kernel.storage.visible != "float16":  # which reads infinity as 65536
        weight[-1, :2] = torch.tensor([math.inf, -math.inf])
    weight = weight.to(device)
    state = LocalState(weight, new_state(weight, kernel, {}), kernel, {})
    for name, tensor in state.tensors.items():
        value = _values(tensor.dtype, tensor.shape, edges, 3, finite=name.endswith("_bound"))
        if value.is_floating_point():
            value = value.abs()
        else:
            value[-1] &= min(257, torch.iinfo(value.dtype).max)  # the smallest codes
        tensor.copy_(value)
    gradient = _values(dtype, shape, edges, 2, finite=False)
    if edges == shape[0]:
        gradient = gradient.float()
    state.gradient = gradient.to(device)
    return state


def _values(
    dtype: torch.dtype, shape: Sequence[int], edges: int, seed: int, *, finite: bool
) -> Tensor:
    """Draw values. The last rows have edge values."""
    values = proof.draw(dtype, shape, edges=False, seed=seed)
    values[-edges:] = proof.draw(dtype, (edges, shape[1]), edges=True, seed=seed, finite=finite)
    return values
