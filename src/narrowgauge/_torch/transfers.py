"""Copies between the host and a device for which neither waits."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device: the copy joins the device's queue, and the host goes on.

    A copy from memory that may be paged out would have to end before its memory is used again.
    """
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def stream_id(device: torch.device) -> int:
    """Which stream of a device is the current one."""
    return 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id


class Reading:
    """The value that a 0-d tensor has now, for the host to read later.

    Reading the tensor itself would wait for all that the device has been given in the meantime.
    """

    def __init__(self, value: Tensor) -> None:
        self._done: torch.Event | None = None
        if value.device.type == "cpu":
            self._value = value.clone()
        else:
            self._value = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            self._done = torch.Event(value.device)
            self._done.record(torch.accelerator.current_stream(value.device))

    def item(self) -> float:
        """The value; waits for its copy alone."""
        if self._done is not None:
            self._done.synchronize()
        return float(self._value)
