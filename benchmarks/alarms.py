"""What a run notices by itself: faults that must raise an event, and healthy runs that must raise
none.

Claim: every fault of ``_faults.py`` is reported within the stated steps or samples of the gauges,
by an event of the expected kind that names the right tensor; and of at least 20 healthy runs across
recipes none raises a serious alarm (:data:`SERIOUS`). Other alarms of healthy runs are counted
beside.

Baseline: the table of faults, made before the runs. Each fault strikes a run of its own, at a step
at which gauges have been read a few times; it is in time when the event comes no later than the
column *by*. The last column has every other alarm of that run since: a fault has consequences, so
they are not false. Gauges are sampled more often than by default, so that a short run has as many
samples as a longer one; what is due in samples then comes as much later in steps. Healthy runs have
the trainer's own rates and schedule; ``naive``, which loses updates at those, has a larger constant
one.

Run: ``./dev bench alarms [--faults …] [--recipes …] [--quick]``. No times are taken, so
``--rounds`` has no effect.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from _faults import FAULTS, Fault, struck
from _stdlib import stdlib_tokens
from timing import Report, Row, parser

from narrowgauge.analysis.detectors import DETECTORS
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.loop import train

_USUAL = (
    "bfloat16/word", "bfloat16/compact", "bfloat16/states8", "bfloat16/master", "bfloat16/exact", "bfloat16/split",
    "bfloat16/stochastic", "bfloat16/kahan", "bfloat16/collage-plus", "bfloat16/float32",
    "float32/float32", "int8-row/word", "int8-row/states8", "float8-row/word", "float8-tensor/word",
    "float8-block/split", "float8-tensor-e5m2/word", "mxfp8/word", "mxfp4/word",
    "nvfp4/compact", "scalify/word", "float16/split",
)  # fmt: skip
HEALTHY: dict[str, Mapping[str, Any]] = {
    **{recipe: {} for recipe in _USUAL},
    "bfloat16/naive": {"lr": 1e-2, "schedule": "constant"},
}
"""Recipes of healthy runs, and settings that differ from the trainer's own."""
ALARMS = {*DETECTORS, "lost-updates", "divergence"}
"""Kinds of event that are a word of warning."""
SERIOUS = frozenset({
    "lost-updates", "underflow", "overflow", "attention-logits", "scale-halvings", "scale-floor",
    "loss-spike", "nonfinite", "nonfinite-step",
})  # fmt: skip
"""Kinds of event that no healthy run may raise.

Healthy runs with small batches have gradient spikes.
"""
STRUCK_AT = 41
EVERY_STRUCK = 10
EVERY_HEALTHY = 5


def run_of(
    folder: Path, options: argparse.Namespace, within: AbstractContextManager[None], **settings: Any
) -> Run:
    """One run, without a word on the screen."""
    overrides = {
        "log_every": 1 << 20,
        "eval_every": 0,
        "checkpoint_every": 0,
        "eval_sequences": 2 * options.batch_size,
        **settings,
    }
    where = {"model": options.model, "data": str(stdlib_tokens(options.model)), "out": str(folder)}
    sizes = {"batch_size": options.batch_size, "sequence_length": options.sequence_length}
    config = TrainConfig.from_dict({**where, **sizes, **overrides})
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with within, quiet[0], quiet[1]:
        train(config)
    return read_run(folder)


def counted(events: Sequence[Mapping[str, Any]]) -> str:
    """Alarms by kind: how many, and the first one's step."""
    alarms = [event for event in events if event["what"] in ALARMS]
    first = {event["what"]: event["step"] for event in reversed(alarms)}
    numbers = Counter(event["what"] for event in alarms)
    raised = []
    for kind, n in numbers.items():
        raised.append(f"{kind}{f' ×{n}' if n > 1 else ''} @{first[kind]}")
    return ", ".join(raised) or "none"


