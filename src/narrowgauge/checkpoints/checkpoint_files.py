"""The files of a checkpoint: their manifest with checksums, and the tensors in them, written and read in parts.

::

    step-00000040/                            of one process: schema 1
        tensors.safetensors                   weights and optimizer state, in their packed form
        state.json                            everything else: step, seeds, schedule, counters
        manifest.json                         size and BLAKE2b-256 of the others

    step-00000040/                            of many ranks: schema 2
        tensors-00001-of-00004.safetensors    what the first rank held, and so on
        index.json                            shape and dtype of every tensor, and which file holds which part of it
        state.json, manifest.json             as above

A single process still writes schema 1, so that versions from before there were ranks read it. Nothing is pickled: PyTorch's
distributed checkpoints keep their index as a pickle, ``.metadata``, which executes code when it is read.

Safetensors' own ``save_file`` holds Python's lock until it is done, so a training step beside it would stand still. The writer
here releases the lock for every block, computes the checksum of what it means to write on the way, and passes the operating
system's errors on. A file says in its metadata which part of each tensor it holds, in the terms of
``torch.distributed.checkpoint.HuggingFaceStorageReader``, which therefore reads it too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from narrowgauge.distributed.ranks import ALONE, Ranks
from narrowgauge.runs.atomic_io import digest, load_json

SCHEMA_WHOLE, SCHEMA_SHARDED = 1, 2
TENSORS, INDEX, STATE, MANIFEST = "tensors.safetensors", "index.json", "state.json", "manifest.json"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest says of one file: its size in bytes, and its BLAKE2b-256 in hexadecimal."""

    size: int
    checksum: str


def record_of(path: Path) -> FileRecord:
    """The record of a file as it is now; one read of it."""
    return FileRecord(path.stat().st_size, digest(path))


def part_name(index: int, number: int) -> str:
    """The file of the ``index``-th of ``number`` ranks, from 0.

    Example:
        >>> part_name(0, 4)
        'tensors-00001-of-00004.safetensors'
    """
    return f"tensors-{index + 1:05d}-of-{number:05d}.safetensors"


def write_manifest(folder: Path, step: int, files: Mapping[str, FileRecord]) -> None:
    """Write ``manifest.json``; it is of many ranks if it has an index."""
    manifest = {
        "schema_version": SCHEMA_SHARDED if INDEX in files else SCHEMA_WHOLE,
        "step": step,
        "files": {name: {"bytes": record.size, "blake2b": record.checksum} for name, record in files.items()},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def read_manifest(path: Path, *, is_renamed: bool = False) -> tuple[str, dict[str, FileRecord]]:
    """Why the manifest of a checkpoint cannot be used, or an empty string; and the files that it lists.

    ``is_renamed`` allows the folder another name than its step's.
    """
    if not path.is_dir():
        return "there is no such folder", {}
    if not (path / MANIFEST).is_file():
        return "it has no manifest.json", {}
    try:
        manifest = load_json((path / MANIFEST).read_bytes())
        if manifest["schema_version"] > SCHEMA_SHARDED:
            return f"it has schema {manifest['schema_version']}; this version reads up to {SCHEMA_SHARDED}", {}
        if not is_renamed and path.name != f"step-{manifest['step']:08d}":
            return f"its manifest is of step {manifest['step']}", {}
        return "", _files(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest.json is damaged ({error})", {}


def _files(manifest: Mapping[str, Any]) -> dict[str, FileRecord]:
    listed = manifest["files"]
    files = {name: FileRecord(listed[name]["bytes"], listed[name]["blake2b"]) for name in listed}
    for name in (TENSORS, STATE) if manifest["schema_version"] == SCHEMA_WHOLE else (INDEX, STATE):
        if name not in files:
            raise KeyError(name)
    if not all(type(record.size) is int and type(record.checksum) is str for record in files.values()):
        raise ValueError("sizes must be integers and checksums text")
    if any(Path(name).name != name for name in files):
        raise ValueError("a file is not in this folder")
    return files


def file_damage(file: Path, record: FileRecord) -> str:
    """Why a file is not what its record says, or an empty string; one read of it."""
    if not file.is_file():
        return f"{file.name} is missing"
    if file.stat().st_size != record.size:
        return f"{file.name} has {file.stat().st_size:,} bytes of {record.size:,}"
    if digest(file) != record.checksum:
        return f"{file.name} does not match its checksum"
    return ""


def damage(path: Path, ranks: Ranks = ALONE, *, is_renamed: bool = False) -> str:
    """Why a checkpoint is damaged, or an empty string, the same on all ``ranks``: they share the reading, and all call this.

    ``is_renamed`` allows the folder another name than its step's.
    """
    reason, files = ranks.of_first(lambda: read_manifest(path, is_renamed=is_renamed))
    if reason:
        return reason
    mine = list(files)[ranks.rank :: ranks.size]
    found = ranks.together(lambda: next(filter(None, (file_damage(path / name, files[name]) for name in mine)), ""))
    return next(filter(None, ranks.gather(found)), "")


# ── safetensors files, by parts ─────────────────────────────────────────────────────────────────────────────────────

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.bool: "BOOL",
}
"""What safetensors calls each dtype that a checkpoint may hold."""
NAMED = {name: dtype for dtype, name in DTYPES.items()}
BLOCK = 1 << 22
"""Bytes written and checked at a time."""
_PARTS = "DCP_SHARDING_INFO"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]] | None = None
) -> FileRecord:
    """Write a safetensors file and sync it to the disk.

    Args:
        path: a file that does not exist.
        tensors: of the dtypes of :data:`DTYPES`, on any device.
        offsets: where each tensor begins in a larger one, if they are parts.
    Returns:
        Its size and checksum, of the bytes as they were in memory.
    Raises:
        OSError: the disk is full, or not writable.
    Cost: one write and one checksum; no copy of what is contiguous and on the CPU.
    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "a.safetensors")
        >>> write_tensors(file, {"w": torch.ones(2)}).size == file.stat().st_size
        True
    """
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return write_one_by_one(path, shapes, tensors.__getitem__, offsets)


