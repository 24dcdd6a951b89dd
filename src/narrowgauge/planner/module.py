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
    """Count the live bytes of storages that operations make.

    Attributes:
        peak: of all of them at once, gradients of parameters included.
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
        peak_bytes: of all memory of a chip.
        operations: of a step on a chip.
        seconds: of a step, at the chip's usual share.
    """

    chip: Chip
    chips: int
    num_parameters: int
    trained_parameters: int
    state_bytes: float
    step_bytes: float
    peak_bytes: float
    operations: float
    seconds: float

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.chip.memory_bytes

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
    chip: str | Chip,
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
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with FakeCopyMode(mode):
            fake_module = copy.deepcopy(module)
        inputs = tree_map_only(Tensor, mode.from_tensor, batch)
        live = LiveBytes(list(fake_module.parameters()))
        flops = FlopCounterMode(display=False)
        for end in ("", "_backward"):  # the counter does not know fused attention on CPUs
            cpu = getattr(torch.ops.aten, f"{_FLASH}_for_cpu{end}")
            gpu = getattr(torch.ops.aten, f"{_FLASH}{end}")
            flops.flop_registry[cpu] = flops.flop_registry[gpu]
        try:
            with live, flops:
                # A loop holds the output until backward has run.
                output = (loss or _output)(fake_module, inputs)
                _objective(output).backward()
        except Exception as error:  # modules raise all kinds of errors on tensors without values
            raise DataError(
                f"Cannot count a step of {type(module).__name__} on fake tensors: "
                f"{str(error).splitlines()[0]}.",
                "Plan its config.json, or count its state: narrowgauge show storages --params.",
            ) from error
    kind = chip if isinstance(chip, Chip) else read_chip(chip)
    trained = [p for p in module.parameters() if p.requires_grad]
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    count = sum(p.numel() for p in trained)
    row = STORAGES[storage]
    visible = sum(p.numel() * p.element_size() for p in trained)
    states = max(0.0, row.bytes_per_param * count - 2 * visible)
    state = (weights + states) / chips
    overhead = CONTEXT + COMMUNICATION * (chips > 1) + FRAGMENTATION * live.peak
    operations = float(flops.get_total_flops())
    return ModulePlan(
        kind, chips, sum(p.numel() for p in module.parameters()), count, state, live.peak,
        state + live.peak + overhead, operations, operations / kind.peak_flops / shares_of(kind).linear,
    )  # fmt: skip


def _output(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple) else module(batch)


def _objective(output: Any) -> Tensor:
    """Return a tensor whose backward pass is a step's: the loss, or the first output's sum."""
    result = getattr(output, "loss", None)
    if result is None:
        result = tree_leaves(output)[0]
    total: Tensor = result.float().sum()
    return total
