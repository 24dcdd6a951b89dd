"""One call for all tensors of a (rule, storage): the step on CPUs and GPUs.

The kernel is ``cpp/`` on CPUs (:mod:`narrowgauge.optim.step_cpp`), and
:mod:`narrowgauge.optim.step_triton` on GPUs. Weights, gradients and states are read where they are:

    table    int64 [tensors, width]     for each tensor its addresses and sizes, and its row of numbers
    numbers  float32 [kinds, scalars]   the rule's scalars and the seed, for each param group and step count
    tiles    int32 [programs]           the tensor of each program; a tensor's programs follow one another

A GPU's are copied to the device at each step. A matrix rule has one more address, of its float32
change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.hashing import step_seed
from narrowgauge.optim import step_cpp
from narrowgauge.optim.kernel import Kernel, Numbers
from narrowgauge.optim.planes import BLOCK
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.step_cpp import row_of
from narrowgauge.torch_support import triton
from narrowgauge.torch_support.proof import CPP, language_on
from narrowgauge.torch_support.torch_names import to_device

SIZES = ("extent", "count", "first", "format", "aligned", "number", "columns")
"""The table after the addresses.

The tensor has ``count`` blocks in rows of ``columns``, each program ``extent`` of them. Its
programs begin at ``first``. ``format`` is the gradient's (:data:`FORMATS`). The rows of an
``aligned`` tensor begin at addresses of whole vectors. ``number`` is the row of its scalars.
"""
FORMATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Numbers of gradients' formats."""
BLOCKS_ON_GPU = 4
"""Blocks of a program there."""
TRITON_MODULE = "narrowgauge.optim.step_triton"


