"""Where this process stands among the processes of a run, as its environment says: torchrun's variables, Slurm's, or none.

torchrun (and anyone who starts ranks by hand) sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. Slurm sets
``SLURM_PROCID`` and others for each process of a job step; the first host of the step is where rank 0 runs, and so where the
ranks meet. Nothing here needs PyTorch.

Source: docs.pytorch.org/docs/stable/elastic/run.html (environment variables); slurm.schedmd.com/srun.html (output environment
variables).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from narrowgauge.errors import RankError

_BY_HAND = "Start it with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every rank."
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000  # below the ports that Linux gives to outgoing connections
_NO_JOB = ("", "none")  # torchrun's default --rdzv-id


@dataclass(frozen=True)
class Placement:
    """A process among the processes of a run.

    Attributes:
        size: number of ranks; 1 without any variables.
        local_rank: rank among those of this host; None if the environment does not say.
        local_size: number of ranks on this host; None if the environment does not say.
        address, port: where the ranks meet; None if there is one rank.
        launcher: "torchrun", "slurm", "hand" or "none".
        job: a name of this job that its restarts share; None if the launcher gives none.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = 0
    local_size: int | None = 1
    address: str | None = None
    port: int | None = None
    launcher: str = "none"
    job: str | None = None
    attempt: int = 0
    max_attempts: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def variables(self) -> dict[str, str]:
        """The variables that torchrun would have set, for code that reads only those."""
        found = {"RANK": self.rank, "WORLD_SIZE": self.size, "MASTER_ADDR": self.address, "MASTER_PORT": self.port}
        found |= {"LOCAL_RANK": self.local_rank, "LOCAL_WORLD_SIZE": self.local_size}
        return {name: str(value) for name, value in found.items() if value is not None}


def read_placement(environment: Mapping[str, str] = os.environ) -> Placement:
    """Where this process stands: by torchrun's variables if they are set, else those of a Slurm job step, else one rank.

    Raises:
        RankError: a variable is missing, not a number, or contradicts another one.
    Example:
        >>> read_placement({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}).size
        2
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _checked(_of_torchrun(environment))
    if _is_slurm_step(environment):
        return _checked(_of_slurm(environment))
    return Placement()


@contextmanager
def variables(given: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore the earlier ones at the end."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _of_torchrun(environment: Mapping[str, str]) -> Placement:
    size = _number(environment, "WORLD_SIZE")
    is_agent = "TORCHELASTIC_RUN_ID" in environment
    has_local = "LOCAL_RANK" in environment
    job = environment.get("TORCHELASTIC_RUN_ID", "")
    return Placement(
        rank=_number(environment, "RANK"),
        size=size,
        local_rank=_number(environment, "LOCAL_RANK") if has_local else None,
        local_size=_number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else None,
        address=_text(environment, "MASTER_ADDR") if size > 1 else None,
        port=_number(environment, "MASTER_PORT") if size > 1 else None,
        launcher="torchrun" if is_agent else "hand",
        job=None if job in _NO_JOB else job,
        attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT") if is_agent else 0,
        max_attempts=_number(environment, "TORCHELASTIC_MAX_RESTARTS") if is_agent else 0,
    )


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process, rather than a batch script or a shell, whose one process has a rank too."""
    by_srun = any(name in environment for name in ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_SRUN_COMM_PORT"))
    return by_srun and "SLURM_PROCID" in environment


def _of_slurm(environment: Mapping[str, str]) -> Placement:
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    size, job = _number(environment, name), environment.get("SLURM_JOB_ID")
    restarts = _number(environment, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in environment else 0
    return Placement(
        rank=_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID") if "SLURM_LOCALID" in environment else None,
        local_size=_tasks_on_this_node(environment),
        address=_slurm_address(environment) if size > 1 else None,
        port=_slurm_port(environment) if size > 1 else None,
        launcher="slurm",
        job=f"slurm-{job}" if job else None,
        attempt=restarts,
        max_attempts=restarts,
    )


def _slurm_address(environment: Mapping[str, str]) -> str:
    """The host of rank 0: ``MASTER_ADDR``, or the first of the step's hosts."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        if environment.get(name):
            return first_host(environment[name])
    # Where srun was called; the host of rank 0 if that was the batch script.
    if environment.get("SLURM_LAUNCH_NODE_IPADDR"):
        return environment["SLURM_LAUNCH_NODE_IPADDR"]
    raise RankError("Slurm's variables name no host to meet at.", "Set MASTER_ADDR to the host of rank 0.")


def _slurm_port(environment: Mapping[str, str]) -> int:
    """``MASTER_PORT``, or a port that other jobs and steps on the host are unlikely to have."""
    if environment.get("MASTER_PORT"):
        return _number(environment, "MASTER_PORT")
    job, step = (int(environment.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * 7 + step) % _NUM_PORTS


def _tasks_on_this_node(environment: Mapping[str, str]) -> int | None:
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if not counts or "SLURM_NODEID" not in environment:
        return None
    try:
        return tasks_per_node(counts)[_number(environment, "SLURM_NODEID")]
    except (IndexError, ValueError):
        return None


def first_host(hosts: str) -> str:
    """The first host of Slurm's list of hosts and ranges.

    Example:
        >>> first_host("node[003-006,9]-ib,login1")
        'node003-ib'
    """
    first = re.match(r"[^,\[]*(\[[^\]]*\][^,\[]*)*", hosts.strip())
    assert first is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def tasks_per_node(counts: str) -> list[int]:
    """The number of processes on each host of a Slurm step.

    Example:
        >>> tasks_per_node("4(x2),3")
        [4, 4, 3]
    """
    found: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"no list of counts: {counts!r}")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "").strip()
    if not value:
        given = next(known for known in ("RANK", "WORLD_SIZE", "SLURM_PROCID") if known in environment)
        raise RankError(f"{given} is set, and {name} is not.", _BY_HAND)
    return value


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not text.isascii() or not text.isdigit():
        raise RankError(f"{name} = {text!r} is no number from 0.", _BY_HAND)
    return int(text)


def _checked(found: Placement) -> Placement:
    if not found.rank < found.size:
        raise RankError(f"rank {found.rank} of {found.size} was requested; ranks count from 0.", _BY_HAND)
    local, on_host = found.local_rank, found.local_size
    if on_host is not None and (on_host > found.size or on_host < 1 or (local is not None and local >= on_host)):
        raise RankError(
            f"local rank {local} of {on_host} on this host was requested, in a run of {found.size} ranks.", _BY_HAND
        )
    if found.port is not None and not 0 < found.port < 2**16:
        raise RankError(f"MASTER_PORT = {found.port} is no port.", "Choose one from 1 to 65535.")
    return found
