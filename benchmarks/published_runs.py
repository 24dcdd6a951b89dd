"""Plan training runs that others measured and published, and write the errors of the plans into the
planner's table.

Claim: the mean error over the published runs and its worst are as printed, and 80 % or more of the
runs lie within the interval that the planner states. Shares of printed rates come from publications
about kernels and links, but for those of libraries, which were set with the runs in view. Each run
is planned with the software that its source names, or, with ``--assumed``, with what the planner
assumes on the chip. A third of the first round and half of the second (``--later``) are held out
(``--held-out``).

The layouts of tuned runs are also searched. All runs ran, so all whose recomputation is stated
should be planned to fit. The memory of each run with a printed peak is compared with it.

``--write`` writes the 10 and 90 % quantiles of measured over planned seconds of the runs in view,
by class, into ``src/narrowgauge/planner/data/efficiency.toml``, and for mixtures the median, by
which their plans are multiplied. The quantiles of all publications but one are widened until they
hold 80 % of the runs of the one left out, if there are five. A release of Megatron-Bridge counts as
one. The recipes of a release say how tokens reach the experts, which the rows name as software.

What a source does not state is assumed: micro-batches of one sequence, no recomputation, fused
attention (unfused for Megatron-LM's papers, which precede it), gradients summed in float32 by
Megatron-LM. MXFP8 is planned as float8 with scales per row, since kernels other than Narrowgauge's
multiply it.

Run: ``./dev bench published_runs [--later] [--held-out] [--assumed] [--explain NAME] | [--write]``;
some seconds, no GPU.
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
from typing import Any, NamedTuple

import questions
from _published import Run, load, measured_tokens_per_second

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.built_models import of_config
from narrowgauge.planner.efficiency import Efficiency, efficiency_of
from narrowgauge.planner.errors import error_of
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.machine import Cluster, cluster_of
from narrowgauge.planner.program import DEFAULT, Program, read_program
from narrowgauge.planner.program import PROGRAMS as NAMED
from narrowgauge.planner.search import search
from narrowgauge.planner.shapes import Architecture
from narrowgauge.planner.step_time import UNSTEADY_GROUP, step_terms
from narrowgauge.planner.terms import Terms
from narrowgauge.spec.chips import CHIPS, Chip, get_chip
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

DATA = Path(__file__).parents[1] / "src/narrowgauge/planner/data"
COMPUTES = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float8": "float8-tensor",
    "mxfp8": "float8-row",
}
PROGRAMS = (
    # Papers before 2022 precede fused attention.
    *((name, "megatron-core,loss=whole,selective=attention,attention=eager")
      for name in ("megatron-20", "mt-nlg", "bigscience", "bloom-", "neox")),
    ("torchtitan-h200", "torchtitan"),
    ("torchtitan", "torchtitan,loss=whole"),
    # Printed with the memory of float32 logits: before torchtitan compiled its loss. An inference.
    ("torchao-h100", "torchtitan,loss=whole"),
    ("torchao", "torchtitan"),
    ("mosaic", "hf-trainer,loss=compiled"),  # llm-foundry's fused cross entropy
    ("tinyllama", "hf-trainer,kernels=fused"),
    ("maxtext", "maxtext"),
    ("bridge", "megatron-core,sums=weight"),  # its performance recipes set grad_reduce_in_fp32 = False
    ("", "megatron-core"),
)  # fmt: skip
"""The program of a publication's runs, by the beginning of their names."""
FEWEST_VALUES = 4
"""Values of a class from which it has an interval."""
FACTS = {"speed": "tokens_per_second", "memory": "memory_gb"}
FEW_VALUES = 12
"""Values of a class below which its interval holds all."""
DEMONSTRATIONS = ("torchtitan", "torchao", "bloomberg")
"""Publications whose layouts show a feature and are not tuned for speed."""
_UNSTATED_DEPTH = 4
_FULL_WATTS = 700
_VARIANT_WATTS = 500


