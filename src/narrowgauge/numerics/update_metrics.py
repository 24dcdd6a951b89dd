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

KERNEL_SUMS = ("dd", "de", "ee", "dv", "vv", "nonzero", "lost", "unseen")
"""What a kernel sums over the elements of an update: D², D·E, E², D·V, V², and how many had D ≠ 0; D ≠ 0 but E = 0; D ≠ 0
but V = 0."""
UPDATE_SUMS = (*KERNEL_SUMS, "elements")
"""The order of the sums of an update: the kernel's, and the number of elements that they are over, which the host knows."""

_PLACE = {name: place for place, name in enumerate(UPDATE_SUMS)}
_Terms = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def update_terms(intended: Tensor, stored: Tensor, visible: Tensor) -> _Terms:
    """The eight addends of one element each, from D, E and V, for a kernel to sum: in the order of :data:`KERNEL_SUMS`.

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


def update_sums(intended: Tensor, stored: Tensor, visible: Tensor) -> Tensor:
    """The sums of one tensor's update, float64 ``[9]``: the reference for the kernels that compute them on the way.

    Invariant: products are exact in float64 and summed there, chunk by chunk; counts are exact.

    Example:
        >>> d = torch.tensor([1.0, 1.0, 0.0, -2.0])
        >>> update_sums(d, d, torch.zeros(4)).tolist()
        [6.0, 6.0, 6.0, 0.0, 0.0, 3.0, 0.0, 3.0, 4.0]
    """
    if not intended.shape == stored.shape == visible.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (intended, stored, visible))
        raise FormatError(f"update_sums takes three tensors of one shape, and got {shapes}.")
    total = torch.zeros(len(KERNEL_SUMS), dtype=torch.float64, device=intended.device)
    for parts in flat_chunks(intended, stored, visible):
        d, e, v = (part.double() for part in parts)
        total += torch.stack([term.sum() for term in update_terms(d, e, v)])
    return torch.cat([total, torch.full_like(total[:1], intended.numel())])


def completed(sums: Tensor) -> Tensor:
    """Sums ``[..., n]`` that an earlier version saved, with NaN for those that it did not have yet, ``[..., 9]``.

    Example:
        >>> completed(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0])).tolist()[-2:]
        [0.0, nan]
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
        sums: float64 ``[..., 9]``, from an audit or :func:`update_sums`; add those of several steps or tensors first.

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
