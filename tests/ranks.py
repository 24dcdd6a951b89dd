"""Ranks of tests: processes with one gloo group, forked from multiprocessing's fork server, which
has imported PyTorch and the package.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "transformers.models.llama.modeling_llama",
        # What most ranks run. They fork with it, which saves each half a second.
        "narrowgauge.trainer.train",
        "narrowgauge.measuring.recorder",
        "narrowgauge.measuring.check",
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
        AssertionError: a rank failed, or took longer than ``timeout_seconds``; with what the ranks
            wrote. None is left.
    """
    place.mkdir(parents=True, exist_ok=True)
    (place / "meeting").unlink(missing_ok=True)
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **_GROUND}
    call = (
        inspect.getfile(function),
        function.__module__,
        function.__name__,
        num_ranks,
        place.absolute(),
        arguments,
    )
    ranks = []
    for rank in range(num_ranks):
        ranks.append(_CONTEXT.Process(target=_run, args=(rank, environment, *call), daemon=True))
    deadline = time.monotonic() + timeout_seconds
    try:
        for process in ranks:
            process.start()
        while (running := [p for p in ranks if p.exitcode is None]) and not any(
            p.exitcode for p in ranks
        ):
            if not wait([p.sentinel for p in running], max(0.0, deadline - time.monotonic())):
                break
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    outputs = "".join(
        f"\n── rank {k} ──\n{(place / f'output{k}').read_text()}"
        for k in range(num_ranks)
        if codes[k] != 0
    )
    assert not any(codes), f"ranks ended with {codes}{outputs}"
    assert None not in codes, f"{num_ranks} ranks took longer than {timeout_seconds} s{outputs}"
    return [pickle.loads((place / f"result{rank}").read_bytes()) for rank in range(num_ranks)]


def _run(
    rank: int,
    environment: dict[str, str],
    file: str,
    module: str,
    name: str,
    size: int,
    place: Path,
    arguments: Any,
) -> None:
    """Join the group, run the function, write its result."""
    output = os.open(place / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        spec = importlib.util.spec_from_file_location(module, file)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
        random.seed(0)
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo", init_method=f"file://{place / 'meeting'}", rank=rank, world_size=size
        )
        result = getattr(sys.modules[module], name)(rank, *arguments)
        (place / f"result{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()  # another rank may still be sending
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
