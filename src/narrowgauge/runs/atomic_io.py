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
    """An error of the operating system as a ``RecordError``: what, where, and on a full disk the free bytes.

    Example:
        >>> import errno
        >>> print(disk_error(Path("run.toml"), PermissionError(errno.EACCES, "Permission denied")).message)
        Cannot use run.toml: Permission denied.
    """
    if error.errno not in _FULL:
        return RecordError(f"Cannot use {path}: {error.strerror or error}.", "Check the path and who may write there.")
    return RecordError(
        f"Cannot write {path}: the disk is full ({free_bytes(path):,} bytes free).",
        f"Free some space, then {then}.",
    )


def hidden_error(error: Exception) -> OSError:
    """The operating system's error that another one's message quotes: safetensors reports a full disk only in that way.

    Example:
        >>> hidden_error(ValueError("I/O error: No space left on device (os error 28)")).errno == errno.ENOSPC
        True
    """
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))


def free_bytes(path: Path) -> int:
    """Bytes free on the disk that holds ``path``, which need not exist yet.

    Example:
        >>> free_bytes(Path("not/here/yet")) > 0
        True
    """
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


@contextlib.contextmanager
def disk_errors(path: Path, then: str = RESUME) -> Iterator[None]:
    """Turn every ``OSError`` of the block into the ``RecordError`` of :func:`disk_error`.

    Example:
        >>> with disk_errors(Path("there")):
        ...     raise OSError(errno.EIO, "Input/output error")
        Traceback (most recent call last):
        ...
        narrowgauge.errors.RecordError: Cannot use there: Input/output error. Check the path and who may write there.
    """
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
    """A temporary name in the same folder, distinct per process."""
    return path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")


def write_whole(path: Path, data: bytes, then: str = RESUME) -> None:
    """Replace a file so that any reader, at any moment, sees the old bytes or the new ones; its folder must exist.

    Invariant: after a crash ``path`` holds its old content or ``data``, never a mixture.

    Raises:
        RecordError: the operating system refused, or ``path`` is a folder, a device or a pipe, which a rename would remove;
            ``path`` is unchanged.

    Cost: two fsyncs, a few milliseconds.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_whole(Path(folder, "a"), b"whole")
        ...     Path(folder, "a").read_bytes(), len(os.listdir(folder))
        (b'whole', 1)
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
    """Parse JSON; too deep a nesting, where Python raises ``RecursionError``, is a ``ValueError`` like any other damage.

    Example:
        >>> load_json("[" * 100_000)
        Traceback (most recent call last):
        ...
        ValueError: maximum recursion depth exceeded...
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def digest(path: Path) -> str:
    """BLAKE2b-256 of a file in hexadecimal, in constant memory."""
    state = hashlib.blake2b(digest_size=32)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            state.update(block)
    return state.hexdigest()


@contextlib.contextmanager
def held_folder(path: Path) -> Iterator[bool]:
    """Lock an existing folder for this process during the block; nothing is written.

    Yields whether it is locked (see :func:`lock`): ``False`` also where the folder was removed or replaced meanwhile.
    """
    if sys.platform == "win32":
        yield True
        return
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
    try:
        yield lock(descriptor, wait=False) and path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, wait: bool) -> bool:
    """Lock an open file for this process and return whether it is locked; the system releases the lock when the process ends.

    Where the file system has no locks the answer is ``True``: nothing can be known there.

    Not ``filelock``: it locks a file of its own by name, which would add files to run folders and cannot lock a folder or an
    open file of rows; and where the file system has no locks it falls back to a file that a killed process leaves behind.
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
