"""Processes that train together: n ranks of gloo on this machine, each running one function of a test.

The ranks find each other through a file in the test's own folder, so no port is chosen beforehand and tests may run side by
side. A rank that fails is shown with its traceback, and the others, which would wait for it, are ended.

    results = run_ranks(work, 2, tmp_path, 10)   # work(rank, 10) on each of two ranks
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_ranks(
    function: Callable[..., Any], num_ranks: int, place: Path, *arguments: Any, timeout_seconds: float = 300.0
) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on each of ``num_ranks`` processes with one process group.

    Args:
        function: at the top of its module; it runs in a fresh interpreter, in that module imported anew.
        num_ranks: how many processes.
        place: a folder for what they exchange, made if need be; no other ranks are using it.
        arguments: what can be pickled.
        timeout_seconds: after which all are ended, and the test fails.
    Returns:
        A result per rank; tensors are plain ones.
    Raises:
        AssertionError: a rank failed, or took too long; with what it wrote.
    """
    place.mkdir(parents=True, exist_ok=True)
    (place / "meeting").unlink(missing_ok=True)  # of ranks that failed here before
    (place / "call").write_bytes(pickle.dumps((inspect.getfile(function), function.__name__, arguments)))
    # Fresh ranks are as many as there are tests that start some; none may take all processors, or another interface.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(open(place / f"output{rank}", "wb")) for rank in range(num_ranks)]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(place), str(rank), str(num_ranks)],
                stdout=output, stderr=subprocess.STDOUT, env=environment,
            )
            for rank, output in enumerate(outputs)
        ]  # fmt: skip
        stack.callback(_end, ranks)
        late = _wait(ranks, time.monotonic() + timeout_seconds)
    said = "".join(f"\n── rank {k} ──\n{(place / f'output{k}').read_text()}" for k in range(num_ranks))
    assert not late, f"{num_ranks} ranks took longer than {timeout_seconds} s{said}"
    assert all(rank.returncode == 0 for rank in ranks), f"ranks ended with {[r.returncode for r in ranks]}{said}"
    return [pickle.loads((place / f"result{rank}").read_bytes()) for rank in range(num_ranks)]


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until all have ended or one has failed; whether it grew too late."""
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        if time.monotonic() > deadline:
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            next(rank for rank in ranks if rank.returncode is None).wait(0.1)
    return False


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()


def main(place: Path, rank: int, num_ranks: int) -> None:
    """One rank: join the group, run the function, leave its result."""
    sys.path[0] = str(Path(__file__).parent)  # as in the test: `from optim.x import y`
    import torch.distributed as dist

    file, name, arguments = pickle.loads((place / "call").read_bytes())
    spec = importlib.util.spec_from_file_location("ranked", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["ranked"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dist.init_process_group("gloo", init_method=f"file://{place / 'meeting'}", rank=rank, world_size=num_ranks)
    result = getattr(module, name)(rank, *arguments)
    (place / f"result{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()  # none leaves while another still asks it for something
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
