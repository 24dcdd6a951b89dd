"""What it costs to compute steps of a loop again: the watcher between audited steps, and an audited step.

Claim: at ``audit_every=1000`` the audit takes at most 1 % of a run's time. A round is ten steps of a small language model under
AdamW; the audited contender computes one of the ten again. The share at other distances follows from what that one costs.

Baseline: the same loop without a watcher.

Run: ``./dev bench steps_again [--quick]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from timing import Contender, Report, measure, parser
from torch import nn

from narrowgauge.recompute.step_watcher import StepWatcher

CYCLE = 10
DISTANCES = (100, 1000)


class Mixer(nn.Module):
    """Attention-free: a causal convolution, then a multilayer perceptron."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 4, groups=width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for mix, up, down in zip(self.mix, self.up, self.down, strict=True):
            x = x + mix(nn.functional.pad(x.mT, (3, 0))).mT
            x = x + down(nn.functional.gelu(up(nn.functional.layer_norm(x, x.shape[-1:]))))
        logits: torch.Tensor = self.head(x)
        return logits


def loop(width: int, depth: int, every: int) -> tuple[Callable[[], None], Callable[[], int]]:
    """Ten steps of a loop, watched if ``every``; and the bytes of the largest capture."""
    torch.manual_seed(0)
    model = Mixer(4096, width, depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watcher = StepWatcher(model, optimizer, every, lambda *_: None, first=every) if every else None

    def run() -> None:
        for _ in range(CYCLE):
            tokens = torch.randint(0, 4096, (8, 129))
            logits = model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run, lambda: 0 if watcher is None else watcher.nbytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=8).parse_args(arguments)
    report = Report("steps computed again", options)
    for width, depth in ((64, 2),) if options.quick else ((64, 2), (256, 4)):
        audited, nbytes = loop(width, depth, CYCLE)
        contenders = [
            Contender("no watcher", loop(width, depth, 0)[0], per_call=CYCLE),
            Contender("watched, not audited", loop(width, depth, 1 << 30)[0], per_call=CYCLE),
            Contender(f"every {CYCLE}th audited", audited, per_call=CYCLE),
        ]
        timings = measure(contenders, baseline="no watcher", rounds=2 if options.quick else options.rounds, warmup=1)
        report.add(f"{depth} blocks of {width}, 8 × 128 tokens", [t.row() for t in timings])
        steps = CYCLE * (timings[2].ratio - 1)
        shares = {f"share at every {n}th": steps / n for n in DISTANCES}
        report.add("an audited step", [{"plain steps": steps, **shares, "MB kept": nbytes() / 1e6}])
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
