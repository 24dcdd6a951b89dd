"""What each update rule costs in quality and bytes, against a tuned AdamW: one small model, the same starts and batches.

Claim: none of these rules is worse than AdamW at its best rate by more than its bytes are worth; the table says which is. A
llama-1m learns the standard library's source by each row of :data:`CASES`, at a few peak rates and seeds. Seeds fix the
initial weights, the batches and what is held out, so losses of one seed are compared in pairs.

Baseline: ``adamw`` over ``word`` at the best of its rates. Every row is at the best of its own: the one of the lowest mean
loss, marked ``edge`` where it is the first or the last that was tried, so that a better one may lie outside. Both were
chosen by the losses that are compared. The difference is the mean over seeds with the half width of its 95 % interval
(Student's t); one seed has none.
One rate serves embedding and matrices. GaLore's factor is 1 here, and a step in a quarter of the directions is still half as
long, so the embedding has the larger rate. The row with all directions and a factor of 0.25 shows how much of a difference that
is.

Bytes are counted from the tensors of the optimizer after a step, per parameter and without the visible weight and the
gradient (four bytes): ``state B`` of the matrices in layers, which the rule steps, and ``model B`` of the whole model, of
whose 1.06 million parameters a quarter is the embedding, AdamW's where the rule is for matrices. The low-rank rules have rank
32, a quarter of the width, 128 all of it.

Run: ``./dev bench rules [--out FOLDER] [--cases NAME …] [--seeds …] [--report-only] [--quick]``. Each training is a run folder
under ``--out``; a finished one is reused and an interrupted one resumed, so the benchmark goes on where it was stopped, and
several processes may share the folder. ``--rounds`` has no effect.

How many runs are missing and about how long they take is said first. A run takes one to two minutes of a core with AVX2, all 81
one to two hours; with ``--steps 200 --batch-size 4`` a run takes half a minute.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import quality
import torch
from _parts import add_out, out_folder
from timing import Report, Row, exit_by, parser
from torch import nn

from narrowgauge.analysis.comparison.intervals import interval
from narrowgauge.assembly.preparation import class_of
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.runs.record import read_run
from narrowgauge.spec.models import get_model
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig

SEEDS, QUICK_SEEDS = (0, 1, 2), (0, 1)
QUICK_RATES = 2
RUN_SECONDS = 75.0
"""That a run of the default size takes."""


@dataclass(frozen=True)
class Case:
    """A rule over a storage, its options, the peak rates that are tried, and what tells it from others of the rule."""

    rule: str
    storage: str
    rates: tuple[float, ...]
    options: str = ""
    form: str = ""

    @property
    def name(self) -> str:
        return f"{self.rule}{self.form}/{self.storage}"


_ADAMS, _SMALLER = (1e-3, 3e-3, 1e-2), (3e-4, 1e-3, 3e-3)
_GALORE = "rank=32,update_proj_gap=50,scale=1"
CASES = {
    case.name: case
    for case in (
        Case("adamw", "word", _ADAMS),
        Case("adamw", "states8", _ADAMS),
        Case("galore", "states8", _ADAMS, _GALORE),
        Case("galore", "states8", _ADAMS, f"{_GALORE},proj_type=full", "-two-sided"),
        Case("galore", "word", _ADAMS, "rank=128,update_proj_gap=50,scale=0.25", "-all-quarter"),
        Case("gradnorm_lorp", "states8", _ADAMS, "rank=32,update_proj_gap=50"),
        Case("muon", "word", _ADAMS),
        Case("adafactor", "word", _ADAMS),
        Case("lion", "word", _SMALLER),
    )
}
BASELINE = "adamw/word"


@dataclass(frozen=True)
class Job:
    """One training: a case, a rate and a seed."""

    case: Case
    lr: float
    seed: int

    @property
    def storage(self) -> str:
        """The storage of its case."""
        return self.case.storage

    @property
    def name(self) -> str:
        """Its folder's name."""
        return f"{self.case.name.replace('/', '-')}-lr{self.lr:g}-seed{self.seed}"

    def settings(self, options: argparse.Namespace) -> TrainConfig:
        """Everything the trainer is given; the rest as ``narrowgauge train --rule`` has it."""
        return TrainConfig(
            model=options.model,
            recipe=parse(f"bfloat16/{self.case.storage}"),
            rule=self.case.rule,
            rule_options=self.case.options or None,
            steps=options.steps,
            batch_size=options.batch_size,
            sequence_length=options.sequence_length,
            lr=self.lr,
            seed=self.seed,
            out=str(options.out / self.name),
            eval_every=0,
            eval_batches=options.eval_batches,
            checkpoint_every=100,
            keep_checkpoints=1,
            gauges_every=0,
            compile=False,
        )


def jobs(options: argparse.Namespace) -> list[Job]:
    """All requested runs, seed by seed."""
    rates = QUICK_RATES if options.quick else None
    cases = [CASES[name] for name in options.cases]
    return [Job(case, lr, seed) for seed in options.seeds for case in cases for lr in case.rates[:rates]]


