"""Whole training steps in narrow computes: tokens per second against bfloat16, in the same rounds.

Claim: on a CPU, compiled, ``int8-row/word`` trains a llama-125m at least 1.2 and a llama-35m at least 1.1 times as fast as
``bfloat16/word``. The rows that a CPU emulates, with the values that a chip would give, keep 0.8 of its speed (float8 per
row, mxfp8, nvfp4) or 0.6 (blocks of 128, stochastic and rotated rows). The first step, compiling included, takes at
most 60 s for a llama-125m. On Hopper a llama-1b trains at least 1.25 times as fast in float8.

Baseline: ``bfloat16/word`` in our trainer. Each contender has a process of its own with the baseline beside it, so that
two models are in memory at a time; both take the same batches, a few steps a round, by turns. *First step* is the
process's first, with every compiler cache empty: forward, backward and the optimizer, whose kernels are then compiled too
and are given apart. *Loss* is the contender's last one minus the baseline's, after as many steps.

Peers: torchao's linear layers put into the same model, under the same optimizer, the same loop, each layer compiled the
same way; so only the linear layers differ. What else is different in them is in their notes; one that cannot run says why.
Nothing is audited or written. Tokens are the standard library's source, or random ones where its vocabulary is too small.

Run: ``./dev bench narrow_training [--model llama-35m] [--recipes …] [--quick]``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from narrow_linear import PEERS, multiplies_float8, notes, peer_names
from peers import reason
from timing import Contender, Report, Row, Timing, measure, nothing, parser

from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.spec.models import get_model
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import language_model
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset, prepare_data
from narrowgauge.trainer.session import Session, build
from narrowgauge.trainer.step import train_step

BASELINE = "bfloat16/word"
RECIPES = tuple(
    f"{row}/word"
    for row in ("int8-row", "float8-row", "mxfp8", "nvfp4", "float8-block", "float8-tensor", "mxfp4")
)  # fmt: skip
ASKED = {"float8-row": 0.8, "mxfp8": 0.8, "nvfp4": 0.8, "float8-block": 0.6, "mxfp4": 0.6}
ASKED_OF_INT8 = {"llama-35m": 1.1, "llama-125m": 1.2}
ASKED_ON_HOPPER = {"float8-tensor": 1.25}
LARGEST_VOCABULARY = 32_000
"""The standard library is too short for a larger one to be trained on it."""


def asked_of(name: str, model: str) -> float | None:
    """Times as fast as bfloat16 that the claim asks of a recipe on this machine."""
    row = name.partition("/")[0]
    if multiplies_float8():
        return ASKED_ON_HOPPER.get(row) if model == "llama-1b" else None
    return ASKED_OF_INT8.get(model) if row == "int8-row" else ASKED.get(row)


def settings(options: argparse.Namespace, recipe: str) -> TrainConfig:
    """What a contender trains."""
    return TrainConfig(
        model=options.model,
        recipe=parse(recipe),
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        steps=100_000,
        schedule="constant",
        warmup_steps=0,
        audit_every=0,
        compile=True,
    )


def random_data(vocab_size: int) -> Dataset:
    """Tokens that mean nothing."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, 1 << 22).astype(np.uint32)
    return Dataset(tokens, tokens[:0], vocab_size, must_validate=False)


def session_of(name: str, options: argparse.Namespace) -> Session:
    """A recipe in our trainer, or the baseline's with a peer's linear layers."""
    size = get_model(options.model).vocab_size
    data = prepare_data("stdlib", vocab_size=size) if size <= LARGEST_VOCABULARY else random_data(size)
    if name not in PEERS:
        session = build(settings(options, name), options.folder, data)
        row = parse(name).compute
        layers = session.linears.layers.values() if session.linears is not None else ()
        if not row.is_wide and not any(layer.compute is row for layer in layers):
            raise RuntimeError(f"the model of {name} has no layer that computes so")
        return session
    # Compiled only after its layers have been swapped.
    plain = build(dataclasses.replace(settings(options, BASELINE), compile=False), options.folder, data)
    PEERS[name].swap(plain.model)
    chunked = size >= language_model.LARGE_VOCABULARY and language_model.can_chunk(plain.model)  # type: ignore[arg-type]
    plain.loss = language_model.compiled_loss(plain.model, chunked=chunked)  # type: ignore[arg-type]
    return plain


def first_step(session: Session) -> tuple[float, float]:
    """Seconds of a first step, and of the optimizer in it."""
    moments: list[float] = []
    hooks = [
        session.optimizer.register_step_pre_hook(lambda *_: moments.append(time.perf_counter())),
        session.optimizer.register_step_post_hook(lambda *_: moments.append(time.perf_counter())),
    ]
    began = time.perf_counter()
    train_step(session)
    seconds = time.perf_counter() - began
    for hook in hooks:
        hook.remove()
    return seconds, moments[1] - moments[0]


class Trainee:
    """A session that is timed, and the loss of its last step."""

    def __init__(self, session: Session) -> None:
        self.session, self.loss = session, float("nan")

    def contender(self, name: str, num_steps: int) -> Contender:
        """So many steps a call."""

        def run() -> None:
            for _ in range(num_steps):
                self.loss = train_step(self.session)["loss"]

        return Contender(name, run, per_call=num_steps)


