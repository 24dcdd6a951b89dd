"""Efficiencies: the fractions of printed rates that chips reach in training.

No kernel reaches the rates of the data sheet. ``data/efficiency.toml`` has published efficiencies
of kernels and links, and of each chip's step over the sum of its kernels. A program multiplies the
chip's share by its factor, and never replaces it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from narrowgauge.planner.program import Program
from narrowgauge.spec.chips import CHIPS, Chip
from narrowgauge.spec.toml import load_data

_TABLES: dict[str, Any] = load_data("efficiency", "planner")
_LONG = 32_768
_DOUBLINGS = 2
"""Tokens of a sequence on a rank from which attention's efficiency grows, and the doublings after
which it stops.
"""


@dataclass(frozen=True, eq=False)
class Efficiency:
    """Hold named fractions of one chip's printed rates: ``matmul.FORMAT``, and the keys of
    ``general`` in the file.
    """

    values: Mapping[str, float] = field(repr=False)
    short: float = 1.0
    long: float = 1.0

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def attention(self, tokens: float) -> float:
        """Return the fraction of the peak that fused attention reaches.

        ``tokens`` of a sequence are on a rank: a ring multiplies blocks of this length.
        """
        doublings = math.log2(max(1.0, tokens / _LONG))
        short = min(self.short * self["attention"], self.long)
        share: float = min(doublings, _DOUBLINGS) / _DOUBLINGS
        return short * math.pow(self.long / short, share)


def best_share(format: str, chip: Chip) -> float:
    """Return the fraction of its printed rate that the best published matmul reaches.

    If the chip's own is not published, take the median of all chips. If its bfloat16 efficiency is
    published, scale the median by its ratio to the other chips' bfloat16 efficiency.
    """
    # The 16-bit formats share multipliers. Publications measure bfloat16.
    name = "bfloat16" if format == "float16" else format
    if name in chip.measured_tflops:
        return _measured_share(name, chip)
    measured = [row for row in CHIPS.values() if name in row.measured_tflops]
    if not measured:
        name = "bfloat16"
        measured = [row for row in CHIPS.values() if name in row.measured_tflops]
    median = statistics.median(_measured_share(name, row) for row in measured)
    if "bfloat16" not in chip.measured_tflops:
        return median
    usual = statistics.median(_measured_share("bfloat16", row) for row in measured)
    return median * min(1.0, _measured_share("bfloat16", chip) / usual)


def _measured_share(format: str, chip: Chip) -> float:
    return chip.measured_tflops[format] / chip.peak_tflops[format]


def _of_architecture(table: str, chip: Chip) -> Any:
    """Return the first row whose name begins the chip's architecture; None without one."""
    for start, row in _TABLES[table].items():
        if chip.architecture.startswith(start):
            return row
    return None


@lru_cache(maxsize=256)
def efficiency_of(chip: Chip, program: Program) -> Efficiency:
    """Return a chip's efficiencies in a program.

    The chip's efficiency is multiplied by the program's factor, up to ``most``.
    """
    general = _TABLES["general"]
    values = dict(general)
    for name in chip.peak_tflops:
        values[f"matmul.{name}"] = general["typical"] * best_share(name, chip)
    values |= _of_architecture("generations", chip) or {}
    values |= program.speed
    share = _of_architecture("chips", chip) * program.factor
    values["library"] = min(general["most"], share)
    if not chip.link_gb_per_second:
        values["link"] = general["host_path"]
    return Efficiency(values, *_of_architecture("attention", chip))
