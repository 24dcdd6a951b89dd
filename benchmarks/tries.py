"""Tries to break a run from outside, and what must hold after each: the part of ``faults.py`` that needs processes.

Every try has a folder of its own, a draw of its own (so that a failure can be tried again with ``--first``), and one claim: in
the end there is the run that nobody disturbed, bit for bit, or one line that says what is wrong, and never a traceback. What
runs are commands of ``narrowgauge`` on a tiny model. Most are forked from this process, which has loaded everything and
computed nothing; those that are killed while Python starts are processes of their own.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What every child would load.
import transformers.models.llama.modeling_llama  # noqa: F401

import narrowgauge.report.publishing
import narrowgauge.trainer.exporting
import narrowgauge.trainer.loop  # noqa: F401
from narrowgauge.cli.main import main
from narrowgauge.runs.record import Run, is_run, read_run

SHAPE = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
SETTINGS = {
    "steps": 8, "batch-size": 4, "sequence-length": 16, "lr": 0.003, "eval-every": 3, "eval-batches": 2,
    "checkpoint-every": 2, "audit-every": 2, "gauges-every": 3, "log-every": 1, "held-out": 0.2,
}  # fmt: skip
TIMINGS = (
    "tokens_per_second", "seconds", "data_seconds", "gradient_seconds", "update_seconds", "evaluation_seconds",
    "cpu_seconds", "wall_seconds", "peak_memory_bytes", "activation_bytes",
    "peak_tensor_bytes", "communication_bytes", "communication_seconds", "wait_seconds", "ranks",
)  # fmt: skip
CALLS = ("write", "fsync", "rename", "replace", "open", "mkdir", "unlink")
DAMAGED = (
    "run.toml", "steps.jsonl", "evals.jsonl", "events.jsonl", "gauges.jsonl", "data/data.json", "data/train.bin",
    "data/valid.bin", "data/tokenizer.json", "checkpoints/*/manifest.json", "checkpoints/*/state.json",
    "checkpoints/*/tensors.safetensors",
)  # fmt: skip


class Broken(Exception):
    """A try after which there was neither the same run nor one line."""


@dataclass
class Place:
    """What all tries share: a model, text, the run that nobody disturbed, how many system calls it made, and how long a
    process of its own takes for it, in seconds."""

    folder: Path
    whole: Run
    paused: Path
    num_calls: int
    seconds: float = 0.0

    def train(self, out: Path) -> list[str]:
        """The command that makes the run."""
        given = {"model": self.folder / "model", "data": self.folder / "text", "out": out, **SETTINGS}
        return ["train", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


def prepare(folder: Path) -> Place:
    """Make the model's shape, the text, the undisturbed run, and one that was paused after step 4."""
    for name in ("model", "text"):
        (folder / name).mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
    draw, words = (
        random.Random(0),
        ["def", "return", "the", "quick", "brown", "fox", "jumps", "over", "import", "lazy", "dog", "self", "None"],
    )
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text(" ".join(draw.choices(words, k=250)))
    place = Place(folder, Run(folder, {}), folder / "paused", 0)
    counted = Child(folder / "counted.txt", place.train(folder / "whole"), counting)
    require(counted.wait() == 0, counted)
    place.num_calls = int((folder / "counted.txt.calls").read_text())
    paused = Child(folder / "paused.txt", [*place.train(place.paused), "--stop-after", "4"])
    require(paused.wait() == 0, paused)
    place.whole = read_run(folder / "whole")
    began = time.perf_counter()
    subprocess.run(process(place, folder / "timed"), stdout=subprocess.DEVNULL, check=True)
    place.seconds = time.perf_counter() - began
    return place


