"""Functions that run in processes of their own, forked from a benchmark."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist


def in_processes(function: Callable[..., Any], number: int, *arguments: Any) -> Any:
    """What ``function(rank, folder, *arguments)`` returns in the first of so many processes, which
    share an empty folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = []
        for rank in range(number):
            ranks.append(
                context.Process(target=_run, args=(function, rank, Path(folder), arguments))
            )
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise RuntimeError(f"ranks ended with {[rank.exitcode for rank in ranks]}")
        return pickle.loads((Path(folder) / "result").read_bytes())


def _run(function: Callable[..., Any], rank: int, folder: Path, arguments: Sequence[Any]) -> None:
    result = function(rank, folder, *arguments)
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))


@contextmanager
def group(rank: int, folder: Path, size: int) -> Iterator[None]:
    """A process group of gloo, over the loopback interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size
    )
    yield
    dist.barrier()
    dist.destroy_process_group()
