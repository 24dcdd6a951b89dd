"""Kernels built for aarch64, called in the place of this processor's: qemu runs them.

A call copies the memory that its table names into a file, which ``run.cpp`` maps at one address, and
copies it back. So the proof at first use asks an ARM kernel for the bits of the definition.
"""

import subprocess
import tempfile
from ctypes import memmove, string_at
from pathlib import Path

import numpy as np

from narrowgauge.numerics.exact_sums import WORDS
from narrowgauge.optim.step import step_cpp
from narrowgauge.optim.step.bit_layout import BLOCK
from narrowgauge.optim.step.launch import SIZES
from narrowgauge.torch_support import cpp

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
ARENA = 1 << 44
GRADIENT_BYTES = (2, 2, 4)  # by the table's number of a format


class Library:
    """The functions of a text: of a step with the constants ``row``, or of the norm."""

    def __init__(self, text: str, row: step_cpp.KernelRow) -> None:
        self.row = row
        folder = tempfile.mkdtemp(prefix="arm-")
        self.program, self.memory = f"{folder}/run", Path(folder, "memory")
        source = step_cpp.joined_files() + text + Path(__file__).with_name("run.cpp").read_text()
        flags = set(cpp._FLAGS) - {"-shared"}
        command = [COMPILER, *flags, "-static", "-o", self.program, "-x", "c++", "-"]
        subprocess.run(command, input=source, text=True, check=True)

    def step(self, *arguments: int) -> None:
        *pointers, numbers, control, _ = arguments
        self.call(0, *pointers, others={numbers: 4 * (self.row.scalars + 1), control: 8})

    def squares(self, *arguments: int) -> None:
        *pointers, words, slots, _ = arguments
        self.call(slots, *pointers, others={words: 8 * slots * WORDS})

    def call(self, slots: int, table: int, tiles: int, count: int, others: dict[int, int]) -> None:
        """Copy the table, the programs, the tensors and other memory, and run the function."""
        image = bytearray(64)
        pieces = []

        def put(address: int, size: int) -> int:
            start = (len(image) | 63) + 65  # behind a gap
            image.extend(bytes(start - len(image)) + string_at(address, size))
            pieces.append((address, slice(start, start + size)))
            return ARENA + start

        columns = np.dtype(
            [("addresses", np.int64, self.row.addresses), *[(name, np.int64) for name in SIZES]]
        )
        num_rows = np.frombuffer(string_at(tiles, 4 * count), np.int32)[-1] + 1
        rows = np.frombuffer(string_at(table, num_rows * columns.itemsize), columns).copy()
        for x in rows:
            numel = x["count"] // max(1, -(-x["columns"] // BLOCK)) * x["columns"]
            sizes = [numel * size for size in self.row.bytes]
            sizes.insert(1, numel * GRADIENT_BYTES[x["format"]])
            sizes += [4 * numel] * self.row.is_given + [4 * x["count"]] * self.row.num_scaled
            for place, address in enumerate(x["addresses"].tolist()):
                if address:
                    x["addresses"][place] = put(address, int(sizes[place]))
        header = [slots, put(rows.ctypes.data, rows.nbytes), put(tiles, 4 * count), count]
        header += map(put, others, others.values())
        image[: 8 * len(header)] = np.array(header).tobytes()
        self.memory.write_bytes(image)
        subprocess.run([EMULATOR, self.program, self.memory], check=True)
        after = self.memory.read_bytes()
        for address, place in pieces:
            image[place] = part = after[place]
            memmove(address, part, len(part))
        assert image == after, "a kernel wrote outside of its memory"