def process(place: Place, out: Path) -> list[str]:
    """The same command as a process that Python starts anew."""
    return [sys.executable, "-m", "narrowgauge", *place.train(out)]


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Child:
    """A command in a process forked from this one; ``disturb`` is called in it first."""

    def __init__(self, output: Path, words: Sequence[str], disturb: Callable[[Path], Any] = lambda _: None) -> None:
        self.output, self.words = output, words
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, 1), os.dup2(file, 2)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                after = disturb(output)
                try:
                    main(list(words))
                except SystemExit as end:
                    status = int(end.code or 0)
                if after is not None:
                    after()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(status)

    def wait(self) -> int:
        """Its status; that of a signal is negative."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")


def counting(output: Path) -> Callable[[], Any]:
    """Count the calls at which :func:`at_call` can strike."""
    total = [0]

    def count(name: str) -> None:
        total[0] += 1

    watch(count)
    return lambda: Path(f"{output}.calls").write_text(str(total[0]))


def watch(meet: Callable[[str], None], calls: Sequence[str] = CALLS) -> None:
    """Let ``meet`` be called before these system calls, and before every opening of a file to be written."""

    def met(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            meet(name)
            return function(*given, **named)

        return call

    for name in calls:
        setattr(os, name, met(name, getattr(os, name)))
    true_open = builtins.open

    def opened(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        if set(mode) & set("wax+"):
            meet("write")
        return true_open(file, mode, *given, **named)

    builtins.open = io.open = opened  # type: ignore[assignment]


def at_call(number: int, strike: Callable[[], None]) -> Callable[[Path], None]:
    """Strike before the system call of that number, and at every later one that writes."""

    def disturb(_: Path) -> None:
        passed = [0]

        def meet(name: str) -> None:
            passed[0] += 1
            if passed[0] == number or (passed[0] > number and strike is full_disk and name in ("write", "mkdir")):
                strike()

        watch(meet)

    return disturb


def full_disk() -> None:
    """What a write meets on a disk without room; standard output is no disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill() -> None:
    """The end without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    """The end that a scheduler asks for."""
    os.kill(os.getpid(), signal.SIGTERM)


# ── what must hold ──────────────────────────────────────────────────────────────────────────────────────────────────────


def require(holds: bool, child: Child, also: str = "") -> None:
    """Raise with what a command said."""
    if not holds:
        raise Broken(f"{' '.join(child.words[:2])}: {also} {child.said[-1500:]}")


def lasting(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in TIMINGS}


def require_same(place: Place, folder: Path) -> None:
    """The run in a folder is the one that nobody disturbed."""
    run, whole = read_run(folder), place.whole
    same = all(
        list(map(lasting, one)) == list(map(lasting, other))
        for one, other in ((run.steps, whole.steps), (run.evals, whole.evals))
    )
    if not same or run.summary is None or lasting(run.summary) != lasting(whole.summary or {}):
        raise Broken(f"{folder} is another run: {run.summary}")


def refusal(child: Child, status: int) -> str:
    """The one line with which a command refused; its advice fits."""
    require(status == 2 and "Traceback" not in child.said, child, f"status {status}.")
    line = [line for line in child.said.splitlines() if re.match(r"\w+Error: ", line)]
    require(len(line) == 1, child, "no one line.")
    return line[0]


def finish(place: Place, folder: Path, output: Path) -> None:
    """Go on as a user would, with the same command where there is no run yet; the run is then the undisturbed one."""
    words = ["resume", str(folder)] if is_run(folder) else place.train(folder)
    if not (is_run(folder) and read_run(folder).summary is not None):
        child = Child(output, words)
        require(child.wait() == 0, child, "going on.")
    require_same(place, folder)


# ── the tries ───────────────────────────────────────────────────────────────────────────────────────────────────────────

Try = Callable[[Place, random.Random, Path], str]


def killed_training(place: Place, draw: random.Random, at: Path) -> str:
    """Killed at a system call, and often once more in the resume."""
    child = Child(at / "out.txt", place.train(at / "run"), at_call(draw.randrange(1, place.num_calls), kill))
    require(child.wait() == -signal.SIGKILL, child)
    if is_run(at / "run") and read_run(at / "run").summary is None and draw.random() < 0.5:
        Child(at / "again.txt", ["resume", str(at / "run")], at_call(draw.randrange(1, 60), kill)).wait()
    finish(place, at / "run", at / "on.txt")
    return "same run"


def killed_by_the_clock(place: Place, draw: random.Random, at: Path) -> str:
    """Killed at any time from Python's start on."""
    words = process(place, at / "run")
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        time.sleep(draw.random() * place.seconds)
        started.kill()
    finish(place, at / "run", at / "on.txt")
    return "same run"


def terminated_training(place: Place, draw: random.Random, at: Path) -> str:
    """Told to end at a system call."""
    child = Child(at / "out.txt", place.train(at / "run"), at_call(draw.randrange(1, place.num_calls), terminate))
    status = child.wait()
    require(status in (143, -signal.SIGTERM, 0) and "Traceback" not in child.said, child, f"status {status}.")
    finish(place, at / "run", at / "on.txt")
    return "same run"


