"""How errors of sums over ranks grow with the number of ranks, beside the roundings of storages.

Claim: a sum of bfloat16 gradients in bfloat16, as a ring adds it, is worse by each rank; a float32 sum
is not yet seen at 4,096 ranks, and a ``reproducible`` one has one rounding. A stochastic storage rounds
as much at one rank as at 4,096. A rank's gradient is 0.1 N(0, 1), the same on all ranks, plus its own
N(0, 1), in bfloat16; 4,096 elements. *Order*: the share of elements of a mean that the reverse
order of the ranks changes. *Error*: ‖mean − exact‖ / ‖exact‖. A storage takes ten
steps of AdamW at 1e-4 from weights of 0.02 by these means; its error is that of the displacement,
beside AdamW in float64 by exact means.

Baseline: float64 sums. This is a simulation in one process; nothing is sent.

Run: ``./dev bench growth [--quick]``; a minute of a core. It writes ``benchmarks/growth.jsonl``.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from _conditions import conditions, digests
from _timing import Row, begin, exit_by, parser, show
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics.exact_sums import ExactSums

FILE = Path(__file__).with_suffix(".jsonl")
RANKS = (1, 16, 256, 4096)
STORAGES = ("master", "word", "stochastic")
NUMBER = 4096
STEPS = 10
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def gradient(common: Tensor, step: int, rank: int) -> Tensor:
    """Return the gradient of a rank in a step, which these fix."""
    draw = torch.Generator().manual_seed(step * 8192 + rank)
    return (0.1 * common + torch.randn(NUMBER, generator=draw)).bfloat16()


def means(
    common: Tensor, step: int, num_ranks: int, is_reversed: bool = False
) -> dict[str, Tensor]:
    """Return the mean over ranks by each sum, one rank added to the next."""
    narrow = torch.zeros(NUMBER, dtype=torch.bfloat16)
    wide = torch.zeros(NUMBER)
    exact = torch.zeros(NUMBER, dtype=torch.float64)
    reproducible = ExactSums(NUMBER)
    ranks = range(num_ranks)
    for rank in reversed(ranks) if is_reversed else ranks:
        x = gradient(common, step, rank)
        narrow += x
        wide += x.float()
        exact += x.double()
        reproducible.add_(x.float())
    return {
        "bfloat16": narrow.float() / num_ranks,
        "float32": wide / num_ranks,
        "reproducible": reproducible.total() / num_ranks,
        "exact": exact / num_ranks,
    }


def distance(x: Tensor, wanted: Tensor) -> float:
    return float((x.double() - wanted).norm() / wanted.norm())


def rows_of(num_ranks: int, steps: int) -> list[Row]:
    """Return a row of each sum at a number of ranks."""
    draw = torch.Generator().manual_seed(0)
    common = torch.randn(NUMBER, generator=draw)
    start = (0.02 * torch.randn(64, NUMBER // 64, generator=draw)).bfloat16()
    exact = nn.Parameter(start.double())
    reference = torch.optim.AdamW([exact], **OPTIONS)
    optimizers = {}
    for kind in ("bfloat16", "float32", "reproducible"):
        for storage in STORAGES:
            weight = nn.Parameter(start.clone())
            kinds = {"storage": storage, "low_bits": "zero", "compile": False}
            optimizers[kind, storage] = ng.AdamW([weight], **kinds, **OPTIONS), weight
    first = means(common, 0, num_ranks)
    other = means(common, 0, num_ranks, is_reversed=True)
    for step in range(steps):
        summed = means(common, step, num_ranks)
        exact.grad = summed["exact"].view_as(exact)
        reference.step()
        for (kind, _), (optimizer, weight) in optimizers.items():
            weight.grad_dtype = torch.float32
            weight.grad = summed[kind].view_as(weight)
            optimizer.step()
    rows = []
    for kind in ("bfloat16", "float32", "reproducible"):
        changed = (first[kind] != other[kind]).float().mean()
        row: Row = {"row": f"{kind} {num_ranks}", "sum": kind, "ranks": num_ranks}
        row |= {"order": float(changed), "error": distance(first[kind], first["exact"])}
        for storage in STORAGES:
            optimizer, weight = optimizers[kind, storage]
            moved = optimizer.stored(weight).double() - start.double()
            row[storage] = distance(moved, exact.detach() - start.double())
        rows.append(row)
    return rows


def main() -> int:
    """Simulate all numbers of ranks."""
    options = parser(__doc__, rounds=1).parse_args()
    begin("growth", options)
    rows = []
    for num_ranks in RANKS[:2] if options.quick else RANKS:
        rows += rows_of(num_ranks, 2 if options.quick else STEPS)
    show("errors by number of ranks", rows)
    if not options.quick:
        held: dict[str, str] = {}
        for parts in digests("word", ("stochastic", "master")).values():
            held |= parts
        lines = []
        for row in rows:
            lines.append(json.dumps(row | conditions() | {"digests": {row["row"]: held}}) + "\n")
        FILE.write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    exit_by(main)
