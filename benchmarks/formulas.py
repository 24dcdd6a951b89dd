"""Compare the formula of FlashOptim in ``_published_states.py`` with the package ``flashoptim``.

Claim: the rows ``published/flashoptim`` are those of the package, but for the order of its float32
operations. The package refuses machines without CUDA, so its own kernel of an AdamW step runs here in
Triton's interpreter, on 100,000 weights and gradients. The interpreter has no functions of CUDA's
library, and cuts where a GPU rounds to bfloat16: a power, a sign and a rounding stand in for them.

Baseline: the package. Run: ``pip install --no-deps flashoptim==0.1.4``, then ``./dev bench formulas``.
It writes ``benchmarks/formulas.jsonl``: how many of 100,000 values differ after one step and after five.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from _conditions import conditions
from _published_states import PUBLISHED, PublishedAdamW
from _timing import exit_by
from torch import nn
from triton import language
from triton.runtime import interpreter

from narrowgauge.torch_support.machine import installed_version

FILE = Path(__file__).with_suffix(".jsonl")
NUMBER = 100_000
GROUP = 32
BETAS = (0.9, 0.999)
LR = 1e-3
DECAY = 0.1
EPS = 1e-8


def power(base: float, exponent: Any) -> float:
    """Return a power, rounded to float32, of an exponent of the interpreter's."""
    return float(np.float32(base ** exponent.handle.data.item()))


def with_sign(x: Any, sign: Any) -> Any:
    return language.where(sign < 0.0, -language.abs(x), language.abs(x))


def mend_interpreter(optimizers: Any) -> None:
    """Give the interpreter what the kernel takes from CUDA, and rounding to bfloat16."""
    optimizers.libdevice = SimpleNamespace(pow=power, copysign=with_sign)
    optimizers._get_sm_count = lambda device=None: 4
    convert = interpreter._convert_float

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if target != language.bfloat16:
            return convert(x, source, target, mode)
        bits = torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.int16)
        return bits.numpy().view(np.uint16).reshape(x.shape)

    interpreter._convert_float = rounded


def main() -> int:
    """Step both, and count the values that differ."""
    from flashoptim import optimizers

    mend_interpreter(optimizers)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    seen = (0.02 * torch.randn(NUMBER)).bfloat16()
    ours = nn.Parameter(seen.clone()[None])
    formula = PublishedAdamW([ours], PUBLISHED["flashoptim"], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)  # fmt: skip
    tail, first = torch.zeros(2, NUMBER, dtype=torch.int8)
    second = torch.zeros(NUMBER, dtype=torch.uint8)
    scales = torch.zeros(2, NUMBER // GROUP, dtype=torch.float16)

    counts = []
    for step in range(1, 6):
        ours.grad = (1e-3 * torch.randn(1, NUMBER)).bfloat16()
        moments = (first, scales[0], second, scales[1])
        options = (LR, *BETAS, EPS, LR * DECAY, True, step)
        optimizers._fused_adam_step(*moments, seen, ours.grad[0], tail, *options)
        formula.step()
        share = first.float() / 127
        wide = scales.float().repeat_interleave(GROUP, 1)
        stored = formula.state[ours]
        differing = {
            "visible weights": seen != ours[0],
            "first moments": share / (2 - share.abs()) * wide[0] != stored["exp_avg"][0],
            "second moments": (second.float() / 255 * wide[1]).square() != stored["exp_avg_sq"][0],
        }
        if step in (1, 5):
            for name, places in differing.items():
                counts.append(f"{int(places.sum())} {name} after {step}")
    record = {
        "row": "flashoptim",
        "version": installed_version("flashoptim"),
        "figure": ", ".join(counts),
    }
    record |= conditions()
    print(json.dumps(record))
    FILE.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    exit_by(main)
