"""How far planned memory is from the memory that training takes: the peak of a step, in bytes that the allocator handed out.

Claim: within 3 % for every combination of model, recipe, batch, recomputation and ranks below.
Baseline: the sum of all allocations and frees that PyTorch's allocator reports from before the model is built, at its largest
during the third step of a run of this project's trainer, uncompiled, on the CPU. Buffers in which a CPU without bfloat16 widens
operands are subtracted (they are kept in one place, which is asked for their size). Nothing else is fitted: the driver's context,
communication buffers and fragmentation, which no CPU has, are left out of the plan.
Run: ``python benchmarks/planned_memory.py [--only TEXT]``; about a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from narrowgauge.optim import compilation
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.inputs.model_configs import architecture_of
from narrowgauge.planner.memory.rank_memory import FIXED, memory_terms
from narrowgauge.planner.terms import Terms
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 640, "vocab_size": 2048, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 8, "num_hidden_layers": 6}
QWEN = {**LLAMA, "model_type": "qwen3", "head_dim": 48}
GPT = {"model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 8, "n_positions": 512, "vocab_size": 2048}
MIXTURE = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
LARGE_WORDS = {**LLAMA, "vocab_size": 20_000, "num_hidden_layers": 2}
WIDE = {**LLAMA, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 3}


@dataclass(frozen=True)
class Combination:
    """One run: a model, a recipe, and how its batch is computed."""

    name: str
    model: dict[str, Any] = field(hash=False)
    recipe: str
    batch: int = 4
    length: int = 128
    micro_batches: int = 1
    recompute: bool = False
    ranks: int = 1


COMBINATIONS = (
    Combination("llama", LLAMA, "float32/float32"),
    Combination("llama, long", LLAMA, "float32/float32", 2, 384),
    Combination("llama, little batch", WIDE, "float32/float32", 1, 64),
    Combination("llama, little batch", WIDE, "bfloat16/word", 1, 64),
    Combination("llama", LLAMA, "bfloat16/word"),
    Combination("llama", LLAMA, "bfloat16/float32"),
    Combination("llama", LLAMA, "bfloat16/master", 8, 64),
    Combination("llama", LLAMA, "int8-row/compact"),
    Combination("llama", LLAMA, "float8-row/split"),
    Combination("tied, recomputed", TIED, "bfloat16/states8", recompute=True),
    Combination("tied, recomputed", TIED, "float32/float32", 8, 128, recompute=True),
    Combination("tied", TIED, "bfloat16/naive"),
    Combination("qwen3", QWEN, "bfloat16/word"),
    Combination("gpt2", GPT, "bfloat16/exact"),
    Combination("gpt2", GPT, "float32/float32", 8, 64),
    Combination("mixtral", MIXTURE, "float32/float32"),
    Combination("mixtral", MIXTURE, "bfloat16/word"),
    Combination("two micro-batches", LLAMA, "bfloat16/word", 8, 128, micro_batches=2),
    Combination("four micro-batches", WIDE, "float32/float32", 4, 64, micro_batches=4),
    Combination("large vocabulary", LARGE_WORDS, "float32/float32", 2, 128),
    Combination("large vocabulary", LARGE_WORDS, "bfloat16/word", 2, 128),
    Combination("two ranks", WIDE, "float32/float32", 8, 128, micro_batches=2, ranks=2),
    Combination("two ranks", WIDE, "bfloat16/word", 8, 128, micro_batches=2, ranks=2),
)


def planned(combination: Combination) -> Terms:
    """The plan's terms, without overhead."""
    c = combination
    local = c.micro_batches // c.ranks
    layout = Layout(
        shard=c.ranks,
        micro_batch=c.batch // c.micro_batches,
        micro_batches=local,
        recompute="full" if c.recompute else "none",
    )
    architecture = architecture_of(c.model, c.name)
    chunked = architecture.vocab_size >= 16_384
    return memory_terms(
        architecture, parse(c.recipe), layout, c.length, is_loss_chunked=chunked, fixed=dict.fromkeys(FIXED, 0.0)
    )


def peak_of_step(combination: Combination, folder: Path) -> int:
    """The largest sum of live allocations during the third step of a run, in bytes, without the buffers of emulation."""
    from narrowgauge.numerics.widening import SCRATCH
    from narrowgauge.trainer.data.dataset import Dataset
    from narrowgauge.trainer.session import build
    from narrowgauge.trainer.step import train_step

    c = combination
    warnings.simplefilter("ignore")
    compilation.compiler_missing = lambda: "this benchmark compiles nothing"  # a kernel allocates nothing of size
    config = TrainConfig(
        model=str(folder), recipe=parse(c.recipe), batch_size=c.batch, sequence_length=c.length, steps=10,
        gradient_accumulation_steps=c.micro_batches, activation_checkpointing=c.recompute, compile=False, audit_every=0,
    )  # fmt: skip
    words = c.model["vocab_size"]
    tokens = np.random.default_rng(0).integers(0, words, 100_000).astype(np.uint16)
    data = Dataset(folder, tokens, tokens[:1000], {"vocab_size": words, "end_of_text": 0, "request": {"held_out": 0.0}})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        session = build(config, folder, data)
        for step in range(3):
            with torch.profiler.record_function(f"step {step}"):
                train_step(session)
    events = list(profile.profiler.kineto_results.events())
    begin, end = next((e.start_ns(), e.end_ns()) for e in events if e.name() == "step 2")
    live = peak = 0
    for when, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        live += size
        if begin <= when <= end:
            peak = max(peak, live)
    return peak - sum(buffer.nbytes for buffer in SCRATCH.buffers.values())


def _one(rank: int, combination: Combination, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    if combination.ranks > 1:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(combination.ranks)
        )
        torch.distributed.init_process_group("gloo")
    (folder / f"peak-{rank}").write_text(str(peak_of_step(combination, folder)))
    if combination.ranks > 1:
        torch.distributed.destroy_process_group()


def measured(combination: Combination) -> int:
    """The peak of the worst rank; each combination in processes of its own."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as taken:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(combination.model))
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.close()
        mp.spawn(_one, (combination, folder, port), nprocs=combination.ranks)
        return max(int((folder / f"peak-{rank}").read_text()) for rank in range(combination.ranks))


def main() -> None:
    """Print a row per combination, and the mean and the worst error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="combinations whose name and recipe contain this")
    parser.add_argument("--terms", action="store_true", help="print the plan's terms")
    arguments = parser.parse_args()
    errors, inside = [], []
    for each in COMBINATIONS:
        if arguments.only not in f"{each.name} {each.recipe}":
            continue
        plan, peak = planned(each), measured(each)
        errors.append(plan.total / peak - 1)
        low, high = plan.interval
        inside.append(low <= peak <= high)
        shape = f"{each.batch} × {each.length}, {each.micro_batches} micro-batches, {each.ranks} ranks"
        print(
            f"{each.name:20} {each.recipe:18} {shape:38} {plan.total / 1e6:8.2f} {peak / 1e6:8.2f} MB "
            f"{errors[-1]:+7.2%}{' ' if inside[-1] else '*'}",
            flush=True,
        )
        for term in plan if arguments.terms else ():
            print(f"      {term.value / 1e6:8.2f}  {term.group}: {term.name} = {term.formula}")
    mean = sum(map(abs, errors)) / len(errors)
    print(
        f"mean {mean:.2%}, worst {max(map(abs, errors)):.2%}, within 3 %: {sum(abs(e) <= 0.03 for e in errors)} of "
        f"{len(errors)}, within the plan's interval: {sum(inside)}"
    )


if __name__ == "__main__":
    main()
