"""Kill trainings at random, fill their disks and damage their files: is the run lost?

Every try trains a tiny model with ``narrowgauge train`` on one to three ranks, disturbs it once or
more, and continues with ``narrowgauge resume`` or the same command, often on another number of
ranks. Each try is drawn by its number (``--first``).

Claim: afterwards the run has every loss, norm and weight bit of a run that nobody disturbed, or the command has refused with one
line and exit status 2, or 1 for a full disk. A flipped bit in the record may cost two of its rows, and no bit of a weight. If it
has changed a setting, an event says so. No try ends in a traceback, and no rank is left waiting. Baseline: the undisturbed run on
one rank.
Run: ``./dev bench chaos [--tries N] [--first N] [--quick]``. A hundred tries take about ten minutes on 2 cores.
No times are taken, so ``--rounds`` has no effect.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Loaded before the forks, so that children start at once.
import transformers.models.llama.modeling_llama  # noqa: F401
from timing import Report, parser

import narrowgauge.report.publishing
import narrowgauge.trainer.export
import narrowgauge.trainer.loop  # noqa: F401
from narrowgauge.cli.main import main as narrowgauge_main
from narrowgauge.runs.record import Run, is_run, read_run

SHAPE = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
SETTINGS = {
    "recipe": "bfloat16/word/reproducible", "steps": 8, "batch-size": 6, "gradient-accumulation-steps": 6,
    "sequence-length": 16, "lr": 0.003, "eval-every": 3, "eval-sequences": 2, "checkpoint-every": 2, "gauges-every": 3,
    "log-every": 1, "held-out": 0.2,
}  # fmt: skip
WORDS = [
    "def",
    "return",
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "import",
    "lazy",
    "dog",
    "self",
    "None",
]
CALLS = ("write", "fsync", "rename", "replace", "open", "mkdir", "unlink")
COMPARED = ("step", "loss", "grad_norm", "lr", "tokens", "skipped")
PATIENCE_SECONDS = 600.0
TORCHRUN_SECONDS = 30
"""How long torchrun lets the other ranks end before it kills them."""
STRIKES = 8
"""A run is disturbed at most this often."""


class Broken(Exception):
    """Neither the undisturbed run nor a refusal in one line."""


# ── commands in forked processes, struck at a system call ─────────────────────────────────────────


def watch(meet: Callable[[str], None]) -> None:
    """Call ``meet`` before each of ``CALLS`` and before a file is opened for writing."""

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            meet(name)
            return function(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, wrapped(name, getattr(os, name)))
    true_open = builtins.open

    def open_watched(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if set(mode) & set("wax+"):
            meet("write")
        return true_open(file, mode, *args, **options)

    builtins.open = io.open = open_watched  # type: ignore[assignment]


def at_call(number: int, strike: Callable[[], None]) -> Callable[[], None]:
    """Return a function that arms ``strike`` for the system call of this number.

    A full disk stays full.
    """

    def arm() -> None:
        count = [0]

        def meet(name: str) -> None:
            count[0] += 1
            is_later_write = (
                count[0] > number and strike is fill_disk and name in ("write", "mkdir")
            )
            if count[0] == number or is_later_write:
                strike()

        watch(meet)

    return arm


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Child:
    """A ``narrowgauge`` command in a forked process. ``prepare`` runs in it first."""

    def __init__(
        self, output: Path, words: Sequence[str], prepare: Callable[[], Any] = lambda: None
    ) -> None:
        self.output = output
        self.words = words
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1), os.dup2(file, 2)
            prepare()
            try:
                narrowgauge_main(list(words))
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def text(self) -> str:
        return (
            self.output.read_text(errors="replace") if self.output.is_file() else ""
        )  # killed before it began


def start_ranks(
    folder: Path, words: list[str], size: int, strikes: dict[int, Callable[[], None]]
) -> list[Child]:
    """Start a command on ``size`` ranks; ``strikes`` arms some of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def prepare(rank: int) -> Callable[[], None]:
        def set_up() -> None:
            if size > 1:
                os.environ.update(
                    RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
                )  # fmt: skip
            strikes.get(rank, lambda: None)()

        return set_up

    folder.mkdir()
    return [Child(folder / f"rank{rank}.txt", words, prepare(rank)) for rank in range(size)]


