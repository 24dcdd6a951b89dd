"""How ``word`` deals its 32 bits to tail, first and second moment: candidates beside the row that is built in.

Claim: 8 bits of tail, 12 of first and 12 of second moment are a good split. A longer tail makes the stored weight finer
(the stall case), more mantissa makes a moment less noisy, more exponent keeps smaller and larger gradients; 32 bits
cannot have all three. Per candidate:

- stall error, noise: the stall case (``stall.py``), and its audit's ‖E−D‖/‖D‖;
- v bias, v rms: mean and root mean square of v/exact − 1 for gradients ~N(0, s²) whose s differs by group and by
  element, after the moments have settled, over elements and over the last steps, at beta2 0.95 and 0.999;
- ratio rms: error of m/√v, as a share of the root mean square of the exact ratio;
- gradients kept: powers of two between which neither moment leaves its window of normal values.

Baseline: both moments in float64. Run: ``./dev bench word_split [--quick]``; about three minutes on two cores. No
times are taken, so ``--rounds`` has no effect.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from stall import Stall, our_row
from timing import Report, Row, parser
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.spec.storages import MOMENT12, SECOND12, STORAGES, TAIL8, Code, Storage

GROUPS = 512
BETAS2 = (0.95, 0.999)


@dataclass(frozen=True)
class Split:
    """A candidate: bits of tail, and exponent, mantissa and lowest exponent of each moment."""

    tail: int
    first: tuple[int, int, int]
    second: tuple[int, int, int]

    @property
    def name(self) -> str:
        """Such as ``8 / s+e6m5 / e7m5``."""
        return f"{self.tail} / s+e{self.first[0]}m{self.first[1]} / e{self.second[0]}m{self.second[1]}"

    def storage(self) -> Storage:
        """The row of ``word`` with these codes."""
        row = STORAGES["word"]
        weight = replace(TAIL8, name=f"bfloat16 + {self.tail}-bit tail", mantissa_bits=7 + self.tail)
        moments = [
            replace(code, name=f"e{exponent}m{mantissa}", exponent_bits=exponent, mantissa_bits=mantissa, lowest=lowest)
            for code, (exponent, mantissa, lowest) in ((MOMENT12, self.first), (SECOND12, self.second))
        ]
        made = replace(row, name=f"word {self.name}", weight=weight, exp_avg=moments[0], exp_avg_sq=moments[1])
        assert sum(bits for _, bits in made.fields) == 32, made.name
        return made


CANDIDATES = (
    Split(8, (6, 5, -54), (7, 5, -108)),
    Split(8, (5, 5, -26), (7, 6, -108)),
    Split(8, (6, 6, -54), (7, 4, -108)),
    Split(8, (5, 6, -26), (6, 6, -54)),
    Split(8, (8, 3, -126), (8, 4, -126)),
    Split(6, (6, 6, -54), (7, 6, -108)),
    Split(7, (6, 5, -54), (7, 6, -108)),
    Split(9, (6, 5, -54), (7, 4, -108)),
    Split(10, (6, 4, -54), (7, 4, -108)),
    Split(12, (6, 3, -54), (7, 3, -108)),
)


def range_of(storage: Storage) -> str:
    """Between which powers of two a steady gradient has both moments in their windows' normal values."""
    first, second = storage.exp_avg, storage.exp_avg_sq
    return f"2^{max(first.lowest, -(-second.lowest // 2))}…2^{min(first.highest, second.highest // 2)}"


@dataclass
class Moments:
    """Running sums of the errors of both moments."""

    count: int = 0
    bias: float = 0.0
    square: float = 0.0
    ratio_error: float = 0.0
    ratio_square: float = 0.0

    def add(self, m: Tensor, v: Tensor, exact_m: Tensor, exact_v: Tensor) -> None:
        """Note one step."""
        relative = v.double() / exact_v - 1
        ratio, exact = m.double() / v.double().sqrt(), exact_m / exact_v.sqrt()
        self.count += 1
        self.bias += float(relative.mean())
        self.square += float(relative.square().mean())
        self.ratio_error += float((ratio - exact).square().mean())
        self.ratio_square += float(exact.square().mean())

    def row(self, beta2: float) -> Row:
        """The table's columns."""
        return {
            f"v bias, {beta2:g}": f"{self.bias / self.count:+.4f}",
            f"v rms, {beta2:g}": (self.square / self.count) ** 0.5,
            f"ratio rms, {beta2:g}": (self.ratio_error / self.ratio_square) ** 0.5,
        }


