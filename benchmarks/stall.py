"""What a small update leaves behind: the stall case, for every storage and for the optimizers in
use.

Claim: at a small learning rate bfloat16 weights stop moving unless more of them is kept, and 8
extra bits of each, stochastically rounded, keep them moving. Weights are ~N(0, 1), or of 0.02, the
size that matrices of language models have; gradients 0.05 + 0.1 N(0, 1) from a cycle of 50, lr 1e-5,
beta2 0.999, 400 steps. The *error* is that of the stored weights' displacement, ‖moved − wanted‖ /
‖wanted‖: 0 is perfect, 1 a weight that never moved. The *rate* is ⟨moved, wanted⟩ / ‖wanted‖², the
share of the learning rate that arrives.

Baseline: the same AdamW in float64. Beside ours: published 8-bit states by their formulas
(``_published_states.py``), and optimizers of ``_peers.py``, over bfloat16 weights.

Run: ``./dev bench stall [--quick]``; two minutes on 2 cores, without peers. It writes
``benchmarks/stall.jsonl``; what is not installed keeps its record.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _conditions import digests, replace
from _peers import PACKAGES, PEERS, reason
from _published_states import FORMULAS, RoundedAdamW
from _rows import PEERS_BY_NAME, bytes_per_param
from _timing import Row, begin, exit_by, parser, show
from torch import nn

import narrowgauge as ng
from narrowgauge.spec.storages import STORAGES

OPTIONS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
CYCLE = 50
SCALES = {"near 1": 1.0, "near 0.02": 0.02}
FILE = Path(__file__).with_suffix(".jsonl")


class Stall:
    """Where weights begin, the gradients they see, and where AdamW in float64 takes them.

    Args:
        scale: standard deviation of the weights.
    """

    def __init__(self, side: int, steps: int, scale: float) -> None:
        draw = torch.Generator().manual_seed(1)
        self.start = (scale * torch.randn(side, side, generator=draw)).bfloat16()
        self.cycle = []
        for _ in range(CYCLE):
            drawn = 0.5 + torch.randn(side, side, generator=draw)
            self.cycle.append((0.1 * drawn).bfloat16())
        self.steps = steps
        exact = nn.Parameter(self.start.double())
        self.train(torch.optim.AdamW([exact], **OPTIONS), exact)
        self.wanted = exact.detach() - self.start.double()

    def train(self, optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> None:
        for step in range(1, self.steps + 1):
            # A copy: some optimizers compute in the gradient's own memory.
            weight.grad = self.cycle[step % CYCLE].to(weight.dtype, copy=True)
            optimizer.step()

    def measured(self, name: str, title: str) -> Row:
        """Return error and rate of an optimizer by the name of its row, or why there is none."""
        dtype = torch.bfloat16
        if name in STORAGES:
            dtype = getattr(torch, STORAGES[name].visible)
        weight = nn.Parameter(self.start.to(dtype, copy=True))
        try:
            optimizer, stored = self.optimizer(name, weight)
            began = stored(weight).double()
            self.train(optimizer, weight)
        except (ImportError, RuntimeError) as error:  # its kernels need what this machine may lack
            return {title: reason(error)}
        moved = stored(weight).double() - began
        error = (moved - self.wanted).norm() / self.wanted.norm()
        rate = (moved * self.wanted).sum() / self.wanted.square().sum()
        figures = {title: float(error), f"{title} rate": float(rate)}
        return {"bytes": f"{bytes_per_param(optimizer):.2g}", **figures}

    def optimizer(self, name: str, weight: nn.Parameter) -> tuple[Any, Any]:
        """Return an optimizer, and the function that returns what it stores of a weight."""
        if name in FORMULAS:
            rounded = RoundedAdamW([weight], FORMULAS[name], **OPTIONS)
            return rounded, rounded.stored
        if name in PEERS_BY_NAME:
            peer: Any = PEERS_BY_NAME[name]
            made = peer.make([weight], **OPTIONS)
            return made, partial(peer.stored, made)
        # Random low bits would be a displacement of their own.
        ours = ng.AdamW([("weight", weight)], storage=name, low_bits="zero", **OPTIONS)
        # A visible format narrower than bfloat16 cuts the start.
        ours.adopt({weight: self.start.float()})
        return ours, ours.stored


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=1)
    peers = [peer.name for peer in PEERS if peer.stored]
    flags.add_argument("--rows", nargs="+", default=[*STORAGES, *FORMULAS, *peers])
    options = flags.parse_args(arguments)
    warnings.simplefilter("ignore")
    begin("stall", options, peers=PACKAGES)
    side, steps = (64, 100) if options.quick else (256, 400)
    cases = {title: Stall(side, steps, scale) for title, scale in SCALES.items()}
    rows = []
    for name in options.rows:
        row: Row = {"row": name}
        for title, case in cases.items():
            row |= case.measured(name, title)
        rows.append(row)
    show(f"error and rate of the stored displacement after {steps} steps, by size of weights", rows)
    if not options.quick:
        ran = [row for row in rows if "bytes" in row]
        replace(FILE, [row | {"digests": digests(row["row"], ())} for row in ran])
    return 0


if __name__ == "__main__":
    exit_by(main)
