"""What other planners say of the published training runs: step time and memory, each beside what was measured.

Claim: none of ours; these are the errors to beat. Each tool is a small function with the formula of its own source, so that the
comparison runs offline; Calculon, whose model does not fit in a function, is a table of what its program printed.
Baseline: the measured value of each run in ``published_runs.toml``; the held-out third only with ``--held-out``, once at the end.
Run: ``python benchmarks/other_planners.py [--runs] [--held-out]``.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable

from _published import Run, load, measured_step_seconds, shape

GIB = 2**30
# Peak 16-bit TFLOP/s, HBM GB/s, GB/s within and between nodes: llm_analysis/gpu_configs/{a100-sxm-80gb,...}.json.
LLM_ANALYSIS_CHIPS = {
    "A100-SXM4-80GB": (312, 2039, 300, 200),
    "A100-SXM4-40GB": (312, 1555, 300, 200),
    "H100-SXM5-80GB": (989, 3350, 450, 400),
}
FLOPS_EFFICIENCY, HBM_EFFICIENCY = 0.5, 0.9  # what its README advises where nothing was profiled


def accelerate_bytes(parameters: int, precision: str = "bfloat16") -> int:
    """``accelerate estimate-memory``, column "Training using Adam", for the whole model, batch and shards unasked.

    The largest of four numbers where their sum is needed: 8 bytes a parameter in 16 bits, 16 in float32.

    Source: huggingface/accelerate, src/accelerate/commands/estimate.py, ``estimate_training_usage`` and ``estimate_command``.
    """
    whole = 4 * parameters
    if precision == "float32":
        return max(whole, whole, 2 * whole, 4 * whole)
    return max(whole, whole + whole // 2, 2 * whole, 2 * whole)


def megatron_state_bytes(run: Run) -> float:
    """Weights, gradients and optimizer states of the fullest rank in Megatron-LM's report: 18 or 6 + 12/data bytes a parameter.

    Source: NVIDIA/Megatron-LM, megatron/training/theoretical_memory_usage.py, ``compute_weight_and_optimizer_memory``, dense.
    """
    s, t, p = shape(run), run.layout["tensor"], run.layout["pipeline"]
    embedding = s.hidden * s.vocabulary
    norm = (2 if s.biases else 1) * s.hidden
    split = (s.matmul_parameters / p + embedding * (2 if not s.tied and p == 1 else 1)) / t
    replicated = (2 * norm * s.layers + norm) / p
    distributed = run.layout.get("shard", 0) > 0
    return (split + replicated) * (6 + 12 / run.layout["data"] if distributed else 18)


def megatron_activation_bytes(run: Run) -> float:
    """Activations of the first stage in Megatron-LM's report: selective recompute with sequence parallelism, or neither.

    Source: same file, ``compute_activation_memory`` and ``compute_activation_memory_without_sp``.
    """
    s, layout, step = shape(run), run.layout, run.step
    t, p, v = layout["tensor"], layout["pipeline"], layout.get("interleaving")
    tokens = step["sequence_length"] * step["micro_batch"]
    shared = bool(layout.get("sequence_parallel")) and step.get("recompute") == "selective"
    per_layer = tokens * s.hidden * (18 + 4 * s.intermediate / s.hidden if shared else 10 + 24 / t)
    total = per_layer * s.layers + 8 * tokens * p + tokens * s.hidden * p
    if v:
        total *= 1 + (p - 1) / (p * v)
    elif p > 1:
        total *= min(1.0, micro_batches(run) / p)
    if not shared:
        if p == 1:
            total += 2 * tokens * (s.vocabulary / t + s.hidden)
        return 1.05 * total
    if p == 1:
        total += 4 * tokens * s.hidden * (1 + s.vocabulary / s.hidden)
    return total / t


def megatron_bytes(run: Run) -> float:
    """Megatron-LM's ``report_theoretical_memory``: states and activations. It does not know FSDP's sharded weights."""
    return megatron_state_bytes(run) + megatron_activation_bytes(run)


def micro_batches(run: Run) -> int:
    """Micro batches that a replica goes through in a step, rounded up."""
    return math.ceil(run.step["global_batch"] / run.layout["data"] / run.step.get("micro_batch", 1))


def llm_analysis_state_bytes(run: Run) -> float:
    """Weights in 16 bits, gradients in 32, float32 copy and moments, each divided from its ZeRO stage on.

    Source: cli99/llm-analysis, llm_analysis/analysis.py, ``LLMAnalysis.training``. It takes every head as tied.
    """
    s, layout = shape(run), run.layout
    stage = layout.get("shard", 0)
    held = s.matmul_parameters / s.layers * (s.layers // layout["pipeline"]) + s.hidden * s.vocabulary
    held /= layout["tensor"]
    sizes = ((2, 3), (4, 2), (12, 1))  # bytes, first stage that divides them
    return sum(held * size / (layout["data"] if stage >= first else 1) for size, first in sizes)


def llm_analysis_step_seconds(run: Run) -> float | None:
    """llm-analysis's time of a step at its advised efficiencies; None for chips that it has no file of.

    Two things in it are kept as they are: the recomputed attention core is multiplied by the number of layers twice, and a layer
    takes at least the time to gather its weights over the data ranks, sharded or not. It has no pipeline bubble and no gradient
    reduction. A micro batch that is not published counts as 1.

    Source: cli99/llm-analysis, llm_analysis/analysis.py, ``get_latency_fwd_per_layer``, ``get_latency_fwd`` and ``training``.
    """
    chip = LLM_ANALYSIS_CHIPS.get(run.machine["chip"])
    if chip is None or run.layout.get("context", 1) > 1:
        return None
    s, step, layout = shape(run), run.step, run.layout
    t, p, d, length = layout["tensor"], layout["pipeline"], layout["data"], step["sequence_length"]
    tokens, hbm = step.get("micro_batch", 1) * length, chip[1] * 1e9 * HBM_EFFICIENCY
    rate, layers = chip[0] * 1e12 * FLOPS_EFFICIENCY, s.layers // p
    reduction = max(4 * tokens * s.hidden * (t - 1) / t / (chip[2] * 1e9), 8e-6) if t > 1 else 0.0
    core = 4 * tokens * length * s.hidden
    matmuls = (2 * tokens * s.matmul_parameters / s.layers + core) / t / rate
    norms = 2 * 4 * tokens * s.hidden / (t if layout.get("sequence_parallel") else 1) / hbm
    link = chip[2] if d * t <= 8 else chip[3]
    gather = (2 * s.matmul_parameters / s.layers + 4 * s.hidden) * (d - 1) / d / (link * 1e9)
    forward = layers * max(matmuls + norms + 2 * reduction, gather)
    forward += 2 * s.vocabulary * s.hidden / hbm + reduction + 2 * tokens * s.vocabulary * s.hidden / t / p / rate
    again = {"full": layers * (matmuls + norms), "selective": layers * s.layers * core / t / p / rate}
    recompute = again.get(step.get("recompute", "none"), 0.0)
    return (3 * forward + recompute) * micro_batches(run) + llm_analysis_state_bytes(run) / hbm


# Calculon (calculon-ai/calculon at caa4b11): seconds of a step as its program printed them, with systems/a100_80g.json and, for
# Megatron-Core, systems/h100_80g_nvl8.json. The runs named megatron-2022 without data parallelism are its own validation points
# (validation/seqsel/tab5); the rest are the same program with that run's layout. Where the source names no micro batch or
# interleaving it is 1, and no recompute on an H100 is "attn_only" (it has no flash attention). Overlap of the data-parallel
# communication and the sharded optimizer are on for Megatron-Core and off before.
CALCULON_STEP_SECONDS = {
    "megatron-2022-megatron-22b-full": 1.3956,
    "megatron-2022-megatron-22b-selective": 1.1367,
    "megatron-2022-gpt3-175b-full": 18.0288,
    "megatron-2022-gpt3-175b-selective": 13.6381,
    "megatron-2022-megatron-530b-full": 49.8926,
    "megatron-2022-megatron-530b-selective": 34.4728,
    "megatron-2022-megatron-1t-full": 90.0809,
    "megatron-2022-megatron-1t-selective": 66.0407,
    "megatron-2022-megatron-530b-selective-dp8": 34.6406,
    "megatron-2022-megatron-530b-full-dp8": 50.0604,
    "megatron-2021-1.7b": 2.8985,
    "megatron-2021-3.6b": 3.1998,
    "megatron-2021-7.5b": 3.4167,
    "megatron-2021-18b": 8.9239,
    "megatron-2021-39b": 13.6342,
    "megatron-2021-76b": 14.3045,
    "megatron-2021-145b": 22.2275,
    "megatron-2021-310b": 32.9483,
    "megatron-2021-530b": 50.0604,
    "megatron-2021-1t": 90.2558,
    "megatron-2021-ptd-gpt3-175b-384": 69.8786,
    "megatron-2021-ptd-gpt3-175b-768": 35.9977,
    "megatron-2021-ptd-gpt3-175b-1536": 19.0572,
    "megatron-2021-ptd-megatron-530b-560": 180.4552,
    "megatron-2021-ptd-megatron-530b-1120": 92.974,
    "megatron-2021-ptd-megatron-530b-2240": 49.2334,
    "mt-nlg-530b-2240": 42.9847,
    "mt-nlg-530b-2800": 35.4863,
    "mt-nlg-530b-3360": 30.4874,
    "mcore-h100-1.7b": 0.7415,
    "mcore-h100-7.1b": 1.3881,
    "mcore-h100-16b": 1.4843,
    "mcore-h100-32b": 1.6854,
    "mcore-h100-70b": 3.6489,
    "mcore-h100-119b": 5.4584,
    "mcore-h100-177b": 7.2729,
    "mcore-h100-314b": 11.0917,
    "mcore-h100-462b": 15.4486,
    "mcore-h100-177b-strong-96": 140.9095,
    "mcore-h100-177b-strong-4608": 4.3678,
}


def calculon_step_seconds(run: Run) -> float | None:
    """Calculon's time of a step; None where it was not run: it knows no FSDP, context parallelism or grouped-query attention."""
    return CALCULON_STEP_SECONDS.get(run.name)


