"""By which recorded number each loss of a storage is seen: updates, weights that stand still, second moments.

Claim: no single number sees all. EDQ is measured against what the optimizer intended, and that follows from the moments as they
are stored; so it is 1 while second moments are wrong, and ``moments.bias`` of the gauges is the number that shows it.

Set-up: a matrix whose gradients are normal and stationary, AdamW at a constant rate, second moments from zero. Columns: the
audit's and the gauges' metrics of the last window or sample as ``gauges.jsonl`` has them, what the bias makes of a step
(its length over the right one), and the events of the detectors.

Run: ``./dev bench audit_readings [--out FOLDER] [--quick]``. Each row is kept under ``--out``, and an interrupted run goes on
where it was (``_parts.py``). All rows take about 70 seconds on 2 cores. No times are taken, so ``--rounds`` has no effect.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from functools import partial

import torch
from _parts import Part, add_out, complete, out_folder
from timing import Report, Row, exit_by, parser
from torch import nn

import narrowgauge as ng
from narrowgauge.runs.schema import metric_of

STORAGES = ("naive", "no-master", "stochastic", "kahan", "collage-light", "collage-plus", "word", "states8", "master")
BETAS, LRS = (0.95, 0.999), (1e-3, 1e-4)
FULL, QUICK = (64, 2000), (32, 200)
"""The side of the weight, and the steps."""
SECONDS = 2.0
"""That a row takes."""
EVERY = 20
NAME = "weight"


def row_of(storage: str, beta2: float, lr: float, steps: int, side: int) -> Row:
    """Run one storage, and read its last sample and its events."""
    torch.manual_seed(0)
    layer = nn.Linear(side, side, bias=False).bfloat16()
    layer.weight.data.copy_(0.02 * torch.randn(side, side))
    optimizer = ng.AdamW(
        layer.named_parameters(),
        lr=lr,
        betas=(0.9, beta2),
        weight_decay=0.1,
        storage=storage,
        audit_every=10,
        compile=False,
    )
    optimizer.on_alarm = lambda alarms: None
    kinds: dict[str, int] = {}
    rows: list[Row] = []
    alarms = ng.analysis.Alarms(f"bfloat16/{storage}")
    gauges = ng.attach_gauges(layer, optimizer, every=EVERY, on_row=rows.append)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        layer.weight.grad = (1e-3 * torch.randn(side, side, generator=generator)).bfloat16()
        optimizer.step()
    gauges.detach()
    for row in rows:
        for event in alarms.on_gauges(row):
            kinds.setdefault(event.kind, event.step)

    def last(table: str, metric: str) -> float:
        found = [value for row in rows if (value := metric_of(row, table, NAME, metric)) is not None]
        return found[-1] if found else float("nan")

    bias = last("moments", "bias")
    return {
        "storage": storage,
        "edq": f"{last('updates', 'edq'):.4f}",
        "noise": f"{last('updates', 'noise'):.3f}",
        "lost": f"{last('updates', 'lost_fraction'):.3f}",
        "lost decay": f"{last('updates', 'lost_decay'):.3f}",
        "unchanged": f"{last('updates', 'imprecision_share'):.3f}",
        "bias": f"{bias:.3f}",
        "frozen": f"{last('moments', 'frozen_fraction'):.3f}",
        "step length": f"{bias**-0.5:.3f}",
        "events": ", ".join(f"{kind} {step}" for kind, step in kinds.items()) or "–",
    }


def parts(options: argparse.Namespace) -> dict[tuple[float, float], list[Part]]:
    """A part for each row, by beta2 and rate."""
    side, steps = QUICK if options.quick else FULL
    return {
        (beta2, lr): [
            Part(
                f"{storage}, beta2 {beta2:g}, lr {lr:g}",
                {"side": side, "steps": steps},
                partial(row_of, storage, beta2, lr, steps, side),
                SECONDS,
            )
            for storage in STORAGES
        ]
        for beta2, lr in itertools.product(BETAS, LRS)
    }


def flags() -> argparse.ArgumentParser:
    """All flags."""
    made = parser(__doc__, rounds=1)
    add_out(made, "audit-readings")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = flags().parse_args(arguments)
    report = Report("audit readings", options)
    (side, steps), wanted = QUICK if options.quick else FULL, parts(options)
    with out_folder(options, "audit-readings") as out:
        made = complete([part for of_cell in wanted.values() for part in of_cell], out, report)
    for (beta2, lr), of_cell in wanted.items():
        title = f"beta2 {beta2:g}, lr {lr:g}, {steps} steps of stationary gradients, {side} × {side}"
        report.add(title, [made[part.name] for part in of_cell])
    return report.end()


if __name__ == "__main__":
    exit_by(main)
