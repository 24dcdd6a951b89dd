"""Processes that train together: n ranks of gloo on this machine, each running one function of a test.

Ranks are forked from a server, one per pytest process, which has imported PyTorch and the test's own module and done nothing
else. A rank is therefore there in milliseconds and yet new: nothing of an earlier call is left in it, and a rank that dies
takes nothing with it. Between calls only the server waits. It ends with pytest, however pytest ends, and its ranks end with it.

    results = run_ranks(work, 2, tmp_path, 10)   # work(rank, 10) on each of two ranks

The ranks find each other through a file in the test's own folder, so no port is chosen beforehand and tests may run side by
side. A rank that fails is shown with its traceback, and the others, which would wait for it, are ended; ranks that take too
long are shown with the lines at which they stand.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

# Slow to import, and imported by the call that needs them: the server follows suit once a rank has done so.
_SLOW = ("torch._dynamo", "torch._inductor.compile_fx", "transformers.models.llama.modeling_llama")
_HUNG_SECONDS = 1.0  # for a rank that is asked where it stands
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, of <sys/prctl.h>
# Ranks are as many as there are tests that start some; none may take all processors, or another interface. Compilers with
# processes of their own would leave the server threads, and a fork has only one.
_GROUND = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


# ── the side of the test ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Call:
    """What the server is asked to run, and where: the ranks stand on the environment that the test has at the time."""

    file: str
    name: str
    arguments: tuple[Any, ...]
    num_ranks: int
    place: Path
    timeout_seconds: float
    folder: str
    environment: dict[str, str]


def run_ranks(
    function: Callable[..., Any], num_ranks: int, place: Path, *arguments: Any, timeout_seconds: float = 300.0
) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on each of ``num_ranks`` processes with one process group.

    Args:
        function: at the top of its module; it runs in processes of this call alone, in that module imported anew.
        num_ranks: how many processes.
        place: a folder for what they exchange, made if need be; no other ranks are using it.
        arguments: what can be pickled.
        timeout_seconds: after which all are ended, and the test fails.
    Returns:
        A result per rank; tensors are plain ones.
    Raises:
        AssertionError: a rank failed, or took too long; with what it wrote.
    Cost: 0.06 s for two ranks and 0.2 s for eight, beside what the function does; 3 s for the first call of a session.
    """
    place.mkdir(parents=True, exist_ok=True)
    for left in ("meeting", "loaded0"):  # by ranks that failed here before
        (place / left).unlink(missing_ok=True)
    for k in range(num_ranks):
        (place / f"output{k}").write_bytes(b"")
    call = _Call(
        inspect.getfile(function), function.__name__, arguments, num_ranks, place.absolute(),
        timeout_seconds, os.getcwd(), _environment(),
    )  # fmt: skip
    codes, is_late = _ask(call)
    said = "".join(f"\n── rank {k} ──\n{(place / f'output{k}').read_text()}" for k in range(num_ranks))
    assert not is_late, f"{num_ranks} ranks took longer than {timeout_seconds} s{said}"
    assert not any(codes), f"ranks ended with {codes}{said}"
    return [pickle.loads((place / f"result{rank}").read_bytes()) for rank in range(num_ranks)]


def _environment() -> dict[str, str]:
    environment = {**os.environ, **_GROUND}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


@functools.lru_cache(maxsize=1)
def _server() -> subprocess.Popen[bytes]:
    """The server of this process; it ends when it can read no more calls."""
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()
    )
    atexit.register(_end_server)
    return server


