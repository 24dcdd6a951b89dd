"""Efficiencies: the fractions of printed rates that chips reach in training, and the errors of
plans on published runs.

No kernel reaches the rates of the data sheet. ``data/efficiency.toml`` has published efficiencies
of kernels and links, and of each chip's step over the sum of its kernels. A program multiplies the
chip's share by its factor, and never replaces it. So an eager program is never planned faster than
a compiled one. ``data/errors.toml`` has the errors of published runs by class.
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
_ERRORS: dict[str, Any] = load_data("errors", "planner")
Ends = tuple[float, float]
"""The ends of an 80 % interval."""
LONG = 32_768
"""Tokens of a sequence from which a plan has the error bar of long sequences."""
SOFTWARE: tuple[str, ...] = tuple(_TABLES["software"])
"""Libraries and years with known speed."""

RESTARTS = 0.10
MOST_RESTARTS = 0.25
"""Extra time of a whole run over its steps, and at the high end of its interval: failures,
restarts, repeated work, evaluations. BLOOM took 11 % more GPU-hours than its steps (arXiv
2211.05100 and the project's log). Llama 3's 405B took 8 % more than its steps at the printed 400
TFLOP/s (arXiv 2407.21783, table 4; 30.84 million GPU-hours). MegaScale lost less than 10 %
(2402.15627). Llama 2's 7B and 13B took about a third more than the steps of such models (arXiv
2307.09288, table 2).
"""


@dataclass(frozen=True, eq=False)
class Efficiency:
    """Hold named fractions of one chip's printed rates: ``matmul.FORMAT``, and the keys of
    ``general`` in the file.
    """

    values: Mapping[str, float] = field(repr=False)
    engines: str = ""

    def __getitem__(self, name: str) -> float:
        return self.values[name]


def best_share(format: str, chip: Chip) -> float:
    """Return the fraction of its printed rate that the best published matmul reaches.

    If the chip's own is not published, take the median of all chips. If its bfloat16 efficiency is
    published, scale the median by its ratio to the other chips' bfloat16 efficiency.
    """
    # The 16-bit formats share multipliers. Publications measure bfloat16.
    name = "bfloat16" if format == "float16" else format
    if name in chip.measured_tflops:
        return _measured_share(name, chip)
    measured = _measured(name)
    if not measured:
        name = "bfloat16"
        measured = _measured(name)
    median = statistics.median(_measured_share(name, measured_chip) for measured_chip in measured)
    if "bfloat16" not in chip.measured_tflops:
        return median
    usual = statistics.median(
        _measured_share("bfloat16", measured_chip) for measured_chip in measured
    )
    return median * min(1.0, _measured_share("bfloat16", chip) / usual)


def _measured(format: str) -> list[Chip]:
    """Return the chips with a published matmul of a format."""
    return [chip for chip in CHIPS.values() if format in chip.measured_tflops]


def _measured_share(format: str, chip: Chip) -> float:
    return chip.measured_tflops[format] / chip.peak_tflops[format]


def _of_architecture(table: Mapping[str, Any], chip: Chip) -> Any:
    """Return the first row whose name begins the chip's architecture; None without one."""
    for start, row in table.items():
        if chip.architecture.startswith(start):
            return row
    return None


@cache
def efficiency_of(chip: Chip, software: str = "") -> Efficiency:
    """Return a chip's efficiencies with a library of ``SOFTWARE``; empty for the usual ones.

    The chip's share of its kernels' sum is multiplied by the library's factor. The product stops at
    ``most``.
    """
    if software and software not in SOFTWARE:
        raise NarrowgaugeError(
            f"Cannot plan for software {software!r} because its efficiency is unknown.",
            suggestion(software, SOFTWARE) or f"There is {', '.join(SOFTWARE)}.",
        )
    if not software and chip.vendor == "Google":
        software = "xla-2024"
    row = dict(_TABLES["software"].get(software, _TABLES["unnamed"]))
    engines = row.pop("engines")
    factor = row.pop("factor")
    attention = _TABLES["attention"][row.pop("attention")]
    general = _TABLES["general"]
    values = {}
    for name in chip.peak_tflops:
        values[f"matmul.{name}"] = general["typical"] * best_share(name, chip)
    values |= {**general, **(_of_architecture(_TABLES["generations"], chip) or {}), **row}
    values["attention"] = _of_architecture(attention, chip)
    values["library"] = min(general["most"], _of_architecture(_TABLES["chips"], chip) * factor)
    if not chip.link_gb_per_second:
        values["link"] = general["host_path"]
    return Efficiency(values, engines)


def has_share(chip: Chip) -> bool:
    """Tell whether a step on a chip of this architecture was published."""
    return chip.architecture.startswith(tuple(filter(None, _TABLES["chips"])))


def kind_of(*, has_adapters: bool, has_mixture: bool, tokens: float) -> str:
    """Return the class of a question: the first of adapters, mixtures, long sequences and dense
    models.
    """
    if has_adapters:
        return "adapters"
    if has_mixture:
        return "mixture"
    return "long" if tokens >= LONG else "dense"


def error_of(quantity: str, kind: str) -> Ends | None:
    """Return the 10 and 90 % quantiles of measured over planned values; None if no published run
    checks this class.

    Args:
        quantity: ``"named"`` and ``"assumed"`` for seconds, with and without a named software;
            ``"memory"`` for bytes.
        kind: a class of :func:`kind_of`.
    """
    row = _ERRORS[quantity].get(kind)
    return (row["low"], row["high"]) if row else None


def median_of(quantity: str, kind: str) -> float:
    """Return the median of measured over planned seconds, by which plans are multiplied; 1 for most
    classes.
    """
    return float(_ERRORS[quantity].get(kind, {}).get("median", 1.0))


def runs_of(quantity: str, kind: str) -> int:
    """Return the number of published runs that an error bar is from."""
    return int(_ERRORS[quantity].get(kind, {}).get("runs", 0))
