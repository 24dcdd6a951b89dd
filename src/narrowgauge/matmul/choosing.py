"""Which row a layer gets, and what is told of a row that this device can only emulate."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable

import torch

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.matmul.gemm import told
from narrowgauge.spec import variants
from narrowgauge.spec.computes import Compute

Choice = str | Compute | Callable[[str], str | Compute | None]
"""A row, its name, or a function from a layer's name to one of these; ``None`` leaves the layer alone."""


class EmulationNotice(UserWarning):
    """Told once per row and device: matmuls are emulated there."""


def row_of(compute: str | Compute) -> Compute:
    """The row or variant that is meant by its name or itself."""
    row = variants.find(compute) if isinstance(compute, str) else compute
    if row is None:
        advice = f"{suggestion(str(compute), variants.names())} (narrowgauge show recipes lists all.)".strip()
        raise RecipeError(f"no compute is named '{compute}'.", advice)
    return row


def row_chooser(compute: Choice, keep: tuple[str, ...] | None) -> Callable[[str], Compute | None]:
    """From a layer's name to its row, ``None`` for those that ``keep`` or the row itself leaves alone."""
    if not isinstance(compute, (str, Compute)):
        given = compute
        return lambda name: None if (row := given(name)) is None else row_of(row)
    row = row_of(compute)
    patterns = row.keep if keep is None else keep

    def choose(name: str) -> Compute | None:
        kept = any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        return None if kept else variants.at_layer(row, name)

    return choose


_TOLD: set[tuple[str, str]] = set()


def tell_emulation(row: Compute, device: torch.device) -> None:
    """Warn once of a row whose matmuls are emulated on a device."""
    if (row.name, str(device)) in _TOLD or device.type == "meta":
        return
    _TOLD.add((row.name, str(device)))
    text = told(row, device)
    if "emulated" in text:
        warnings.warn(text, EmulationNotice, stacklevel=3)
