"""Advice: what would fit instead, and the correction of a plan by a measured run."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError, NarrowgaugeError
from narrowgauge.planner.architecture import Architecture
from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.program import Program

MOST_ALTERNATIVES = 4
_SHORTEST = 512  # tokens of a sequence
_SMALL_STORAGES = ("bfloat16/word", "bfloat16/states8")
_RANK = 16


def alternatives(
    plan: Callable[..., Any],
    architecture: Architecture,
    machines: Sequence[Cluster],
    program: Program,
    question: dict[str, Any],
) -> tuple[tuple[str, Estimate], ...]:
    """Return up to four changes of a question that make it fit, the nearest first, each planned
    again.
    """
    options: list[tuple[str, Estimate]] = []
    for text, changed, where in _changes(machines, program, question):
        try:
            asked = {"program": program, **question, **changed}
            best = plan(architecture, cluster=where, advise=False, **asked).best
        except NarrowgaugeError:
            continue
        if best.fits:
            options.append((text, best))
        if len(options) == MOST_ALTERNATIVES:
            break
    return tuple(options)


def _changes(
    machines: Sequence[Cluster], program: Program, question: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any], list[Cluster]]]:
    """Yield changes of a question by how little they change the training: text, arguments, and
    clusters.
    """
    places = list(machines)
    if program.loss == "whole":
        yield "--program loss=chunked", {"program": replace(program, loss="chunked")}, places
    if program.has_adapters and not program.part("mlp").is_narrow:
        yield "--base nf4", {"base": "nf4"}, places
        chunked = replace(program, loss="chunked")
        yield "--base nf4 --program loss=chunked", {"base": "nf4", "program": chunked}, places
    if question["recipes"] and not program.has_adapters:
        for recipe in _SMALL_STORAGES:
            if recipe not in question["recipes"]:
                yield f"--recipe {recipe}", {"recipes": recipe}, places
    layout = question["layout"]
    if set(layout) - {"micro_batch"}:
        free = {}
        if "micro_batch" in layout:
            free["micro_batch"] = layout["micro_batch"]
        yield "without --layout", {"layout": free}, places
    if not program.offload and not program.has_adapters:
        away = replace(program, offload=True, loss="chunked", limits={})
        yield "--program offload=true,loss=chunked", {"program": away}, places
    length = question["sequence_length"]
    while length > _SHORTEST and question["tokens_per_step"] is None:
        length //= 2
        yield f"--sequence-length {length}", {"sequence_length": length}, places
    if not program.has_adapters:
        adapters = {"lora": _RANK, "base": "nf4", "recipes": ()}
        yield f"--lora {_RANK} --base nf4", adapters, places
    for factor in (2, 4, 8, 16):
        larger = [_with_chips(where, factor) for where in places]
        yield f"--chips {larger[0].chips}", {}, larger


def _with_chips(where: Cluster, factor: int) -> Cluster:
    chips = where.chips * factor
    size = min(chips, max(where.chips_per_node, where.chip.chips_per_node))
    return replace(where, chips=chips, chips_per_node=size, name=f"{chips} × {where.chip.name}")


def measured_correction(planned: Estimate, like: Any) -> float:
    """Return planned over measured rate of a run like this one.

    Args:
        planned: the question's first row.
        like: tokens per second of all chips, or a run folder or log that has them.
    Raises:
        DataError: the run has no tokens per second.
    """
    measured = like if isinstance(like, int | float) else _measured_rate(str(like))
    if not 0 < measured < math.inf:
        raise DataError(f"Cannot plan like a run of {measured:g} tokens/s.", "Name a rate above 0.")
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


def _measured_rate(text: str) -> float:
    """Return the median tokens per second of a run folder or log, or the number itself."""
    with contextlib.suppress(ValueError):
        return float(text)
    from narrowgauge.runs.record import read_run

    run = read_run(Path(text).expanduser())
    rates = [row["tokens_per_second"] for row in run.steps if row.get("tokens_per_second")]
    if not rates:
        raise DataError(
            f"Cannot plan like {text} because it has no tokens per second.",
            "Name the rate: --like 6500.",
        )
    return float(statistics.median_high(rates))
