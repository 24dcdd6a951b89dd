"""Atomic file operations: a file is complete or absent, whatever happens.

The new bytes go to a temporary file in the same folder. It is synced to the disk and gets its final
name by one atomic rename. An error of the operating system becomes a
:class:`~narrowgauge.errors.RecordError` that names the file.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from narrowgauge.errors import RecordError

TEMPORARY = ".tmp-"
"""Prefix of every unfinished file. Files that a crash leaves under this prefix may be deleted."""


def nearest(path: Path) -> Path:
    """Return a path, or the last of its parents that exists."""
    place = path.absolute()
    while not os.path.exists(place):
        place = place.parent
    return place


_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, None)


def disk_error(path: Path, error: Exception) -> RecordError:
    """Return a ``RecordError`` for an error while a file is read or written, with the free bytes."""
    number = system_error(error)
    if number is None:  # PyTorch's writer gives no number on a full disk
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    else:
        reason = os.strerror(number)
    free = shutil.disk_usage(nearest(path)).free
    return RecordError(
        f"Cannot use {path}: {reason} ({free:,} bytes free).",
        "Check the path, who may write there, and the free space.",
        status=1 if number in _OF_THE_MACHINE else 2,
    )


def damaged(file: Path, reason: object) -> RecordError:
    """Return the error of a file that cannot be read any more."""
    return RecordError(f"{file} is damaged: {reason}.", "Restore the file from a copy.")


def system_error(error: BaseException) -> int | None:
    """Return the number of an error of the operating system, also of one that another error's message
    quotes, as safetensors does.
    """
    if isinstance(error, OSError):
        return error.errno
    quoted = re.search(r"os error (\d+)", str(error))
    return None if quoted is None else int(quoted[1])


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn every error of the operating system in the block into the ``RecordError`` of
    :func:`disk_error`.
    """
    try:
        yield
    except Exception as error:
        if system_error(error) is None:
            raise
        raise disk_error(path, error) from error


def sync(path: Path) -> None:
    """Sync a file or a folder to the disk.

    Without the sync of its folder a power failure may undo a rename.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Replace a file in an existing folder by some bytes, or by lines.

    Any reader, also after a crash, sees the old bytes or the new ones.

    Refuse a folder, a device or a pipe, because a rename would remove it.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    with disk_errors(path):
        if path.exists() and not path.is_file():
            raise RecordError(
                f"Cannot write {path}: it is not a regular file.", "Name a file, new or old."
            )
        try:
            with temporary.open("wb") as stream:
                stream.writelines([data] if isinstance(data, bytes) else data)
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def read_bytes(path: Path) -> bytes | None:
    with disk_errors(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.read_bytes()
    return None


def digest(path: Path) -> str:
    """Return the BLAKE2b-256 of a file."""
    state = hashlib.blake2b(digest_size=32)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            state.update(block)
    return state.hexdigest()
