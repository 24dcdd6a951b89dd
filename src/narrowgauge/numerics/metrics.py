"""Metrics: the loss of an update in storage, and the size of a tensor's values.

An optimizer intends a change D. The stored weight changes by E, since w + D is rounded.
The visible weight changes by V. All metrics follow from sums over a tensor (:data:`UPDATE_SUMS`).
Add them over steps, tensors and shards before you divide. *EDQ* = ⟨D,E⟩/‖D‖² is the fraction of the
update that is stored **on average**. 1 is perfect, 0 is a stall, and stochastic rounding gives 1.
*Noise* = ‖E−D‖/‖D‖ is the change that was **not intended**. 0 is perfect, 1 is a stall, and
stochastic bfloat16 gives 20. Norms may hide that a few large entries move while all others do not.
Fractions of lost elements count that. The sums of one small tensor are noisy: add sums of many
steps first. None of these functions waits for a device.
"""

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import power_below

# ── updates ───────────────────────────────────────────────────────────────────────────────────────

UPDATE_SUMS = ("dd", "de", "ee", "nonzero", "lost", "unseen", "elements", "at_end")
"""The order of the sums of an update: D², D·E, E², and counts of D ≠ 0; D ≠ 0 but E = 0; D ≠ 0 but
V = 0. Then the number of elements, and of those with a state at an end of its code's range.
"""


def change_terms(intended: Tensor, stored: Tensor, visible: Tensor) -> list[Tensor]:
    """Return the addends of one element each to all but the last of :data:`UPDATE_SUMS`, float64."""
    d, e, v = intended.double(), stored.double(), visible.double()
    moved = d != 0
    return [
        d * d,
        d * e,
        e * e,
        moved.double(),
        (moved & (e == 0)).double(),
        (moved & (v == 0)).double(),
        torch.ones_like(d),
    ]


def _ratio(part: Tensor, total: Tensor) -> Tensor:
    return torch.where(total == 0, torch.nan, part / total)


def update_metrics(sums: Tensor) -> dict[str, Tensor]:
    """Return the metrics of sums ``[..., 8]`` by name, float64 ``[...]`` each.

    Add sums of steps or tensors first. A metric is NaN if nothing was intended: it can neither hide
    nor raise an alarm.
    """
    s = dict(zip(UPDATE_SUMS, sums.double().unbind(-1), strict=True))
    # ‖E−D‖² = ΣE² − 2ΣD·E + ΣD². Rounding may make a small one slightly negative.
    error = (s["ee"] - 2 * s["de"] + s["dd"]).clamp(min=0)
    return {
        # Collage (arXiv 2405.03637, §3.2) divides by ‖D‖. We divide once more, for a fraction whose
        # sums add up.
        "edq": _ratio(s["de"], s["dd"]),
        "noise": _ratio(error, s["dd"]).sqrt(),
        "lost_fraction": _ratio(s["lost"], s["nonzero"]),
        # Collage's "imprecision percentage": D = 0 counts, too.
        "imprecision_share": 1 - _ratio(s["nonzero"] - s["unseen"], s["elements"]),
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
