"""Figures over steps that compare recipes: losses, their differences, gradient norms and loss
scales.

Lines of recipes that train alike lie on each other. So the difference from the baseline is drawn,
too, of runs with one seed. A figure without a second point is not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from narrowgauge.analysis.columns import Series, column
from narrowgauge.report.figures.figure import Figure, Line, over_steps
from narrowgauge.report.recipe_groups import Group

SMALLEST = 0.001
"""Nats that an axis of differences spans at least on each side: noise in the last digits looks small."""
_LOSS = "loss (nats per token)"
_CROSS = " A cross marks a value that is not finite."


def comparison_figures(
    groups: Sequence[Group], baseline: str | None = None
) -> dict[str, list[Figure]]:
    """Return all figures with data, by section.

    ``baseline`` is the label of the group to compare with (None: the first).
    """
    losses = [
        over_steps(
            "Training loss", f"Lower is better.{_CROSS}", lines_of(groups, "steps", "loss"), _LOSS, fits=True
        ),
        difference(groups, "steps", "loss", baseline),
    ]  # fmt: skip
    if len(groups) == 1:
        how = f"The loss on held-out text; lower is better.{_CROSS}"
        lines = lines_of(groups, "evals", "val_loss")
        losses.append(over_steps("Validation loss", how, lines, _LOSS, fits=True))
    losses.append(difference(groups, "evals", "val_loss", baseline))
    norm = (
        "Norm of all gradients before clipping. A norm that rises steadily, or jumps tenfold, often "
        f"precedes a loss spike by a few steps.{_CROSS}"
    )
    scale = (
        "Each halving is an overflow that skipped a step; each doubling follows many steps without "
        "one. A scale that keeps falling often precedes divergence."
    )
    history = []
    for name, title, how in (
        ("grad_norm", "Gradient norm", norm),
        ("loss_scale", "Loss scale", scale),
    ):
        lines = lines_of(groups, "steps", name)
        history.append(over_steps(title, how, lines, title.lower(), type="log"))
    return {"loss": list(filter(None, losses)), "history": list(filter(None, history))}


def lines_of(groups: Sequence[Group], table: str, name: str) -> list[Line]:
    """Return one column of ``steps`` or ``evals`` of every run."""
    lines = []
    for group in groups:
        for run, label in group.named:
            lines.append(Line(group.index, label, column(run, table, name)))
    return lines


def difference(
    groups: Sequence[Group], table: str, name: str, baseline: str | None = None
) -> Figure | None:
    """Draw a loss minus the baseline's loss with the same seed; ``None`` of one recipe.

    The training loss is a mean over 2 % of the run: both saw the same batches.
    """
    if len(groups) < 2:
        return None
    first = next((group for group in groups if group.label == baseline), groups[0])
    theirs = first.seeds()
    lines = []
    for group in groups:
        for (run, label), stats in zip(group.named, group.stats, strict=True):
            if group is first or stats.seed not in theirs:
                continue
            points = minus(column(run, table, name), column(theirs[stats.seed], table, name))
            lines.append(Line(group.index, label, smoothed(points) if table == "steps" else points))
    how = (
        f"Above zero a recipe is worse than {first.label}, below zero better. Each run is compared "
        "with the run of the same seed: the same initial weights and batches, so most of the noise "
        "cancels."
    )
    title = f"{'Training' if table == 'steps' else 'Validation'} loss against {first.label}"
    include = {"include": [-SMALLEST, SMALLEST]}
    return over_steps(
        title, how, lines, f"loss minus {first.label}", zeroline=True, autorangeoptions=include
    )


def minus(line: Series, baseline: Series) -> Series:
    """Return the difference at the steps that both have."""
    x, mine, theirs = np.intersect1d(line.x, baseline.x, return_indices=True)
    return Series(x, line.y[mine] - baseline.y[theirs])


def smoothed(line: Series) -> Series:
    """Return means of finite values over 2 % of a line, each at its last step."""
    is_finite = ~np.isnan(line.y)
    x = line.x[is_finite]
    width = max(1, len(x) // 50)
    if len(x) <= width:
        return Series(x, line.y[is_finite])
    means = np.convolve(line.y[is_finite], np.full(width, 1 / width), mode="valid")
    return Series(x[width - 1 :], means)
