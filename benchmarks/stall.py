"""What a small update leaves behind: the stall case, for every storage and for the optimizers in
use.

Claim: at a small learning rate bfloat16 weights stop moving unless more of them is kept, and 8
extra bits of each, stochastically rounded, keep them moving. Weights are ~N(0, 1), gradients 0.05 +
0.1 N(0, 1) from a cycle of 50, lr 1e-5, beta2 0.999, 400 steps. The *error* is that of the stored
weights' displacement, ‖moved − wanted‖ / ‖wanted‖: 0 is perfect, 1 a weight that never moved. The
*rate* is ⟨moved, wanted⟩ / ‖wanted‖², the share of the learning rate that arrives.
``--gradients`` gives the gradients another size: a norm of 1 over 8 billion weights is 1e-5 in each.

Baseline: the same AdamW in float64. Beside ours: published 8-bit states by their formulas
(``_published_states.py``), and every optimizer of ``_peers.py``, over bfloat16 weights. A float16
storage is fed the same numbers in float16, times a loss scale that brings them near 0.1.

Run: ``./dev bench stall [--gradients 1e-6] [--quick]``; two minutes on 2 cores, without peers. It
tries weights of 1 and of 0.02, the size that matrices of language models have. With the default
gradients it writes ``benchmarks/stall.jsonl``; a peer that is not installed keeps its record.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _conditions import conditions, digests
from _peers import PACKAGES, reason
from _published_states import PublishedAdamW
from _rows import FORMULAS, PEERS_BY_NAME, bytes_per_param
from _timing import Row, begin, exit_by, parser, show
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.spec.storages import STORAGES

OPTIONS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
CYCLE = 50
LR = 1e-5
SCALES = {"near 1": 1.0, "near 0.02": 0.02}
FILE = Path(__file__).with_suffix(".jsonl")


class Stall:
    """Where weights begin, the gradients they see, and where AdamW in float64 takes them.

    Args:
        scale: standard deviation of the weights.
        gradients: that of the gradients.
    """

    def __init__(self, side: int, steps: int, scale: float, gradients: float) -> None:
        draw = torch.Generator().manual_seed(1)
        self.start = (scale * torch.randn(side, side, generator=draw)).bfloat16()
        self.cycle = []
        for _ in range(CYCLE):
            drawn = 0.5 + torch.randn(side, side, generator=draw)
            self.cycle.append((gradients * drawn).bfloat16())
        self.steps = steps
        self.gradients = gradients
        exact = nn.Parameter(self.start.double())
        reference = torch.optim.AdamW([exact], lr=LR, **OPTIONS)
        for step in range(1, steps + 1):
            exact.grad = self.cycle[step % CYCLE].double()
            reference.step()
        self.wanted = exact.detach() - self.start.double()

    def row(
        self,
        name: str,
        weight: nn.Parameter,
        step: Callable[[], object],
        stored: Callable[[], Tensor],
        loss_scale: float = 1.0,
    ) -> Row:
        """Train a weight, and compare the displacement of what is stored."""
        began = stored().double()
        for number in range(1, self.steps + 1):
            # A copy: some optimizers compute in the gradient's own memory.
            gradient = self.cycle[number % CYCLE] * loss_scale
            weight.grad = gradient.to(weight.dtype, copy=True)
            step()
        moved = stored().double() - began
        error = (moved - self.wanted).norm() / self.wanted.norm()
        rate = (moved * self.wanted).sum() / self.wanted.square().sum()
        return {"": name, "error": float(error), "rate": float(rate)}


def our_row(case: Stall, storage: str) -> Row:
    """Return error and audit of one of our storages."""
    visible = STORAGES[storage].visible
    weight = nn.Parameter(case.start.to(getattr(torch, visible), copy=True))
    # Random low bits would be a displacement of their own.
    optimizer = ng.AdamW([("weight", weight)], lr=LR, storage=storage, low_bits="zero", **OPTIONS)
    # A visible format narrower than bfloat16 cuts the start.
    optimizer.adopt({weight: case.start.float()})
    loss_scale = 1.0
    if visible == "float16":
        loss_scale = 2.0 ** round(math.log2(0.1 / case.gradients))

    def step() -> None:
        optimizer.grad_scale = torch.tensor(loss_scale)  # as torch.amp.GradScaler passes it
        optimizer.step()

    row = case.row(storage, weight, step, lambda: optimizer.stored(weight), loss_scale)
    reading = ng.audit(optimizer)["weight"]
    row |= {"EDQ": reading.edq, "noise": reading.noise, "lost": f"{reading.lost_fraction:.1%}"}
    return row | {"bytes per parameter": optimizer.bytes_per_param()}


def other_row(case: Stall, name: str) -> Row:
    """Return the error of a published formula or a peer, or why there is none."""
    weight = nn.Parameter(case.start.clone())
    options = {"lr": LR, **OPTIONS}
    try:
        if name in FORMULAS:
            optimizer: Any = PublishedAdamW([weight], FORMULAS[name], **options)
            stored = optimizer.stored
        else:
            optimizer = PEERS_BY_NAME[name].make([weight], **options)
            stored = partial(PEERS_BY_NAME[name].stored, optimizer)
        row = case.row(name, weight, optimizer.step, lambda: stored(weight))
    except (ImportError, RuntimeError) as error:  # its kernels need what this machine may lack
        return {"": name, "lost": reason(error)}
    return row | {"bytes per parameter": bytes_per_param(optimizer)}


def rows_of(case: Stall) -> list[Row]:
    """Return the rows of all storages, published states and peers, by the names of trainings."""
    rows = [our_row(case, name) for name in STORAGES]
    return rows + [other_row(case, name) for name in (*FORMULAS, *PEERS_BY_NAME)]


def write(tables: dict[str, list[Row]]) -> None:
    """Write the error and the rate of each row, under the conditions of today; a row that was not
    measured keeps its record.
    """
    records: dict[str, Row] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        records[record["row"]] = record
    measured: dict[str, Row] = {}
    for title, rows in tables.items():
        for row in rows:
            if "error" not in row:
                continue
            name = row[""]
            record = {"row": name, "bytes": f"{row['bytes per parameter']:.2g}"} | conditions()
            record = measured.setdefault(name, record | {"digests": digests(name, ())})
            record |= {title: row["error"], f"{title} rate": row["rate"]}
    text = "".join(json.dumps(record) + "\n" for record in (records | measured).values())
    FILE.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=1)
    flags.add_argument("--gradients", type=float, default=0.1, help="their size (default 0.1)")
    options = flags.parse_args(arguments)
    warnings.simplefilter("ignore")
    begin("stall", options, peers=PACKAGES)
    side, steps = (64, 100) if options.quick else (256, 400)
    tables = {}
    for title, scale in SCALES.items():
        tables[title] = rows_of(Stall(side, steps, scale, options.gradients))
        what = f"weights of {scale:g}, gradients of {options.gradients:g}, {steps} steps"
        show(f"error of the stored displacement, {what}", tables[title])
    if not options.quick and options.gradients == flags.get_default("gradients"):
        write(tables)
    return 0


if __name__ == "__main__":
    exit_by(main)
