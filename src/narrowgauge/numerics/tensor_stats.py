"""Statistics of a tensor's values: magnitude, spread, distance between tensors, and the error of a cast.

These are the metrics of the gauges, each a pure function with a known answer. All take and return tensors and wait for
no device, so a step that computes a thousand of them copies its results to the host once. The *exponent histogram*
describes the range of a tensor: counts of binary exponents, which are integers, add up in any order over tensors, ranks
and steps, and can be plotted on the same axis as a format's range.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.errors import FormatError
from narrowgauge.numerics.quantization import padded, quantize, random_words, rotate, spread
from narrowgauge.numerics.rounding import EXPONENT, MAGNITUDE, bits_of, power_below
from narrowgauge.spec.computes import Cast
from narrowgauge.spec.formats import Format

CAST_SUMS = ("signal", "error", "beyond", "zeroed", "nonzero", "total")
"""The order of the sums of a cast: Σx², Σ(x−y)², values beyond the format's end, nonzero values that became zero, nonzero
values, all values."""


def amax(x: Tensor) -> Tensor:
    """The largest magnitude, 0-d float32; NaN where one value is, 0 for no values.

    Example:
        >>> amax(torch.tensor([1.0, -3.0])).item()
        3.0
    """
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    # One pass and no temporary; the maximum of abs(x) takes two and one.
    low, high = torch.aminmax(x.detach())
    return torch.maximum(low.abs(), high.abs()).float()


def rms(x: Tensor) -> Tensor:
    """The root of the mean square, 0-d float32, in bfloat16 to its three digits; 0 for no values.

    Example:
        >>> rms(torch.tensor([3.0, 4.0, 0.0, 0.0])).item()
        2.5
    """
    # In the tensor's own dtype it adds in float32 all the same, and is twice as fast; float16 lacks the range for the result.
    wide = torch.float32 if x.dtype is torch.float16 else None
    norm: Tensor = torch.linalg.vector_norm(x.detach(), dtype=wide)
    return norm.float() / math.sqrt(max(1, x.numel()))


def power_of_rms(x: Tensor) -> Tensor:
    """The largest power of two not above the root mean square of ``x``, 0-d float32, detached; 1 where there is none.

    That is: 1 for zeros, and for tensors whose mean square is not a float32. It hides nothing: an infinite value stays
    infinite when it is divided by it.

    Example:
        >>> power_of_rms(torch.tensor([3e-6, -5e-6])).log2()
        tensor(-18.)
    """
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    found = power_below(wide.square().mean().sqrt().float())
    return torch.where((found > 0) & (found < torch.inf), found, torch.ones_like(found))


def nonfinite_count(x: Tensor) -> Tensor:
    """How many values are NaN or infinite, 0-d int64.

    Example:
        >>> nonfinite_count(torch.tensor([1.0, float("nan"), float("inf")])).item()
        2
    """
    return (~torch.isfinite(x.detach())).sum()


def exponent_histogram(x: Tensor, first: int, bins: int) -> Tensor:
    """How many values have each binary exponent, int64 ``[bins]``; ``first`` is the exponent of the first bin, above -126.

    Invariant: bin ``k`` counts ``2**(first + k) <= abs(x) < 2**(first + k + 1)``; magnitudes below fall into the first bin,
    above into the last; zeros, NaN and infinities into none. Histograms of parts add up to that of the whole.

    Example:
        >>> exponent_histogram(torch.tensor([0.0, 1.0, -1.5, 4.0, 1e-9]), -1, 4).tolist()
        [1, 2, 0, 1]
    """
    bits = bits_of(x.detach().float().reshape(-1)) & MAGNITUDE
    place = ((bits >> 23) - 127 - first).clamp(0, bins - 1)
    counted = torch.where((bits != 0) & (bits < EXPONENT), place, bins).long()
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=x.device)
    return counts.scatter_add_(0, counted, torch.ones_like(counted))[:bins]


def kurtosis(x: Tensor) -> Tensor:
    """The fourth moment of ``[..., values]`` over the squared second, float32 ``[...]``: large with outliers.

    Invariant: about zero, not about the mean. 1 for two values ±a, 3 for a normal distribution, NaN where all values are zero.

    Example:
        >>> kurtosis(torch.tensor([2.0, -2.0, 2.0])).item()
        1.0
    """
    squares = x.detach().float().square()
    return squares.square().mean(-1) / squares.mean(-1).square()


def feature_peak(x: Tensor) -> tuple[Tensor, Tensor]:
    """How far the strongest feature of ``[..., rows, columns]`` stands out: the largest rms of a column over that of all.

    Returns:
        That ratio, float32 ``[...]``, and which column it is, int64. The ratio is 1 where all columns have the same rms, the
        root of their number where one alone is not zero.
    Example:
        >>> peak, column = feature_peak(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
        >>> round(peak.item(), 4), column.item()
        (1.4142, 1)
    """
    energy = x.detach().float().square().mean(-2)
    largest, column = energy.max(-1)
    return (largest / energy.mean(-1)).sqrt(), column


def cast_sums(x: Tensor, cast: Cast, dim: int = 1, *, fold: Tensor | None = None, amax: Tensor | None = None) -> Tensor:
    """What a cast takes from a matrix ``[rows, columns]``, as sums that add up: over rows, batches and steps.

    Args:
        dim: the dimension that the matmul contracts.
        fold: multiplied into ``x`` first; the other operand's scales.
        amax: the largest magnitude to scale a tensor by, in place of its own: ``[1, 1]``, or ``[rows, 1]`` where the rows
            belong to several tensors.
    Returns:
        float64 ``[rows, 6]`` in the order of :data:`CAST_SUMS`; padding counts as nothing.
    Example:
        >>> cast_sums(torch.tensor([[1.0, 1e-6]]), Cast("float8_e4m3fn", "row")).tolist()[0][2:]
        [0.0, 1.0, 2.0, 2.0]
    """
    return cast_and_sum(x, cast, dim, fold=fold, amax=amax)[0]


def cast_and_sum(
    x: Tensor, cast: Cast, dim: int = 1, *, fold: Tensor | None = None, amax: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """:func:`cast_sums`, and the outer scale by which the values were cast."""
    meant = padded(x, cast, dim).float()
    words = None
    if cast.rounding != "nearest":
        words = random_words(meant.shape[0], meant.shape[1], torch.zeros((), dtype=torch.int32, device=x.device))
    quantized = quantize(meant, cast, dim, words=words, fold=fold, amax=amax)
    meant = meant if fold is None else meant * fold
    meant = meant if cast.rotation == "none" else rotate(meant, dim, cast.rotation)
    scaled = meant if quantized.inner is None else meant / spread(quantized.inner, meant.shape)
    scaled = scaled if quantized.outer is None else scaled / quantized.outer
    kept = quantized.values()
    nonzero = meant != 0
    parts = (
        meant.double().square(),
        (meant.double() - kept.double()).square(),
        scaled.abs() > _end(cast.element),
        (kept == 0) & nonzero,
        nonzero,
    )
    sums = torch.stack([part.sum(1).double() for part in parts], 1)
    if len(sums) > len(x):  # a rotation moves values into the padding
        sums[len(x) - 1] += sums[len(x) :].sum(0)
        sums = sums[: len(x)]
    total = torch.full((x.shape[0], 1), float(x.shape[1]), dtype=torch.float64, device=x.device)
    return torch.cat([sums, total], 1), quantized.outer


def _end(row: Format) -> float:
    """The magnitude up to which values round to the format's largest: half a spacing beyond that."""
    return row.max + (0.5 if row.kind == "int" else 2.0 ** (row.max_exponent - row.mantissa_bits - 1))


def sqnr_of_sums(sums: Tensor) -> Tensor:
    """The signal to quantization noise ratio of added :func:`cast_sums` ``[..., 6]``, in decibels; +inf where nothing was lost.

    Example:
        >>> sqnr_of_sums(torch.tensor([100.0, 1.0, 0, 0, 1, 1])).item()
        20.0
    """
    signal, error = sums[..., 0], sums[..., 1]
    return 10 * torch.log10(torch.where(error == 0, torch.inf, signal / error))


class CastLoss(NamedTuple):
    """What a cast loses.

    Attributes:
        sqnr_db: signal to quantization noise ratio, decibels; +inf where nothing was lost.
        overflow: the share of values beyond the format's largest.
        underflow: the share of nonzero values that become zero.
    """

    sqnr_db: float
    overflow: float
    underflow: float


def cast_loss(sums: Tensor) -> CastLoss:
    """The metrics of :func:`cast_sums` ``[6]`` added up.

    Example:
        >>> cast_loss(torch.tensor([100.0, 1.0, 0, 1, 4, 5])).underflow
        0.25
    """
    _, _, beyond, zeroed, nonzero, total = sums.tolist()
    return CastLoss(float(sqnr_of_sums(sums)), beyond / max(total, 1), zeroed / max(nonzero, 1))


def block_scale_exponents(scales: Tensor) -> Tensor:
    """Lowest, median and highest binary exponent of block scales: how much of the scale's own range a tensor needs.

    Float32 ``[3]``, over the positive scales; NaN if there are none.

    Example:
        >>> block_scale_exponents(torch.tensor([0.5, 1.0, 8.0])).tolist()
        [-1.0, 0.0, 3.0]
    """
    used = torch.where(scales > 0, scales, torch.nan).float().reshape(-1)
    exponents = torch.frexp(used).exponent.float() - 1
    exponents = torch.where(used.isfinite(), exponents, torch.nan)
    quantiles = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float32, device=scales.device)
    return torch.nanquantile(exponents, quantiles, interpolation="lower")


