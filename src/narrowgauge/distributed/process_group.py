"""The process group: the ranks that ``torchrun`` starts.

``torchrun`` starts a command on every rank. It sets ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and
the rendezvous address.
"""

import contextlib
import gc
import os
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from narrowgauge.errors import RankError

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others. Then a rank that hangs ends the run."""


def rank() -> int:
    """Return the rank of this process: 0 without ``torchrun``."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks: 1 without ``torchrun``."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Join the other ranks for a block.

    A single process gets no process group. Only rank 0 shows warnings.
    """
    if world_size() == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device is None else "cpu:gloo,cuda:nccl", timeout=TIMEOUT, device_id=device
    )
    try:
        with warnings.catch_warnings():
            if rank():
                warnings.simplefilter("ignore")
            yield
        dist.barrier()  # another rank may still be sending
    finally:
        gc.collect()  # a referenced group keeps its threads, which may abort the process at its exit
        dist.destroy_process_group()


@contextlib.contextmanager
def threads_of(is_order_invariant: bool) -> Iterator[None]:
    """Use one CPU thread in an order-invariant run, since the sums inside a matmul depend on the
    number of threads.
    """
    import torch

    before = torch.get_num_threads()
    if is_order_invariant:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def require_same(settings: Mapping[str, Any]) -> None:
    """Refuse ranks with different settings or software.

    They would train different models without an error.
    """
    import torch

    from narrowgauge import __version__
    from narrowgauge.distributed.ranks import unlike

    software = {
        "narrowgauge": __version__, "torch": torch.__version__, "threads": torch.get_num_threads(),
        "processor": torch.backends.cpu.get_cpu_capability(),
    }  # fmt: skip
    for name, values in unlike({**settings, **software}).items():
        first = values[0]
        number = next(rank for rank, value in enumerate(values) if value != first)
        raise RankError(
            f"Cannot train: rank {number} has {name} = {values[number]}, and rank 0 has {first}.",
            "Start every rank with the same command, version and environment.",
        )
