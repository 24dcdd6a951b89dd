"""Sums in a given order, one float32 addition after the other."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

_BITS = 26  # that a fused sum keeps below its largest term's exponent


def tree_sum(tree: Any, terms: Any) -> Any:
    """The sum of float32 terms in the order of a tree of nested tuples; more than two are aligned, cut and added at once."""
    if isinstance(tree, int):
        return np.float32(terms[tree])
    parts = [tree_sum(child, terms) for child in tree]
    if len(parts) == 2:
        return np.float32(parts[0] + parts[1])
    largest = max(abs(float(part)) for part in parts)
    if largest == 0:
        return np.float32(0)
    unit = math.ldexp(1.0, math.frexp(largest)[1] - _BITS)
    return np.float32(math.fsum(math.trunc(float(part) / unit) * unit for part in parts))


def random_tree(num_terms: int, seed: int, at_once: tuple[int, ...] = (2,)) -> Any:
    """A tree that joins random partial sums, as many at once as the seed says."""
    draw = random.Random(seed)
    parts: list[Any] = list(range(num_terms))
    while len(parts) > 1:
        number = min(len(parts), draw.choice(at_once))
        joined = tuple(parts.pop(draw.randrange(len(parts))) for _ in range(number))
        parts.append(joined)
    return parts[0]
