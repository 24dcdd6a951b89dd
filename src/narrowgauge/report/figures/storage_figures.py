"""The figures of what a storage did to a run: weights that stand still, decay that is lost, second moments that are wrong.

The audit's EDQ is a share of what the optimizer *intended*, of all of it together, and that follows from the moments as they are
stored. These figures say what it cannot: how many weights the model sees unchanged, whether decay, which is far smaller than
the rest of an update, arrives too, and whether the moments themselves are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from narrowgauge.report.figures.palette import plain
from narrowgauge.report.figures.series import series_of
from narrowgauge.report.figures.traces import Figure, curve_of, dash_overlapping, layout_of, traces_of
from narrowgauge.report.recipe_groups import Group, Samples


def unchanged_weights(groups: Sequence[Group]) -> Figure | None:
    """The source's imprecision percentage over steps."""
    how = (
        "The share of all elements whose visible weight a step left as it was, on audited steps. High is healthy where "
        "something beside the visible weight (a tail, a master copy, a low part) keeps what does not show yet; where nothing "
        "does, what was intended there is lost. It is the imprecision percentage of the Collage paper (2405.03637)."
    )
    empty = Figure(
        "unchanged-weights", "Weights that a step leaves unchanged", how, [], layout_of("step", "share of all weights")
    )
    return _share_over_steps(groups, "imprecision_share", "unchanged weights", empty, {"range": [0, 1]})


def lost_decay(groups: Sequence[Group]) -> Figure | None:
    """The share of weight decay that was not stored, over steps."""
    how = (
        "The share of the intended weight decay that the storage did not take, over all tensors, on audited steps: 0 where all "
        "arrives, 1 where none does. It is read by storing each update with and without its decay. A single step scatters; only "
        "a level counts. Half lost or more over a window raises lost_decay."
    )
    empty = Figure("lost-decay", "Weight decay that is lost", how, [], layout_of("step", "share of the decay"))
    return _share_over_steps(groups, "lost_decay", "lost decay", empty, {"autorangeoptions": {"include": [0, 1]}})


def _share_over_steps(
    groups: Sequence[Group], column: str, name: str, empty: Figure, axis: dict[str, Any]
) -> Figure | None:
    """``empty`` with a curve of each group's ``column`` of audited steps; ``None`` where no run has it."""
    curves = [curve_of(group, group.lines("steps", column)) for group in groups]
    data = traces_of(curves, name=name)
    if not data:
        return None
    layout = empty.layout
    layout["yaxis"] |= {"tickformat": ".3~p", **axis}
    return replace(empty, how=f"{empty.how}{dash_overlapping(curves, data, layout)}", data=data, layout=layout)


def wrong_moments(groups: Sequence[Group]) -> Figure | None:
    """Per sampled step, the tensor whose second moments are farthest from exact ones."""
    data = []
    for group in groups:
        found = [farthest_bias(samples) for samples in group.samples]
        lines = [series_of((step, value) for step, (_, value) in worst.items()) for worst in found if worst]
        traces = traces_of([curve_of(group, lines)], name="second moments") if lines else []
        names = {step: tensor for worst in found for step, (tensor, _) in worst.items()}
        for trace in traces[-1:]:
            trace["customdata"] = [plain(names.get(x, "")) for x in trace["x"]]
            trace["hovertemplate"] = (
                "%{y:.3~g} times the exact ones in %{customdata}<extra>" + plain(group.label) + "</extra>"
            )
        data += traces
    if not data:
        return None
    layout = layout_of("step", "stored over exact", log_y=True)
    layout["yaxis"] |= {"autorangeoptions": {"include": [0.8, 1.25]}}
    how = (
        "Of all sampled tensors, the one whose stored second moments are farthest from the same ones kept in float32, as a "
        "factor. Hover for its name. Steps shrink with its square root: at 1.5 they are 18 % too short. EDQ cannot show that, "
        "since the storage takes all of an update that was computed too small."
    )
    return Figure("wrong-moments", "Second moments over exact ones", how, data, layout)


def farthest_bias(samples: Samples) -> dict[float, tuple[str, float]]:
    """By step the tensor whose second moments are off by the largest factor, up or down, and their bias."""
    found = samples.metrics.get("bias")
    if found is None:
        return {}
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.abs(np.log(found.values))
    factors[np.isnan(factors)] = -np.inf
    rows = factors.argmax(axis=0)
    return {
        step: (found.names[row], float(found.values[row, place]))
        for place, (step, row) in enumerate(zip(samples.steps, rows.tolist(), strict=True))
        if factors[row, place] > -np.inf
    }
