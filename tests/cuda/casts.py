"""The casts of narrow matmuls and of gradients on their way between ranks, and the functions that are compiled in them.

A cast is Python that hands functions of tensors to :func:`narrowgauge.numerics.fusion.fused`, which compiles them on a GPU. Run
with :func:`calls_of`, it notes what it hands over, on tensors of a CPU as on fake ones of a GPU; :func:`running` runs it with
others in their place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from narrowgauge.matmul import gemm, operand
from narrowgauge.matmul.gemm import operand_dtype
from narrowgauge.matmul.operand import PAIRS, cast_matrix, random_words
from narrowgauge.numerics import block_codes
from narrowgauge.numerics.block_codes import BLOCK_CODES
from narrowgauge.numerics.edge_values import edge_values
from narrowgauge.spec.computes import COMPUTES, SLOTS, Cast, Compute, Slot, casts_made
from narrowgauge.spec.notation import get_compute

CPU = torch.device("cpu")
LARGE, SMALL = (890, 1400), (146, 370)
"""Rows and columns of the matrix that a GPU compiles for, and of the one that is run; filled up, no side of it is another's."""
SMOOTHED = ("float8-tensor+smooth", "float8-delayed-e5m2+smooth")
Results = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Call:
    """A function that a cast hands over, and its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Tensor | None, ...]

    @property
    def key(self) -> str:
        """Equal for calls that share compiled code: those of one function with arguments of one pattern."""
        closed = [cell.cell_contents for cell in getattr(self.function, "__closure__", None) or ()]
        sizes: dict[int, int] = {1: -1}
        described: list[Any] = []
        for argument in self.arguments:
            if argument is None:
                described.append(None)
            else:
                sides = tuple(sizes.setdefault(size, len(sizes)) for size in argument.shape)
                described.append((str(argument.dtype), sides, argument.is_contiguous()))
        return f"{getattr(self.function, '__name__', '')} {closed} {described}"


@contextmanager
def running(run: Callable[[Call], Any]) -> Iterator[None]:
    """Within it, what casts hand over to be compiled is run by a function of the caller's."""

    def fused(size: int, function: Callable[..., Any], *arguments: Tensor | None) -> Any:
        return run(Call(function, arguments))

    with ExitStack() as stack:
        for module in (operand, gemm, block_codes):
            stack.enter_context(patch.object(module, "fused", fused))
        yield


def calls_of(name: str, device: torch.device) -> list[Call]:
    """What the cast of that name hands over, in order."""
    calls: list[Call] = []

    def note(call: Call) -> Any:
        calls.append(call)
        return call.function(*call.arguments)

    with ExitStack() as stack:
        for cached in (operand._counters, operand._number):
            cached.cache_clear()  # their tensors are fake, or would be in the place of fake ones
            stack.callback(cached.cache_clear)
        stack.enter_context(running(note))
        result_of(name, SMALL if device.type == "cpu" else LARGE, device)
    return calls


@lru_cache
def canonical() -> dict[str, tuple[str, int]]:
    """Where each different function is handed over first: the cast, and the number of the call; by its key."""
    found: dict[str, tuple[str, int]] = {}
    for name in names():
        for number, call in enumerate(calls_of(name, CPU)):
            found.setdefault(call.key, (name, number))
    return found


# ── the casts by name ─────────────────────────────────────────────────────────────────────────────────────────────────


def names() -> list[str]:
    """``cast COMPUTE SLOT values | codes`` for every different cast, ``send REDUCTION``, ``sum REDUCTION``, ``scale DTYPE``."""
    kinds: dict[tuple[Cast, int, torch.dtype], str] = {}
    for compute in (*COMPUTES.values(), *map(get_compute, SMOOTHED)):
        slots = casts_made(compute) or (("output.left",) if compute.name == "tfloat32" else ())
        for slot, kind in itertools.product(slots, ("values", "codes")):
            dtype = dtype_of(compute, SLOTS[slot], kind)
            kinds.setdefault((compute.casts[slot], SLOTS[slot].dim, dtype), f"cast {compute.name} {slot} {kind}")
    codes = [f"{what} {reduction}" for reduction in BLOCK_CODES for what in ("send", "sum")]
    return [*kinds.values(), *codes, "scale bfloat16", "scale float32"]


