"""Sentences about a gradient: the number of the set-up that a factor equals, how often micro-batches
count, and the formats of its products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

NEAR = 0.005
"""Relative distance within which a factor equals a number of the set-up."""


def times_of_parts(weights: list[float], right: list[float]) -> str:
    """Say how often each micro-batch counts."""
    ratios = torch.tensor(weights) / torch.tensor(right)
    times = ", ".join(f"{round(ratio, 4) + 0.0:.3g}" for ratio in ratios.tolist())
    return f" Micro-batches count {times} times, rank after rank."


def equal_to(factor: float, num_parts: int, num_ranks: int) -> str:
    """Return ``, which is NAME`` for a factor that equals a number of the set-up or a power of two.

    Example:
        >>> equal_to(4.001, 1, 4), equal_to(3.3, 1, 4), equal_to(65536, 1, 4)
        (', which is the number of ranks', '', ', which is 2^16, the loss scale that torch begins with')
    """
    counts = {"the number of ranks": num_ranks, "the number of micro-batches": num_parts}
    if min(num_parts, num_ranks) > 1:
        counts["micro-batches times ranks"] = num_parts * num_ranks
    names = []
    for name, number in counts.items():
        if number != 1 and abs(factor / number - 1) < NEAR:
            names.append(name)
        if number != 1 and abs(factor * number - 1) < NEAR:
            names.append(f"1 / {name}")
    power = round(math.log2(abs(factor)))
    if not names and power and abs(factor / 2.0**power - 1) < NEAR:
        torchs = ", the loss scale that torch begins with" if power == 16 else ""
        names.append(f"2^{power}{torchs}")
    if names:
        return f", which is {' and '.join(names)}"
    return ""


def products_line(products: Mapping[str, int]) -> str:
    """Return a line about the formats in which a step multiplied.

    Example:
        >>> products_line({"float32": 2, "bfloat16": 6})
        'products of a step: 6 in bfloat16, 2 in float32'
    """
    counts = sorted(products.items(), key=lambda item: -item[1])
    return "products of a step: " + ", ".join(f"{count} in {name}" for name, count in counts)
