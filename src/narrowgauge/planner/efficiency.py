"""Efficiencies: the fractions of printed rates that chips reach in training, and the errors of plans on published runs.

No kernel reaches the rates of the data sheet. ``data/efficiency.toml`` has published efficiencies of kernels and links, the
efficiency of libraries over the sum of their kernels, and the errors of planned step times.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from narrowgauge.errors import NarrowgaugeError, suggestion
from narrowgauge.spec.chips import CHIPS, Chip
from narrowgauge.spec.toml import load_data

_TABLES: dict[str, Any] = load_data("efficiency", "planner")
SOFTWARE: tuple[str, ...] = tuple(_TABLES["software"])
"""Libraries and years with known speed."""

RESTARTS, MOST_RESTARTS = 0.10, 0.25
"""Extra time of a whole run over its steps, and at the high end of its interval: failures, restarts, repeated work, evaluations.
BLOOM took 11 % more GPU-hours than its steps (arXiv 2211.05100 and the project's log). Llama 3's 405B took 8 % more than its
steps at the printed 400 TFLOP/s (arXiv 2407.21783, table 4; 30.84 million GPU-hours). MegaScale lost less than 10 % (2402.15627).
Llama 2's 7B and 13B took about a third more than the steps of such models (arXiv 2307.09288, table 2)."""


@dataclass(frozen=True, eq=False)
class Efficiency:
    """Hold named fractions of one chip's printed rates: ``matmul.FORMAT``, and the keys of ``general`` in the file."""

    values: Mapping[str, float] = field(repr=False)
    engines: str = ""

    def __getitem__(self, name: str) -> float:
        return self.values[name]


def best_share(format: str, chip: Chip) -> float:
    """Return the fraction of its printed rate that the best published matmul reaches.

    If the chip's own is not published, take the median of all chips. If its bfloat16 efficiency is published, scale the median
    by its ratio to the other chips' bfloat16 efficiency.
    """
    # The 16-bit formats share multipliers. Publications measure bfloat16.
    name = "bfloat16" if format == "float16" else format
    if name in chip.measured_tflops:
        return _measured_share(name, chip)
    name = name if any(name in c.measured_tflops for c in CHIPS.values()) else "bfloat16"
    median = statistics.median(
        _measured_share(name, c) for c in CHIPS.values() if name in c.measured_tflops
    )
    if "bfloat16" not in chip.measured_tflops:
        return median
    usual = statistics.median(
        _measured_share("bfloat16", c) for c in CHIPS.values() if name in c.measured_tflops
    )
    return median * min(1.0, _measured_share("bfloat16", chip) / usual)


def _measured_share(format: str, chip: Chip) -> float:
    return chip.measured_tflops[format] / chip.peak_tflops[format]


@cache
def efficiency_of(chip: Chip, software: str = "") -> Efficiency:
    """Return a chip's efficiencies with a library of ``SOFTWARE``; empty for the chip's default assumption."""
    if software and software not in SOFTWARE:
        raise NarrowgaugeError(
            f"Cannot plan for software {software!r} because its efficiency is unknown.",
            suggestion(software, SOFTWARE) or f"There is {', '.join(SOFTWARE)}.",
        )

    def for_chip(table: Mapping[str, Any]) -> Any:
        return next(
            (row for start, row in table.items() if chip.architecture.startswith(start)), {}
        )

    row = dict(_TABLES["software"][software] if software else for_chip(_TABLES["assumed"]))
    by_generation = {key: row.pop(key) for key in list(row) if isinstance(row[key], dict)}
    engines = row.pop("engines")
    general = _TABLES["general"]
    values = {
        f"matmul.{name}": general["typical"] * best_share(name, chip) for name in chip.peak_tflops
    }
    values |= {**general, **for_chip(_TABLES["generations"]), **row, **for_chip(by_generation)}
    if not chip.link_gb_per_second:
        values["link"] = general["host_path"]
    return Efficiency(values, engines)


def error_of(*, has_mixture: bool, has_software: bool) -> tuple[float, float, float]:
    """Return the errors of published runs of one class.

    They are the median of measured seconds over the model's terms (1 for dense models), and the 10 and 90 % quantiles of
    measured over planned seconds.
    """
    row = _TABLES["error"]["mixture" if has_mixture else "dense"][
        "named" if has_software else "assumed"
    ]
    return row.get("median", 1.0), row["low"], row["high"]
