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
from functools import partial
from pathlib import Path

import torch
from _conditions import digests, keep_newest
from _peers import PACKAGES, PEERS, reason
from _published_states import FORMULAS
from _rows import PEERS_BY_NAME, bytes_per_param, prepared
from _timing import begin, exit_by, parser, show
from torch import Tensor, nn

from narrowgauge.spec.storages import STORAGES

OPTIONS = {"lr": 1e-5, "betas": (0.9, 0.999), "weight_decay": 0.0}
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

    def train(self, optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
        for step in range(1, self.steps + 1):
            # A copy: some optimizers compute in the gradient's own memory.
            weight.grad = self.cycle[step % CYCLE].to(weight.dtype, copy=True)
            optimizer.step()

    def measured(self, name: str, title: str):
        """Return error and rate of an optimizer by the name of its row, or why there is none."""
        layer = nn.Linear(*self.start.shape, bias=False)
        layer.weight.data = self.start.float()
        try:
            # Without random low bits, which would be a displacement of their own.
            optimizer = prepared(name, layer, 0, dict(OPTIONS))
            if name in PEERS_BY_NAME:
                optimizer.stored = partial(PEERS_BY_NAME[name].stored, optimizer)
            began = optimizer.stored(layer.weight).double()
            self.train(optimizer, layer.weight)
        except (ImportError, RuntimeError) as error:  # not for this machine
            return {title: reason(error)}
        moved = optimizer.stored(layer.weight).double() - began
        error = (moved - self.wanted).norm() / self.wanted.norm()
        rate = (moved * self.wanted).sum() / self.wanted.square().sum()
        figures = {title: float(error), f"{title} rate": float(rate)}
        return {"bytes": f"{bytes_per_param(optimizer):.2g}", **figures}


def main(arguments=None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=1)
    storages = [name for name in STORAGES if "float16" not in name]
    peers = [peer.name for peer in PEERS if peer.stored]
    flags.add_argument("--rows", nargs="+", default=[*storages, *FORMULAS, *peers])
    options = flags.parse_args(arguments)
    warnings.simplefilter("ignore")
    begin("stall", options, peers=PACKAGES)
    side, steps = (64, 100) if options.quick else (256, 400)
    cases = {title: Stall(side, steps, scale) for title, scale in SCALES.items()}
    rows = []
    for name in options.rows:
        row = {"row": name}
        for title, case in cases.items():
            row |= case.measured(name, title)
        rows.append(row)
    show(f"error and rate of the stored displacement after {steps} steps, by size of weights", rows)
    if not options.quick:
        ran = [row for row in rows if "bytes" in row]
        keep_newest(FILE, [row | {"digests": digests(row["row"], ())} for row in ran])
    return 0


if __name__ == "__main__":
    exit_by(main)
