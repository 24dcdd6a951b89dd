"""The process group of a run: a rank joins it, and leaves it so that one line says why a run ended.

:func:`process_group` finds the other ranks (``placement.py``), meets them (``rendezvous.py``), starts the process group with a
bounded timeout, and chooses the device and the number of threads. ``failure_reporting.py`` handles an error in its block, and
``agent.py`` starts ranks on one host.

Source: docs.pytorch.org/docs/stable/distributed.html (initialization, timeouts); docs.pytorch.org/docs/stable/elastic/run.html.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public

from narrowgauge.distributed.launch.failure_reporting import AGENT_PROCESS, FailureReporter, agent_folder
from narrowgauge.distributed.launch.liveness import Liveness
from narrowgauge.distributed.launch.placement import Placement, read_placement, variables
from narrowgauge.distributed.launch.rendezvous import meet, second_connection, with_local_rank
from narrowgauge.machine import child_processes

TIMEOUT_SECONDS = 1800.0
"""The longest time without progress, by default: enough to prepare data on rank 0 and to compile a large model."""
JOIN_SECONDS = 600.0
"""How long ranks wait for each other at the start, by default."""
MARGIN_SECONDS = 10.0
"""How much longer a rank's thread waits than gloo, whose collectives say more; NCCL ends a process, and waits longest."""
_current: Liveness | None = None
_has_met = False
_is_open = False


def has_met() -> bool:
    """Whether this process has met other ranks, which then agreed on the one that reports an error."""
    return _has_met


def is_open() -> bool:
    """Whether a :func:`process_group` that ended with an error left threads that wait for other ranks.

    The interpreter must not be shut down then: one of them may want its lock, and the C++ runtime would abort the process, with
    another exit status and a line of its own. The command line exits with ``os._exit``.
    """
    return _is_open


def beat(step: int) -> None:
    """Note that this rank has done ``step`` steps; nothing outside a :func:`process_group`. Cost: about 2 µs."""
    if _current is not None:
        _current.beat(step)


@contextlib.contextmanager
def process_group(
    placement: Placement | None = None,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    join_seconds: float = JOIN_SECONDS,
    threads: int | None = None,
    is_order_invariant: bool = False,
    how_to_resume: Callable[[], str] = lambda: "",
    note_loss: Callable[[int, str], object] = lambda step, said: None,
) -> Iterator[Placement]:
    """Join the other ranks of a run, and leave them at its end, also after an error.

    Invariant: an error of one rank, or of all, is printed by one rank; all raise :class:`ReportedError`, with which the command
    line exits silently. A rank that was lost ends the others within the timeout. One rank alone raises what it raises.

    Args:
        placement: of this process; None reads the environment. One rank gets no process group.
        timeout_seconds: the longest time for which a rank waits for the others, or makes no progress.
        join_seconds: the longest time for which it waits for them at the start.
        threads: of each rank's operators on the CPU; None chooses, see :func:`choose_threads`.
        is_order_invariant: whether the run's bits must not depend on the number of ranks, so neither on the number of threads.
        how_to_resume: a sentence for the line about a lost rank.
        note_loss: records that line: takes the last step that was done, and what was lost.
    Yields:
        The placement, with the local rank filled in.
    Raises:
        RankError: the ranks cannot meet.
        ReportedError: an error was printed.
    Cost: some 10 ms on one host; a thread that looks at the store twice a second.
    Example:
        >>> with process_group(Placement()) as here:
        ...     here.size
        1
    """
    global _current, _has_met
    here = read_placement() if placement is None else placement
    if _current is not None:
        raise RuntimeError("this process has joined its group already")
    parent: int | None = None
    if here.launcher == "torchrun":
        parent = int(os.environ.get(AGENT_PROCESS) or os.getppid())
        child_processes.die_with_parent(parent)
    is_watching = parent is not None and not here.local_rank  # the first one of its host
    store, prefix = meet(here, join_seconds) if here.size > 1 else (None, "")
    if store is not None:
        here, _has_met = with_local_rank(here, store), True
    _set_threads(choose_threads(here, threads, is_order_invariant))
    with variables(here.variables()):  # for code that reads torchrun's
        reporter = FailureReporter(here, agent_folder(), timeout_seconds, how_to_resume, note_loss)
        own = None if store is None else second_connection(here, prefix, timeout_seconds)
        _current = alive = Liveness(
            here, own, reporter.folder, timeout_seconds + MARGIN_SECONDS, reporter.expire,
            parent if is_watching else None, reporter.orphan,
        )  # fmt: skip
        reporter.alive = alive
        if is_watching:
            child_processes.outlive_parent()
        try:
            with _group(here, store, timeout_seconds), _spoken_once(here):
                yield here
        except BaseException as error:
            if (told := reporter.reported(error)) is not error:
                raise told from error
            raise
        finally:
            alive.close()
            _current = None
            if is_watching:
                child_processes.die_with_parent(parent)


