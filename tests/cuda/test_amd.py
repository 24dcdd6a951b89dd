"""Kernels for AMD's gfx942 (MI300), read in their machine code: nothing runs it here.

The path is the project's own with ROCm in CUDA's place; Triton's AMD backend writes the machine code without a device.
Exact division, square root, division of integers and conversion to them are sequences of instructions, which hold an
approximation and fused multiply-adds that correct it: so many of these as the sequences have are allowed, and not one
more.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from covering import whole
from cuda.lowering import TritonKernel, lowered
from optional_packages import needs_triton

pytestmark = needs_triton
CHIP = "gfx942"
NAMES = (
    "step adamw word wide",
    "norm bfloat16",
    "cast float8-row output.left values 0",
    "step adamw compact wide",
    "cast int8-row grad_input.left values 1",
    "step lion kahan",
)
FEW = NAMES[:3]
"""Kernels of each push."""
MODES = {"round_mode_32": 0, "round_mode_16_64": 0, "denorm_mode_32": 3, "denorm_mode_16_64": 3}
"""To the nearest, ties to even; subnormals are read and written.

Source: LLVM, User Guide for the AMDGPU backend, ``.amdhsa_float_…``.
"""
OPERATION = re.compile(r"^\s+((?:[vs]|ds|global|buffer|flat|scratch)_\w+)", re.M)
FUSED = re.compile(r"v_(?:pk_)?(?:fma|fmac|fmamk|fmaak|mad|mac|madmk|madak|dot\w*)_(?:mix\w*_)?(f\d\d)")


def operations(kernel: TritonKernel) -> Counter[str]:
    """How often each instruction stands there, whatever its encoding."""
    return Counter(re.sub(r"_(?:e32|e64|dpp|sdwa)$", "", found[1]) for found in OPERATION.finditer(kernel.amdgcn))


def faults(kernel: TritonKernel) -> list[str]:
    """What the machine code has that a definition's bits may differ by, or that costs memory."""
    count, wrong = operations(kernel), []
    modes = {name: int(value) for name, value in re.findall(r"\.amdhsa_float_(\w+) (\d+)", kernel.amdgcn)}
    wrong += ["rounding or subnormals"] * (modes != MODES)
    wrong += ["a mode that changes"] * any(name.startswith(("s_setreg", "s_denorm", "s_round")) for name in count)
    wrong += ["scratch memory"] * (kernel.spills > 0 or any(name.startswith("scratch_") for name in count))
    fused: Counter[str] = Counter()
    for name, number in count.items():
        if match := FUSED.match(name):
            fused[match[1]] += number
    divisions, roots = count["v_div_fixup_f32"], count["v_sqrt_f32"]
    places = count[
        "v_trunc_f32"
    ]  # quotients of 64-bit integers, which are estimated in float32 and corrected as integers
    # A reciprocal and five fused corrections make a quotient, two of them a root.
    wrong += ["a multiply-add in float32"] * (fused["f32"] != 5 * divisions + 2 * roots + 2 * places)
    wrong += ["a quotient"] * (
        [count[f"v_{part}_f32"] for part in ("rcp", "div_fmas", "div_scale")]
        != [divisions + places, divisions, 2 * divisions]
    )
    # The upper half of a 64-bit integer, taken from the whole.
    wrong += ["a multiply-add in float64"] * (
        fused["f64"] != count["v_ldexp_f64"] or fused["f64"] > count["v_floor_f64"]
    )
    wrong += ["halves or bfloat16"] * (fused["f16"] > 0)
    inexact = re.compile(r"v_(?:rsq|exp|log|sin|cos|rcp|sqrt|div_\w+)_f(?:16|32|64)")
    wrong += sorted(
        name
        for name in count
        if inexact.fullmatch(name)
        and name not in {f"v_{part}_f32" for part in ("rcp", "sqrt", "div_fixup", "div_fmas", "div_scale")}
    )
    return wrong


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else whole) for name in NAMES])
def test_machine_code_is_exact_and_needs_no_scratch_memory(name: str) -> None:
    found = lowered(CHIP, name)
    for kernel in found.kernels.values():
        assert faults(kernel) == []
        assert kernel.amdgcn.startswith("\t.amdgcn_target") and CHIP in kernel.amdgcn.splitlines()[0]
    if name.endswith(" wide"):
        (kernel,) = found.kernels.values()
        assert operations(kernel)["global_store_dwordx4"] >= 3  # 16 bytes at a time


@pytest.mark.parametrize(
    ("pattern", "instead", "fault"),
    [
        (r"v_pk_mul_f32", "v_pk_fma_f32", "a multiply-add in float32"),
        (r"v_mul_f32_e32", "v_fmac_f32_e32", "a multiply-add in float32"),
        (r"v_div_fixup_f32", "v_mul_f32", "a quotient"),
        (r"v_sqrt_f32_e32", "v_rsq_f32_e32", "v_rsq_f32"),
        (r"denorm_mode_32 3", "denorm_mode_32 0", "rounding or subnormals"),
        (r"global_load_dwordx4", "scratch_load_dwordx4", "scratch memory"),
        (r"s_waitcnt", "s_setreg_b32", "a mode that changes"),
    ],
)
def test_a_planted_fault_is_noticed(pattern: str, instead: str, fault: str) -> None:
    (kernel,) = lowered(CHIP, NAMES[0]).kernels.values()
    changed = re.sub(pattern, instead, kernel.amdgcn, count=1)
    assert changed != kernel.amdgcn and faults(kernel) == []
    assert fault in faults(replace(kernel, amdgcn=changed))
