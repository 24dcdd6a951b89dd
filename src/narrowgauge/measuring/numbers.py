"""Numbers of a step that are on a device, and go to the host in one vector, so that nothing waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.torch_support.torch_names import HostCopy


class Numbers:
    """Hold the numbers of a step by name, on their device, and bring them to the host in one vector."""

    def __init__(self) -> None:
        self._parts: dict[torch.device, list[Any]] = {}
        self._copies: list[tuple[list[Any], HostCopy]] = []

    def set(self, what: str, names: Sequence[str], values: Tensor) -> None:
        """Add one number a name; a later one replaces it."""
        values = values.detach().reshape(-1).float()
        self._parts.setdefault(values.device, []).append((what, [*names], values))

    def send(self) -> None:
        """Start the copies to the host."""
        for parts in self._parts.values():
            self._copies.append((parts, HostCopy(torch.cat([values for *_, values in parts]))))

    def read(self) -> dict[str, dict[str, float]]:
        """Return the numbers by what they are and their name. Wait for the copies alone."""
        read: dict[str, dict[str, float]] = {}
        for parts, copied in self._copies:
            values = iter(copied.cpu().tolist())
            for what, names, _ in parts:
                # Names first: zip stops there, and takes no value too many.
                read.setdefault(what, {}).update(zip(names, values, strict=False))
        return read


def norms_of(gradients: list[Tensor]) -> Tensor:
    """Return norms. Squares leave the range of float32: a norm of zero is of zeros alone, and one that
    is not finite of values that are not.
    """
    device = gradients[0].device
    wide = torch.float64 if device.type == "cuda" else torch.float32
    for x in gradients:
        wide = torch.promote_types(wide, x.dtype)
    norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(gradients, 2, wide)])
    if device.type == "cpu":  # float64 takes longer there, and looking at a norm takes nothing
        norms = norms.double()
        for place in ((norms == 0) | ~norms.isfinite()).nonzero().flatten().tolist():
            norms[place] = torch.linalg.vector_norm(gradients[place], dtype=torch.float64)
    return norms


def shortened(x: float) -> float:
    """Return a number with seven digits: a record of float32 numbers needs no more.

    Example:
        >>> shortened(0.1234567890123), shortened(float("inf"))
        (0.1234568, inf)
    """
    return float(f"{x:.7g}")
