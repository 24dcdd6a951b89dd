"""What ``ng.watch`` costs: steps of a watched loop against the same steps unwatched, in the same
rounds.

Claim: with its defaults, a step in 100 sampled, a watch costs at most 1 % of a step of llama-8m.
Weights of both loops are compared bit for bit at the end.

Baseline: torch's fused AdamW and a float32 model of transformers, eager. Contenders: the same
watched, on a step that is not sampled and on one that is.

Run: ``./dev bench watch [--model llama-8m] [--quick]``.
"""

from __future__ import annotations

import torch
from timing import Contender, Report, exit_by, measure, nothing, parser

import narrowgauge as ng
from narrowgauge.gauges.recording import watch as watching
from narrowgauge.trainer import language_model

EVERY = 100  # steps between sampled ones, late in a run


def sample(is_sampled: bool) -> None:
    """Sample the next steps, or none of them."""
    watching.is_sampled = lambda step: is_sampled


class Loop:
    """A plain loop over random tokens."""

    def __init__(self, name: str, shape: tuple[int, int], device: str) -> None:
        self.model = language_model.build(name, vocab_size=4096, seed=0).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 4096, shape, generator=generator).to(device)

    def step(self) -> None:
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=15)
    flags.add_argument("--model", default="llama-8m", help="a preset (default llama-8m)")
    flags.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    flags.add_argument("--sequence-length", type=int, default=256, help="tokens per sequence")
    options = flags.parse_args()
    report = Report("watch", options)
    if options.quick:
        vars(options).update(
            {"model": "llama-1m", "batch_size": 2, "sequence_length": 64, "rounds": 2}
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = options.batch_size, options.sequence_length
    plain, watched = (Loop(options.model, shape, device) for _ in range(2))
    ng.watch(watched.model, watched.optimizer)
    contenders = [
        Contender("unwatched", plain.step),
        Contender("watched", watched.step, lambda: sample(False)),
        Contender("sampled", watched.step, lambda: sample(True)),
    ]
    wait = torch.cuda.synchronize if device == "cuda" else nothing
    timings = measure(contenders, baseline="unwatched", rounds=options.rounds, warmup=2, wait=wait)
    rows = [timing.row() | {"% of a step": 100 * (timing.ratio - 1)} for timing in timings]
    report.add(
        f"{options.model}, {options.batch_size} × {options.sequence_length} tokens a step", rows
    )
    extra = timings[1].ratio - 1 + (timings[2].ratio - timings[1].ratio) / EVERY
    report.note(f"with its defaults a watch costs {100 * extra:.2f} % of a step")
    for _ in range(options.rounds + 2):  # the watched loop took two steps a round
        plain.step()
    same = all(
        torch.equal(p, q)
        for p, q in zip(plain.model.parameters(), watched.model.parameters(), strict=True)
    )
    report.note(f"weights with and without the watch: {'the same bits' if same else 'DIFFER'}")
    return report.end()


if __name__ == "__main__":
    exit_by(main)
