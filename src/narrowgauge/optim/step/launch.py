"""One call for the tensors of a param group that have one (rule, storage): the step on CPUs and GPUs.

The kernel is ``cpp/`` on CPUs (:mod:`narrowgauge.optim.step.step_cpp`), and
:mod:`narrowgauge.optim.step.step_triton` on GPUs. Weights, gradients and states are read where they are:

    table    int64 [tensors, width]     for each tensor its addresses and sizes
    numbers  float32 [scalars]          the rule's scalars and the seed
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
from narrowgauge.optim.step import step_cpp
from narrowgauge.optim.step.bit_layout import BLOCK
from narrowgauge.optim.step.state import LocalState
from narrowgauge.optim.step.step_definition import StepScalars
from narrowgauge.torch_support import triton
from narrowgauge.torch_support.proof import CPP, language_on
from narrowgauge.torch_support.torch_names import to_device

SIZES = ("extent", "count", "first", "format", "aligned", "number", "columns")
"""The table after the addresses.

The tensor has ``count`` blocks in rows of ``columns``, each program ``extent`` of them. Its
programs begin at ``first``. ``format`` is the gradient's (:data:`FORMATS`). The rows of an
``aligned`` tensor begin at addresses of whole vectors. ``number`` is that of its ranks in a
norm.
"""
FORMATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Numbers of gradients' formats."""
BLOCKS_ON_GPU = 4
"""Blocks of a program there."""
TRITON_MODULE = "narrowgauge.optim.step.step_triton"


