"""Files that are whole or absent: the few ways this package writes to a disk.

A process can die between any two instructions and a disk can fill up in the middle of a write. Both are harmless if
nothing is ever changed in place: the new bytes go to a temporary neighbour, are forced to the disk, and only then take
the final name with one rename, which the operating system does entirely or not at all. What the operating system
refuses becomes one :class:`~narrowgauge.errors.RecordError` that names the file and, on a full disk, the bytes left.
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
"""How the name of everything unfinished begins; whatever bears it after a crash may be deleted."""

_FULL = (errno.ENOSPC, errno.EDQUOT)

RESUME = "go on with narrowgauge resume"
AGAIN = "give the same command again"
"""What to do once a full disk has room: for what belongs to a run, and for what is made anew."""


def disk_error(path: Path, error: OSError, then: str = RESUME) -> RecordError:
    """The operating system's refusal as one line: what, where, and on a full disk how many bytes are left.

    Args:
        path: the file or folder that was being written or read.
        error: what the operating system raised.
        then: what to do once a full disk has room.

    Returns:
        The error to raise.

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
    """The operating system's error in the text of another one: safetensors says a full disk only so.

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
    """Force the bytes of a file to the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk (without it a rename may be lost with the power)."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """A neighbour of ``path`` for its unfinished bytes, distinct per process."""
    return path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")


def write_whole(path: Path, data: bytes, then: str = RESUME) -> None:
    """Write a file so that any reader, at any moment, sees the old bytes or the new ones.

    Law: after a crash ``path`` holds what it held before, or ``data``; never a mixture.

    Args:
        path: the final name; its folder exists.
        data: everything the file shall hold.
        then: what to do once a full disk has room.

    Raises:
        RecordError: the operating system refused, or what lies there is no file (a folder, a device, a pipe), which a
            rename would do away with; ``path`` is as it was.

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
            raise RecordError(f"Cannot write {path}: it is no ordinary file.", "Name a file, new or old.")
        try:
            temporary.write_bytes(data)
            sync_file(temporary)
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def append_whole(descriptor: int, path: Path, data: bytes) -> None:
    """Append to an ``O_APPEND`` descriptor all of ``data`` or nothing.

    Law: one ``os.write`` on any healthy disk; where the disk takes only a part, the part is taken back.

    Args:
        descriptor: open for appending.
        path: its name, for the message.
        data: the bytes of whole lines.

    Raises:
        RecordError: the operating system refused; the file is as long as it was.
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
    """What JSON text says.

    Raises:
        ValueError: it is no JSON, or nested deeper than Python goes, which Python has another class for.

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
    """BLAKE2b-256 of a file's bytes in hexadecimal.

    Cost: one read of the file at about 1 GB/s; constant memory.
    """
    state = hashlib.blake2b(digest_size=32)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            state.update(block)
    return state.hexdigest()


@contextlib.contextmanager
def held_folder(path: Path) -> Iterator[bool]:
    """Hold a folder for this process alone during the block; nothing is written.

    Args:
        path: a folder that exists.

    Returns:
        Whether it is held, as :func:`lock` says; not either where the folder was removed, or another put in its place, while
        it was being locked.
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
    """Hold an open file for this process alone; the system lets go when the process ends, however it ends.

    Args:
        descriptor: an open file.
        wait: block until it is free, or return at once.

    Returns:
        Whether it is held. Where the file system has no locks, ``True``: nothing can be known there.
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
