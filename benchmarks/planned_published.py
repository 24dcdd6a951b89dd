"""Step times that the planner predicts for training runs that others measured and published.

Claim: the mean error over the published runs and its worst are as printed, and 80 % of the runs lie within the interval that
the planner states. Nothing is fitted run by run: all shares of printed rates but those of software come from publications
about kernels and links (``narrowgauge.planner.inputs.efficiency``). What software reaches was set with the runs in view; each
run is planned with the software that its source names, or, with ``--assumed``, with what the planner assumes on the chip. A
third of the first round and half of the second (``--later``) are set aside (``--held-out``), to be used once.

What a source does not state is assumed: micro-batches of one sequence, no recomputation, fused attention (unfused for
Megatron-LM's papers, which precede it), gradients summed in float32 by Megatron-LM and in 16 bits by FSDP. MXFP8 is planned as
float8 with scales per row, since kernels other than Narrowgauge's multiply it.

Run: ``./dev bench planned_published [--later] [--held-out] [--assumed] [--explain NAME]``; less than a second, no GPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import replace
from typing import NamedTuple

from _published import Run, load, measured_tokens_per_second

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.inputs.clusters import Cluster, Nodes
from narrowgauge.planner.inputs.efficiency import Shares, shares_of
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.inputs.model_configs import architecture_of
from narrowgauge.planner.memory.activations import Attention
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.planner.time.step_time import UNSTEADY_GROUPS, step_terms
from narrowgauge.spec.chips import Chip, get_chip
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

COMPUTES = {"float16": "float16", "bfloat16": "bfloat16", "float8": "float8-tensor", "mxfp8": "float8-row"}
UNFUSED = ("megatron-20", "mt-nlg", "bigscience", "bloom-", "neox")
_UNSTATED_DEPTH = 4
_FULL_WATTS, _VARIANT_WATTS = 700, 500


class Point(NamedTuple):
    """One run.

    Attributes:
        name: of the run.
        measured, predicted, low, high: tokens per second and chip.
        terms: of the predicted step.
    """

    name: str
    measured: float
    predicted: float
    low: float
    high: float
    terms: Terms

    @property
    def error(self) -> float:
        """Of the predicted rate, relative to the measured one."""
        return self.predicted / self.measured - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measured rate lies within the interval."""
        return self.low <= self.measured <= self.high


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
        keeps_gradients=given.get("keeps_gradients", False),
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
    nodes = Nodes(chip, size, -(-machine["chips"] // size), interconnect_gbit_per_second=network)
    return Cluster(run.name, (nodes,))


def recipe_of(run: Run) -> Recipe:
    """The run's precision, with states as mixed precision keeps them."""
    precision = run.step.get("precision", "bfloat16")
    reduction = "native" if run.layout.get("shard") == 3 else "float32"
    return parse(f"{COMPUTES[precision]}/master/{reduction}")


def chip_of(run: Run) -> tuple[Chip, Shares]:
    """The run's chip, and its shares; of a variant with another bandwidth and power limit, those.

    Raises:
        NarrowgaugeError: the chip is limited to a power that is not stated.
    """
    chip, variant = get_chip(run.machine["chip"]), run.machine.get("variant", "")
    shares = shares_of(chip, run.software)
    if variant == "power limited":
        raise NarrowgaugeError("the limit of its power is not stated.")
    if "HBM2e" in variant:
        chip = replace(chip, bandwidth_gb_per_second=2400)
        # At its power limit a chip's rate grows with about the root of it: power grows with clock and voltage.
        factor = math.sqrt(_VARIANT_WATTS / _FULL_WATTS)
        rows = {name: row for name, row in shares.rows.items() if name.startswith("matmul.")}
        shares = shares.replaced({name: row.scaled(factor, factor, factor, "500 W") for name, row in rows.items()})
    return chip, shares


def predict(run: Run) -> Point:
    """The planner's rate beside the published one."""
    architecture, recipe = architecture_of(run.config, run.model), recipe_of(run)
    chip, shares = chip_of(run)
    layout, cluster, length = layout_of(run), cluster_of_run(run, chip), run.step["sequence_length"]
    attention: Attention = "eager" if run.name.startswith(UNFUSED) else "flash"
    terms = step_terms(Job(architecture, recipe, layout, cluster, length, shares), attention=attention)
    if run.step.get("recompute_detail") == "per operator":  # every second matmul, and what lies between
        whole = replace(layout, recompute="full")
        full = step_terms(Job(architecture, recipe, whole, cluster, length, shares), attention=attention)
        terms = Terms(tuple(map(_between, terms, full)))
    steady = terms.without(*UNSTEADY_GROUPS)
    tokens = layout.num_sequences * run.step["sequence_length"] / layout.num_ranks
    low, high = steady.interval
    measured = measured_tokens_per_second(run)
    return Point(run.name, measured, tokens / steady.total, tokens / high, tokens / low, steady)


def _between(one: Term, other: Term) -> Term:
    """The mean of a term with and without recomputation."""
    low, high = map(statistics.fmean, zip(one.interval, other.interval, strict=True))
    return replace(one, value=statistics.fmean((one.value, other.value)), low=low, high=high)


def predict_all(runs: list[Run]) -> tuple[list[Point], list[str]]:
    """All runs that state enough, and why the others were left out."""
    points, left_out = [], []
    for run in runs:
        try:
            points.append(predict(run))
        except (KeyError, NarrowgaugeError) as error:
            left_out.append(f"{run.name}: {error if isinstance(error, NarrowgaugeError) else f'{error} is not stated'}")
    return points, left_out


def family_of(point: Point) -> str:
    """The publication: what its runs' names begin with."""
    first, second = point.name.split("-")[:2]
    return f"{first}-{second}" if first in ("megatron", "mosaic", "maxtext") else first


def report(points: list[Point]) -> str:
    """Mean and worst error, and the share of runs within their intervals."""
    errors = [abs(point.error) for point in points]
    worst = max(points, key=lambda point: abs(point.error))
    inside = sum(point.is_inside for point in points)
    return (
        f"{len(points)} runs: mean error {statistics.mean(errors):.1%}, median {statistics.median(errors):.1%}, bias "
        f"{statistics.mean(point.error for point in points):+.1%}, worst {worst.error:+.1%} ({worst.name}); "
        f"{inside / len(points):.0%} within their interval"
    )


def main() -> int:
    """Print every run and the summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--held-out", action="store_true", help="what was set aside")
    parser.add_argument(
        "--assumed", action="store_true", help="the software that the planner assumes, not the run's own"
    )
    parser.add_argument("--later", action="store_true", help="the second round of runs")
    parser.add_argument("--explain", metavar="NAME", help="the terms of runs whose name begins so")
    given = parser.parse_args()
    runs = load(given.held_out, given.later)
    if given.assumed:
        runs = [replace(run, software="") for run in runs]
    points, left_out = predict_all(runs)
    for point in points:
        mark = " " if point.is_inside else "*"
        rates = f"{point.measured:9,.0f} {point.predicted:9,.0f} [{point.low:8,.0f} {point.high:8,.0f}]"
        print(f"{point.name:48} {rates} {point.error:+7.1%}{mark}")
        if given.explain and point.name.startswith(given.explain):
            for term in point.terms:
                print(
                    f"    {term.group:13} {term.value:9.3f} {term.interval[0]:9.3f} {term.interval[1]:9.3f}  {term.formula}"
                )
    for line in left_out:
        print(f"left out: {line}")
    print(report(points))
    for family in dict.fromkeys(map(family_of, points)):
        print(f"{family:14} {report([point for point in points if family_of(point) == family])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
