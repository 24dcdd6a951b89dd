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
from collections.abc import Sequence
from pathlib import Path

import torch
from _conditions import conditions, digest, named
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


def displacement(storage: str, start: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return how far a storage moves the weights."""
    weight = nn.Parameter(start.clone())
    weight.grad_dtype = gradients[0].dtype
    optimizer = ng.AdamW([weight], storage=storage, low_bits="zero", compile=False, **OPTIONS)
    for values in gradients:
        weight.grad = values.view_as(weight)
        optimizer.step()
    return optimizer.stored(weight).double() - start.double()


def rows_of(num_ranks: int, steps: int) -> list[Row]:
    """Return a row of each sum at a number of ranks."""
    draw = torch.Generator().manual_seed(0)
    common = torch.randn(NUMBER, generator=draw)
    start = (0.02 * torch.randn(64, NUMBER // 64, generator=draw)).bfloat16()
    summed = [means(common, step, num_ranks) for step in range(steps)]
    other = means(common, 0, num_ranks, is_reversed=True)
    wanted = displacement("float64", start.float(), [values["exact"] for values in summed])
    rows = []
    for kind in ("bfloat16", "float32", "reproducible"):
        gradients = [values[kind] for values in summed]
        row: Row = {"row": f"{kind} {num_ranks}", "sum": kind, "ranks": num_ranks}
        row["order"] = float((gradients[0] != other[kind]).float().mean())
        row["error"] = distance(gradients[0], summed[0]["exact"])
        for storage in STORAGES:
            row[storage] = distance(displacement(storage, start, gradients), wanted)
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
        held = {name: digest(name) for storage in STORAGES for name in named(storage)}
        with FILE.open("w") as stream:
            for row in rows:
                record = row | conditions() | {"digests": {row["row"]: held}}
                stream.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    exit_by(main)
