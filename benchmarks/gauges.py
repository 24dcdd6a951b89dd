"""What watching a run costs: steps with gauges against steps without, in the same rounds.

Claim: the default gauges, sampled at every 20th step, cost at most 1 % of the step time. Attached
and not sampled they cost nothing that a ratio of step times can show. Losses of watched and
unwatched steps are compared bit for bit at the end.

Baseline: the same session without gauges. Contenders: one with gauges on a step that is not
sampled; the same on a step that is.

Run: ``./dev bench gauges [--model llama-8m] [--recipe bfloat16/word] [--quick]``.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
from _stdlib import stdlib_tokens
from timing import Contender, Report, Row, exit_by, measure, nothing, parser

from narrowgauge.gauges.attach import attach_gauges
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import open_data
from narrowgauge.trainer.session import Session, build
from narrowgauge.trainer.step import train_step

NEVER = 1 << 40
EVERY = 20


def main() -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=15)
    flags.add_argument("--model", default="llama-8m", help="a preset (default llama-8m)")
    flags.add_argument("--recipe", default="bfloat16/word", help="default bfloat16/word")
    flags.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    flags.add_argument("--sequence-length", type=int, default=256, help="tokens per sequence")
    options = flags.parse_args()
    report = Report("gauges", options)
    warnings.simplefilter("ignore", EmulationNotice)
    if options.quick:
        vars(options).update(
            {"model": "llama-1m", "batch_size": 2, "sequence_length": 64, "rounds": 2}
        )
    config = TrainConfig(
        model=options.model,
        recipe=parse(options.recipe),
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        steps=100_000,
        schedule="constant",
        warmup_steps=0,
        audit_every=0,
        compile=True,
    )
    losses: dict[str, list[float]] = {"plain": [], "watched": []}

    def step(name: str, session: Session) -> None:
        losses[name].append(train_step(session)["loss"])

    with tempfile.TemporaryDirectory() as name:
        data = open_data(stdlib_tokens(options.model), config.held_out)
        plain, watched = (build(config, Path(name), data) for _ in losses)
        gauges = attach_gauges(watched.model, watched.optimizer, every=NEVER)
        contenders = [
            Contender("no gauges", lambda: step("plain", plain)),
            Contender("attached, unsampled", lambda: step("watched", watched)),
            Contender(
                "sampled",
                lambda: step("watched", watched),
                lambda: setattr(gauges, "sampling", True),
            ),
        ]
        wait = torch.cuda.synchronize if torch.cuda.is_available() else nothing
        timings = measure(
            contenders, baseline="no gauges", rounds=options.rounds, warmup=2, wait=wait
        )
    rows: list[Row] = []
    for timing in timings:
        rows.append(timing.row() | {"% of a step": 100 * (timing.ratio - 1)})
    rows[-1][f"% every {EVERY}"] = rows[-1]["% of a step"] / EVERY
    tokens = f"{options.batch_size} × {options.sequence_length} tokens a step"
    report.add(f"{options.model}, {options.recipe}, {tokens}", rows)
    same = losses["plain"] == losses["watched"][: len(losses["plain"])]
    report.note(f"losses with and without gauges: {'the same bits' if same else 'DIFFER'}")
    return report.end()


if __name__ == "__main__":
    exit_by(main)
