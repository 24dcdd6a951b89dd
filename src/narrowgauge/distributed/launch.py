"""From processes to one run: a rank joins its group, and leaves it so that one line says why a run ended.

:func:`process_group` joins: it finds the other ranks (torchrun's, Slurm's or hand-set variables), starts the process group with a
bounded timeout, and chooses the device and the number of threads. When its block ends with an error, one rank reports it and the
others end silently; when a rank is lost, the collectives of the others fail or time out, and one of them names the missing rank.
The agent that starts ranks on one host is in ``agent.py``.

Source: docs.pytorch.org/docs/stable/distributed.html (initialization, timeouts); docs.pytorch.org/docs/stable/elastic/run.html.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public
from torch.distributed.rendezvous import rendezvous

from narrowgauge.distributed import liveness
from narrowgauge.distributed.liveness import Liveness
from narrowgauge.distributed.placement import Placement, read_placement
from narrowgauge.errors import NarrowgaugeError, RankError, ReportedError, Terminated

TIMEOUT_SECONDS = 1800.0
"""Default of the longest time without progress: enough to prepare data on rank 0 and to compile a large model."""
JOIN_SECONDS = 600.0
"""Default of the longest time for which ranks wait for each other at the start."""
MARGIN_SECONDS = 10.0
"""How much longer a rank's thread waits than gloo, whose collectives say more; NCCL ends a process, and waits longest."""
AGENT_FOLDER, AGENT_PROCESS = "NARROWGAUGE_AGENT_FOLDER", "NARROWGAUGE_AGENT_PROCESS"
"""Variables that the agent of ``--nproc`` sets for its ranks: where they write what it reads, and its process id."""
REPORTED, LOST = "reported", "lost"
"""Files in that folder, followed by the number of the attempt: a rank has printed its error; ranks are found missing."""

_BROKEN = re.compile(
    r"gloo|connection (was )?(closed|reset|refused)|broken pipe|timed out waiting|nccl|tcpstore|processgroup",
    re.IGNORECASE,
)
_STORE_LOST = {0: ""}
"""The missing rank if the store does not answer: rank 0 held it."""
_current: Liveness | None = None
_has_met = False


def has_joined() -> bool:
    """Whether this process is in a :func:`process_group`."""
    return _current is not None


