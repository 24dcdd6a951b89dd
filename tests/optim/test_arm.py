"""The kernels of a CPU on ARM, by a cross compiler and qemu.

This processor runs the definition: nothing is asked of PyTorch's own ARM code.
"""

import shutil
from typing import Any

import pytest
import torch

from narrowgauge.optim.step import kernel_proof, norm_kernel, step_cpp
from narrowgauge.torch_support import cpp
from optim import arm
from optim.pairs import SOME, kernel_of

pytestmark = pytest.mark.skipif(
    not (shutil.which(arm.COMPILER) and shutil.which(arm.EMULATOR)), reason="no ARM compiler"
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def arm_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def library(*pair: Any) -> arm.Library:
        return arm.Library(step_cpp.library_text(*pair), step_cpp.row_of(*pair))

    row = step_cpp.row_of(*kernel_of("plain sgd", "float32"))  # of two addresses
    monkeypatch.setattr(step_cpp, "functions", library)
    monkeypatch.setattr(norm_kernel, "norm_functions", lambda: arm.Library("EXPORT_NORM\n", row))
    monkeypatch.setattr("narrowgauge.torch_support.proof._reasons", {})


@SOME
def test_an_arm_kernel_has_the_bits_of_the_definition(rule, storage):
    pair = kernel_of(rule, storage)
    assert not step_cpp.has_kernel(*pair) or kernel_proof.why_no_kernel(*pair, CPU) == ""


def test_the_norm_has_the_bits_of_the_definition():
    assert norm_kernel.difference(CPU) == ""


def test_a_fused_rounding_is_found(monkeypatch):
    """Every ARM fuses a multiplication with an addition, unless a flag forbids it."""
    monkeypatch.setattr(cpp, "_FLAGS", set(cpp._FLAGS) - {"-ffp-contract=off"})
    with pytest.warns(UserWarning, match="differ"):
        assert kernel_proof.why_no_kernel(*kernel_of("adamw", "word"), CPU)