def losses_of(case: Case, options: argparse.Namespace) -> dict[float, dict[int, float]]:
    """The validation losses of a case's finished runs, by rate and seed."""
    found: dict[float, dict[int, float]] = {}
    for lr in case.rates:
        for seed in options.seeds:
            folder = options.out / Job(case, lr, seed).name
            if quality.finished(folder):
                found.setdefault(lr, {})[seed] = float((read_run(folder).summary or {})["val_loss"])
    return found


def best_rate(losses: dict[float, dict[int, float]]) -> float:
    """The rate of the lowest mean loss over the seeds that all rates have."""
    seeds = set.intersection(*(set(of_seed) for of_seed in losses.values()))
    return min(losses, key=lambda lr: statistics.fmean(losses[lr][seed] for seed in seeds or losses[lr]))


def matrix_bytes(case: Case, options: argparse.Namespace) -> float:
    """Bytes of state per parameter of the matrices in layers, counted from an optimizer's tensors after a step."""
    model, recipe = get_model(options.model), parse(f"bfloat16/{case.storage}")
    wide, shapes = model.intermediate_size, [(model.hidden_size, model.hidden_size)] * 4
    shapes += [(wide, model.hidden_size)] * 2 + [(model.hidden_size, wide)]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    config = TrainConfig(rule=case.rule, rule_options=case.options or None)
    optimizer = class_of(case.rule)(
        parameters, storage=recipe.storage, lr=1e-3, compile=False, **config.optimizer_options
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return float(optimizer.bytes_per_param()) - 4


def rows(options: argparse.Namespace) -> list[Row]:
    """A row per case that has a finished run."""
    found = {name: losses_of(CASES[name], options) for name in options.cases}
    base = found.get(BASELINE) or {}
    base = base[best_rate(base)] if base else {}
    table: list[Row] = []
    for name, losses in found.items():
        if not losses:
            continue
        lr, rates = best_rate(losses), sorted(losses)
        own = losses[lr]
        apart = [own[seed] - base[seed] for seed in own if seed in base]
        mean, half = interval([apart]) if apart else (float("nan"), float("inf"))
        summary = read_run(options.out / Job(CASES[name], lr, min(own)).name).summary or {}
        table.append(
            {
                "rule/storage": name,
                "state B": f"{matrix_bytes(CASES[name], options):.2f}",
                "model B": f"{summary['bytes_per_param'] - 4:.2f}",
                "best rate": f"{lr:g}{' edge' if len(rates) > 1 and lr in (rates[0], rates[-1]) else ''}",
                "loss": f"{statistics.fmean(own.values()):.4f}",
                "minus tuned adamw/word": "–" if name == BASELINE else quality._shown(mean, half),
                "seeds": len(own),
                **{
                    f"rate {k + 1} of {len(CASES[name].rates)}": _of(losses, r) for k, r in enumerate(CASES[name].rates)
                },
            }
        )
    return table


def _of(losses: dict[float, dict[int, float]], lr: float) -> str:
    return f"{lr:g}: {statistics.fmean(losses[lr].values()):.4f}" if lr in losses else f"{lr:g}: –"


def flags() -> argparse.ArgumentParser:
    """All flags; sizes are those of the table in docs/log/storages.md."""
    made = parser(__doc__, rounds=1)
    add_out(made, "rules", of="runs")
    made.add_argument("--report-only", action="store_true", help="only the table of what is there")
    made.add_argument(
        "--cases", nargs="+", choices=list(CASES), metavar="NAME", default=list(CASES), help="default: all"
    )
    made.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="default: 0 1 2")
    made.add_argument("--model", default="llama-1m")
    made.add_argument("--steps", type=int, default=300)
    made.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    made.add_argument("--sequence-length", type=int, default=128, help="tokens per sequence")
    made.add_argument("--eval-batches", type=int, default=64, help="batches of the validation at the end")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = flags().parse_args(arguments)
    options.seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)
    if options.quick:
        vars(options).update(quality.QUICK)
    report, failures = Report("rules", options, markdown=True), 0
    warnings.simplefilter("ignore", EmulationNotice)
    with out_folder(options, "rules") as options.out:
        wanted = jobs(options)
        if not options.report_only:
            if not options.quick:
                seconds = RUN_SECONDS * quality.size_of(options) / quality.size_of(flags().parse_args([]))
                report.note(quality.missing(wanted, options, lambda job: seconds))
            failures = quality.train_all(wanted, options)
        stated = f"{options.model}, {options.steps} steps of {options.batch_size} × {options.sequence_length} tokens"
        report.add(f"update rules; {stated}", rows(options))
        if missing := sum(not quality.finished(options.out / job.name) for job in wanted):
            report.note(f"{missing} of {len(wanted)} runs under {options.out} have not ended.")
    return report.end() or int(failures > 0)


if __name__ == "__main__":
    exit_by(main)
