"""The table of injections: every cause of ``narrowgauge show causes`` that a CPU can have, at three strengths, over recipes.

A row says how a cause gets into a run of the trainer (strikes beside those of ``faults.py``, or settings that *are* the
cause), after the literature's description of it. The rows were written before the rules of the diagnosis were tuned and
without looking at them. Each (cause, strength, recipe) belongs to the half ``tuning`` or ``aside`` by a hash of its name:
rules may be tuned on the first, and the second is run once, at the end, and its matrix published as it is.

Claim: none of its own; ``diagnosis.py`` measures. Baseline: the undisturbed run. Run: ``./dev bench diagnosis``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import _injections_strikes as s
import _injections_surroundings as around
import faults
import torch
from faults import Fault, Strike, nothing, once

STRENGTHS = ("weak", "plain", "strong")
SIX = ("bfloat16/word", "bfloat16/naive", "bfloat16/master", "float8-row/word", "float16/split", "mxfp8/word")
HALF_PRECISION = (
    "float16/split",
    "float16/master",
    "float16/word",
    "float16/naive",
    "float16/kahan",
    "float16/collage-plus",
)
NARROW_STORES = (
    "bfloat16/naive", "bfloat16/no-master", "float16/naive", "float8-row/naive", "mxfp8/naive", "float8-delayed/naive",
)  # fmt: skip
NARROW_MOMENTS = (
    "bfloat16/naive", "bfloat16/stochastic", "bfloat16/kahan", "bfloat16/collage-light", "float8-row/naive", "mxfp8/naive",
)  # fmt: skip
WIDE_STORES = ("bfloat16/word", "bfloat16/master", "bfloat16/split", "float8-row/word", "float16/split", "mxfp8/word")
SCALED = (
    "float8-tensor/word", "float8-delayed/word", "float8-row/word", "mxfp8/word", "int8-row/word", "float8-tensor-e5m2/word",
)  # fmt: skip
DELAYED = ("float8-delayed/word", "float8-delayed-e5m2/word", "float8-delayed/master", "float8-delayed/split")
BLOCKS = ("mxfp8/word", "mxfp6/word", "mxfp4/word", "nvfp4/word", "nvfp4/compact", "mxfp8/master")
FLOAT8_GRADIENTS = ("float8-row/word", "float8-row/master", "float8-row/split")
REPLICATED = {"shard": "none", "gradient_accumulation_steps": 2, "verify_every": 40}
STRUCK_AT, LATE = 31, {"at": 111}
"""The first spoiled step: after the warm-up; later where a loss scale must have settled first."""
LONG = {"steps": 160}

Way = tuple[Strike, Mapping[str, Any]]


@dataclass(frozen=True)
class Injection:
    """One cause put into one run.

    Args:
        cause: what is injected; the diagnosis' table has it, by this name or as ``known_as``.
        strength: one of ``STRENGTHS``.
        recipe: of the run.
        strike: puts it in.
        settings: the trainer's, where the cause needs other ones.
        at: the first step that it spoils; 1 where settings are the cause.
        ranks: processes that train together.
        resumed: the run is stopped before that step, and resumed with it.
        older: versions that the part before the resume is recorded to have run with.
        unseen: why the record of one run cannot show it, if it cannot, by the literature.
        known_as: the name in the diagnosis' table, where one row there is for several of these.
    """

    cause: str
    strength: str
    recipe: str
    strike: Strike
    settings: Mapping[str, Any] = field(default_factory=dict)
    at: int = STRUCK_AT
    ranks: int = 1
    resumed: bool = False
    older: Mapping[str, str] = field(default_factory=dict)
    unseen: str = ""
    known_as: str = ""

    @property
    def expected(self) -> str:
        """The cause that a diagnosis should name."""
        return self.known_as or self.cause

    @property
    def name(self) -> str:
        """``cause.strength.recipe``, which may name a folder."""
        return f"{self.cause}.{self.strength}.{self.recipe.replace('/', '-')}"

    @property
    def half(self) -> str:
        """``tuning`` or ``aside``."""
        return "aside" if hashlib.blake2b(self.name.encode(), digest_size=1).digest()[0] & 1 else "tuning"

    @property
    def fault(self) -> Fault:
        """What :func:`faults.struck` takes."""
        return Fault(self.name, self.strike, ())


def strikes(*of_each: Strike) -> tuple[Way, ...]:
    """Three strengths of a strike, with the usual settings."""
    return tuple((strike, {}) for strike in of_each)


def configured(name: str, *values: Any, **more: Any) -> tuple[Way, ...]:
    """Three strengths of a setting."""
    return tuple((nothing, {name: value, **more}) for value in values)


@dataclass(frozen=True)
class Cause:
    """One cause at three strengths.

    Args:
        name: of the diagnosis' table.
        source: where it is described so; a number is that of the survey's list of failure modes.
        ways: strike and settings of each strength.
        recipes: in which it applies.
        given: the other fields of its injections.
    """

    name: str
    source: str
    ways: Sequence[Way]
    recipes: Sequence[str] = SIX
    given: Mapping[str, Any] = field(default_factory=dict)

    def injections(self) -> Iterator[Injection]:
        """Each strength in each recipe."""
        for strength, (strike, settings) in zip(STRENGTHS, self.ways, strict=True):
            for recipe in self.recipes:
                yield Injection(self.name, strength, recipe, strike, settings, **self.given)


FROM_START = {"at": 1}
QUERIES_AND_KEYS = [f"{s.ATTENTION}.{name}.weight" for name in ("q_proj", "k_proj")]

CAUSES: tuple[Cause, ...] = (
    Cause("fp16-overflow", "1: an activation's amax rises to 65504, then infinity", strikes(
        s.rare_huge_channel(2.0**24, 10), s.growing_channel(1.3), s.growing_channel(1.8)), HALF_PRECISION),
    Cause("gradient-underflow", "2; Micikevicius et al. 2018", strikes(
        s.small_loss_scale(1.0), s.small_loss_scale(2.0**-10), s.small_loss_scale(2.0**-20)), HALF_PRECISION),
    Cause("gradient-underflow", "2: the left edge of the histogram is cut at 2^-9 (e4m3), 2^-16 (e5m2)", strikes(
        s.unscaled_gradients("float8_e5m2"), s.unscaled_gradients("float8_e4m3fn"),
        s.unscaled_gradients("float8_e4m3fn", 2.0**-4)), FLOAT8_GRADIENTS),
    Cause("loss-scale-collapse", "3: OPT-175B, GLM-130B", tuple((strike, LONG) for strike in (
        s.scaled_gradients(1.0, 1.3), s.scaled_gradients(2.0**30), s.scaled_gradients(2.0**120))), HALF_PRECISION, LATE),
    Cause("lost-updates", "4: |dw| below half a spacing of w", configured("lr", 1e-4, 3e-5, 1e-5), NARROW_STORES, FROM_START),
    Cause("frozen-moments", "Yu et al. 2024: bfloat16 second moments at beta2 0.999 when gradients fall", tuple(
        (s.scaled_gradients(factor), {"beta2": 0.999}) for factor in (2.0**-2, 2.0**-4, 2.0**-6)), NARROW_MOMENTS),
    Cause("narrow-accumulation", "5: a bfloat16 sum of equal gradients stagnates at 256", tuple(
        (nothing, {"accumulation_dtype": "bfloat16", "batch_size": k, "gradient_accumulation_steps": k, "steps": steps})
        for k, steps in ((8, 100), (16, 80), (32, 60))), ("bfloat16/word", "bfloat16/naive", "float8-row/word", "mxfp8/word"),
        FROM_START),
    Cause("average-rounding", "7: 1/N rounded to the format of the gradient: 0.1 % to 6 %", strikes(
        s.scaled_gradients(1 + 2.0**-10), s.scaled_gradients(1 + 2.0**-9), s.scaled_gradients(1.06)), SIX,
        {"unseen": "one factor on all gradients cancels in AdamW, and no record of one run holds the factor"}),
    Cause("eps-underflow", "8: 1e-8 is 0 in float16; second moments of small gradients are too", tuple(
        (s.scaled_gradients(factor), {"eps": eps}) for factor, eps in ((2.0**-6, 1e-8), (2.0**-10, 0.0), (2.0**-14, 0.0))),
        ("float16/naive", "float16-throughout/naive", "float16/kahan")),
    Cause("eps-too-large", "9: Wortsman et al. 2023, eps near the rms of gradients", configured("eps", 1e-3, 1e-2, 1e-1), SIX,
        FROM_START),
    Cause("attention-growth", "10: Wortsman et al. 2023", strikes(
        *(s.growing_by_updates(QUERIES_AND_KEYS, factor) for factor in (3.0, 10.0, 30.0)))),
    Cause("logit-drift", "11: PaLM; log Z moves away from 0 at the same loss", strikes(
        *(s.drifting_logits(shift) for shift in (-0.1, -0.3, -1.0)))),
    Cause("recovering-spike", "12: BLOOM-176B, loss 2.20 to 5.10 and back within 30 steps", strikes(
        *(around.rate_burst(factor) for factor in (15.0, 30.0, 60.0)))),
    Cause("fp16-divergence", "13: BLOOM-104B, the loss scale turns long before the loss", tuple((strike, LONG) for strike in (
        around.half_precision_divergence(1.6, 20, 30.0), around.half_precision_divergence(2.0, 15, 100.0),
        around.half_precision_divergence(3.0, 10, 1000.0))), HALF_PRECISION, LATE),
    Cause("embedding-shock", "14: GLM-130B, the embedding's gradient norm is orders above the others'", strikes(
        *(s.gradients_of("embed_tokens", factor, 20, 3) for factor in (30.0, 200.0, 2000.0)))),
    Cause("frozen-parameter", "15: learned positions whose gradient was 0", strikes(
        *(s.gradients_of(f"layers.0.{part}", 0.0) for part in ("input_layernorm", "self_attn.q_proj", "self_attn")))),
    Cause("glu-outliers", "16: Fishman et al. 2024, few channels of what enters down_proj", strikes(
        s.growing_feature(1.08, 16), s.growing_feature(1.1), s.growing_feature(1.2)), SCALED),
    Cause("massive-activations", "17: 100 to 10,000 times the rms at the first token, whatever the input", strikes(
        *(s.massive_channel(times) for times in (100.0, 1e3, 1e4))), ("bfloat16/word", "bfloat16/master", *SCALED[:4])),
    Cause("attention-rounding", "18: 2510.04212, rounding errors of one sign in O = PV", strikes(
        *(s.biased_attention(share) for share in (2.0**-9, 2.0**-6, 2.0**-4))), SIX[:3],
        {"unseen": "the error is below the last bit of one step's outputs: only a float32 replay of the head shows its sign"}),
    Cause("rank-divergence", "20: BLOOM-176B, norm weights drift apart", tuple((around.on_rank(1, each), REPLICATED) for each in (
        around.drifting_vectors(1.01, 1), around.drifting_vectors(1.01, 1000), around.drifting_vectors(1.03, 1000))),
        ("bfloat16/word", "bfloat16/master"), {"ranks": 2}),
    Cause("silent-corruption", "21: 2604.00726, flipped bits", strikes(
        once(faults.flipped_lower_bit), once(faults.flipped_bit), s.flipped(faults.flipped_bit, 20))),
    Cause("software-change", "22: OPT's upgrade by accident: activation norms jumped, 2 %", strikes(
        s.gain(1.005), s.gain(1.02), s.gain(1.2)), SIX,
        {"resumed": True, "older": {"torch": "2.12.1", "transformers": "4.40.0"}}),
    Cause("stale-scales", "23: saturation under delayed scaling right after a jump", strikes(
        s.surges(4.0), s.surges(16.0), s.surges(64.0)), DELAYED),
    Cause("block-range", "24: values of one block further apart than its format reaches", strikes(
        s.spread_blocks(2.0**6), s.spread_blocks(2.0**10), s.spread_blocks(2.0**14)), BLOCKS),
    Cause("micro-batch-normalization", "25: a mean of means of unequal lengths", tuple(
        (around.unequal_weights(spread), {"gradient_accumulation_steps": 2}) for spread in (0.2, 0.8, 2.0)), SIX[:3], FROM_START),
    Cause("batch-normalization", "each batch is divided by its own number of tokens", strikes(
        *(around.unequal_weights(spread) for spread in (0.2, 0.8, 2.0))), SIX,
        {"at": 1, "known_as": "micro-batch-normalization"}),
    Cause("cast-inputs", "26: sines and cosines of the positions cast to bfloat16 by FSDP", strikes(
        *(s.narrow_rotary(to) for to in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2))), SIX,
        {"at": 1, "unseen": "the dtype of a buffer is in no record of one run; two runs differ in it"}),
    Cause("learning-rate-too-high", "for the storage or the model", configured("lr", 3e-2, 1e-1, 5e-1), SIX, FROM_START),
    Cause("learning-rate-too-low", "for the number of steps", configured("lr", 1e-4, 3e-5, 3e-6), WIDE_STORES, FROM_START),
    Cause("repeated-data", "a shard is read again and again", tuple(
        (around.repeated_batches(k), {"eval_every": 20}) for k in (16, 4, 1))),
    Cause("bad-data", "a part of the data means nothing", strikes(
        around.nonsense_tokens(0.25, 30), around.nonsense_tokens(0.6, 30), around.nonsense_tokens(1.0, 30))),
    Cause("dead-layer", "a part of the model gives nothing and learns nothing", strikes(
        s.silent_module(s.VALUES_OUT), s.silent_module(s.MLP), s.silent_module(s.VALUES_OUT, s.MLP))),
    Cause("resume-changed", "what a checkpoint did not hold: the data's position, moments, the rate", strikes(
        around.data_from_the_start, around.lost_moments, around.changed_rate(lambda since: 10.0)), SIX, {"resumed": True}),
    Cause("slow-rank", "one rank takes longer in every step", tuple((around.on_rank(1, around.slow_loss(seconds)), REPLICATED)
        for seconds in (0.05, 0.15, 0.4)), ("bfloat16/word", "float8-row/word"), {"ranks": 2, "at": 11}),
    Cause("slow-data-loader", "batches come late", strikes(*(around.slow_batches(seconds) for seconds in (0.05, 0.15, 0.4)))),
    Cause("throttling", "a hot processor slows down step by step", strikes(*(around.throttled(by) for by in (1.5, 2.5, 4.0)))),
)  # fmt: skip
"""Every cause that is injected in one way for all recipes; one may have two rows, where its recipes differ in kind."""


def _narrow_all_reduce() -> Iterator[Injection]:
    """6 of the survey: here the recipe is the strength, the format in which gradients travel and are added."""
    for strength, reduction in zip(STRENGTHS, ("native", "compressed8", "compressed4"), strict=True):
        for recipe in ("bfloat16/word", "bfloat16/master", "bfloat16/split"):
            settings = {**REPLICATED, "shard": "full"}
            yield Injection("narrow-all-reduce", strength, f"{recipe}/{reduction}", nothing, settings, at=1, ranks=2)


NOT_INJECTED: dict[str, str] = {
    "sampler-mismatch": "it is of two programs, a trainer and a sampler, and this trainer has no sampler",
    "unknown": "it is what no row of the table is; public_bugs.py has bugs for which none was written",
    "other-data": "it came after these rows, which are kept as they were; tests make its record by hand",
    "undefined-operation": "it came after these rows, which are kept as they were; tests make its record by hand",
}
"""Causes that no row puts into a run of the trainer, and why."""

INJECTIONS: dict[str, Injection] = {
    row.name: row for row in (*(each for cause in CAUSES for each in cause.injections()), *_narrow_all_reduce())
}
"""Every injection by name."""


def of_half(half: str) -> list[Injection]:
    """The injections of a half in the order in which they are run: plain ones first, then strong, then weak ones.

    Each cause and strength comes once, then once more in another recipe, so that a matrix which is cut short has all causes;
    bfloat16 recipes come first, since a CPU emulates all others at several times the cost, and a hash decides between them.
    """
    rows = [row for row in INJECTIONS.values() if row.half == half]
    rows.sort(key=lambda row: (not row.recipe.startswith("bfloat16/"), _digest(row.name)))
    turn: Counter[tuple[str, str]] = Counter()
    order = []
    for row in rows:
        order.append((turn[row.cause, row.strength], ("plain", "strong", "weak").index(row.strength), row))
        turn[row.cause, row.strength] += 1
    return [row for *_, row in sorted(order, key=lambda item: item[:2])]


def _digest(name: str) -> bytes:
    return hashlib.blake2b(f"order {name}".encode(), digest_size=8).digest()


_FP16 = ("loss_scale", "first_bad_value", "nonfinite", "skip", "divergence", "overflow")
_SPIKES = ("loss_spike", "gradient_spike", "loss_climb", "divergence")
LIVE: dict[str, tuple[str, ...]] = {
    "fp16-overflow": _FP16,
    "gradient-underflow": ("underflow", "loss_scale"),
    "loss-scale-collapse": ("loss_scale", "divergence"),
    "lost-updates": ("lost_updates",),
    "frozen-moments": ("frozen_moments",),
    "narrow-accumulation": ("warning",),
    "narrow-all-reduce": ("warning",),
    "average-rounding": (),
    "eps-underflow": ("frozen_moments", "nonfinite", "first_bad_value", *_SPIKES),
    "eps-too-large": (),
    "attention-growth": ("attention",),
    "logit-drift": ("logits",),
    "recovering-spike": _SPIKES[:2],
    "fp16-divergence": (*_FP16, *_SPIKES),
    "embedding-shock": _SPIKES[:2],
    "frozen-parameter": ("dead_layer",),
    "glu-outliers": ("outliers",),
    "massive-activations": ("outliers",),
    "attention-rounding": (),
    "rank-divergence": ("corruption",),
    "silent-corruption": ("corruption", "outliers", "first_bad_value", "nonfinite", *_SPIKES),
    "software-change": ("note",),
    "stale-scales": ("overflow", "warning"),
    "block-range": ("underflow",),
    "micro-batch-normalization": _SPIKES[:2],
    "batch-normalization": _SPIKES[:2],
    "cast-inputs": (),
    "learning-rate-too-high": (*_SPIKES, "growth", "outliers", "attention"),
    "learning-rate-too-low": (),
    "repeated-data": (),
    "bad-data": _SPIKES,
    "dead-layer": ("dead_layer",),
    "resume-changed": ("resume", "note", *_SPIKES),
    "slow-rank": ("straggler",),
    "slow-data-loader": (),
    "throttling": (),
}
"""Kinds of event that are a right word while the run goes on; none where no detector is for the cause."""
