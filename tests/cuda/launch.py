"""Run a module that Inductor wrote for a GPU: its kernels as PTX on arrays, all else by PyTorch on a CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cuda.lowering import Lowered, TritonKernel
from cuda.machine import Array, Memory, Program


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel: for each address of tensors' memory how many instructions read and wrote each of its bytes."""

    kernel: TritonKernel
    blocks: int
    traffic: dict[int, tuple[Array, Array]]


class EmulatedKernel:
    """Stands for Inductor's launcher of a kernel."""

    def __init__(self, kernel: TritonKernel, launches: list[Launch]) -> None:
        self.kernel, self.launches, self.program = kernel, launches, Program.parse(kernel.ptx)

    def run(self, *arguments: Any, stream: object) -> None:
        """Launch the kernel; tensors are changed in place."""
        names = [name for name in self.kernel.signature if name not in self.kernel.config]
        values = dict(zip(names, arguments, strict=True))
        blocks = [
            -(-int(values.get(f"{axis}numel", 1)) // self.kernel.config.get(f"{axis.upper()}BLOCK", 1))
            for axis in "xyz"
        ]
        assert blocks[2] == 1, "a grid of three dimensions"
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in arguments if isinstance(x, Tensor)}
        contents = {place: torch.empty(0, dtype=torch.uint8).set_(storage) for place, storage in storages.items()}
        memory = Memory(4096 + sum(len(content) + 1024 for content in contents.values()))
        # Aligned as they are here, so that what is not aligned is noticed.
        addresses = {place: memory.put(content.numpy(), place % 16) for place, content in contents.items()}
        raw = []
        for name, value in values.items():
            if isinstance(value, Tensor):
                place = value.untyped_storage().data_ptr()
                raw.append(addresses[place] + value.data_ptr() - place)
            elif self.kernel.signature[name] != "constexpr":
                raw.append(int(np.float64(value).view(np.uint64)) if isinstance(value, float) else int(value))
        raw += [0] * (len(self.program.params) - len(raw))  # scratch memory that no kernel here asks for
        self.program.run(memory, raw, (blocks[0], blocks[1]), shared=max(self.kernel.shared, 1))
        traffic = {}
        for place, content in contents.items():
            span = slice(addresses[place], addresses[place] + len(content))
            traffic[place] = memory.reads[span], memory.writes[span]
            if memory.writes[span].any():
                content.copy_(torch.from_numpy(memory.get(addresses[place], len(content))))
        touched = sum(int(count.sum()) for pair in traffic.values() for count in pair)
        assert touched == int(memory.reads.sum() + memory.writes.sum()), "memory that belongs to no tensor is touched"
        self.launches.append(Launch(self.kernel, blocks[0] * blocks[1], traffic))


class _Nothing:
    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def emulated(lowered: Lowered) -> tuple[Callable[[list[Tensor]], list[Tensor]], list[Launch]]:
    """Return the module's function, for tensors of a CPU, and the list of its launches."""
    launches: list[Launch] = []

    class Compile:
        def triton(self, name: str, source: str, device_str: str) -> EmulatedKernel:
            return EmulatedKernel(lowered.kernels[name], launches)

        def wait(self, names: object) -> None: ...

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    text = lowered.text.replace("async_compile = AsyncCompile()", "async_compile = Compile()")
    text = text.replace("empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda", "")
    text = text.replace("torch.cuda._DeviceGuard(0)", "Nothing()").replace("torch.cuda.set_device(0)", "pass")
    text = re.sub(
        r"from torch\._C import _cuda_getCurrentRawStream as get_raw_stream", "get_raw_stream = Nothing", text
    )
    module = ModuleType("lowered")
    module.__dict__.update(Compile=Compile, empty_strided_cuda=empty, Nothing=_Nothing)
    exec(compile(text, "lowered", "exec"), module.__dict__)
    return lambda arguments: list(module.call(arguments)), launches
