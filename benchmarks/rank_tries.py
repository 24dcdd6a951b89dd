"""Ranks that are killed, disks that fill up and files that are damaged while a sharded run saves and loads.

A *run* here is what a checkpoint has to carry: a sharded model with packed optimizer states, steps with known gradients, and a
save every other step, written while the steps go on. A *job* is two or three ranks, forked from this process, that
load the newest checkpoint and take the run further. Jobs are struck one after the other, each on another number of ranks
in the same folder, until the run is through; then comes the next run.

After every job the newest good checkpoint must be there, at least as new as the last one that a rank was told is written, and
have the bits of its step in a single process that nobody disturbed. *lost* counts the jobs after which it was older,
*wrong* those after which a bit was another, *left* those whose ranks did not end.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from tries import Broken, kill
from tries import full_disk as refuse_to_write
from tries import watch as watch_calls

import narrowgauge as ng
from narrowgauge.checkpoints import checkpoint_files

# Imported before the forks, which then need no imports of their own.
from narrowgauge.checkpoints.checkpoint_files import damage, load_whole, saved_tensors
from narrowgauge.checkpoints.saving import Saver, latest_checkpoint
from narrowgauge.checkpoints.state_tensors import load_tensors, restore_tensors, state_tensors
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RecordError

SHAPES = {"even": (12, 6), "uneven": (7, 6), "lone": (1, 8), "gain": (10,)}
STEPS, EVERY, KEPT = 8, 2, 2
ENDED_BY_AN_ERROR, REFUSED = 5, 7
PATIENCE_SECONDS = 20.0
"""After which a job's ranks are taken to hang."""
CALLS = ("fsync", "rename", "mkdir", "unlink", "rmdir", "open")
"""System calls of a rank that are struck, beside writes."""


# ── the run ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def start(mesh: Any = None) -> tuple[nn.Module, ng.Optimizer]:
    """A fresh model and its optimizer; its rows shared out where there is a mesh."""
    model, generator = nn.Module(), torch.Generator().manual_seed(0)
    for name, shape in SHAPES.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).bfloat16()))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, ng.AdamW(model.named_parameters(), lr=0.05, storage="word", compile=False)


def take_step(model: nn.Module, optimizer: ng.Optimizer, step: int) -> None:
    """One step with known gradients."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in model.parameters():
        gradient: Tensor = torch.randn(p.shape, generator=generator).bfloat16()
        if isinstance(p, DTensor):
            gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = gradient
    optimizer.step()


def undisturbed() -> dict[int, dict[str, Tensor]]:
    """What a checkpoint of each step holds, by a single process."""
    (model, optimizer), found = start(), {}
    for step in range(STEPS):
        take_step(model, optimizer, step)
        found[step + 1] = {n: t.clone() for n, t in state_tensors(model.named_parameters(), optimizer).items()}
    return found


def job(rank: int, size: int, folder: Path) -> None:
    """One rank: load, go on to the last step, save every other one; note which checkpoints it was told are written."""
    mesh, ranks = init_device_mesh("cpu", (size,)), all_ranks().apart()
    model, optimizer = start(mesh)
    found, begun = latest_checkpoint(folder, lambda path, why: None, ranks), 0
    if found is not None:
        tensors = load_tensors(found.path, saved_tensors(found.path), model.named_parameters(), optimizer)
        restore_tensors(tensors, model.named_parameters(), optimizer)
        begun = found.step
    saver, in_flight = Saver(folder, ranks), 0
    for step in range(begun, STEPS):
        take_step(model, optimizer, step)
        if (step + 1) % EVERY == 0:
            saver.save(step + 1, state_tensors(model.named_parameters(), optimizer), {"step": step + 1}, KEPT)
            _note(folder, in_flight)
            in_flight = step + 1
    saver.wait()
    _note(folder, in_flight)


def _note(folder: Path, step: int) -> None:
    """Note on the disk that this rank was told that the checkpoint of a step is written."""
    if step:
        descriptor = _OPEN(folder / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        _WRITE(descriptor, f"{step}\n".encode())
        os.close(descriptor)


_OPEN, _WRITE = os.open, os.write  # before they are watched


# ── ranks ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


Disturb = Callable[[int], None]
"""Called in each rank before its job, with its number."""


def fork_ranks(size: int, folder: Path, disturb: Disturb) -> dict[int, int]:
    """Start a job; the number of each rank by its process."""
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)
    sys.stdout.flush(), sys.stderr.flush()
    return {_fork(rank, size, folder, meeting, disturb): rank for rank in range(size)}


def _fork(rank: int, size: int, folder: Path, meeting: Path, disturb: Disturb) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = ENDED_BY_AN_ERROR
    try:
        said = _OPEN(folder / f"said{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1), os.dup2(said, 2)
        wait = timedelta(seconds=PATIENCE_SECONDS)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=wait)
        disturb(rank)
        job(rank, size, folder)
        dist.barrier()  # none leaves while another still asks it for something
        status = 0
    except RecordError as error:
        print(error, file=sys.stderr)
        status = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait_for(ranks: dict[int, int], grace_seconds: float) -> dict[int, int]:
    """The exit status of each rank; like torchrun's agent, once one has failed the others are ended after a while."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(statuses) < len(ranks):
        for pid in ranks.keys() - statuses.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                if statuses[pid]:
                    deadline = min(deadline, time.monotonic() + grace_seconds)
        if time.monotonic() > deadline:
            failed = any(statuses.values())
            for pid in ranks.keys() - statuses.keys():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                statuses[pid] = -signal.SIGKILL
            if not failed:
                raise Broken("left: no rank had failed, and they did not end")
        time.sleep(0.002)
    return {ranks[pid]: status for pid, status in statuses.items()}


