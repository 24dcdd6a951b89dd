"""A training state as it was found: weights by name, what is kept beside each, and whose it is.

Names are the one thing that weights and states share. Each state must find its weight and each weight its state; a tied
weight, which some files hold under two names, counts under the one that its optimizer knew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import DataError
from narrowgauge.runs.record import Run
from narrowgauge.spec.storages import Storage


@dataclass(frozen=True)
class Source:
    """A training state.

    Args:
        origin: the recipe it is in, or the library it comes from.
        weights: by parameter name, in the format found.
        states: by parameter name: packed where ``rows`` says how, else float32 moments; and under ``step`` the number of
            steps taken.
        rows: the storage of each parameter, where it is ours.
        others: what is carried as it is, as a checkpoint names it: integer buffers, readings of the audit.
        record: what the checkpoint's ``state.json`` said.
        run: the run it belongs to.
        left_out: what there was beside all this, and is not taken.
    """

    origin: str
    weights: dict[str, Tensor]
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, Storage] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    run: Run | None = None
    left_out: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps done, those that were skipped included where the source counts them."""
        own = max((int(entry["step"]) for entry in self.states.values()), default=0)
        return int(self.record.get("step", own))


def numbers_of(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Floating weights under their first names, and integer buffers as a checkpoint names them."""
    numbers: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, value in weights.items():
        memory = (value.data_ptr(), value.shape, value.stride()) if value.numel() else (name,)
        if value.is_floating_point() and memory not in seen:
            numbers[name] = value
            seen.add(memory)
    others = {f"model.{name}": value for name, value in weights.items() if not value.is_floating_point()}
    return numbers, others


def matched(weights: dict[str, Tensor], owned: Collection[str], where: object) -> dict[str, Tensor]:
    """The weights whose states ``owned`` names: all of them, but for second names of tied ones.

    Raises:
        DataError: a state without a weight, or a weight without a state.
    """
    if strange := [name for name in owned if name not in weights]:
        raise DataError(
            f"{where} holds a state of '{strange[0]}', which is not among the {len(weights)} weights.",
            "Give weights and state of one model.",
        )
    names = set(owned)
    for name, value in weights.items():
        if name not in names and not any(_is_copy(value, weights[other]) for other in names):
            raise DataError(
                f"{where} holds no state of '{name}', which is among the weights.",
                "Give weights and state of one model, or convert the weights alone.",
            )
    return {name: value for name, value in weights.items() if name in names}


def _is_copy(value: Tensor, other: Tensor) -> bool:
    """Whether two weights are equal and no mere constant: a tied weight that was saved twice."""
    equal = value.shape == other.shape and value.dtype == other.dtype and torch.equal(value, other)
    return equal and bool((value != value.flatten()[:1]).any())
