"""The command line with a rank that a signal meets: ``killed_run.py RANK STEP SIGNAL WORDS…``.

After ``STEP`` steps of the first attempt, rank ``RANK`` sends ``SIGNAL`` to itself; ``agent-SIGNAL`` goes to the process that
started it. Everything else is the command.
"""

from __future__ import annotations

import os
import signal
import sys

from narrowgauge.cli.main import main
from narrowgauge.distributed.launch.liveness import Liveness


def strike(rank: int, step: int, whom: str) -> None:
    """Make that rank send the signal once it has done that step."""
    to, _, name = whom.rpartition("-")
    noted = Liveness.beat

    def beat(self: Liveness, done: int) -> None:
        noted(self, done)
        if (self.placement.rank, self.placement.attempt, done) == (rank, 0, step):
            os.kill(os.getppid() if to == "agent" else os.getpid(), getattr(signal, name))
            while (to, name) == ("agent", "SIGKILL"):  # no step more, until this rank ends too
                signal.pause()

    Liveness.beat = beat  # type: ignore[method-assign]


if __name__ == "__main__":
    strike(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    sys.argv[1:4] = []
    main(prog_name="narrowgauge")
