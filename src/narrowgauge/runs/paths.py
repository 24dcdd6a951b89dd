"""What a path holds: one answer for every command that reads or writes a folder.

``train``, ``compare``, ``report``, ``tokenize`` and ``export`` ask here before they write. What is not
ours is refused, also what another process is writing.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import TEMPORARY, disk_errors, nearest, sync
from narrowgauge.runs.foreign_logs import LOGS, log_file
from narrowgauge.runs.text import join_names

ROW_FILES = ("steps", "evals", "events", "fingerprints")
"""The kinds of rows. Each has a file in a run folder: ``steps.jsonl`` and so on."""
RUN_FILES = (*(f"{name}.jsonl" for name in ROW_FILES), "summary.json", "run.toml")
"""The files of a run's record."""


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run of ours."""
    with disk_errors(path):
        return (path / "run.toml").is_file()


# ── to write ──────────────────────────────────────────────────────────────────────────────────────


def require_free(
    path: str | Path, names: Iterable[str] = RUN_FILES, task: str = "create a run in"
) -> None:
    """Refuse a path where no folder can be made, and a folder that holds one of ``names``; without
    names, that holds anything.
    """
    path = Path(path)
    problem = ""
    with disk_errors(path):
        if path.is_dir():
            held = [name for name in os.listdir(path) if not name.startswith(TEMPORARY)]
            for name in names or held:
                if name in held:
                    problem = f"it holds {name}, which is not to be overwritten"
        elif not (nearest(path).is_dir() and os.access(nearest(path), os.W_OK)):
            problem = f"{nearest(path)} is not a folder that may be written"
    if problem:
        advice = "Choose another folder."
        if is_run(path):
            advice += " Or continue the run in the program that wrote it."
        raise RecordError(f"Cannot {task} {path}: {problem}.", advice)


def require_comparison(folder: Path, runs: Iterable[str]) -> None:
    """Refuse a folder in which a comparison would overwrite what is not its own.

    Args:
        runs: the names of the runs' folders. A run may be there already.
    """
    names = ["run.toml", "report.html", "compare.json"]
    for name in runs:
        if is_run(folder / name):
            names = ["run.toml"]
        else:
            require_free(folder / name)
    require_free(folder, names, "compare in")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, renamed to ``path`` if the block succeeds. ``path`` may be empty."""
    require_free(path, (), "write")
    path = path.absolute()
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    with disk_errors(path):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            for file in (*temporary.iterdir(), temporary):
                sync(file)
            if path.exists():
                path.rmdir()
            os.rename(temporary, path)
            sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def lock(path: Path) -> int:
    """Lock a folder against other writers, until :func:`unlock` or the end of the process.

    Raises:
        RecordError: another process, or another record of this one, holds it.
    """
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RecordError(
            f"Cannot write the run {path}: another process, or a recorder of this one that was not "
            "closed, is writing it.",
            "Close it, or wait until the process ends.",
        ) from error
    except OSError:  # a file system without locks
        pass
    return descriptor


def unlock(descriptor: int) -> None:
    """Release the folder of a :func:`lock`, which a forked process may have open too."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


# ── to read ───────────────────────────────────────────────────────────────────────────────────────


def run_folders(paths: Sequence[str | Path]) -> list[Path]:
    """Return the run folders and logs that ``paths`` name, each once.

    A run wins over the runs in its folder. These win over logs of other frameworks beside them.
    """
    folders = []
    for path in map(Path, paths):
        runs: list[Path] = []
        with disk_errors(path):
            inside = sorted(filter(Path.is_dir, path.iterdir())) if path.is_dir() else []
            for is_kind in (is_run, log_file):
                for group in ([path], inside):
                    runs = runs or list(filter(is_kind, group))
        if not runs:
            raise RecordError(
                f"No run in '{path}'.",
                f"Name a run folder, the folder of a comparison, or a {LOGS}.",
            )
        folders.extend(runs)
    return list(dict.fromkeys(folders))


def only_run(path: str | Path) -> Path:
    """Return the run at a path, or the only one in a folder.

    Raises:
        RecordError: there is none, or there are several.
    """
    first, *others = run_folders([path])
    if others:
        names = join_names((folder.name for folder in (first, *others)), 6)
        raise RecordError(
            f"One run was asked about, and {path} holds {len(others) + 1}: {names}.",
            f"Name one, such as {first}.",
        )
    return first
