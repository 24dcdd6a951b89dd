"""A user's own module: the memory and the operations of a step, counted on fake tensors, which have
no memory. Ranks divide the state.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from narrowgauge.errors import DataError
from narrowgauge.planner.ask import shares_of
from narrowgauge.planner.memory import COMMUNICATION, CONTEXT, FRAGMENTATION
from narrowgauge.spec.chips import Chip, read_chip
from narrowgauge.spec.storages import STORAGES

_FLASH = "_scaled_dot_product_flash_attention"


class LiveBytes(TorchDispatchMode):
    """Count the live bytes of storages that operations make, gradients of parameters included.

    ``peak`` is the most of all at once.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {p.untyped_storage()._cdata: 0 for p in parameters}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


@dataclass(frozen=True)
class ModulePlan:
    """Hold the plan of a module: the batch is the step of each chip, and all chips share the state.

    Args:
        num_parameters, trained_parameters: of the module.
        state_bytes: of weights and optimizer states on a chip.
        step_bytes: of activations and gradients at their peak.
        operations: of a step on a chip.
    """

    chip: Chip
    chips: int
    num_parameters: int
    trained_parameters: int
    state_bytes: float
    step_bytes: float
    operations: float

    @property
    def peak_bytes(self) -> float:
        """Return the bytes of all memory of a chip."""
        outside = CONTEXT + COMMUNICATION * (self.chips > 1)
        return self.state_bytes + (1 + FRAGMENTATION) * self.step_bytes + outside

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.chip.memory_bytes

    @property
    def seconds(self) -> float:
        """Return the time of a step, at the chip's usual share of its peak."""
        return float(self.operations / self.chip.peak_flops / shares_of(self.chip)["linear"])

    def __str__(self) -> str:
        return (
            f"{self.num_parameters:,} parameters on {self.chips} × {self.chip.name}: "
            f"{self.peak_bytes / 1e9:.1f} GB a chip ({self.state_bytes / 1e9:.1f} state, "
            f"{self.step_bytes / 1e9:.1f} step), {'fits' if self.fits else 'does not fit'}; "
            f"{self.operations / 1e12:.3g} TFLOP and {self.seconds:.3g} s a step"
        )


def plan_module(
    module: nn.Module,
    *,
    batch: Any,
    chip: str,
    chips: int = 1,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    storage: str = "float32",
) -> ModulePlan:
    """Plan a module over ``chips`` ranks of FSDP2. It is not called: a copy of it is, on fake tensors.

    Args:
        batch: of each chip: a tensor, a tuple of arguments or a mapping of them.
        loss: ``loss(module, batch)``; None for the output's ``loss``, or the sum of the first output.
        storage: of ``narrowgauge show storages``.
    Raises:
        DataError: the batch is empty, or a step on fake tensors fails.
    """
    tensors = [value for value in tree_leaves(batch) if isinstance(value, Tensor)]
    if not tensors or not tensors[0].numel():
        raise DataError(
            f"Cannot plan {type(module).__name__} on an empty batch.",
            "Name a batch of at least one sample.",
        )
    if storage not in STORAGES:
        raise DataError(f"no storage is named {storage!r}.", "See narrowgauge show storages.")
    step_bytes, operations = _counted(module, batch, loss or _output)
    total = weights = trained = states = 0.0
    for parameter in module.parameters():
        width = parameter.element_size()
        total += parameter.numel()
        weights += parameter.numel() * width
        if parameter.requires_grad:
            trained += parameter.numel()
            states += parameter.numel() * max(0.0, STORAGES[storage].bytes_per_param - 2 * width)
    state = (weights + states) / chips
    return ModulePlan(
        read_chip(chip), chips, int(total), int(trained), state, step_bytes, operations
    )


def _counted(
    module: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]
) -> tuple[int, int]:
    """Return the bytes and the operations of a step on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with FakeCopyMode(mode):
            fake_module = copy.deepcopy(module)
        inputs = tree_map_only(Tensor, mode.from_tensor, batch)
        live = LiveBytes(list(fake_module.parameters()))
        flops = FlopCounterMode(display=False)
        for end in ("", "_backward"):  # the counter does not know fused attention on CPUs
            cpu = getattr(torch.ops.aten, f"{_FLASH}_for_cpu{end}")
            flops.flop_registry[cpu] = flops.flop_registry[getattr(torch.ops.aten, _FLASH + end)]
        try:
            with live, flops:
                output = loss(fake_module, inputs)  # a loop holds it until backward has run
                result = getattr(output, "loss", None)
                result = tree_leaves(output)[0] if result is None else result
                result.float().sum().backward()
        except Exception as error:  # modules raise all kinds of errors on tensors without values
            raise DataError(
                f"Cannot count a step of {type(module).__name__} on fake tensors: "
                f"{str(error).splitlines()[0]}.",
                "Plan its config.json, or count its state: narrowgauge show storages --params.",
            ) from error
    return live.peak, flops.get_total_flops()


def _output(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple) else module(batch)
