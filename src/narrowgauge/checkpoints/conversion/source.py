"""A training state as read: weights and optimizer states by parameter name, and where they come from.

Weights and states are matched by name, one to one. A tied weight, which some files store under two names, is converted
under the name that the optimizer used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
        origin: its recipe, or the library that wrote it.
        weights: by parameter name, in their original dtype.
        states: by parameter name: packed where ``storages`` has the parameter, else float32 moments; ``step`` is the number of
            steps taken.
        storages: the storage of each parameter, in a state of one of Narrowgauge's optimizers.
        others: copied unchanged, under their checkpoint keys: integer buffers and audit sums.
        record: contents of the checkpoint's ``state.json``.
        left_out: other contents, which are not converted.
    """

    origin: str
    weights: dict[str, Tensor]
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    run: Run | None = None
    left_out: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps taken, including skipped ones where the source counts them."""
        own = max((int(entry["step"]) for entry in self.states.values()), default=0)
        return int(self.record.get("step", own))


def numbers_of(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Floating-point weights under their first names, and integer buffers under their checkpoint keys."""
    numbers: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, value in weights.items():
        memory = (value.data_ptr(), value.shape, value.stride()) if value.numel() else (name,)
        if value.is_floating_point() and memory not in seen:
            numbers[name] = value
            seen.add(memory)
    others = {f"model.{name}": value for name, value in weights.items() if not value.is_floating_point()}
    return numbers, others


def under_names(weights: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """The weights, a tied one under the name of ``named_parameters()``.

    A safetensors file stores a tied weight once, not always under that name. If exactly one name is without a weight and one
    weight without a name, they belong together; else nothing changes. Shapes are checked where states are.

    Args:
        names: of parameters; empty where they are unknown.
    Example:
        >>> list(under_names({"head.weight": torch.ones(2), "norm.weight": torch.ones(2)}, ["embedding.weight", "norm.weight"]))
        ['embedding.weight', 'norm.weight']
    """
    missing, spare = [name for name in names if name not in weights], weights.keys() - set(names)
    if len(missing) != 1 or len(spare) != 1:
        return dict(weights)
    return {missing[0] if name in spare else name: value for name, value in weights.items()}


def matched(weights: dict[str, Tensor], owned: Collection[str], where: object) -> dict[str, Tensor]:
    """The weights named in ``owned``: all but the second names of tied weights.

    A state without a weight, or a weight without a state, is refused.
    """
    if strange := [name for name in owned if name not in weights]:
        raise DataError(
            f"{where} contains a state of '{strange[0]}', which is not among the {len(weights)} weights.",
            "Give weights and state of one model.",
        )
    names = set(owned)
    for name, value in weights.items():
        if name not in names and not any(_is_copy(value, weights[other]) for other in names):
            raise DataError(
                f"{where} contains no state of '{name}', which is among the weights.",
                "Give weights and state of one model, or convert the weights alone.",
            )
    return {name: value for name, value in weights.items() if name in names}


def _is_copy(value: Tensor, other: Tensor) -> bool:
    """Whether two weights are equal and not constant, like a tied weight that was saved twice."""
    equal = value.shape == other.shape and value.dtype == other.dtype and torch.equal(value, other)
    return equal and bool((value != value.flatten()[:1]).any())
