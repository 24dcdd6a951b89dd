"""How errors of sums over ranks grow with the number of ranks.

Claim: a sum of bfloat16 gradients in bfloat16, as a ring adds it, is worse by each rank; a float32
sum is not yet seen at 4,096 ranks, and a ``reproducible`` one has one rounding. A rank's gradient is
0.1 N(0, 1), the same on all ranks, plus its own N(0, 1), in bfloat16; 4,096 elements. *Order*: the
share of elements of a mean that the reverse order of the ranks changes. *Error*: ‖mean − exact‖ /
‖exact‖.

Baseline: float64 sums. This is a simulation in one process; nothing is sent.

Run: ``./dev bench growth [--quick]``; a minute of a core. It writes ``benchmarks/growth.jsonl``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from _conditions import digest, keep_newest
from _timing import begin, exit_by, parser, show
from torch import Tensor

from narrowgauge.numerics.exact_sums import ExactSums

FILE = Path(__file__).with_suffix(".jsonl")
THIS = "text: benchmarks/growth.py"
RANKS = (1, 16, 256, 4096)
NUMBER = 4096


def gradient(common: Tensor, rank: int) -> Tensor:
    """Return the gradient of a rank, which these fix."""
    draw = torch.Generator().manual_seed(rank)
    return (0.1 * common + torch.randn(NUMBER, generator=draw)).bfloat16()


def means(common: Tensor, num_ranks: int, is_reversed: bool = False):
    """Return the mean over ranks by each sum, one rank added to the next."""
    narrow = torch.zeros(NUMBER, dtype=torch.bfloat16)
    wide = torch.zeros(NUMBER)
    exact = torch.zeros(NUMBER, dtype=torch.float64)
    reproducible = ExactSums(NUMBER)
    ranks = range(num_ranks)
    for rank in reversed(ranks) if is_reversed else ranks:
        x = gradient(common, rank)
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


def rows_of(num_ranks: int):
    """Return a row of each sum at a number of ranks."""
    common = torch.randn(NUMBER, generator=torch.Generator().manual_seed(0))
    first = means(common, num_ranks)
    other = means(common, num_ranks, is_reversed=True)
    rows = []
    for kind in ("bfloat16", "float32", "reproducible"):
        row = {"row": f"{kind}, {num_ranks} ranks", "sum": kind, "ranks": num_ranks}
        row["order"] = float((first[kind] != other[kind]).float().mean())
        row["error"] = distance(first[kind], first["exact"])
        rows.append(row)
    return rows


def main() -> int:
    """Simulate all numbers of ranks."""
    options = parser(__doc__, rounds=1).parse_args()
    begin("growth", options)
    rows = []
    for num_ranks in RANKS[:2] if options.quick else RANKS:
        rows += rows_of(num_ranks)
    show("errors by number of ranks", rows)
    if not options.quick:
        held = {THIS: digest(THIS)}
        keep_newest(FILE, [row | {"digests": {row["row"]: held}} for row in rows])
    return 0


if __name__ == "__main__":
    exit_by(main)
