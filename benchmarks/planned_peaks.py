"""Peak memory that the planner predicts for training runs that others measured and published (torchtitan's and torchao's tables).

Claim: mean and worst error as printed, and the share of runs whose peak lies within the interval that the planner states.
Baseline: the peak that PyTorch's allocator reserved on the fullest rank, as published. It leaves out the driver's context and
NCCL's buffers, so the plan does here; fragmentation and the workspaces it includes.

These runs differ from the planner's own recipes in what their source code says, and only that is set here: FSDP2 keeps the
float32 weight alone, gathers it in bfloat16 and sums gradients in float32; the whole logits go through cross entropy in float32;
``selective`` recomputation per operator keeps the layer's input, the results of every second matmul and the attention's
(torchtitan, ``_apply_op_sac``); torchao's float8 linears keep their bfloat16 inputs. Compiled layers are planned as fused ones.

The second round (``--later``) has BLOOM and the trials before it: Megatron-DeepSpeed's pipelines without sequence parallelism,
whose memory is what the GPU's own tool shows, context and NCCL's buffers included, so nothing is left out of the plan.

Run: ``python benchmarks/planned_peaks.py [--later] [--held-out] [--terms]``; about a second, no GPU.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import NamedTuple

from _published import Run, load
from planned_published import layout_of

from narrowgauge.planner.inputs.architectures import Architecture
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.inputs.model_configs import architecture_of
from narrowgauge.planner.memory.activations import Kernels
from narrowgauge.planner.memory.rank_memory import memory_terms
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.spec.notation import parse

GIB = 2**30
RECIPE = parse("bfloat16/master")
# Of the driver and of NCCL, which the allocator does not know.
OUTSIDE = {"context": 0.0, "communication buffers": 0.0}
_MORE_GRADIENT = 2.0  # bytes a parameter: float32 gradients instead of bfloat16 ones


class Peak(NamedTuple):
    """One run.

    Attributes:
        name: of the run.
        measured: GiB.
        terms: planned, in bytes.
    """

    name: str
    measured: float
    terms: Terms

    @property
    def planned(self) -> float:
        """GiB."""
        return self.terms.total / GIB

    @property
    def error(self) -> float:
        """Of what is planned, relative to what was measured."""
        return self.planned / self.measured - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measured peak lies within the interval."""
        low, high = self.terms.interval
        return low <= self.measured * GIB <= high


def kept_per_operator(a: Architecture) -> float:
    """Bytes per token and layer that recomputation per operator keeps: the input, every second matmul's result, the attention's.

    Source: pytorch/torchtitan, torchtitan/models/llama3/infra/parallelize.py, ``_apply_op_sac``: of wq, wk, wv, wo, w1, w3,
    w2 the first, third, fifth and seventh, and scaled_dot_product_attention with its statistic.
    """
    heads = a.num_heads * a.head_dim
    every_second = heads + a.num_kv_heads * a.head_dim + a.intermediate_size + a.hidden_size
    return 2.0 * (a.hidden_size + every_second + heads) + 4.0 * a.num_heads


def planned(run: Run) -> Terms:
    """The plan of a run's fullest rank.

    Raises:
        KeyError: the source does not state enough.
    """
    architecture, layout, length = architecture_of(run.config, run.model), _layout(run), run.step["sequence_length"]
    is_per_operator = run.step.get("recompute_detail") == "per operator"
    layout = replace(layout, accumulation_dtype="bfloat16")
    again = replace(layout, recompute="full") if is_per_operator else layout
    kernels: Kernels = "fused" if run.step.get("compiled") else "eager"
    terms = memory_terms(
        architecture,
        RECIPE,
        again,
        length,
        kernels=kernels,
        is_loss_chunked=False,
        fixed=OUTSIDE,
    )
    return Terms(tuple(_as_published(term, terms, architecture, again, is_per_operator) for term in terms))


def planned_whole(run: Run) -> Terms:
    """The plan of a run of Megatron-DeepSpeed, of its fullest rank, with all overheads."""
    architecture, layout = architecture_of(run.config, run.model), layout_of(run)
    return memory_terms(architecture, RECIPE, layout, run.step["sequence_length"], attention="eager")


def _layout(run: Run) -> Layout:
    layout = layout_of(run)
    if layout.pipeline == 1:
        return layout
    # Local batches are divided into as many micro-batches as there are stages, where nothing is said.
    per_replica = run.step["global_batch"] // layout.num_replicas
    return replace(layout, micro_batch=max(1, per_replica // layout.pipeline), micro_batches=layout.pipeline)


def _as_published(term: Term, terms: Terms, a: Architecture, layout: Layout, is_per_operator: bool) -> Term:
    """A term with what the runs' source code does otherwise."""
    factor = 1.0
    if term.name == "weights":  # the bfloat16 copy exists only where it is gathered
        factor = 0.0
    elif term.name.startswith("gradients of") or term.name == "gradients":
        factor = (2 + _MORE_GRADIENT) / 2
    elif term.name == "inputs of the layers" and is_per_operator:
        factor = kept_per_operator(a) / (2 * a.hidden_size)
    low, high = term.interval
    return replace(term, value=term.value * factor, low=low * factor, high=high * factor)


def report(peaks: list[Peak]) -> str:
    """Mean and worst error, and the share of runs within their intervals."""
    errors = [peak.error for peak in peaks]
    sizes = [abs(error) for error in errors]
    worst = max(errors, key=abs)
    inside = statistics.fmean(peak.is_inside for peak in peaks)
    return (
        f"{len(peaks)} runs: mean error {statistics.fmean(sizes):.1%}, median {statistics.median(sizes):.1%}, "
        f"bias {statistics.fmean(errors):+.1%}, worst {worst:+.1%}; {inside:.0%} within their interval"
    )


def peaks_of(runs: list[Run]) -> list[Peak]:
    """The runs that published a peak."""
    reserved = [
        Peak(run.name, run.measured["peak_memory_gib"], planned(run))
        for run in runs
        if "peak_memory_gib" in run.measured
    ]
    shown = [
        Peak(run.name, run.measured["peak_memory_gb"] * 1e9 / GIB, planned_whole(run))
        for run in runs
        if "peak_memory_gb" in run.measured
    ]
    return [*reserved, *shown]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--held-out", action="store_true", help="what was set aside")
    parser.add_argument("--later", action="store_true", help="the second round of runs")
    parser.add_argument("--terms", action="store_true", help="the terms of every run")
    arguments = parser.parse_args()
    peaks = peaks_of(load(arguments.held_out, arguments.later))
    for peak in peaks:
        low, high = (end / GIB for end in peak.terms.interval)
        mark = " " if peak.is_inside else "*"
        print(
            f"{peak.name:36} {peak.measured:6.1f} {peak.planned:6.1f} [{low:5.1f} {high:5.1f}] GiB {peak.error:+7.1%}{mark}"
        )
        for term in peak.terms if arguments.terms else ():
            print(f"    {term.group:12} {term.name:36} {term.value / GIB:6.2f}")
    print(report(peaks))


if __name__ == "__main__":
    main()
