"""Numbers of a step that are on a device, and go to the host in one vector, so that nothing waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from narrowgauge.analysis.snapshot import Snapshot
from narrowgauge.torch_support.torch_names import HostCopy

Values = dict[str, dict[str, float]]
"""Numbers by kind and name."""


class HostNumbers:
    """Hold the numbers of the current step, and those of steps whose copies are on their way.

    Args:
        tensors: of the loop, which may be moved to another device; the vector is where the first is.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tensors
        self._numbers: dict[tuple[str, str], Tensor] = {}
        self._unread: list[tuple[Snapshot, list[tuple[str, str]], HostCopy]] = []

    @property
    def device(self) -> torch.device:
        """Return the device of the vector."""
        return next(iter(self._tensors)).device

    def add(self, kind: str, number: bool | Tensor, name: str = "") -> None:
        """Add a number to those of its kind and name in this step."""
        before = self._numbers.get((kind, name))
        if isinstance(number, Tensor):
            added = number.reshape(())
            # A cast costs more than a test.
            if added.dtype is not torch.float32 or added.device != self.device:
                added = added.to(self.device, torch.float32)
        else:  # a copy from the host would wait for the device
            added = torch.full((), float(number), device=self.device)
        self._numbers[kind, name] = added if before is None else before + added

    def send(self, now: Snapshot) -> None:
        """Send the numbers of a step to the host."""
        vector = torch.zeros(0, device=self.device)
        if self._numbers:
            vector = torch.stack([*self._numbers.values()])
        self._unread.append((now, list(self._numbers), HostCopy(vector)))
        self._numbers = {}

    def forget(self) -> None:
        """Forget the steps that were not read."""
        self._unread = []

    def arrived(self) -> Iterator[tuple[Snapshot, Values]]:
        """Yield the steps that were sent, with their numbers; wait for those on their way."""
        unread = self._unread
        self._unread = []
        for now, keys, copied in unread:
            values: Values = defaultdict(dict)
            for (kind, name), value in zip(keys, copied.cpu().tolist(), strict=True):
                values[kind][name] = value
            yield now, values


def norms_of(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return norms, in float32 or wider: squares overflow in float16."""
    if not gradients:
        return ()
    wide = torch.float32
    parts = []
    for x in gradients:
        part = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        parts.append(part)
        wide = torch.promote_types(wide, part.dtype)
    return torch._foreach_norm(parts, 2, wide)