def update_to_weight(before: Tensor, after: Tensor) -> Tensor:
    """The rms of a change over that of the value: what a step moves, relative to what is there.

    From values ``[..., n]`` float32 ``[...]``; NaN where ``before`` is all zero.

    Example:
        >>> update_to_weight(torch.tensor([2.0, -2.0]), torch.tensor([2.5, -2.0])).item()
        0.1767766922712326
    """
    change = (after.float() - before.float()).square().mean(-1)
    return (change / before.float().square().mean(-1)).sqrt()


def update_to_ulp(intended: Tensor, weight: Tensor, mantissa_bits: int | Tensor) -> Tensor:
    """The median size of a change in units of the weight's spacing: below a half, rounding to the nearest takes nothing.

    Args:
        intended: changes ``[..., n]``.
        weight: the values that change, same shape.
        mantissa_bits: of the weight's format; 7 for bfloat16. A tensor that broadcasts where rows differ.
    Returns:
        float32 ``[...]``, the lower median over the elements whose weight is not zero; NaN without any.
    Example:
        >>> update_to_ulp(torch.tensor([2.0**-9, 2.0**-8]), torch.tensor([1.0, 1.0]), 7).item()
        0.25
    """
    exponent = torch.frexp(weight.float()).exponent - 1 - mantissa_bits
    ulps = torch.where(weight != 0, torch.ldexp(intended.float().abs(), -exponent), torch.nan)
    return ulps.nanmedian(-1).values


