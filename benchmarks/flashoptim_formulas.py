"""FlashOptim's arithmetic beside ours, where it is weak: small updates, tiny gradients, unequal neighbours, resuming.

Claim: at no more bytes, ``compact`` is better on each. Cases, at beta2 0.999, each a 64 × 256 weight but the first:

- stall: the case of ``stall.py``; an 8-bit tail cut to the nearest loses small updates, one cut stochastically does not;
- 1e-7: gradients of that root mean square, where float16 scales have few bits left;
- unequal: gradients ~N(0, s²), s = 1e-3 e^(2 z) by element, z ~N(0,1): second moments far below their
  group's largest become zero in a linear code, and the next step there is far too long;
- load: a checkpoint is taken, loaded, and both go on: do the same bits lie there, and do they stay the same? FlashOptim's
  default checkpoint holds moments as bfloat16; one that keeps its codes can be requested;
- usual: gradients of root mean square 1e-2 and equal neighbours, where none of this shows. No claim is made of it:
  FlashOptim's 8 bits, all of them mantissa, are finer there than ours, which spend 4 and 5 on range.

Columns: error of the stored weights' movement, ‖moved − wanted‖ / ‖wanted‖; error of m/√v as the next step takes it,
root mean square, in units of the exact one's; zeros among second moments; shares of kept values that a load changes and
of weights that differ 20 steps later; bytes per parameter, bfloat16 gradient included, counted from live tensors.

Baseline: the same AdamW in float64. FlashOptim refuses machines without CUDA, so its published formulas stand for it
(``tests/oracles/flashoptim.py``). Run: ``./dev bench flashoptim_formulas [--quick]``. No times are taken, so ``--rounds`` has no
effect.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from stall import LR as STALL_LR
from stall import Stall
from timing import Report, Row, parser
from torch import Tensor

from narrowgauge.spec.storages import STORAGES

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracles.adamw import AdamW64, Deviation, deviation
from oracles.flashoptim import FlashAdamW
from stored_weight import StoredWeight

BETAS = (0.9, 0.999)
LR = 1e-4
THEIRS = "FlashOptim's formulas"
OURS = ("compact", "word")


class Ours(StoredWeight):
    """One weight in one of our storages, which can be saved and loaded."""

    def kept(self) -> dict[str, Tensor]:
        """Every value that is kept, by name."""
        return {
            "seen": self.parameter.detach(),
            "weight": self.weight,
            "first": self.exp_avg,
            "second": self.exp_avg_sq,
        }

    def resumed(self) -> Ours:
        """Another one, loaded from what ``torch.save`` wrote of this one's ``state_dict``."""
        stream = io.BytesIO()
        torch.save({"weight": self.parameter.detach(), "optimizer": self.optimizer.state_dict()}, stream)
        stream.seek(0)
        saved = torch.load(stream)
        other = Ours(self.storage, saved["weight"], self.lr)
        other.optimizer.load_state_dict(saved["optimizer"])
        return other

    def bytes_per_param(self) -> float:
        """Counted from live tensors."""
        return self.optimizer.bytes_per_param()


Maker = Callable[[Tensor, float], "Ours | FlashAdamW"]


@dataclass(frozen=True)
class Sizes:
    """How large the cases are."""

    rows: int
    width: int
    steps: int
    stall_side: int
    stall_steps: int


def weights(sizes: Sizes) -> Tensor:
    """bfloat16 weights ~N(0, 0.02²)."""
    generator = torch.Generator().manual_seed(6)
    return (torch.randn(sizes.rows, sizes.width, generator=generator) * 0.02).bfloat16()


def drifting(sizes: Sizes, rms: float) -> list[Tensor]:
    """Gradients of one root mean square that push one way with noise, as in the stall case."""
    generator = torch.Generator().manual_seed(7)
    shape, unit = (sizes.rows, sizes.width), rms / 1.25**0.5
    return [((0.5 + torch.randn(shape, generator=generator)) * unit).bfloat16() for _ in range(sizes.steps)]


