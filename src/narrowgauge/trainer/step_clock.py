"""Where the time of a step goes: moments within it, noted without waiting for a device."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch


class StepClock:
    """Moments within a step, and how long it was from one to the next.

    Invariant: it changes no bit. Of CUDA the moments are events on the stream, so nothing waits for the device before
    :meth:`seconds` does.

    Cost: under a microsecond for a moment; on CUDA some.
    """

    def __init__(self, device: torch.device) -> None:
        self._read = _device_moment if device.type == "cuda" else time.perf_counter
        self._moments: list[Any] = []

    def mark(self) -> None:
        """Note this moment."""
        self._moments.append(self._read())

    def seconds(self) -> list[float]:
        """The time between each moment and the next."""
        return [_seconds_between(*pair) for pair in itertools.pairwise(self._moments)]


def _device_moment() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(began: Any, ended: Any) -> float:
    if isinstance(ended, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000
