"""Safetensors files, written as they go to the disk and read by parts.

The library's own ``save_file`` holds Python's lock until it is done, so that a training step beside it would stand still. This
writer gives the lock back for every block, computes the checksum of what it means to write on the way, and leaves the
errors of the operating system as they are. A file says in its metadata which part of each tensor it holds, in the words
of ``torch.distributed.checkpoint.HuggingFaceStorageReader``, which therefore reads it too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from narrowgauge.checkpoints.manifest import FileRecord

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls each dtype that a checkpoint may hold."""
NAMED = {name: dtype for dtype, name in DTYPES.items()}
BLOCK = 1 << 22
"""Bytes that are written and checked at a time."""
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
    """:func:`write_tensors` of tensors that are made when they are written, so that one is in memory at a time.

    Args:
        path: a file that does not exist.
        shapes: dtype and shape of each tensor.
        tensor_of: makes it.
        offsets: as there.
    """
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
    """A safetensors file, open for reading by parts; a context manager.

    Args:
        path: the file.
    """

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
