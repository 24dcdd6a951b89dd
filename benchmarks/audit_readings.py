"""By which recorded number each loss of a storage is seen: updates, weights that stand still, second moments.

Claim: no single number sees all. EDQ is measured against what the optimizer intended, and that follows from the moments as they
are stored; so it is 1 while second moments are wrong, and ``moments.bias`` of the gauges is the number that shows it.

Set-up: a matrix whose gradients are normal and stationary, AdamW at a constant rate, second moments from zero. Columns: the
audit's and the gauges' metrics of the last window or sample as ``gauges.jsonl`` has them, what the bias makes of a step
(its length over the right one), and the events of the detectors.

Run: ``./dev bench audit_readings [--quick]``. No times are taken, so ``--rounds`` has no effect.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from timing import Report, Row, parser
from torch import nn

import narrowgauge as ng
from narrowgauge.runs.schema import metric_of

STORAGES = ("naive", "no-master", "stochastic", "kahan", "collage-light", "collage-plus", "word", "states8", "master")
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=1).parse_args(arguments)
    report = Report("audit readings", options)
    side, steps = (32, 200) if options.quick else (64, 2000)
    for beta2 in (0.95, 0.999):
        for lr in (1e-3, 1e-4):
            rows = [row_of(storage, beta2, lr, steps, side) for storage in STORAGES]
            report.add(f"beta2 {beta2:g}, lr {lr:g}, {steps} steps of stationary gradients, {side} × {side}", rows)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