def wait_for_ranks(ranks: list[Child], kill_together: bool) -> list[int]:
    """Return exit statuses.

    Kill the other ranks after one was killed: at once if ``kill_together``, else as late as
    torchrun.
    """
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    lost = time.monotonic()
    while len(statuses) < len(ranks):
        for number, child in enumerate(ranks):
            if number not in statuses:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    statuses[number] = os.waitstatus_to_exitcode(status)
        is_late = time.monotonic() > deadline
        if not (is_lost := -signal.SIGKILL in statuses.values()):
            lost = time.monotonic()
        if is_late or (
            is_lost and time.monotonic() - lost > (0 if kill_together else TORCHRUN_SECONDS)
        ):
            for number in set(range(len(ranks))) - statuses.keys():
                os.kill(ranks[number].pid, signal.SIGKILL)
                statuses[number] = ranks[number].wait()
        if is_late:
            raise Broken(f"ranks did not end: {[child.text[-900:] for child in ranks]}")
        time.sleep(0.01)
    texts = "\n".join(child.text for child in ranks)
    # A rank that has lost another one shows gloo's error.
    if -signal.SIGKILL not in statuses.values() and (
        "Traceback" in texts or texts.count("Error: ") > 1
    ):
        raise Broken(f"more than one line: {texts[-3000:]}")
    return [statuses[number] for number in range(len(ranks))]


# ── what must hold ────────────────────────────────────────────────────────────────────────────────


@dataclass
class Place:
    """What tries share: model, text, the undisturbed run, a run paused after step 4, and the
    undisturbed run's cost.
    """

    folder: Path
    whole: Run
    num_calls: int = 1
    seconds: float = 1.0

    def train(self, out: Path) -> list[str]:
        options = {
            "model": self.folder / "model",
            "data": self.folder / "tokens",
            "out": out,
            **SETTINGS,
        }
        return [
            "train",
            *(word for name, value in options.items() for word in (f"--{name}", str(value))),
        ]


def prepare(folder: Path) -> Place:
    for name in ("model", "text"):
        (folder / name).mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
    draw = random.Random(0)
    place = Place(folder, Run(folder, {}))
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text(" ".join(draw.choices(WORDS, k=250)))
    require(
        Child(folder / "tokens.txt", ["tokenize", str(folder / "text"), str(folder / "tokens")])
    )
    require(Child(folder / "paused.txt", [*place.train(folder / "paused"), "--stop-after", "4"]))
    calls = folder / "calls"
    counter = os.open(calls, os.O_WRONLY | os.O_CREAT)
    write = os.write
    require(
        Child(
            folder / "whole.txt",
            place.train(folder / "whole"),
            lambda: watch(lambda name: write(counter, b".")),
        )
    )
    os.close(counter)
    place.whole, place.num_calls = read_run(folder / "whole"), calls.stat().st_size
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "narrowgauge", *place.train(folder / "timed")],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    place.seconds = time.perf_counter() - began
    return place


def require(child: Child) -> None:
    if status := child.wait():
        raise Broken(f"{' '.join(child.words[:2])} ended with {status}: {child.text[-1500:]}")


def require_refusal(child: Child, status: int) -> None:
    lines = re.findall(r"^\w+Error: ", child.text, re.MULTILINE)
    if status not in (1, 2) or len(lines) != 1 or "Traceback" in child.text:
        raise Broken(
            f"{' '.join(child.words[:2])} ended with {status}, not with one line: "
            f"{child.text[-1500:]}"
        )


def require_same(place: Place, folder: Path, num_lost: int = 0) -> None:
    """Compare a run with the undisturbed one: losses, norms, evaluations and the fingerprint of the
    weights.

    The record may lack ``num_lost`` rows, or have others in their places.
    """
    rows = []
    fingerprints = []
    for run in (read_run(folder), place.whole):
        steps = []
        for row in run.steps:
            steps.append({name: row.get(name) for name in COMPARED})
        evals = []
        for row in run.evals:
            evals.append({"step": row["step"], "val_loss": row.get("val_loss")})
        rows.append([*steps, *evals])
        fingerprints.append((run.summary or {}).get("weights_fingerprint"))
    missing = [row for row in rows[1] if row not in rows[0]]
    is_longer = len(rows[0]) > len(rows[1])
    is_same = fingerprints[0] == fingerprints[1] is not None
    if not is_same or is_longer or len(missing) > num_lost:
        raise Broken(f"{folder} is another run: {fingerprints}, {len(missing)} rows differ")


