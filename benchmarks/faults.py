"""Which faults of training loops the tools tell: ours beside the ones that people use.

Claim: of the silent faults of public training code in ``tests/corpus``, ``ng.check``, ``ng.watch``
and a recorded run tell more at the right place than the usual tools, and accuse few of its healthy
loops.

Baseline: for each fault, the healthy loop with the same settings. A statement counts only if the
tool does not say the same, of the same tensor, about that loop. It is at the *right place* if it
names the stage of the fault and, where the fault has tensors, one of them or none (``verdict`` of
``tests/corpus/answers.py``); otherwise *elsewhere*. *Wrong*: all was said of the healthy loop too.
These tools see the loop alone:

- ``check, record``: ``ng.check`` before the first step; ``ng.RunRecorder`` and ``ng.diagnose``, 6 steps, each audited.
- ``teaches``: ``ng.teaches`` alone, before the first step: the part of the check that reads the loss.
- ``watch``: ``ng.watch`` with its defaults and the losses, 52 steps.
- ``anomaly``: ``torch.autograd.detect_anomaly``, 4 steps, where a gradient of the 52 steps is not finite. It names the
  operation whose backward makes NaN, and no tensor. It sees neither infinities nor wrong finite values.
- ``overflow``: ``transformers.debug_utils.DebugUnderflowOverflow``, 4 steps. It names the first module where an input, output or
  weight is not finite, and sees no gradient and no optimizer.
- ``histograms``: root mean squares of the gradients of each backward pass, from hooks on the tensors, as ``wandb.watch`` reads
  them; 52 steps. Rule: a tensor whose gradient is not finite, or for 5 steps in a row zero, absent, or 100 times above or
  below the median of all tensors. The hooks see no later change of a gradient.
- ``loss guard``: a loss that is not finite, or above mean + 4 standard deviations of the last 20; 52 steps. It names no place.

These see the healthy loop beside it, which a user has only if an old version or another
implementation is right:

- ``DebugMode``: ``log_tensor_hashes`` of ``torch.utils._debug_mode``, 3 steps. It names the annotated stage of the first call
  that ``check_hash_mismatches`` reports and that is equal in two captures of the healthy loop. Two captures of one loop say
  nothing of a fault, because the loops repeat their bits.
- ``two records``: ``ng.diagnose(run, other)`` of two recorded runs, 3 steps, with every fingerprint.

Run: ``./dev bench faults [--rows NAME ...] [--keep]``. It takes minutes. ``--keep`` writes
``benchmarks/faults.jsonl``, from which ``docs/evidence.py`` makes the tables of docs/diagnose.md.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import math
import statistics
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _timing import Report, exit_by, parser
from torch import Tensor
from torch.utils._debug_mode import DebugMode
from transformers.debug_utils import DebugUnderflowOverflow

import narrowgauge as ng
from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from corpus.answers import LOCATES, answers, verdict
from corpus.loop import Loop
from corpus.rows import FAULTS, HEALTHY, Row

FILE = Path(__file__).with_name("faults.jsonl")
SHORT = 4
LONG = 52
CAPTURED = 3
"""Steps of the loops: where a tool stops at the first fault, where a rule needs a past, and where
each operation is hashed.
"""
SAMPLES = 5
FACTOR = 100.0
LOSSES = 20
SIGMAS = 4.0
SIGNS = {"right place": "●", "elsewhere": "○", "wrong": "×", "silent": ""}
OURS = "check, record", "watch"
PART = "teaches"
"""A part of the check, in a column of its own."""
ALONE = *OURS, PART, "anomaly", "overflow", "histograms", "loss guard"
BESIDE = "DebugMode", "two records"
"""Tools that see the loop alone, and beside its healthy loop."""
PASSES = {"data", "forward", "loss", "gradient"}
UPDATE = {"settings", "state", "weights"}
EVALUATION = {"evaluation"}
POINTS_AT: dict[str, set[str]] = {
    **dict.fromkeys(
        ("place", "read", "split", "labels", "logits", "backward", "before_clip", "zero", *PASSES),
        PASSES,
    ),
    **dict.fromkeys(("schedule", "update", "start", "optimizer step", "storage"), UPDATE),
    **dict.fromkeys(
        ("before_evaluation", "evaluate", "after_evaluation", "evaluation"), EVALUATION
    ),
    **{stage: {stage} for stage in ("clip", "resume")},
    "between steps": {"resume", "evaluation", "weights"},
}
"""The stages of faults to which a method of the loop, or the stage of a reading, points."""
OF_THE_LOSS = {name for name, kind in KINDS.items() if kind.by.startswith("ng.teaches")}
Readings = list[Reading]


def after_each_step(loop: Loop, function: Callable[[Tensor], None]) -> None:
    one_step = loop.one_step

    def followed() -> Tensor:
        loss = one_step()
        function(loss)
        return loss

    loop.one_step = followed  # type: ignore[method-assign]


def watch(loop: Loop) -> Readings:
    watching = ng.watch(loop.model, [loop.optimizer, *loop.others])
    readings = Readings()
    watching._say = readings.extend  # type: ignore[method-assign]  # instead of a warning
    after_each_step(loop, watching.step)
    return readings


def loss_guard(losses: list[float]) -> Readings:
    past = deque[float](maxlen=LOSSES)
    readings = Readings()
    for step, loss in enumerate(losses, start=1):
        if len(past) == LOSSES:
            limit = statistics.fmean(past) + SIGMAS * statistics.stdev(past)
        else:
            limit = math.inf
        if not math.isfinite(loss) or loss > limit:
            readings.append(Reading(step, "loss", "", "loss-guard", loss, None, limit))
        else:
            past.append(loss)
    return readings


def histograms(loop: Loop) -> Readings:
    trained = {name: p for name, p in loop.model.named_parameters() if p.requires_grad}
    squares = dict.fromkeys(trained, 0.0)
    readings = Readings()
    past = {name: deque[str](maxlen=SAMPLES) for name in trained}

    def add(gradient: Tensor, name: str) -> None:
        squares[name] += float(gradient.detach().double().square().mean())

    for name, p in trained.items():
        p.register_hook(functools.partial(add, name=name))

    def look(loss: Tensor) -> None:
        middle = statistics.median(squares.values())
        for name, square in squares.items():
            is_near = middle / FACTOR**2 <= square <= middle * FACTOR**2
            past[name].append("no-gradient" if square == 0 else "" if is_near else "gradient")
            kind = ""
            if past[name].count(past[name][0]) == SAMPLES:
                kind = past[name][0]
            if kind := kind if math.isfinite(square) else "nonfinite":
                readings.append(Reading(loop.step, "gradient", name, kind, square**0.5))
            squares[name] = 0.0

    after_each_step(loop, look)
    return readings


def anomaly(loop: Loop) -> Readings:
    try:
        with torch.autograd.detect_anomaly():
            loop.run()
    except RuntimeError as error:
        return [Reading(loop.step, "gradient", "", "nonfinite", advice=str(error))]
    return []


class Overflow(DebugUnderflowOverflow):
    """Pass by bool masks, which have no absolute value."""

    def analyse_variable(self, variable: Any, context: str) -> None:
        if getattr(variable, "dtype", None) != torch.bool:
            super().analyse_variable(variable, context)


def overflow(loop: Loop) -> Readings:
    Overflow(loop.model)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            loop.run()
    except ValueError:
        lines = printed.getvalue().splitlines()
        context = next(
            line.split()[0] for line in lines if line.endswith((" has nans", " has infs"))
        )
        module = [line.split()[0] for line in lines if line.startswith(17 * " ")][-1]
        kind = "nonfinite"
        return [Reading(loop.step, "forward", f"{module}.{context}", kind)]
    return []


def captured(row: Row) -> list[Any]:
    """Return the calls of a loop with their hashes.

    The loop annotates the stages that it enters.
    """
    loop = row.loop(CAPTURED)

    def annotated(name: str, method: Callable[..., Any], *args: Any) -> Any:
        DebugMode._annotate(name)
        return method(*args)

    for name in POINTS_AT:
        if callable(
            method := getattr(loop, name, None)
        ):  # a fault may keep values under such a name
            setattr(loop, name, functools.partial(annotated, name, method))
    with DebugMode(record_output=False) as mode, DebugMode.log_tensor_hashes():
        loop.run()
    return mode.logs


def mismatches(calls: list[Any], second_calls: list[Any]) -> Iterator[int]:
    """Yield the places of calls that differ, and the end of the shorter list."""
    for place, (call, second_call) in enumerate(zip(calls, second_calls, strict=False)):
        try:
            if DebugMode.check_hash_mismatches([call], [second_call]):
                yield place
        except ValueError:  # another operation
            yield place
    if len(calls) != len(second_calls):
        yield min(len(calls), len(second_calls))


def first_mismatch(calls: list[Any], of_twin: list[Any], noise: set[int]) -> Readings:
    """Return the stage of the first call that differs from the healthy loop's.

    Noise differs between its own repetitions.
    """
    for place in mismatches(calls, of_twin):
        if place not in noise:
            entered = []
            for call in calls[:place]:
                if getattr(call, "tag", "") in POINTS_AT:
                    entered.append(call.tag)
            return [Reading(entered.count("schedule"), entered[-1], "", entered[-1])]
    return []


def written(row: Row, folder: Path) -> Path:
    loop = row.loop(CAPTURED)
    with ng.RunRecorder(folder, loop.model, loop.optimizer, fingerprints_every=1) as recorder:
        after_each_step(loop, recorder.step)
        loop.run()
    return folder


def alone(row: Row, folder: Path) -> dict[str, Readings]:
    """Return what each tool that sees a loop alone says of it."""
    readings_of = {"check, record": answers(row, folder)}
    loop = row.loop(LONG)
    readings_of[PART] = [r for r in readings_of["check, record"] if r.what in OF_THE_LOSS]
    readings_of |= {
        "watch": watch(loop),
        "histograms": histograms(loop),
        "loss guard": loss_guard(loop.run()),
    }
    is_finite = all(r.what != "nonfinite" for r in readings_of["histograms"])
    return readings_of | {
        "anomaly": [] if is_finite else anomaly(row.loop(SHORT)),
        "overflow": overflow(row.loop(SHORT)),
    }


def statements(rows: list[Row], folder: Path) -> Iterator[tuple[Row, str, Readings, Readings]]:
    """Yield each row and tool, what the tool says of the loop, and what it says of the healthy loop
    with these settings.
    """
    for options, members in itertools.groupby(
        sorted(rows, key=lambda row: row.options), lambda row: row.options
    ):
        twin = Row(f"healthy, {options}", options)
        of_twin = functools.cache(lambda twin=twin: alone(twin, folder / twin.name))
        capture = functools.cache(
            lambda twin=twin: (captured(twin), {*mismatches(captured(twin), captured(twin))})
        )
        record = functools.cache(lambda twin=twin: written(twin, folder / "records" / twin.name))
        for row in members:
            for tool, readings in alone(row, folder / row.name).items():
                yield row, tool, readings, of_twin()[tool] if row.stage and readings else []
            if row.stage:
                yield row, "DebugMode", first_mismatch(captured(row), *capture()), []
                two = ng.diagnose(record(), written(row, folder / "records" / row.name))
                yield row, "two records", list(two.readings), []


def judged(row: Row, tool: str, readings: Readings, usual: Readings) -> str:
    """Return the place of what a tool says of a fault, or that it accuses a healthy loop."""
    fresh = []
    for r in readings:
        if (r.what, r.tensor) not in {(u.what, u.tensor) for u in usual}:
            fresh.append(r)
    if not row.stage or not fresh:
        return "wrong" if readings else "silent"
    if tool in BESIDE:
        fresh = [
            replace(r, what=row.stage if row.stage in POINTS_AT[r.stage] else "another stage")
            for r in fresh
        ]
    place = verdict(row, fresh, {row.stage: {row.stage}} if tool in BESIDE else LOCATES)
    return "right place" if place == "located" else place


def confusion(rows: list[Row], places: dict[str, dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield a line for each tool: faults by the place of what it says, and accused healthy loops."""
    faults, healthy = (
        [places[row.name] for row in rows if bool(row.stage) is is_fault]
        for is_fault in (True, False)
    )
    for signs in places.values():
        signs["both of ours"] = min((signs[tool] for tool in OURS), key=[*SIGNS].index)
    for tool in (*OURS, "both of ours", *ALONE[len(OURS) :], *BESIDE):
        counts = {}
        for place in SIGNS:
            counts[place] = sum(signs[tool] == place for signs in faults)
        accused = "–"
        if tool not in BESIDE:
            accused = sum(signs[tool] != "silent" for signs in healthy)
        yield {"tool": tool, **counts, "healthy loops accused": accused}


