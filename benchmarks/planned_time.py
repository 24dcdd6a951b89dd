"""The step that the planner expects of this machine, against the step that is trained.

Claim: on combinations of a model, a recipe, a batch, recomputation and one or two ranks, none of which it was calibrated with,
the planner's step is within 10 % of the trained one, for 16 combinations or more; and four times out of five the trained step is
within the planner's interval.

Baseline: the trained step itself, compiled, one thread a rank. What is compared is processor time, which other programs on the
machine change less than the clock's. A fixed piece of work is timed before and after each step, and a step counts relative to it:
a machine's speed drifts, and the planner predicts a machine, not a minute. Every combination is predicted with the shares of the
machine that were fitted to all others.

Run: ``./dev bench planned_time [--quick]``. ``--steps FILE`` keeps what was trained, or compares what a former run kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from _forked import group, in_processes
from timing import Report, Row, parser

from narrowgauge.planner.inputs.clusters import cluster_of
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.planner.inputs.model_configs import read_architecture
from narrowgauge.planner.measured.calibration import Fit, deviations, fit_shares, priors_of, processor, step_observation
from narrowgauge.planner.measured.launches import LaunchedJob, layout_of, planned_step
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.profiling.measurement import many_versions, training_session
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.step import train_step

WARM_UP = 2
PROMISED = 0.1
REFERENCE_SECONDS = 0.02


@dataclass(frozen=True)
class Combination:
    """What is trained.

    Args:
        model: a preset.
        recipe: its name.
        sequences: of a step, all ranks together.
        length: tokens in each.
        micro_batches: of a step, all ranks together.
        recompute: whether backward computes each layer again.
        ranks: processes, replicated or sharded.
        shard: what they share, as ``--shard``.
    """

    model: str
    recipe: str
    sequences: int
    length: int
    micro_batches: int = 1
    recompute: bool = False
    ranks: int = 1
    shard: str = "none"

    @property
    def name(self) -> str:
        """As a table prints it."""
        parts = [self.model, self.recipe, f"{self.sequences} × {self.length}"]
        parts += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        parts += ["recompute"] if self.recompute else []
        return ", ".join(parts + ([f"{self.ranks} ranks, shard {self.shard}"] if self.ranks > 1 else []))

    @property
    def config(self) -> TrainConfig:
        """The settings of its training."""
        return TrainConfig(
            model=self.model,
            recipe=parse(self.recipe),
            batch_size=self.sequences,
            sequence_length=self.length,
            gradient_accumulation_steps=self.micro_batches,
            activation_checkpointing=self.recompute,
            shard=self.shard if self.ranks > 1 else None,
        )


COMBINATIONS = (
    Combination("llama-1m", "float32/float32", 8, 128),
    Combination("llama-1m", "bfloat16/word", 8, 128),
    Combination("llama-1m", "bfloat16/word", 4, 256),
    Combination("llama-1m", "bfloat16/word", 8, 256, recompute=True),
    Combination("llama-1m", "float32/float32", 16, 64),
    Combination("llama-1m", "int8-row/word", 8, 128),
    Combination("llama-1m", "bfloat16/master", 16, 128, micro_batches=4),
    Combination("llama-8m", "float32/float32", 2, 256),
    Combination("llama-8m", "bfloat16/word", 2, 256),
    Combination("llama-8m", "bfloat16/master", 4, 256),
    Combination("llama-8m", "bfloat16/word", 4, 256, recompute=True),
    Combination("llama-8m", "float32/float32", 4, 256, recompute=True),
    Combination("llama-8m", "bfloat16/split", 2, 512),
    Combination("llama-8m", "float8-row/word", 2, 256),
    Combination("llama-8m", "bfloat16/compact", 4, 256, micro_batches=2),
    Combination("llama-35m", "bfloat16/word", 1, 256),
    Combination("llama-35m", "float32/float32", 1, 256),
    Combination("llama-35m", "bfloat16/master", 2, 256),
    Combination("llama-35m", "bfloat16/word", 2, 256, recompute=True),
    Combination("llama-35m", "int8-row/word", 1, 256),
    Combination("llama-1m", "float32/float32", 16, 128, 2, ranks=2),
    Combination("llama-1m", "bfloat16/word", 16, 128, 2, ranks=2, shard="full"),
    Combination("llama-8m", "float32/float32", 4, 256, 2, ranks=2),
    Combination("llama-8m", "bfloat16/word", 4, 256, 2, ranks=2, shard="full"),
    Combination("llama-8m", "bfloat16/master", 4, 256, 2, ranks=2),
    Combination("llama-35m", "bfloat16/word", 2, 256, 2, ranks=2),
)


def trained(combination: Combination, rounds: int) -> Row:
    """Steps of a combination; on several ranks every rank calls it."""
    torch.set_num_threads(1)
    with many_versions(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        session = training_session(combination.config)
        for _ in range(WARM_UP):
            train_step(session)
        seconds = [_step(session) for _ in range(rounds)]
    names = ("cpu_seconds", "wall_seconds", "reference_seconds")
    return {**asdict(combination), **dict(zip(names, map(list, zip(*seconds, strict=True)), strict=True))}


def _step(session: Session) -> tuple[float, float, float]:
    """Processor time of a step, the mean of the ranks; the clock's; and processor time of the reference beside it."""
    before = _reference()
    wall, cpu = time.perf_counter(), time.process_time()
    train_step(session)
    spent = [time.process_time() - cpu, (before + _reference()) / 2]
    wall = time.perf_counter() - wall
    of_all = torch.tensor(spent, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(of_all)
        of_all /= dist.get_world_size()
    return of_all[0].item(), wall, of_all[1].item()


def _reference() -> float:
    """Processor time of a fixed piece of work: matmuls, and streams through memory."""
    began = time.process_time()
    for _ in range(4):
        torch.mm(_LEFT, _LEFT)
        _STREAM.mul_(1.0)
    return time.process_time() - began


_LEFT, _STREAM = torch.ones(384, 384), torch.ones(1 << 21)


def seconds_of(row: Row) -> float:
    """A step's processor time on a machine as fast as when the reference took :data:`REFERENCE_SECONDS`."""
    # Sums, since the reference is short and a ratio of two times is noisier than the times; the first reference is cold.
    return REFERENCE_SECONDS * sum(row["cpu_seconds"][1:]) / sum(row["reference_seconds"][1:])


def _on_rank(rank: int, folder: Path, combination: Combination, rounds: int) -> Row:
    with group(rank, folder, combination.ranks) if combination.ranks > 1 else nullcontext():
        return trained(combination, rounds)


def steps_of(combinations: Sequence[Combination], rounds: int, file: Path | None) -> list[Row]:
    """Steps of all combinations; those that a file holds are not trained again, and it keeps those that are."""
    rows: list[Row] = json.loads(file.read_text()) if file is not None and file.exists() else []
    kept = {combination_of(row): row for row in rows}
    for combination in combinations:
        if combination not in kept:
            began = time.perf_counter()
            # In processes of its own: no combination finds what another one has compiled or left in memory.
            kept[combination] = in_processes(_on_rank, combination.ranks, combination, rounds)
            print(f"{combination.name}: trained in {time.perf_counter() - began:.0f} s", flush=True)
            if file is not None:
                file.write_text(json.dumps(list(kept.values())))
    return [kept[combination] for combination in combinations]


def combination_of(row: Row) -> Combination:
    """What a row was trained with."""
    return Combination(**{name: row[name] for name in Combination.__dataclass_fields__})


def launch_of(row: Row) -> LaunchedJob:
    """A combination as the planner sees it, with its measured step."""
    combination = combination_of(row)
    settings = {
        "batch_size": combination.sequences,
        "gradient_accumulation_steps": combination.micro_batches,
        "activation_checkpointing": combination.recompute,
        "shard": combination.shard,
    }
    chip, ranks = processor(torch.backends.cpu.get_cpu_capability(), 1), combination.ranks
    layout = layout_of(settings, ranks, combination.name)
    job = Job(
        read_architecture(combination.model),
        parse(combination.recipe),
        layout,
        cluster_of(chip, ranks, ranks),
        combination.length,
    )
    return LaunchedJob(combination.name, job, Terms((Term("step", "measured step", seconds_of(row), ""),)))


def held_out(launches: Sequence[LaunchedJob]) -> list[Row]:
    """Each launch beside what shares fitted to all others say of it."""
    chip = launches[0].cluster.groups[0].chip
    published, seen = priors_of(chip), [step_observation(launch) for launch in launches]
    rows = []
    for place, launch in enumerate(launches):
        others = [*seen[:place], *seen[place + 1 :]]
        rows.append(_beside(launch, fit_shares(others, published, deviations(published, chip), "this benchmark")))
    return rows


def _beside(launch: LaunchedJob, fit: Fit) -> Row:
    assert launch.measured is not None
    steady = planned_step(launch.job, fit.shares)
    low, high = steady.interval
    trained = launch.measured.total
    return {
        "": launch.name,
        "trained ms": 1e3 * trained,
        "planned ms": 1e3 * steady.total,
        "error": steady.total / trained - 1,
        "low ms": 1e3 * low,
        "high ms": 1e3 * high,
        "inside": int(low <= trained <= high),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, fit, and compare."""
    options = flags().parse_args(arguments)
    report = Report("planned_time", options)
    rows = steps_of(COMBINATIONS[:4] if options.quick else COMBINATIONS, options.rounds, options.steps)
    report.add("trained steps", [_line(row) for row in rows])
    found = held_out([launch_of(row) for row in rows])
    report.add("planned, with shares fitted to all others", found)
    errors = [abs(row["error"]) for row in found]
    within, inside = sum(error <= PROMISED for error in errors), sum(row["inside"] for row in found)
    said = f"mean {statistics.mean(errors):.1%}, median {statistics.median(errors):.1%}, worst {max(errors):.1%}"
    report.note(f"{within} of {len(errors)} within {PROMISED:.0%}; {said}; {inside} within the interval")
    return report.end()


def _line(row: Row) -> Row:
    cpu, wall = (statistics.median(row[name]) for name in ("cpu_seconds", "wall_seconds"))
    low, _, high = statistics.quantiles(row["cpu_seconds"], n=4, method="inclusive")
    return {
        "": combination_of(row).name,
        "ms": 1e3 * seconds_of(row),
        "CPU ms": 1e3 * cpu,
        "spread": f"{(high - low) / cpu:.1%}",
        "clock ms": 1e3 * wall,
    }


def flags() -> argparse.ArgumentParser:
    """The benchmark's flags."""
    found = parser(__doc__, rounds=11)
    found.add_argument("--steps", type=Path, metavar="FILE", help="read the trained steps there, or write them")
    return found


if __name__ == "__main__":
    sys.exit(main())