def fault_row(fault: Fault, folder: Path, options: argparse.Namespace) -> Row:
    """The table's row of a fault."""
    every = fault.settings.get("gauges_every", EVERY_STRUCK)
    at = fault.at(STRUCK_AT)
    by = fault.deadline(at, every)
    settings = {"gauges_every": every, "schedule": "constant", "steps": by + 1, **fault.settings}
    run = run_of(folder, options, struck(fault, at), **settings)
    raised = fault.first_event(run.events, at) or {}
    other_alarms = []
    for event in run.events:
        if event["step"] >= at and not fault.matches(event):
            other_alarms.append(event)
    return {
        "": fault.name,
        "recipe": run.config["recipe"],
        "struck at": str(at),
        "expected": " or ".join(fault.kinds),
        "by": str(by),
        "raised at": str(raised.get("step", "never")),
        "names": raised.get("tensor", "the run" if raised else ""),
        "in time": "yes" if raised and raised["step"] <= by else "NO",
        "before it": counted([event for event in run.events if event["step"] < at]),
        "other alarms": counted(other_alarms),
    }


def healthy_row(recipe: str, folder: Path, options: argparse.Namespace) -> Row:
    """The table's row of a healthy run."""
    settings = {
        "steps": options.steps,
        "gauges_every": EVERY_HEALTHY,
        "recipe": recipe,
        **HEALTHY.get(recipe, {}),
    }
    run = run_of(folder, options, nullcontext(), **settings)
    serious = [event for event in run.events if event["what"] in SERIOUS]
    light = [event for event in run.events if event["what"] not in SERIOUS]
    return {
        "": recipe,
        "lr": f"{run.config['lr']:g}",
        "validation loss": run.summary["val_loss"] if run.summary is not None else float("nan"),
        "readings": len(run.gauges),
        "serious alarms": counted(serious),
        "of": ", ".join(dict.fromkeys(event.get("tensor") or "the run" for event in serious)),
        "others": counted(light),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=1)
    flags.add_argument("--model", default="llama-1m", help="a preset (default llama-1m)")
    flags.add_argument(
        "--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT"
    )
    flags.add_argument(
        "--recipes", nargs="*", default=list(HEALTHY), metavar="RECIPE", help="of healthy runs"
    )
    flags.add_argument("--steps", type=int, default=120, help="of a healthy run")
    flags.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    flags.add_argument("--sequence-length", type=int, default=128, help="tokens per sequence")
    options = flags.parse_args(arguments)
    report = Report("alarms", options)
    warnings.simplefilter("ignore", EmulationNotice)
    if options.quick:
        vars(options).update({"batch_size": 2, "sequence_length": 32, "steps": 20})
        options.faults = options.faults[:2]
        options.recipes = options.recipes[:2]
    emit(report, options)
    return report.end()


def emit(report: Report, options: argparse.Namespace) -> None:
    """Run everything and print both tables; a line as each is done, since it takes minutes."""
    rows: list[Row] = []
    healthy: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        for number, name in enumerate(options.faults):
            rows.append(fault_row(FAULTS[name], Path(place) / f"fault{number}", options))
            print(
                f"{name}: raised at {rows[-1]['raised at']}, in time {rows[-1]['in time']}",
                flush=True,
            )
        for number, name in enumerate(options.recipes):
            healthy.append(healthy_row(name, Path(place) / f"healthy{number}", options))
            print(f"{name}: {healthy[-1]['serious alarms']}; {healthy[-1]['others']}", flush=True)
    tokens = f"{options.model}, {options.batch_size} × {options.sequence_length} tokens a step"
    report.add(
        f"faults, {tokens}, gauges every {EVERY_STRUCK} steps unless a fault says otherwise", rows
    )
    report.add(
        f"healthy runs, {tokens}, {options.steps} steps, gauges every {EVERY_HEALTHY}", healthy
    )
    noticed = sum(row["in time"] == "yes" for row in rows)
    cried = sum(row["serious alarms"] != "none" for row in healthy)
    num_other = sum(row["others"] != "none" for row in healthy)
    report.note(f"{noticed} of {len(rows)} faults raised in time")
    report.note(
        f"{cried} of {len(healthy)} healthy runs raised a serious alarm, {num_other} one of another "
        "kind"
    )


if __name__ == "__main__":
    sys.exit(main())
