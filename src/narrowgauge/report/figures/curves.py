"""Figures over steps that compare recipes: losses, their differences, gradient norms and loss
scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from narrowgauge.analysis.columns import Array, Series, column
from narrowgauge.report.figures.traces import (
    Curve,
    Figure,
    curve_of,
    fit_axis,
    layout_of,
    traces_of,
)
from narrowgauge.report.recipe_groups import Group

SMALLEST_SPAN = 0.001
"""Minimum span of an axis of differences, as a fraction of the loss."""
_LOSS = "loss (nats per token)"
_BAND = (
    " A line is the mean over a recipe's seeds, its band the range from the lowest to the highest. "
    "In a long run both are over "
    "the steps of a column, too. A cross marks a value that is not finite."
)


def comparison_figures(
    groups: Sequence[Group], baseline: str | None = None
) -> dict[str, list[Figure]]:
    """Return all figures with data, by section.

    ``baseline`` is the label of the group to compare with (None: the first).
    """
    losses = [training_loss(groups), validation_loss(groups), difference(groups, baseline)]
    history = [gradient_norm(groups), loss_scale(groups)]
    return {"loss": list(filter(None, losses)), "history": list(filter(None, history))}


def _curves(groups: Sequence[Group], table: str, name: str) -> list[Curve]:
    return [curve_of(group, group.lines(table, name)) for group in groups]


# ── loss ──────────────────────────────────────────────────────────────────────────────────────────


def training_loss(groups: Sequence[Group]) -> Figure | None:
    """Draw the loss of the training batches over steps."""
    return _losses("Training loss", _curves(groups, "steps", "loss"), "Lower is better.")


def validation_loss(groups: Sequence[Group]) -> Figure | None:
    """Draw the loss of held-out text over steps."""
    how = "Lower is better. This is the loss on held-out text, by which recipes are compared."
    return _losses("Validation loss", _curves(groups, "evals", "val_loss"), how)


def _losses(title: str, curves: Sequence[Curve], how: str) -> Figure | None:
    layout = layout_of("step", _LOSS)
    data = traces_of(curves, title.lower())
    how += f"{_BAND}{fit_axis(curves, layout)}"
    return Figure(title.lower().replace(" ", "-"), title, how, data, layout) if data else None


def difference(groups: Sequence[Group], baseline: str | None = None) -> Figure | None:
    """Draw the validation loss minus the baseline's loss with the same seed."""
    if len(groups) < 2:
        return None
    first = groups[0]
    for group in groups:
        if group.label == baseline:
            first = group
    theirs = first.seeds()
    curves = []
    for group in groups:
        lines = []
        for seed, run in group.seeds().items():
            if seed in theirs and group is not first:
                minuend = column(run, "evals", "val_loss")
                lines.append(_minus(minuend, column(theirs[seed], "evals", "val_loss")))
        curves.append(curve_of(group, lines))
    if not _means_of(curves).size:
        return None
    # Noise in the last digits must look small.
    ends = []
    for line in first.lines("evals", "val_loss"):
        ends += line.finite[-1:].tolist()
    least = SMALLEST_SPAN / 2 * float(np.abs(ends).mean())
    layout = layout_of(
        "step",
        f"loss minus {first.label}",
        zeroline=True,
        autorangeoptions={"include": [-least, least]},
    )
    how = (
        f"Above zero a recipe is worse than {first.label}, below zero better. Each run is compared "
        "with the run of the same "
        "seed, which has the same initial weights and the same batches, so most of the variation "
        "between seeds cancels. "
        "A line is the mean of these differences, its band the range from the lowest seed to the "
        "highest. The band is not "
        f"a confidence interval; the cost table has one."
    )
    data = traces_of(curves, "difference")
    return Figure("difference", f"Validation loss against {first.label}", how, data, layout)


def _minus(line: Series, baseline: Series) -> Series:
    x, mine, theirs = np.intersect1d(line.x, baseline.x, return_indices=True)
    return Series(x, line.y[mine] - baseline.y[theirs])


# ── gradients ─────────────────────────────────────────────────────────────────────────────────────


def gradient_norm(groups: Sequence[Group]) -> Figure | None:
    """Draw the norm of all gradients over steps."""
    how = (
        "Norm of all gradients before clipping. A norm that rises steadily, or jumps tenfold, "
        "often precedes a loss spike by a "
        f"few steps.{_BAND}"
    )
    return _over_decades(groups, "grad_norm", "Gradient norm", how)


def loss_scale(groups: Sequence[Group]) -> Figure | None:
    """Draw the loss scale over steps."""
    how = (
        "Each halving is an overflow that skipped a step; each doubling follows many steps without "
        "one. A scale that keeps "
        "falling often precedes divergence, long before the loss shows it."
    )
    return _over_decades(groups, "loss_scale", "Loss scale", how)


def _means_of(curves: Sequence[Curve]) -> Array:
    """Return the finite values of all lines."""
    return np.concatenate([np.empty(0), *(curve.means for curve in curves)])


def _over_decades(groups: Sequence[Group], name: str, title: str, how: str) -> Figure | None:
    """Draw a column of the steps, over a logarithmic axis if its values are positive and span
    decades.
    """
    curves = _curves(groups, "steps", name)
    means = _means_of(curves)
    is_log = bool(means.size and 0 < 3 * means.min() < means.max())
    layout = layout_of("step", title.lower(), log_y=is_log)
    data = traces_of(curves, title.lower())
    return Figure(name.replace("_", "-"), title, how, data, layout) if data else None