def keep(matrix: list[dict[str, Any]], places: dict[str, dict[str, str]]) -> None:
    """Write the record: a line for each tool, and one for each fault."""
    lines = []
    for counts in matrix:
        lines.append({"kind": "tool", "row": counts["tool"], **counts})
    for row in FAULTS:
        link = f"[{row.name}](https://github.com/{row.fault.partition(': ')[0]})"
        signs = {tool: SIGNS[places[row.name][tool]] for tool in (*ALONE, *BESIDE)}
        lines.append({"kind": "fault", "row": link, "stage": row.stage, **signs})
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    FILE.write_text(text, encoding="utf-8")


def main() -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=1)
    flags.add_argument("--rows", nargs="+", metavar="NAME", help="of the corpus (default: all)")
    flags.add_argument("--keep", action="store_true", help=f"write the answers into {FILE.name}")
    options = flags.parse_args()
    options.threads = 1
    report = Report("faults", options, peers=("transformers",))
    rows = []
    for row in (*FAULTS, *HEALTHY):
        if not options.rows or row.name in options.rows:
            rows.append(row)
    if options.quick:
        rows = [*FAULTS[:2], HEALTHY[0]]
    places: dict[str, dict[str, str]] = {row.name: {} for row in rows}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row, tool, readings, usual in statements(rows, Path(folder)):
            places[row.name][tool] = judged(row, tool, readings, usual)
            if readings:
                words = sorted({f"{r.what} {r.tensor}" for r in readings})[:3]
                print(
                    f"{row.name}: {tool}, {places[row.name][tool]}: {', '.join(words)}", flush=True
                )
    matrix = list(confusion(rows, places))
    report.add(f"{len(rows)} loops", matrix)
    if options.keep:
        keep(matrix, places)
    return report.end()


if __name__ == "__main__":
    exit_by(main)
