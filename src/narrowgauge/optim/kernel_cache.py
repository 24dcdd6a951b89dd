"""Packages: compiled kernels on disk, which a process loads without examining their code again.

A package is named after what it was compiled from (:meth:`narrowgauge._torch.inductor.Program.key`), and an *alias* says which
package serves a definition in source code, so that nothing is traced to find it. Edited source has no alias yet: it is
traced, and only a graph that is new is compiled.

A package is native code. So the folder belongs to one user, and a file is loaded only if that user or root wrote it and no
other may change it. Its name ends with a digest of its bytes: name and bytes appear together in one rename, and bytes that
were damaged since, or never reached the disk, no longer match. While a package is being loaded, its process holds a lock
on a *mark* file. A mark without a lock means that a process died while loading, and the package is compiled again.

Every package here was proved to do what its definition does. A compiled kernel that does something else leaves an empty file,
``KEY.refuted``, so that no other process compiles it only to find the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from narrowgauge.machine.cache_folder import cache_folder

if sys.platform != "win32":
    import fcntl

MAX_ALIASES = 8192
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def packages_folder() -> Path:
    """The folder of all packages, made where it does not exist, for this user alone.

    Raises:
        OSError: it cannot be made, or is another user's.
    """
    path = cache_folder() / "kernels"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if not _is_own(found):
        raise PermissionError(f"{path} belongs to another user; set NARROWGAUGE_CACHE to a folder of your own")
    if found.st_mode & OTHERS_WRITE:
        path.chmod(0o700)
    return path


def find_package(key: str) -> Path | None:
    """The package of a key, ``None`` where there is none; a damaged one, or one that others could write, is removed."""
    for path in sorted(packages_folder().glob(f"{key}-*.pt2")):
        with contextlib.suppress(OSError):
            if (
                is_trusted(path.lstat())
                and path.stem == f"{key}-{_digest(path.read_bytes())}"
                and not _killed_a_process(path)
            ):
                return path
        discard(path)
    return None


def add_package(key: str, made: Path) -> Path:
    """Move a package made in :func:`packages_folder` to its place, which is returned."""
    path = made.with_name(f"{key}-{_digest(made.read_bytes())}.pt2")
    made.chmod(made.stat().st_mode & ~OTHERS_WRITE)  # a umask may have let the user's group write
    _sync(made, os.O_RDWR)
    os.replace(made, path)
    if sys.platform != "win32":
        _sync(made.parent, os.O_RDONLY)
    return path


def find_key(alias: str, compiler: str) -> str | None:
    """The key of the package that serves a definition, ``None`` if no process has traced this source with this compiler.

    An alias that is damaged, or that others could write, is removed. Without a ``compiler``, one made by any other is taken.
    """
    pattern = f"{alias}-{_digest(compiler.encode(), 4) if compiler else '*'}"
    for path in sorted((packages_folder() / "aliases").glob(pattern)):
        with contextlib.suppress(OSError, ValueError):
            key, check = path.read_text(encoding="ascii").split()
            if is_trusted(path.lstat()) and check == _digest(f"{path.name} {key}".encode()):
                return key
        discard(path)
    return None


def add_alias(alias: str, compiler: str, key: str) -> None:
    """Let :func:`find_key` find a key, where the disk allows it: a read-only folder serves what it has."""
    path = packages_folder() / "aliases" / f"{alias}-{_digest(compiler.encode(), 4)}"
    written = path.with_name(f".{path.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            # Not synced: one that never reached the disk does not match its digest.
            written.write_text(f"{key} {_digest(f'{path.name} {key}'.encode())}\n", encoding="ascii")
            written.chmod(0o600)
            os.replace(written, path)
            # Each edit of the source leaves those of before.
            others = sorted(path.parent.iterdir(), key=lambda other: other.stat().st_mtime)
            for old in others[:-MAX_ALIASES]:
                old.unlink(missing_ok=True)
        finally:
            written.unlink(missing_ok=True)


def refute(key: str) -> None:
    (packages_folder() / f"{key}.refuted").touch(mode=0o600)


def is_refuted(key: str) -> bool:
    """Whether a process found that what the compiler makes of a key is wrong."""
    return (packages_folder() / f"{key}.refuted").exists()


def discard(path: Path) -> None:
    """Remove a package and its marks, where the disk allows it."""
    for file in (path, *_marks(path)):
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(key: str) -> Iterator[Path]:
    """Be the only process that makes the package of ``key`` during the block.

    Yields where to write it, for :func:`add_package`; what is left there after the block is removed.
    """
    folder = packages_folder()
    descriptor = os.open(folder / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    made = folder / f".{key}-{os.getpid()}.pt2"
    try:
        _lock(descriptor, exclusive=True, wait=True)
        for left in folder.glob(f".{key}-*.pt2"):  # by a process that was killed
            left.unlink(missing_ok=True)
        yield made
    finally:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def marked(path: Path) -> Iterator[None]:
    """Hold the mark of a package during the block; it remains only if the process dies in it."""
    mark = path.with_suffix(f".loading-{os.getpid()}")
    unseen, descriptor = mark.with_name(f".{mark.name}"), -1
    # On a read-only folder or a full disk there is no mark.
    with contextlib.suppress(OSError):
        descriptor = os.open(unseen, os.O_RDWR | os.O_CREAT, 0o600)
        _lock(descriptor, exclusive=True, wait=True)
        os.replace(unseen, mark)  # visible only once it is locked
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)
        if descriptor >= 0:
            os.close(descriptor)


def _marks(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.stem}.loading-*"))


def _killed_a_process(path: Path) -> bool:
    """Whether there is a mark that no living process holds."""
    for mark in _marks(path):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(mark, os.O_RDONLY)
            try:
                # Shared, so that two processes that test at the same moment both find it free.
                if _lock(descriptor, exclusive=False, wait=False):
                    return True
            finally:
                os.close(descriptor)
    return False


def _lock(descriptor: int, *, exclusive: bool, wait: bool) -> bool:
    """Lock an open file until it is closed or the process ends; ``False`` where another has it or nothing can be locked."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _is_own(found: os.stat_result) -> bool:
    return sys.platform == "win32" or found.st_uid in (os.getuid(), 0)


def is_trusted(found: os.stat_result) -> bool:
    """Whether only this user or root can have written what ``lstat`` found."""
    return stat.S_ISREG(found.st_mode) and _is_own(found) and not found.st_mode & OTHERS_WRITE


def _digest(content: bytes, size: int = 16) -> str:
    return hashlib.blake2b(content, digest_size=size).hexdigest()


def _sync(path: Path, flags: int) -> None:
    """Force a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
