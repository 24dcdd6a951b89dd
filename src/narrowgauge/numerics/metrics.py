"""Metrics: the loss of an update in storage, the loss of a tensor in a cast, and the size of its
values.

*Updates.* An optimizer intends a change D. The stored weight changes by E, since w + D is rounded.
The visible weight changes by V. All metrics follow from sums over a tensor (:data:`UPDATE_SUMS`).
Add them over steps, tensors and shards before you divide. *EDQ* = ⟨D,E⟩/‖D‖² is the fraction of the
update that is stored **on average**. 1 is perfect, 0 is a stall, and stochastic rounding gives 1.
*Noise* = ‖E−D‖/‖D‖ is the change that was **not intended**. 0 is perfect, 1 is a stall, and
stochastic bfloat16 gives 20. Norms may hide that a few large entries move while all others do not.
Fractions of lost elements count that. The sums of one small tensor are noisy: add sums of many
steps first.

*Tensors.* None of these functions but :func:`cast_loss` waits for a device. So a step copies all
results to the host once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.numerics.quantization import padded, quantize, random_words, rotate, spread
from narrowgauge.numerics.rounding import power_below
from narrowgauge.spec.computes import Cast
from narrowgauge.spec.formats import Format
from narrowgauge.spec.significance import FEWEST_SPACINGS

# ── updates ───────────────────────────────────────────────────────────────────────────────────────

UPDATE_SUMS = (
    "dd", "de", "ee", "nonzero", "lost", "unseen", "cc", "ct", "elements", "spacings", "at_end",
)  # fmt: skip
"""The order of the sums of an update: D², D·E, E², and counts of D ≠ 0; D ≠ 0 but E = 0; D ≠ 0 but
V = 0. Then C² and C·T of its weight decay, the number of elements, the sum of their decays in ulps
of the stored weight, and the number of elements with a state at an end of its code's range.

