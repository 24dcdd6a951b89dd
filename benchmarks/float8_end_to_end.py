"""Measure where training in 8 bits fails: sums of gradients in e5m2, weights in 8 bits, matmuls in
8 bits, and all of them.

Claim: none. Each case's cost in validation loss is reported, with the first alarm of its record. A
llama-1m trains for 400 steps at a third of its usual learning rate and beta2 0.95. A step is 64
sequences of 32 tokens, in up to 64 micro-batches. After each micro-batch the sum of the gradients
is rounded to ``float8_e5m2``, with a power-of-two scale per tensor, as the gradients of FP8-LM
(2310.18313) are kept. The product has no such sums, since this is what they cost.

Baseline: ``bfloat16/word`` with sums in float32 and the same seed: the same first weights and
batches.

Run: ``./dev bench float8_end_to_end [--out FOLDER] [--seeds …] [--report-only] [--quick]``.
Finished runs are kept under ``--out``. With AVX2 a run takes 5 to 15 minutes of a core.
``--rounds`` has no effect.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from _others_training import FORMULAS, cut
from _parts import Part, add_out, complete, out_folder
from _stdlib import stdlib_tokens
from _timing import Report, Row, exit_by, parser
from board import SETTINGS
from torch import Tensor

from narrowgauge.measuring.intervals import interval
from narrowgauge.numerics.rounding import round_nearest, round_stochastic
from narrowgauge.runs.record import read_run
from narrowgauge.spec.formats import get_format
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import loop
from narrowgauge.trainer.config import TrainConfig

SETTING = SETTINGS["llama-1m"]
STEPS = 400
BATCH = 64
TOKENS = 32
EVALUATED = 1024
"""Held-out sequences."""
E5M2 = get_format("float8_e5m2")


class Case(NamedTuple):
    """A recipe, the rounding of its sums of gradients (none: float32), the micro-batches that are
    summed, and a control of ``_published_states.py`` that its weights are rounded by.
    """

    recipe: str
    rounding: str
    micro_batches: int
    weights: str = ""

    def __str__(self) -> str:
        sums = "float32"
        if self.rounding:
            sums = f"e5m2, {self.rounding}"
        recipe = self.recipe
        if self.weights:
            recipe = f"{recipe.partition('/')[0]}/{self.weights}"
        return f"{recipe}, sums of {self.micro_batches} in {sums}"


BASELINE = Case("bfloat16/word", "", 4)
CASES = (
    BASELINE,
    Case("bfloat16/word", "nearest", 64),
    Case("bfloat16/master", "", 4, "weight8"),
    Case("bfloat16/master", "", 4, "nearest8"),
    Case("float8-row/master", "stochastic", 16, "weight8"),
    Case("float8-row/master", "nearest", 16, "nearest8"),
    Case("bfloat16/word", "stochastic", 64),
    *(
        Case("bfloat16/word", rounding, number)
        for number in (16, 4, 1)
        for rounding in ("nearest", "stochastic")
    ),
)


class Float8Sums:
    """Sum micro-batch gradients in e5m2 with a scale per tensor, in the place of the trainer's
    accumulator.
    """

    def __init__(self, parameters: Iterable[Tensor], rounding: str, seed: int) -> None:
        self.parameters = list(parameters)
        self.rounding = rounding
        self.sums: dict[Tensor, Tensor] = {}
        self.draw = torch.Generator().manual_seed(seed)

    def discard(self) -> None:
        self.sums.clear()

    @torch.no_grad()
    def accumulate(self) -> None:
        for p in self.parameters:
            if p.grad is None:
                continue
            total = p.grad.float() + self.sums.get(p, 0.0)
            _, exponent = torch.frexp(total.abs().max())
            scale = torch.ldexp(
                torch.tensor(1.0), exponent - 15
            )  # the largest magnitude becomes at most 2^15
            scaled = total / scale
            if self.rounding == "nearest":
                self.sums[p] = round_nearest(scaled, E5M2) * scale
            else:
                draws = torch.randint(2**16, total.shape, generator=self.draw) / 2.0**16
                self.sums[p] = round_stochastic(scaled, E5M2, draws) * scale
            p.grad = None

    def finish(self) -> None:
        for p, total in self.sums.items():
            p.grad = total.to(p.dtype)
        self.discard()

    def bytes_per_param(self) -> float:
        return 1.0


def trained(case: Case, seed: int, steps: int) -> dict[str, Any]:
    """Train once.

    Return the last validation loss in nats, and the alarms: step and name of each.
    """

    built = loop.build

    def build(*arguments: Any) -> Any:
        session = built(*arguments)
        if case.rounding:
            session.accumulator = Float8Sums(session.model.parameters(), case.rounding, seed)
        if case.weights:
            formula = FORMULAS[case.weights]
            session.optimizer.register_step_post_hook(lambda ours, *_: cut(formula, ours))
        return session

    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            model=SETTING.model,
            steps=steps,
            batch_size=BATCH,
            sequence_length=TOKENS,
            eval_every=0,
            eval_sequences=EVALUATED,
            data=str(stdlib_tokens(SETTING.model)),
            threads=1,
            recipe=parse(case.recipe),
            lr=SETTING.lr / 3,
            min_lr_ratio=3 * SETTING.final_lr / SETTING.lr,
            beta2=0.95,
            seed=seed,
            out=str(Path(folder, "run")),
            gradient_accumulation_steps=case.micro_batches,
        )
        with (
            patch.object(loop, "build", build),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            loop.train(config)
        run = read_run(config.out)
        alarms = []
        for event in run.events:
            if event["severity"] != "note":
                alarms.append([int(event["step"]), str(event["what"])])
        assert run.summary is not None
        return {"loss": float(run.summary["val_loss"]), "alarms": alarms}


def table(results: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> list[Row]:
    """Return a row for each case that has a result: loss, its difference from the baseline, and the
    first alarm.
    """
    rows: list[Row] = []
    for case in CASES:
        pairs = []
        for seed in seeds:
            pairs.append([results.get(part_name(compared, seed)) for compared in (case, BASELINE)])
        runs = [run for run, _ in pairs if run is not None]
        costs = []
        for run, base in pairs:
            if run is not None and base is not None:
                costs.append(run["loss"] - base["loss"])
        if not costs:
            continue
        mean, half = interval(costs)
        alarms = []
        for run in runs:
            alarms.extend(run["alarms"])
        row: Row = {"case": str(case), "loss": runs[0]["loss"]}
        row |= {"less baseline": f"{mean:+.4f}" + (f" ± {half:.4f}" if len(costs) > 1 else "")}
        row |= {"first alarm": "step {} ({})".format(*min(alarms)) if alarms else "none"}
        rows.append(row)
    return rows


def part_name(case: Case, seed: int) -> str:
    return f"{case}, seed {seed}"


def parts(options: argparse.Namespace) -> list[Part]:
    """Return a part for each run."""
    steps = 6 if options.quick else STEPS
    sizes = {
        "batch_size": BATCH,
        "sequence_length": TOKENS,
        "steps": steps,
        "eval_sequences": EVALUATED,
    }
    trainings = []
    for seed in options.seeds:
        for case in CASES:
            trainings.append(
                Part(
                    part_name(case, seed),
                    {**vars(SETTING), **sizes},
                    partial(trained, case, seed, steps),
                    (0.3 + 0.006 * case.micro_batches) * steps,
                )
            )
    return trainings


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    flags = parser(__doc__, rounds=1)
    add_out(flags, "float8-end-to-end", of="finished runs")
    flags.add_argument("--seeds", type=int, nargs="+", default=[0])
    flags.add_argument(
        "--report-only", action="store_true", help="only make the table of the runs that are there"
    )
    options = flags.parse_args(arguments)
    torch.set_num_threads(1)
    report = Report("float8, end to end", options)
    with out_folder(options, "float8-end-to-end") as out:
        results = complete(parts(options), out, report, only_kept=options.report_only)
    report.add(f"llama-1m, {BATCH} × {TOKENS} tokens; nats", table(results, options.seeds))
    return report.end()


if __name__ == "__main__":
    exit_by(main)