def is_finished(folder: Path) -> bool:
    return is_run(folder) and read_run(folder).summary is not None


def finish(place: Place, folder: Path, output: Path) -> None:
    """Continue as a user would, and compare."""
    if not is_finished(folder):
        require(Child(output, ["resume", str(folder)] if is_run(folder) else place.train(folder)))
    require_same(place, folder)


# ── tries ─────────────────────────────────────────────────────────────────────────────────────────


def struck(
    place: Place,
    draw: random.Random,
    at: Path,
    strike: Callable[[], None],
    kill_together: bool = False,
) -> str:
    """Strike one rank at a system call, then resume or give the same command on other numbers of
    ranks, often struck again.
    """
    run = at / "run"
    sizes = []
    for sitting in range(STRIKES):
        sizes.append(draw.choice([1, 2, 3]))
        if is_run(run) and draw.random() < 0.5:
            words = ["resume", str(run)]
        else:
            words = place.train(run)
        is_struck = not sitting or draw.random() < 0.3
        number = draw.randrange(1, 60 if sitting else place.num_calls)
        if is_struck:
            strikes = {draw.randrange(sizes[-1]): at_call(number, strike)}
        else:
            strikes = {}
        ranks = start_ranks(at / f"sitting{sitting}", words, sizes[-1], strikes)
        statuses = wait_for_ranks(ranks, kill_together)
        # Before the first step a SIGTERM ends a process at once.
        ends = {0, 1, 2, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL}
        if is_struck:
            allowed = ends
        else:
            allowed = {0}
        if not allowed.issuperset(statuses):
            raise Broken(
                f"{words[0]} ended with {statuses} on {sizes}: "
                f"{[child.text[-900:] for child in ranks]}"
            )
        if is_finished(run):
            require_same(place, run)
            return "same run"
    raise Broken(f"not finished after {sizes}")


def killed_by_the_clock(place: Place, draw: random.Random, at: Path) -> str:
    """Kill a process at any time, also while Python starts."""
    words = [sys.executable, "-m", "narrowgauge", *place.train(at / "run")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        time.sleep(draw.random() * place.seconds)
        started.kill()
    finish(place, at / "run", at / "resumed.txt")
    return "same run"


def damaged(place: Place, draw: random.Random, at: Path) -> str:
    """Flip a bit of a file of a paused run, cut the file short, or remove a shard."""
    run = at / "run"
    shutil.copytree(place.folder / "paused", run)
    file = draw.choice(
        sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)
    )
    content = bytearray(file.read_bytes())
    place_of_damage = draw.randrange(len(content))
    content[place_of_damage] ^= 1 << draw.randrange(8)
    if file.suffix == ".safetensors" and draw.random() < 0.5:
        file.unlink()
    else:
        file.write_bytes(content if draw.random() < 0.75 else content[:place_of_damage])
    ranks = start_ranks(at / "resumed", ["resume", str(run)], draw.choice([1, 2]), {})
    statuses = wait_for_ranks(ranks, kill_together=False)
    if any(statuses):
        require_refusal(ranks[0], statuses[0])
        return "one line"
    if any(event["what"] == "changed-settings" for event in read_run(run).events):
        return "another setting, told"
    require_same(place, run, num_lost=2)
    return "same run"


def lost(place: Place, draw: random.Random, at: Path) -> str:
    """Lose all checkpoints of a paused run, often with an edit or a remnant that makes it look as
    if there never was one.
    """
    run = at / "run"
    shutil.copytree(place.folder / "paused", run)
    shutil.rmtree(run / "checkpoints")
    if draw.random() < 0.5:
        (run / "checkpoints" / ".tmp-step-00000004").mkdir(parents=True)
    if draw.random() < 0.5:
        settings = (run / "run.toml").read_text()
        (run / "run.toml").write_text(
            re.sub("checkpoint_every = .*", "checkpoint_every = 99", settings)
        )
    num_rows = len(read_run(run).steps)
    words = draw.choice([["resume", str(run)], ["train", "--out", str(run)], place.train(run)])
    child = Child(at / "resumed.txt", words)
    require_refusal(child, child.wait())
    if len(read_run(run).steps) != num_rows:
        raise Broken(f"{run} has lost its record")
    require(Child(at / "restarted.txt", ["resume", str(run), "--restart"]))
    if not any(e["what"] == "changed-settings" for e in read_run(run).events):
        require_same(place, run)
    return "refused, and begun again when asked"