C = −lr · wd · w is decoupled weight decay, a part of D. T is the part of E that C causes: the stored
change for D, minus the stored change for D − C at the same random bits.
"""


def change_terms(intended: Tensor, stored: Tensor, visible: Tensor) -> list[Tensor]:
    """Return the addends of one element each to the first six of :data:`UPDATE_SUMS`, float64."""
    d, e, v = intended.double(), stored.double(), visible.double()
    moved = d != 0
    return [
        d * d,
        d * e,
        e * e,
        moved.double(),
        (moved & (e == 0)).double(),
        (moved & (v == 0)).double(),
    ]


def _ratio(part: Tensor, total: Tensor) -> Tensor:
    return torch.where(total == 0, torch.nan, part / total)


def update_metrics(sums: Tensor) -> dict[str, Tensor]:
    """Return the metrics of sums ``[..., 11]`` by name, float64 ``[...]`` each.

    Add sums of steps or tensors first. A metric is NaN if nothing was intended: it can neither hide
    nor raise an alarm.
    """
    s = dict(zip(UPDATE_SUMS, sums.double().unbind(-1), strict=True))
    # ‖E−D‖² = ΣE² − 2ΣD·E + ΣD². Rounding may make a small one slightly negative.
    error = (s["ee"] - 2 * s["de"] + s["dd"]).clamp(min=0)
    lost_decay = 1 - _ratio(s["ct"], s["cc"])
    return {
        # Collage (arXiv 2405.03637, §3.2) divides by ‖D‖. We divide once more, for a fraction whose
        # sums add up.
        "edq": _ratio(s["de"], s["dd"]),
        "noise": _ratio(error, s["dd"]).sqrt(),
        "lost_fraction": _ratio(s["lost"], s["nonzero"]),
        # Collage's "imprecision percentage": D = 0 counts, too.
        "imprecision_share": 1 - _ratio(s["nonzero"] - s["unseen"], s["elements"]),
        # Too few ulps give no reliable number.
        "lost_decay": torch.where(s["spacings"] >= FEWEST_SPACINGS, lost_decay, torch.nan),
    }


# ── the values of a tensor ────────────────────────────────────────────────────────────────────────


def power_of_rms(x: Tensor) -> Tensor:
    """Return the largest power of two not above the root mean square of ``x``, 0-d float32,
    detached.

    It is 1 for zeros, and if the mean square is not a float32.
    """
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    power = power_below(wide.square().mean().sqrt().float())
    return torch.where((power > 0) & (power < torch.inf), power, torch.ones_like(power))


# ── casts ─────────────────────────────────────────────────────────────────────────────────────────

CAST_SUMS = ("signal", "error", "beyond", "zeroed", "nonzero", "total")
"""The order of a cast's sums: Σx², Σ(x−y)², values beyond the format's end, nonzero values that
became zero, nonzero values, all values.
"""


class CastLoss(NamedTuple):
    """Report the loss of a cast.

    Attributes:
        sqnr_db: signal to quantization noise ratio, decibels. +inf if nothing was lost.
        overflow: fraction of values beyond the format's largest.
        underflow: fraction of nonzero values that become zero.
    """

    sqnr_db: float
    overflow: float
    underflow: float


def cast_sums(x: Tensor, cast: Cast, *, amax: Tensor | None = None) -> Tensor:
    """Return the loss of casting a matrix ``[rows, contraction]``, as sums that add up over rows,
    batches and steps.

    Args:
        amax: replaces a tensor's own largest magnitude for the scale. ``[1, 1]``, or ``[rows, 1]``
            if the rows belong to several tensors.
    Returns:
        float64 ``[rows, 6]`` in the order of :data:`CAST_SUMS`. Padding does not count.
    Example:
        >>> cast_sums(torch.tensor([[1.0, 1e-6]]), Cast("float8_e4m3fn", "row")).tolist()[0][2:]
        [0.0, 1.0, 2.0, 2.0]
    """
    values = padded(x, cast, 1).float()
    words = None
    if cast.rounding != "nearest":
        words = random_words(
            values.shape[0], values.shape[1], torch.zeros((), dtype=torch.int32, device=x.device)
        )
    quantized = quantize(values, cast, words=words, amax=amax)
    if cast.rotation != "none":
        values = rotate(values, 1)
    scaled = values
    if quantized.inner is not None:
        scaled = scaled / spread(quantized.inner, values.shape)
    if quantized.outer is not None:
        scaled = scaled / quantized.outer
    rounded = quantized.values()
    nonzero = values != 0
    parts = (
        values.double().square(),
        (values.double() - rounded.double()).square(),
        scaled.abs() > _end(cast.element),
        (rounded == 0) & nonzero,
        nonzero,
    )
    sums = torch.stack([part.sum(1).double() for part in parts], 1)[: len(x)]
    total = torch.full((x.shape[0], 1), float(x.shape[1]), dtype=torch.float64, device=x.device)
    return torch.cat([sums, total], 1)


def _end(row: Format) -> float:
    """Return the largest magnitude that rounds to the format's largest: half an ulp beyond it."""
    if row.kind == "int":
        return row.max + 0.5
    return row.max + 2.0 ** (row.max_exponent - row.mantissa_bits - 1)


def sqnr_of_sums(sums: Tensor) -> Tensor:
    """Return the signal to quantization noise ratio of added :func:`cast_sums` ``[..., 6]``, in
    decibels. +inf without error.
    """
    signal = sums[..., 0]
    error = sums[..., 1]
    return 10 * torch.log10(torch.where(error == 0, torch.inf, signal / error))


def cast_loss(sums: Tensor) -> CastLoss:
    """Return the metrics of :func:`cast_sums` ``[6]`` added up."""
    _, _, beyond, zeroed, nonzero, total = sums.tolist()
    return CastLoss(float(sqnr_of_sums(sums)), beyond / max(total, 1), zeroed / max(nonzero, 1))
