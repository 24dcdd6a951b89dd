"""Whose gradients are in a mean over ranks: those of all, this rank's own alone, or all but some.

Whatever all elements were multiplied by afterwards, as by clipping, the direction of a tensor tells. A rank's own gradient looks
right to that rank; what the others step with tells it from a mean that lacks their parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from narrowgauge.recompute.capture import StepCapture
from narrowgauge.recompute.piece_results import DEPARTS, PieceResult, joined, not_checked
from narrowgauge.runs.finding import told

PIECE = "gradient"
SENT_EPS = torch.finfo(torch.bfloat16).eps
"""The spacing at 1 of the narrowest format in which a communication hook sends gradients."""
_FLOAT32 = 1e-5
_BETTER = 4.0
"""How many times nearer an alternative must be than the mean over all ranks."""
_MOST_MISSING = 8
"""Ranks that are searched for: those of one machine."""
_NAMED = 8

Named = tuple[str, dict[str, object]]


def check_sums(step: StepCapture, by_rank: Mapping[str, Tensor], eps: float = 0.0) -> list[PieceResult]:
    """Name the ranks that step with their own gradient, and those whose part is missing.

    Args:
        step: with the formats of its gradients.
        by_rank: for some parameters ``[2, ranks, elements]``, float64: what each rank computed, and what it steps with.
        eps: the spacing at 1 of the format that gradients were sent in, where it may be another.
    """
    departs = []
    for name, (computed, received) in by_rank.items():
        sample = step.parameters.get(name)
        if sample is None or not computed.shape[1]:
            continue
        tolerance = _FLOAT32 + 4 * max(eps, sample.gradient_eps)
        if (named := ranks_in(computed, received, tolerance)) is not None:
            cause, values = named
            departs.append(PieceResult(PIECE, DEPARTS, (name,), 1.0, tolerance, cause, values, step.step))
    return joined(departs, len(by_rank))


def ranks_in(computed: Tensor, received: Tensor, tolerance: float) -> Named | None:
    """Which ranks' gradients a tensor is made of, where it is not all of them.

    Args:
        computed, received: ``[ranks, elements]``, float64.
        tolerance: the relative length of what rounding leaves.
    Returns:
        A cause and its values; ``None`` where it is the mean over all, or something else.

    Example:
        >>> own = torch.eye(3, dtype=torch.float64)
        >>> mean = own.mean(0).expand(3, 3)
        >>> without_1 = torch.tensor([[1.0, 0.0, 1.0]] * 3, dtype=torch.float64)
        >>> ranks_in(own, mean, 1e-5), ranks_in(own, without_1, 1e-5), ranks_in(own, own, 1e-5)[1]["ranks"]
        (None, ('rank-missing', {'missing': 'rank 1', 'of': 3}), 'ranks 0, 1, 2')
    """
    mean = computed.mean(0, keepdim=True)
    off = torch.stack([_off(each, mean)[0] for each in received])
    if bool((off <= tolerance).all()):
        return None
    number = len(computed)
    if bool((_off(received[0], received) <= tolerance).all()):
        missing = _missing(computed, received[0], tolerance, float(off[0]))
        return ("rank-missing", {"missing": _in_words(missing), "of": number}) if missing else None
    of_own = torch.stack([_off(got, own[None])[0] for got, own in zip(received, computed, strict=True)])
    own_alone = ((of_own <= tolerance) & (off >= _BETTER * tolerance)).nonzero().flatten().tolist()
    return ("ranks-not-summed", {"ranks": _in_words(own_alone), "of": number}) if own_alone else None


def _in_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {told(map(str, ranks), _NAMED)}"


def _missing(computed: Tensor, received: Tensor, tolerance: float, off: float) -> tuple[int, ...]:
    """The ranks without which the mean agrees, taken out one after the other; empty where it does not."""
    left = list(range(len(computed)))
    while len(left) > 1 and len(computed) - len(left) < _MOST_MISSING:
        rests = _off(received, computed[left].sum(0) - computed[left])
        best = int(rests.argmin())
        left.pop(best)
        if float(rests[best]) <= min(tolerance, off / _BETTER):
            return tuple(rank for rank in range(len(computed)) if rank not in left)
    return ()


def _off(vector: Tensor, terms: Tensor) -> Tensor:
    """How far a vector is from a positive multiple of each term, relative to its length; of two zeros 0.

    Args:
        vector: ``[elements]``.
        terms: ``[terms, elements]``.
    """
    factors = (terms @ vector) / terms.square().sum(1).clamp_min(1e-300)
    rests = (vector - factors.clamp_min(0.0)[:, None] * terms).norm(dim=1)
    length = vector.norm()
    of_zeros = (terms.norm(dim=1) > 0).double()
    return torch.where(length > 0, rests / length.clamp_min(1e-300), of_zeros)


def without(step: StepCapture, named: Sequence[PieceResult]) -> StepCapture:
    """A step without the parameters of which something is named."""
    departs = [each for each in named if each.status == DEPARTS]
    gone = {name for each in departs for name in each.where or step.parameters}
    return replace(step, parameters={name: each for name, each in step.parameters.items() if name not in gone})


def as_sent(results: list[PieceResult], step: StepCapture) -> list[PieceResult]:
    """Results about gradients that a communication hook sent: one that approximates them explains all but a factor."""
    if all(each.cause == "gradient-scaled" for each in results if each.status == DEPARTS):
        return results
    return [not_checked(PIECE, "gradients travel by a communication hook that does not only round them", step.step)]
