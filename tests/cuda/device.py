"""A GPU that is not there: what PyTorch's compiler and Triton ask of one, answered from a table.

For a process of its own (``lowering.py``): PyTorch believes from then on that it has CUDA. Fake tensors alone may be on it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True)
class Chip:
    """What CUDA reports of a device.

    Args:
        threads: of a multiprocessor, at most.

    Source: NVIDIA's data sheet of the H100, and the tables of compute capabilities in its CUDA programming guide.
    """

    name: str
    major: int
    minor: int
    multiprocessors: int
    shared_memory: int
    level2: int
    threads: int = 2048

    @property
    def capability(self) -> int:
        return 10 * self.major + self.minor


CHIP = Chip("NVIDIA H100 80GB HBM3", 9, 0, 132, 228 << 10, 50 << 20)

GUARD = """
// A device guard that does nothing lets a PyTorch without CUDA index fake tensors of CUDA.
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>) }
"""


def load_guard(folder: Path) -> None:
    """Compile the guard into a folder, unless it is there, and load it into this process."""
    digest = hashlib.sha256(f"{GUARD} {torch.__version__}".encode()).hexdigest()[:16]
    library = folder / f"guard-{digest}.so"
    if not library.exists():
        root = Path(torch.__file__).parent
        made = library.with_suffix(f".{os.getpid()}")
        flags = [
            "-x",
            "c++",
            "-",
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{root / 'include'}",
            f"-L{root / 'lib'}",
            "-lc10",
        ]
        command = [os.environ.get("CXX") or shutil.which("g++") or "clang++", *flags, "-o", str(made)]
        subprocess.run(command, input=GUARD, text=True, check=True, capture_output=True)
        made.replace(library)
    ctypes.CDLL(str(library))


def pretend(chip: Chip) -> None:
    """Let this process believe that its only GPU is this chip."""
    properties = SimpleNamespace(
        name=chip.name,
        major=chip.major,
        minor=chip.minor,
        multi_processor_count=chip.multiprocessors,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=chip.shared_memory - (1 << 10),
        shared_memory_per_multiprocessor=chip.shared_memory,
        L2_cache_size=chip.level2,
        total_memory=80 << 30,
        warp_size=32,
        max_threads_per_multi_processor=chip.threads,
        max_threads_per_block=1024,
        regs_per_multiprocessor=1 << 16,
        gcnArchName="",
        uuid="GPU-0",
        is_integrated=0,
    )
    _answer(
        torch.cuda,
        get_device_properties=properties,
        get_device_capability=(chip.major, chip.minor),
        get_device_name=chip.name,
        current_device=0,
        device_count=1,
        is_available=True,
        is_initialized=True,
        init=None,
        set_device=None,
        synchronize=None,
        mem_get_info=(70 << 30, 80 << 30),
        is_bf16_supported=True,
        is_current_stream_capturing=False,
        get_rng_state=torch.zeros(16, dtype=torch.uint8),
        set_rng_state=None,
        _lazy_init=None,
        _exchange_device=0,
        _maybe_exchange_device=0,
    )
    _answer(
        torch._C,
        _cuda_getDevice=0,
        _cuda_setDevice=None,
        _cuda_exchangeDevice=0,
        _cuda_maybeExchangeDevice=0,
        _ensureCUDADeviceGuardSet=None,
    )
    torch.version.cuda = "12.8"
    _pretend_to_inductor(chip, properties)
    _pretend_to_triton(chip)


def _answer(place: Any, **answers: Any) -> None:
    for name, value in answers.items():
        setattr(place, name, lambda *_, value=value, **__: value)


def _pretend_to_inductor(chip: Chip, properties: object) -> None:
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses.fake_tensor import FakeTensorMode

    def always(value: object) -> Any:
        return staticmethod(lambda *_, **__: value)

    for name, value in {
        "get_device_properties": properties,
        "is_available": True,
        "device_count": 1,
        "get_compute_capability": chip.capability,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "get_raw_stream": 0,
    }.items():
        setattr(CudaInterface, name, always(value))
    CudaInterface.Worker.get_device_properties = always(properties)
    CudaInterface.Worker.current_device = always(0)
    # A tensor of numbers is made on the CPU and then moved.
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    triton_helpers.set_driver_to_gpu = lambda: None


def _pretend_to_triton(chip: Chip) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    target = GPUTarget("cuda", chip.capability, 32)
    answers = {
        "get_current_target": target,
        "get_active_torch_device": torch.device("cuda", 0),
        "get_current_device": 0,
        "get_current_stream": 0,
        "get_benchmarker": None,
    }
    driver.set_active(SimpleNamespace(**{name: lambda *_, value=value: value for name, value in answers.items()}))
