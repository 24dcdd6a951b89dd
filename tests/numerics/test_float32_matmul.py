"""Which operands are multiplied in float32; the bits of their products are in
``golden/steps.toml``.
"""

import torch

from narrowgauge.numerics.float32_matmul import is_widened
from processors import pretending


def test_what_is_widened():
    with pretending("avx2"):
        for dtype in (torch.bfloat16, torch.float16, torch.int8):
            assert is_widened(dtype, "cpu") and not is_widened(dtype, "cuda")
        assert not is_widened(torch.float32, "cpu")
    with pretending("avx512_bf16", "avx512_vnni"):
        assert not is_widened(torch.bfloat16, "cpu") and not is_widened(torch.int8, "cpu")