def moment_bias(stored: Tensor, exact: Tensor) -> Tensor:
    """Σ stored / Σ exact of second moments ``[..., n]``: 1 when they follow the gradients, above 1 when they froze.

    Float64 ``[...]``; NaN where the exact ones are zero.

    Example:
        >>> moment_bias(torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.0])).item()
        2.0
    """
    whole = exact.double().sum(-1)
    return torch.where(whole == 0, torch.nan, stored.double().sum(-1) / whole)


def attention_statistics(query: Tensor, key: Tensor, scale: float, places: Tensor) -> Tensor:
    """The largest attention logit of some queries, and the entropy of their weights.

    Invariant: a query sees the keys up to its own place, as in a causal model.

    Args:
        query: ``[heads, tokens, width]`` of one sequence.
        key: ``[key heads, tokens, width]``; query heads share them in turn, and are a multiple of them.
        scale: by which logits are multiplied.
        places: int64 ``[queries]``: whose logits are computed.
    Returns:
        float32 ``[2]``: the maximum, and the mean entropy over that of even weights: 1 where all keys count equally, 0 where
        one alone does; 1 where only first tokens, which see one key, were requested.
    Example:
        >>> x = torch.zeros(1, 4, 8)
        >>> attention_statistics(x, x, 1.0, torch.tensor([3])).tolist()
        [0.0, 1.0]
    """
    if query.shape[0] % key.shape[0]:
        raise FormatError(f"{query.shape[0]} query heads cannot share {key.shape[0]} key heads.")
    wide = key.detach().float().repeat_interleave(query.shape[0] // key.shape[0], 0)
    logits = query.detach()[:, places].float() @ wide.transpose(1, 2) * scale
    seen = torch.arange(key.shape[1], dtype=torch.int64, device=key.device) <= places[:, None]
    logits = torch.where(seen, logits, -torch.inf)
    weights = logits.softmax(-1)
    entropy = torch.special.entr(weights).sum(-1)
    even = (places + 1).float().log()
    relative = torch.where(even > 0, entropy / even, 1.0)
    return torch.stack([logits.amax(), relative.mean()])
