"""The snapshot of a step: plain numbers by name, which the laws read.

It knows no model, no hook and no device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_SAMPLED = frozenset({1, 2, 3, 5, 8, 13, 21, 34, 55, 89})
_EVERY = 100
"""Sampled steps at first, and steps between later ones."""


def is_sampled(step: int) -> bool:
    """Return whether a step is repeated: 1, 2, 3, 5, 8, 13 …, and every hundredth.

    Example:
        >>> [step for step in range(301) if is_sampled(step)]
        [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 100, 200, 300]
    """
    return step in _SAMPLED or (step > 0 and step % _EVERY == 0)


@dataclass(frozen=True)
class Facts:
    """Hold what is the same in every step of a loop.

    Args:
        vocabulary: number of tokens; 0 if it is not known.
        limit: declared limit of the gradients' norm.
        is_whole: this rank holds all gradients.
        epsilon: largest machine epsilon of the weights.
        mode_dependent: what acts in training mode alone, in words; empty if nothing does.
        nonfinite_weight: returns the first weight of a module that is not finite; empty if all are.
    """

    num_optimizers: int = 1
    vocabulary: int = 0
    limit: float | None = None
    is_whole: bool = True
    epsilon: float = 0.0
    mode_dependent: str = ""
    nonfinite_weight: Callable[[str], str] = str


@dataclass
class Passes:
    """Hold the modes of the passes of one step.

    Args:
        modes: whether each pass trained.
        evaluations: whether each pass without gradients had dropout.
        is_evaluated: the model ran in evaluation mode.
        num_dropping: dropouts in training mode, in the last pass with gradients.
    """

    modes: set[bool] = field(default_factory=set)
    evaluations: set[bool] = field(default_factory=set)
    is_evaluated: bool = False
    num_dropping: int = 0


class Weight(NamedTuple):
    """What is known of a trained weight in a sampled step.

    Args:
        has_moved: since the watch began.
        is_at_zero: the learning rate of its group is 0.
    """

    has_moved: bool
    is_at_zero: bool
    format: str


@dataclass
class Snapshot:
    """Hold numbers of one step. Each is ``None`` where it was not taken, and its laws are silent.

    Args:
        passes: since the last step of any optimizer.
        norms: of each gradient that reached the step, in the order of a backward pass; of shards,
            this rank's. ``whole_norm``: of all ranks' shards together.
        bad_outputs: modules whose outputs are not finite, in the order of a forward pass.
        kept: tensors whose last gradient was not cleared.
        clip: factor of the gradients by the optimizer itself.
        is_skipped: the optimizer left the step out.
        is_written: a weight was changed since the last step. ``is_swapped``: after an evaluation.
        loss: of this rank. ``unclipped``: the gradients' norm before the loop clips them.
        rank_losses: of all ranks.
        moved: the largest change of each tensor over the learning rate, where steps are about 1.
        drifting: frozen tensors that changed by a few roundings since the last sampled step.
        frozen: frozen tensors that the step changed.
        frozen_norms: batch norms of frozen weights in training mode, in sampled steps.
        weights: the trained weights, of sampled steps.
        rates: the learning rate of each group by its number.
        count: steps that a state of the optimizer has counted.
    """

    step: int
    passes: Passes = field(default_factory=Passes)
    norms: Mapping[str, float] | None = None
    whole_norm: float | None = None
    bad_outputs: Collection[str] = ()
    kept: Collection[str] = ()
    clip: float = 1.0
    is_skipped: bool = False
    is_written: bool = False
    is_swapped: bool = False
    loss: float | None = None
    unclipped: float | None = None
    rank_losses: Collection[float] = ()
    moved: Mapping[str, float] | None = None
    drifting: Collection[str] | None = None
    frozen: Collection[str] = ()
    frozen_norms: Collection[str] | None = None
    weights: Mapping[str, Weight] | None = None
    rates: Mapping[int, float] = field(default_factory=dict)
    count: float | None = None

    @property
    def arrived(self) -> float:
        """Return the norm of all gradients that reach the update."""
        whole = self.whole_norm
        if whole is None:
            whole = math.hypot(*(self.norms or {}).values())
        return whole * self.clip
