"""Measure what each update rule costs in loss and bytes, against a tuned AdamW: one small model,
the same starts and batches.

Claim: none of these rules is worse than AdamW at its best rate by more than its bytes are worth;
the table says which is. A llama-1m learns the standard library's source by each row of
:data:`CASES`, at a few peak rates and seeds. Seeds fix the initial weights, the batches and what is
held out, so losses of one seed are compared in pairs.

Baseline: ``adamw`` over ``word`` at the best of its rates. Every row is at the best of its own: the
one of the lowest mean loss, marked ``edge`` where it is the first or the last that was tried, so
that a better one may lie outside. Both were chosen by the losses that are compared. The difference
is the mean over seeds with half its 95 % interval (Student's t). One rate serves embedding and
matrices. GaLore's factor is 1 here, and a step in a quarter of the directions is still half as
long, so the embedding has the larger rate. The row with all directions and a factor of 0.25 shows
how much of a difference that is. The low-rank rules have rank 32, a quarter of the width.

Bytes are counted from the tensors of the optimizer after a step, per parameter and without the
visible weight and the gradient (four bytes): ``state B`` of the matrices in layers, which the rule
steps, and ``model B`` of the whole model, of whose 1.06 million parameters a quarter is the
embedding, AdamW's where the rule is for matrices.

Run: ``./dev bench rules [--out FOLDER] [--cases NAME …] [--seeds …] [--quick]``. Each finished run
is kept under ``--out`` (``_parts.py``). A run takes one to two minutes of a core with AVX2, all 72
one to two hours; with ``--steps 200 --batch-size 4`` a run takes half a minute. ``--rounds`` has no
effect.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _parts import Part, add_out, complete, out_folder
from _stdlib import stdlib_tokens
from timing import Report, Row, exit_by, parser
from torch import nn

from narrowgauge.analysis.comparison.intervals import interval, shown_difference
from narrowgauge.assembly.preparation import is_matrix, prepare
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.matmul.scopes import compute_scope
from narrowgauge.optim import optimizers
from narrowgauge.spec.models import get_model
from narrowgauge.spec.notation import parse
from narrowgauge.spec.update_rules import UPDATE_RULES
from narrowgauge.trainer import language_model
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import open_data
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.step import evaluate, train_step

OPTIMIZERS = {name: getattr(optimizers, row.optimizer) for name, row in UPDATE_RULES.items()}

RUN_SECONDS = 75.0
"""That a run of the default size takes."""
QUICK = {"steps": 6, "batch_size": 2, "sequence_length": 32, "eval_sequences": 4, "seeds": [0, 1]}
SIZES = ("model", "steps", "batch_size", "sequence_length", "eval_sequences")


@dataclass(frozen=True)
class Case:
    """A rule over a storage, its options, the peak rates that are tried, and what tells it from
    others of the rule.
    """

    rule: str
    storage: str
    rates: tuple[float, ...]
    options: dict[str, float] = field(default_factory=dict)
    form: str = ""

    @property
    def name(self) -> str:
        return f"{self.rule}{self.form}/{self.storage}"

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Return the arguments of the optimizer, but for the learning rate: the usual ones of a
        language model, and its own.
        """
        rule = UPDATE_RULES[self.rule]
        options = {option.name: option.in_training for option in rule.options}
        options |= {"weight_decay": rule.settings["weight_decay"], **self.options}
        if "beta1" in rule.settings:
            options["betas"] = (rule.settings["beta1"], rule.settings["beta2"])
        if "eps" in rule.settings:
            options[rule.eps_option] = rule.settings["eps"]
        return options


_LARGER = (1e-3, 3e-3, 1e-2)
_SMALLER = (3e-4, 1e-3, 3e-3)
CASES = {
    case.name: case
    for case in (
        Case("adamw", "word", _SMALLER),
        Case("adamw", "states8", _SMALLER),
        Case("galore", "word", _LARGER, {"rank": 32, "update_proj_gap": 50, "scale": 1.0}),
        Case(
            "galore",
            "word",
            _LARGER,
            {"rank": 128, "update_proj_gap": 50, "scale": 0.25},
            "-all-quarter",
        ),
        Case("gradnorm_lorp", "word", _LARGER, {"rank": 32, "update_proj_gap": 50}),
        Case("muon", "word", _LARGER),
        Case("adafactor", "word", _LARGER),
        Case("lion", "word", _SMALLER),
    )
}
BASELINE = "adamw/word"
Losses = dict[float, dict[int, float]]
"""Validation losses by rate and seed."""


