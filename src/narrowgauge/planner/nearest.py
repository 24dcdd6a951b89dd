"""The measured run nearest to a plan: what others printed for a similar model on similar chips."""

from __future__ import annotations

import math
from typing import Any

from narrowgauge.errors import DataError
from narrowgauge.planner.errors import published_runs
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.units import count_text
from narrowgauge.spec.chips import CHIPS

_FAR = 3.0
"""Distance from which no run is near."""
_OTHER_KIND = 2.0
_OTHER_ARCHITECTURE = 1.0
_OTHER_CHIP = 0.3
_OTHER_PRECISION = 0.5
_SIZES = {"parameters": 0.7, "length": 0.3, "chips": 0.15}
"""Weights of the logarithms of ratios."""


def nearest_run(job: Estimate) -> str:
    """Say what the nearest published run measured, with its source; or that none is near.

    Nearness is a sum of distances: of kind, chip, precision, and of the logarithms of parameters,
    length and number of chips.
    """
    runs = published_runs()
    nearest = min(runs, key=lambda run: _distance(run, job))
    if _distance(nearest, job) > _FAR:
        return "No published run is near this one."
    figures = []
    if "tokens_per_second" in nearest:
        figures.append(f"{nearest['tokens_per_second']:,.0f} tokens/s a chip")
    if "memory_gb" in nearest:
        figures.append(f"{nearest['memory_gb']:g} GB")
    ours = f"{job.tokens_per_second / job.num_chips:,.0f} and {job.allocated_bytes / 1e9:.3g} GB of tensors here"
    return (
        f"Nearest measured run: {nearest['model']} ({count_text(nearest['parameters'])}), "
        f"{nearest['kind']}, "
        f"{nearest['precision']}, {nearest['chips']:,} × {nearest['chip']}, {nearest['length']:,} "
        "tokens: "
        f"{', '.join(figures)} ({ours}). {nearest['source']}."
    )


def correction_of(planned: Estimate, measured: float) -> float:
    """Return planned over measured rate of a run like this one."""
    peak = planned.chip.peak_flops
    if not planned.recipe.compute.is_wide:
        peak = 1e12 * max(planned.chip.peak_tflops.values())
    share = planned.mfu * measured / planned.tokens_per_second * planned.chip.peak_flops / peak
    if share > 1:
        raise DataError(
            f"Cannot plan like a run of {measured:,.0f} tokens/s because that is {share:.0%} of the "
            f"peak of {planned.cluster.name}.",
            "Name the tokens per second of all chips of the first row.",
        )
    return planned.tokens_per_second / measured


def _distance(run: dict[str, Any], job: Estimate) -> float:
    chip = CHIPS[run["chip"]]
    is_narrow = run["precision"] not in ("float16", "bfloat16")
    distance: float = _OTHER_KIND * (run["kind"] != job.kind)
    distance += _OTHER_PRECISION * (is_narrow == job.recipe.compute.is_wide)
    if chip.architecture != job.chip.architecture:
        distance += _OTHER_ARCHITECTURE
    elif chip.name != job.chip.name:
        distance += _OTHER_CHIP
    sizes = job.architecture.num_parameters, job.sequence_length, job.num_chips
    for (name, weight), size in zip(_SIZES.items(), sizes, strict=True):
        distance += weight * abs(math.log(run[name] / size))
    return distance
