"""Measure how much of the visible weights a step changes: what a trainer has to send to a server.

Claim: with random low bits a step at 1e-6 changes about one visible weight of a hundred, and a
delta takes a few per cent of the weights' bytes. bfloat16 weights that are rounded stochastically
change as many. Masters that are rounded so for each pass change many more (``long_runs.py``).

Model, text and optimizer are those of ``finetune.py``: SmolLM2-135M, AdamW, batches of 1 × 32
tokens, a constant rate.

Run: ``./dev bench serving [--steps 10] [--lr 1e-6] [--row 'word random']``. The first half of
the steps is left out, in which Adam's are largest.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import Any

import torch
from finetune import Start, loss_of, prepared, start_of
from torch import nn

import narrowgauge as ng

ROWS = ("word random", "stochastic", "autocast", "torch AdamW bfloat16")
LENGTH = 32
RATES = (1e-6, 5e-6, 2e-5)


def delta_bytes(changes: dict[str, Any]) -> int:
    """Return the bytes of a delta, those of tied parameters once."""
    sizes = {id(gaps): gaps.nbytes + values.nbytes for gaps, values, _ in changes.values()}
    return sum(sizes.values())


def visible(model: nn.Module, row: str) -> nn.Module:
    """Return what a server gets: the model, of float32 masters a copy in bfloat16."""
    if row == "autocast":
        return ng.cast_parameters(copy.deepcopy(model), torch.bfloat16)
    return model


def measured(start: Start, row: str, lr: float, steps: int) -> tuple[float, float]:
    """Return the mean share of visible weights that a step changes, and a delta's bytes over the
    weights'.
    """
    model = copy.deepcopy(start.model)
    optimizer = prepared(row, model, lr, 0, 0)
    server = copy.deepcopy(visible(model, row))
    seen = copy.deepcopy(server)
    ng.delta(seen)
    total = sum(p.numel() for p in server.parameters())
    shares = []
    sizes = []
    for step in range(steps):
        tokens = start.train[step : step + 1, :LENGTH]
        loss_of(model, tokens, row == "autocast").backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.load_state_dict(visible(model, row).state_dict())
        changes = ng.delta(seen)
        ng.apply_delta(server, changes)
        if step >= steps // 2:
            counts = {
                id(gaps): len(values) for gaps, values, _ in changes.values()
            }  # tied ones once
            shares.append(sum(counts.values()) / total)
            sizes.append(delta_bytes(changes) / (2 * total))
    pairs = zip(server.parameters(), seen.parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    return statistics.fmean(shares), statistics.fmean(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, nargs="+", default=RATES)
    parser.add_argument("--row", nargs="+", default=ROWS)
    args = parser.parse_args()
    print("row                    rate      changed a step  delta over weights")
    start = start_of()
    for row in args.row:
        for lr in args.lr:
            share, size = measured(start, row, lr, args.steps)
            print(f"{row:21}  {lr:<8g}  {share:14.2%}  {size:18.2%}", flush=True)


if __name__ == "__main__":
    main()
