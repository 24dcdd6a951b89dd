"""What is kept of the moments, for every storage and for linear 8-bit codes: gradients steady, spread out, and falling.

Claim: a stochastically cut small float keeps second moments unbiased and above zero, at 12 bits and at 8, where a linear
code in blocks loses every element far below its block's largest. Asked: the mean of v/exact within 1 % for word, compact
and states8, zeros at most 0.1 %. Gradients are ~N(0, s²); s differs from row to row by powers of ten, and inside a row

- even: not at all;
- spread 0.5, spread 2: by e^(0.5 z), e^(2 z), z ~N(0,1);
- falling: by e^(0.5 z), and all of it falls tenfold in the course of the run;
- alike: not at all, and neither do the rows: all are 1e-2. One scale for a tensor is enough here.

Columns: mean, median and 1st to 99th percentile of v/exact; zeros among v; and how far m/√v is off, root mean square
and 99th percentile, in units of the root mean square of the exact one. That ratio is taken as the next step takes it,
with its gradient taken in: where a second moment is kept as zero, the new gradient's share is all that the step divides by.

Baseline: the same recursions in float64. Beside ours: published 8-bit states (``tests/oracles/published_states.py``), each
regime a tensor of its own, and a plain linear code of m and of √v to the nearest, 8 bits each with a float32 scale per 32
elements.

Our recursions run in our optimizer, at a learning rate of 0. Both moments begin near their limits, so that runs may be
shorter than the memory of a second moment: at beta2 0.9999 what begins is still there in the end, and only the errors of
the steps in between are seen. Storages whose moments have the same codes to the nearest share a row.

Run: ``./dev bench second_moments [--out FOLDER] [--quick]``. Each row of a beta2 is kept under ``--out``, and an interrupted run
goes on where it was (``_parts.py``). All rows take about 7 minutes on 2 cores. No times are taken, so ``--rounds`` has no effect.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from _parts import Part, add_out, complete, out_folder
from timing import Report, Row, exit_by, parser
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.spec.storages import STORAGES, Storage

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracles.adamw import directions
from oracles.published_states import PUBLISHED, Kept

REGIMES = {"even": 0.0, "spread 0.5": 0.5, "spread 2": 2.0, "falling": 0.5, "alike": 0.0}
BETA1 = 0.9
STEPS = {0.95: 400, 0.999: 4000, 0.9999: 4000}
STEP_SECONDS = 2.2e-3
"""That a step of one row takes, at 32 × 256."""
SAMPLES = 10
BLOCK = 32


@dataclass(frozen=True)
class Gradients:
    """Gradients of all regimes in one matrix, so that each recursion is run once.

    Args:
        scale: the standard deviation of each element, ``[regime, row, column]``.
        steps: after how many the falling ones have fallen.
    """

    scale: Tensor
    steps: int

    @classmethod
    def make(cls, rows: int, width: int, steps: int) -> Gradients:
        """``rows`` rows of ``width`` elements for each regime."""
        generator = torch.Generator().manual_seed(4)
        sigma = torch.tensor(list(REGIMES.values()))[:, None, None]
        inside = (sigma * torch.randn(len(REGIMES), rows, width, generator=generator)).exp()
        scale = 10 ** torch.linspace(-4, -1, rows)[:, None] * inside
        scale[list(REGIMES).index("alike")] = 1e-2
        return cls(scale, steps)

    def limit(self) -> Tensor:
        """A gradient whose square is where the second moment will stay: bfloat16, ``[rows of all, width]``."""
        return self.scale.flatten(0, 1).bfloat16()

    def at(self, step: int) -> Tensor:
        """The gradient of one step."""
        drawn = torch.randn(self.scale.shape, generator=torch.Generator().manual_seed(1000 + step)) * self.scale
        drawn[list(REGIMES).index("falling")] *= 10 ** (-step / self.steps)
        return drawn.flatten(0, 1).bfloat16()


class Exact:
    """Both moments in float64, or cut after every step by functions that give what is kept of them.

    Args:
        name: what the table calls it.
        first, second: cut a moment.
    """

    def __init__(
        self,
        name: str = "exact",
        first: Callable[[Tensor], Tensor] | None = None,
        second: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.name, self._cuts = name, (first, second)
        self.moments = torch.zeros(()), torch.zeros(())

    def step(self, g: Tensor, beta2: float) -> None:
        """Take in a gradient."""
        first_cut, second_cut = self._cuts
        g = g.double() if first_cut is None else g.float()
        m = BETA1 * self.moments[0] + (1 - BETA1) * g
        v = beta2 * self.moments[1] + (1 - beta2) * g * g
        self.moments = (m if first_cut is None else first_cut(m), v if second_cut is None else second_cut(v))


class Ours:
    """Both moments in our optimizer, whose weights stand still."""

    def __init__(self, name: str, storage: Storage, shape: torch.Size) -> None:
        self.name = name
        values = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 0.02
        self.weight = nn.Parameter(values.bfloat16().to(getattr(torch, storage.visible)))
        self.optimizer = ng.AdamW(
            [self.weight], lr=0.0, weight_decay=0.0, storage=storage, audit_every=0, compile=False
        )

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """What is kept, float32."""
        return self.optimizer.stored(self.weight, "exp_avg"), self.optimizer.stored(self.weight, "exp_avg_sq")

    def step(self, g: Tensor, beta2: float) -> None:
        """Take in a gradient."""
        self.optimizer.param_groups[0]["betas"] = (BETA1, beta2)
        self.weight.grad = g.to(self.weight.dtype)
        self.optimizer.step()


def linear(x: Tensor, steps: int) -> Tensor:
    """``x`` after a linear code to the nearest, of ``steps`` steps from zero to the largest of each block of a row."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / steps
    return torch.where(scale > 0, (blocks / scale).round() * scale, 0.0).flatten(-2)


