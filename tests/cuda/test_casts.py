"""The casts of narrow matmuls and of compressed gradients on a GPU, proved from their machine code: the same bits as on a CPU.

A cast runs here as it is, but for the functions that it has compiled: those run as PTX, from what ``torch.compile``
makes of them for the matrices of a GPU. A NaN of a CPU and one of CUDA are one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from covering import whole
from cuda.casts import CPU, SMALL, Call, Results, calls_of, canonical, names, result_of, running
from cuda.launch import Launch, emulated
from cuda.lowering import Lowered, lowered
from cuda.machine import Program, Refused
from optional_packages import needs_triton
from tensors import bits

pytestmark = needs_triton
CHIP = "sm_90"
FEW = (
    "cast float8-row output.left codes",
    "cast int8-row grad_input.left values",
    "cast mxfp8 output.left values",
    "cast nvfp4 grad_weight.left codes",
    "send compressed8",
    "sum compressed8",
)
"""Casts that are proved on each push: whole, in blocks, codes, values, random words, a fold, a rotation, two levels of scales."""
NO_NAN = ("int", "send", "sum")
"""An integer has no NaN: the code of one is undefined, and the scale beside it says so."""


class Machine:
    """Runs what casts hand over as PTX."""

    def __init__(self, change: Callable[[str], str] = str) -> None:
        self.change = change
        self.launches: list[Launch] = []

    def __call__(self, call: Call) -> Any:
        wanted = call.function(*call.arguments)
        run, launches = emulated(planted(compiled(call), self.change))
        found = iter(run([None if each is None else each.clone() for each in call.arguments]))  # type: ignore[misc]
        self.launches += launches
        if isinstance(wanted, Tensor):
            return next(found)
        return tuple(None if each is None else next(found) for each in wanted)


def compiled(call: Call) -> Lowered:
    name, number = canonical()[call.key]
    return lowered(CHIP, f"{name} {number}")


def planted(found: Lowered, change: Callable[[str], str]) -> Lowered:
    return replace(found, kernels={name: replace(each, ptx=change(each.ptx)) for name, each in found.kernels.items()})


def difference(name: str, values: str, machine: Machine) -> int:
    """How many words of a cast's tensors differ."""
    wanted = result_of(name, SMALL, CPU, values)
    with running(machine):
        found = result_of(name, SMALL, CPU, values)
    assert machine.launches
    return differing(wanted, found)


def differing(wanted: Results, found: Results) -> int:
    wrong = 0
    for one, other in zip(wanted, found, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        differs = bits(one.contiguous()) != bits(other.contiguous())
        if one.is_floating_point():
            differs &= ~(one.float().isnan() & other.float().isnan())
        wrong += int(differs.sum())
    return wrong


def has_nan(name: str) -> bool:
    return not any(kind in name for kind in NO_NAN)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else whole) for name in names()])
def test_no_word_of_a_cast_differs(name: str) -> None:
    for call in calls_of(name, CPU):
        assert_instructions(compiled(call), call.function.__name__)
    for values in ("usual", "edges", *(["wrong"] if has_nan(name) else [])):
        machine = Machine()
        assert difference(name, values, machine) == 0
        assert max(launch.blocks for launch in machine.launches) > 1


SPILLS = {"rotate_blocks": 140, "cast_whole": 4}
"""Bytes for which a thread lacks registers: of a rotation, which mixes sixteen values at once, and of rows of int8."""


def assert_instructions(found: Lowered, function: str) -> None:
    """No approximation, nothing flushed or fused, no float64 but to round a constant, and registers for everything."""
    for each in found.kernels.values():
        assert each.spills <= SPILLS.get(function, 0)
        code = [str(instruction) for instruction in Program.parse(each.ptx).code]
        body = "\n".join(line for line in code if not line.startswith("cvt.rn.f32.f64"))
        assert not re.findall(r"\.(?:approx|full|ftz|f64)\b|\bfma\.|\bmad\.(?:rn\.)?f", body)


def test_every_function_that_casts_hand_over_is_named() -> None:
    """The casts of the table are here with their dtypes: a new one is proved without being asked for."""
    functions = {key.partition(" ")[0] for key in canonical()}
    assert functions == {
        *("cast_whole", "cast_blocks", "rotate_blocks", "channel_factors", "state_words"),
        *("encode_blocks", "_add_codes", "scale_result"),
    }
    assert set(FEW) <= set(names())


# ── it can fail ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "pattern", "instead"),
    [
        ("cast float8-row output.left codes", r"0f46C00000", "0f47400000"),  # 1.5 × 2^14: subnormals in longer steps
        ("cast float8-row output.left codes", r"e4m3x2", "e5m2x2"),
        ("cast int8-row grad_input.left values", r"-?2073254261", "2073254260"),  # a constant of the hash
        ("cast int8-row grad_input.left values", r"cvt\.rmi", "cvt.rni"),
        ("cast mxfp8 output.left values", r"67108864", "75497472"),  # the exponent of the largest code
        ("send compressed8", r"cvt\.rmi", "cvt.rni"),
    ],
)
def test_a_changed_instruction_leaves_other_words(name: str, pattern: str, instead: str) -> None:
    changed: list[str] = []

    def change(ptx: str) -> str:
        changed.append(re.sub(pattern, instead, ptx))
        return changed[-1]

    assert difference(name, "usual", Machine(change=change))


def test_an_approximate_division_is_refused() -> None:
    with pytest.raises(Refused, match="full"):
        difference(FEW[0], "usual", Machine(change=lambda ptx: ptx.replace("div.rn.f32", "div.full.f32")))
