"""Ranks of tests: processes with one gloo group, forked from multiprocessing's fork server, which
has imported PyTorch and the package.
"""

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

multiprocessing.get_context("forkserver").set_forkserver_preload(
    [
        "pytest",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "transformers.models.llama.modeling_llama",
        # What most ranks run. They fork with it, which saves each half a second.
        "narrowgauge.trainer.train",
        "narrowgauge.measuring.watch.recorder",
        "narrowgauge.measuring.check.check",
    ]
)
_GROUND = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    place: Path,
    *arguments: Any,
    timeout_seconds: float = 300.0,
) -> list[Any]:
    """Return what ``function(rank, *arguments)`` returns on each of ``num_ranks`` processes with
    one process group.

    Args:
        function: at the top of its module, which each process imports anew.
        place: a folder for what the processes write; made if need be.
    Raises:
        ProcessRaisedException: a rank failed, with its traceback. None is left.
        AssertionError: they took longer than ``timeout_seconds``.
    """
    place.mkdir(parents=True, exist_ok=True)
    (place / "meeting").unlink(missing_ok=True)
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **_GROUND}
    call = inspect.getfile(function), function.__module__, function.__name__
    ranks = start_processes(
        _run, (num_ranks, environment, call, place.absolute(), arguments), num_ranks, join=False,
        daemon=True, start_method="forkserver",
    )  # fmt: skip
    deadline = time.monotonic() + timeout_seconds
    try:
        while not ranks.join(max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"{num_ranks} ranks took {timeout_seconds} s"
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
    return [pickle.loads((place / f"result{rank}").read_bytes()) for rank in range(num_ranks)]


def _run(
    rank: int,
    size: int,
    environment: dict[str, str],
    call: tuple[str, str, str],
    place: Path,
    arguments: tuple[Any, ...],
) -> None:
    """Join the group, run the function, write its result."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    file, module, name = call
    spec = importlib.util.spec_from_file_location(module, file)
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])
    random.seed(0)
    torch.manual_seed(0)
    meeting = f"file://{place / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    result = getattr(sys.modules[module], name)(rank, *arguments)
    (place / f"result{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()  # another rank may still be sending
    dist.destroy_process_group()
