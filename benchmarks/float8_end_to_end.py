"""Measure where training in 8 bits fails: weights, matmuls and sums of gradients in float8, one after another and together.

Claim: none. Each row's cost in validation loss is reported, with the first step at which a run raised an alarm. A llama-1m is
trained for 400 steps at a third of its usual learning rate, where pairs of harmless rows of the board (``board.py``) differ
least, and beta2 0.95. A batch is 64 sequences of 32 tokens, so that up to 64 micro-batches are summed. ``float8_e5m2`` rounds
the sum after every micro-batch, with a scale for each tensor as FP8-LM's gradients have; ``-stochastic`` rounds it
stochastically. Runs of one seed have the same first weights and batches.

Baseline: ``bfloat16/word`` with sums in float32, and the same seed.

Run: ``./dev bench float8_end_to_end [--out FOLDER] [--seeds …] [--quick]``. Finished runs are kept under ``--out``. One seed
takes about 40 minutes on one core. ``--rounds`` has no effect.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _parts import Part, add_out, complete, out_folder
from board import NEAREST8, SETTINGS
from timing import Report, Row, exit_by, parser

from narrowgauge.analysis.comparison.intervals import interval
from narrowgauge.runs.record import read_run
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.loop import train

SETTING, STEPS, BATCH, TOKENS, BETA2 = SETTINGS["llama-1m"], 400, 64, 32, 0.95
NEAREST, STOCHASTIC = "float8_e5m2", "float8_e5m2-stochastic"


class Case(NamedTuple):
    """A recipe, the format of its sums of gradients, and the micro-batches that are summed."""

    recipe: str
    sums: str
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.recipe}, sums of {self.micro_batches} in {self.sums}"


BASELINE = Case("bfloat16/word", "float32", 4)
NEAREST_WEIGHTS = NEAREST8.removeprefix("bfloat16/")
CASES = (
    BASELINE,
    *(Case("bfloat16/word", sums, number) for number in (64, 16, 4) for sums in (NEAREST, STOCHASTIC)),
    Case("bfloat16/weight8", "float32", 4),
    Case(f"bfloat16/{NEAREST_WEIGHTS}", "float32", 4),
    Case("float8-row/weight8", STOCHASTIC, 16),
    Case(f"float8-row/{NEAREST_WEIGHTS}", NEAREST, 16),
)


def trained(case: Case, seed: int, steps: int) -> dict[str, Any]:
    """Train once. Return the last validation loss in nats, and the alarms: step and name of each."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            model=SETTING.model,
            steps=steps,
            batch_size=BATCH,
            sequence_length=TOKENS,
            eval_batches=SETTING.eval_batches,
            threads=1,
            compile=False,
            recipe=parse(case.recipe),
            lr=SETTING.lr / 3,
            min_lr_ratio=3 * SETTING.final_lr / SETTING.lr,
            beta2=BETA2,
            seed=seed,
            out=str(Path(folder, "run")),
            gradient_accumulation_steps=case.micro_batches,
            accumulation_dtype=case.sums,
        )
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(config)
        run = read_run(config.out)
        alarms = [[int(event["step"]), str(event["detector"])] for event in run.events if event.get("detector")]
        assert run.summary is not None
        return {"loss": float(run.summary["val_loss"]), "alarms": alarms}


def table(results: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> list[Row]:
    """Return a row for each case that has a result: loss, its difference from the baseline, and the first alarm."""
    rows: list[Row] = []
    for case in CASES:
        runs = [results[part_name(case, seed)] for seed in seeds]
        costs = [
            run["loss"] - results[part_name(BASELINE, seed)]["loss"] for run, seed in zip(runs, seeds, strict=True)
        ]
        mean, half = interval([costs])
        alarms = [alarm for run in runs for alarm in run["alarms"]]
        row: Row = {"case": str(case), "loss": statistics.fmean(run["loss"] for run in runs)}
        row |= {"less baseline": f"{mean:+.4f}" + (f" ± {half:.4f}" if len(seeds) > 1 else "")}
        row |= {"first alarm": "step {} ({})".format(*min(alarms)) if alarms else "none"}
        rows.append(row)
    return rows


def part_name(case: Case, seed: int) -> str:
    return f"{case}, seed {seed}"


def parts(options: argparse.Namespace) -> list[Part]:
    """Return a part for each run."""
    steps = 6 if options.quick else STEPS
    settings = {**vars(SETTING), "batch_size": BATCH, "sequence_length": TOKENS, "steps": steps, "beta2": BETA2}
    return [
        Part(
            part_name(case, seed),
            settings,
            partial(trained, case, seed, steps),
            (0.3 + 0.006 * case.micro_batches) * steps,
        )
        for seed in options.seeds
        for case in CASES
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    flags = parser(__doc__, rounds=1)
    add_out(flags, "float8-end-to-end", of="finished runs")
    flags.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = flags.parse_args(arguments)
    torch.set_num_threads(1)
    report = Report("float8, end to end", options)
    with out_folder(options, "float8-end-to-end") as out:
        results = complete(parts(options), out, report)
    report.add(f"llama-1m, {BATCH} × {TOKENS} tokens; nats", table(results, options.seeds))
    return report.end()


if __name__ == "__main__":
    exit_by(main)
