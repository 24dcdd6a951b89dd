"""How long a plan takes: 0.3 s for one question, 1 s for a search over layouts, the start of Python included.

    ./dev bench plan_speed

Baseline: ``narrowgauge --version``, which starts Python and reads the command line. Medians of processes in turns, since another
program on the machine slows all of them alike; processor seconds stand beside wall-clock seconds for the same reason.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

ROUNDS = 7
EIGHT = ("plan", "run", "--model", "llama-8b", "--chip", "H100-SXM", "--chips", "8")
MANY = ("plan", "run", "--model", "llama-70b", "--chip", "H100-SXM", "--chips", "512")
WORD = ("--recipe", "bfloat16/word")
QUESTIONS: dict[str, tuple[str, ...]] = {
    "start (--version)": ("--version",),
    "state of 10 billion, all storages": ("plan", "state", "--params", "10e9"),
    "measured times": ("plan", "scaling", "128:10d,256:7d", "--at", "512"),
    "one recipe on 8 chips": (*EIGHT, *WORD),
    "every recipe on 8 chips": EIGHT,
    "one recipe on 512 chips": (*MANY, *WORD),
    "every recipe on 512 chips": MANY,
}


def timed(words: tuple[str, ...]) -> tuple[float, float]:
    """Wall-clock and processor seconds of one process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "narrowgauge", *words], stdout=subprocess.DEVNULL, check=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    rounds = [{name: timed(words) for name, words in QUESTIONS.items()} for _ in range(ROUNDS)]
    print(f"{'question':36}{'wall s':>8}{'cpu s':>8}{'over the start':>16}")
    for name in QUESTIONS:
        wall, cpu = (statistics.median(found[name][place] for found in rounds) for place in (0, 1))
        extra = statistics.median(found[name][1] - found["start (--version)"][1] for found in rounds)
        print(f"{name:36}{wall:8.2f}{cpu:8.2f}{extra:16.2f}")


if __name__ == "__main__":
    main()
