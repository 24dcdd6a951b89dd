"""Which row a layer gets, and what is told of a row that this device can only emulate."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable

import torch

from narrowgauge.computes import COMPUTES, Compute
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.matmul.products import told


class EmulationNotice(UserWarning):
    """Told once per row and device: matmuls are emulated there."""


def row_chooser(compute: str | Compute, keep: tuple[str, ...] | None) -> Callable[[str], Compute | None]:
    """From a layer's name to its row, ``None`` for those that ``keep`` or the row itself leaves alone."""
    if isinstance(compute, str) and compute not in COMPUTES:
        advice = f"{suggestion(compute, COMPUTES)} (narrowgauge show recipes lists all.)".strip()
        raise RecipeError(f"no compute is named '{compute}'.", advice)
    row = COMPUTES[compute] if isinstance(compute, str) else compute
    patterns = row.keep if keep is None else keep
    return lambda name: None if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) else row


_TOLD: set[tuple[str, str]] = set()


def tell_emulation(row: Compute, device: torch.device) -> None:
    """Warn once of a row whose matmuls are emulated on a device."""
    if (row.name, str(device)) in _TOLD or row.name == row.dtype or device.type == "meta":
        return
    _TOLD.add((row.name, str(device)))
    text = told(row, device)
    if "emulated" in text:
        warnings.warn(text, EmulationNotice, stacklevel=3)
