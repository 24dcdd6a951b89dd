"""Faults of an optimizer's step through the rounding of a storage: how many are named, and how often a healthy step is blamed.

The settings of our AdamW are others within one audited step than its groups say, by factors that are drawn; nothing is planted in
the other steps, which are audited too. One row for each storage.

- *named*: all findings of the step have the right name, and its number, where it has one, is within 10 %.
- *unnamed*: a note says that the update departs; *silent*: nothing is said; *wrong*: another name.
- *blamed*: of the audited steps without a fault those with a finding. What a storage loses by its nature is no finding here.

Baseline: the storage `master`, of which nothing is rounded but float32 itself.

Run: ``./dev bench rounded_updates [--quick]``.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import Report, Row, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import narrowgauge as ng
from narrowgauge.recompute.piece_results import DEPARTS
from narrowgauge.recompute.rules.rounded_update import LOST
from narrowgauge.spec.storages import STORAGES
from recompute.audited_loop import Loop

STEPS = 6
STORED = (
    "master", "split", "split8", "word", "compact", "states8", "weight8", "stochastic", "kahan", "collage-light", "collage-plus",
    "naive", "float16/naive",
)  # fmt: skip
Settings = dict[str, Any]
FAULTS: dict[str, tuple[Callable[[random.Random, Settings], Settings], str, Callable[[Settings, Settings], float]]] = {
    "rate": (
        lambda draw, own: {"lr": own["lr"] * draw.choice((0.5, 0.8, 0.95, 1.05, 1.2, 2.0, 10.0))},
        "rate", lambda own, planted: planted["lr"] / own["lr"],
    ),
    "frozen": (lambda draw, own: {"lr": 0.0}, "frozen", lambda own, planted: math.nan),
    "decay lost": (lambda draw, own: {"weight_decay": 0.0}, "decay-lost", lambda own, planted: math.nan),
    "decay": (
        lambda draw, own: {"weight_decay": own["weight_decay"] * draw.choice((0.3, 2.0, 5.0, 10.0))},
        "decay", lambda own, planted: planted["weight_decay"],
    ),
    "eps": (
        lambda draw, own: {"eps": draw.choice((1e-6, 1e-5, 1e-4, 1e-3))}, "eps", lambda own, planted: planted["eps"],
    ),
    "beta1": (
        lambda draw, own: {"betas": (draw.choice((0.5, 0.8, 0.95)), own["betas"][1])},
        "beta", lambda own, planted: planted["betas"][0],
    ),
    "beta2": (
        lambda draw, own: {"betas": (own["betas"][0], draw.choice((0.9, 0.95, 0.99)))},
        "beta", lambda own, planted: planted["betas"][1],
    ),
}  # fmt: skip


def trial(storage: str, fault: str, seed: int) -> tuple[str, int, int]:
    """The answer to one fault, the audited steps without one, and how many of those were blamed."""
    draw = random.Random(f"{storage} {fault} {seed}")
    own: Settings = {
        "lr": draw.choice((3e-4, 1e-3, 3e-3)), "weight_decay": draw.choice((0.1, 0.3)),
        "betas": (0.9, draw.choice((0.95, 0.999))),
    }  # fmt: skip
    dtype = getattr(torch, STORAGES[storage].visible)
    loop = Loop(every=2, optimizer=ng.AdamW, storage=storage, dtype=dtype, compile=False, micro_batches=1, **own)
    loop.run(STEPS - 1)
    plant, name, number = FAULTS[fault]
    planted = plant(draw, own)
    planted = planted if planted != {key: own.get(key) for key in planted} else plant(random.Random(seed + 1), own)
    optimizer = loop.optimizer

    def begin(*_: Any) -> None:
        for group in optimizer.param_groups:
            group.update(planted)

    def end(*_: Any) -> None:
        for group in optimizer.param_groups:
            group.update({key: own.get(key, 1e-8) for key in planted})

    optimizer.register_step_pre_hook(begin)
    handle = optimizer.register_step_post_hook(end)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
    loop.run(1)
    healthy = [results for step, results in loop.results.items() if step < STEPS]
    blamed = sum(any(_found(results)) for results in healthy)
    found = _found(loop.results[STEPS])
    if not found:
        answer = "silent"
    elif {each.cause for each in found} == {name}:
        wanted = number(own, planted)
        told = [each.values[key] for each in found for key in ("factor", "value") if key in each.values]
        is_right = math.isnan(wanted) or all(math.isclose(value, wanted, rel_tol=0.1) for value in told)
        answer = "named" if is_right else "named, other number"
    else:
        answer = "unnamed" if {each.cause for each in found} <= {name, ""} else "wrong"
    return answer, len(healthy), blamed


def _found(results: Sequence[Any]) -> list[Any]:
    return [each for each in results if each.status == DEPARTS and each.cause != LOST]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=3).parse_args(arguments)
    report = Report("updates through the rounding of a storage", options)
    stored, rounds = (("master", "word", "naive"), 1) if options.quick else (STORED, options.rounds)
    rows: list[Row] = []
    for storage in stored:
        counts: Counter[str] = Counter()
        silent: Counter[str] = Counter()
        steps = blamed = 0
        for fault in FAULTS:
            for seed in range(rounds):
                answer, healthy, wrong = trial(storage, fault, seed)
                counts[answer] += 1
                silent[fault] += answer == "silent"
                steps, blamed = steps + healthy, blamed + wrong
        kinds = ("named", "named, other number", "unnamed", "silent", "wrong")
        said = ", ".join(f"{fault} {count}" for fault, count in silent.items() if count)
        rows.append(
            {
                "storage": storage,
                **{kind: counts[kind] for kind in kinds},
                "silent of": said,
                "healthy": steps,
                "blamed": blamed,
            }
        )
    report.add(f"{rounds * len(FAULTS)} faults of each", rows)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