def dtype_of(compute: Compute, slot: Slot, kind: str) -> torch.dtype:
    """Of the result: the codes that a native matmul takes, or what is multiplied where there is none."""
    cast, product = compute.casts[slot.name], compute.products[slot.matmul]
    if kind == "codes" and cast.element.bits in (4, 8) and cast.element.kind != "int":
        return PAIRS if cast.element.bits == 4 else getattr(torch, cast.format)
    return operand_dtype(cast, product, CPU)


def result_of(name: str, shape: tuple[int, int], device: torch.device, values: str = "usual") -> Results:
    """A cast of a matrix of that shape: its tensors."""
    kind, *words = name.split()
    if kind == "cast":
        compute, slot = get_compute(words[0]), SLOTS[words[1]]
        return _cast(compute, slot, dtype_of(compute, slot, words[2]), shape, device, values)
    if kind == "send":
        return (BLOCK_CODES[words[0]].encode(matrix(shape, torch.bfloat16, device, values).flatten(), 0x2545F491),)
    if kind == "sum":
        code = BLOCK_CODES[words[0]]
        records = code.encode(matrix(shape, torch.bfloat16, device, values).flatten(), 7)
        return (code.add_decoded(matrix(shape, torch.float32, device, values, seed=1).flatten(), records),)
    assert kind == "scale", name
    sums, by_row, by_column, bias = (
        matrix(sides, torch.float32, device, values, seed=seed)
        for seed, sides in enumerate((shape, (shape[0], 1), (1, shape[1]), (1, shape[1])))
    )
    scaled = gemm._scaled(sums, by_row, by_column, bias[0].bfloat16(), getattr(torch, words[0]))
    return (scaled, gemm._scaled(sums, by_row, by_column, None, getattr(torch, words[0])))


def _cast(
    compute: Compute, slot: Slot, dtype: torch.dtype, shape: tuple[int, int], device: torch.device, values: str
) -> Results:
    cast = compute.casts[slot.name]
    x = matrix(shape, torch.float32 if cast.format == "tfloat32" else torch.bfloat16, device, values)
    words = None
    if cast.rounding == "stochastic":
        state = matrix((4, 1), torch.float32, device, "usual").view(torch.int32)[:, 0]
        words = random_words(cast, x, slot.dim, state, slot.random_key, 37)
    amax = matrix((1, 1), torch.float32, device, "usual", seed=2).abs() if cast.scaling == "delayed" else None
    fold = None
    if slot.side == "left" and compute.products[slot.matmul].right.granularity == "column":
        length = shape[slot.dim]
        fold = matrix((1, length) if slot.dim == 1 else (length, 1), torch.float32, device, "usual", seed=3).abs()
    return cast_matrix(x, cast, slot.dim, dtype, words=words, fold=fold, amax=amax)


def matrix(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, values: str, seed: int = 0) -> Tensor:
    """``usual`` values of many magnitudes; ``edges``; or ``wrong``: usual ones with infinities, NaN, and a row of zeros."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    if values == "edges":
        return edge_values(dtype, shape, seed=seed, finite=True)
    generator = torch.Generator().manual_seed(1000 * seed + shape[0] * shape[1])
    powers = torch.randint(-14, 6, shape, generator=generator).float().exp2()
    drawn = torch.randn(shape, dtype=torch.float32, generator=generator) * powers
    if values == "wrong":
        drawn[1::40], drawn[:, 2::200] = 0.0, 0.0
        drawn.view(-1)[5::17003], drawn.view(-1)[1007::29009] = torch.inf, torch.nan
    return drawn.to(dtype)