def by_regime(x: Tensor) -> tuple[Tensor, ...]:
    """The rows of each regime."""
    return x.chunk(len(REGIMES))


def published(kept: Kept) -> Callable[[Tensor], Tensor]:
    """A published code, there and back, of each regime as a tensor of its own."""
    return lambda x: torch.cat([kept.there_and_back(part) for part in by_regime(x)])


def contenders(names: Sequence[str], shape: torch.Size) -> list[Exact | Ours]:
    """Ours, a row for each pair of codes, the published ones, and the linear codes."""
    alike: dict[object, list[str]] = {}
    for name in names:
        row = STORAGES[name]
        if row.visible == "float16":
            continue  # its gradients would be cut as well; its moments have the codes of a bfloat16 row
        dithered = "stochastic" in (row.exp_avg.rounding, row.exp_avg_sq.rounding)
        alike.setdefault(name if dithered else (row.exp_avg, row.exp_avg_sq, row.arithmetic), []).append(name)
    ours = [Ours(", ".join(members), STORAGES[members[0]], shape) for members in alike.values()]
    return [
        *ours,
        *(
            Exact(f"published {row.name}", published(row.exp_avg), published(row.exp_avg_sq))
            for row in PUBLISHED.values()
        ),
        Exact("linear codes", lambda m: linear(m, 127), lambda v: linear(v.sqrt(), 255).square()),
    ]


@dataclass
class Errors:
    """What was seen of one contender in one regime, over elements and samples."""

    ratios: list[Tensor] = field(default_factory=list)
    misses: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    num_zeros: int = 0

    def add(self, v: Tensor, exact_v: Tensor, direction: Tensor, exact_direction: Tensor) -> None:
        """Note one sample."""
        self.ratios.append((v.double() / exact_v).flatten())
        self.num_zeros += int((v == 0).sum())
        self.misses.append((direction - exact_direction).abs().flatten())
        self.squares.append(exact_direction.square().flatten())

    def row(self, name: str) -> Row:
        """The table's columns."""
        ratios, misses = torch.cat(self.ratios), torch.cat(self.misses)
        low, median, high = torch.quantile(ratios, torch.tensor([0.01, 0.5, 0.99]).double()).tolist()
        unit = float(torch.cat(self.squares).mean().sqrt())
        return {
            "": name,
            "v/exact mean": f"{float(ratios.mean()):.4f}",
            "median": f"{median:.3f}",
            "p1–p99": f"{low:.2f}–{high:.2f}",
            "zeros": f"{self.num_zeros / len(ratios):.2%}",
            "m/√v rms": float(misses.square().mean().sqrt()) / unit,
            "m/√v p99": float(torch.quantile(misses, 0.99)) / unit,
        }


