"""Norms of gradients that are sharded over ranks: what each rank holds of them, exchanged once in every audited step.

FSDP2 leaves in ``p.grad`` this rank's part of the sum over ranks. The sum of squares of a whole gradient takes one number from
each rank that holds another part of it; of parameters that every rank holds whole, or that replicas hold, none is counted twice.
The numbers of all ranks also tell whether each clipped by the norm of its own part, which trains, and cuts each part otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.numerics.shards import is_shared_out, is_unsummed, ranks_of_parts
from narrowgauge.recompute.capture import ParameterSample, StepCapture, sum_of_squares
from narrowgauge.recompute.computed_gradients import LeftByBackward
from narrowgauge.recompute.fitting import fitted
from narrowgauge.recompute.piece_results import PieceResult, not_checked
from narrowgauge.recompute.rules.own_step import own_step

COMPUTED, RECEIVED = 0, 1
_ROUNDING = 1e-5


def squares_by_rank(held: Mapping[str, Tensor], computed: Mapping[int, LeftByBackward]) -> Tensor:
    """Of what each rank holds of every gradient, the sums of squares: as its backward passes left it, and as it steps with it.

    Args:
        held: the optimizer's parameters by name, in the same order on all ranks, each of which calls this.
        computed: what the backward passes left, by the id of a parameter.
    Returns:
        ``[ranks, 2, parameters]``, float64, on the CPU; not a number where no backward pass of a rank left anything.
    Cost: one message of 16 bytes for each parameter.
    """
    is_on_cpu = "gloo" in str(dist.get_backend_config())  # gradients may lie there although only a GPU's can be sent
    device = torch.device("cpu") if is_on_cpu else torch.device("cuda", torch.cuda.current_device())
    zero = torch.zeros((), dtype=torch.float64, device=device)
    left = [computed.get(id(p)) for p in held.values()]
    before = [
        zero * math.nan if each is None else each.up_to(p.grad)[1] for each, p in zip(left, held.values(), strict=True)
    ]
    after = [zero if p.grad is None else sum_of_squares(p.grad) for p in held.values()]
    mine = torch.stack([torch.stack([each.to(device) for each in row]) for row in (before, after)])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.stack(parts).cpu()


def take_norms(
    step: StepCapture, held: Mapping[str, Tensor], squares: Tensor, optimizer: torch.optim.Optimizer
) -> list[PieceResult]:
    """Give the samples of a step the sums of squares of whole gradients, and what our own optimizers make of their norm.

    Where ranks still hold terms of a gradient, which the optimizer's own operations add up, norms stay unknown.

    Args:
        squares: as :func:`squares_by_rank` returns them.
    Returns:
        What is not checked of the gradients.
    """
    if any(is_unsummed(p.grad) for p in held.values()):
        return []
    whole = {name: squares[ranks_of_parts(p)][:, :, place].sum(0) for place, (name, p) in enumerate(held.items())}
    for name, sample in step.parameters.items():
        found = whole.get(name)
        sample.computed_squares = None if found is None or bool(found[COMPUTED].isnan()) else found[COMPUTED]
    is_cut = torch.tensor([is_shared_out(p) for p in held.values()], dtype=torch.bool)
    step.norms_of_ranks = tuple(map(_norm_and_factor, squares, [is_cut] * len(squares)))
    _take_own_clip(step, optimizer, math.sqrt(sum(float(each[RECEIVED]) for each in whole.values())))
    return _take_summed(step, whole, {name for name, p in held.items() if not is_shared_out(p)})


def _norm_and_factor(squares: Tensor, is_cut: Tensor) -> tuple[float, float]:
    """The norm of all that a rank holds, and the factor by which it multiplied its own parts after the backward passes."""
    before, after = squares[:, is_cut].nansum(1).tolist()
    if not before or not after or not math.isfinite(after) or not math.isfinite(before):
        return math.nan, math.nan
    others = float(squares[RECEIVED, ~is_cut].sum()) * before / after  # perhaps summed since
    return math.sqrt(before + others), math.sqrt(after / before)


def _take_own_clip(step: StepCapture, optimizer: torch.optim.Optimizer, norm: float) -> None:
    """Multiply the samples by the factor of an optimizer that clips within its step, which needs the norm over all ranks."""
    if "update" not in step.missing:
        return
    own = own_step(optimizer, norm)
    del step.missing["update"]
    if own.why_not:
        step.missing["update"] = own.why_not
        return
    for sample in step.parameters.values():
        if sample.gradient is not None:
            sample.gradient = (sample.gradient.double() * own.clip).to(sample.gradient.dtype)


def _take_summed(step: StepCapture, whole: Mapping[str, Tensor], names: set[str]) -> list[PieceResult]:
    """Parameters that every rank holds whole, and something sums after the backward passes: their norm is that of the sum.

    What was done to them since is taken to be what was done to the parts of the others.
    """
    summed = [each for name, each in step.parameters.items() if name in names and _off(each) > _ROUNDING]
    factors = (_factor(each) for name, each in step.parameters.items() if name not in names)
    factor = next(filter(None, factors), 0.0)
    received = step.norms_of_ranks[dist.get_rank()][1]
    for sample in summed:
        sample.computed, sample.computed_squares = None, None
        if factor and received and sample.gradient is not None:
            sample.computed = (sample.gradient.double() / factor).to(sample.gradient.dtype)
            sample.computed_squares = whole[sample.name][RECEIVED] / received**2
    why = "parameters that are not sharded are summed over ranks after the backward passes"
    return [not_checked("gradient", why, step.step)] if summed else []


def _factor(sample: ParameterSample) -> float:
    """By what the gradient was multiplied since the backward passes; 0 where this rank holds none of it."""
    if sample.gradient is None or sample.computed is None or not sample.computed.any():
        return 0.0
    return fitted(sample.gradient.double(), [sample.computed.double()])[0][0]


def _off(sample: ParameterSample) -> float:
    """How far the gradient is from a multiple of what the backward passes left, relative to its length."""
    if sample.gradient is None or sample.computed is None or not sample.gradient.any():
        return 0.0
    _, rest = fitted(sample.gradient.double(), [sample.computed.double()])
    return rest / float(sample.gradient.double().norm()) - 4 * sample.gradient_eps
