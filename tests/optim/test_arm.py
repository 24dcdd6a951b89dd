"""The kernels of a CPU on ARM, by a cross compiler and qemu.

This processor runs the definition: nothing is asked of PyTorch's own ARM code.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch

from narrowgauge.optim import norm, proof, step_cpp
from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.spec.storages import STORAGES
from narrowgauge.torch_support import cpp
from narrowgauge.torch_support import proof as proofs
from optim import arm
from optim.pairs import kernel_of, over
from optim.test_step import KERNELS
from optim.test_step_cost import SLACK, VERSION

pytestmark = pytest.mark.skipif(
    not (shutil.which(arm.COMPILER) and shutil.which(arm.EMULATOR)), reason="no ARM compiler"
)
CPU = torch.device("cpu")
PAIRS = [pair for pair in KERNELS if pair[0] == "adamw"]
PAIRS += [pair for pair in over(KERNELS).args[1] if pair not in PAIRS]
COUNTS = {"word": 26.0, "compact": 26.0, "states8": 22.88, "exact": 17.88, "kahan": 20.88}
"""Instructions on vectors an element, with AdamW, by the g++ of ``VERSION``."""
JUMP = re.compile(r"(?:b\w*(?:\.\w+)?|cbn?z\s+\w+,|tbn?z\s+\w+, #?\d+,)\s+(\.L\w+)")
VECTOR = re.compile(r"\s.*\b[vqdshb]\d+\b")


@pytest.fixture(scope="module", autouse=True)
def arm_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_cpp, "functions", lru_cache(None)(arm.StepLibrary))
        patch.setattr(norm, "norm_functions", lru_cache(None)(arm.NormLibrary))
        patch.setattr(proofs, "_reasons", {})
        yield


@pytest.mark.parametrize(("rule", "storage"), PAIRS)
def test_an_arm_kernel_has_the_bits_of_the_definition(rule: str, storage: str) -> None:
    assert proof.why_not(*kernel_of(rule, storage), CPU) == ""


def test_the_norm_has_the_bits_of_the_definition() -> None:
    assert norm.sums_on([torch.zeros(1)])


def test_a_fused_rounding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ARM fuses a multiplication with an addition, unless a flag forbids it."""
    flags = [flag for flag in cpp._FLAGS if flag != "-ffp-contract=off"]
    monkeypatch.setattr(cpp, "_FLAGS", flags)
    monkeypatch.setattr(step_cpp, "functions", arm.StepLibrary)
    monkeypatch.setattr(proofs, "_reasons", {})
    arm.program.cache_clear()
    with pytest.warns(UserWarning, match="differ"):
        assert proof.why_not(*kernel_of("adamw", "word"), CPU)
    arm.program.cache_clear()


@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2"])
def test_flags_that_a_compiler_refuses_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    """PyTorch calls the instructions of an ARM without SVE the default ones."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    cpp._command.cache_clear()
    command = cpp._command(arm.COMPILER)
    cpp._command.cache_clear()
    assert "-fopenmp" in command and not any("avx" in flag for flag in command)


def loop_of(lines: list[str]) -> list[str]:
    """Return the instructions of the shortest loop that takes square roots."""
    code: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in map(str.strip, lines):
        label = re.match(r"(\.L\w+):", line)
        if label:
            labels[label[1]] = len(code)
        elif line and line[0] not in ".#/":
            code.append(line)
            jump = JUMP.match(line)
            if jump and jump[1] in labels:
                loops.append(code[labels[jump[1]] :])
    return min((loop for loop in loops if "fsqrt" in " ".join(loop)), key=len)


def count(storage: str) -> float:
    """Return instructions on vectors an element of a loop over two vectors of four."""
    text = step_cpp.joined_files() + step_cpp.library_text(ADAMW, STORAGES[storage])
    flags = [flag for flag in cpp._FLAGS if flag != "-shared"]
    command = [arm.COMPILER, *flags, "-fopenmp", "-S", "-o", "-", "-x", "c++", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    start = re.search(r"^_ZN\w+11step_groupsILb1ELb0[\w.]+:", result.stdout, re.M)
    assert start is not None
    lines = result.stdout[start.end() : result.stdout.index(".size", start.end())].splitlines()
    return sum(bool(VECTOR.search(line)) for line in loop_of(lines)) / 8


@pytest.mark.parametrize("storage", COUNTS)
def test_a_step_takes_no_more_instructions(storage: str) -> None:
    command = [arm.COMPILER, "-dumpfullversion"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    if made.stdout.strip() != VERSION:
        pytest.skip("another compiler")
    assert count(storage) <= SLACK * COUNTS[storage]
