"""Metrics of what a narrow format loses of an update.

An optimizer intends a change ``D``; the stored weight changes by ``E``, since ``w + D`` is cut; the visible weight changes
by ``V``. All metrics follow from sums over a tensor (:data:`UPDATE_SUMS`), which add up over steps, tensors and
shards before anything is divided. The first two metrics answer different questions. *EDQ* = ⟨D,E⟩/‖D‖² measures how much
of the update is stored **on average**: 1 is perfect, 0 is a stall, and stochastic rounding gives 1. *Noise* = ‖E−D‖/‖D‖
measures the change that was **not intended**: 0 is perfect, 1 is a stall, and stochastic bfloat16 gives 20. The shares of
lost elements count what the norms may hide: a few large entries that move, while all others stand still.

A single value for a small tensor is noisy: add the sums of many steps first. All functions that take whole tensors read each
once, with temporaries under 16 MiB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.errors import FormatError
from narrowgauge.numerics.summation import flat_chunks
from narrowgauge.spec.significance import FEWEST_SPACINGS

CHANGE_SUMS = ("dd", "de", "ee", "dv", "vv", "nonzero", "lost", "unseen")
"""Sums over the elements of an update: D², D·E, E², D·V, V², and how many had D ≠ 0; D ≠ 0 but E = 0; D ≠ 0 but V = 0."""
DECAY_SUMS = ("cc", "ct")
"""The same of its weight decay, see :func:`decay_terms`: C², C·T; zero where a rule has none that could be told apart."""
KERNEL_SUMS = (*CHANGE_SUMS, *DECAY_SUMS)
"""What a kernel sums."""
HOST_SUMS = ("elements", "spacings")
"""What the host knows of an audited part: how many elements it has, and to how many spacings of the stored weights their decay
comes, at least."""
UPDATE_SUMS = (*KERNEL_SUMS, *HOST_SUMS)
"""The order of the sums of an update."""

_PLACE = {name: place for place, name in enumerate(UPDATE_SUMS)}
_Terms = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def update_terms(intended: Tensor, stored: Tensor, visible: Tensor) -> _Terms:
    """The eight addends of one element each, from D, E and V, for a kernel to sum: in the order of
    :data:`CHANGE_SUMS`.

    Invariant: elementwise and pure, in the dtype given. Counts are 0 or 1 in that dtype too, so that one kind of register sums
    all eight. Squares below the dtype's range vanish (float32: changes under 1e-23), the counts do not.

    Example:
        >>> [term.item() for term in update_terms(torch.tensor(2.0), torch.tensor(1.0), torch.tensor(0.0))]
        [4.0, 2.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    """
    moved = intended != 0
    return (
        intended * intended,
        intended * stored,
        stored * stored,
        intended * visible,
        visible * visible,
        moved.to(intended.dtype),
        (moved & (stored == 0)).to(intended.dtype),
        (moved & (visible == 0)).to(intended.dtype),
    )


def decay_terms(intended: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """The two addends of one element each, from C and T, in the order of :data:`DECAY_SUMS`.

    C = −lr · wd · w is the part of D that is decoupled weight decay. T is the part of E that there would not be without it: what
    the store keeps of D, less what it would have kept of D − C at the same random bits. Both are of one element and one step, so
    the difference is decay's alone, whatever the gradient's part does. Where C is weaker than a 32nd of the stored spacing, it
    is taken to be that 32nd to a 16th (:func:`narrowgauge.optim.kernel.least_decay`).

    Example:
        >>> [term.item() for term in decay_terms(torch.tensor(-2.0), torch.tensor(-1.0))]
        [4.0, 2.0]
    """
    return intended * intended, intended * stored


def update_sums(intended: Tensor, stored: Tensor, visible: Tensor) -> Tensor:
    """The sums of one tensor's update without decay, float64 ``[12]``: the reference for kernels, which compute them on the way.

    Invariant: products are exact in float64 and summed there, chunk by chunk; counts are exact.

    Example:
        >>> d = torch.tensor([1.0, 1.0, 0.0, -2.0])
        >>> update_sums(d, d, torch.zeros(4)).tolist()
        [6.0, 6.0, 6.0, 0.0, 0.0, 3.0, 0.0, 3.0, 0.0, 0.0, 4.0, 0.0]
    """
    if not intended.shape == stored.shape == visible.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (intended, stored, visible))
        raise FormatError(f"update_sums takes three tensors of one shape, and got {shapes}.")
    total = torch.zeros(len(CHANGE_SUMS), dtype=torch.float64, device=intended.device)
    for parts in flat_chunks(intended, stored, visible):
        d, e, v = (part.double() for part in parts)
        total += torch.stack([term.sum() for term in update_terms(d, e, v)])
    known = torch.tensor([0.0, 0.0, intended.numel(), 0.0], dtype=torch.float64, device=intended.device)
    return torch.cat([total, known])


def completed(sums: Tensor) -> Tensor:
    """Sums ``[..., n]`` that an earlier version saved, with NaN for those that it did not have yet, ``[..., 12]``.

    Example:
        >>> completed(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0])).tolist()[-2:]
        [nan, nan]
    """
    return torch.nn.functional.pad(sums, (0, max(0, len(UPDATE_SUMS) - sums.shape[-1])), value=torch.nan)


def edq(sums: Tensor) -> Tensor:
    """Effective descent quality ⟨D,E⟩/‖D‖²: the share of the intended update that the store takes on average.

    The source divides by ‖D‖, which gives the length that the taken update has along the intended one: another number for
    every tensor and every step. Divided by ‖D‖ once more it is a share, and sums over tensors and steps can be divided
    instead of averaged.

    Invariant: 1 when nothing is lost, 0 in a stall; 1 on average, though noisy, for an unbiased stochastic cut. Where nothing
    was intended there is nothing to judge: NaN, not 1, so that it can neither hide nor raise an alarm.

    Args:
        sums: float64 ``[..., 12]``, from an audit or :func:`update_sums`; add those of several steps or tensors first.

    Example:
        >>> d = torch.tensor([1.0, 1.0])
        >>> edq(update_sums(d, torch.tensor([1.0, 0.0]), d)).item()
        0.5

    Source:
        Collage, arXiv 2405.03637, §3.2.
    """
    return _ratio(_sum(sums, "de"), _sum(sums, "dd"))


def noise(sums: Tensor) -> Tensor:
    """‖E−D‖/‖D‖: how much the store adds to, or takes from, the intended update, relative to it.

    Invariant: 0 when nothing is lost, 1 in a stall, NaN where nothing was intended. It comes from the sums by
    ‖E−D‖² = ΣE² − 2ΣD·E + ΣD², so products in float32 cannot resolve readings below about 1e-3, nor float64 below 1e-8.

    Example:
        >>> noise(update_sums(torch.ones(4), torch.zeros(4), torch.zeros(4))).item()
        1.0
    """
    intended = _sum(sums, "dd")
    # Rounding may leave the square of a small difference a little below zero.
    unintended = (_sum(sums, "ee") - 2 * _sum(sums, "de") + intended).clamp(min=0)
    return _ratio(unintended, intended).sqrt()


def lost_fraction(sums: Tensor) -> Tensor:
    """The share of intended changes (D ≠ 0) that left the stored value as it was; NaN where nothing was intended.

    Example:
        >>> d = torch.tensor([1.0, 1.0, 0.0])
        >>> lost_fraction(update_sums(d, torch.tensor([1.0, 0.0, 0.0]), d)).item()
        0.5
    """
    return _ratio(_sum(sums, "lost"), _sum(sums, "nonzero"))


def unseen_fraction(sums: Tensor) -> Tensor:
    """The share of intended changes (D ≠ 0) that left the visible weight as it was.

    High is healthy where the store keeps a tail: the changes are collected there until the upper word turns.

    Example:
        >>> d = torch.tensor([1.0, 1.0, 0.0])
        >>> unseen_fraction(update_sums(d, d, torch.tensor([1.0, 0.0, 0.0]))).item()
        0.5
    """
    return _ratio(_sum(sums, "unseen"), _sum(sums, "nonzero"))


def imprecision_share(sums: Tensor) -> Tensor:
    """The share of all elements that left the visible weight as it was: the source's "imprecision percentage".

    It counts elements of which no change was intended as well, and looks at the visible weight even where a low part or a
    tail takes what it does not show; :func:`unseen_fraction` and :func:`lost_fraction` do neither.

    Example:
        >>> d = torch.tensor([1.0, 1.0, 0.0, 0.0])
        >>> imprecision_share(update_sums(d, d, torch.tensor([1.0, 0.0, 0.0, 0.0]))).item()
        0.75

    Source:
        Collage, arXiv 2405.03637, §3.2.
    """
    return 1 - _ratio(_sum(sums, "nonzero") - _sum(sums, "unseen"), _sum(sums, "elements"))


def lost_decay(sums: Tensor) -> Tensor:
    """1 − ⟨C,T⟩/‖C‖²: the share of the intended weight decay that the store does not take, on average.

    Invariant: 0 when all of it is stored, 1 when none is; near 0 for an unbiased stochastic cut, and for a cut to the nearest
    where the gradient's part of the update moves each weight across several spacings, which spreads the remainders evenly. NaN
    where there is no decay, and where it comes to fewer than ``FEWEST_SPACINGS``: few roundings tell nothing.

    Example:
        >>> sums = torch.tensor([0.0] * 8 + [4.0, 1.0, 1000.0, 1000.0])
        >>> lost_decay(sums).item()
        0.75
    """
    share = 1 - _ratio(_sum(sums, "ct"), _sum(sums, "cc"))
    return torch.where(_sum(sums, "spacings") >= FEWEST_SPACINGS, share, torch.nan)


def visible_edq(sums: Tensor) -> Tensor:
    """⟨D,V⟩/‖D‖²: :func:`edq` of the weight that the model sees.

    Example:
        >>> d = torch.tensor([1.0, 1.0])
        >>> visible_edq(update_sums(d, d, torch.tensor([2.0, 0.0]))).item()
        1.0
    """
    return _ratio(_sum(sums, "dv"), _sum(sums, "dd"))


def _sum(sums: Tensor, name: str) -> Tensor:
    if sums.ndim == 0 or sums.shape[-1] != len(UPDATE_SUMS):
        raise FormatError(
            f"the sums of an update have shape [..., {len(UPDATE_SUMS)}], and these have {tuple(sums.shape)}.",
            f"Their order is {', '.join(UPDATE_SUMS)}.",
        )
    return sums[..., _PLACE[name]].double()


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole == 0, torch.nan, part / whole)