class Table:
    """Hold the rows of some tensors on one device, and the tensor of each program.

    Its memory stays while tensors of the same sizes are read.

    Args:
        library: returns the kernels of a CPU. Those of a GPU are a module.

    Attributes:
        rows, numbers: on the host, NumPy's.
        tiles: on the device.
    """

    def __init__(
        self, device: torch.device, library: Callable[[], CDLL], num_addresses: int, num_scalars: int = 0
    ) -> None:  # fmt: skip
        self.device = device
        self.is_cpp = language_on(device) == CPP
        if self.is_cpp:
            self.kernels: Any = library()
        else:
            self.kernels = triton.load(TRITON_MODULE, device.type == "cpu")
        addresses = "addresses", np.int64, (num_addresses,)
        self.columns = np.dtype([addresses, *[(name, np.int64) for name in SIZES]])
        self.numbers = np.zeros((0, num_scalars), np.float32)
        self.rows: Any = np.zeros(0, self.columns)
        self._forms: list[tuple[int, int]] = []

    def lay_out(self, forms: Sequence[tuple[int, int]], num_numbers: int = 0) -> Any:
        """Lay out the rows for tensors of rows and columns. Without scales a tensor is one row."""
        if forms == self._forms and num_numbers == len(self.numbers):
            return self.rows
        self._forms = list(forms)
        self.rows = np.zeros(len(forms), self.columns)
        self.numbers = np.zeros((num_numbers, self.numbers.shape[1]), np.float32)
        num_rows, columns = np.array(forms, np.int64).reshape(-1, 2).T
        counts = num_rows * -(-columns // BLOCK)
        extents = np.full_like(counts, BLOCKS_ON_GPU)
        if self.is_cpp:
            extents = np.maximum(1, step_cpp.TILE // columns.clip(1, BLOCK))
        programs = -(-counts // extents)
        self.rows["count"] = counts
        self.rows["extent"] = extents
        self.rows["columns"] = columns
        self.rows["first"] = np.cumsum(programs) - programs
        tiles = np.repeat(np.arange(len(forms), dtype=np.int32), programs)
        self.tiles = to_device(torch.from_numpy(tiles), self.device)
        return self.rows

    def send(self, num_bounds: int = 0) -> Any:
        """Copy the table and the numbers to a GPU, and return the address of the numbers. The last
        addresses of the table are those of bounds.
        """
        if self.is_cpp:
            return self.numbers.ctypes.data
        addresses = self.rows["addresses"]
        is_whole = (addresses[:, : addresses.shape[1] - num_bounds] % 16 == 0).all(1)
        is_one_row = self.rows["count"] * BLOCK < self.rows["columns"] + BLOCK
        self.rows["aligned"] = is_whole & (is_one_row | (self.rows["columns"] % 16 == 0))
        self._table = to_device(torch.from_numpy(self.rows.view(np.int64)), self.device)
        return to_device(torch.from_numpy(self.numbers), self.device)

    def call(self, name: str, *arguments: Any, **constants: Any) -> None:
        """Run a kernel over all programs, with its arguments after the table and the programs, and
        on a GPU its constants.
        """
        if not len(self.tiles):
            return
        function = getattr(self.kernels, name)
        if self.is_cpp:
            pointers = [self.rows.ctypes.data, self.tiles.data_ptr(), len(self.tiles)]
            for x in arguments:
                pointers.append(x.data_ptr() if isinstance(x, Tensor) else x)
            function(*pointers, torch.get_num_threads())
            return
        with torch.cuda.device_of(self.tiles):
            function[(len(self.tiles),)](
                self._table, self.tiles, *arguments, **constants, **triton.LAUNCH
            )

    def step(
        self, kernel: Kernel, addresses: Any, formats: Any, numbers: Sequence[Numbers]
    ) -> None:
        """Run the step of a kernel over the tensors at addresses, ``[tensors, streams]``."""
        self.rows["addresses"] = addresses
        self.rows["format"] = formats
        for place, x in enumerate(numbers):
            self.numbers[place, :-1] = x.scalars
            self.numbers[place, -1:].view(np.int32)[0] = x.key
        row = row_of(kernel.rule, kernel.storage)
        self.call("step", self.send(row.num_scaled), numbers[0].control, row=row)


class Memory:
    """Say where tensors lie.

    Attributes:
        tensors: the local ones.
        addresses: int64. A tensor that is not dense lies in a copy, until :meth:`write_back`.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.addresses = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
        self._copies: list[tuple[Tensor, Tensor]] = []

    def copy_strided(self) -> None:
        """Copy tensors that are not dense."""
        for place, tensor in enumerate(self.tensors):
            if not tensor.is_contiguous():
                copy = tensor.contiguous()
                self.addresses[place] = copy.data_ptr()
                self._copies.append((tensor, copy))

    def write_back(self) -> None:
        """Copy what a step has written into the tensors that are not dense."""
        for tensor, copy in self._copies:
            tensor.data.copy_(copy)  # which raises no version


class Part:
    """Name the states of a batch that share the numbers of a step.

    Attributes:
        place: of their param group.
        step: the steps that they have taken.
        states: in a step that has checked them.
        rows: in the batch, of those with elements.
        owners: the parameters of these.
        numbers: of a step that is taken.
    """

    def __init__(self, place: int, step: int, states: Sequence[LocalState], first: int) -> None:
        self.place = place
        self.step = step
        self.states = states
        self.owners = []
        rows = []
        for row, state in enumerate(states, start=first):
            if state.parameter.numel():
                rows.append(row)
                self.owners.append(state.owner)
        self.rows = np.array(rows, np.int64)
        self.numbers: Any = None


class Batch:
    """Step the states of one kernel.

    Attributes:
        parts: of those that share numbers.
        index: where the streams of each state are in ``memory``, int64 ``[states, streams]``, in
            the order of the table.
        how: the language that steps them, or why the definition does.
        table: of a kernel; ``None`` without one.
    """

    def __init__(
        self, kernel: Kernel, members: Mapping[tuple[int, int], Sequence[LocalState]]
    ) -> None:
        self.kernel = kernel
        self.parts: list[Part] = []
        self.states: list[LocalState] = []
        for (place, step), states in members.items():
            self.parts.append(Part(place, step, states, len(self.states)))
            self.states += states
        self.forms = [state.form for state in self.states]
        self.how = ""
        self.table: Table | None = None
        self.memory: Any = None

    def locate(self) -> None:
        """Find the memory of the states, which have their gradients, or changes."""
        tensors = []
        for state in self.states:
            tensors += state.streams()
        self.formats = np.array([FORMATS[state.gradient.dtype] for state in self.states])
        self.memory = Memory(tensors)
        if self.table is not None:
            self.memory.copy_strided()
        self.index = np.arange(len(tensors)).reshape(len(self.states), -1)

    def lay_out(self, table: Table) -> None:
        """Lay out the rows of a kernel's table."""
        self.table = table
        forms = self.forms
        if not self.kernel.scaled:
            forms = [(1, rows * columns) for rows, columns in forms]
        rows = table.lay_out(forms, len(self.parts))
        counts = [len(part.states) for part in self.parts]
        rows["number"] = np.repeat(np.arange(len(counts)), counts)

    def prepare(self, groups: Sequence[Mapping[str, Any]], control: Tensor) -> None:
        """Compute the numbers of a step from the options of param groups."""
        for part in self.parts:
            group = groups[part.place]
            scalars = self.kernel.rule.prepare(group, part.step + 1)
            key = step_seed(group["seed"], part.step + 1)
            part.numbers = Numbers(self.kernel, control, scalars, key)

    def step(self) -> None:
        """Step all by the kernel."""
        table = self.table
        assert table is not None
        numbers = [part.numbers for part in self.parts]
        table.step(self.kernel, self.memory.addresses[self.index], self.formats, numbers)
        self.memory.write_back()
        # Autograd notices a weight that was written between forward and backward pass.
        weights = [self.memory.tensors[place] for place in self.index[:, 0].tolist()]
        torch.autograd.graph.increment_version(weights)

    def forget(self) -> None:
        """Drop what holds tensors. The next forward pass needs their memory."""
        self.states = []
        self.memory = None
        for part in self.parts:
            part.states = []


def table_of(kernel: Kernel, device: torch.device) -> Table:
    """Return an empty table of the step of a kernel."""
    row = row_of(kernel.rule, kernel.storage)
    library = partial(step_cpp.functions, kernel.rule, kernel.storage)
    return Table(device, library, row.addresses, row.scalars + 1)
