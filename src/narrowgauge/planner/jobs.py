"""Jobs: a model, a recipe and a layout on a cluster, and the reasons why some cannot run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from narrowgauge.errors import ChipError, RecipeError
from narrowgauge.planner.clusters import Cluster, Nodes
from narrowgauge.planner.efficiency import Efficiency, efficiency_of
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model import Architecture
from narrowgauge.planner.roofline import bytes_per_number, bytes_seconds
from narrowgauge.spec.recipes import Recipe

Attention = Literal["flash", "eager"]


@dataclass(frozen=True, slots=True)
class Job:
    """Describe a training job, as one of its ranks sees it.

    Args:
        cluster: has at least as many chips as the layout has ranks.
        shares: efficiencies; None for the published ones.
        attention: ``"flash"`` for fused kernels that skip masked scores, ``"eager"`` for matmuls around a softmax.
        group: index of the rank's group of nodes in the cluster.
    """

    architecture: Architecture
    recipe: Recipe
    layout: Layout
    cluster: Cluster
    sequence_length: int
    shares: Efficiency | None = None
    attention: Attention = "flash"
    group: int = 0

    @property
    def nodes(self) -> Nodes:
        return self.cluster.groups[self.group]

    @property
    def efficiency(self) -> Efficiency:
        return self.shares or efficiency_of(self.nodes.chip, self.nodes.software)

    @property
    def tokens_per_step(self) -> int:
        """Count the tokens of an optimizer step, over all ranks."""
        return self.layout.num_sequences * self.sequence_length

    @property
    def tokens(self) -> float:
        """Count the tokens of a micro-batch on one rank."""
        return self.layout.tokens_on_rank(self.sequence_length)

    @property
    def width(self) -> float:
        """Return the bytes of a number between layers."""
        return bytes_per_number(self.recipe.dtype)

    def moved(self, num_bytes: float) -> float:
        """Return the seconds to read or write ``num_bytes`` of the chip's memory."""
        return bytes_seconds(num_bytes, self.nodes.chip, self.efficiency)


def check_job(job: Job) -> None:
    """Raise if a job cannot run.

    Raises:
        ChipError: a chip does not multiply the recipe's dtype, or the layout has more ranks than the cluster has chips.
        RecipeError: only the model's number of parameters is known, or the layout does not suit it.
    """
    architecture, recipe, layout, cluster = job.architecture, job.recipe, job.layout, job.cluster
    if not architecture.has_shape:
        raise RecipeError(f"only the size of {architecture.name} is known.", "Name a model, or a config.json.")
    for nodes in cluster.groups:
        if nodes.chip.rate_format(recipe.dtype) not in nodes.chip.peak_tflops:
            raise ChipError(
                f"{recipe.name} was requested on {nodes.chip.name}, which does not multiply {recipe.dtype}.",
                f"It multiplies {', '.join(nodes.chip.peak_tflops)}.",
            )
    if layout.num_ranks > cluster.num_chips:
        raise ChipError(
            f"a layout of {layout.num_ranks} ranks was requested on {cluster.num_chips} chips.",
            "Share less, or add chips.",
        )
    why = why_not(architecture, layout, job.sequence_length)
    if why:
        raise RecipeError(f"{architecture.name} cannot run in this layout: {why}.", "Choose a divisor.")


def why_not(architecture: Architecture, layout: Layout, sequence_length: int) -> str:
    """Say why a layout does not suit a model; empty if it does."""
    stages = layout.pipeline * layout.interleave
    # Embedding and head may count as a layer each: Llama 3 405B has 126 layers for 16 stages of 8 groups.
    if stages > architecture.num_layers + (2 if stages > 1 else 0) or layout.pipeline > architecture.num_layers:
        return f"{stages} groups of layers and {architecture.num_layers} layers"
    if architecture.num_heads % layout.tensor:
        return f"{layout.tensor} tensor ranks do not divide {architecture.num_heads} heads"
    if sequence_length % layout.context:
        return f"{layout.context} context ranks do not divide {sequence_length} tokens"
    num_experts = architecture.mixture.num_experts if architecture.mixture else 1
    if num_experts % layout.expert:
        return f"{layout.expert} expert ranks do not divide {num_experts} expert{'s' * (num_experts > 1)}"
    ranks = layout.num_replicas * layout.context
    if ranks * layout.tensor % (layout.expert * layout.expert_tensor_ranks):
        return f"{layout.expert} expert ranks do not divide {ranks} data ranks and {layout.tensor} tensor ranks"
    return ""