def child(options: argparse.Namespace) -> Row:
    """What one process measures: a contender's first step, then it and the baseline by turns."""
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", EmulationNotice)
    trainees = {options.name: Trainee(session_of(options.name, options))}
    first = first_step(trainees[options.name].session)
    if options.name != BASELINE:
        trainees[BASELINE] = Trainee(session_of(BASELINE, options))
        first_step(trainees[BASELINE].session)
    timings = measure(
        [trainee.contender(name, options.steps_per_round) for name, trainee in trainees.items()],
        baseline=BASELINE,
        rounds=options.rounds,
        warmup=1,
        wait=torch.cuda.synchronize if torch.cuda.is_available() else nothing,
    )
    return {
        "first": first,
        "timings": [dataclasses.asdict(timing) for timing in timings],
        "losses": [trainee.loss for trainee in trainees.values()],
    }


def process(name: str, options: argparse.Namespace, folder: Path) -> Row:
    """Run :func:`child` in a process whose caches are empty (not so where nothing is measured).

    Raises:
        RuntimeError: it ended with an error, whose last line this is.
    """
    given = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    command = [sys.executable, __file__, "--child", json.dumps({**given, "name": name, "folder": str(folder)})]
    with tempfile.TemporaryDirectory() as caches:
        kept = ("NARROWGAUGE_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        environment = {**os.environ, **({} if options.quick else {key: str(Path(caches) / key) for key in kept})}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise RuntimeError(_cause(lines))
    result: Row = json.loads(done.stdout.splitlines()[-1])
    return result


def _cause(lines: Iterable[str]) -> str:
    """The line of an error's text that names it: below it a compiler says how to learn more."""
    lines = list(lines)
    named = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception", "Unsupported"))]
    return (named or lines)[-1]


def row_of(name: str, result: Row, options: argparse.Namespace) -> Row:
    """The table's row."""
    timings = [Timing(**timing) for timing in result["timings"]]
    own, base = timings[0], timings[-1]
    tokens, asked = options.batch_size * options.sequence_length, asked_of(name, options.model)
    gains = [b / a for a, b in zip(own.seconds, base.seconds, strict=True)]
    low, middle, high = statistics.quantiles(gains, n=4, method="inclusive") if len(gains) > 1 else gains * 3
    return {
        "": name,
        "tokens/s": tokens / own.median,
        "bfloat16's": tokens / base.median,
        "times as fast": middle,
        "quartiles": f"{low:.3f}–{high:.3f}",
        "by best": 1 / own.ratio_of_best,
        "asked": "" if asked is None else f"≥ {asked:g}",
        "first step s": result["first"][0],
        "of it optimizer s": result["first"][1],
        "loss": f"{result['losses'][0] - result['losses'][-1]:+.4f}",
    }


def emit(report: Report, names: Iterable[str], options: argparse.Namespace) -> None:
    """Measure everything and print the table; a line as each is done, since all of them take long."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        size = get_model(options.model).vocab_size
        if size <= LARGEST_VOCABULARY:
            prepare_data("stdlib", vocab_size=size)  # into the cache
        for name in names:
            try:
                rows.append(row_of(name, process(name, options, Path(folder)), options))
                print(f"{name}: {rows[-1]['times as fast']:.3f} times as fast", flush=True)
            except RuntimeError as error:  # one that fails must not keep the others from being measured
                report.note(f"{name} {reason(error)}")
    tokens = f"{options.batch_size} × {options.sequence_length} tokens a step"
    report.add(f"{options.model}, {tokens}, {options.rounds} rounds of {options.steps_per_round} steps", rows)


def flags() -> argparse.ArgumentParser:
    """All flags."""
    made = parser(__doc__, rounds=11)
    made.add_argument("--model", default="llama-35m", help="a preset (default llama-35m)")
    made.add_argument("--recipes", nargs="*", default=list(RECIPES), metavar="RECIPE", help="beside bfloat16/word")
    made.add_argument("--peers", nargs="*", choices=list(PEERS), metavar="PEER", help="default: all of torchao's")
    made.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    made.add_argument("--sequence-length", type=int, default=256, help="tokens per sequence")
    made.add_argument("--steps-per-round", type=int, default=2)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = flags().parse_args(arguments)
    report = Report("narrow training", options, ("torchao",))
    peers = peer_names(report) if options.peers is None else options.peers
    if options.quick:
        small: dict[str, Any] = {"model": "llama-1m", "batch_size": 2, "sequence_length": 64, "rounds": 2}
        vars(options).update(small)
        options.recipes, peers = options.recipes[:1], peers[:1]
    names = [BASELINE, *(recipe for recipe in options.recipes if recipe != BASELINE), *peers]
    emit(report, names, options)
    for line in notes(list(dict.fromkeys(name.partition("/")[0] for name in names)), _device()):
        report.note(line)
    return report.end()


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        given = argparse.Namespace(**json.loads(sys.argv[2]))
        given.folder = Path(given.folder)
        print(json.dumps(child(given)))
    else:
        sys.exit(main())
