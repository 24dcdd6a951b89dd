"""Measure what each update rule costs in loss and bytes, against a tuned AdamW: one small model,
the same starts and batches.

Claim: none of these rules is worse than AdamW at its best rate by more than its bytes are worth;
the table says which is. A llama-1m learns the standard library's source by each row of
:data:`CASES`, at a few peak rates and seeds, from the same starts on the same batches.

Baseline: ``adamw`` over ``word``. Compare rows at the best of their rates; where it is the first or
the last that was tried, a better one may lie outside. One rate serves embedding and matrices.
GaLore's factor is 1 here, and a step in a quarter of the directions is still half as long, so the
embedding has the larger rate. The row with all directions and a factor of 0.25 shows how much of a
difference that is. The low-rank rules have rank 32, a quarter of the width.

Bytes are of weight, gradient and states, counted after the last step. A quarter of the 1.06 million
parameters is the embedding, AdamW's where the rule is for matrices.

Run: ``./dev bench rules [--cases NAME …] [--seeds …] [--quick]``. A run takes one to two minutes of
a core with AVX2, all 72 one to two hours. ``--rounds`` has no effect.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _stdlib import stdlib_tokens
from _timing import Report, Row, exit_by, parser
from torch import nn

from narrowgauge.assembly.preparation import prepare
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.optim import optimizers
from narrowgauge.spec.notation import parse
from narrowgauge.spec.update_rules import UPDATE_RULES
from narrowgauge.trainer import language_model
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import open_data
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.step import evaluate, train_step

OPTIMIZERS = {name: getattr(optimizers, row.optimizer) for name, row in UPDATE_RULES.items()}

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
            options["eps"] = rule.settings["eps"]
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
        Case("lion", "word", _SMALLER),
    )
}


def outer_names(model: nn.Module) -> set[str]:
    """Return the names of the embeddings and the output head.

    Matrix rules are for the matrices between them (Jordan et al. 2024, "Muon").
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

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        by_options: dict[tuple[bool, bool], dict[str, Any]] = {}
        for name, parameter in model.named_parameters():
            is_vector = parameter.ndim < 2
            options: dict[str, Any] = {"weight_decay": 0.0} if is_vector else {}
            if name in left_to_adamw:
                options["rule"] = "adamw"
            key = (is_vector, name in left_to_adamw)
            by_options.setdefault(key, {"params": [], **options})["params"].append(parameter)
        return list(by_options.values())

    _, optimizer = prepare(
        model,
        config.recipe,
        optimizer=OPTIMIZERS[case.rule],
        lr=config.lr,
        **case.optimizer_options,
        groups=groups,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        average=False,
    )

    with tempfile.TemporaryDirectory() as folder:
        session = Session(config, Path(folder), data, model, optimizer)
        while session.step < config.steps:
            train_step(session)
        return {"loss": evaluate(session), "bytes": float(session.optimizer.bytes_per_param())}


def rows(options: argparse.Namespace) -> list[Row]:
    """Return a row for each case: bytes, and the mean loss over seeds at each rate."""
    table = []
    for name in options.cases:
        case = CASES[name]
        row: Row = {"rule/storage": name}
        for lr in case.rates[: 2 if options.quick else None]:
            ends = []
            for seed in options.seeds:
                config = TrainConfig(
                    **{name: getattr(options, name) for name in SIZES},
                    recipe=parse(f"bfloat16/{case.storage}"),
                    lr=lr,
                    seed=seed,
                    gauges_every=0,
                )
                ends.append(trained(case, config.filled()))
            row["B/param"] = ends[0]["bytes"]
            row[f"at {lr:g}"] = statistics.fmean(end["loss"] for end in ends)
            print(row, flush=True)
        table.append(row)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=1)
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
    size = f"{options.model}, {options.steps} steps of {options.batch_size} × {options.sequence_length} tokens"
    report.add(f"update rules; {size}", rows(options))
    return report.end()


if __name__ == "__main__":
    exit_by(main)