class KernelLaunch:
    """Hold the rows of some tensors on one device, and the tensor of each program.

    Args:
        library: returns the kernels of a CPU. Those of a GPU are a module.
        forms: the rows and columns of each tensor. Without scales it is one row.
        num_bounds: the last addresses, which are those of bounds.

    Attributes:
        rows: on the host, NumPy's.
        tiles: on the device.
    """

    def __init__(
        self, device: torch.device, library: Callable[[], CDLL], num_addresses: int, shapes: Sequence[tuple[int, int]],
        num_bounds: int = 0,
    ) -> None:  # fmt: skip
        self.device = device
        self.is_cpp = language_on(device) == CPP
        self.num_whole = num_addresses - num_bounds
        if self.is_cpp:
            self.kernels: Any = library()
        else:
            self.kernels = triton.load(TRITON_MODULE, device.type == "cpu")
        addresses = "addresses", np.int64, (num_addresses,)
        self.rows: Any = np.zeros(len(shapes), [addresses, *[(name, np.int64) for name in SIZES]])
        num_rows, columns = np.array(shapes, np.int64).reshape(-1, 2).T
        counts = num_rows * -(-columns // BLOCK)
        extents = np.full_like(counts, BLOCKS_ON_GPU)
        if self.is_cpp:
            extents = np.maximum(1, step_cpp.TILE // columns.clip(1, BLOCK))
        programs = -(-counts // extents)
        self.rows["count"] = counts
        self.rows["extent"] = extents
        self.rows["columns"] = columns
        self.rows["first"] = np.cumsum(programs) - programs
        tensor_of_program = np.repeat(np.arange(len(shapes), dtype=np.int32), programs)
        self.tiles = to_device(torch.from_numpy(tensor_of_program), device)

    def call(self, name: str, *arguments: Any, **constants: Any) -> None:
        """Run a kernel over all programs, with its arguments after the table and the programs, and
        on a GPU its constants. Tensors of the host are copied to a GPU.
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
        is_whole = (self.rows["addresses"][:, : self.num_whole] % 16 == 0).all(1)
        is_one_row = self.rows["count"] * BLOCK < self.rows["columns"] + BLOCK
        self.rows["aligned"] = is_whole & (is_one_row | (self.rows["columns"] % 16 == 0))
        on_device = [torch.from_numpy(self.rows.view(np.int64)), self.tiles, *arguments]
        for place, x in enumerate(on_device):
            if isinstance(x, Tensor) and x.device != self.device:
                on_device[place] = to_device(x, self.device)
        with torch.cuda.device_of(self.tiles):
            function[(len(self.tiles),)](*on_device, **constants, **triton.LAUNCH)


class Batch:
    """Step the states of one kernel that share the numbers of a step: those of a param group that have
    taken as many steps.

    Attributes:
        place: of the param group.
        num_steps: that the states have taken.
        states: in a step that has checked them.
        owners: the parameters that have elements on this rank.
        key: what a sample of them depends on.
        forms: rows and columns of each state.
        index: where its streams are among the tensors of a step, int64 ``[states, streams]``, in the
            order of the table.
        is_dense: whether a kernel reads and writes them where they are.
        how: the language that steps them, or why the definition does.
        table: of a kernel; ``None`` without one.
        numbers, tensors: of a step that is taken: all its tensors.
    """

    def __init__(self, place: int, states: Sequence[LocalState]) -> None:
        self.kernel = states[0].kernel
        self.device = states[0].parameter.device
        self.place = place
        self.num_steps = states[0].step
        self.states = states
        self.owners = [state.owner for state in states if state.parameter.numel()]
        self.forms = [state.row_shape for state in states]
        self.key = self.kernel, self.device, *map(id, self.owners), *self.forms
        streams = [state.streams() for state in states]
        self.index = np.array([[state.place] for state in states]) + np.arange(len(streams[0]))
        self.is_dense = all(tensor.is_contiguous() for part in streams for tensor in part)
        self.how = ""
        self.table: KernelLaunch | None = None
        self.numbers: Any = None
        self.tensors: Sequence[Tensor] = ()

    def lay_out(self) -> None:
        """Make the table of the kernel."""
        row = step_cpp.row_of(self.kernel.rule, self.kernel.storage)
        shapes = self.forms
        if not row.num_scaled:
            shapes = [(1, rows * columns) for rows, columns in shapes]
        library = partial(step_cpp.functions, self.kernel.rule, self.kernel.storage)
        self.table = KernelLaunch(self.device, library, row.addresses, shapes, row.num_scaled)
        self.table.rows["format"] = [FORMATS[state.gradient.dtype] for state in self.states]

    def prepare(self, group: Mapping[str, Any], control: Tensor) -> None:
        """Compute the numbers of a step from the options of the param group."""
        number = self.num_steps + 1
        scalars = self.kernel.rule.prepare(group, number)
        self.numbers = StepScalars(self.kernel, control, scalars, step_seed(group["seed"], number))

    def versions(self) -> list[int]:
        """Return how often other code has written into each tensor of the states: a step raises none."""
        versions = []
        for place in self.index[:, 2:].ravel().tolist():
            if not self.tensors[place].is_inference():
                versions.append(self.tensors[place]._version)
        return versions

    def read(self, tensors: Sequence[Tensor], addresses: Any) -> None:
        """Take the tensors of a step, and where they lie."""
        self.tensors = tensors
        if self.table is not None:
            self.table.rows["addresses"] = addresses[self.index]

    def run(self) -> None:
        """Step all by the kernel."""
        table: Any = self.table
        copies = []
        if not self.is_dense:
            for place, number in np.ndenumerate(self.index):
                tensor = self.tensors[number]
                copies.append((tensor, tensor.contiguous()))
                table.rows["addresses"][place] = copies[-1][1].data_ptr()
        row = step_cpp.row_of(self.kernel.rule, self.kernel.storage)
        table.call("step", self.numbers.on_host, self.numbers.control, row=row)
        for tensor, copy in copies:
            tensor.data.copy_(copy)  # which raises no version
        # Autograd notices a weight that was written between forward and backward pass.
        weights = [self.tensors[place] for place in self.index[:, 0].tolist()]
        torch.autograd.graph.increment_version(weights)


def streams_of(states: Sequence[LocalState]) -> list[Tensor]:
    """Return the streams of states, joined. Set where those of each begin."""
    streams: list[Tensor] = []
    for state in states:
        state.place = len(streams)
        streams += state.streams()
    return streams


def addresses_of(tensors: Sequence[Tensor]) -> Any:
    """Return where tensors lie, int64."""
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