# ── what strikes them ───────────────────────────────────────────────────────────────────────────────────────────────────


def watch(meet: Callable[[str], None]) -> None:
    """Let ``meet`` be called before everything that this rank does to the disk: system calls, and blocks of a file."""
    watch_calls(meet, CALLS)
    blocks = checkpoint_files._blocks

    def watched_blocks(*given: Any) -> Any:
        for block in blocks(*given):
            meet("write")
            yield block

    checkpoint_files._blocks = watched_blocks


def at_call(number: int, name: str, strike: Callable[[], None]) -> None:
    """Strike at the call of that number; where a name is given, of the calls of that name."""
    passed = [0]

    def meet(called: str) -> None:
        if not name or called == name:
            passed[0] += 1
            if passed[0] == number:
                strike()

    watch(meet)


def fill_disk(number: int) -> None:
    """No room from that call on."""
    passed = [0]

    def meet(called: str) -> None:
        passed[0] += 1
        if passed[0] >= number and called in ("write", "mkdir"):
            refuse_to_write()

    watch(meet)


@dataclass
class Strike:
    """What is done to a job.

    Args:
        kind: its row in the table.
        disturb: in each rank.
        grace_seconds: how long ranks live on when one has died.
        allowed: exit statuses that ranks may have besides 0.
    """

    kind: str
    disturb: Disturb
    grace_seconds: float = 2.0
    allowed: tuple[int, ...] = (-signal.SIGKILL, ENDED_BY_AN_ERROR, REFUSED)


def kill_one(draw: random.Random, size: int, calls: int) -> Strike:
    """One rank at any of its calls; the others find out, or are ended while they still write."""
    victim, number = draw.randrange(size), 1 + int(draw.random() ** 2 * calls)
    grace = draw.choice([0.0, 0.0, 0.02, 0.1])
    return Strike("kill -9 of a rank", lambda rank: at_call(number, "", kill) if rank == victim else None, grace)


def kill_all(draw: random.Random, size: int, calls: int) -> Strike:
    """All ranks, when one of them is at any of its calls."""
    victim, number, group = draw.randrange(size), 1 + int(draw.random() ** 2 * calls), os.getpid()

    def strike() -> None:
        # The parent ignores it; every rank is its child, and in its process group.
        os.kill(group, signal.SIGUSR1)
        time.sleep(60)

    return Strike("kill -9 of all ranks", lambda rank: at_call(number, "", strike) if rank == victim else None, 0.0)


def kill_at_the_rename(draw: random.Random, size: int, calls: int) -> Strike:
    """The first rank at a rename: of the new checkpoint, of one that it replaces, of an old one to be removed."""
    number = draw.randrange(1, 8)
    return Strike("kill -9 at a rename", lambda rank: at_call(number, "rename", kill) if rank == 0 else None, 0.0)


def full_disk(draw: random.Random, size: int, calls: int) -> Strike:
    """No room for one rank, from any of its calls on."""
    victim, number = draw.randrange(size), 1 + draw.randrange(calls)
    return Strike(
        "full disk",
        lambda rank: fill_disk(number) if rank == victim else None,
        PATIENCE_SECONDS,
        (REFUSED,),
    )