def _end_server() -> None:
    if _server.cache_info().currsize:
        server = _server()
        _server.cache_clear()
        assert server.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            server.stdin.close()
        try:
            server.wait(_HUNG_SECONDS * 10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _ask(call: _Call) -> tuple[list[int], bool]:
    """The exit code of each rank, and whether they took too long. An interrupted call, whose answer nobody reads, ends
    the server and thereby its ranks; the next call starts another."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    try:
        pickle.dump(call, server.stdin)
        server.stdin.flush()
        answer: tuple[list[int], bool] = pickle.load(server.stdout)
    except BaseException:
        _end_server()
        raise
    return answer


# ── the side of the server ──────────────────────────────────────────────────────────────────────────────────────────────


def serve(calls: BinaryIO, answers: BinaryIO) -> None:
    """Answer calls until there are no more: fork the ranks of each, wait for them, say how they ended."""
    import torch.distributed.fsdp  # noqa: F401  of which the ranks have a copy

    modules: dict[str, ModuleType | None] = {}
    with _child_signals() as ended:
        while True:
            try:
                call: _Call = pickle.load(calls)
            except EOFError:
                return
            os.chdir(call.folder)
            if call.file not in modules:
                modules[call.file] = _imported(call.file)
            _require_one_thread(call.file)
            ranks = [_fork(rank, call, modules[call.file]) for rank in range(call.num_ranks)]
            answer = _wait(ranks, call, calls, ended)
            with contextlib.suppress(BrokenPipeError):  # nobody waits for it: no more calls either
                pickle.dump(answer, answers)
                answers.flush()
            _follow(call.place / "loaded0")


@contextlib.contextmanager
def _child_signals() -> Iterator[int]:
    """A file that can be read whenever a child has ended."""
    ended, told = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(told, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(told)
    yield ended


def _imported(file: str) -> ModuleType | None:
    """The test's module; ``None`` where it cannot be imported, which each rank shows by trying again."""
    with contextlib.suppress(Exception):
        return _import(file)
    return None


def _import(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ranked", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["ranked"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _follow(loaded: Path) -> None:
    """Import what a rank has imported, for those to come."""
    with contextlib.suppress(OSError):  # the ranks failed, or the test has removed its folder
        for name in loaded.read_text().split():
            importlib.import_module(name)


def _require_one_thread(file: str) -> None:
    tasks = Path("/proc/self/task")  # Linux alone counts the threads of libraries
    count = len(list(tasks.iterdir())) if tasks.exists() else 1
    assert count == 1, (
        f"{file} starts {count - 1} threads as it is imported, which forked ranks would lack: do it in a function"
    )


def _fork(rank: int, call: _Call, module: ModuleType | None) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)  # what a rank starts ends with it
        _die_with(parent)
        _prepare(call.place / f"output{rank}", call.environment)
        _run(rank, call, module)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: the stack below is the server's, and so is what it would clean up.
        os._exit(code)
    raise AssertionError


def _die_with(parent: int) -> None:
    """End this process as soon as its parent has ended; only Linux can say so."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _prepare(output: Path, environment: dict[str, str]) -> None:
    """Make of a copy of the server a process that writes to its own file and stands on the test's environment."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    writing = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(writing, stream)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _run(rank: int, call: _Call, module: ModuleType | None) -> None:
    """One rank: join the group, run the function, leave its result."""
    import torch
    import torch.distributed as dist

    if module is None:
        module = _import(call.file)
    sys.modules["ranked"] = module
    random.seed(0)  # which a fork seeds anew
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{call.place / 'meeting'}", rank=rank, world_size=call.num_ranks
    )
    result = getattr(module, call.name)(rank, *call.arguments)
    (call.place / f"result{rank}").write_bytes(pickle.dumps(result))
    (call.place / f"loaded{rank}").write_text(" ".join(name for name in _SLOW if name in sys.modules))
    dist.barrier()  # none leaves while another still asks it for something
    dist.destroy_process_group()


def _wait(ranks: list[int], call: _Call, calls: BinaryIO, ended: int) -> tuple[list[int], bool]:
    """Wait until all have ended, or one has failed, or it grows too late, or pytest is gone; then end the others."""
    codes: dict[int, int] = {}
    deadline, is_late = time.monotonic() + call.timeout_seconds, False
    while len(codes) < len(ranks) and not any(codes.values()):
        left = deadline - time.monotonic()
        readable, _, _ = select.select([calls, ended], [], [], max(0.0, left))
        if calls in readable:  # nobody asks before the answer: this is the end
            break
        if ended in readable:
            os.read(ended, 1024)
        codes |= _collect([rank for rank in ranks if rank not in codes])
        if len(codes) < len(ranks) and time.monotonic() > deadline:
            is_late = True
            _ask_where([rank for rank in ranks if rank not in codes])
            break
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank, signal.SIGKILL)
        if rank not in codes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)  # before it has become a group
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    return [codes[rank] for rank in ranks], is_late


def _collect(ranks: list[int]) -> dict[int, int]:
    """Those that have ended, with their exit codes."""
    found = ((rank, os.waitpid(rank, os.WNOHANG)) for rank in ranks)
    return {rank: os.waitstatus_to_exitcode(status) for rank, (pid, status) in found if pid}


def _ask_where(ranks: list[int]) -> None:
    """Let hung ranks write the line at which each of their threads stands."""
    for rank in ranks:
        os.kill(rank, signal.SIGUSR1)
    time.sleep(_HUNG_SECONDS)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent)  # as in the test: `from optim.x import y`
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's to answer
    _answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an import prints is no answer
    sys.modules["ranks"] = sys.modules["__main__"]
    serve(sys.stdin.buffer, _answers)
