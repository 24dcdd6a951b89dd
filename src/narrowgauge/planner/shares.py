"""Shares: how much of its printed rates a chip reaches in training, each as an interval with a source.

No kernel reaches the data sheet. What it reaches is measured per kernel and published per chip; where it is not published, the
median of the chips of which it is known is taken, and its spread. Every share is an interval in which it lies four times out of
five, so that a prediction has one too. ``calibration`` replaces shares by those of a machine that was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from narrowgauge.errors import ChipError
from narrowgauge.spec.chips import CHIPS, Chip

# Formats that are multiplied at another format's rate.
_SAME_RATE = {"float8_e5m2": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class Share:
    """A measured number.

    Args:
        value: a share of a printed rate; a time where the name ends in ``seconds``.
        low, high: the interval in which it lies four times out of five.
        source: the publication.

    Raises:
        ValueError: the value lies outside its interval.
    """

    value: float
    low: float
    high: float
    source: str

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.value <= self.high:
            raise ValueError(f"a share of {self.value:g} does not lie within {self.low:g} to {self.high:g}")

    def scaled(self, low: float, factor: float, high: float, why: str) -> Share:
        """This share times another one."""
        return Share(self.value * factor, self.low * low, self.high * high, f"{self.source}; {why}")

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


_TOGETHER = 0.7
"""How far towards their ends all shares are taken together: they lie there at once less often than one of them does."""


class Shares:
    """Named shares of one chip.

    Args:
        rows: by name: ``matmul.FORMAT`` and the names of ``GENERAL``.

    Example:
        >>> from narrowgauge.spec.chips import get_chip
        >>> shares = shares_of(get_chip("H100-SXM"))
        >>> round(shares.matmul("bfloat16").value, 2), shares["network"].value
        (0.72, 0.85)
    """

    def __init__(self, rows: Mapping[str, Share]) -> None:
        self.rows = dict(rows)

    @cached_property
    def best(self) -> Shares:
        """Every share most of the way to the end of its interval at which a step is shortest."""
        return self._at_end(is_best=True)

    @cached_property
    def worst(self) -> Shares:
        """Every share most of the way to the end of its interval at which a step is longest."""
        return self._at_end(is_best=False)

    def _at_end(self, *, is_best: bool) -> Shares:
        ends = {name: row.low if (name in LOSSES) == is_best else row.high for name, row in self.rows.items()}
        near = {name: row.value + _TOGETHER * (ends[name] - row.value) for name, row in self.rows.items()}
        return Shares({name: Share(end, end, end, self.rows[name].source) for name, end in near.items()})

    def __getitem__(self, name: str) -> Share:
        return self.rows[name]

    def matmul(self, format: str) -> Share:
        """The share of the peak rate of that format that a large matmul reaches.

        Raises:
            ChipError: the chip does not multiply it.
        """
        name = f"matmul.{rate_name(format)}"
        if name not in self.rows:
            known = ", ".join(row.partition(".")[2] for row in self.rows if row.startswith("matmul."))
            raise ChipError(f"a share of {format}'s rate was requested, which is not known here.", f"Known: {known}.")
        return self.rows[name]

    def replaced(self, rows: Mapping[str, Share]) -> Shares:
        """The same with other rows; what is not named stays."""
        return Shares({**self.rows, **rows})


def rate_name(format: str) -> str:
    """The format at whose rate a format is multiplied."""
    return _SAME_RATE.get(format, format)


def best_share(format: str, chip: Chip) -> Share:
    """The share of the printed rate that the best published matmul reaches.

    Args:
        format: of the operands.
        chip: which.
    Returns:
        The chip's own, without an interval; else the median of the chips of which one is known, with their spread.
    """
    name = rate_name(format)
    # The 16-bit formats share multipliers; matmuls are published in bfloat16.
    own_name = "bfloat16" if name == "float16" else name
    if own_name in chip.measured_tflops:
        own = chip.measured_tflops[own_name] / chip.peak_tflops[own_name]
        return Share(own, own, own, "its own best published matmul")
    for known in (name, "bfloat16"):
        found = [c.measured_tflops[known] / c.peak_tflops[known] for c in CHIPS.values() if known in c.measured_tflops]
        if found:
            source = f"the median of {len(found)} chips' best published {known} matmuls"
            return Share(statistics.median(found), min(found), max(found), source)
    raise AssertionError("some chip's bfloat16 rate is measured")


TYPICAL = (0.80, 0.90, 1.0)
"""Low, middle and high share of the best published matmul that the shapes and values of training reach: random operands cost
11 % of an A100's rate over zeros (power: Horace He, Strangely, matrix multiplications on GPUs run faster when given predictable
data, 2024), and other shapes than the best one a few per cent."""


_GENERAL = {
    "kernel_seconds": Share(
        5e-6, 3e-6, 8e-6, "start and tail of a kernel: H100 matmuls of 2 to 70 GFLOP, XLA's matmul_interpolator_data.h"
    ),
    "bandwidth": Share(
        0.80,
        0.65,
        0.92,
        "torchao's MXFP8 cast on a B200, 6,462 of 8,000 GB/s; Calculon 0.9 from 100 MB on, 0.75 at 10 MB",
    ),
    "elementwise": Share(
        0.80, 0.55, 1.0, "bytes of fully fused kernels over those that compiled blocks move: an assumption"
    ),
    "casts": Share(1.0, 1.0, 1.0, "as fast as other streams of bytes, until a machine is calibrated"),
    "loss": Share(1.0, 1.0, 1.0, "as fast as other streams of bytes, until a machine is calibrated"),
    "optimizer": Share(1.0, 1.0, 1.0, "as fast as other streams of bytes, until a machine is calibrated"),
    "attention": Share(0.40, 0.25, 0.60, "fused kernels without a published rate: llm-analysis takes 0.5"),
    "link": Share(
        0.80, 0.62, 0.95, "8 × H200 368 of 450 GB/s by rings, 482 in the switch (ml-engineering); Calculon 0.6"
    ),
    "network": Share(
        0.85, 0.60, 0.95, "4 × 8 B200 377 of 400 GB/s (ml-engineering); Calculon 0.9; shared networks are slower"
    ),
    "host": Share(0.85, 0.65, 0.90, "55 of 63 GB/s over PCIe5 (ml-engineering)"),
    "host_memory_seconds_per_byte": Share(1e-11, 5e-12, 2e-11, "100 GB/s of host memory a chip, DeepSpeed's CPU Adam"),
    "library": Share(
        0.80,
        0.55,
        1.0,
        "what libraries reach of their kernels' sum; Llama 8B on 8 H100 at 7,689 and 14,451 tokens/s (peers)",
    ),
    "slowed.link": Share(
        0.15, 0.05, 0.25, "of the multiprocessors while chips of a node exchange: Calculon's processor_usage"
    ),
    "slowed.network": Share(0.02, 0.0, 0.10, "of the multiprocessors while nodes exchange: Calculon's processor_usage"),
    "overlap.shard": Share(0.90, 0.70, 1.0, "prefetched gathers and reductions of FSDP2 and ZeRO: an assumption"),
    "overlap.tensor": Share(0.10, 0.0, 0.50, "Megatron-LM overlaps part of the backward; userbuffers most of it"),
    "overlap.context": Share(0.80, 0.40, 1.0, "ring attention sends the next block meanwhile: an assumption"),
    "overlap.pipeline": Share(0.50, 0.0, 0.95, "interleaved schedules send meanwhile, others wait"),
    "overlap.expert": Share(0.30, 0.0, 0.90, "DeepSeek-V3's DualPipe hides nearly all, others nothing"),
    "once_per_node": Share(
        0.50,
        0.0,
        1.0,
        "DeepEP sends a token once to each node (arXiv 2412.19437, 3.2.2), an all-to-all once to each expert",
    ),
    "spread": Share(
        0.010, 0.004, 0.020, "of the speed of equal chips: an assumption; Sinha et al., SC 2022: up to 8 % by site"
    ),
    "data": Share(0.005, 0.0, 0.020, "of a step that waits for data and the host: an assumption"),
    "restart_seconds": Share(600.0, 180.0, 1800.0, "from a failure to the next step: MegaScale under 15 minutes"),
}

LOSSES = (
    "kernel_seconds", "host_memory_seconds_per_byte", "spread", "data", "restart_seconds", "slowed.link", "slowed.network",
)  # fmt: skip
"""Of these, less is better."""

GENERAL = tuple(_GENERAL)
"""The names of the shares that every chip has, besides ``matmul.FORMAT``."""

# By generation, what differs from chip to chip beside its printed rates. Attention: of the printed 16-bit rate, forward and
# backward, causal, heads of 128.
_GENERATIONS: dict[str, dict[str, Share]] = {
    "Ampere": {
        "attention": Share(0.52, 0.40, 0.65, "FlashAttention-2 on an A100: 50 to 73 % (arXiv 2307.08691)"),
        "library": Share(
            0.97, 0.80, 1.0, "Calculon meets Megatron-LM's A100 runs to 3.65 % by kernels alone (SC 2023)"
        ),
    },
    "Hopper": {
        "attention": Share(
            0.38, 0.28, 0.58, "H100: FlashAttention-2 28 to 37 %, FlashAttention-3 50 to 60 % (2407.08608)"
        ),
        "overlap.tensor": Share(
            0.50, 0.10, 0.90, "userbuffers, asynchronous tensor parallelism, or nothing hides part of it"
        ),
    },
    "Blackwell": {
        "overlap.tensor": Share(
            0.50, 0.10, 0.90, "userbuffers, asynchronous tensor parallelism, or nothing hides part of it"
        ),
    },
}


@cache
def shares_of(chip: Chip) -> Shares:
    """What a chip reaches of its printed rates, from publications.

    Args:
        chip: of the table of chips.
    Returns:
        Its shares; the same object for the same chip.
    """
    low, middle, high = TYPICAL
    why = "shapes and values of training reach 0.9 of it (0.8 to 1)"
    rows = {f"matmul.{name}": best_share(name, chip).scaled(low, middle, high, why) for name in chip.peak_tflops}
    rows |= _GENERAL
    rows |= next((own for name, own in _GENERATIONS.items() if chip.architecture.startswith(name)), {})
    if not chip.link_gb_per_second:
        rows["link"] = Share(0.50, 0.30, 0.80, "through the host: half where two chips share its lanes; an assumption")
    return Shares(rows)


def sources_of(shares: Shares, names: Iterable[str]) -> list[str]:
    """One line per share: its name, value, interval and source."""
    return [f"{name}: {shares[name]}, {shares[name].source}" for name in names]
