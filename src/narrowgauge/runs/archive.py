"""Runs packed into one zip file, read in place as if they were folders.

``narrowgauge report FOLDER --pack FILE.zip`` writes such a file. A path may lead into it, as ``FILE.zip/NAME/run.toml``:
:func:`read_bytes`, which all readers of a run folder call, looks there if the disk has no such path. Nothing is unpacked
to the disk.

A zip file may come from anybody, so it is checked as a whole before anything in it is used: its names, kinds of members,
sizes and headers when it is opened, and the checksum of each member when it is read.
"""

from __future__ import annotations

import functools
import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PureWindowsPath

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import AGAIN, disk_errors, write_whole

_MOST_BYTES = 2 << 30
"""Of the zip file, and of everything in it unpacked: a page of more rows would not fit into memory."""
_MOST_MEMBERS = 100_000

_COMMENT = b"Training runs. Open this file with: narrowgauge report FILE.zip"
"""The comment of every zip file written here, by which one is recognized before it is replaced."""

_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, NotImplementedError, RuntimeError)
"""What ``zipfile`` raises on damaged files."""


def read_bytes(path: Path) -> bytes | None:
    """All bytes of a file, on the disk or in a zip file; ``None`` if there is no such file."""
    with disk_errors(path):
        if path.exists():
            return path.read_bytes()
    file, name = _split(path)
    if file == path:  # it has come into being since: a run that is being written ends
        with disk_errors(path):
            return path.read_bytes()
    if file is None or (info := _opened(file).NameToInfo.get(name)) is None:
        return None
    try:
        with _opened(file).open(info) as stream:
            # With a size, zipfile decompresses no more than that; one byte more makes it compare the checksum.
            data = stream.read(info.file_size + 1)
        if len(data) != info.file_size:
            raise ValueError(f"{len(data)} of {info.file_size} bytes")
    except _DAMAGE as error:
        raise _damaged(file, f"{name} cannot be unpacked ({error})") from error
    return data


def zip_file_of(path: Path) -> Path | None:
    """The file that a path is or leads into; ``None`` for a path that leads into a folder.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "runs.zip")
        >>> write_zip(file, {})
        >>> zip_file_of(file / "first") == file, zip_file_of(file.parent)
        (True, None)
    """
    return _split(path)[0]


def files_in(path: Path) -> list[Path]:
    """All files below a path in a zip file, in the order of the zip file; none for other paths."""
    file, name = _split(path)
    if file is None:
        return []
    start = "" if name == "." else f"{name}/"
    return [file / each for each in _opened(file).namelist() if each.startswith(start) and not each.endswith("/")]


def _split(path: Path) -> tuple[Path | None, str]:
    with disk_errors(path):
        place = next((place for place in (path, *path.parents) if place.exists()), path)
        return (place if place.is_file() else None), path.relative_to(place).as_posix()


def _opened(file: Path) -> zipfile.ZipFile:
    with disk_errors(file):
        found = file.stat()
        return _opened_once(file, found.st_mtime_ns, found.st_size, found.st_ino)


# A page reads hundreds of members. The compressed bytes stay in memory, so that no file stays open.
@functools.lru_cache(maxsize=2)
def _opened_once(file: Path, *state: int) -> zipfile.ZipFile:
    size = file.stat().st_size
    if size > _MOST_BYTES:
        raise _refused(file, f"it has {size:,} bytes, and at most {_MOST_BYTES:,} are read")
    return _checked(file, io.BytesIO(file.read_bytes()))


def _checked(file: Path, data: io.BytesIO) -> zipfile.ZipFile:
    """A zip file opened, after all checks that need no unpacking."""
    if not zipfile.is_zipfile(data):
        raise RecordError(
            f"No run in {file}: it is a file, but not a zip file, or its end is missing.",
            "Name a run folder, the folder of a comparison, or a zip file written by narrowgauge report --pack.",
        )
    try:
        found = zipfile.ZipFile(data)
        if reason := _reason_to_refuse(found.infolist()):
            raise _refused(file, reason)
        for info in found.infolist():
            found.open(info).close()  # compares the member's own header with the directory of the file
    except _DAMAGE as error:
        raise _damaged(file, str(error)) from error
    return found


