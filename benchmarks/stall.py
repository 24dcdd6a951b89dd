"""What a small update leaves behind: the stall case, for every storage and for the optimizers in
use.

Claim: at a small learning rate, bfloat16 weights stop moving unless more of them is kept, and 8
extra bits of each, stochastically rounded, keep them moving. Weights ~N(0,1), gradients 0.05 + 0.1
N(0,1) from a cycle of 50, lr 1e-5, beta2 0.999, 400 steps; the figure is the error of the stored
weights' displacement, ‖moved − wanted‖ / ‖wanted‖: 0 is perfect, 1 a weight that never moved; what
is asked of ours stands beside it. ``--scale 0.02`` gives the weights the size that matrices of
language models have. ``--gradients 1e-6`` gives the gradients another size: a norm of 1 over 8
billion weights is 1e-5 in each. The *rate* is ⟨moved, wanted⟩ / ‖wanted‖², the share of the
learning rate that arrives.

Baseline: the same AdamW in float64. Beside ours: published 8-bit states by their formulas
(``benchmarks/_published_states.py``), and every optimizer of ``peers.py``, over bfloat16 weights. A
float16 storage is fed the same numbers in float16, times a loss scale that brings them near 0.1.

Run: ``./dev bench stall [--scale 0.02] [--gradients 1e-6] [--quick]``. All rows take about 40
seconds on 2 cores, without those of peers. No times are taken, so ``--rounds`` has no effect.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _published_states import CONTROLS, PUBLISHED, CodedAdamW, PublishedStates
from _timing import NOT_INSTALLED, Report, Row, exit_by, parser
from peers import PACKAGES, PEERS, Peer, reason
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.optim import UpdateLossWarning
from narrowgauge.spec.storages import STORAGES

OPTIONS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
CYCLE = 50
LR = 1e-5
FULL = (256, 400)
QUICK = (64, 100)
"""The side of the weight, and the steps."""
ASKED = {"split": 0.01, "word": 0.1, "compact": 0.15, "float32-states8": 0.15}
ASKED |= dict.fromkeys(("float32", "master", "exact"), 0.002)
ASKED |= dict.fromkeys(("kahan", "collage-light", "collage-plus"), 0.08)
"""The largest error that each storage may have, in the full case."""


@dataclass(frozen=True)
class Trainee:
    """A weight, the step that moves it, and how to read what is stored of it."""

    weight: nn.Parameter
    step: Callable[[], object]
    stored: Callable[[], Tensor]
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Stall:
    """The stall case: where weights begin, the gradients they see, and where AdamW in float64 takes
    them.
    """

    start: Tensor
    cycle: tuple[Tensor, ...]
    steps: int
    wanted: Tensor
    gradients: float = 0.1

    @classmethod
    def make(
        cls, side: int, steps: int, scale: float = 1.0, gradients: float = 0.1, seed: int = 1
    ) -> Stall:
        """The case for a ``side`` × ``side`` weight of standard deviation ``scale``, and for
        gradients of a size.
        """
        generator = torch.Generator().manual_seed(seed)
        start = (scale * torch.randn(side, side, generator=generator)).bfloat16()
        cycle = tuple(
            (gradients * (0.5 + torch.randn(side, side, generator=generator))).bfloat16()
            for _ in range(CYCLE)
        )
        x = start.double()
        m = torch.zeros_like(x)
        v = torch.zeros_like(x)
        for t in range(1, steps + 1):
            g = cycle[t % CYCLE].double()
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g * g
            x = x - LR * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        return cls(start, cycle, steps, x - start.double(), gradients)

    def compare(self, trainee: Trainee) -> Row:
        """Train, and compare the displacement of what is stored."""
        began = trainee.stored().double()
        for t in range(1, self.steps + 1):
            # A copy: some optimizers compute in the gradient's own memory.
            gradient = self.cycle[t % CYCLE] * trainee.loss_scale
            trainee.weight.grad = gradient.to(trainee.weight.dtype, copy=True)
            trainee.step()
        moved = trainee.stored().double() - began
        error = (moved - self.wanted).norm() / self.wanted.norm()
        rate = (moved * self.wanted).sum() / self.wanted.square().sum()
        return {"error": float(error), "rate": float(rate)}


def ours(
    case: Stall, storage: str, device: str = "cpu", *, compile: bool = False
) -> tuple[Trainee, ng.AdamW]:
    """A trainee of one of our storages, and its optimizer for the audit."""
    row = STORAGES[storage]
    weight = nn.Parameter(case.start.to(device, getattr(torch, row.visible), copy=True))
    # Random low bits would be a displacement of their own.
    optimizer = ng.AdamW(
        [("weight", weight)], lr=LR, **OPTIONS, storage=storage, compile=compile, low_bits="zero"
    )
    optimizer.adopt(
        {weight: case.start.to(device).float()}
    )  # a visible format narrower than bfloat16 cuts it

    loss_scale = 1.0
    if row.visible == "float16":
        loss_scale = 2.0 ** round(math.log2(0.1 / case.gradients))

    def step() -> None:
        if weight.grad is not None:
            weight.grad = weight.grad.to(weight.device)
        optimizer.grad_scale = torch.tensor(loss_scale)  # as torch.amp.GradScaler passes it
        optimizer.step()

    return Trainee(weight, step, lambda: optimizer.stored(weight).cpu(), loss_scale), optimizer


def our_row(case: Stall, storage: str) -> Row:
    """Error and audit of one of our storages."""
    trainee, optimizer = ours(case, storage)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = case.compare(trainee)
    reading = ng.audit(optimizer)["weight"]
    return {
        "": f"ours {storage}",
        "bytes per parameter": optimizer.bytes_per_param(),
        **result,
        "asked": f"≤ {ASKED[storage]:g}" if storage in ASKED else "",
        "EDQ": reading.edq,
        "noise": reading.noise,
        "lost": f"{reading.lost_fraction:.1%}",
        "warns": "yes" if any(w.category is UpdateLossWarning for w in caught) else "no",
    }


def published_row(case: Stall, published: PublishedStates) -> Row:
    """Error of states that are kept by published formulas."""
    weight = nn.Parameter(case.start.clone())
    published_step = CodedAdamW(published, case.start, LR, **OPTIONS)

    def step() -> None:
        assert weight.grad is not None
        published_step.step(weight.grad)

    result = case.compare(Trainee(weight, step, lambda: published_step.weight))
    return {
        "": f"published {published.name}",
        "bytes per parameter": published_step.bytes_per_param(),
        **result,
    }


def peer_row(case: Stall, peer: Peer) -> Row:
    """Error of a peer, or why there is none."""
    row: Row = {"": peer.name, "bytes per parameter": peer.bytes_per_param}
    if not peer.is_installed:
        return {**row, "warns": NOT_INSTALLED}
    weight = nn.Parameter(case.start.clone())
    try:
        optimizer = peer.make([weight], lr=LR, **OPTIONS)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = case.compare(
                Trainee(weight, optimizer.step, lambda: peer.stored(optimizer, weight))
            )
    except (ImportError, RuntimeError) as refused:  # its kernels need what this machine may lack
        return {**row, "warns": reason(refused)}
    shown = [
        w for w in caught if "_stable_hash_for_caching" not in str(w.message)
    ]  # that one is about compiling
    return {**row, **result, "warns": "yes" if shown else "no"}


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each of our storages, each published state, and each peer."""
    side, steps = QUICK if options.quick else FULL
    case = Stall.make(side, steps, options.scale, options.gradients)
    for name in STORAGES:
        yield our_row(case, name)
    for row in (*PUBLISHED.values(), *CONTROLS.values()):
        yield published_row(case, row)
    for peer in PEERS:
        yield peer_row(case, peer)


def flags() -> argparse.ArgumentParser:
    """All flags."""
    flag_parser = parser(__doc__, rounds=1)
    flag_parser.add_argument(
        "--scale", type=float, default=1.0, help="standard deviation of the weights (default 1)"
    )
    flag_parser.add_argument(
        "--gradients", type=float, default=0.1, help="size of the gradients (default 0.1)"
    )
    return flag_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = flags().parse_args(arguments)
    report = Report("stall", options, peers=PACKAGES)
    rows = list(rows_of(options))
    is_other = options.quick or options.scale != 1 or options.gradients != 0.1
    for row in rows if is_other else ():
        row.pop("asked", None)
    side, steps = QUICK if options.quick else FULL
    title = (
        f"error of the stored displacement, weights of {options.scale:g}, gradients of "
        f"{options.gradients:g}, "
        f"{side} × {side}, lr {LR:g}, {steps} steps"
    )
    report.add(title, rows)
    return report.end()


if __name__ == "__main__":
    exit_by(main)
