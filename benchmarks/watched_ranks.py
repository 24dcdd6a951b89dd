"""What watching several ranks costs: counting what they send, and verifying what they hold and compute.

Claim: counting every collective and exchanging the counts takes at most 0.5 % of a step; comparing states and gradients every
1000 steps at most 0.1 % of the time. What one rank alone holds is read twice in every step, which is reported by itself.

Baseline: a step of the same model on the same ranks. Each part is timed by itself, since all are far below what a ratio of whole
steps can show; of each the shortest of several times counts, and of the step too. All ranks are in step when a part begins.
Shares are of processor time, which does not count what other programs take.

Run: ``./dev bench watched_ranks [--quick]``. Ranks are processes of this machine with one thread each, and talk over gloo.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from timing import Report, Row, parser

from narrowgauge.distributed.replica_verification import Held, Verifier
from narrowgauge.distributed.traffic import Traffic
from narrowgauge.numerics.checksums import checksum
from narrowgauge.optim.state_dict import kept_tensors
from ranks import Case, Loop, on_ranks

EVERY = 1000  # --verify-every


@dataclass(frozen=True)
class Shortest:
    """The shortest of several calls, all ranks beginning together: seconds of this rank's processor, and on the clock."""

    processor: float
    clock: float


def shortest(run: Callable[[], object], times: int) -> Shortest:
    """Time some calls."""
    found = []
    for _ in range(times):
        dist.barrier()
        began, began_clock = time.process_time(), time.perf_counter()
        run()
        found.append((time.process_time() - began, time.perf_counter() - began_clock))
    return Shortest(min(one for one, _ in found), min(clock for _, clock in found))


def counting(calls: int) -> Shortest:
    """How much longer so many collectives of one tensor take when they are counted."""
    with Traffic() as traffic:
        real = traffic._counted("all_reduce", lambda tensor, op=None, group=None, async_op=False: None)
    tensor = torch.ones(1)

    def run() -> None:
        for _ in range(calls):
            real(tensor)

    return shortest(run, 5)


def timed(case: Case, rounds: int) -> list[Row]:
    """The table of one case."""
    loop = Loop(case, "float32")
    loop.step()
    with Traffic() as traffic:
        loop.step()
        calls = len(traffic._bytes)
        exchange = shortest(traffic.end_step, 20)
    step = shortest(loop.step, rounds)
    verifier = Verifier(lambda: (Held(*kept) for kept in kept_tensors(loop.optimizer)), EVERY)

    def rest() -> None:
        verifier.after_update(0)
        verifier.before_update()

    same = torch.randint(256, tuple(loop.tokens[0].shape), generator=torch.Generator().manual_seed(0))  # on all ranks

    def backward() -> None:
        with loop.reduction.micro_batch(is_last=False):
            loop.loss_of(same).backward()
        loop.reduction.discard()

    def read() -> None:
        for held in kept_tensors(loop.optimizer):
            checksum(held[1])

    parts = {
        f"counting {calls} collectives": (counting(calls), 1),
        "exchanging the counts": (exchange, 1),
        "what rests, of shards": (shortest(rest, 5), 1),
        "comparing states": (shortest(lambda: verifier.verify_state(0), 5), EVERY),
        "comparing gradients": (
            shortest(lambda: verifier.verify_gradients(0, loop.model, backward), max(2, rounds // 2)),
            EVERY,
        ),
    }
    held = sum(tensor.nbytes for _, tensor, _ in kept_tensors(loop.optimizer))
    rows = [_row("a step", step, 1, step), *(_row(name, *part, step) for name, part in parts.items())]
    return [*rows, _row(f"reading {held / 1e6:.0f} MB once", shortest(read, 5), 0, step)]


def _row(name: str, part: Shortest, every: int, step: Shortest) -> Row:
    row: Row = {"": name, "ms": 1e3 * part.processor, "ms on the clock": 1e3 * part.clock}
    return row | ({"every": every, "% of the time": 100 * part.processor / every / step.processor} if every else {})


def main(arguments: Sequence[str]) -> int:
    """Print the tables."""
    options = parser(__doc__, rounds=4).parse_args(arguments)
    report = Report("watched ranks", options)
    tokens = (1, 32) if options.quick else (4, 256)
    for case in (
        Case("llama-8m", 2, "float32", True, 2, tokens),
        Case("llama-8m", 2, "float32", False, 2, tokens),
        Case("llama-35m", 4, "float32", True, 1, tokens),
    )[: 2 if options.quick else 3]:
        report.add(case.title, on_ranks(timed, case.ranks, case, 1 if options.quick else options.rounds))
    return report.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