def write_one_by_one(
    path: Path,
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensor_of: Callable[[str], Tensor],
    offsets: Mapping[str, Sequence[int]] | None = None,
) -> FileRecord:
    """:func:`write_tensors` of tensors that ``tensor_of`` makes when they are written, so that one is in memory at a time."""
    # By falling alignment, as the library does, so that every tensor is aligned in a file that is mapped into memory.
    names = sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))
    checksum, size = hashlib.blake2b(digest_size=32), 0
    with path.open("xb") as file:
        for block in _blocks(_header(names, shapes, offsets), names, tensor_of):
            checksum.update(block)
            size += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, checksum.hexdigest())


def _header(
    names: Sequence[str],
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    offsets: Mapping[str, Sequence[int]] | None,
) -> bytes:
    metadata = {"format": "pt"}
    if offsets is not None:
        metadata[_PARTS] = json.dumps({name: {"saved_offsets": list(offsets[name])} for name in names})
    header: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name in names:
        dtype, shape = shapes[name]
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks(header: bytes, names: Sequence[str], tensor_of: Callable[[str], Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for name in names:
        flat = tensor_of(name).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        data = flat.numpy().data
        for start in range(0, len(data), BLOCK):
            yield data[start : start + BLOCK]


class TensorFile:
    """A safetensors file, open for reading in parts; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(path, framework="pt")

    def __enter__(self) -> TensorFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of every tensor; only the header is read."""
        parts = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118 - no mapping
        return {name: (NAMED[part.get_dtype()], tuple(part.get_shape())) for name, part in parts.items()}

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """A tensor, or a part of it: a slice for each of its dims."""
        found: Tensor = self._file.get_slice(name)[part] if part else self._file.get_tensor(name)
        return found


# ── whole tensors, from one process or many ranks ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor.

    Args:
        file: the name of the file that holds it.
        offsets: where it begins in the tensor.
    """

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """What a checkpoint holds of one tensor: parts that together are the whole, which has that shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def saved_tensors(path: Path) -> dict[str, SavedTensor]:
    """What a checkpoint holds, by name; its checksums must have been verified."""
    if (path / INDEX).is_file():
        index = load_json((path / INDEX).read_bytes())
        return {name: _saved_tensor(entry) for name, entry in index.items()}
    with TensorFile(path / TENSORS) as file:
        shapes = file.shapes()
    return {
        name: SavedTensor(dtype, shape, (Part(TENSORS, (0,) * len(shape), shape),))
        for name, (dtype, shape) in shapes.items()
    }


def _saved_tensor(entry: dict[str, Any]) -> SavedTensor:
    parts = tuple(Part(file, tuple(offsets), tuple(shape)) for file, offsets, shape in entry["parts"])
    return SavedTensor(NAMED[entry["dtype"]], tuple(entry["shape"]), parts)


def load_whole(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a checkpoint, put together from their parts, on the CPU; the checksums must have been verified.

    ``names`` says which; ``None`` is all, in the order of the checkpoint.
    """
    saved = saved_tensors(path)
    wanted = {name: saved[name] for name in (saved if names is None else names)}
    tensors = {name: torch.empty(of.shape, dtype=of.dtype) for name, of in wanted.items()}
    by_file: dict[str, list[tuple[str, Part]]] = {}
    for name, of in wanted.items():
        for part in of.parts:
            by_file.setdefault(part.file, []).append((name, part))
    for file_name, held in by_file.items():
        with TensorFile(path / file_name) as file:
            for name, part in held:
                tensors[name][part.slices] = file.read(name)
    return tensors
