"""The order in which PyTorch adds: each sum as a function of rows of terms, and its summation tree in a short text.

A row of ``length`` values holds the terms at some positions and zeros elsewhere, so the tree of 64 terms out of 1,024 is the tree
of all 1,024 with the others left out. Rows are measured many at a time, as the rows of a matmul or the values of a head; that all
of them are added alike is part of what is checked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.machine.sample_values import between, bits_of
from narrowgauge.machine.summation_trees import Pair, describe, reveal, signature

_LARGE = 2.0**100  # swallows ones in float32 and float64, and is a value of bfloat16
_LOST = 0.4 * 2.0**-23  # of a sum of 1: one such term is rounded away, two added to each other are not


@dataclass(frozen=True)
class Sum:
    """A function that adds.

    Args:
        add: the sums of rows, float32 ``(rows, length)`` to ``(rows,)``; of a positive sum, whether each is above its
            largest term, which stands at the given positions.
        length: values in a row.
        positions: of the terms in a row, ascending.
        num_rows: rows in a call; always so many, since the shape may decide the order.
        is_positive: terms are exponentials.
    """

    add: Callable[..., Tensor]
    length: int
    positions: tuple[int, ...]
    num_rows: int
    is_positive: bool = False


def measure_sum(name: str, device: torch.device, until: float = math.inf) -> str:
    """The order of a sum in words, and a hash of its tree; where it has none, a hash of its bits.

    Args:
        name: a key of :data:`SUMS`.
        device: to measure.
        until: when to give up, by ``time.perf_counter``.
    Raises:
        TimeoutError: it took longer.
    Cost: 1 to 100 ms on a CPU.
    """
    found = SUMS[name]
    sizes = _sizes_of_positive if found.is_positive else _sizes_of_signed
    tree = reveal(len(found.positions), partial(sizes, found, device, until))
    if tree is not None:
        return f"{describe(tree, found.positions)} #{signature(tree)}"
    rows = between(-1.0, 1.0, found.num_rows * found.length).view(found.num_rows, found.length).to(device)
    bits = rows.softmax(-1) if found.is_positive else found.add(rows)
    return f"no tree of additions, bits #{bits_of(bits)}"


def _sizes_of_signed(found: Sum, device: torch.device, until: float, pairs: list[Pair]) -> list[float]:
    """Sizes of subtrees, from a large term, its negative and ones."""
    places = torch.tensor(found.positions, dtype=torch.int64)
    row = torch.zeros(found.length, dtype=torch.float32)
    row[places] = 1.0
    terms = torch.tensor([_LARGE, -_LARGE], dtype=torch.float32)
    counted = _evaluated(found, row, places[torch.tensor(pairs, dtype=torch.int64)], terms, device, until)
    return [len(places) - outside for outside in counted.tolist()]


def _sizes_of_positive(found: Sum, device: torch.device, until: float, pairs: list[Pair]) -> list[float]:
    """Sizes of subtrees, from a term of 1 and two that disappear unless they are added to each other first.

    A third term to which they come one by one joins below their sum: it is inside their subtree.
    """
    terms = range(len(found.positions))
    triples = [(third, *pair) for pair in pairs for third in terms if third not in pair]
    row = torch.full((found.length,), -math.inf, dtype=torch.float32)
    values = torch.tensor([0.0, math.log(_LOST), math.log(_LOST)], dtype=torch.float32)
    places = torch.tensor(found.positions, dtype=torch.int64)[torch.tensor(triples, dtype=torch.int64)]
    outside = _evaluated(found, row, places, values, device, until).view(len(pairs), -1).sum(1)
    return [len(terms) - number for number in outside.tolist()]


def _evaluated(found: Sum, row: Tensor, places: Tensor, values: Tensor, device: torch.device, until: float) -> Tensor:
    """The sums of rows that hold the same values at different places.

    Args:
        found: the sum.
        row: all other values ``(length,)``.
        places: of the values, a line for each row ``(rows, values)``.
        values: the first is the largest ``(values,)``.
        device: to measure.
        until: when to give up.
    Returns:
        ``(rows,)`` on the CPU.
    """
    results = []
    row, places, values = row.to(device), places.to(device), values.to(device)
    rows = row.repeat(found.num_rows, 1)
    lines = torch.arange(found.num_rows, dtype=torch.int64, device=device)[:, None]
    for part in places.split(found.num_rows):
        if time.perf_counter() > until:
            raise TimeoutError
        # Unused rows repeat the last one. Only what changes is written: large copies would share the work among threads.
        at = torch.cat([part, part[-1:].expand(found.num_rows - len(part), -1)])
        rows[lines, at] = values
        sums = found.add(rows, at[:, 0]) if found.is_positive else found.add(rows)
        results.append(sums.float().cpu()[: len(part)])
        rows[lines, at] = row[at]
    return torch.cat(results)


# ── the sums ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _columns(rows: Tensor) -> Tensor:
    return rows.t().contiguous().sum(0)


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(-1) * rows.shape[1]


def _layer_norm(rows: Tensor) -> Tensor:
    return torch.native_layer_norm(rows, [rows.shape[1]], None, None, 1e-5)[1].flatten() * rows.shape[1]


def _softmax(rows: Tensor, largest: Tensor) -> Tensor:
    return rows.softmax(-1).gather(1, largest[:, None])[:, 0] < 1


def _log_softmax(rows: Tensor, largest: Tensor) -> Tensor:
    return rows.log_softmax(-1).gather(1, largest[:, None])[:, 0] < 0


def _linear(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = torch.ones(rows.shape[0], rows.shape[1], dtype=dtype, device=rows.device)
    return F.linear(rows.to(dtype), weight)[:, 0]


def _weight_gradient(rows: Tensor) -> Tensor:
    grad, inputs = (
        rows.t().contiguous(),
        torch.ones(rows.shape[1], rows.shape[0], dtype=torch.float32, device=rows.device),
    )
    return (grad.t() @ inputs)[:, 0]


def _batched(rows: Tensor) -> Tensor:
    left = rows.view(8, -1, rows.shape[1])
    return torch.bmm(left, torch.ones(8, rows.shape[1], left.shape[1], dtype=torch.float32, device=rows.device))[
        :, :, 0
    ].flatten()


def _attention(rows: Tensor) -> Tensor:
    """Of equal weights over the keys, so that each value of a head is a mean over its keys."""
    heads, keys = 8, rows.shape[1]
    values = rows.view(heads, -1, keys).transpose(1, 2)[None].contiguous()
    queries = torch.zeros(1, heads, 16, values.shape[3], dtype=torch.float32, device=rows.device)
    same = torch.zeros(1, heads, keys, values.shape[3], dtype=torch.float32, device=rows.device)
    return F.scaled_dot_product_attention(queries, same, values)[0, :, 0].flatten() * keys


def _whole(rows: Tensor) -> Tensor:
    return torch.stack([row.sum() for row in rows])


def _sampled(number: int, length: int) -> tuple[int, ...]:
    """Half of the terms side by side, half spread over the rest at uneven distances."""
    side_by_side, step = number // 2, (length - number // 2) // (number - number // 2)
    spread = [side_by_side + place * step + place * place % step for place in range(number - side_by_side)]
    return (*range(side_by_side), *spread)


_OF_1024 = _sampled(64, 1024)
_ALL_64 = tuple(range(64))

SUMS: dict[str, Sum] = {
    "sum of rows": Sum(lambda rows: rows.sum(-1), 128, tuple(range(128)), 128),
    "sum of columns": Sum(_columns, 64, _ALL_64, 128),
    "mean of rows": Sum(_mean, 1024, _OF_1024, 16),
    "layer norm": Sum(_layer_norm, 1024, _OF_1024, 16),
    "softmax": Sum(_softmax, 512, _sampled(32, 512), 512, is_positive=True),
    "log softmax": Sum(_log_softmax, 4096, _sampled(24, 4096), 64, is_positive=True),
    "linear float32": Sum(_linear, 1024, _OF_1024, 256),
    "small linear float32": Sum(_linear, 64, _ALL_64, 16),
    "weight gradient float32": Sum(_weight_gradient, 1024, _OF_1024, 256),
    "batched matmul float32": Sum(_batched, 64, _ALL_64, 256),
    "linear bfloat16": Sum(partial(_linear, dtype=torch.bfloat16), 1024, _OF_1024, 64),
    "attention": Sum(_attention, 1024, _OF_1024, 512),
    "sum of a tensor": Sum(_whole, 65536, tuple(4096 * place + 5 * place for place in range(16)), 4),
}
"""By name."""
