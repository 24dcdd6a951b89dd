"""What gradients that travel in 8 or 4 bits cost: in validation loss, in bytes, and in time.

Claim: a llama-1m whose gradients travel in 8 bits ends within 0.01 nats of one whose gradients travel in float32; what 4 bits
cost is reported. Ranks are processes with gloo. Each holds the whole model and a share of every batch, which is the harder case:
each rank's gradient is rounded, and the sum once more. Runs of one seed have the same first weights and batches, so that their
*paired* difference of final losses hides little behind the luck of a seed; beside the differences stands the mean with its
95 % interval by Student's t. Final: the mean of the last validations, whose own noise is larger than that of one.

Bytes are those of an element on the wire, relative to float32's; tests/distributed/test_compression.py counts them. A second
table times the packing of one vector beside what an addition of float32 takes.

Baseline: the reduction ``float32`` with the same seed.

Run: ``./dev bench compressed_gradients [--out FOLDER] [--seeds …] [--ranks N] [--quick]``. The trainings of a seed are kept under
``--out`` when all three have ended, and so is the second table; an interrupted run goes on with the seed where it was
(``_parts.py``). All of it takes about 3 minutes on 2 cores. ``--rounds`` is of the second table.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _parts import Part, add_out, complete, out_folder, show
from timing import Contender, Report, Row, exit_by, measure, parser

import narrowgauge as ng
from narrowgauge.analysis.comparison.intervals import interval
from narrowgauge.distributed.block_codes import BLOCK_CODES
from narrowgauge.spec.models import get_model
from narrowgauge.spec.sums import REDUCTIONS
from narrowgauge.trainer import language_model
from narrowgauge.trainer.data.dataset import Dataset, prepare_data

BASELINE, ROWS = "float32", ("float32", "compressed8", "compressed4")
MODEL, LR, BATCH = "llama-1m", 1e-3, 8
LAST_VALIDATIONS = 3
STEP_SECONDS, ROUND_SECONDS = 0.09, 0.6
"""That a step of a training and a round of the second table take."""


def train(name: str, seed: int, data: Dataset, steps: int, length: int) -> float:
    """Return the final validation loss in nats per token."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = language_model.build(MODEL, vocab_size=data.vocab_size, seed=seed)
    _, optimizer = ng.prepare(model, "float32", lr=LR, audit_every=0)
    reduction = ng.reduce_gradients_with(model, name, average=False, seed=seed)
    losses = []
    for step in range(steps):
        rate = LR * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        own = torch.from_numpy(data.batch(step, BATCH, length, seed))[rank::ranks]
        with reduction.micro_batch():
            (language_model.loss_sum(model, own, chunked=False) / (BATCH * length)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in [steps - 10 * back for back in range(LAST_VALIDATIONS)]:
            losses.append(validate(model, data, length))
    return statistics.fmean(losses)


@torch.no_grad()
def validate(model: Any, data: Dataset, length: int) -> float:
    """The mean loss over 32 batches, of which each rank takes some."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(2, dtype=torch.float64)
    for batch in list(data.valid_batches(BATCH, length, 32))[rank::ranks]:
        total += torch.tensor(
            [float(language_model.loss_sum(model, torch.from_numpy(batch), chunked=False)), BATCH * length]
        )
    dist.all_reduce(total)
    return float(total[0] / total[1])


def work(rank: int, ranks: int, place: str, seed: int, steps: int, length: int) -> None:
    """One rank: the trainings of a seed in turn; the first one writes what came out."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=ranks)
    data = prepare_data("stdlib", vocab_size=get_model(MODEL).vocab_size)
    found: dict[str, float] = {}
    for name in ROWS:
        found[name] = train(name, seed, data, steps, length)
        if rank == 0:
            show(f"{name}, seed {seed}: {found[name]:.4f} nats")
    if rank == 0:
        torch.save(found, f"{place}/found")
    dist.barrier()
    dist.destroy_process_group()


def trainings(ranks: int, seed: int, steps: int, length: int) -> dict[str, float]:
    """What :func:`train` gives for each reduction."""
    with tempfile.TemporaryDirectory() as place:
        prepare_data("stdlib", vocab_size=get_model(MODEL).vocab_size)  # into the cache
        arguments = (ranks, place, seed, steps, length)
        torch.multiprocessing.spawn(work, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
        found: dict[str, float] = torch.load(f"{place}/found")
    return found


def quality(found: Mapping[int, Mapping[str, float]]) -> list[Row]:
    """A row per reduction, from the trainings of each seed."""
    rows, seeds = [], list(found)
    for name in ROWS:
        differences = [found[seed][name] - found[seed][BASELINE] for seed in seeds]
        row: Row = {"reduction": name, "loss": statistics.fmean(found[seed][name] for seed in seeds)}
        row |= {f"seed {seed}": f"{difference:+.4f}" for seed, difference in zip(seeds, differences, strict=True)}
        row["difference"] = statistics.fmean(differences)
        if len(seeds) > 1 and name != BASELINE:
            mean, half = interval([differences])
            row |= {"95 %": f"± {half:.4f}", "within 0.01": "yes" if abs(mean) + half <= 0.01 else "no"}
        row["bytes"] = REDUCTIONS[name].bytes_per_element("float32") / 4
        rows.append(row)
    return rows


def packing(elements: int, rounds: int) -> list[Row]:
    """Encoding and decoding of one vector, in GB/s of float32."""
    x, total = torch.randn(elements), torch.zeros(elements)
    contenders = [Contender("add", lambda: torch.add(total, x))]
    for name, code in BLOCK_CODES.items():
        records = code.encode(x, 1)
        contenders.append(Contender(f"{name}: encode", lambda code=code: code.encode(x, 1)))
        contenders.append(
            Contender(f"{name}: decode and add", lambda code=code, records=records: code.add_decoded(total, records))
        )
    timings = measure(contenders, baseline="add", rounds=rounds)
    return [timing.row() | {"GB/s of float32": elements * 4e-9 / min(timing.seconds)} for timing in timings]


def parts(options: argparse.Namespace) -> tuple[list[Part], Part]:
    """A part for the trainings of each seed, and one for the second table."""
    steps, length = (12, 32) if options.quick else (options.steps, 128)
    settings = {"ranks": options.ranks, "steps": steps, "length": length}
    seconds = STEP_SECONDS * steps * len(ROWS)
    of_seeds = [
        Part(f"seed {seed}", settings, partial(trainings, options.ranks, seed, steps, length), seconds)
        for seed in options.seeds
    ]
    elements = 1 << (16 if options.quick else 22)
    sizes = {"elements": elements, "rounds": options.rounds}
    packed = Part("packing", sizes, partial(packing, elements, options.rounds), ROUND_SECONDS * options.rounds)
    return of_seeds, packed


def flags() -> argparse.ArgumentParser:
    """All flags."""
    made = parser(__doc__, rounds=15)
    add_out(made, "compressed-gradients")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--steps", type=int, default=200)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    options = flags().parse_args(arguments)
    report = Report("compressed gradients", options)
    if options.quick:
        options.seeds = options.seeds[:1]
    of_seeds, packed = parts(options)
    with out_folder(options, "compressed-gradients") as out:
        made = complete([*of_seeds, packed], out, report)
    size = "{ranks} ranks, {steps} steps of {batch} x {length} tokens".format(batch=BATCH, **of_seeds[0].settings)
    found = {seed: made[part.name] for seed, part in zip(options.seeds, of_seeds, strict=True)}
    report.add(f"{MODEL}, {size}; nats, beside {BASELINE}", quality(found))
    report.add(f"packing {packed.settings['elements']:,} gradients", made[packed.name])
    return report.end()


if __name__ == "__main__":
    exit_by(main)
