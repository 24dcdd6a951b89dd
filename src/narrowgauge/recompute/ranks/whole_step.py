"""An audited step as all ranks know it: its gradients are means over ranks, or the norms of sharded ones are of all shards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from narrowgauge.numerics.shards import local_of
from narrowgauge.recompute.capture import StepCapture, gradient_of, sum_of_squares
from narrowgauge.recompute.computed_gradients import LeftByBackward
from narrowgauge.recompute.piece_results import PieceResult
from narrowgauge.recompute.ranks.gradient_sums import SENT_EPS, check_sums
from narrowgauge.recompute.ranks.samples import RankSamples, with_means
from narrowgauge.recompute.ranks.shard_norms import squares_by_rank, take_norms

WholeStep = tuple[StepCapture, list[PieceResult]]
_NOTHING_KEPT = "this rank kept nothing of the step"


def step_of_all(
    ranks: RankSamples,
    number: int,
    step: StepCapture | None,
    held: Mapping[str, Tensor],
    computed: Mapping[int, LeftByBackward],
    optimizer: torch.optim.Optimizer,
    *,
    is_sharded: bool,
) -> WholeStep | str:
    """The step as all ranks know it, and what they show; or why there is none, empty where one rank trains.

    Args:
        number: the step's.
        step: what this rank kept of it; ``None`` where that failed: it takes part all the same, since others wait for it.
        held: the optimizer's parameters by name.
        computed: what the backward passes left, by the id of a parameter.
        is_sharded: whether parameters are sharded over ranks.
    """
    if ranks.ranks == 1:
        return ""
    # Wait for a gradient: all ranks have then begun this step, and said before it whether they audit.
    next((float(local_of(p.grad).sum()) for p in held.values() if p.grad is not None), 0.0)
    if why := ranks.why_not(number, is_cut=is_sharded):
        return why
    with torch.no_grad():
        if is_sharded:
            squares = squares_by_rank(held, computed)
            return _NOTHING_KEPT if step is None else (step, take_norms(step, held, squares, optimizer))
        return _of_means(ranks, step, held, computed)


def _of_means(
    ranks: RankSamples, step: StepCapture | None, held: Mapping[str, Tensor], computed: Mapping[int, LeftByBackward]
) -> WholeStep | str:
    exchanged = ranks.exchange(held, computed)
    if step is None:
        return _NOTHING_KEPT
    for name in exchanged.own.keys() & step.parameters.keys():
        step.parameters[name].computed = exchanged.own[name]
    eps = SENT_EPS if ranks.has_hook else 0.0
    squares = {name: sum_of_squares(g).cpu() for name, p in held.items() if (g := gradient_of(p)) is not None}
    found = check_sums(step, exchanged.by_rank, eps)
    return with_means(step, exchanged.means, squares, eps), found