def changed(place: Place, draw: random.Random, at: Path) -> str:
    """Kill a run, and give the same command with another rate, or the run's own settings by name
    and by omission.
    """
    run = at / "run"
    shutil.copytree(place.folder / "paused", run)
    words = draw.choice(
        [
            ["train", "--out", str(run)],
            place.train(run),
            ["resume", str(run)],
            ["train", "--out", str(run), "--lr", "0.01"],
        ]
    )
    require(Child(at / "resumed.txt", words))
    messages = []
    for e in read_run(run).events:
        if e["what"] == "changed-settings":
            messages.append(e["advice"])
    if "0.01" not in words:
        require_same(place, run)
        if messages:
            raise Broken(f"settings that were not given have changed: {messages}")
        return "same run"
    if messages != ["lr was 0.003 up to step 4 and is 0.01 from there on"]:
        raise Broken(f"another rate was not told: {messages}")
    return "another setting, told"


def two_at_once(place: Place, draw: random.Random, at: Path) -> str:
    """Start the same command twice."""
    run = at / "run"
    children = [Child(at / "one.txt", place.train(run))]
    time.sleep(draw.choice([0.0, draw.random()]))
    children.append(Child(at / "two.txt", place.train(run)))
    statuses = [child.wait() for child in children]
    for child, status in zip(children, statuses, strict=True):
        if status:
            require_refusal(child, status)
    require_same(place, run)
    return "one trained, the other refused" if any(statuses) else "both"


KINDS: dict[str, tuple[Callable[[Place, random.Random, Path], str], int]] = {
    "kill -9 of a rank at a system call": (partial(struck, strike=kill), 4),
    "kill -9 of all ranks": (partial(struck, strike=kill, kill_together=True), 2),
    "SIGTERM to a rank at a system call": (partial(struck, strike=terminate), 2),
    "kill -9 by the clock, Python's start too": (killed_by_the_clock, 2),
    "full disk of a rank from a system call on": (partial(struck, strike=fill_disk), 4),
    "a flipped bit, a cut file or a missing shard": (damaged, 4),
    "two at once": (two_at_once, 2),
    "all checkpoints lost": (lost, 2),
    "the same command, other settings": (changed, 2),
}
"""Each kind with its share of 24 tries."""
TURN = [kind for kind, (_, share) in KINDS.items() for _ in range(share)]
random.Random(0).shuffle(TURN)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the tries."""
    flags = parser(__doc__, rounds=1)
    flags.add_argument("--tries", type=int, help="how many (default 100; quick: 10)")
    flags.add_argument("--first", type=int, default=0, help="number of the first try")
    options = flags.parse_args(arguments)
    number = options.tries or (10 if options.quick else 100)
    report = Report("chaos", options)
    outcomes = {kind: Counter[str]() for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="narrowgauge-chaos-") as folder:
        place = prepare(Path(folder))
        for this in range(options.first, options.first + number):
            kind = TURN[this % len(TURN)]
            at = Path(folder, f"try{this}")
            at.mkdir()
            try:
                outcome = KINDS[kind][0](place, random.Random(this), at)
            except Exception as error:  # an unreadable record is a result, not the end of the tries
                outcome = "BROKEN"
                report.note(f"try {this}, {kind}: {type(error).__name__}: {error}")
            outcomes[kind][outcome] += 1
            print(f"{this} {kind}: {outcome}", flush=True)
            shutil.rmtree(at, ignore_errors=True)
    rows = [
        {
            "": kind,
            "tries": counts.total(),
            "broken": counts["BROKEN"],
            "outcomes": str(dict(counts)),
        }
        for kind, counts in outcomes.items()
    ]
    report.add("disturbed trainings, each against the undisturbed run", rows)
    report.end()
    return int(any(counts["BROKEN"] for counts in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
