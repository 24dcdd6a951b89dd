"""What it costs in validation loss to sum the gradients of micro-batches in 8 bits.

Claim: none; what each format costs is reported, with the first step at which a run says something of it. A llama-1m is trained
in the setting of the board (``board.py``) at its usual learning rate and beta2 0.95 over ``word``, with batches of 16 sequences
in 4 and in 16 micro-batches. The gradient that a step holds is the sum in one of the formats of
``narrowgauge show accumulations``: ``float8_e5m2`` has a scale for each tensor, as FP8-LM's gradients do, and rounds to the
nearest; ``float8_e5m2-stochastic`` rounds stochastically. Runs of one seed have the same first weights and batches.

Baseline: sums in float32, with the same seed and as many micro-batches.

Run: ``./dev bench gradient_formats [--out FOLDER] [--seeds …] [--quick]``. Each run is kept under ``--out``, and one that was
interrupted is made again (``_parts.py``). All of it takes about 80 minutes on one core. ``--rounds`` has no effect.
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
from typing import Any

import torch
from _parts import Part, add_out, complete, out_folder
from board import SETTINGS
from timing import Report, Row, exit_by, parser

from narrowgauge.analysis.comparison.intervals import interval
from narrowgauge.runs.record import read_run
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.loop import train

BASELINE, FORMATS = "float32", ("float32", "float8_e5m2", "float8_e5m2-stochastic")
MICRO_BATCHES = (4, 16)
SETTING, BATCH, BETA2 = SETTINGS["llama-1m"], 16, 0.95
STEP_SECONDS = 0.35
"""That a step takes on one core."""


def trained(sums: str, micro_batches: int, seed: int, steps: int) -> dict[str, Any]:
    """One run: its last validation loss in nats, and the events that speak of its sums, by step."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            model=SETTING.model,
            steps=steps,
            batch_size=BATCH,
            sequence_length=SETTING.sequence_length,
            eval_batches=SETTING.eval_batches,
            threads=1,
            compile=False,
            recipe=parse("bfloat16/word"),
            lr=SETTING.lr,
            min_lr_ratio=SETTING.final_lr / SETTING.lr,
            beta2=BETA2,
            seed=seed,
            out=str(Path(folder, "run")),
            gradient_accumulation_steps=micro_batches,
            accumulation_dtype=sums,
        )
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(config)
        run = read_run(config.out)
        told = [each for each in run.events if "accumul" in f"{each.get('detector')} {each.get('message')}"]
        assert run.summary is not None
        return {
            "loss": float(run.summary["val_loss"]),
            "told": [[int(each["step"]), str(each.get("detector"))] for each in told],
        }


def table(made: Mapping[str, Mapping[str, Any]], micro_batches: int, seeds: Sequence[int]) -> list[Row]:
    """A row for each format."""

    def of(sums: str, seed: int) -> Mapping[str, Any]:
        return made[_name(sums, micro_batches, seed)]

    rows: list[Row] = []
    for sums in FORMATS:
        apart = [of(sums, seed)["loss"] - of(BASELINE, seed)["loss"] for seed in seeds]
        row: Row = {"sums": sums, "loss": statistics.fmean(of(sums, seed)["loss"] for seed in seeds)}
        row |= {f"seed {seed}": f"{each:+.4f}" for seed, each in zip(seeds, apart, strict=True)}
        if sums != BASELINE and len(seeds) > 1:
            mean, half = interval([apart])
            row |= {"less float32's": f"{mean:+.4f} ± {half:.4f}"}
        told = [each for seed in seeds for each in of(sums, seed)["told"]]
        row["first told"] = "step {} ({})".format(*min(told)) if told else "nothing"
        rows.append(row)
    return rows


def _name(sums: str, micro_batches: int, seed: int) -> str:
    return f"{sums} in {micro_batches}, seed {seed}"


def parts(options: argparse.Namespace) -> list[Part]:
    """A part for each run."""
    steps = 6 if options.quick else SETTING.steps
    made = []
    for seed in options.seeds:
        for micro_batches in MICRO_BATCHES:
            for sums in FORMATS:
                settings = {**vars(SETTING), "batch_size": BATCH, "steps": steps, "beta2": BETA2}
                make = partial(trained, sums, micro_batches, seed, steps)
                made.append(Part(_name(sums, micro_batches, seed), settings, make, STEP_SECONDS * steps))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each number of micro-batches."""
    flags = parser(__doc__, rounds=1)
    add_out(flags, "gradient-formats", of="finished runs")
    flags.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = flags.parse_args(arguments)
    torch.set_num_threads(1)
    if options.quick:
        options.seeds = options.seeds[:1]
    report = Report("gradient formats", options)
    with out_folder(options, "gradient-formats") as out:
        made = complete(parts(options), out, report)
    for micro_batches in MICRO_BATCHES:
        title = f"llama-1m over word, {BATCH} × {SETTING.sequence_length} tokens in {micro_batches} micro-batches; nats"
        report.add(title, table(made, micro_batches, options.seeds))
    return report.end()


if __name__ == "__main__":
    exit_by(main)