def dense(runs: Iterable[Run]) -> list[Run]:
    """The 16-bit runs of dense models whose layout and batch are published: what these tools can be asked about."""
    kinds, precisions = ("llama", "gpt2", "mpt"), ("bfloat16", "float16", None)
    asked = [run for run in runs if run.layout and "global_batch" in run.step]
    return [run for run in asked if run.config["model_type"] in kinds and run.step.get("precision") in precisions]


def errors(runs: Iterable[Run], predict: Callable[[Run], float | None]) -> dict[str, float]:
    """Predicted step time relative to the measured one, less 1, by run; runs without a prediction are left out."""
    found = {}
    for run in runs:
        seconds = predict(run)
        if seconds is not None:
            found[run.name] = seconds / measured_step_seconds(run) - 1
    return found


STEP_TIME: dict[str, Callable[[Run], float | None]] = {
    "calculon": calculon_step_seconds,
    "llm-analysis": llm_analysis_step_seconds,
}


def print_step_times(runs: list[Run], each: bool) -> None:
    """Mean and worst error of the step time, by tool and by family of runs."""
    print(f"{'step time':<14}{'family':<16}{'runs':>5}{'mean':>9}{'worst':>9}")
    for tool, predict in STEP_TIME.items():
        found = errors(runs, predict)
        families = sorted({name.split("-")[0] for name in found})
        groups = [("all", list(found))] + [
            (family, [n for n in found if n.split("-")[0] == family]) for family in families
        ]
        for family, names in groups:
            sizes = [abs(found[name]) for name in names]
            print(f"{tool:<14}{family:<16}{len(names):>5}{statistics.mean(sizes):>9.1%}{max(sizes):>9.1%}")
        if each:
            for name, error in found.items():
                print(f"{'':<14}{name:<50}{error:>+9.1%}")


def print_memory(runs: list[Run]) -> None:
    """Peak memory of the runs that published it, and what each tool would have said of a chip."""
    print(f"\n{'peak memory, GiB a chip':<40}{'measured':>9}{'accelerate / chips':>20}{'Megatron-LM':>13}")
    for run in runs:
        if "peak_memory_gib" in run.measured and "micro_batch" in run.step and run.layout.get("context", 1) == 1:
            adam = accelerate_bytes(shape(run).parameters) / run.machine["chips"] / GIB
            megatron = megatron_bytes(run) / GIB
            print(f"{run.name:<40}{run.measured['peak_memory_gib']:>9.1f}{adam:>20.1f}{megatron:>13.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", action="store_true", help="every run's error, not only the mean and the worst")
    parser.add_argument("--held-out", action="store_true", help="the third that is set aside, instead of the rest")
    arguments = parser.parse_args()
    runs = dense(load(held_out=arguments.held_out))
    print_step_times(runs, arguments.runs)
    print_memory(runs)


if __name__ == "__main__":
    main()