class Point(NamedTuple):
    """One run: tokens per second and chip as measured and as predicted, with its job, its predicted
    step and its class.
    """

    name: str
    measured: float
    predicted: float
    terms: Terms
    job: Estimate
    run: Run

    @property
    def error(self) -> float:
        """Return the error of the predicted rate, relative to the measured one."""
        return self.predicted / self.measured - 1

    @property
    def ratio(self) -> float:
        """Return measured over planned seconds."""
        return self.predicted / self.measured

    @property
    def kind(self) -> str:
        """Return the class of question."""
        return self.job.kind

    @property
    def has_mixture(self) -> bool:
        return self.job.architecture.mixture is not None

    @property
    def peak(self) -> float:
        """Return the printed peak in bytes; 0 without one."""
        printed = self.run.measured
        return printed.get("peak_memory_gib", 0) * 2**30 or printed.get("peak_memory_gb", 0) * 1e9

    @property
    def is_inside(self) -> bool:
        """Tell whether the measured rate lies within the interval."""
        ends = error_of("speed", self.kind, self.job.chip)
        return ends is not None and ends[0] <= self.ratio <= ends[1]


def layout_of(run: Run) -> Layout:
    """The run's layout.

    Raises:
        KeyError: the source does not state it.
    """
    published = run.layout
    step = run.step
    data = published["data"]
    zero = published.get("shard", 1)
    # torchtitan's default is as many micro-batches as stages.
    per_stage = step["global_batch"] // (data * published.get("pipeline", 1))
    micro_batch = step.get("micro_batch", per_stage if run.name.startswith("torchtitan") else 1)
    return Layout(
        data=1 if zero else data,
        shard=data if zero else 1,
        zero=zero,
        tensor=published.get("tensor", 1),
        sequence_parallel=published.get("sequence_parallel", True),
        pipeline=published.get("pipeline", 1),
        interleave=published.get(
            "interleaving", _UNSTATED_DEPTH if "interleaved schedule" in run.note else 1
        ),
        context=published.get("context", 1),
        expert=published.get("expert", 1),
        micro_batch=micro_batch,
        micro_batches=max(1, step["global_batch"] // (data * micro_batch)),
        recompute=step.get("recompute", "none"),
        accumulation_dtype="float32"
        if program_of(run).sums == "float32"
        else recipe_of(run).storage.visible,
    )


def cluster_of_run(run: Run, chip: Chip) -> Cluster:
    """The run's machines."""
    machine = run.machine
    size = min(machine["chips_per_node"], machine["chips"])
    per_chip = machine.get("link_gbit_per_second_per_chip")
    network = None
    if per_chip is not None:
        network = per_chip * size
    if "zero3" in run.name:  # one card of eight: arXiv 2104.04473, table 2
        network = chip.network_gbit_per_second * size / 8
    chips = -(-machine["chips"] // size) * size
    return cluster_of(chip, chips, size, interconnect_gbit_per_second=network, name=run.name)


def program_of(run: Run) -> Program:
    """Return the run's training loop: the one of its publication, eager if its layers were not
    compiled.
    """
    text = next(program for start, program in PROGRAMS if run.name.startswith(start))
    program = read_program(text + (",kernels=eager" if run.step.get("compiled") is False else ""))
    speed = NAMED.get(run.speed, DEFAULT)
    return replace(program, name=speed.name, factor=speed.factor, speed=speed.speed)


def recipe_of(run: Run) -> Recipe:
    """The run's precision: float32 weights that FSDP gathers in 16 bits, or 16-bit weights beside
    float32 ones.
    """
    precision = run.step.get("precision", "bfloat16")
    is_fsdp = run.layout.get("shard") == 3
    states = "float32" if program_of(run).gathered and is_fsdp else "master"
    sums = "native" if is_fsdp or program_of(run).sums == "weight" else "float32"
    return parse(f"{COMPUTES[precision]}/{states}/{sums}")


def chip_of(run: Run) -> tuple[Chip, Efficiency]:
    """Return the run's chip, and its shares; of a variant with another bandwidth and power limit,
    those.

    Raises:
        NarrowgaugeError: the chip is limited to a power that is not stated.
    """
    chip = get_chip(run.machine["chip"])
    variant = run.machine.get("variant", "")
    shares = efficiency_of(chip, program_of(run))
    if variant == "power limited":
        raise NarrowgaugeError("the limit of its power is not stated.")
    if "HBM2e" in variant:
        chip = replace(chip, bandwidth_gb_per_second=2400, memory_gb=96)
        # At its power limit a chip's rate grows with about the root of it: power grows with clock
        # and voltage.
        factor = math.sqrt(_VARIANT_WATTS / _FULL_WATTS)
        values = {}
        for k, v in shares.values.items():
            values[k] = v * factor if k.startswith("matmul.") else v
        shares = replace(shares, values=values)
    return chip, shares


@cache
def _architecture(name: str, config: str) -> Architecture:
    return of_config(json.loads(config), name)


def predict(run: Run) -> Point:
    """Return the planner's rate beside the published one."""
    architecture = _architecture(run.model, json.dumps(run.config))
    recipe = recipe_of(run)
    chip, shares = chip_of(run)
    layout = layout_of(run)
    cluster = cluster_of_run(run, chip)
    length = run.step["sequence_length"]
    job = Estimate(architecture, recipe, layout, cluster, length, shares, program_of(run))
    steady = step_terms(job).without(UNSTEADY_GROUP)
    tokens = layout.num_sequences * run.step["sequence_length"] / layout.num_ranks
    measured = measured_tokens_per_second(run)
    return Point(run.name, measured, tokens / steady.total, steady, job, run)


def predict_all(runs: list[Run]) -> tuple[list[Point], list[str]]:
    """Predict all runs that state enough, and say why the others were left out."""
    points = []
    left_out = []
    for run in runs:
        try:
            points.append(predict(run))
        except (KeyError, NarrowgaugeError) as error:
            left_out.append(
                f"{run.name}: "
                f"{error if isinstance(error, NarrowgaugeError) else f'{error} is not stated'}"
            )
    return points, left_out


def family_of(point: Point) -> str:
    """Return the publication, of Megatron-Bridge its release: what its runs' names begin with."""
    first, second = point.name.split("-")[:2]
    if first in ("megatron", "mosaic", "maxtext", "bridge"):
        return f"{first}-{second}"
    return first


def report(points: list[Point]) -> str:
    """Summarize mean and worst error, and the share of runs within their intervals."""
    errors = [abs(point.error) for point in points]
    worst = max(points, key=lambda point: abs(point.error))
    inside = sum(point.is_inside for point in points)
    return (
        f"{len(points)} runs: mean error {statistics.mean(errors):.1%}, median "
        f"{statistics.median(errors):.1%}, bias "
        f"{statistics.mean(point.error for point in points):+.1%}, worst {worst.error:+.1%} "
        f"({worst.name}); "
        f"{inside / len(points):.0%} within their interval"
    )


# ── the layout searched, and the memory ───────────────────────────────────────────────────────────


def report_search(points: list[Point]) -> str:
    """Search the layouts of runs that were tuned, with the run's chips, batch, length and
    precision, and summarize the rates.
    """
    errors: dict[bool, list[float]] = {False: [], True: []}
    for point in points:
        if point.name.startswith(DEMONSTRATIONS) or point.job.program.attention == "eager":
            continue
        run = point.run
        job = point.job
        machine = point.run.machine
        size = max(
            n
            for n in range(1, min(machine["chips_per_node"], machine["chips"]) + 1)
            if machine["chips"] % n == 0
        )
        per_chip = machine.get("link_gbit_per_second_per_chip")
        network = None
        if per_chip is not None:
            network = per_chip * size
        cluster = cluster_of(
            job.chip,
            machine["chips"],
            size,
            interconnect_gbit_per_second=network,
        )
        best = search(replace(job, cluster=cluster, shares=None), run.tokens_per_step)
        rate = best.tokens_per_step / best.step.without(UNSTEADY_GROUP).total / best.num_chips
        errors[point.has_mixture].append(rate / point.measured - 1)
    lines = []
    for kind, values in (("dense", errors[False]), ("mixtures", errors[True])):
        if values:
            sizes = [abs(value) for value in values]
            lines.append(
                f"layout searched, {kind}: {len(values)} runs: mean error "
                f"{statistics.mean(sizes):.1%}, median "
                f"{statistics.median(sizes):.1%}, bias {statistics.mean(values):+.1%}"
            )
    return "\n".join(lines)


def report_memory(points: list[Point]) -> str:
    """Summarize which runs are planned to fit, since all ran, and the errors of printed peaks."""
    stated = [point for point in points if "recompute" in point.run.step]
    too_large = []
    for p in stated:
        if not p.job.fits:
            too_large.append(f"{p.name} {p.job.memory.total / p.job.chip.memory_bytes:.2f}")
    lines = [
        f"planned to fit: {1 - len(too_large) / len(stated):.0%} of {len(stated)} runs that state "
        "what they recompute; not "
        f"{', '.join(too_large) or 'none'}"
    ]
    errors = []
    inside = []
    for point in points:
        if point.peak:
            planned = point.job.reserved_bytes
            ends = error_of("memory", point.kind, point.job.chip)
            errors.append(planned / point.peak - 1)
            inside.append(ends is not None and ends[0] <= point.peak / planned <= ends[1])
            print(
                f"{point.name:48} {point.peak / 2**30:9,.1f} {planned / 2**30:9,.1f} GiB "
                f"{errors[-1]:+7.1%}"
            )
    if errors:
        sizes = [abs(error) for error in errors]
        lines.append(
            f"printed peaks: {len(errors)} runs: mean error {statistics.mean(sizes):.1%}, median "
            f"{statistics.median(sizes):.1%}, bias {statistics.mean(errors):+.1%}; "
            f"{statistics.mean(inside):.0%} within "
            "their interval"
        )
    return "\n".join(lines)


# ── the error bar ─────────────────────────────────────────────────────────────────────────────────


def points_in_view(*, assumed: bool) -> list[Point]:
    """Predict the runs in view of both rounds, with the software that their sources name or with
    what is assumed.
    """
    runs = [*load(), *load(later=True)]
    return predict_all([replace(run, speed="") for run in runs] if assumed else runs)[0]


def interval_of(ratios: Sequence[float], wider: float = 1.0) -> tuple[float, float]:
    """Return the 10 and 90 % quantiles, as far from the median as ``wider`` says (a power of their
    ratio to it).
    """
    cuts = statistics.quantiles(ratios, n=10, method="inclusive")
    middle = statistics.median(ratios)
    return middle * (cuts[0] / middle) ** wider, middle * (cuts[-1] / middle) ** wider


class Residual(NamedTuple):
    """One measured over planned value: its class of question, and its publication."""

    kind: str
    family: str
    ratio: float


@cache
def asked() -> tuple[questions.Answer, ...]:
    """Return the answers to the questions in view."""
    rows = questions.load(held_out=False)
    answers = []
    for question in rows:
        answers += questions.ask(question)
    return tuple(answers)


def residuals(quantity: str) -> list[Residual]:
    """Return the residuals of runs and questions in view: of seconds (``speed``) with the program
    unnamed, or of bytes (``memory``). A program that is named has the same interval.
    """
    rows = []
    if quantity == "memory":
        for point in points_in_view(assumed=False):
            if point.peak:
                ratio = point.peak / point.job.reserved_bytes
                rows.append(Residual(point.kind, family_of(point), ratio))
    else:
        for point in points_in_view(assumed=True):
            rows.append(Residual(point.kind, family_of(point), point.ratio))
    for answer in asked():
        if answer.what == quantity:
            ratio = answer.planned / answer.measured
            ratio = 1 / ratio if quantity == "memory" else ratio
            rows.append(Residual(answer.job.kind, answer.question["source"], ratio))
    return rows


def held_by_others(rows: Sequence[Residual], wider: float = 1.0) -> float:
    """Return the share of values that lie within the interval of the other publications' values."""
    num_inside = 0
    for family in {row.family for row in rows}:
        other_ratios = [row.ratio for row in rows if row.family != family]
        low, high = interval_of(other_ratios, wider)
        num_inside += sum(low <= row.ratio <= high for row in rows if row.family == family)
    return num_inside / len(rows)


def widening_of(rows: Sequence[Residual]) -> float:
    """Return the least widening of quantiles that holds 80 % of the values of a publication left
    out; 1 for few publications.
    """
    for step in range(60):
        wider = 1 + step / 20
        if held_by_others(rows, wider) >= 0.8:
            return wider
    return 4.0


def write_errors() -> None:
    """Write the quantiles of each class into the planner's table."""
    lines = [
        "# Written by benchmarks/published_runs.py --write: 10 and 90 % quantiles of measured over "
        "planned values",
        "# by class, from runs and questions in view, with the program unnamed. speed: "
        "seconds; memory: bytes.",
        "# A class without a row has no published run.",
    ]
    for quantity in ("speed", "memory"):
        rows = residuals(quantity)
        for kind in dict.fromkeys(row.kind for row in rows):
            chosen = [row for row in rows if row.kind == kind]
            if len(chosen) < FEWEST_VALUES:
                continue
            ratios = [row.ratio for row in chosen]
            wider = 1.0
            low = min(ratios)
            high = max(ratios)
            if len(chosen) >= FEW_VALUES:
                wider = widening_of(chosen)
                low, high = interval_of(ratios, wider)
            lines += [
                "",
                f"[{quantity}.{kind}]",
                f"low = {min(low, 1):.3f}",
                f"high = {max(high, 1):.3f}",
            ]
            lines.append(f"runs = {len(chosen)}")
            print(
                f"{quantity:8} {kind:9} {low:.3f} to {high:.3f}, {len(chosen)} values, median "
                f"{statistics.median(ratios):.3f}, to the power of {wider:.2f}"
            )
    (DATA / "errors.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_runs() -> None:
    """Write the published runs that the planner prints beside its answers, by source: all rounds,
    and the facts of questions in view. Of equal jobs, the first is written.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    sources = {}

    def add(model: str, job: Estimate, source: str, facts: dict[str, float]) -> None:
        fields = {
            "parameters": job.architecture.num_parameters,
            "kind": job.kind,
            "precision": job.recipe.compute.name,
            "chip": job.chip.name if job.chip.name in CHIPS else "",
            "chips": job.num_chips,
            "length": job.sequence_length,
        }
        key = tuple(fields.values())
        if key not in rows:
            rows[key] = {"model": model, **fields, **facts}
            sources[key] = source

    for later in (False, True):
        for held_out in (False, True):
            for point in predict_all(load(held_out, later))[0]:
                facts = {"tokens_per_second": round(point.measured, 1)}
                if point.peak:
                    facts["memory_gb"] = round(point.peak / 1e9, 1)
                add(point.run.model, point.job, point.run.source, facts)
    for name in dict.fromkeys(answer.question["name"] for answer in asked()):
        answers = [answer for answer in asked() if answer.question["name"] == name]
        question = answers[0].question
        facts = {FACTS[answer.what]: round(answer.measured, 1) for answer in answers}
        model = question["ask"]["model"]
        if question["ask"].get("base", "bfloat16") != "bfloat16":
            model += f", {question['ask']['base']} base"
        add(model, answers[0].job, question["source"], facts)
    lines = [
        "# Written by benchmarks/published_runs.py --write: training runs that others measured and "
        "published, by source.",
        "# What all runs of a publication share stands above them.",
        "# tokens_per_second is that of a chip, memory_gb what the framework's allocator printed. "
        "Of equal jobs, one is here.",
    ]
    for source in dict.fromkeys(sources.values()):
        chosen = [row for key, row in rows.items() if sources[key] == source]
        shared = {"source": source}
        for name, value in chosen[0].items():
            if len(chosen) > 1 and all(row.get(name) == value for row in chosen):
                shared[name] = value
        lines += ["", "[[publications]]"]
        lines += [f"{name} = {_toml(value)}" for name, value in shared.items()]
        lines.append("runs = [")
        for row in chosen:
            own = [f"{name} = {_toml(value)}" for name, value in row.items() if name not in shared]
            lines.append(f"    {{ {', '.join(own)} }},")
        lines.append("]")
    (DATA / "runs.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    """Print every run and the summary, or write the error bar."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--held-out", action="store_true", help="what was held out")
    parser.add_argument(
        "--assumed",
        action="store_true",
        help="the software that the planner assumes, not the run's own",
    )
    parser.add_argument("--later", action="store_true", help="the second round of runs")
    parser.add_argument("--explain", metavar="NAME", help="the terms of runs whose name begins so")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the errors of the runs in view into the planner's table",
    )
    options = parser.parse_args()
    if options.write:
        write_errors()
        write_runs()
        return 0
    runs = load(options.held_out, options.later)
    if options.assumed:
        runs = [replace(run, speed="") for run in runs]
    points, left_out = predict_all(runs)
    for point in points:
        mark = " " if point.is_inside else "*"
        print(
            f"{point.name:48} {point.measured:9,.0f} {point.predicted:9,.0f} "
            f"{point.error:+7.1%}{mark}"
        )
        if options.explain and point.name.startswith(options.explain):
            for term in point.terms:
                print(f"    {term.group:13} {term.value:9.3f}  {term.text}")
    memory = report_memory(points)
    for line in left_out:
        print(f"left out: {line}")
    print(report(points))
    print(memory)
    print(report_search(points))
    for family in dict.fromkeys(map(family_of, points)):
        print(f"{family:14} {report([point for point in points if family_of(point) == family])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
