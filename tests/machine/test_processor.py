"""Which formats a processor multiplies, from its instruction sets: the same as PyTorch goes by."""

import sys

import pytest
import torch

from narrowgauge.torch_support.machine import instruction_sets, multiplies
from processors import pretending


@pytest.mark.parametrize(
    ("sets", "bfloat16", "int8"),
    [
        ("avx2,fma", False, False),
        ("avx2,avx_vnni", False, True),
        ("avx512f,avx512_vnni", False, True),
        ("avx512_bf16,avx512_vnni", True, True),
        ("amx_bf16,amx_int8", True, True),
        ("asimd,bf16,i8mm", True, True),
        ("", False, False),
    ],
)
def test_named_sets_decide(sets, bfloat16, int8):
    with pretending(*sets.split(",")):
        assert [multiplies(name) for name in ("float32", "bfloat16", "int8")] == [
            True,
            bfloat16,
            int8,
        ]


def test_what_pytorch_finds_is_found():
    """PyTorch's own question is about AVX512 with and without the bfloat16 instructions: ours is
    never the laxer one.
    """
    if multiplies("bfloat16"):
        assert torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_flags_of_x86_and_arm(tmp_path):
    x86 = tmp_path / "x86"
    arm = tmp_path / "arm"
    x86.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t: avx512f\n")
    arm.write_text("processor\t: 0\nBogoMIPS\t: 50\nFeatures\t: fp asimd bf16 i8mm\n")
    assert instruction_sets(x86) == {"fpu", "avx2", "fma"}
    assert instruction_sets(arm) == {"fp", "asimd", "bf16", "i8mm"}
    assert instruction_sets(tmp_path / "none") == frozenset()