def outer_names(model: nn.Module) -> set[str]:
    """Return the names of the embeddings and the output head.

    Matrix rules are for the matrices between them (Jordan et al. 2024, "Muon"). Give these
    ``{"rule": "adamw"}`` in ``options_of``.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer = []
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is head:
            outer.append(module)
    members = set()
    for module in outer:
        members.update(module.parameters())
    return {name for name, parameter in model.named_parameters() if parameter in members}


def trained(case: Case, config: TrainConfig) -> dict[str, float]:
    """Train without a run folder; return the validation loss and the bytes per parameter."""
    torch.set_num_threads(1)
    data = open_data(stdlib_tokens(config.model), config.held_out)
    model = language_model.build(config.model, vocab_size=data.vocab_size, seed=config.seed)
    if UPDATE_RULES[case.rule].is_matrix:
        left_to_adamw = outer_names(model)
    else:
        left_to_adamw = set()
    _, optimizer = prepare(
        model,
        config.recipe,
        optimizer=OPTIMIZERS[case.rule],
        lr=config.lr,
        **case.optimizer_options,
        decays=is_matrix,
        options_of=lambda name: {"rule": "adamw"} if name in left_to_adamw else {},
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        average=False,
    )

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        with compute_scope(config.recipe, tokens.device):
            return language_model.loss_sum(model, tokens)

    with tempfile.TemporaryDirectory() as folder:
        session = Session(config, Path(folder), data, model, optimizer, loss)
        while session.step < config.steps:
            train_step(session)
        return {"loss": evaluate(session), "bytes": float(session.optimizer.bytes_per_param())}


def name_of(case: Case, lr: float, seed: int) -> str:
    return f"{case.name} at {lr:g}, seed {seed}"


def parts(options: argparse.Namespace) -> list[Part]:
    """Return a part for each run, seed by seed."""
    sizes = {name: getattr(options, name) for name in SIZES}
    default = TrainConfig(steps=300, batch_size=8, sequence_length=128)
    seconds = (
        RUN_SECONDS * options.steps * options.batch_size / (default.steps * default.batch_size)
    )
    runs = []
    for seed in options.seeds:
        for case in (CASES[name] for name in options.cases):
            config = TrainConfig(
                **sizes,
                recipe=parse(f"bfloat16/{case.storage}"),
                seed=seed,
                gauges_every=0,
                compile=False,
            )
            for lr in case.rates[: 2 if options.quick else None]:
                make = partial(trained, case, dataclasses.replace(config, lr=lr).filled())
                runs.append(
                    Part(name_of(case, lr, seed), {**sizes, "options": case.options}, make, seconds)
                )
    return runs


def losses_of(case: Case, runs: Mapping[str, Mapping[str, float]], seeds: Sequence[int]) -> Losses:
    """Return the losses of a case's finished runs."""
    losses: Losses = {}
    for lr in case.rates:
        for seed in seeds:
            if run := runs.get(name_of(case, lr, seed)):
                losses.setdefault(lr, {})[seed] = run["loss"]
    return losses


def best_rate(losses: Losses) -> float:
    """Return the rate of the lowest mean loss over the seeds that all rates have."""
    seeds = set.intersection(*(set(of_seed) for of_seed in losses.values()))
    return min(
        losses, key=lambda lr: statistics.fmean(losses[lr][seed] for seed in seeds or losses[lr])
    )


def matrix_bytes(case: Case, options: argparse.Namespace) -> float:
    """Count the bytes of state per parameter of the matrices in layers, from an optimizer's tensors
    after a step.
    """
    model = get_model(options.model)
    wide = model.intermediate_size
    shapes = [(model.hidden_size, model.hidden_size)] * 4
    shapes += [(wide, model.hidden_size)] * 2 + [(model.hidden_size, wide)]
    parameters = []
    for shape in shapes:
        parameters.append(nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))
    optimizer = OPTIMIZERS[case.rule](
        parameters, storage=case.storage, lr=1e-3, compile=False, **case.optimizer_options
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return float(optimizer.bytes_per_param()) - 4


def rows(options: argparse.Namespace, runs: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Return a row for each case that has a finished run."""
    losses_by_case = {}
    for name in options.cases:
        losses_by_case[name] = losses_of(CASES[name], runs, options.seeds)
    base = losses_by_case.get(BASELINE) or {}
    if base:
        baseline = base[best_rate(base)]
    else:
        baseline = {}
    table: list[Row] = []
    for name, losses in losses_by_case.items():
        if not losses:
            continue
        case = CASES[name]
        lr = best_rate(losses)
        rates = sorted(losses)
        pairs = []
        for seed in losses[lr]:
            if seed in baseline:
                pairs.append(losses[lr][seed] - baseline[seed])
        difference = "–"
        if pairs and name != BASELINE:
            difference = shown_difference(*interval(pairs))
        run = runs[name_of(case, lr, min(losses[lr]))]
        row: Row = {
            "rule/storage": name,
            "state B": f"{matrix_bytes(case, options):.2f}",
            "model B": f"{run['bytes'] - 4:.2f}",
            "best rate": f"{lr:g}{' edge' if len(rates) > 1 and lr in (rates[0], rates[-1]) else ''}",
            "loss": f"{statistics.fmean(losses[lr].values()):.4f}",
            "minus tuned adamw/word": difference,
            "seeds": len(losses[lr]),
        }
        for number, rate in enumerate(case.rates, 1):
            mean = "–"
            if rate in losses:
                mean = f"{statistics.fmean(losses[rate].values()):.4f}"
            row[f"rate {number} of {len(case.rates)}"] = f"{rate:g}: {mean}"
        table.append(row)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; sizes are those of the table in RESULTS.md."""
    flags = parser(__doc__, rounds=1)
    add_out(flags, "rules", of="finished runs")
    flags.add_argument(
        "--cases",
        nargs="+",
        choices=list(CASES),
        metavar="NAME",
        default=list(CASES),
        help="default: all",
    )
    flags.add_argument(
        "--seeds", nargs="+", type=int, metavar="SEED", default=[0, 1, 2], help="default: 0 1 2"
    )
    flags.add_argument("--model", default="llama-1m")
    flags.add_argument("--steps", type=int, default=300)
    flags.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    flags.add_argument("--sequence-length", type=int, default=128, help="tokens per sequence")
    flags.add_argument(
        "--eval-sequences", type=int, default=512, help="sequences of the validation at the end"
    )
    options = flags.parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    report = Report("rules", options)
    warnings.simplefilter("ignore", EmulationNotice)
    with out_folder(options, "rules") as out:
        runs = complete(parts(options), out, report)
    size = f"{options.model}, {options.steps} steps of {options.batch_size} × {options.sequence_length} tokens"
    report.add(f"update rules; {size}", rows(options, runs))
    return report.end()


if __name__ == "__main__":
    exit_by(main)
