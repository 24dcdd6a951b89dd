"""A module that Inductor wrote for a GPU, run here: its kernels on arrays, all else by PyTorch on a CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cuda.lowering import Lowered, TritonKernel
from cuda.machine import Array, Memory, Program
from narrowgauge._torch.many_tensors import ManyTensors, function_of


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel, and for each address of tensors' memory how many instructions read and wrote each of its bytes."""

    kernel: TritonKernel
    blocks: int
    traffic: dict[int, tuple[Array, Array]]


class EmulatedKernel:
    """Stands for Inductor's launcher of a kernel."""

    def __init__(self, kernel: TritonKernel, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches
        self.program = Program.parse(kernel.ptx)
        self.in_table: list[Tensor] = []
        """The tensors whose addresses stand in the table that it takes."""

    def run(self, *arguments: Any, stream: object) -> None:
        names = [name for name in self.kernel.signature if name not in self.kernel.config]
        given = dict(zip(names, arguments, strict=True))
        grid = [
            -(-int(given.get(f"{axis}numel", 1)) // self.kernel.config.get(f"{axis.upper()}BLOCK", 1)) for axis in "xyz"
        ]
        assert grid[2] == 1, "a grid of three dimensions"
        tensors = [*self.in_table, *(value for value in arguments if isinstance(value, Tensor))]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        contents = {place: torch.empty(0, dtype=torch.uint8).set_(storage) for place, storage in storages.items()}
        memory = Memory(4096 + sum(len(content) + 1024 for content in contents.values()))
        # Aligned as they are here, so that what is not aligned is noticed.
        addresses = {place: memory.put(content.numpy(), place % 16) for place, content in contents.items()}
        raw = []
        for name, value in given.items():
            if self.kernel.signature[name] == "constexpr":
                continue
            if isinstance(value, Tensor):
                raw.append(_moved(value.data_ptr(), contents, addresses))
            elif isinstance(value, float):
                raw.append(int(np.float64(value).view(np.uint64)))
            else:
                raw.append(int(value))
        if "table" in given:
            own = given["table"].numpy().reshape(-1)
            there = np.array([_moved(int(number), contents, addresses) for number in own])
            memory.bytes[raw[0] : raw[0] + own.nbytes] = there.view(np.uint8)
        raw += [0] * (len(self.program.params) - len(raw))  # scratch memory that no kernel here asks for
        self.program.run(memory, raw, (grid[0], grid[1]), shared=max(self.kernel.shared, 1))
        traffic = {}
        for place, content in contents.items():
            own = slice(addresses[place], addresses[place] + len(content))
            traffic[place] = memory.reads[own], memory.writes[own]
            if len(content) and memory.writes[own].any():
                content.copy_(torch.from_numpy(memory.get(addresses[place], len(content))))
        touched = sum(int(count.sum()) for pair in traffic.values() for count in pair)
        assert touched == int(memory.reads.sum() + memory.writes.sum()), "memory that belongs to no tensor is touched"
        self.launches.append(Launch(self.kernel, grid[0] * grid[1], traffic))


def _moved(number: int, contents: Mapping[int, Tensor], addresses: Mapping[int, int]) -> int:
    """The address there of memory here; a number that is no address is left as it is."""
    for place, content in contents.items():
        if place <= number < place + len(content):
            return addresses[place] + number - place
    return number


def _given(arguments: Sequence[Tensor], place: int, number: float | None = None) -> Any:
    """What a module's function takes: an argument, the length of one of its sides, or a number."""
    if place == -2:
        return torch.tensor(number, dtype=torch.float64)
    return number if place == -1 else arguments[place] if number is None else arguments[place].shape[int(number)]


class _Nothing:
    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def emulated(lowered: Lowered) -> tuple[Callable[[list[Tensor]], list[Tensor]], list[Launch]]:
    """The module's function, for tensors of a CPU, as ``load_ahead`` makes it for a GPU; and what it launches."""
    launched: list[EmulatedKernel] = []
    launches: list[Launch] = []
    module = ModuleType("lowered")

    class Compile:
        def triton(self, name: str, source: str, device_str: str) -> EmulatedKernel:
            launched.append(EmulatedKernel(lowered.kernels[name], launches))
            return launched[-1]

        def wait(self, names: object) -> None: ...

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    text = lowered.text.replace("async_compile = AsyncCompile()", "async_compile = Compile()")
    text = text.replace("empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda", "")
    text = text.replace("torch.cuda._DeviceGuard(0)", "Nothing()").replace("torch.cuda.set_device(0)", "pass")
    text = re.sub(
        r"from torch\._C import _cuda_getCurrentRawStream as get_raw_stream", "get_raw_stream = Nothing", text
    )
    module.__dict__.update(Compile=Compile, empty_strided_cuda=empty, Nothing=_Nothing)
    exec(compile(text, "lowered", "exec"), module.__dict__)

    if lowered.inputs:

        def call(arguments: list[Tensor]) -> list[Tensor]:
            given = [_given(arguments, *taken) for taken in lowered.inputs]
            return list(module.call(given))

        return call, launches
    run = function_of(module, lowered.text)
    if isinstance(run, ManyTensors):
        kernel, launch = next(iter(launched)), run.launch

        def noting(batch: Sequence[list[Tensor]]) -> list[Tensor]:
            kernel.in_table = [tensor for arguments in batch for tensor in arguments]
            return launch(batch)

        run.launch = noting  # type: ignore[method-assign]
    return run, launches
