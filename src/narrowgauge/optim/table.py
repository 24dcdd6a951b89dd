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
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.optim import step_cpp
from narrowgauge.optim.kernel import Numbers
from narrowgauge.optim.planes import BLOCK
from narrowgauge.optim.rules.matrix import AnyRule
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.step_cpp import row_of
from narrowgauge.spec.storages import Storage
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

Batch = Mapping[Numbers, Sequence[LocalState]]
"""The numbers of a step, and the states that it steps with them."""


class Programs:
    """Hold the table of some tensors on one device, and the tensor of each program.

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
        self._forms: list[tuple[int, int]] = []

    def lay_out(self, forms: Sequence[tuple[int, int]], num_numbers: int = 0) -> None:
        """Lay out the memory for tensors of rows and columns. Without scales a tensor is one row."""
        if forms == self._forms and num_numbers == len(self.numbers):
            return
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


class Table:
    """Step tensors of one (rule, storage) that has a kernel, on one device."""

    def __init__(self, rule: AnyRule, storage: Storage, device: torch.device) -> None:
        self.storage = storage
        self.row = row_of(rule, storage)
        library = partial(step_cpp.functions, rule, storage)
        self.programs = Programs(device, library, self.row.addresses, self.row.scalars + 1)

    def step(self, batch: Batch, control: Tensor) -> None:
        """Step states in place, which have their gradients.

        ``control`` holds the scalars of ``CONTROL``, float32 ``[2]`` on the device.
        """
        programs = self.programs
        states = list(chain.from_iterable(batch.values()))
        if self.storage.scaled:
            forms = [state.form for state in states]
        else:
            forms = [(1, state.parameter.numel()) for state in states]
        programs.lay_out(forms, len(batch))
        rows = programs.rows
        copies = []
        for column, tensors in enumerate(self._streams(states)):
            for place, is_dense in enumerate([tensor.is_contiguous() for tensor in tensors]):
                if not is_dense:
                    tensor = tensors[place]
                    tensors[place] = tensor.contiguous()
                    copies.append((column, tensor, tensors[place]))
            rows["addresses"][:, column] = [tensor.data_ptr() for tensor in tensors]
        rows["format"] = [FORMATS[state.gradient.dtype] for state in states]
        rows["number"] = np.repeat(np.arange(len(batch)), [len(x) for x in batch.values()])
        for row, numbers in zip(programs.numbers, batch, strict=True):
            row[:-1] = list(map(float, numbers.scalars))
            row[-1:].view(np.int32)[0] = numbers.key
        scalars = programs.send(self.row.num_scaled)
        programs.call("step", scalars, control, row=self.row)
        for column, tensor, memory in copies:
            if column != 1:  # a gradient is read
                tensor.data.copy_(memory)  # which raises no version
        # Autograd notices a weight that was written between forward and backward pass.
        torch.autograd.graph.increment_version([state.parameter for state in states])

    def _streams(self, states: Sequence[LocalState]) -> list[list[Tensor]]:
        """Return the tensors of each stream of the states, in the order of the table."""
        streams = [[state.parameter for state in states], [state.gradient for state in states]]
        for plane in states[0].planes:
            streams.append([state.planes[plane] for state in states])
        if self.row.is_given:
            streams.append([state.change for state in states])
        for name in self.storage.scaled:
            streams.append([state.bounds[name] for state in states])
        return streams
