"""Step times that the planner predicts for training runs that others measured and published.

Claim: the mean error over the published runs and its worst are as printed, and four of five runs lie within the interval that the
planner states. Nothing is fitted to these runs: all shares of printed rates come from publications about kernels and links
(``narrowgauge.planner.shares``). A third of the runs is set aside (``--held-out``), to be used once.

What a source does not state is assumed: micro-batches of one sequence, no recomputation, fused attention (unfused for
Megatron-LM's papers, which precede it), gradients summed in float32 by Megatron-LM and in 16 bits by FSDP. MXFP8 is planned as
float8 with scales per row, since kernels other than Narrowgauge's multiply it.

Run: ``./dev bench planned_published [--held-out] [--explain NAME]``; less than a second, no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import NamedTuple

from _published import Run, load, measured_tokens_per_second

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.architectures import Architecture
from narrowgauge.planner.clusters import Cluster, Nodes
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model_configs import architecture_of
from narrowgauge.planner.step_time import UNSTEADY_GROUPS, step_terms
from narrowgauge.planner.terms import Terms
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

COMPUTES = {"float16": "float16", "bfloat16": "bfloat16", "float8": "float8-tensor", "mxfp8": "float8-row"}
UNFUSED = ("megatron-20", "mt-nlg")


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
        pipeline=given.get("pipeline", 1),
        interleave=given.get("interleaving", 1),
        context=given.get("context", 1),
        expert=given.get("expert", 1),
        micro_batch=micro_batch,
        micro_batches=max(1, step["global_batch"] // (data * micro_batch)),
        recompute=step.get("recompute", "none"),
    )


def cluster_of_run(run: Run) -> Cluster:
    """The run's machines."""
    machine = run.machine
    size = min(machine["chips_per_node"], machine["chips"])
    per_chip = machine.get("link_gbit_per_second_per_chip")
    network = None if per_chip is None else per_chip * size
    nodes = Nodes(get_chip(machine["chip"]), size, -(-machine["chips"] // size), interconnect_gbit_per_second=network)
    return Cluster(run.name, (nodes,))


def recipe_of(run: Run) -> Recipe:
    """The run's precision, with states as mixed precision keeps them."""
    precision = run.step.get("precision", "bfloat16")
    storage = "float32" if precision == "float16" else "master"
    reduction = "native" if run.layout.get("shard") == 3 else "float32"
    return parse(f"{COMPUTES[precision]}/{storage}/{reduction}")


def predict(run: Run) -> Point:
    """The planner's rate beside the published one."""
    architecture: Architecture = architecture_of(run.config, run.model)
    layout, cluster = layout_of(run), cluster_of_run(run)
    attention = "eager" if run.name.startswith(UNFUSED) else "flash"
    terms = step_terms(architecture, recipe_of(run), layout, cluster, run.step["sequence_length"], attention=attention)
    steady = Terms(tuple(term for term in terms if term.group not in UNSTEADY_GROUPS))
    tokens = layout.num_sequences * run.step["sequence_length"] / layout.num_ranks
    low, high = steady.interval
    measured = measured_tokens_per_second(run)
    return Point(run.name, measured, tokens / steady.total, tokens / high, tokens / low, steady)


def predict_all(runs: list[Run]) -> tuple[list[Point], list[str]]:
    """All runs that state enough, and why the others were left out."""
    points, left_out = [], []
    for run in runs:
        try:
            points.append(predict(run))
        except (KeyError, NarrowgaugeError) as error:
            left_out.append(f"{run.name}: {error if isinstance(error, NarrowgaugeError) else f'{error} is not stated'}")
    return points, left_out


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
    parser.add_argument("--held-out", action="store_true", help="the third that was set aside")
    parser.add_argument("--explain", metavar="NAME", help="the terms of runs whose name begins so")
    given = parser.parse_args()
    points, left_out = predict_all(load(given.held_out))
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
    families = sorted({point.name.partition("-")[0] for point in points})
    for family in families:
        own = [point for point in points if point.name.partition("-")[0] == family]
        print(f"{family:9} {report(own)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
