"""Predictions for a chip from the figures of its data sheet.

Linear layers take what the planner's roofline says (:mod:`narrowgauge.planner.time.roofline`), and the rest of the step is
counted in the same way: attention, element-wise operations, the loss, the optimizer. Communication and overlap are left out,
so trust the order of these figures, not their digits; ``narrowgauge plan`` counts those too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from narrowgauge.errors import ChipError
from narrowgauge.planner.inputs.clusters import Nodes
from narrowgauge.planner.inputs.efficiency import best_share, rate_name, shares_of
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.inputs.model_configs import architecture_of, config_of
from narrowgauge.planner.time.layer_times import (
    Work,
    attention_seconds,
    elementwise_seconds,
    loss_seconds,
    optimizer_seconds,
)
from narrowgauge.planner.time.roofline import operation_seconds
from narrowgauge.profiling.costs import Round, linears_seconds
from narrowgauge.profiling.layer_plan import Kind, baseline_of, compared_steps, settings_of, timed_settings
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.models import Model
from narrowgauge.spec.recipes import Recipe


@dataclass(frozen=True)
class Step:
    """The model of a step, and the size of its batch."""

    model: Model
    num_sequences: int
    sequence_length: int

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.sequence_length


def rest_seconds(recipe: Recipe, step: Step, chip: Chip) -> float:
    """A step without its linear layers: attention, element-wise work, the loss, the optimizer."""
    shape = architecture_of(config_of(step.model), step.model.name)
    layout = Layout(micro_batch=step.num_sequences)
    work = Work(shape, recipe, layout, step.sequence_length, Nodes(chip, chips=1), shares_of(chip))
    parts = (attention_seconds(work), elementwise_seconds(work), loss_seconds(work))
    return sum(part.forward + part.backward for part in parts) + optimizer_seconds(work, step.model.num_parameters)


def predict(kinds: Sequence[Kind], recipes: Iterable[Recipe], step: Step, chip: Chip) -> Round:
    """What :func:`narrowgauge.profiling.measurement.measure` would time on the chip.

    Raises:
        ChipError: the chip does not multiply a dtype that a model is stored in, or its memory is too small.
    """
    recipes = list(recipes)
    for recipe in recipes:
        _check(recipe, step, chip)
    table = {
        (shape, setting): operation_seconds(shape, setting, step.num_tokens, chip)
        for shape, setting in timed_settings(kinds, recipes)
    }
    steps = {
        each: rest_seconds(each, step, chip) + linears_seconds(settings_of(kinds, each), table)
        for each in compared_steps(recipes)
    }
    return Round(steps, table)


NOT_RUN = "no kernel of this version has run on a GPU: these figures come from the chip's data sheet and were not checked there."


def assumptions(recipes: Iterable[Recipe], chip: Chip) -> list[str]:
    """The assumptions of a prediction, one sentence each."""
    formats = dict.fromkeys(
        c.format
        for recipe in recipes
        for compute in (recipe.compute, COMPUTES[recipe.dtype])
        for c in compute.casts.values()
    )
    rates = dict.fromkeys(rate_name(format) for format in formats if rate_name(format) in chip.peak_tflops)
    shares = shares_of(chip)
    lines = [
        f"{name} matmuls: {shares.matmul(name).value:.0%} of {chip.peak_tflops[name]:g} TFLOP/s "
        f"({best_share(name, chip).source}, and 0.9 of it in training)"
        for name in rates
    ]
    bandwidth, attention, start = shares["bandwidth"], shares["attention"], shares["kernel_seconds"].value
    memory = f"memory: {bandwidth.value:.0%} of {chip.bandwidth_gb_per_second:g} GB/s (a published cast on a B200)"
    dtypes = "/".join(sorted({recipe.dtype for recipe in recipes}))
    rest = f"attention: {attention.value:.0%} of the {dtypes} rate; {start * 1e6:g} µs a kernel"
    return [*lines, memory, rest]


def _check(recipe: Recipe, step: Step, chip: Chip) -> None:
    for dtype in (recipe.dtype, baseline_of(recipe).dtype):
        if rate_name(dtype) not in chip.peak_tflops:
            raise ChipError(
                f"{recipe.name} was requested on {chip.name}, which does not multiply {dtype}.",
                f"It multiplies {', '.join(chip.peak_tflops)}.",
            )
    needed = step.model.num_parameters * recipe.bytes_per_param
    if needed > chip.memory_bytes:
        raise ChipError(
            f"{step.model.name} in {recipe.name} takes {needed / 2**30:,.0f} GiB before activations, and {chip.name} has "
            f"{chip.memory_bytes / 2**30:,.0f}.",
            "Choose a larger chip, or a smaller model of the same width.",
        )
