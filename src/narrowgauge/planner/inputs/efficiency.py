"""Efficiency: which share of its printed rates a chip reaches in training, each as an interval with a source.

No kernel reaches the rates of the data sheet. The shares that kernels reach are published per chip. Where one is not
published, the median of the chips for which it is known is taken, with their spread. Every share has an 80 % interval, so a
prediction has one too. ``calibration`` replaces shares by those of a machine that was measured.

How close a library comes to the sum of its kernels depends on its age as much as on the chip: on A100s Megatron-DeepSpeed of
2022 reached about 0.76 of it and Megatron-LM of the same years 0.96. So there is a row for each kind of software with its years
(``SOFTWARE``), and where none is named, one with wide intervals for each generation of chips; plans report which.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from narrowgauge.errors import ChipError, NarrowgaugeError, suggestion
from narrowgauge.spec.chips import CHIPS, Chip

# Formats that are multiplied at another format's rate.
_SAME_RATE = {"float8_e5m2": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class Share:
    """A measured share of a printed rate with its 80 % interval and source; a time where its name ends in ``seconds``."""

    value: float
    low: float
    high: float
    source: str

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.value <= self.high:
            raise ValueError(f"a share of {self.value:g} does not lie within {self.low:g} to {self.high:g}")

    def scaled(self, low: float, factor: float, high: float, why: str) -> Share:
        return Share(self.value * factor, self.low * low, self.high * high, f"{self.source}; {why}")

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


_JOINT_MOVE = 0.7
"""How far all shares are moved together towards their ends: all of them at an end at once is rarer than any one."""


class Shares:
    """Named shares of one chip: ``matmul.FORMAT``, and the names of ``GENERAL``.

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
        near = {name: row.value + _JOINT_MOVE * (ends[name] - row.value) for name, row in self.rows.items()}
        return Shares({name: Share(end, end, end, self.rows[name].source) for name, end in near.items()})

    def __getitem__(self, name: str) -> Share:
        return self.rows[name]

    def matmul(self, format: str) -> Share:
        """The share of the peak rate of that format that a large matmul reaches."""
        name = f"matmul.{rate_name(format)}"
        if name not in self.rows:
            known = ", ".join(row.partition(".")[2] for row in self.rows if row.startswith("matmul."))
            raise ChipError(f"a share of {format}'s rate was requested, which is not known here.", f"Known: {known}.")
        return self.rows[name]

    def replaced(self, rows: Mapping[str, Share]) -> Shares:
        return Shares({**self.rows, **rows})


def rate_name(format: str) -> str:
    """The format at whose rate a format is multiplied."""
    return _SAME_RATE.get(format, format)


def best_share(format: str, chip: Chip) -> Share:
    """The share of its printed rate that the best published matmul reaches: the chip's, or the median of all with spread."""
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


RESTARTS = 0.25
"""How much longer than its steps a whole run takes, at the high end of the 80 % interval: failures, restarts, repeated work,
evaluations. BLOOM took 11 % more GPU-hours than its steps (arXiv 2211.05100 and the project's log), Llama 3 and MegaScale lost
less than 10 % (arXiv 2407.21783, section 3.3.4; 2402.15627), Llama 2's 7B and 13B took about a third more than such models' steps
(arXiv 2307.09288, table 2)."""

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
    "experts": Share(
        0.65,
        0.40,
        0.95,
        "of a large matmul's rate, the grouped ones of experts: mixtures of Megatron-Bridge 25.09 to 26.04 in view",
    ),
    "mixture_seconds": Share(
        1e-3,
        0.0,
        5e-3,
        "a mixture's router, sorting and launches, a layer and micro-batch: 6 ms of Qwen3 in Megatron-Bridge 25.11 on B200, none "
        "that shows where CUDA graphs replay them",
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
    "kernel_seconds", "mixture_seconds", "host_memory_seconds_per_byte", "spread", "data", "restart_seconds", "slowed.link",
    "slowed.network",
)  # fmt: skip
"""The shares of which less is better."""

GENERAL = tuple(_GENERAL)
"""The names of the shares that every chip has besides ``matmul.FORMAT``."""