@contextlib.contextmanager
def _group(here: Placement, store: Store | None, timeout_seconds: float) -> Iterator[None]:
    global _is_open
    if store is None:
        yield
        return
    _is_open = True
    _start_group(here, store, timeout_seconds)
    yield
    dist.barrier()  # rank 0 may hold the store that others still need
    dist.destroy_process_group()
    _is_open = False


def choose_threads(here: Placement, threads: int | None, is_order_invariant: bool) -> int | None:
    """The number of threads of a rank's operators on the CPU; None leaves PyTorch's own choice.

    Args:
        here: the placement, with the number of ranks on this host.
        threads: as requested; None for the rule: 1 if the bits must not depend on the number of ranks, since the sums inside a
            matrix product depend on the number of threads; as PyTorch or ``OMP_NUM_THREADS`` chooses for one rank on a host;
            else an equal share of the cores.
        is_order_invariant: whether the bits must not depend on the number of ranks.
    Example:
        >>> choose_threads(Placement(size=4, local_size=4), None, is_order_invariant=True)
        1
    """
    if threads is not None:
        return threads
    if is_order_invariant:
        return 1
    if here.size == 1 or not here.local_size or "OMP_NUM_THREADS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // here.local_size)


@contextlib.contextmanager
def threads_of_run(threads: int | None, is_order_invariant: bool) -> Iterator[None]:
    """Set the number of threads by :func:`choose_threads` for one of several runs in this process, and restore it at the end."""
    before = torch.get_num_threads()
    _set_threads(choose_threads(read_placement(), threads, is_order_invariant))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _set_threads(number: int | None) -> None:
    if number is not None:
        torch.set_num_threads(number)


def _start_group(here: Placement, store: Store, timeout_seconds: float) -> None:
    backend, device = "gloo", None
    if torch.cuda.is_available():
        assert here.local_rank is not None
        index = here.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        # NCCL refuses two ranks on one GPU; gloo takes tensors of a GPU too.
        if not _shares_gpu(here, store, index):
            backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", index)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=here.rank,
        world_size=here.size,
        timeout=timedelta(seconds=timeout_seconds + (0 if device is None else 6 * MARGIN_SECONDS)),
        device_id=device,
    )
    dist.barrier()


def _shares_gpu(here: Placement, store: Store, index: int) -> bool:
    """Whether two ranks have the same GPU; each process may see its own as number 0."""
    store.set(f"gpu/{here.rank}", str(torch.cuda.get_device_properties(index).uuid))
    found = [store.get(f"gpu/{rank}") for rank in range(here.size)]
    return len(set(found)) < len(found)


@contextlib.contextmanager
def _spoken_once(here: Placement) -> Iterator[None]:
    """Show warnings on rank 0 alone, and none about the code of PyTorch's own sharding."""
    if here.size == 1:
        yield
        return
    with warnings.catch_warnings():
        if here.is_first:
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        else:
            warnings.simplefilter("ignore")
        yield
