"""Atomic file operations: a file is complete or absent, whatever happens.

A process can die between any two instructions, and a disk can fill up in the middle of a write. Neither does harm if nothing is
changed in place: the new bytes go to a temporary file in the same folder, are synced to the disk, and take the final
name with one rename, which is atomic. An error of the operating system becomes one
:class:`~narrowgauge.errors.RecordError` that names the file and, on a full disk, the free bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError

if sys.platform != "win32":
    import fcntl

TEMPORARY = ".tmp-"
"""Prefix of every unfinished file; what a crash leaves under it may be deleted."""

_FULL = (errno.ENOSPC, errno.EDQUOT)

RESUME = "go on with narrowgauge resume"
AGAIN = "give the same command again"
"""Advice after a full disk: for files of a run, and for files that are created again."""


def disk_error(path: Path, error: OSError, then: str = RESUME) -> RecordError:
    """Return an error of the operating system as a ``RecordError``, on a full disk with the free bytes."""
    if error.errno not in _FULL:
        return RecordError(f"Cannot use {path}: {error.strerror or error}.", "Check the path and who may write there.")
    place = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    return RecordError(
        f"Cannot write {path}: the disk is full ({free:,} bytes free).", f"Free some space, then {then}."
    )


def hidden_error(error: Exception) -> OSError:
    """Return the operating system's error that another error's message quotes, as safetensors does."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))


@contextlib.contextmanager
def disk_errors(path: Path, then: str = RESUME) -> Iterator[None]:
    """Turn every ``OSError`` of the block into the ``RecordError`` of :func:`disk_error`."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error, then) from error


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Sync a folder to the disk: without it a power failure may undo a rename."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """Return a temporary name in the same folder, distinct per process."""
    return path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")


def write_whole(path: Path, data: bytes, then: str = RESUME) -> None:
    """Replace a file so that any reader, at any moment and after a crash, sees the old bytes or the new ones.

    Its folder must exist. A folder, a device or a pipe, which a rename would remove, is refused.

    Cost: two fsyncs, a few milliseconds.
    """
    temporary = temporary_name(path)
    with disk_errors(path, then):
        if path.exists() and not path.is_file():
            raise RecordError(f"Cannot write {path}: it is not a regular file.", "Name a file, new or old.")
        try:
            temporary.write_bytes(data)
            sync_file(temporary)
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to ``path`` when the block succeeds and removed when it fails.

    ``path`` may be an empty folder.
    """
    temporary = temporary_name(path)
    with disk_errors(path, AGAIN):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            yield temporary
            for file in temporary.iterdir():
                sync_file(file)
            sync_folder(temporary)
            if path.exists():
                path.rmdir()
            os.rename(temporary, path)
            sync_folder(path.parent)
        except Exception as error:
            if "os error" in str(error):  # safetensors hides the system's error, such as a full disk
                raise hidden_error(error) from error
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def read_bytes(path: Path) -> bytes | None:
    """Return all bytes of a file, or ``None`` if there is none."""
    with disk_errors(path):
        return path.read_bytes() if path.exists() else None


def append_whole(descriptor: int, path: Path, data: bytes) -> None:
    """Append complete lines to a file that was opened with ``O_APPEND``: all of them, or on an error none.

    One ``os.write`` where the disk has room; what was written before an error is cut off again.
    """
    length = os.fstat(descriptor).st_size
    with disk_errors(path):
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            os.ftruncate(descriptor, length)
            raise


def load_json(text: bytes | str) -> Any:
    """Parse JSON; too deep a nesting, where Python raises ``RecursionError``, is a ``ValueError`` like any other damage."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def digest(path: Path) -> str:
    """Return the BLAKE2b-256 of a file in hexadecimal, in constant memory."""
    state = hashlib.blake2b(digest_size=32)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def lock(descriptor: int, *, wait: bool) -> bool:
    """Lock an open file for this process and return whether it is locked; the lock ends with the process.

    Where the file system has no locks the answer is ``True``. ``filelock`` would lock a file of its own, which a killed process
    leaves behind.
    """
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