# By generation, what differs from chip to chip beside its printed rates. Attention: of the printed 16-bit rate, forward and
# backward, causal, heads of 128.
_GENERATIONS: dict[str, dict[str, Share]] = {
    "Ampere": {
        "attention": Share(0.52, 0.40, 0.65, "FlashAttention-2 on an A100: 50 to 73 % (arXiv 2307.08691)"),
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
    "v5": {
        "matmul.bfloat16": Share(
            0.92, 0.84, 1.0, "MaxText on TPU v5e and v5p: 61 to 71 % with and without recomputation"
        ),
    },
}


@dataclass(frozen=True, slots=True)
class Software:
    """A kind of software of some years, and what it reaches.

    ``years`` are the first and the last of the runs that its shares were set with; ``shares`` are by the beginning of a chip's
    architecture, ``""`` for all others.

    Example:
        >>> SOFTWARE["megatron-lm-2022"].years, SOFTWARE["megatron-lm-2022"].age
        ((2021, 2022), '2021 to 2022')
    """

    name: str
    years: tuple[int, int]
    engines: str
    shares: Mapping[str, Mapping[str, Share]]

    @property
    def age(self) -> str:
        first, last = self.years
        return str(first) if first == last else f"{first} to {last}"

    def row(self) -> dict[str, Any]:
        return {"name": self.name, "years": list(self.years), "engines": self.engines}


def _library(low: float, value: float, high: float, source: str) -> dict[str, Share]:
    return {"library": Share(value, low, high, f"{source}: what it reaches of its kernels' sum")}


_VIEW = "published runs in view (benchmarks/published_runs.toml, published_runs_later.toml)"
_EXPERTS_HIDDEN = Share(0.50, 0.0, 0.95, f"DeepEP, HybridEP and schedules that hide all-to-alls, or none; {_VIEW}")
_NO_LAUNCHES = Share(5e-4, 0.0, 2e-3, f"CUDA graphs replay most launches of mixtures; {_VIEW}")
SOFTWARE: dict[str, Software] = {
    row.name: row
    for row in (
        Software(
            "megatron-lm-2022", (2021, 2022), "Megatron-LM on its authors' machines",
            {"": _library(0.80, 0.96, 1.0, "Calculon meets Megatron-LM's A100 runs to 3.65 % by kernels alone (SC 2023)")},
        ),
        Software(
            "megatron-deepspeed-2022", (2021, 2022), "Megatron-DeepSpeed and GPT-NeoX",
            {"": _library(0.62, 0.76, 0.92, f"MT-NLG, trials for BLOOM, GPT-NeoX-20B; {_VIEW}")},
        ),
        Software(
            "zero3-2021", (2021, 2021), "DeepSpeed's ZeRO-3 between nodes",
            {"": {
                **_library(0.62, 0.76, 0.92, f"as Megatron-DeepSpeed; {_VIEW}"),
                "network": Share(0.12, 0.06, 0.25, "one network card's rate of eight: arXiv 2104.04473, table 2"),
                "overlap.shard": Share(0.50, 0.0, 0.90, "arXiv 2104.04473, table 2"),
            }},
        ),
        Software(
            "fsdp-2023", (2022, 2023), "PyTorch FSDP without compilation: llm-foundry, TinyLlama",
            {"Ampere": _library(0.66, 0.84, 1.0, f"llm-foundry's tables; {_VIEW}"),
             "": _library(0.50, 0.70, 0.90, f"llm-foundry's tables; {_VIEW}")},
        ),
        Software(
            "torch-2025", (2024, 2025), "FSDP2 with compiled layers: torchtitan, torchao",
            {"": _library(0.58, 0.79, 1.0, f"torchtitan's and torchao's tables; {_VIEW}")},
        ),
        Software(
            "megatron-core-2024", (2023, 2024), "Megatron-Core and NeMo up to 24.12",
            {"": _library(0.80, 0.95, 1.0, f"Megatron-LM's table of 2024, Llama 3, NeMo 24.12; {_VIEW}")},
        ),
        Software(
            "megatron-core-2025", (2025, 2025), "NeMo 25.04 and Megatron-Bridge up to 25.11",
            {"": {
                **_library(0.80, 0.96, 1.0, f"NeMo 25.04, Megatron-Bridge 25.09, 25.11; {_VIEW}"),
                "overlap.expert": _EXPERTS_HIDDEN,
                "mixture_seconds": Share(2e-3, 0.0, 7e-3, f"Qwen3 in Megatron-Bridge 25.11 on B200, 6 ms; others 1; {_VIEW}"),
            }},
        ),
        Software(
            "megatron-core-2026", (2026, 2026), "Megatron-Bridge from 26.02 on",
            {"": {
                **_library(0.80, 0.96, 1.0, f"Megatron-Bridge 26.04; {_VIEW}"),
                "overlap.expert": _EXPERTS_HIDDEN,
                "mixture_seconds": _NO_LAUNCHES,
            }},
        ),
        Software(
            "dualpipe-2024", (2024, 2024), "DeepSeek's own: DualPipe and DeepEP",
            {"": {
                **_library(0.80, 0.95, 1.0, f"DeepSeek-V3; {_VIEW}"),
                "overlap.expert": Share(0.90, 0.60, 1.0, "arXiv 2412.19437, section 3.2.1"),
                "mixture_seconds": _NO_LAUNCHES,
            }},
        ),
        Software(
            "xla-2024", (2023, 2024), "XLA's whole programs: MaxText",
            {"": _library(0.88, 0.97, 1.0, f"MaxText's tables; {_VIEW}")},
        ),
    )
}  # fmt: skip
"""Kinds of software that published runs were made with, by name."""

_ASSUMED = (
    ("Ampere", Software("assumed", (2021, 2024), "Megatron-LM, DeepSpeed or FSDP", {
        "": _library(0.64, 0.86, 1.0, f"software of 2021 to 2024, any; {_VIEW}")})),
    ("Hopper", Software("assumed", (2023, 2026), "FSDP, torchtitan or Megatron-Core", {
        "": _library(0.56, 0.83, 1.0, f"software of 2023 to 2026, any; {_VIEW}")})),
    ("Blackwell", Software("assumed", (2025, 2026), "torchtitan or Megatron-Core", {
        "": _library(0.60, 0.88, 1.0, f"software of 2025 to 2026, any; {_VIEW}")})),
    ("v5", SOFTWARE["xla-2024"]),
    ("", Software("assumed", (2023, 2026), "PyTorch", {})),
)  # fmt: skip


def software_of(chip: Chip, name: str = "") -> Software:
    """The row of ``SOFTWARE`` with that name, or if it is empty what is assumed on a chip.

    Example:
        >>> from narrowgauge.spec.chips import get_chip
        >>> software_of(get_chip("H100-SXM")).age, software_of(get_chip("H100-SXM"), "torch-2025").age
        ('2023 to 2026', '2024 to 2025')
    """
    if not name:
        return next(row for start, row in _ASSUMED if chip.architecture.startswith(start))
    if name not in SOFTWARE:
        raise NarrowgaugeError(
            f"software {name!r} was requested.", suggestion(name, SOFTWARE) or f"There is {', '.join(SOFTWARE)}."
        )
    return SOFTWARE[name]


@cache
def shares_of(chip: Chip, software: str = "") -> Shares:
    """What a chip reaches of its printed rates, from publications; the same object for the same chip and software.

    ``software`` is a row of ``SOFTWARE``; empty for what is assumed on the chip.
    """
    low, middle, high = TYPICAL
    why = "shapes and values of training reach 0.9 of it (0.8 to 1)"
    rows = {f"matmul.{name}": best_share(name, chip).scaled(low, middle, high, why) for name in chip.peak_tflops}
    rows |= _GENERAL
    rows |= next((own for name, own in _GENERATIONS.items() if chip.architecture.startswith(name)), {})
    kind = software_of(chip, software)
    own = (rates for name, rates in kind.shares.items() if name and chip.architecture.startswith(name))
    rows |= next(own, kind.shares.get("", {}))
    library = rows["library"]
    rows["library"] = replace(library, source=f"{kind.engines} of {kind.age}; {library.source}")
    if not chip.link_gb_per_second:
        rows["link"] = Share(0.50, 0.30, 0.80, "through the host: half where two chips share its lanes; an assumption")
    return Shares(rows)


def sources_of(shares: Shares, names: Iterable[str]) -> list[str]:
    return [f"{name}: {shares[name]}, {shares[name].source}" for name in names]
