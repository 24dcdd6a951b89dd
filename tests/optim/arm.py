"""Kernels built for aarch64, called in the place of this processor's: qemu runs them.

A call copies the memory that its table names into a file, which ``run.cpp`` maps at one address, and
copies it back. So the proof at first use asks an ARM kernel for the bits of the definition.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.numerics.exact_sums import WORDS
from narrowgauge.optim import step_cpp
from narrowgauge.optim.planes import BLOCK
from narrowgauge.optim.table import SIZES
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support import cpp

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
ARENA = 0x100000000000
LINE = 64
"""Bytes of a cache line."""
FUNCTIONS = ("step", "squares")
GRADIENT_BYTES = (2, 2, 4)
"""By the table's number of a format."""
Bytes = np.ndarray[Any, Any]


@lru_cache(None)
def program(text: str) -> Path:
    """Return a static program of the kernels, a text and ``run.cpp``."""
    runner = Path(__file__).with_name("run.cpp").read_text(encoding="utf-8")
    source = step_cpp.joined_files() + text + runner
    flags = [flag for flag in cpp._FLAGS if flag not in ("-shared", "-fPIC")]
    path = Path(tempfile.mkdtemp(prefix="arm-")) / "run"
    command = [COMPILER, *flags, "-static", "-o", str(path), "-x", "c++", "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def memory_at(address: int, size: int) -> Bytes:
    if not size:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))


def array_at(address: int, kind: Any, count: int) -> Bytes:
    view: Bytes = memory_at(address, count * np.dtype(kind).itemsize).view(kind)
    return view


class Arena:
    """Hold memory that a call reads and writes, each piece at the same place of its cache line."""

    def __init__(self) -> None:
        self.size = 2 * LINE
        self.pieces: list[tuple[int, Bytes]] = []

    def put(self, memory: Bytes, address: int = 0) -> int:
        """Return the address there of a copy of some memory."""
        start = -(-self.size // LINE) * LINE + LINE + address % LINE
        self.size = start + memory.nbytes
        self.pieces.append((start, memory.view(np.uint8).reshape(-1)))
        return ARENA + start

    def run(self, path: Path, name: str, *arguments: int) -> None:
        """Run a function of a program, and copy what it wrote. It may write into pieces alone."""
        image = np.zeros(self.size + LINE, np.uint8)
        header = [FUNCTIONS.index(name), *arguments]
        image[: 8 * len(header)].view(np.uint64)[:] = header
        is_free = np.ones(len(image), bool)
        is_free[:LINE] = False
        for start, memory in self.pieces:
            image[start : start + memory.nbytes] = memory
            is_free[start : start + memory.nbytes] = False
        with tempfile.NamedTemporaryFile() as file:
            image.tofile(file.name)
            subprocess.run([EMULATOR, str(path), file.name], check=True)
            after = np.fromfile(file.name, np.uint8)
        assert not after[is_free].any(), f"{name} wrote outside of its memory"
        for start, memory in self.pieces:
            memory[:] = after[start : start + memory.nbytes]

    def put_table(
        self, pointers: Sequence[int], num_addresses: int, sizes: Callable[..., list[int]]
    ) -> tuple[list[int], int]:
        """Copy a table, its programs and its tensors. Return the new pointers, and the largest row
        of numbers.

        Args:
            pointers: of the table and the programs, and how many these are.
            sizes: ``(format, blocks, elements) -> bytes`` of each address of a tensor.
        """
        table, tiles, count = pointers
        width = num_addresses + len(SIZES)
        programs = array_at(tiles, np.int32, count)
        rows = array_at(table, np.int64, (int(programs.max()) + 1) * width)
        rows = rows.reshape(-1, width).copy()
        largest = 0
        for row in rows:
            x = dict(zip(SIZES, row[num_addresses:].tolist(), strict=True))
            of_row = max(1, -(-x["columns"] // BLOCK))
            numel = x["count"] // of_row * x["columns"]
            largest = max(largest, x["number"])
            for column, size in enumerate(sizes(x["format"], x["count"], numel)):
                address = int(row[column])
                if address and numel:
                    row[column] = self.put(memory_at(address, size), address)
        return [self.put(rows), self.put(programs), count], largest


class StepLibrary:
    """A library with ``step``."""

    def __init__(self, rule: Any, storage: Storage) -> None:
        self.row = step_cpp.row_of(rule, storage)
        self.path = program(step_cpp.library_text(rule, storage))

    def sizes(self, format: int, blocks: int, numel: int) -> list[int]:
        row = self.row
        sizes = [row.bytes[0] * numel, GRADIENT_BYTES[format] * numel]
        sizes += [size * numel for size in row.bytes[1:]]
        return sizes + [4 * numel] * row.is_given + [4 * blocks] * row.num_scaled

    def step(
        self, table: int, tiles: int, count: int, numbers: int, control: int, threads: int
    ) -> None:
        arena = Arena()
        pointers, largest = arena.put_table([table, tiles, count], self.row.addresses, self.sizes)
        scalars = array_at(numbers, np.float32, (largest + 1) * (self.row.scalars + 1))
        pointers += [arena.put(scalars), arena.put(array_at(control, np.float32, 2))]
        arena.run(self.path, "step", *pointers, threads)


class NormLibrary:
    """A library with ``squares``."""

    def __init__(self) -> None:
        self.path = program("EXPORT_NORM\n")

    def squares(
        self, table: int, tiles: int, count: int, words: int, slots: int, threads: int
    ) -> None:
        arena = Arena()

        def sizes(format: int, blocks: int, numel: int) -> list[int]:
            return [0, GRADIENT_BYTES[format] * numel]

        pointers, largest = arena.put_table([table, tiles, count], 2, sizes)
        sums = array_at(words, np.int64, (largest + 1) * slots * WORDS)
        arena.run(self.path, "squares", *pointers, arena.put(sums), slots, threads)