STRIKES: dict[Callable[[random.Random, int, int], Strike], int] = {
    kill_one: 8,
    kill_all: 6,
    kill_at_the_rename: 3,
    full_disk: 2,
}
"""Each with its share of the jobs."""


def damage_newest(draw: random.Random, folder: Path) -> tuple[str, int]:
    """Flip a bit of a file of the newest good checkpoint, tear it or remove it, where there is an older good one.

    Returns:
        What was done, and the step of the older one.
    """
    found = sorted((folder / "checkpoints").glob("step-*"))
    good = [path for path in found if not damage(path)]
    if len(good) < 2:
        return "", 0
    file = draw.choice(sorted(good[-1].iterdir()))
    data, how = bytearray(file.read_bytes()), draw.choice(["flipped", "torn", "missing"])
    if how == "flipped":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data[: draw.randrange(len(data))] if how == "torn" else data)
    if how == "missing":
        file.unlink()
    return how, int(good[-2].name.removeprefix("step-"))


# ── what must hold ──────────────────────────────────────────────────────────────────────────────────────────────────────


def newest(folder: Path, expected: dict[int, dict[str, Tensor]], at_least: int) -> int:
    """The step of the newest good checkpoint; its bits are those of that step.

    Raises:
        Broken: it is older than promised, or has another bit.
    """
    found = latest_checkpoint(folder, lambda path, why: None)
    step = 0 if found is None else found.step
    if step < at_least:
        raise Broken(f"lost: the newest checkpoint is of step {step}, and a rank was told of {at_least}")
    if found is None:
        return 0
    tensors = load_whole(found.path)
    same = tensors.keys() == expected[step].keys() and all(
        torch.equal(_bits(value), _bits(expected[step][name])) for name, value in tensors.items()
    )
    if not same:
        raise Broken(f"wrong: the checkpoint of step {step} has other bits")
    return step


def _bits(value: Tensor) -> Tensor:
    value = value.int() if value.dtype is torch.int16 else value  # what is sent between ranks has 32
    return value.contiguous().reshape(-1).view(torch.uint8)


def told(folder: Path) -> int:
    """The newest step that any rank was told is written."""
    with contextlib.suppress(FileNotFoundError):
        return max(map(int, (folder / "told").read_text().split()), default=0)
    return 0


@dataclass
class Tally:
    """What came of the jobs, by kind."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def count(self, kind: str, outcome: str) -> None:
        """One more."""
        self.outcomes.setdefault(kind, Counter())[outcome] += 1

    @property
    def num_kills(self) -> int:
        """Jobs that a kill -9 struck in fact."""
        return sum(
            found.total() - found["was through before"] for kind, found in self.outcomes.items() if "kill" in kind
        )

    def rows(self) -> list[dict[str, Any]]:
        """The table."""
        return [
            {
                "": kind,
                "jobs": found.total(),
                **{name: found[name] for name in ("lost", "wrong", "left")},
                "outcomes": ", ".join(f"{name} {count}" for name, count in found.most_common()),
            }
            for kind, found in self.outcomes.items()
        ]


class Tries:
    """Runs that are struck again and again.

    Args:
        folder: an empty folder.
        seed: of what strikes when.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.draw, self.tally = folder, random.Random(seed), Tally()
        self.expected, self.run, self.ranks = undisturbed(), 0, {}
        signal.signal(signal.SIGUSR1, self._kill_all)

    def _kill_all(self, *_: Any) -> None:
        for pid in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def through(self, size: int, strike: Strike, place: Path) -> dict[int, int]:
        """One job; the exit status of each rank."""
        self.ranks = {}
        ranks = fork_ranks(size, place, strike.disturb)
        self.ranks = ranks
        return wait_for(ranks, strike.grace_seconds)

    def one(self) -> None:
        """Strike one job."""
        place = self.folder / f"run{self.run}"
        place.mkdir(exist_ok=True)
        size = self.draw.choice([2, 2, 3])
        makers = [maker for maker, share in STRIKES.items() for _ in range(share)]
        strike = self.draw.choice(makers)(self.draw, size, 40)
        try:
            outcome = self._judge(strike, self.through(size, strike, place), place)
        except Broken as broken:
            outcome = str(broken).partition(":")[0]
            said = "\n".join((place / f"said{rank}").read_text()[-600:] for rank in range(size))
            self.tally.broken.append(f"run {self.run}, {strike.kind} on {size} ranks: {broken}\n{said}")
            self.run += 1
        self.tally.count(strike.kind, outcome)

    def _judge(self, strike: Strike, statuses: dict[int, int], place: Path) -> str:
        if any(status and status not in strike.allowed for status in statuses.values()):
            raise Broken(f"left: ranks ended with {statuses}")
        step = newest(place, self.expected, told(place))
        if self.draw.random() < 0.15 and step < STEPS:
            self._damage(place)
        if step == STEPS:
            shutil.rmtree(place)
            self.run += 1
            return "was through before" if not any(statuses.values()) else "whole"
        return f"step {step}" if any(statuses.values()) else "was through before"

    def _damage(self, place: Path) -> None:
        """Damage the newest checkpoint: the one before must be found, and no rank is promised more than that."""
        how, older = damage_newest(self.draw, place)
        if not how:
            return
        if (found := newest(place, self.expected, 0)) != older:
            raise Broken(f"lost: {how}: step {found} is found, and {older} is good")
        (place / "told").write_text(f"{older}\n")
        self.tally.count(f"a {how} file", "the one before was found")