def errors_of(gradients: Gradients, beta2: float, running: Sequence[Exact | Ours]) -> dict[str, list[Row]]:
    """Run recursions side by side, and look at them over the last quarter of the steps: rows by regime."""
    exact = Exact()
    everyone = (exact, *running)
    for one in everyone:
        one.step(gradients.limit(), 0.0)
    errors = {(one.name, regime): Errors() for one in running for regime in REGIMES}
    sampled = {gradients.steps - 1 - k * max(1, gradients.steps // (4 * SAMPLES)) for k in range(SAMPLES)}
    for step in range(gradients.steps):
        g = gradients.at(step)
        if step in sampled:
            _look(errors, exact, running, g, beta2)
        for one in everyone:
            one.step(g, beta2)
    return {regime: [errors[one.name, regime].row(one.name) for one in running] for regime in REGIMES}


def _look(
    errors: dict[tuple[str, str], Errors], exact: Exact, running: Sequence[Exact | Ours], g: Tensor, beta2: float
) -> None:
    wanted = by_regime(exact.moments[1]), by_regime(directions(*exact.moments, g, (BETA1, beta2)))
    for one in running:
        m, v = one.moments
        found = by_regime(v), by_regime(directions(m, v, g, (BETA1, beta2)))
        for k, regime in enumerate(REGIMES):
            errors[one.name, regime].add(found[0][k], wanted[0][k], found[1][k], wanted[1][k])


def parts(options: argparse.Namespace) -> dict[float, list[Part]]:
    """A part for each row, by beta2."""
    found = {}
    rows, width = (4, 64) if options.quick else (options.rows, options.width)
    for beta2 in options.betas:
        gradients = Gradients.make(rows, width, 40 if options.quick else options.steps or STEPS[beta2])
        settings = {"beta2": beta2, "rows": rows, "width": width, "steps": gradients.steps}
        seconds = STEP_SECONDS * gradients.steps * rows * width / (32 * 256)
        # Each draws the gradients and computes the exact moments again, a sixth of its time.
        found[beta2] = [
            Part(f"{one.name}, beta2 {beta2:g}", settings, partial(errors_of, gradients, beta2, [one]), seconds)
            for one in contenders(options.storages, gradients.limit().shape)
        ]
    return found


def flags() -> argparse.ArgumentParser:
    """All flags."""
    made = parser(__doc__, rounds=1)
    add_out(made, "second-moments")
    made.add_argument("--storages", nargs="+", choices=list(STORAGES), default=list(STORAGES), metavar="NAME")
    made.add_argument("--betas", nargs="+", type=float, choices=list(STEPS), default=list(STEPS), metavar="BETA2")
    made.add_argument("--width", type=int, default=256, help="elements per row, a multiple of 32 (default 256)")
    made.add_argument("--rows", type=int, default=32, help="rows of each regime (default 32)")
    made.add_argument("--steps", type=int, help="default: 400 at beta2 0.95, 4000 above")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = flags().parse_args(arguments)
    report, wanted = Report("second moments", options), parts(options)
    with out_folder(options, "second-moments") as out:
        made = complete([part for of_beta in wanted.values() for part in of_beta], out, report)
    for beta2, of_beta in wanted.items():
        size = "{rows} × {width}, {steps} steps".format(**of_beta[0].settings)
        for regime in REGIMES:
            table = [row for part in of_beta for row in made[part.name][regime]]
            report.add(f"{regime}, beta2 {beta2:g}, {size}", table)
    return report.end()


if __name__ == "__main__":
    exit_by(main)
