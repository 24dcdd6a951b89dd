"""Whether a replayed step is the recorded one: its row and, where they were recorded, the fingerprints of its tensors.

Numbers are recorded with all their digits, so equal computations have equal rows. A replay that differs was computed from other
values, or by other code or another machine, or the run itself was not what its settings say; so where it parts is evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowgauge.analysis.diagnosis.pairs.alignment import same_value
from narrowgauge.analysis.diagnosis.replay_findings import HELD, Departure
from narrowgauge.runs.schema import Row

COLUMNS = ("batch_crc", "lr", "loss", "grad_norm", "skipped", "loss_scale")
"""Columns that the arithmetic of a step gives, in the order in which it gives them."""


def departure(recorded: Row, replayed: Row, prints: Row | None = None, printed: Row | None = None) -> Departure | None:
    """Where a replayed step parts from the recorded one.

    Args:
        recorded, replayed: the rows of the step.
        prints, printed: its recorded and its replayed fingerprints, where there are both.
    Returns:
        The first column or tensor that differs, or ``None``.
    Example:
        >>> row = {"step": 3, "loss": 2.5, "grad_norm": 1.0}
        >>> departure(row, {**row, "grad_norm": 1.25}).message
        'the replay parts from the record at step 3: grad_norm is 1.25 and was 1.0'
    """
    step = replayed["step"]
    if prints is not None and printed is not None:
        found = _first_tensor(prints["tensors"], printed["tensors"])
        if found is not None:
            return Departure(step, *found)
    for name in COLUMNS:
        if name in recorded and name in replayed and not same_value(recorded[name], replayed[name]):
            return Departure(step, name, recorded[name], replayed[name])
    return None


def is_compared(recorded: Row, prints: Row | None) -> bool:
    """Whether a record holds of a step what another computation would change: its loss, or the fingerprints of its tensors."""
    return "loss" in recorded or prints is not None


def _first_tensor(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> tuple[str, float, float] | None:
    """The first tensor with other bits, and its norms; tensors that one of the two did not record are left out."""
    changed = next((key for key in recorded if key.startswith(HELD)), None)
    if changed is not None:
        return changed, recorded[changed][1], float("nan")
    for key, entry in replayed.items():
        if key in recorded and int(recorded[key][0]) != int(entry[0]):
            return key, recorded[key][1], entry[1]
    return None
