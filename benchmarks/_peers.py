"""The optimizers in use that stand beside ours, in one table for every benchmark that compares with
them.

Claim: none of its own. A row says how a peer is made over bfloat16 parameters, and where the rest of
a weight lies, if it keeps any. Each uses its own defaults; what rounds the weight stochastically is
a row of its own. Baseline: named by each benchmark. FlashOptim refuses machines without CUDA.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def seen(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> Tensor:
    """Return what is kept of a weight where nothing lies beside it."""
    return weight.detach().double()


def with_compensation(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> Tensor:
    """Return the weight and optimi's Kahan compensation, which is there after the first step."""
    return weight.detach().double() + optimizer.state[weight].get("kahan_comp", 0.0)


@dataclass(frozen=True)
class Peer:
    """An optimizer of somebody else's, over bfloat16 parameters.

    Args:
        name: what tables call it.
        package: where it comes from, as pip knows it.
        module, kind: where its class lies.
        options: what makes it what it is, beside the options of ``torch.optim.AdamW``.
        stored: returns the float64 value that it keeps of a weight; None: nobody reads it here.
        spoils_gradients: computes in the gradients' own memory.
    """

    name: str
    package: str
    module: str
    kind: str
    options: dict[str, Any]
    stored: Callable[[torch.optim.Optimizer, nn.Parameter], Tensor] | None = seen
    spoils_gradients: bool = False

    def make(self, parameters, **options) -> torch.optim.Optimizer:
        kind = getattr(importlib.import_module(self.module), self.kind)
        torch.manual_seed(0)  # torchao's rounding draws from the global generator
        optimizer = kind(parameters, **options, **self.options)
        return optimizer


TORCHAO = "torchao", "torchao.optim", "AdamW8bit"
DEEPSPEED = "deepspeed", "deepspeed.ops.adam", "DeepSpeedCPUAdam"
KAHAN = {"kahan_sum": True}
ECC = {"ecc": "bf16+8", "param_ecc": "bf16+8"}
PEERS = [
    Peer("torch AdamW bfloat16", "torch", "torch.optim", "AdamW", {"fused": True}),
    Peer("bitsandbytes AdamW8bit", "bitsandbytes", "bitsandbytes.optim", "AdamW8bit", {}),
    Peer("torchao AdamW8bit", *TORCHAO, {"bf16_stochastic_round": False}),
    Peer("torchao AdamW8bit stochastic", *TORCHAO, {"bf16_stochastic_round": True}),
    Peer("DeepSpeedCPUAdam", *DEEPSPEED, {"fp32_optimizer_states": True}),
    Peer("DeepSpeedCPUAdam 16-bit states", *DEEPSPEED, {"fp32_optimizer_states": False}),
    Peer("FlashOptim AdamW", "flashoptim", "flashoptim", "FlashAdamW", {}),
    Peer("optimi AdamW Kahan", "torch-optimi", "optimi", "AdamW", KAHAN, with_compensation, True),
    Peer("heavyball AdamW ecc", "heavyball", "heavyball", "AdamW", ECC, None, True),
]
PACKAGES = ("bitsandbytes", "torchao", "flashoptim", "torch-optimi", "heavyball")


def reason(error: Exception) -> str:
    """Say why a peer did not run, short enough for a table."""
    return f"did not run: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:60]}"


def bytes_held(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes per parameter of bfloat16 weights and gradients and of an optimizer's
    states.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    held = sum(_bytes_of(optimizer.state[weight]) for weight in weights)
    return 4 + held / sum(weight.numel() for weight in weights)


def _bytes_of(state) -> int:
    """Count a state's tensors, those inside tensor subclasses too. Steps and tables of codes do not
    grow with it.
    """
    total = 0
    for name, value in state.items():
        if isinstance(value, dict):
            total += _bytes_of(value)
        elif hasattr(value, "__tensor_flatten__"):
            parts, _ = value.__tensor_flatten__()
            total += _bytes_of({part: getattr(value, part) for part in parts})
        elif isinstance(value, Tensor) and name != "step" and not str(name).startswith("qmap"):
            total += value.numel() * value.element_size()
    return total