def _reason_to_refuse(members: list[zipfile.ZipInfo]) -> str:
    if len(members) > _MOST_MEMBERS:
        return f"it has {len(members):,} members, and at most {_MOST_MEMBERS:,} are read"
    for info in members:
        for kind, is_so in _REFUSED.items():
            if is_so(info):
                return f"its member {info.filename!r} {kind}"
    if len({info.filename for info in members}) < len(members):
        return "two of its members have one name"
    if (size := sum(info.file_size for info in members)) > _MOST_BYTES:
        return f"unpacked it would have {size:,} bytes, and at most {_MOST_BYTES:,} are read"
    return ""


def _has_unsafe_name(info: zipfile.ZipInfo) -> bool:
    name = info.filename
    return (
        name != info.orig_filename  # cut at a NUL byte, or with the separators of Windows replaced
        or not name.isprintable()
        or "\\" in name
        or bool(PureWindowsPath(name).anchor)
        or any(part in ("", ".", "..") for part in name.removesuffix("/").split("/"))
    )


_REFUSED: Mapping[str, Callable[[zipfile.ZipInfo], bool]] = {
    "has a name that is not a plain relative path": _has_unsafe_name,
    "is a link or a device": lambda info: stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR),
    "is encrypted": lambda info: bool(info.flag_bits & 0x1),
    "is compressed by a method other than deflate": lambda info: (
        info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    ),
}


def _refused(file: Path, reason: str) -> RecordError:
    return RecordError(
        f"Cannot read {file}: {reason}.",
        "Pack the runs with narrowgauge report FOLDER --pack FILE.zip, fewer at a time.",
    )


def _damaged(file: Path, reason: str) -> RecordError:
    return RecordError(f"{file} is damaged: {reason}.", "Get the file again, or pack it again.")


def write_zip(path: Path, files: Mapping[str, Path]) -> None:
    """Write files into one zip file, whole or not at all.

    Invariant: the same names and bytes in the same order give the same zip file (with one version of zlib), whoever packs
    them and when.

    Args:
        path: the zip file; absent, or one that this function wrote.
        files: for each name in the zip file, a file on the disk or in a zip file; those that do not exist are left out.

    Raises:
        RecordError: another file is there, a reader would refuse a name or the size, or a file cannot be read or written;
            ``path`` is as it was.

    Cost: the compressed bytes in memory.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "run.toml").write_text("schema_version = 2")
        >>> write_zip(folder / "runs.zip", {"first/run.toml": folder / "run.toml"})
        >>> read_bytes(folder / "runs.zip" / "first" / "run.toml")
        b'schema_version = 2'
    """
    if path.is_dir():
        raise RecordError(f"Cannot write {path}: it is a folder.", "Name a file, for instance --pack runs.zip.")
    if path.is_file() and not _is_ours(path):
        raise RecordError(
            f"Cannot write {path}: the file there was not written by --pack.", "Name another, or remove it first."
        )
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as packed:
        packed.comment = _COMMENT
        for name, file in files.items():
            if (content := read_bytes(file)) is None:
                continue
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system, info.external_attr = 3, (stat.S_IFREG | 0o644) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            if _has_unsafe_name(info):
                raise RecordError(f"Cannot pack {file}: {name!r} is no name for a zip file.", "Rename the folder.")
            packed.writestr(info, content, compresslevel=9)
    _checked(path, data)
    write_whole(path, data.getvalue(), AGAIN)


def _is_ours(path: Path) -> bool:
    """Whether a file is empty or ends with the comment of :func:`write_zip`."""
    with disk_errors(path), path.open("rb") as stream:
        size = stream.seek(0, io.SEEK_END)
        stream.seek(max(0, size - len(_COMMENT)))
        return not size or stream.read() == _COMMENT