def settled_moments(storage: Storage, beta2: float, *, width: int, settle: int, watch: int) -> Moments:
    """Moments of a stationary gradient, watched for ``watch`` steps after ``settle`` steps.

    Args:
        storage: the row.
        beta2: decay of the second moment.
        width: elements per group; groups differ in scale by powers of ten, elements of one by e^(z/2).
        settle, watch: numbers of steps.
    """
    generator = torch.Generator().manual_seed(2)
    scale = 10 ** torch.linspace(-4, -1, GROUPS)[:, None] * (torch.randn(GROUPS, width, generator=generator) / 2).exp()
    weight = nn.Parameter((torch.randn(GROUPS, width, generator=generator) * 0.02).bfloat16())
    optimizer = ng.AdamW([weight], lr=1e-5, betas=(0.9, beta2), storage=storage, audit_every=0, compile=False)
    m, v = torch.zeros(GROUPS, width).double(), torch.zeros(GROUPS, width).double()
    sums = Moments()
    for step in range(settle + watch):
        weight.grad = (torch.randn(GROUPS, width, generator=generator) * scale).bfloat16()
        optimizer.step()
        g = weight.grad.double()
        m.lerp_(g, 1 - 0.9)
        v.lerp_(g * g, 1 - beta2)
        if step >= settle:
            sums.add(optimizer.stored(weight, "exp_avg"), optimizer.stored(weight, "exp_avg_sq"), m, v)
    return sums


def mantissas_survive(storage: Storage, side: int) -> bool:
    """Whether tail and word give every stored weight back: values on the code's own grid, there and back."""
    generator = torch.Generator().manual_seed(3)
    step = 1 << (23 - storage.weight.mantissa_bits)
    values = torch.randn(side, side, generator=generator)
    values = (values.view(torch.int32) & -step).view(torch.float32)
    weight = nn.Parameter(values.bfloat16())
    optimizer = ng.AdamW([weight], storage=storage, compile=False)
    optimizer.adopt({weight: values})
    return bool(torch.equal(optimizer.stored(weight), values))


def row_of(split: Split, case: Stall, *, width: int, settle: dict[float, int], watch: int) -> Row:
    """Everything about one candidate."""
    storage = split.storage()
    stalled = our_row(case, storage)
    row: Row = {
        "tail / m / v": split.name,
        "stall error": stalled["error"],
        "noise": stalled["noise"],
        "EDQ": stalled["EDQ"],
    }
    for beta2 in BETAS2:
        row |= settled_moments(storage, beta2, width=width, settle=settle[beta2], watch=watch).row(beta2)
    row["gradients kept"] = range_of(storage)
    row["exact"] = "yes" if mantissas_survive(storage, 64) else "NO"
    return row


def built_in() -> Split:
    """The split that ``word`` has."""

    def parts(code: Code) -> tuple[int, int, int]:
        return code.exponent_bits, code.mantissa_bits, code.lowest

    row = STORAGES["word"]
    return Split(row.tail_bits, parts(row.exp_avg), parts(row.exp_avg_sq))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=1).parse_args(arguments)
    report = Report("word split", options)
    case = Stall.make(32, 100) if options.quick else Stall.make(128, 400)
    sizes: dict[str, Any] = {"width": 2, "settle": {0.95: 20, 0.999: 20}, "watch": 5}
    if not options.quick:
        sizes = {"width": 32, "settle": {0.95: 200, 0.999: 3000}, "watch": 100}
    chosen = built_in()
    splits = dict.fromkeys((chosen, *CANDIDATES))
    rows = []
    for split in splits:
        rows.append(row_of(split, case, **sizes))
        if sys.stderr.isatty():
            print(f"{len(rows)} of {len(splits)}", end="\r", file=sys.stderr)
    rows[0]["tail / m / v"] += "  ← word"
    report.add("splits of the 32 bits", rows)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
