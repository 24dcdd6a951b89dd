"""What the host asks of a GPU in steps of an optimizer: launches, copies and waits, on a GPU that is not there.

``python -m cuda.host FOLDER CHIP CASES`` steps optimizers over fake tensors of CUDA, of the shapes of a Llama, and prints as JSON
what the last step of each gives the device, and what it waits for. A fake tensor has no value, so a step that reads one fails.
Kernels are not compiled: each counts as one launch, and what it returns has the shape that its definition gives it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from cuda import device
from narrowgauge import AdamW
from narrowgauge._torch import transfers
from narrowgauge._torch.many_tensors import ManyTensors
from narrowgauge.optim import accumulation, clip, kernel, row_bounds
from narrowgauge.optim.compilation import Definition

HIDDEN, INNER, VOCABULARY, KEYS = 2048, 5632, 32000, 256
"""Of TinyLlama 1.1B, which has 22 layers."""
NO_LAUNCH = ("aten::empty", "aten::detach", "aten::alias", "aten::lift_fresh", "aten::set_", "prim::")
NUM_STEPS = 3


def shapes(layers: int) -> Iterator[tuple[int, ...]]:
    yield VOCABULARY, HIDDEN
    for _ in range(layers):
        yield from (
            (HIDDEN, HIDDEN),
            (KEYS, HIDDEN),
            (KEYS, HIDDEN),
            (HIDDEN, HIDDEN),
            (INNER, HIDDEN),
            (INNER, HIDDEN),
        )
        yield from ((HIDDEN, INNER), (HIDDEN,), (HIDDEN,))
    yield from ((HIDDEN,), (VOCABULARY, HIDDEN))


class Trace(TorchDispatchMode):
    """Notes each operation that a GPU is given, and each for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        if "cuda" not in devices or func.is_view or name.startswith(NO_LAUNCH):
            return result
        self.given.append(name)
        if "cpu" in devices and name in ("aten::_to_copy", "aten::copy_"):
            blocks = not (kwargs or {}).get(
                "non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False
            )
            self.waits += [name] * blocks
        return result


class Kernel(ManyTensors):
    """Stands for a compiled function."""

    def __init__(self, name: str, trace: Trace, fake: FakeTensorMode) -> None:
        self.name, self.trace, self.fake = name, trace, fake
        self.define: Callable[[], Definition] | None = None

    def __call__(self, arguments: list[Tensor]) -> list[Tensor]:
        self.trace.given.append(f"kernel {self.name}")
        assert self.define is not None
        with _disable_current_modes(), self.fake:
            return [self.define().function(*arguments)]

    def each(self, batch: Iterable[list[Tensor]]) -> None:
        assert list(batch)
        self.trace.given.append(f"kernel {self.name}")


def stand_in(stack: ExitStack, trace: Trace) -> Callable[[FakeTensorMode], None]:
    """Put in the place of kernels, streams and memory what fake tensors can have; gives what tells kernels the fake mode."""
    places: dict[int, int] = {}
    modes: list[FakeTensorMode] = []

    def address(tensor: Tensor) -> int:
        own = tensor.untyped_storage()._cdata
        return places.setdefault(own, (1 + len(places)) << 34) + tensor.storage_offset() * tensor.element_size()

    @lru_cache
    def kernel_of(name: str) -> Kernel:
        return Kernel(name.split("Storage")[0], trace, modes[-1])

    def compiled(name: str, _: object, define: Callable[[], Definition]) -> Kernel:
        run = kernel_of(name)
        run.define = define
        return run

    def empty_like(tensor: Tensor, *, device: str, pin_memory: bool) -> Tensor:
        assert pin_memory
        return torch.empty_like(tensor, device=device)

    event, streams = (
        SimpleNamespace(record=lambda stream: None),
        SimpleNamespace(current_stream=lambda device: SimpleNamespace(stream_id=0)),
    )
    for module in (kernel, clip, accumulation, row_bounds):
        stack.enter_context(patch.object(module, "compiled", compiled))
    for place, name, answer in (
        (kernel.StepKernel, "compile_audit_elsewhere", lambda *_: None),
        (FakeTensor, "data_ptr", address),
        (Tensor, "pin_memory", lambda tensor: tensor),
        (transfers, "torch", SimpleNamespace(Event=lambda _: event, empty_like=empty_like, accelerator=streams)),
        (transfers.Reading, "item", lambda reading: 0.0),
    ):
        stack.enter_context(patch.object(place, name, answer, create=True))
    return modes.append


def traced(layers: int, options: dict[str, Any], waits: bool = False) -> dict[str, list[str]]:
    """The last step of an optimizer over a model of so many layers; as a planted fault, each copy ``waits``."""
    trace = Trace()
    with ExitStack() as stack:
        begin = stand_in(stack, trace)
        if waits:
            real = Tensor.to
            stack.enter_context(patch.object(Tensor, "to", lambda tensor, *to, **_: real(tensor, *to)))
        begin(stack.enter_context(FakeTensorMode()))
        params = [torch.nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device="cuda")) for s in shapes(layers)]
        optimizer = AdamW(params, lr=1e-3, compile=True, **options)
        for step in range(NUM_STEPS):
            for parameter in params:
                parameter.grad = torch.empty_like(parameter)
            trace.given.clear()
            with trace if step == NUM_STEPS - 1 else nullcontext():
                optimizer.step()
    return {"given": trace.given, "waits": trace.waits}


def main(traced: Callable[..., dict[str, Any]]) -> None:
    """Trace the cases of the command line and print what was given in each."""
    folder, chip, cases = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    device.load_guard(folder)
    device.pretend(device.CHIPS[chip])
    print(json.dumps([traced(**case) for case in cases]))


if __name__ == "__main__":
    main(traced)
