"""What watching costs: the audit of every 10th step, against no audit.

Claim: the audit's sums are computed by the kernel that steps, over a thirty-second part of each large tensor at a time, so a
cycle of ten steps costs at most 2 % more with it than without. Cases: one tensor of 32 M elements, and the tensors of a
llama-125m; storages ``word`` and ``split``. ``training_speed.py`` gives the same as a share of a training step.

Baseline: the same optimizer with ``audit_every=0``; a round is a cycle of ten steps of each, times are per step.

Run: ``./dev bench audit_cost [--quick]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from optimizer_step import Case, cases, ours
from timing import Contender, Report, Row, measure, parser

CYCLE = 10
STORAGES = ("word", "split")


def cycle(step: Callable[[], object]) -> Callable[[], None]:
    """Ten steps, of which one is audited where any is."""

    def run() -> None:
        for _ in range(CYCLE):
            step()

    return run


def rows_of(case: Case, storage: str, rounds: int) -> list[Row]:
    """Time one storage with and without audit."""
    without = f"{storage}, no audit"
    contenders = [
        Contender(without, cycle(ours(case.shapes, storage).step), per_call=CYCLE),
        Contender(
            f"{storage}, every {CYCLE}th", cycle(ours(case.shapes, storage, audit_every=CYCLE).step), per_call=CYCLE
        ),
    ]
    timings = measure(contenders, baseline=without, rounds=rounds, warmup=1)
    plain = timings[0].median
    return [{**t.row(), "extra ms per step": 1e3 * plain * (t.ratio - 1)} for t in timings]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=24).parse_args(arguments)
    rounds = 3 if options.quick else options.rounds
    report = Report("audit cost", options)
    chosen = cases(options.quick)
    for letter in ("a", "c"):
        rows = [row for storage in STORAGES for row in rows_of(chosen[letter], storage, rounds)]
        report.add(f"({letter}) {chosen[letter].title}; ratio to the same without audit", rows)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
