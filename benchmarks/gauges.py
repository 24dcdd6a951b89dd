"""What watching a run costs: steps with gauges against steps without, in the same rounds.

Claim: the default set, sampled every 20 steps, costs at most 1 % of the step time; attached and not sampled at most 0.1 %.
Sampled on every step, it is only reported.

Baseline: the same session without gauges. Contenders: one with gauges on a step that is not sampled; the same on a step that
is. *Every 20* is a twentieth of what a sampled step takes more.
What an unsampled step pays is far below what a ratio of step times can show, so it is also timed by itself: all that runs
then is the shadow of some second moments and a comparison, after the optimizer's step (*hooks*); a compiled graph checks one
more flag. Losses of watched and unwatched steps are compared bit for bit at the end.

Run: ``./dev bench gauges [--model llama-8m] [--recipe bfloat16/word] [--quick]``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from narrow_training import settings
from timing import Contender, Report, Row, Timing, measure, nothing, parser

from narrowgauge.gauges.attach import Gauges, attach_gauges
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.spec.models import get_model
from narrowgauge.trainer.data.dataset import Dataset, prepare_data
from narrowgauge.trainer.session import Session, build
from narrowgauge.trainer.step import train_step

NEVER = 1 << 40
EVERY = 20


class Trainee:
    """A session, perhaps with gauges, whose steps are timed."""

    def __init__(self, options: argparse.Namespace, folder: Path, data: Dataset, watch: bool = False) -> None:
        self.session: Session = build(settings(options, options.recipe), folder, data)
        self.gauges: Gauges | None = None
        self.losses: list[float] = []
        self.hooks: list[float] = []
        if watch:
            self.gauges = attach_gauges(self.session.model, self.session.optimizer, every=NEVER)
            self._time_hooks(self.gauges)

    def _time_hooks(self, gauges: Gauges) -> None:
        """Time what gauges do after an unsampled step."""
        undo, true_after = gauges._undos[-1], gauges._after_step
        undo()

        def after(*arguments: object) -> None:
            sampled, began = gauges.sampling, time.perf_counter()
            true_after(*arguments)
            if not sampled:
                self.hooks.append(time.perf_counter() - began)

        gauges._undos[-1] = self.session.optimizer.register_step_post_hook(after).remove

    def run(self) -> None:
        """One step."""
        self.losses.append(train_step(self.session)["loss"])

    def sample(self) -> None:
        """Let the next step be sampled."""
        assert self.gauges is not None
        self.gauges.sampling = True


def row_of(timing: Timing, gauges: Gauges | None) -> Row:
    """The table's row."""
    row = timing.row()
    row["% of a step"] = 100 * (timing.ratio - 1)
    if "sampled" in timing.name and "un" not in timing.name:
        row[f"% every {EVERY}"] = 100 * (timing.ratio - 1) / EVERY
    if gauges is not None:
        row["tensors"] = len(gauges._watched)
    return row


def emit(report: Report, options: argparse.Namespace) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = prepare_data("stdlib", vocab_size=get_model(options.model).vocab_size)
        plain, watched = Trainee(options, folder, data), Trainee(options, folder, data, watch=True)
        contenders = [
            Contender("no gauges", plain.run),
            Contender("attached, unsampled", watched.run),
            Contender("sampled", watched.run, watched.sample),
        ]
        timings = measure(
            contenders,
            baseline="no gauges",
            rounds=options.rounds,
            warmup=2,
            wait=torch.cuda.synchronize if torch.cuda.is_available() else nothing,
        )
        tokens = f"{options.batch_size} × {options.sequence_length} tokens a step"
        own = {"no gauges": None, "attached, unsampled": watched.gauges, "sampled": watched.gauges}
        rows = [row_of(timing, own.get(timing.name)) for timing in timings]
        report.add(f"{options.model}, {options.recipe}, {tokens}", rows)
        hooks = sorted(watched.hooks)[len(watched.hooks) // 2]
        share = 100 * hooks / timings[0].median
        report.note(f"hooks of an unsampled step: {1e6 * hooks:.0f} µs, {share:.4f} % of a step (claim: 0.1 %)")
        same = plain.losses == watched.losses[: len(plain.losses)]
        report.note(
            f"losses with and without gauges, {len(plain.losses)} steps: {'the same bits' if same else 'DIFFER'}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=15)
    flags.add_argument("--model", default="llama-8m", help="a preset (default llama-8m)")
    flags.add_argument("--recipe", default="bfloat16/word", help="default bfloat16/word")
    flags.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    flags.add_argument("--sequence-length", type=int, default=256, help="tokens per sequence")
    options = flags.parse_args(arguments)
    report = Report("gauges", options)
    warnings.simplefilter("ignore", EmulationNotice)
    if options.quick:
        vars(options).update({"model": "llama-1m", "batch_size": 2, "sequence_length": 64, "rounds": 2})
    emit(report, options)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
