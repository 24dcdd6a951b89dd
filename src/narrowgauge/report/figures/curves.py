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
from narrowgauge.report.page_runs import PageRun

SMALLEST = 0.001
"""Nats that an axis of differences spans at least on each side: noise in the last digits looks small."""
_LOSS = "loss (nats per token)"
_CROSS = " A cross marks a value that is not finite."


_HISTORY = {
    "grad_norm": (
        "Gradient norm",
        "Norm of all gradients before clipping. A norm that rises steadily, or jumps tenfold, often "
        f"precedes a loss spike by a few steps.{_CROSS}",
    ),
    "loss_scale": (
        "Loss scale",
        "Each halving is an overflow that skipped a step; each doubling follows many steps without "
        "one. A scale that keeps falling often precedes divergence.",
    ),
}


def comparison_figures(
    runs: Sequence[PageRun], baseline: str | None = None
) -> dict[str, list[Figure]]:
    """Return all figures with data, by section.

    ``baseline`` is the label of the recipe to compare with (None: the first).
    """
    lower = f"Lower is better.{_CROSS}"
    losses = [
        over_steps("Training loss", lower, lines_of(runs, "steps", "loss"), _LOSS, fits=True),
        difference(runs, "steps", "loss", baseline),
        difference(runs, "evals", "val_loss", baseline),
    ]
    if len({run.recipe for run in runs}) == 1:
        how = f"The loss on held-out text. {lower}"
        lines = lines_of(runs, "evals", "val_loss")
        losses.append(over_steps("Validation loss", how, lines, _LOSS, fits=True))
    history = []
    for name, (title, how) in _HISTORY.items():
        lines = lines_of(runs, "steps", name)
        history.append(over_steps(title, how, lines, title.lower(), type="log"))
    return {"loss": list(filter(None, losses)), "history": list(filter(None, history))}


def lines_of(runs: Sequence[PageRun], table: str, name: str) -> list[Line]:
    """Return one column of ``steps`` or ``evals`` of every run."""
    return [Line(run.colour, run.name, column(run.run, table, name)) for run in runs]


def difference(
    runs: Sequence[PageRun], table: str, name: str, baseline: str | None = None
) -> Figure | None:
    """Draw a loss minus the baseline's loss with the same seed; ``None`` of one recipe.

    The training loss is a mean over 2 % of the run: both saw the same batches.
    """
    first = baseline or runs[0].recipe
    theirs = {run.seed: column(run.run, table, name) for run in runs if run.recipe == first}
    lines = []
    for run in runs:
        if run.recipe != first and run.seed in theirs:
            points = minus(column(run.run, table, name), theirs[run.seed])
            if table == "steps":
                points = smoothed(points)
            lines.append(Line(run.colour, run.name, points))
    how = (
        f"Above zero a recipe is worse than {first}, below zero better. Each run is compared with "
        "the run of the same seed: the same initial weights and batches, so most of the noise "
        "cancels."
    )
    title = f"{'Training' if table == 'steps' else 'Validation'} loss against {first}"
    include = {"include": [-SMALLEST, SMALLEST]}
    return over_steps(
        title, how, lines, f"loss minus {first}", zeroline=True, autorangeoptions=include
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
