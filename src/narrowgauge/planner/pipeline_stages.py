"""Pipeline stages: which layers a stage holds, and of how many micro-batches their activations exist at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from narrowgauge.planner.architectures import Architecture
from narrowgauge.planner.layouts import Layout


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of one pipeline, as a rank sees it.

    Args:
        number: from 0.
        layers: that it holds.
        in_flight: layers times micro-batches whose activations are held at once.
    """

    number: int
    layers: float
    in_flight: float


def stages_of(architecture: Architecture, layout: Layout) -> list[Stage]:
    """The stages that can be the worst: the first, the second and the last.

    The first holds the activations of as many micro-batches as there are stages, ``L (1 + (p - 1) / (p v))`` layers; the second
    can have a layer more; the last has the head and the logits.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.2.3; Narayanan et al., arXiv 2104.04473, figure 4, for interleaving.
    """
    p, v, total = layout.pipeline, layout.interleave, architecture.num_layers
    even = total % (p * v) == 0 or p == 1
    numbers = dict.fromkeys((0, p - 1) if even else (0, 1, p - 1))
    stages = []
    for number in numbers:
        # Uneven stages leave out a layer beside embedding and head.
        per_stage = total / p if even else math.ceil((total + 2) / p) - (number in (0, p - 1))
        held = p - number if v == 1 else (2 * (p - number - 1) + (v - 1) * p + 1) / v
        stages.append(Stage(number, per_stage, per_stage * min(held, layout.micro_batches)))
    return stages
