"""Steps and casts compiled for a GPU, proved from their PTX: on arrays it leaves the bits of the definition on a CPU.

Weights and gradients are infinities and NaNs of every kind, too. In tensors of floats any NaN of a CPU equals CUDA's.
"""

from __future__ import annotations

import re

import pytest
from torch import Tensor

from cuda.definitions import CASTS, STEPS, Definition, definition_of
from cuda.launch import Launch, emulated
from cuda.lowering import Lowered, lowered
from cuda.machine import Program
from narrowgauge.edge_values import same_numbers
from narrowgauge.optim import layout
from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.spec.storages import STORAGES
from optional_packages import needs_triton

pytestmark = needs_triton


def difference(definition: Definition, case: list[Tensor], module: Lowered) -> tuple[int, list[Launch]]:
    """Count the tensors that a module leaves or returns other than its definition does."""
    ours, theirs = ([argument.clone() for argument in case] for _ in range(2))
    run, launches = emulated(module)
    expected, results = definition.function(*ours), run(list(theirs))
    returned = [expected] if isinstance(expected, Tensor) else list(expected)
    assert len(returned) == len(results) and launches
    pairs = [*zip(ours, theirs, strict=True), *zip(returned, results, strict=True)]
    return sum(one.shape != other.shape or not same_numbers(one, other) for one, other in pairs), launches


@pytest.mark.parametrize("name", [*STEPS, *CASTS])
def test_no_word_differs(name: str) -> None:
    definition, module = definition_of(name), lowered(name)
    assert_instructions(module)
    for case in definition.cases:
        wrong, launches = difference(definition, case, module)
        assert wrong == 0 and max(launch.blocks for launch in launches) > 1


def assert_instructions(module: Lowered) -> None:
    """No approximation, nothing flushed or fused, no float64 but to round a constant, and registers for everything."""
    for kernel in module.kernels.values():
        assert kernel.spills == 0 or "rotat" in kernel.name, kernel.spills
        code = [str(instruction) for instruction in Program.parse(kernel.ptx).code]
        body = "\n".join(line for line in code if not line.startswith("cvt.rn.f32.f64"))
        assert not re.findall(r"\.(?:approx|full|ftz|f64)\b|\bfma\.|\bmad\.(?:rn\.)?f", body)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_one_launch_that_reads_and_writes_each_word_once(name: str) -> None:
    definition = definition_of(name)
    _, (launch,) = difference(definition, definition.cases[0], lowered(name))
    storage = STORAGES[name.split()[1]].keeping(ADAMW.kept)
    parts = layout.num_parts(storage)
    planes = sum(layout.num_tensors(storage, plane.bits) for plane in layout.planes(storage))
    words = [counts for counts in launch.traffic.values() if len(counts[0]) >= 4096]
    assert sum((reads == 1).all() for reads, _ in words) == 2 * parts + planes
    assert sum((writes == 1).all() for _, writes in words) == parts + planes
