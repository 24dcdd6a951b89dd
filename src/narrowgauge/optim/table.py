"""One call for all tensors of a (rule, storage): the step on CPUs and GPUs.

The kernel is ``step.h`` on CPUs (:mod:`narrowgauge.optim.step_cpp`), and
:mod:`narrowgauge.optim.step_triton` on GPUs. Weights, gradients and states are read where they are:

    table    int64 [tensors, width]     for each tensor its addresses and sizes, and its row of numbers
    numbers  float32 [kinds, scalars]   the rule's scalars and the seed, for each param group and step count
    tiles    int32 [programs]           the tensor of each program; a tensor's programs follow one another
    records  float32 [rows, size]       the largest magnitudes of rows that ranks share

A GPU's table and numbers are one buffer, copied to the device once a step. A matrix rule has one
more address, of its float32 change: one launch averages gradients into it, and a later one writes
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import largest_over_ranks
from narrowgauge.optim import step_cpp
from narrowgauge.optim.kernel import Numbers
from narrowgauge.optim.rules.matrix import AnyRule
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.step_cpp import num_addresses, record_size
from narrowgauge.spec.storages import VISIBLE, Storage
from narrowgauge.torch_support import triton
from narrowgauge.torch_support.proof import CPP, language_on
from narrowgauge.torch_support.torch_names import send

SIZES = ("extent", "numel", "first", "count", "record", "wide", "aligned", "number")
"""The table after the addresses.

