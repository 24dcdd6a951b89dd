"""What a live page costs: 10 runs of 100,000 steps open in 1.5 s, and an update takes 100 ms of the processor.

    ./dev bench live_page [--runs 10] [--steps 100000]

Runs of made-up rows in the trainer's columns are written to a temporary folder. A watch of them is timed in this process, by
processor seconds, which other work on the machine disturbs least; then ``narrowgauge watch`` serves them, and headless Chromium,
where there is one, opens its address. Baseline: reading one of the runs whole, as ``narrowgauge report`` does.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tomli_w

from narrowgauge.report.live.poll_loop import Watch
from narrowgauge.runs.lines import line_of
from narrowgauge.runs.record import read_run

ROUNDS = 9


def row(step: int, steps: int, noise: random.Random) -> bytes:
    """A row of steps.jsonl as the trainer writes it."""
    return line_of({
        "step": step, "loss": 2 + 5 * math.exp(-30 * step / steps) + noise.gauss(0, 0.03), "lr": 3e-4,
        "grad_norm": 1 + noise.random(), "tokens": 2048 * step, "tokens_per_second": 20_000 + noise.random(), "seconds": 0.1,
        "data_seconds": 0.001, "cpu_seconds": 0.19, "batch_crc": "9db3cc41", "peak_memory_bytes": 123_456_789, "skipped": False,
    })  # fmt: skip


def write_run(folder: Path, number: int, steps: int) -> None:
    """A run of one of two recipes, under way."""
    noise = random.Random(number)
    recipe = ("bfloat16/word", "bfloat16/master")[number % 2]
    config = {"recipe": recipe, "seed": number // 2, "steps": 2 * steps, "model": "llama-1m"}
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(
        tomli_w.dumps({"schema_version": 2, "config": config, "machine": {"device": "cpu"}})
    )
    with (folder / "steps.jsonl").open("wb") as stream:
        stream.writelines(row(step, steps, noise) for step in range(1, steps + 1))
    evals = (
        {"step": step, "val_loss": 2.1 + 50 / step, "seconds": step / 10}
        for step in range(1, steps, max(1, steps // 50))
    )
    (folder / "evals.jsonl").write_bytes(b"".join(map(line_of, evals)))
    (folder / "events.jsonl").write_bytes(line_of({"kind": "start", "step": 0, "message": "began"}))


def cost(work: Callable[[], object]) -> float:
    """Processor seconds of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def in_process(folder: Path, steps: int, num_rounds: int) -> dict[str, float]:
    """Processor seconds of each part, in this process."""
    found = {"read one run whole, as report does": cost(lambda: read_run(next(folder.iterdir())))}
    watch = Watch([folder])
    watch._start_whole = lambda: None  # type: ignore[method-assign]  # it has a process of its own
    found["first poll and update"] = cost(watch.poll)
    found["the page"] = cost(watch.document)

    def read_all() -> None:
        while not watch.page.is_read:
            watch.page.poll()

    found["reading the rest, in slices"] = cost(read_all)
    watch.poll()
    updates, reads, noise = [], [], random.Random(1)
    for turn in range(1, num_rounds + 1):
        for run in folder.iterdir():
            with (run / "steps.jsonl").open("ab") as stream:
                stream.write(row(steps + turn, steps, noise))
        reads.append(cost(watch.page.poll))
        updates.append(cost(watch.page.update))
    found["a row of every run: reading"] = statistics.median(reads)
    found["a row of every run: drawing"] = statistics.median(updates)
    found["a poll without news"] = statistics.median(cost(watch.page.poll) for _ in range(num_rounds))
    found["a zoom to a tenth"] = statistics.median(
        cost(lambda: watch.window(steps / 2, 0.6 * steps)) for _ in range(num_rounds)
    )
    return found


def in_browser(folder: Path) -> dict[str, float]:
    """Seconds by the clock, of a server and a browser of their own; none where there is no browser."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import pytest

    from report.live.driven_browser import tab

    found = {}
    began = time.perf_counter()
    command = [sys.executable, "-m", "narrowgauge", "watch", str(folder), "--no-open"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        found["start of the command to its address"] = time.perf_counter() - began
        with tempfile.TemporaryDirectory() as profile, tab(Path(profile)) as page:
            for name in ("opening it while the record is read", "opening it again"):
                page.open(address)
                page.until("Number(document.documentElement.dataset.drawn) > 0")
                found[f"{name}: first paint"] = (
                    page.see("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1e3
                )
                found[f"{name}: figures drawn"] = page.see("performance.now()") / 1e3
                page.until("!document.getElementById('now').textContent.includes('being read')")
                found[f"{name}: all rows on the page"] = page.see("performance.now()") / 1e3
    except pytest.skip.Exception as error:
        print(error)
    finally:
        server.kill()
        server.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs"
        for number in range(asked.runs):
            write_run(folder / f"run-{number}", number, asked.steps)
        print(f"{asked.runs} runs of {asked.steps:,} steps\n\nprocessor seconds of this process")
        for part, seconds in in_process(folder, asked.steps, asked.rounds).items():
            print(f"{part:50}{seconds:8.3f}")
        print("\nseconds by the clock")
        for part, seconds in in_browser(folder).items():
            print(f"{part:50}{seconds:8.2f}")


if __name__ == "__main__":
    main()