def unequal(sizes: Sizes) -> list[Tensor]:
    """Gradients whose scale differs from element to element, log-normally with sigma 2."""
    generator = torch.Generator().manual_seed(8)
    shape = (sizes.rows, sizes.width)
    scale = 1e-3 * (2 * torch.randn(shape, generator=generator)).exp()
    return [(torch.randn(shape, generator=generator) * scale).bfloat16() for _ in range(sizes.steps)]


def followed(make: Maker, sizes: Sizes, gradients: Sequence[Tensor]) -> Deviation:
    """How far one of them is from float64 after these gradients."""
    start = weights(sizes)
    return deviation(make(start, LR), AdamW64(start, LR, BETAS), gradients)


def stalled(make: Maker, sizes: Sizes) -> float:
    """The error of the stall case."""
    case = Stall.make(sizes.stall_side, sizes.stall_steps)
    one = make(case.start, STALL_LR)
    began = one.weight.double()
    for t in range(1, case.steps + 1):
        one.step(case.cycle[t % len(case.cycle)])
    return float((one.weight.double() - began - case.wanted).norm() / case.wanted.norm())


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The share of all values that are not the same."""
    unequal = sum(int((one[name] != other[name]).sum()) for name in one)
    return unequal / sum(value.numel() for value in one.values())


def resumption(make: Maker, sizes: Sizes, more: int = 20) -> tuple[float, float, float]:
    """What a checkpoint changes, which weights differ ``more`` steps later, and bytes per parameter."""
    gradients = drifting(sizes, 1e-3)
    one = make(weights(sizes), LR)
    for g in gradients[:-more]:
        one.step(g)
    other = one.resumed()
    at_once = differing(one.kept(), other.kept())
    for g in gradients[-more:]:
        one.step(g)
        other.step(g)
    return at_once, differing({"weight": one.weight}, {"weight": other.weight}), one.bytes_per_param()


def row_of(name: str, make: Maker, sizes: Sizes) -> Row:
    """All figures of one of them; less is better in every column."""
    changed, diverged, size = resumption(make, sizes)
    usual, tiny = (followed(make, sizes, drifting(sizes, rms)) for rms in (1e-2, 1e-7))
    spread = followed(make, sizes, unequal(sizes))
    return {
        "": name,
        "B/param": size,
        "stall": stalled(make, sizes),
        "1e-7: movement": tiny.movement,
        "1e-7: m/√v": tiny.direction,
        "unequal: movement": spread.movement,
        "unequal: m/√v": spread.direction,
        "unequal: v zero": spread.zeros,
        "load: changed": changed,
        "load: differ later": diverged,
        "usual: movement": usual.movement,
        "usual: m/√v": usual.direction,
    }


def verdict(ours: Row, theirs: Row) -> str:
    """In which columns ours is better, and in which it is not."""
    columns = [name for name in ours if name]
    worse = [
        f"{name.strip()} ({ours[name]:.3g} against {theirs[name]:.3g})" for name in columns if ours[name] > theirs[name]
    ]
    return f"{ours['']} is better or equal in {len(columns) - len(worse)} of {len(columns)} columns" + (
        f"; worse in {', '.join(worse)}." if worse else "."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=1).parse_args(arguments)
    report = Report("flashoptim_formulas", options)
    sizes = Sizes(8, 64, 60, 32, 50) if options.quick else Sizes(64, 256, 1000, 256, 400)
    makers: dict[str, Maker] = {THEIRS: lambda start, lr: FlashAdamW(start, lr, BETAS)}
    for storage in OURS:
        if storage in STORAGES:
            makers[f"ours {storage}"] = lambda start, lr, storage=storage: Ours(storage, start, lr)
    theirs, *ours = [row_of(name, make, sizes) for name, make in makers.items()]
    report.add(
        f"errors after {sizes.steps} steps at lr {LR:g}; stall after {sizes.stall_steps} at {STALL_LR:g}",
        [theirs, *ours],
    )
    for row in ours:
        report.note(verdict(row, theirs))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
