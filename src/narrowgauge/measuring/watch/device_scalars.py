"""Numbers of a step that are on a device, and go to the host in one vector, so that nothing waits."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from narrowgauge.torch_support.torch_names import HostCopy


class DeviceScalars:
    """Hold the numbers of a step by name, on their device, and bring them to the host in one vector."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, list[str], Tensor]] = []
        self._copy: HostCopy | None = None

    def set(self, what: str, names: Iterable[str], values: Tensor) -> None:
        """Add one number a name; a later one replaces it."""
        self._parts.append((what, [*names], values.reshape(-1).float()))

    def send(self) -> None:
        """Start the copy to the host."""
        if self._parts:
            device = self._parts[0][-1].device
            vectors = [values.to(device, non_blocking=True) for *_, values in self._parts]
            self._copy = HostCopy(torch.cat(vectors))

    def read(self) -> dict[str, dict[str, float]]:
        """Return the numbers by what they are and their name. Wait for the copy alone."""
        read: dict[str, dict[str, float]] = defaultdict(dict)
        if self._copy is not None:
            values = iter(self._copy.cpu().tolist())
            for what, names, _ in self._parts:
                # Names first: zip stops there, and takes no value too many.
                read[what].update(zip(names, values, strict=False))
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