@contextlib.contextmanager
def small_disk(place: Path, kilobytes: int) -> Iterator[Callable[[int], None]]:
    """A real disk of so many kilobytes for the checkpoints of a run; yields what gives it another size. For root alone."""
    disk = place / "checkpoints"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", disk], check=True, capture_output=True)
    try:
        yield lambda size: _mount(disk, size)
    finally:
        subprocess.run(["umount", disk], check=True)


def can_mount(folder: Path) -> bool:
    """Whether this process may make small disks."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError), small_disk(folder / "probe", 64):
        return True
    return False


def _mount(disk: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", disk], check=True)


def fill_disks(tries: Tries, number: int) -> None:
    """Runs on disks that are too small, each at another place; with room they go on."""
    quiet = Strike("a disk too small", lambda rank: None, PATIENCE_SECONDS, (REFUSED,))
    for _ in range(number):
        place, size = tries.folder / f"run{tries.run}", tries.draw.choice([2, 3])
        tries.run += 1
        try:
            with small_disk(place, 4 * tries.draw.randrange(3, 40)) as resize:
                statuses = tries.through(size, quiet, place)
                step = newest(place, tries.expected, told(place))
                if len(set(statuses.values())) > 1 or (step == STEPS) != (statuses[0] == 0):
                    raise Broken(f"left: ranks ended with {statuses} at step {step}")
                resize(65536)
                tries.through(size, quiet, place)
                if newest(place, tries.expected, told(place)) != STEPS:
                    raise Broken("lost: with room it did not go on")
            outcome = f"one line on all ranks at step {step}" if statuses[0] else "was through before"
        except Broken as broken:
            outcome = str(broken).partition(":")[0]
            tries.tally.broken.append(f"run {tries.run}, {quiet.kind}: {broken}")
        tries.tally.count(quiet.kind, outcome)
        shutil.rmtree(place, ignore_errors=True)


def strike_jobs(number: int, folder: Path, seed: int = 0) -> Tally:
    """Strike jobs until so many were killed.

    Args:
        number: of kills.
        folder: an empty folder.
        seed: of what strikes when.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    tries, began, told_of = Tries(folder, seed), time.monotonic(), 0
    while tries.tally.num_kills < number and len(tries.tally.broken) < 10:
        tries.one()
        if tries.tally.num_kills >= told_of + 50:
            told_of = tries.tally.num_kills
            print(f"{told_of} kills of {number} in {time.monotonic() - began:.0f} s", flush=True)
    if can_mount(folder):
        fill_disks(tries, number // 20)
    return tries.tally


def main() -> int:
    """Strike a thousand jobs, or as many as the first argument says."""
    number, seed = [*map(int, sys.argv[1:3]), *(1000, 0)[len(sys.argv) - 1 :]]
    with tempfile.TemporaryDirectory(prefix="narrowgauge-rank-tries-") as folder:
        tally = strike_jobs(number, Path(folder), seed)
    print(*tally.rows(), *tally.broken, f"{tally.num_kills} kills", sep="\n")
    return int(bool(tally.broken))


if __name__ == "__main__":
    sys.exit(main())
