"""The functions that are lowered for a GPU, by name: ``step STORAGE`` and ``cast COMPUTE SLOT``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.edge_values import edge_values
from narrowgauge.numerics.quantization import quantize, random_words
from narrowgauge.optim.kernel import StepKernel
from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.spec.computes import SLOTS
from narrowgauge.spec.notation import get_compute
from narrowgauge.spec.storages import STORAGES

STEPS = ("step word", "step exact", "step compact")
CASTS = (
    "cast float8-row output.left",
    "cast int8-row grad_input.left",
    "cast mxfp8 output.left",
    "cast nvfp4 grad_weight.left",
)
"""By rows and blocks, with random words, a rotation and two levels of scales."""
SHAPE = (160, 384)
"""Rows and columns of the matrix of a cast."""


@dataclass(frozen=True)
class Definition:
    """A function of tensors, and arguments on a CPU: first ordinary ones, then edge values.

    ``one_loop`` is the option of :func:`narrowgauge.compile.compiled`.
    """

    function: Callable[..., Any]
    cases: list[list[Tensor]]
    one_loop: bool = False


def definition_of(name: str) -> Definition:
    """Return the definition of this name."""
    kind, *rest = name.split()
    return _step(*rest) if kind == "step" else _cast(*rest)


def _step(storage: str) -> Definition:
    kernel = StepKernel(ADAMW, STORAGES[storage].keeping(ADAMW.kept), compile=False)
    return Definition(kernel._plain, list(kernel._cases(torch.device("cpu"))), kernel.one_loop)


def _cast(compute: str, slot: str) -> Definition:
    cast, dim = get_compute(compute).casts[slot], SLOTS[slot].dim
    words = random_words(*SHAPE, torch.tensor(17)) if cast.rounding != "nearest" else None

    def function(x: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        return tuple(part for part in quantize(x, cast, dim, words=drawn or None) if part is not None)  # type: ignore[arg-type]

    return Definition(function, [[x, *(words or ())] for x in _matrices()])


def _matrices() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-14, 6, SHAPE, generator=generator).float().exp2()
    yield (torch.randn(SHAPE, generator=generator) * powers).bfloat16()
    yield edge_values(torch.bfloat16, SHAPE, seed=0, finite=True)
