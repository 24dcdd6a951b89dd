"""What a small update leaves behind: the stall case, for every storage and for the optimizers in use.

Claim: at a small learning rate, bfloat16 weights stop moving unless more of them is kept, and 8 extra bits of each,
stochastically rounded, keep them moving. Weights ~N(0,1), gradients 0.05 + 0.1 N(0,1) from a cycle of 50, lr 1e-5,
beta2 0.999, 400 steps; the figure is the error of the stored weights' displacement, ‖moved − wanted‖ / ‖wanted‖: 0 is
perfect, 1 a weight that never moved.

Yardstick: the same AdamW in float64. Beside ours: torch's AdamW over bfloat16 weights, optimi's Kahan AdamW, torchao's
AdamW8bit with stochastic rounding.

Run: ``./dev bench stall [--quick]``. No times are taken, so ``--rounds`` has no effect.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timing import NOT_INSTALLED, Report, Row, parser, peer_version
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.storages import STORAGES, Storage

OPTIONS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
CYCLE = 50
LR = 1e-5


@dataclass(frozen=True)
class Trainee:
    """A bfloat16 or float32 weight, the step that moves it, and how to read what is stored of it."""

    weight: nn.Parameter
    step: Callable[[], object]
    stored: Callable[[], Tensor]


@dataclass(frozen=True)
class Stall:
    """The stall case: where weights begin, the gradients they see, and where AdamW in float64 takes them."""

    start: Tensor
    cycle: tuple[Tensor, ...]
    steps: int
    wanted: Tensor

    @classmethod
    def make(cls, side: int, steps: int, seed: int = 1) -> Stall:
        """The case for a ``side`` × ``side`` weight."""
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(side, side, generator=generator).bfloat16()
        cycle = tuple((0.05 + 0.1 * torch.randn(side, side, generator=generator)).bfloat16() for _ in range(CYCLE))
        x = start.double()
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        for t in range(1, steps + 1):
            g = cycle[t % CYCLE].double()
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            x = x - LR * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        return cls(start, cycle, steps, x - start.double())

    def error(self, trainee: Trainee) -> float:
        """Train, and compare the displacement of what is stored."""
        for t in range(1, self.steps + 1):
            # A copy: some optimizers compute in the gradient's own memory.
            trainee.weight.grad = self.cycle[t % CYCLE].to(trainee.weight.dtype, copy=True)
            trainee.step()
        moved = trainee.stored().double() - self.start.double()
        return float((moved - self.wanted).norm() / self.wanted.norm())


def ours(
    case: Stall, storage: str | Storage, device: str = "cpu", *, compile: bool = False
) -> tuple[Trainee, ng.AdamW]:
    """A trainee of one of our storages, and its optimizer for the audit."""
    row = STORAGES[storage] if isinstance(storage, str) else storage
    weight = nn.Parameter(case.start.to(device, getattr(torch, row.visible), copy=True))
    optimizer = ng.AdamW([("weight", weight)], lr=LR, **OPTIONS, storage=row, compile=compile)

    def step() -> None:
        if weight.grad is not None:
            weight.grad = weight.grad.to(weight.device)
        optimizer.step()

    return Trainee(weight, step, lambda: optimizer.stored(weight).cpu()), optimizer


def our_row(case: Stall, storage: str | Storage) -> Row:
    """Error and audit of one of our storages."""
    trainee, optimizer = ours(case, storage)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = case.error(trainee)
    reading = ng.audit(optimizer)["weight"]
    row = STORAGES[storage] if isinstance(storage, str) else storage
    return {
        "": f"ours {row.name}",
        "bytes per parameter": row.bytes_per_param,
        "error": error,
        "EDQ": reading.edq,
        "noise": reading.noise,
        "lost": f"{reading.lost_fraction:.1%}",
        "warns": "yes" if any(w.category is ng.UpdateLossWarning for w in caught) else "no",
    }


def torch_bfloat16(case: Stall) -> Trainee:
    """torch.optim.AdamW over a bfloat16 weight: moments are bfloat16 too."""
    weight = nn.Parameter(case.start.clone())
    return Trainee(weight, torch.optim.AdamW([weight], lr=LR, **OPTIONS).step, weight.detach)


def optimi_kahan(case: Stall) -> Trainee:
    """optimi's AdamW with Kahan summation; stored is the weight and its compensation."""
    from optimi import AdamW

    weight = nn.Parameter(case.start.clone())
    optimizer = AdamW([weight], lr=LR, **OPTIONS, kahan_sum=True)
    return Trainee(
        weight, optimizer.step, lambda: weight.detach().double() + optimizer.state[weight]["kahan_comp"].double()
    )


def torchao_8bit(case: Stall) -> Trainee:
    """torchao's AdamW8bit with stochastic rounding of the bfloat16 weight."""
    from torchao.optim import AdamW8bit

    torch.manual_seed(0)  # its rounding draws from the global generator
    weight = nn.Parameter(case.start.clone())
    optimizer = AdamW8bit([weight], lr=LR, **OPTIONS, bf16_stochastic_round=True)
    return Trainee(weight, optimizer.step, weight.detach)


PEERS: tuple[tuple[str, str, float, Callable[[Stall], Trainee]], ...] = (
    ("torch AdamW bfloat16", "torch", 8, torch_bfloat16),
    ("optimi AdamW Kahan bfloat16", "torch-optimi", 10, optimi_kahan),
    ("torchao AdamW8bit bfloat16 stochastic", "torchao", 6.03, torchao_8bit),
)
"""Name, package, bytes per parameter with a bfloat16 gradient (8-bit states carry a float32 scale per 256), maker."""


def peer_row(case: Stall, name: str, package: str, size: float, make: Callable[[Stall], Trainee]) -> Row:
    """Error of a peer, or why there is none."""
    row: Row = {"": name, "bytes per parameter": size}
    if peer_version(package) == NOT_INSTALLED:
        return {**row, "warns": NOT_INSTALLED}
    try:
        return {**row, "error": case.error(make(case)), "warns": "no"}
    except (ImportError, RuntimeError) as error:  # its kernels need what this machine may lack
        return {**row, "warns": f"did not run: {(str(error).strip() or type(error).__name__).splitlines()[0][:60]}"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=1).parse_args(arguments)
    report = Report("stall", options, peers=[package for _, package, _, _ in PEERS if package != "torch"])
    case = Stall.make(64, 100) if options.quick else Stall.make(256, 400)
    rows = [our_row(case, storage) for storage in STORAGES]
    rows += [peer_row(case, *peer) for peer in PEERS]
    side = case.start.shape[0]
    report.add(f"error of the stored displacement, {side} × {side}, lr {LR:g}, {case.steps} steps", rows)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
