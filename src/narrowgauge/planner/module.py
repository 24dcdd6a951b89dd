"""A user's own module: the memory and the operations of a step, counted on fake tensors, which have
no memory. Ranks divide the state.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from narrowgauge.errors import DataError
from narrowgauge.planner.ask import shares_of
from narrowgauge.planner.memory import FRAGMENTATION, outside_bytes
from narrowgauge.spec.chips import Chip, get_chip
from narrowgauge.spec.notation import parse


class LiveBytes(TorchDispatchMode):
    """Count the live bytes of storages that operations make, gradients of parameters included.

    ``peak`` is the most of all at once.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, key: int, size: int) -> None:
        self.known.remove(key)
        self.live -= size


class ModulePlan(NamedTuple):
    """Hold the plan of a module: the batch is the step of each chip, and all chips share the state.

    ``state_bytes`` are of weights and optimizer states on a chip, ``step_bytes`` of activations and
    gradients at their peak, ``peak_bytes`` of all memory of a chip; ``operations`` and ``seconds``
    are of a step on a chip.
    """

    chip: Chip
    chips: int
    trained_parameters: int
    state_bytes: float
    step_bytes: float
    peak_bytes: float
    operations: int
    seconds: float

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.chip.memory_bytes

    def __str__(self) -> str:
        return (
            f"{self.trained_parameters:,} parameters train on {self.chips} × {self.chip.name}: "
            f"{self.peak_bytes / 1e9:.1f} GB a chip ({self.state_bytes / 1e9:.1f} state, "
            f"{self.step_bytes / 1e9:.1f} step), fits: {'yes' if self.fits else 'no'}; "
            f"{self.operations / 1e12:.3g} TFLOP and {self.seconds:.3g} s a step"
        )


def plan_module(
    module: nn.Module, *, batch: Any, chip: str, chips: int = 1, storage: str = "float32"
) -> ModulePlan:
    """Plan a module over ``chips`` ranks of FSDP2. It is not called: a copy of it is, on fake tensors.

    Args:
        batch: of each chip: a tensor, a tuple of arguments or a mapping of them. Backward begins at
            the output's ``loss``, or at the sum of the first output.
        storage: of ``narrowgauge show storages``.
    Raises:
        NarrowgaugeError: a step on fake tensors fails.
    """
    width = parse(f"bfloat16/{storage}").bytes_per_param
    step_bytes, operations = _counted(module, batch)
    trained = 0
    state = 0.0
    for parameter in module.parameters():
        size = parameter.element_size()
        state += parameter.numel() * size
        if parameter.requires_grad:
            trained += parameter.numel()
            state += parameter.numel() * max(0.0, width - 2 * size)
    state /= chips
    peak = state + (1 + FRAGMENTATION) * step_bytes + outside_bytes(chips)
    kind = get_chip(chip)
    seconds = operations / kind.peak_flops / shares_of(kind)["linear"]
    return ModulePlan(kind, chips, trained, state, step_bytes, peak, operations, seconds)


def _counted(module: nn.Module, batch: Any) -> tuple[int, int]:
    """Return the bytes and the operations of a step on fake tensors."""
    flops = FlopCounterMode(display=False)
    for end in ("", "_backward"):  # the counter does not know fused attention on CPUs
        flash = "_scaled_dot_product_flash_attention"
        cpu = getattr(torch.ops.aten, f"{flash}_for_cpu{end}")
        flops.flop_registry[cpu] = flops.flop_registry[getattr(torch.ops.aten, flash + end)]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            with FakeCopyMode(mode):
                fake_module = copy.deepcopy(module)
            inputs = tree_map_only(Tensor, mode.from_tensor, batch)
            live = LiveBytes(fake_module)
            with live, flops:
                if isinstance(inputs, dict):
                    output = fake_module(**inputs)
                else:
                    output = fake_module(*(inputs if isinstance(inputs, tuple) else (inputs,)))
                loss = getattr(output, "loss", None)
                loss = tree_leaves(output)[0] if loss is None else loss
                loss.float().sum().backward()  # a loop holds the output until then
    except Exception as error:  # modules raise all kinds of errors on tensors without values
        raise DataError(
            f"Cannot count a step of {type(module).__name__} on fake tensors: "
            f"{str(error).splitlines()[0]}.",
            "Plan its config.json, or count its state: narrowgauge show storages --params.",
        ) from error
    return live.peak, flops.get_total_flops()
