"""A job: what is trained, how it is computed and stored, over which machines it is spread, and how fast these are."""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.planner.inputs.architectures import Architecture
from narrowgauge.planner.inputs.clusters import Cluster
from narrowgauge.planner.inputs.efficiency import Shares
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.spec.recipes import Recipe


@dataclass(frozen=True, slots=True)
class Job:
    """A training job, as far as its time depends on it.

    The layout has as many ranks as the cluster has chips; of several groups of nodes the slowest sets the pace. ``shares`` are of
    the chips' printed rates, None for the published ones.
    """

    architecture: Architecture
    recipe: Recipe
    layout: Layout
    cluster: Cluster
    sequence_length: int
    shares: Shares | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all ranks."""
        return self.layout.num_sequences * self.sequence_length
