"""Runs of the trainer on ranks that are killed or told to end, and go on on another number of ranks.

Each try starts ``narrowgauge train`` with ``reproducible`` on two or three ranks, strikes one of them or all at a system
call, and goes on with ``narrowgauge resume`` on one, two or three, often struck once more. What comes out must be the run
that one process made and nobody disturbed: every loss, every norm, the weights to the last bit. The ranks that were not
struck must end by themselves, with one line among them. See ``rank_tries.py`` for the checkpoints alone, a thousand times.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tries
from tries import Broken, Child, kill, terminate, watch

from narrowgauge.runs.record import is_run, read_run

SETTINGS = {"recipe": "bfloat16/word/reproducible", "batch-size": 6, "gradient-accumulation-steps": 6}
PATIENCE_SECONDS = 120.0
COMPARED = ("step", "loss", "grad_norm", "lr", "tokens", "skipped")


def prepare(folder: Path) -> tries.Place:
    """As for one process, with settings whose bits depend on no number of ranks."""
    before = dict(tries.SETTINGS)
    tries.SETTINGS.update(SETTINGS)
    try:
        return tries.prepare(folder)
    except BaseException:
        tries.SETTINGS.clear()
        tries.SETTINGS.update(before)
        raise


def start_ranks(at: Path, words: list[str], size: int, strikes: dict[int, Callable[[], None]]) -> list[Child]:
    """A command on so many ranks; ``strikes`` says by what some of them are met, and when, after they have forked."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    def disturb(rank: int) -> Callable[[Path], None]:
        def begin(_: Path) -> None:
            if size > 1:
                os.environ.update(
                    RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
                )  # fmt: skip
            if rank in strikes:
                strikes[rank]()

        return begin

    at.mkdir()
    return [Child(at / f"rank{rank}.txt", words, disturb(rank)) for rank in range(size)]


def end_ranks(ranks: list[Child], together: bool) -> list[int]:
    """The exit status of each; with ``together`` the others are killed as soon as one is gone.

    Raises:
        Broken: a rank did not end by itself, or they said more than one line.
    """
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(statuses) < len(ranks):
        for number, child in enumerate(ranks):
            if number not in statuses:
                done, status = os.waitpid(child.pid, os.WNOHANG)
                if done:
                    statuses[number] = os.waitstatus_to_exitcode(status)
        gone = [number for number, status in statuses.items() if status == -signal.SIGKILL]
        late = time.monotonic() > deadline
        if (together and gone) or late:
            for number in set(range(len(ranks))) - statuses.keys():
                os.kill(ranks[number].pid, signal.SIGKILL)
        if late:
            for number in set(range(len(ranks))) - statuses.keys():
                os.waitpid(ranks[number].pid, 0)
            raise Broken(f"left: after {statuses} the others did not end: {_said(ranks)}")
        time.sleep(0.01)
    said = _said(ranks)
    if "Traceback" in said or said.count("Error: ") > 1:
        raise Broken(f"left: more than one line: {said}")
    return [statuses[number] for number in range(len(ranks))]


def _said(ranks: list[Child]) -> str:
    return "\n".join(f"── {number} ──\n{child.said[-1200:]}" for number, child in enumerate(ranks))


def strike_at(number: int, strike: Callable[[], None]) -> Callable[[], None]:
    """Strike before the system call of that number."""

    def begin() -> None:
        passed = [0]

        def meet(name: str) -> None:
            passed[0] += 1
            if passed[0] == number:
                strike()

        watch(meet)

    return begin


def require_same(place: tries.Place, folder: Path) -> None:
    """The run in a folder is the one that one process made."""
    run, whole = read_run(folder), place.whole
    steps = [[{name: row[name] for name in COMPARED} for row in found.steps] for found in (run, whole)]
    evals = [[(row["step"], row["val_loss"]) for row in found.evals] for found in (run, whole)]
    ends = [(found.summary or {}).get("weights_fingerprint") for found in (run, whole)]
    if steps[0] != steps[1] or evals[0] != evals[1] or ends[0] != ends[1] or ends[0] is None:
        raise Broken(f"wrong: {folder} is another run: {ends}")


def attempt(place: tries.Place, draw: random.Random, at: Path) -> tuple[str, str]:
    """One try: its kind, and its outcome."""
    at.mkdir()
    run, sizes = at / "run", []
    kind = draw.choice(["kill -9 of a rank", "kill -9 of a rank", "kill -9 of all ranks", "SIGTERM to a rank"])
    for sitting in range(8):
        size = draw.choice([2, 3]) if not sitting else draw.choice([1, 2, 3])
        words = ["resume", str(run)] if is_run(run) else place.train(run)
        strikes = {}
        if not sitting or draw.random() < 0.3:
            number = draw.randrange(1, place.num_calls if not sitting else 60)
            strikes = {draw.randrange(size): strike_at(number, terminate if "SIGTERM" in kind else kill)}
        sizes.append(size)
        statuses = end_ranks(start_ranks(at / f"sitting{sitting}", words, size, strikes), "all" in kind)
        if not strikes and any(statuses):
            raise Broken(f"lost: {statuses} in sitting {sitting} of {sizes}: {_texts(at, sitting)}")
        if is_run(run) and read_run(run).summary is not None:
            require_same(place, run)
            return kind, "same run"
    raise Broken(f"lost: still not through after {sizes}")


def _texts(at: Path, sitting: int) -> str:
    return "\n".join(file.read_text()[-1200:] for file in sorted((at / f"sitting{sitting}").iterdir()))


def try_runs(number: int, folder: Path, first: int = 0) -> tuple[dict[str, Counter[str]], list[str]]:
    """Make so many tries: outcomes by kind, and what broke."""
    place, outcomes, broken = prepare(folder), {}, []
    for this in range(first, first + number):
        at = folder / f"try{this}"
        try:
            kind, outcome = attempt(place, random.Random(this), at)
        except Exception as error:  # a record that cannot be read any more is a finding, not the end of the tries
            kind, outcome = "broken", str(error).partition(":")[0]
            broken.append(f"try {this}: {type(error).__name__}: {error}")
        outcomes.setdefault(kind, Counter())[outcome] += 1
        print(this, kind, outcome, flush=True)
        shutil.rmtree(at, ignore_errors=True)
    return outcomes, broken


def main() -> int:
    """Make as many tries as the first argument says, from the number that the second says."""
    number, first = [*map(int, sys.argv[1:3]), *(20, 0)[len(sys.argv) - 1 :]]
    with tempfile.TemporaryDirectory(prefix="narrowgauge-rank-runs-") as folder:
        outcomes, broken = try_runs(number, Path(folder), first)
    rows: list[Any] = [f"{kind}: {dict(found)}" for kind, found in outcomes.items()]
    print(*rows, *broken, sep="\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