def has_met() -> bool:
    """Whether this process has met other ranks, which then agreed on the one that reports an error."""
    return _has_met


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
    is_order_free: bool = False,
    how_to_resume: Callable[[], str] = lambda: "",
) -> Iterator[Placement]:
    """Join the other ranks of a run; leave them in the end, however that comes.

    Invariant: an error of one rank, or of all, is raised on one rank; the others raise :class:`ReportedError`, with which the
    command line exits silently. A rank that was lost ends the others within the timeout.

    Args:
        placement: of this process; None reads the environment. One rank gets no process group.
        timeout_seconds: the longest time for which a rank waits for the others, or makes no progress.
        join_seconds: the longest time for which it waits for them at the start.
        threads: of each rank's operators on the CPU; None chooses, see :func:`choose_threads`.
        is_order_free: whether the run's bits must not depend on the number of ranks, so neither on the number of threads.
        how_to_resume: a sentence that says how the run goes on, for the line about a lost rank.
    Yields:
        The placement, with the local rank filled in.
    Raises:
        RankError: the ranks cannot meet, or one was lost.
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
    if here.launcher == "torchrun":
        parent = os.environ.get(AGENT_PROCESS)
        liveness.die_with_parent(int(parent) if parent else None)
    store = _meet(here, join_seconds) if here.size > 1 else None
    if store is not None:
        here, _has_met = _with_local_rank(here, store), True
    _set_threads(choose_threads(here, threads, is_order_free))
    folder, before = _agent_folder(), dict(os.environ)
    os.environ.update(here.variables())  # for code that reads torchrun's variables

    def expire(missing: dict[int, str]) -> None:
        with contextlib.suppress(BaseException):
            told = _lost(missing, here, alive, folder, _waited(timeout_seconds), how_to_resume)
            if isinstance(told, RankError):
                print(f"RankError: {told}", file=sys.stderr, flush=True)
        os._exit(1)

    own = None if store is None else _own_connection(here, timeout_seconds)
    _current = alive = Liveness(here, own, folder, timeout_seconds + MARGIN_SECONDS, expire)
    try:
        try:
            if store is not None:
                _start_group(here, store, timeout_seconds)
            with _spoken_once(here):
                yield here
            if store is not None:
                dist.barrier()  # rank 0 may hold the store that others still need
        except BaseException as error:
            told = _reported(error, here, alive, folder, timeout_seconds, how_to_resume)
            if told is error:
                raise
            raise told from error
    finally:
        alive.close()
        _current = None
        _restore_variables(before, here)
        if store is not None and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


def choose_threads(here: Placement, threads: int | None, is_order_free: bool) -> int | None:
    """The number of threads of a rank's operators on the CPU.

    Args:
        here: the placement, with the number of ranks on this host.
        threads: as requested; None for the rule: 1 if the bits must not depend on the number of ranks, since the sums inside a
            matrix product depend on the number of threads; as PyTorch or ``OMP_NUM_THREADS`` chooses for one rank on a host;
            else an equal share of the cores.
        is_order_free: whether the bits must not depend on the number of ranks.
    Returns:
        The number; None leaves PyTorch's own choice.
    Example:
        >>> choose_threads(Placement(size=4, local_size=4), None, is_order_free=True)
        1
    """
    if threads is not None:
        return threads
    if is_order_free:
        return 1
    if here.size == 1 or not here.local_size or "OMP_NUM_THREADS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // here.local_size)


def _restore_variables(before: dict[str, str], here: Placement) -> None:
    for name in here.variables():
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]


def _set_threads(number: int | None) -> None:
    if number is not None:
        torch.set_num_threads(number)


# ── joining ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _meet(here: Placement, join_seconds: float) -> Store:
    """A store that all ranks share, held by rank 0 or by the agent, once all have come."""
    assert here.address is not None
    address = f"[{here.address}]" if ":" in here.address else here.address
    try:
        url, patience = f"tcp://{address}:{here.port}", timedelta(seconds=join_seconds)
        store, _, _ = next(rendezvous(url, here.rank, here.size, timeout=patience))
        store = PrefixStore(_round(here), store)
        store.set(f"host/{here.rank}", socket.gethostname())
        store.wait([f"host/{rank}" for rank in range(here.size)])
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise _refusal(str(error), here, join_seconds) from error
    return store


def _round(here: Placement) -> str:
    """A prefix of keys: an elastic agent keeps its store over restarts, which have another number or more ranks."""
    return f"narrowgauge/{here.attempt}/{here.size}"


def _refusal(reason: str, here: Placement, seconds: float) -> RankError:
    place = f"{here.address}:{here.port}"
    if "EADDRINUSE" in reason or "address already in use" in reason.lower():
        return RankError(
            f"Port {here.port} of {here.address} is in use, and {here.size} ranks are to meet there.",
            "Set MASTER_PORT (torchrun: --master-port or --rdzv-endpoint) to a free port.",
        )
    if here.is_first:
        return RankError(
            f"Not all {here.size} ranks came to {place} within {seconds:.0f} s.",
            "Start every rank, with the same MASTER_ADDR and MASTER_PORT.",
        )
    return RankError(
        f"Rank {here.rank} cannot reach rank 0 at {place} ({_first_line(reason)}).",
        "Check MASTER_ADDR and MASTER_PORT, and that rank 0 was started.",
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[:160]


def _own_connection(here: Placement, timeout_seconds: float) -> Store:
    """A second connection to the same store: a connection serves one caller at a time."""
    assert here.address is not None and here.port is not None
    other = TCPStore(
        here.address, here.port, is_master=False, wait_for_workers=False,
        timeout=timedelta(seconds=min(timeout_seconds, 60.0)),
    )  # fmt: skip
    return PrefixStore(_round(here), other)


def _with_local_rank(here: Placement, store: Store) -> Placement:
    """Where the environment does not say it: the rank among those of the same host."""
    hosts = [store.get(f"host/{rank}").decode() for rank in range(here.size)]
    mine = [rank for rank in range(here.size) if hosts[rank] == hosts[here.rank]]
    local = mine.index(here.rank) if here.local_rank is None else here.local_rank
    return replace(here, local_rank=local, local_size=here.local_size or len(mine))


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


# ── leaving ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def _agent_folder() -> Path | None:
    name = os.environ.get(AGENT_FOLDER)
    return Path(name) if name else None


def _reported(
    error: BaseException,
    here: Placement,
    alive: Liveness,
    folder: Path | None,
    timeout_seconds: float,
    how_to_resume: Callable[[], str],
) -> BaseException:
    """What this rank raises for an error: itself if it is the one that reports it."""
    if here.size == 1 or isinstance(error, ReportedError):
        return error
    if isinstance(error, KeyboardInterrupt):  # all ranks stopped after the same step
        status = 143 if isinstance(error, Terminated) else 130
        if here.is_first and folder is not None:
            _note(folder, REPORTED, here, str(status))
        return error if here.is_first else ReportedError(status)
    if isinstance(error, SystemExit) and not error.code:
        return error
    if is_broken(error):
        if (claimed := _claimed(alive)) is not None:
            return ReportedError(claimed)
        is_late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        return _lost(_missing(alive), here, alive, folder, _waited(timeout_seconds) if is_late else "", how_to_resume)
    status = _status_of(error)
    if not alive.claim(status):
        return ReportedError(status)
    if folder is not None:
        _note(folder, REPORTED, here, str(status))
    return error


def is_broken(error: BaseException) -> bool:
    """Whether an error says that a collective failed, rather than what this rank itself did."""
    if isinstance(error, NarrowgaugeError):
        return False
    is_group = isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
    return is_group or (isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None)


def _status_of(error: BaseException) -> int:
    if isinstance(error, RankError):
        return error.status
    return 2 if isinstance(error, NarrowgaugeError) else 1


def _claimed(alive: Liveness) -> int | None:
    """The exit status of an error that another rank reports; 1 if rank 0 has left with the store."""
    try:
        return alive.claimed(1.0)
    except RuntimeError:
        return None


def _missing(alive: Liveness) -> dict[int, str]:
    try:
        return alive.missing()
    except RuntimeError:
        return _STORE_LOST


def _waited(seconds: float) -> str:
    return f"{seconds:g} s"


def _lost(
    missing: dict[int, str],
    here: Placement,
    alive: Liveness,
    folder: Path | None,
    waited: str,
    how_to_resume: Callable[[], str],
) -> NarrowgaugeError:
    """The error for lost ranks, on the rank that reports it: a line here, or a file for the agent, which knows more."""
    # Without the store nobody can ask who reports.
    is_mine = here.rank == 1 if missing is _STORE_LOST else alive.claim(1)
    if not is_mine:
        return ReportedError(1)
    message = describe_lost(missing, alive.step, waited)
    if folder is None:
        return RankError(message, how_to_resume(), status=1)
    if waited:  # else the agent knows how a rank ended
        _note(folder, LOST, here, message)
        for rank in missing:
            liveness.end_rank(folder, rank)
    return ReportedError(1)


def _note(folder: Path, name: str, here: Placement, text: str) -> None:
    """Tell the agent; of a job that was restarted, it reads what the last attempt wrote."""
    (folder / f"{name}-{here.attempt}").write_text(text)


def describe_lost(missing: Mapping[int, str], step: int, waited: str = "") -> str:
    """A sentence about ranks that do not answer.

    Args:
        missing: the ranks, each with the line of code where it is; empty if all wait at the same place.
        step: the last one that all have done.
        waited: for how long, with its unit; empty if the connection broke.
    Returns:
        One sentence.
    Example:
        >>> describe_lost({2: "data.py:30"}, 57, "30 s")
        'rank 2 (at data.py:30) did not arrive within 30 s in step 58; --timeout allows more.'
    """
    named = [f"{rank} (at {line})" if line else str(rank) for rank, line in missing.items()]
    who = f"rank{'s' if len(named) > 1 else ''} {', '.join(named)}" if named else "a rank"
    if waited:
        return f"{who} did not arrive within {waited} in step {step + 1}; --timeout allows more."
    return f"{who} {'were' if len(named) > 1 else 'was'} lost in step {step + 1}."
