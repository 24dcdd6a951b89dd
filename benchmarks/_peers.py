"""The optimizers in use that stand beside ours, in one table for every benchmark that compares with
them.

Claim: none of its own. A row says how a peer is made over bfloat16 parameters, what it keeps, and
where the rest of a weight lies, if it keeps any. Each uses its own defaults; what rounds the weight
stochastically is a row of its own. Baseline: named by each benchmark. FlashOptim is no row: it
refuses machines without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[..., torch.optim.Optimizer]
Stored = Callable[[torch.optim.Optimizer, nn.Parameter], Tensor]


def seen(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> Tensor:
    """What is kept of a weight where nothing lies beside it."""
    return weight.detach().double()


def with_compensation(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> Tensor:
    """The weight and optimi's Kahan compensation, which is there after the first step."""
    compensation: Tensor | float = optimizer.state[weight].get("kahan_comp", 0.0)
    return weight.detach().double() + compensation


def with_ecc(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> Tensor:
    """Return the weight and HeavyBall's correction of it, which is there after the first step."""
    from heavyball.utils import _ULPState

    correction = optimizer.state[weight].get(0, {}).get("param::ecc")
    if correction is None:
        value = weight.detach()
    else:
        value = _ULPState(correction, 127).decode(weight.detach())
    return value.double()


@dataclass(frozen=True)
class Peer:
    """An optimizer of somebody else's, over bfloat16 parameters.

    Args:
        name: what tables call it.
        package: where it comes from, as pip knows it.
        bytes_per_param: of weight, gradient and states; scales of blocks counted.
        make: makes it from parameters and the options of ``torch.optim.AdamW``.
        source: the publication and the option that makes it what it is, beside the package.
        stored: the float64 value that it keeps of a weight.
        spoils_gradients: computes in the gradients' own memory.
    """

    name: str
    package: str
    bytes_per_param: float
    make: Make
    source: str
    stored: Stored = seen
    spoils_gradients: bool = False


def _torch(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **options, fused=True)


def _bitsandbytes(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(parameters, **options)
    return optimizer


def _torchao(
    name: str, stochastic: bool, parameters: Iterable[nn.Parameter], **options: Any
) -> torch.optim.Optimizer:
    import torchao.optim

    if stochastic:
        torch.manual_seed(0)  # its rounding draws from the global generator
    optimizer: torch.optim.Optimizer = getattr(torchao.optim, name)(
        parameters, **options, bf16_stochastic_round=stochastic
    )
    return optimizer


def _optimi(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    from optimi import AdamW

    optimizer: torch.optim.Optimizer = AdamW(parameters, **options, kahan_sum=True)
    return optimizer


def _heavyball(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    from heavyball import AdamW

    optimizer: torch.optim.Optimizer = AdamW(
        parameters, **options, ecc="bf16+8", param_ecc="bf16+8"
    )
    return optimizer


# Two states in 8 bits with a float32 scale per 256 elements each, or in 4 bits with one per 128.
_STATES = {"AdamW8bit": 2 + 8 / 256, "AdamW4bit": 1 + 8 / 128, "AdamWFp8": 2 + 8 / 256}

PEERS: tuple[Peer, ...] = (
    Peer("torch AdamW bfloat16", "torch", 8, _torch, "torch.optim.AdamW, fused"),
    Peer(
        "bitsandbytes AdamW8bit",
        "bitsandbytes",
        4 + _STATES["AdamW8bit"],
        _bitsandbytes,
        "bitsandbytes; Dettmers et al. 2022 (2110.02861)",
    ),
    *(
        Peer(
            f"torchao {name}{' stochastic' if stochastic else ''}",
            "torchao",
            4 + size,
            partial(_torchao, name, stochastic),
            f"torchao{', bf16_stochastic_round' if stochastic else ''}",
        )
        for name, size in _STATES.items()
        for stochastic in (False, True)
    ),
    Peer(
        "optimi AdamW Kahan",
        "torch-optimi",
        10,
        _optimi,
        "torch-optimi, kahan_sum",
        with_compensation,
        spoils_gradients=True,
    ),
    Peer(
        "heavyball AdamW ecc",
        "heavyball",
        11,
        _heavyball,
        "heavyball, ecc and param_ecc bf16+8",
        with_ecc,
        spoils_gradients=True,
    ),
)
PACKAGES = tuple(dict.fromkeys(peer.package for peer in PEERS if peer.package != "torch"))


def reason(error: Exception) -> str:
    """Why a peer did not run, short enough for a table."""
    return f"did not run: {(str(error).strip() or type(error).__name__).splitlines()[0][:60]}"


def bytes_held(optimizer: torch.optim.Optimizer) -> float:
    """Bytes per parameter of bfloat16 weights and gradients and of an optimizer's states, counted
    from its tensors.
    """
    weights = []
    for group in optimizer.param_groups:
        weights.extend(group["params"])
    states = sum(
        part.numel() * part.element_size()
        for weight in weights
        for part in _parts(optimizer.state[weight])
    )
    return 4 + states / sum(weight.numel() for weight in weights)


def _parts(state: dict[str, Any]) -> list[Tensor]:
    """The plain tensors of a state, those inside tensor subclasses too; tables of codes do not grow
    with it.
    """
    tensors: list[Tensor] = []
    for name, value in state.items():
        if isinstance(value, dict):
            tensors += _parts(value)
        elif hasattr(value, "__tensor_flatten__"):
            tensors += [
                getattr(value, part) for part in value.__tensor_flatten__()[0] if part != "qmap"
            ]
        elif isinstance(value, Tensor) and name != "step" and not name.startswith("qmap"):
            tensors.append(value)
    return tensors
