"""Options and plans made up of a few terms, for tests of what is said about them."""

from __future__ import annotations

from typing import Any

from narrowgauge.planner.inputs.clusters import cluster_of
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.inputs.model_configs import read_architecture
from narrowgauge.planner.plan_report import Plan
from narrowgauge.planner.question import Option, Question
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.spec.notation import parse

STEP = {"matmuls": 4.0, "attention": 0.5, "communication": 0.4, "optimizer": 0.1}


def made_option(
    recipe: str = "bfloat16/word",
    layout: Layout | None = None,
    *,
    memory: float = 40e9,
    step: dict[str, float] | None = None,
    **other: Any,
) -> Option:
    """An option on eight H100: so many bytes, of which a tenth is uncertain, and seconds by group, a tenth of them too."""
    groups = {"weights": 0.5, "optimizer": 0.25, "activations": 0.25}
    terms = [Term(name, "made up", memory * share, "a formula", low=0.9 * memory * share, high=1.1 * memory * share)
             for name, share in groups.items()]  # fmt: skip
    seconds = STEP if step is None else step
    timed = [
        Term(name, "made up", value, "a formula", "a paper", 0.9 * value, 1.1 * value)
        for name, value in seconds.items()
    ]
    given: dict[str, Any] = {
        "capacity_bytes": float(80 << 30),
        "sequence_length": 4096,
        "flops_per_token": 5e10,
        "peak_flops_per_second": 8 * 989e12,
        "cluster": "8 × H100-SXM5-80GB",
    }
    return Option(
        parse(recipe),
        layout or Layout(shard=8, micro_batches=16),
        Terms(tuple(terms)),
        step=Terms(tuple(timed)),
        **{**given, **other},
    )


def made_plan(*options: Option, model: str = "llama-8b", tokens: float | None = None) -> Plan:
    """A plan of these options, in their order."""
    shown = options or (made_option(),)
    clusters = tuple(cluster_of("H100-SXM", number) for number in sorted({8, *(option.num_chips for option in shown)}))
    return Plan(Question(read_architecture("llama-8b"), model, clusters, 4096, tokens), shown)
