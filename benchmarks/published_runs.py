"""Plan training runs that others measured and published, and write the errors of the plans into the planner's table.

Claim: the mean error over the published runs and its worst are as printed, and 75 to 85 % of the runs lie within the interval
that the planner states. Shares of printed rates come from publications about kernels and links, but for those of libraries,
which were set with the runs in view. Each run is planned with the software that its source names, or, with ``--assumed``, with
what the planner assumes on the chip. A third of the first round and half of the second (``--later``) are held out
(``--held-out``).

``--write`` writes the 10 and 90 % quantiles of measured over planned seconds of the runs in view, by class, into
``src/narrowgauge/planner/data/efficiency.toml``, and prints how many runs of each publication lie within the quantiles of the
others.

What a source does not state is assumed: micro-batches of one sequence, no recomputation, fused attention (unfused for
Megatron-LM's papers, which precede it), gradients summed in float32 by Megatron-LM and in 16 bits by FSDP. MXFP8 is planned as
float8 with scales per row, since kernels other than Narrowgauge's multiply it.

Run: ``./dev bench published_runs [--later] [--held-out] [--assumed] [--explain NAME] | [--write]``; some seconds, no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from _published import Run, load, measured_tokens_per_second

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.built_models import of_config
from narrowgauge.planner.clusters import Cluster, cluster_of
from narrowgauge.planner.efficiency import Efficiency, efficiency_of, error_of
from narrowgauge.planner.jobs import Attention, Job
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model import Architecture
from narrowgauge.planner.step_time import UNSTEADY_GROUP, step_terms
from narrowgauge.planner.terms import Terms
from narrowgauge.spec.chips import Chip, get_chip
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

TABLE = Path(__file__).parents[1] / "src/narrowgauge/planner/data/efficiency.toml"
COMPUTES = {"float16": "float16", "bfloat16": "bfloat16", "float8": "float8-tensor", "mxfp8": "float8-row"}
UNFUSED = ("megatron-20", "mt-nlg", "bigscience", "bloom-", "neox")
_UNSTATED_DEPTH = 4
_FULL_WATTS, _VARIANT_WATTS = 700, 500


class Point(NamedTuple):
    """One run: tokens per second and chip as measured and as predicted, with the predicted step and its class."""

    name: str
    measured: float
    predicted: float
    terms: Terms
    has_mixture: bool
    has_software: bool

    @property
    def error(self) -> float:
        """Return the error of the predicted rate, relative to the measured one."""
        return self.predicted / self.measured - 1

    @property
    def ratio(self) -> float:
        """Return measured over planned seconds."""
        return self.predicted / self.measured

    @property
    def is_inside(self) -> bool:
        """Tell whether the measured rate lies within the interval."""
        low, high = error_of(has_mixture=self.has_mixture, has_software=self.has_software)
        return low <= self.ratio <= high


def layout_of(run: Run) -> Layout:
    """The run's layout.

    Raises:
        KeyError: the source does not state it.
    """
    given, step = run.layout, run.step
    data, micro_batch, zero = given["data"], step.get("micro_batch", 1), given.get("shard", 1)
    return Layout(
        data=1 if zero else data,
        shard=data if zero else 1,
        zero=zero,
        tensor=given.get("tensor", 1),
        sequence_parallel=given.get("sequence_parallel", True),
        pipeline=given.get("pipeline", 1),
        interleave=given.get("interleaving", _UNSTATED_DEPTH if "interleaved schedule" in run.note else 1),
        context=given.get("context", 1),
        expert=given.get("expert", 1),
        micro_batch=micro_batch,
        micro_batches=max(1, step["global_batch"] // (data * micro_batch)),
        recompute=step.get("recompute", "none"),
    )


def cluster_of_run(run: Run, chip: Chip) -> Cluster:
    """The run's machines."""
    machine = run.machine
    size = min(machine["chips_per_node"], machine["chips"])
    per_chip = machine.get("link_gbit_per_second_per_chip")
    network = None if per_chip is None else per_chip * size
    chips = -(-machine["chips"] // size) * size
    return cluster_of(chip, chips, size, interconnect_gbit_per_second=network, name=run.name)


def recipe_of(run: Run) -> Recipe:
    """The run's precision, with states as mixed precision keeps them."""
    precision = run.step.get("precision", "bfloat16")
    reduction = "native" if run.layout.get("shard") == 3 else "float32"
    return parse(f"{COMPUTES[precision]}/master/{reduction}")


def chip_of(run: Run) -> tuple[Chip, Efficiency]:
    """Return the run's chip, and its shares; of a variant with another bandwidth and power limit, those.

    Raises:
        NarrowgaugeError: the chip is limited to a power that is not stated.
    """
    chip, variant = get_chip(run.machine["chip"]), run.machine.get("variant", "")
    shares = efficiency_of(chip, run.software)
    if variant == "power limited":
        raise NarrowgaugeError("the limit of its power is not stated.")
    if "HBM2e" in variant:
        chip = replace(chip, bandwidth_gb_per_second=2400)
        # At its power limit a chip's rate grows with about the root of it: power grows with clock and voltage.
        factor = math.sqrt(_VARIANT_WATTS / _FULL_WATTS)
        values = {k: v * factor if k.startswith("matmul.") else v for k, v in shares.values.items()}
        shares = replace(shares, values=values)
    return chip, shares


@cache
def _architecture(name: str, config: str) -> Architecture:
    return of_config(json.loads(config), name)


def predict(run: Run) -> Point:
    """Return the planner's rate beside the published one."""
    architecture, recipe = _architecture(run.model, json.dumps(run.config)), recipe_of(run)
    chip, shares = chip_of(run)
    layout, cluster, length = layout_of(run), cluster_of_run(run, chip), run.step["sequence_length"]
    attention: Attention = "eager" if run.name.startswith(UNFUSED) else "flash"
    job = Job(architecture, recipe, layout, cluster, length, shares, attention)
    terms = step_terms(job)
    if run.step.get("recompute_detail") == "per operator":  # every second matmul, and what lies between
        full = step_terms(replace(job, layout=replace(layout, recompute="full")))
        terms = Terms(tuple(a._replace(value=(a.value + b.value) / 2) for a, b in zip(terms, full, strict=True)))
    steady = terms.without(UNSTEADY_GROUP)
    tokens = layout.num_sequences * run.step["sequence_length"] / layout.num_ranks
    measured, has_mixture = measured_tokens_per_second(run), architecture.mixture is not None
    return Point(run.name, measured, tokens / steady.total, steady, has_mixture, bool(run.software))


def predict_all(runs: list[Run]) -> tuple[list[Point], list[str]]:
    """Predict all runs that state enough, and say why the others were left out."""
    points, left_out = [], []
    for run in runs:
        try:
            points.append(predict(run))
        except (KeyError, NarrowgaugeError) as error:
            left_out.append(f"{run.name}: {error if isinstance(error, NarrowgaugeError) else f'{error} is not stated'}")
    return points, left_out


def family_of(point: Point) -> str:
    """Return the publication: what its runs' names begin with."""
    first, second = point.name.split("-")[:2]
    return f"{first}-{second}" if first in ("megatron", "mosaic", "maxtext") else first


def report(points: list[Point]) -> str:
    """Summarize mean and worst error, and the share of runs within their intervals."""
    errors = [abs(point.error) for point in points]
    worst = max(points, key=lambda point: abs(point.error))
    inside = sum(point.is_inside for point in points)
    return (
        f"{len(points)} runs: mean error {statistics.mean(errors):.1%}, median {statistics.median(errors):.1%}, bias "
        f"{statistics.mean(point.error for point in points):+.1%}, worst {worst.error:+.1%} ({worst.name}); "
        f"{inside / len(points):.0%} within their interval"
    )


# ── the error bar ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def points_in_view(*, assumed: bool) -> list[Point]:
    """Predict the runs in view of both rounds, with the software that their sources name or with what is assumed."""
    runs = [*load(), *load(later=True)]
    return predict_all([replace(run, software="") for run in runs] if assumed else runs)[0]


def interval_of(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 10 and 90 % quantiles."""
    cuts = statistics.quantiles(ratios, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def held_by_others(points: Sequence[Point]) -> float:
    """Return the share of runs that lie within the interval of the other publications' runs."""
    inside = []
    for family in {family_of(point) for point in points}:
        others = [point.ratio for point in points if family_of(point) != family]
        if len(others) > 1:
            low, high = interval_of(others)
            inside += [low <= point.ratio <= high for point in points if family_of(point) == family]
    return statistics.mean(inside)


def write_errors() -> None:
    """Write the quantiles of each class into the planner's table."""
    lines = [
        "# Written by benchmarks/published_runs.py --write: 10 and 90 % quantiles of measured over planned seconds, runs in "
        "view."
    ]
    for name, assumed in (("named", False), ("assumed", True)):
        points = points_in_view(assumed=assumed)
        for kind in ("dense", "mixture"):
            chosen = [point for point in points if point.has_mixture == (kind == "mixture")]
            low, high = interval_of([point.ratio for point in chosen])
            lines += [f"[error.{kind}.{name}]", f"low = {low:.3f}", f"high = {high:.3f}", f"runs = {len(chosen)}", ""]
            print(
                f"{kind:8} {name:8} {low:.3f} to {high:.3f}, {len(chosen)} runs, {held_by_others(chosen):.0%} within the others'"
            )
    text = TABLE.read_text(encoding="utf-8").partition("# Written by")[0]
    TABLE.write_text(text + "\n".join(lines).rstrip() + "\n", encoding="utf-8")


def main() -> int:
    """Print every run and the summary, or write the error bar."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--held-out", action="store_true", help="what was held out")
    parser.add_argument(
        "--assumed", action="store_true", help="the software that the planner assumes, not the run's own"
    )
    parser.add_argument("--later", action="store_true", help="the second round of runs")
    parser.add_argument("--explain", metavar="NAME", help="the terms of runs whose name begins so")
    parser.add_argument(
        "--write", action="store_true", help="write the errors of the runs in view into the planner's table"
    )
    options = parser.parse_args()
    if options.write:
        write_errors()
        return 0
    runs = load(options.held_out, options.later)
    if options.assumed:
        runs = [replace(run, software="") for run in runs]
    points, left_out = predict_all(runs)
    for point in points:
        mark = " " if point.is_inside else "*"
        print(f"{point.name:48} {point.measured:9,.0f} {point.predicted:9,.0f} {point.error:+7.1%}{mark}")
        if options.explain and point.name.startswith(options.explain):
            for term in point.terms:
                print(f"    {term.group:13} {term.value:9.3f}  {term.formula}")
    for line in left_out:
        print(f"left out: {line}")
    print(report(points))
    for family in dict.fromkeys(map(family_of, points)):
        print(f"{family:14} {report([point for point in points if family_of(point) == family])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
