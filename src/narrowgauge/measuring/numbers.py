"""Numbers of a step that are on a device, and go to the host in one vector, so that nothing waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.torch_support.torch_names import HostCopy


class Numbers:
    """Hold the numbers of a step by name, on their device, and bring them to the host in one vector."""

    def __init__(self) -> None:
        self._vectors: dict[str, tuple[list[str], Tensor]] = {}
        self._copies: dict[torch.device, tuple[list[tuple[str, str]], HostCopy]] = {}

    def set(self, what: str, names: Sequence[str], values: Tensor) -> None:
        """Add one number a name; a later one replaces it."""
        key = f"{what} {len(self._vectors)}"
        self._vectors[key] = [*names], values.detach().reshape(-1).float()

    def send(self) -> None:
        """Start the copies to the host."""
        by_device: dict[torch.device, list[tuple[str, list[str], Tensor]]] = {}
        for key, (names, values) in self._vectors.items():
            what = key.partition(" ")[0]
            by_device.setdefault(values.device, []).append((what, names, values))
        for device, parts in by_device.items():
            keys = [(what, name) for what, names, _ in parts for name in names]
            vector = torch.cat([values for _, _, values in parts])
            self._copies[device] = keys, HostCopy(vector)

    def read(self) -> dict[str, dict[str, float]]:
        """Return the numbers by what they are and their name. Wait for the copies alone."""
        read: dict[str, dict[str, float]] = {}
        for keys, copied in self._copies.values():
            for (what, name), value in zip(keys, copied.cpu().tolist(), strict=True):
                read.setdefault(what, {})[name] = value
        return read


def norms_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return norms, in float32 or wider: squares overflow in float16."""
    wide = torch.float32
    parts = []
    for x in gradients:
        part = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        parts.append(part)
        wide = torch.promote_types(wide, part.dtype)
    first = parts[0].device
    norms = torch._foreach_norm(parts, 2, wide)
    return torch.stack([norm.to(first) for norm in norms])


def shortened(x: float) -> float:
    """Return a number with seven digits: a record of float32 numbers needs no more.

    Example:
        >>> shortened(0.1234567890123), shortened(float("inf"))
        (0.1234568, inf)
    """
    return float(f"{x:.7g}")
