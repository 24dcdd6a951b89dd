"""What the check, the record and the watch say of each program of :mod:`corpus.traincheck`.

The check reads the loop before its first step. A record is audited and hashed every fifth step, and
the watch has its defaults; both see all steps, and an evaluation every 13 of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

import narrowgauge as ng
from corpus.traincheck import EVALUATE_EVERY, PROGRAMS, STEPS, Loop, Program
from narrowgauge.analysis.reading import Reading
from narrowgauge.distributed.ranks import all_ranks

EVERY = 5
Answer = dict[str, list[str]]
"""Kinds of readings, by tool and by twin: notes and silent tools are left out."""


def run(loop: Loop, after_step: Callable[[Tensor], object]) -> None:
    while loop.step < STEPS:
        after_step(loop.one_step())
        if loop.step % EVALUATE_EVERY == 0:
            loop.evaluate()


def checked(loop: Loop) -> list[Reading]:
    batch = loop.batch(0)
    check = ng.check(
        loop.model, loop.optimizer, batch=batch, loss=loop.loss, backward=loop.backward
    )
    return list(check)


def recorded(loop: Loop, folder: Path) -> list[Reading]:
    with ng.RunRecorder(
        folder,
        loop.model,
        loop.optimizer,
        fingerprints_every=EVERY,
        max_grad_norm=loop.clip,
    ) as recorder:
        run(loop, lambda loss: recorder.step(loss, batch=loop.last_batch[0]))
    if loop.rank > 0:
        return []
    return list(ng.diagnose(folder).readings)


def watched(loop: Loop) -> list[Reading]:
    watch = ng.watch(loop.model, loop.optimizer)
    readings: list[Reading] = []
    watch._say = readings.extend  # type: ignore[method-assign]  # instead of a warning
    run(loop, watch.step)
    watch.remove()
    return readings


def answer_of(program: Program, folder: Path) -> Answer:
    """Return what each tool says of the fault and of its twin. All ranks make the call."""
    answer: Answer = {}
    for is_faulty, twin in ((True, ""), (False, " of the twin")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            readings = {
                "check": checked(program.loop(is_faulty)),
                "record": recorded(program.loop(is_faulty), folder / f"{program.name}{twin}"),
                "watch": watched(program.loop(is_faulty)),
            }
        for tool, said in readings.items():
            kinds = {f"{r.what} {r.tensor}".strip() for r in said if r.severity != "note"}
            everywhere = set().union(*all_ranks().gather(kinds))
            if everywhere:
                answer[f"{tool}{twin}"] = sorted(everywhere)
    return answer


def answers_on_ranks(rank: int, folder: Path) -> dict[str, Answer]:
    """Return the answers about the programs that need ranks."""
    return {p.name: answer_of(p, folder) for p in PROGRAMS if p.num_ranks > 1}


def verdict(program: Program, answer: Answer, tool: str) -> str:
    """Return ``right``, ``wrong`` or ``silent``: of a tool, without what it says of the twin too."""
    said = answer.get(tool, [])
    fresh = {*said} - {*answer.get(f"{tool} of the twin", [])}
    if any(reading.partition(" ")[0] in program.kinds for reading in fresh):
        return "right"
    return "wrong" if said else "silent"