def full_in_training(place: Place, draw: random.Random, at: Path) -> str:
    """No room from a system call on, in a new run or in a resume."""
    number = draw.randrange(1, place.num_calls)
    child = Child(at / "out.txt", place.train(at / "run"), at_call(number, full_disk))
    status = child.wait()
    if status:
        refusal(child, status)
    finish(place, at / "run", at / "on.txt")
    return "same run, after one line" if status else "same run"


def full_elsewhere(place: Place, draw: random.Random, at: Path) -> str:
    """No room for an export, a conversion or a report."""
    source, out = str(place.whole.path), at / "out.html"
    words = draw.choice(
        [
            ["export", source, str(out)],
            ["convert", source, "--recipe", "bfloat16/exact", "--out", str(out)],
            ["report", source, "--out", str(out)],
        ]
    )
    child = Child(at / "out.txt", words, at_call(draw.randrange(1, 12), full_disk))
    status = child.wait()
    if status:
        line = refusal(child, status)
        require("disk is full" not in line or "narrowgauge resume" not in line, child, "advice.")
        require(is_whole_or_absent(out), child, "half of it is left.")
    if not out.exists():
        child = Child(at / "on.txt", words)
        require(child.wait() == 0 and is_whole_or_absent(out), child, "once there is room.")
    return "one line, and then whole" if status else "whole"


def is_whole_or_absent(out: Path) -> bool:
    """What was written has its name only once it is whole; the disk may still refuse to say that it keeps the name."""
    if out.is_file():
        return out.read_bytes().rstrip().endswith(b"</html>")
    return not out.exists() or any(out.rglob("*.safetensors"))


def flipped(place: Place, draw: random.Random, at: Path) -> str:
    """One bit of one file of a paused run."""
    shutil.copytree(place.paused, at / "run")
    file = draw.choice(sorted((at / "run").glob(draw.choice(DAMAGED))))
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    report = Child(at / "report.txt", ["report", str(at / "run"), "--out", str(at / "page.html")])
    if status := report.wait():
        refusal(report, status)
    child = Child(at / "out.txt", ["resume", str(at / "run")])
    if status := child.wait():
        refusal(child, status)
        return "one line"
    require_same(place, at / "run")
    return "same run"


def two_at_once(place: Place, draw: random.Random, at: Path) -> str:
    """The same command twice, or a command beside another."""
    kind = draw.choice(["train", "resume", "export", "train and report"])
    run, out = at / "run", at / "model"
    if kind != "train" and kind != "train and report":
        shutil.copytree(place.paused, run)
    words = {"resume": ["resume", str(run)], "export": ["export", str(run), str(out)]}.get(kind, place.train(run))
    other = ["report", str(run), "--out", str(at / "page.html")] if "report" in kind else words
    children = [Child(at / "one.txt", words)]
    time.sleep(draw.random() * (0.0 if draw.random() < 0.5 else 1.0))
    children.append(Child(at / "two.txt", other))
    statuses = [child.wait() for child in children]
    for child, status in zip(children, statuses, strict=True):
        if status:
            refusal(child, status)
    require(0 in statuses, children[0], f"{kind}: nobody did it.")
    if kind == "export":
        require((out / "model.safetensors").is_file(), children[0], "no export.")
    else:
        require_same(place, run)
    return "one did it, the other one line" if any(statuses) else "both"


TRIES: dict[str, tuple[Try, int]] = {
    "kill -9 at a system call": (killed_training, 5),
    "kill -9 by the clock, Python's start too": (killed_by_the_clock, 2),
    "SIGTERM at a system call": (terminated_training, 2),
    "full disk in a training": (full_in_training, 4),
    "full disk in export, convert or report": (full_elsewhere, 1),
    "one flipped bit": (flipped, 4),
    "two at once": (two_at_once, 2),
}
"""Every kind of try, and its share."""


def kind_of(number: int) -> str:
    """Which kind the try of that number is: all kinds in turn, each as often as its share says."""
    turn = [name for name, (_, share) in TRIES.items() for _ in range(share)]
    random.Random(0).shuffle(turn)
    return turn[number % len(turn)]


def attempt(place: Place, number: int, at: Path) -> tuple[str, str, str]:
    """One try: its kind, its outcome, and what broke."""
    kind = kind_of(number)
    at.mkdir()
    try:
        return kind, TRIES[kind][0](place, random.Random(number), at), ""
    except Exception as error:  # a record that cannot be read any more is a finding, not the end of the tries
        return kind, "BROKEN", f"try {number}, {kind}: {type(error).__name__}: {error}"
    finally:
        shutil.rmtree(at, ignore_errors=True)
