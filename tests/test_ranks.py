"""The ranks of tests: each call has processes of its own, whatever the one before did to its own, and none is left over."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
from ranks import run_ranks

remembered: list[str] = []


def add_up(rank: int, offset: int) -> tuple[float, int]:
    total = torch.tensor(float(rank + offset))
    dist.all_reduce(total)
    return float(total), dist.get_world_size()


def look_and_spoil(rank: int) -> dict[str, Any]:
    """What a rank finds when it begins; then everything is left in disorder."""
    found = {
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "next": float(torch.rand(())),
        "python": random.random(),
        "remembered": list(remembered),
        "environment": os.environ.get("OF_THIS_TEST"),
        "folder": os.getcwd(),
        "modules": "wave" in sys.modules,
    }
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.manual_seed(rank + 7)
    random.seed(rank)
    remembered.append("something")
    os.environ["OF_THIS_TEST"] = "spoiled"
    os.chdir("/")
    import wave  # noqa: F401  which nothing else uses

    return found


def fail_on_the_second(rank: int) -> None:
    if rank == 1:
        raise ValueError("the second rank has had enough")
    dist.barrier()


def exit_on_the_first(rank: int) -> None:
    if rank == 0:
        sys.exit(3)
    dist.barrier()


def kill_the_second(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_forever(rank: int) -> None:
    signal.pause()


def say_and_wait_forever(rank: int, pipe: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with open(pipe, "w") as told:
        told.write(f"{os.getppid()} {os.getpid()} {child.pid}")
    signal.pause()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_ranks_add_up(num_ranks: int, tmp_path: Path) -> None:
    total = float(sum(range(num_ranks)) + 10 * num_ranks)
    assert run_ranks(add_up, num_ranks, tmp_path, 10) == [(total, num_ranks)] * num_ranks


def test_nothing_of_a_call_is_left_in_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THIS_TEST", "set")
    monkeypatch.chdir(tmp_path)
    first, again = (run_ranks(look_and_spoil, 2, tmp_path / "ranks") for _ in range(2))
    assert first == again
    assert first[0] == first[1]
    expected = {"dtype": "torch.float32", "threads": 1, "remembered": [], "environment": "set", "modules": False}
    assert first[0] | expected == first[0]
    assert first[0]["folder"] == str(tmp_path)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (fail_on_the_second, "the second rank has had enough"),
        (exit_on_the_first, r"ranks ended with \[3, "),
        (kill_the_second, r"ranks ended with \[(0|-9|1), -9\]"),
    ],
)
def test_a_rank_that_fails_is_shown_and_none_is_left_waiting(function: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=said):
        run_ranks(function, 2, tmp_path)
    assert run_ranks(add_up, 2, tmp_path, 0) == [(1.0, 2)] * 2


def test_ranks_that_take_too_long_are_shown_where_they_stand(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"longer than 3.0 s(.|\n)*most recent call first(.|\n)*ranks.py"):
        run_ranks(wait_forever, 2, tmp_path, timeout_seconds=3.0)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system cannot wait for processes of others")
def test_a_killed_pytest_leaves_no_process(tmp_path: Path) -> None:
    """Neither the server, nor a rank, nor what a rank started."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = (
        f"import sys; sys.path.insert(0, {str(Path(ranks.__file__).parent)!r})\n"
        "from pathlib import Path; import test_ranks\n"
        f"test_ranks.run_ranks(test_ranks.say_and_wait_forever, 1, Path({str(tmp_path)!r}), Path({str(pipe)!r}))"
    )
    client = subprocess.Popen([sys.executable, "-c", script])
    waiting = [os.pidfd_open(int(pid)) for pid in pipe.read_text().split()]
    client.kill()
    client.wait()
    while waiting:
        ended, _, _ = select.select(waiting, [], [], 20)
        assert ended, "processes are left 20 s after pytest was killed"
        for one in ended:
            os.close(one)
            waiting.remove(one)
