"""A run of ranks without a model, for tests of how ranks start and end: ``launched.py CASE FOLDER``.

Each step is an all-reduce. The cases do in some step what this file says; whether that is told once, by whom, and with which
status is what the tests ask.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from narrowgauge.cli.exit_status import CommandGroup
from narrowgauge.distributed.launch import agreement, process_group
from narrowgauge.distributed.launch.placement import Placement
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RecordError, Terminated

CULPRIT, STEP, STEPS = 1, 5, 8


def happen(case: str, here: Placement) -> None:
    """What the case is about, on the rank that it is about, in its step."""
    if case == "killed" or (case == "killed once" and here.attempt == 0):
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "hanging":
        time.sleep(600)
    elif case == "failing":
        raise RecordError("the disk is full.", "Free some space.")
    elif case == "unread":
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    elif case == "terminated":
        os.kill(os.getppid(), signal.SIGTERM)
    elif case == "orphaned":
        os.kill(os.getppid(), signal.SIGKILL)
        while True:  # until this rank is killed too
            signal.pause()


def run(case: str, folder: Path) -> None:
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    seconds = float(os.environ.get("SECONDS_WITHOUT_PROGRESS", "60"))

    def note_loss(step: int, said: str) -> None:
        (folder / "lost").write_text(f"{step} {said}")

    with process_group.process_group(
        timeout_seconds=seconds, how_to_resume=lambda: "Resume it.", note_loss=note_loss
    ) as here:
        agreement.require_same({"lr": 0.1 + (case == "different" and here.rank == CULPRIT)})
        step = 0
        # A signal is on its way: whoever waits for it goes on until it has come.
        while step < STEPS or case == "terminated":
            if step + 1 == STEP and here.rank == CULPRIT:
                happen(case, here)
            dist.all_reduce(torch.ones(4))
            step += 1
            process_group.beat(step)
            if number := all_ranks().largest(received[0] if received else 0):
                (folder / f"stopped-{here.rank}").write_text(f"{step} {number}")
                raise Terminated
        (folder / f"done-{here.rank}").write_text(f"{here.rank} {here.size} {here.local_rank} {here.attempt}")


if __name__ == "__main__":
    group = CommandGroup("launched")
    group.command("run")(lambda: run(sys.argv[1], Path(sys.argv[2])))
    group.main(["run"])