The tensor has ``numel`` elements, each program ``extent`` of them: a row that has scales. Its
``count`` programs begin at ``first``. Where rows are bounded before the step, their records begin
at ``record``, else it is -1. A ``wide`` gradient is float32, another one has the weight's format.
An ``aligned`` tensor has programs of whole vectors, at addresses of whole vectors. ``number`` is
the row of its scalars.
"""
PLACE = {name: place - len(SIZES) for place, name in enumerate(SIZES)}
"""The place of each size, from the end of a row of the table."""
TRITON_MODULE = "narrowgauge.optim.step_triton"


def elements_of_program(state: LocalState, device: torch.device) -> int:
    """Return how many elements a program steps: a row that has scales, else a part of the tensor."""
    if state.storage.scaled:
        return max(1, state.form[1])
    if language_on(device) == CPP:
        return step_cpp.TILE
    return int(triton.load(TRITON_MODULE, device.type == "cpu").BLOCK)


class Table:
    """Step tensors of one (rule, storage), not in float64, on one device.

    Its memory stays while tensors of the same sizes step.
    """

    def __init__(self, rule: AnyRule, storage: Storage, device: torch.device) -> None:
        self.rule = rule
        self.storage = storage
        self.device = device
        self._is_cpp = language_on(device) == CPP
        self._size = VISIBLE[storage.visible][0] // 8
        self._width = num_addresses(rule, storage) + len(SIZES)
        self._numbers = np.zeros((0, len(rule.scalars) + 1), np.float32)
        self._states: list[LocalState] = []
        self._shared: list[LocalState] = []
        self._forms: list[tuple[int, int]] = []
        self._copies: list[tuple[LocalState, Tensor, Tensor]] = []
        self._inputs: list[Tensor] = []
        self._constants: Any = None

    # ── on the host ───────────────────────────────────────────────────────────────────────────────

    def set(self, batch: Mapping[LocalState, Numbers]) -> None:
        """Set the states of the next step, which have their gradients."""
        places = {numbers: place for place, numbers in enumerate(dict.fromkeys(batch.values()))}
        self._states = list(batch)
        forms = [state.form for state in batch]
        if forms != self._forms or len(places) != len(self._numbers):
            self._forms = forms
            self._lay_out(len(places))
        self._set_inputs()
        self._rows[:, PLACE["number"]] = [places[numbers] for numbers in batch.values()]
        for row, numbers in zip(self._numbers, places, strict=True):
            row[:-1] = list(map(float, numbers.scalars))
            row[-1:].view(np.int32)[0] = numbers.key

    def _lay_out(self, num_numbers: int) -> None:
        """Lay out the memory for states of other sizes, and find their programs."""
        size = len(self._states) * self._width
        start = size + size % 2  # the numbers begin at 16 bytes
        num_floats = num_numbers * self._numbers.shape[1]
        self._memory = np.zeros(start + -(-num_floats // 2), np.int64)
        self._rows = self._memory[:size].reshape(-1, self._width)
        self._numbers = self._memory[start:].view(np.float32)[:num_floats].reshape(num_numbers, -1)
        for row, state in zip(self._rows, self._states, strict=True):
            extent = elements_of_program(state, self.device)
            numel = state.parameter.numel()
            row[PLACE["extent"]] = extent
            row[PLACE["numel"]] = numel
            row[PLACE["count"]] = -(-numel // extent)
        counts = self._rows[:, PLACE["count"]]
        self._rows[:, PLACE["first"]] = np.cumsum(counts) - counts
        programs = np.repeat(np.arange(len(self._states), dtype=np.int32), counts)
        self._unsent: Tensor | None = torch.from_numpy(programs)
        self._tiles = torch.empty_like(self._unsent, device=self.device)
        if self._is_cpp:
            self._tiles = self._unsent
        self._buffer: Tensor | None = None

    def _set_inputs(self) -> None:
        """Write the addresses of each state. What is not dense in the order of its planes is copied
        for the step.
        """
        self._copies = []
        self._inputs = []
        self._shared = [state for state in self._states if state.column_groups]
        self._num_records = 0
        addresses = []
        sizes = []
        for state in self._states:
            gradient = state.gradient
            if not state.is_dense(gradient):
                gradient = state.in_rows(gradient)
                self._inputs.append(gradient)
            memory = [self._written(state, state.parameter), gradient]
            memory += [self._written(state, plane) for plane in state.planes.values()]
            if state.kernel.is_matrix:
                memory.append(state.change)
            memory += state.bounds.values()
            addresses.append([tensor.data_ptr() for tensor in memory])
            is_wide = gradient.element_size() != self._size or self._size == 4
            record = -1
            if state in self._shared:
                record = self._num_records
                self._num_records += state.form[0]
            sizes.append((is_wide, record))
        end = self._width - len(SIZES)
        self._rows[:, :end] = np.array(addresses, np.int64)
        self._rows[:, [PLACE["wide"], PLACE["record"]]] = sizes
        end -= len(self.storage.scaled)
        if not self._is_cpp:
            are_whole = (self._rows[:, [PLACE["extent"], PLACE["numel"]]] % 16 == 0).all(1)
            self._rows[:, PLACE["aligned"]] = (self._rows[:, :end] % 16 == 0).all(1) & are_whole

    def _written(self, state: LocalState, tensor: Tensor) -> Tensor:
        """Return the memory that a step writes for a tensor, itself where it is dense."""
        if state.is_dense(tensor):
            return tensor
        memory = state.in_rows(tensor.detach())
        self._copies.append((state, tensor.detach(), memory))
        return memory

    # ── the launch ────────────────────────────────────────────────────────────────────────────────

    def send(self) -> None:
        """Copy the table and the numbers to a GPU, and the programs if they are new."""
        if self._is_cpp:
            return
        if self._unsent is not None:
            send(self._unsent, self._tiles)
            self._unsent = None
        send(torch.from_numpy(self._memory), self._on_device())

    def _on_device(self) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(len(self._memory), dtype=torch.int64, device=self.device)
        return self._buffer

    def launch(self, control: Tensor, *, averages: bool = False) -> None:
        """Step the states in place, with what was sent, or write the averages of a matrix rule into
        their changes.

        ``control`` holds the scalars of ``CONTROL``, float32 ``[2]`` on the device.
        """
        records = self._find_peaks(control) if self._shared else None
        self._call("average" if averages else "step", control, records)
        if not averages:
            for state, tensor, memory in self._copies:
                tensor.copy_(state.in_shape(memory))
            # Autograd notices a weight that was written between forward and backward pass.
            torch.autograd.graph.increment_version([state.parameter for state in self._states])
            # What a script removes is freed.
            self._states = []
            self._shared = []
        self._copies = []
        self._inputs = []

    def _find_peaks(self, control: Tensor) -> Tensor:
        """Return the records of shared rows: their largest magnitudes over all ranks, and their
        bounds.
        """
        size = record_size(self.rule, self.storage)
        records = torch.zeros(self._num_records, size, dtype=torch.float32, device=self.device)
        self._call("find_peaks", control, records)
        num_peaks = size - len(self.storage.scaled)
        parts = []
        bits = []
        groups = []
        start = 0
        for state in self._shared:
            part = records[start : start + state.form[0], :num_peaks]
            start += len(part)
            parts.append(part)
            bits.append(part.reshape(-1).view(torch.int32))  # in which a NaN is the largest
            groups.append(state.column_groups)
        for part, local_bits, joined in zip(
            parts, bits, largest_over_ranks(bits, groups), strict=True
        ):
            if joined is not local_bits:
                part.copy_(joined.view(torch.float32).view(part.shape))
        return records

    def _call(self, name: str, control: Tensor, records: Tensor | None) -> None:
        if self._is_cpp:
            step_cpp.functions(self.rule, self.storage)[name](
                self._rows.ctypes.data,
                self._tiles.data_ptr(),
                len(self._tiles),
                self._numbers.ctypes.data,
                control.data_ptr(),
                None if records is None else records.data_ptr(),
                torch.get_num_threads(),
            )
        elif len(self._tiles):
            module = triton.load(TRITON_MODULE, self.device.type == "cpu")
            if self._constants is None:
                self._constants = module.row_of(self.rule, self.storage)
            buffer = self._on_device()
            numbers = buffer[len(buffer) - -(-self._numbers.size // 2) :].view(torch.float32)
            # A kernel takes no missing tensor. It does not read this one.
            records = control if records is None else records
            with torch.cuda.device_of(control):
                getattr(module, name)[(len(self._tiles),)](
                    buffer, self._tiles, numbers, control, records,
                    row=self._constants, BLOCK=module.BLOCK, **triton.LAUNCH,
                )  # fmt: skip
