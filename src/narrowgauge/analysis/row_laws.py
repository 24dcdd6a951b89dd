"""Laws of the rows of a run: functions from the losses, norms and scales of a step, or from a
sample of the gauges, to readings.

They read nothing but numbers that any log may have. Each tells a fault once, and again only after it
was over.

Bounds are published numbers where there are any. Some published ones hold in no healthy run, so
laws of casts read noisy casts alone. For example, a healthy cast to int8 or four bits rounds half of
a tensor to zero (measured: up to 74 % of the inputs of down_proj under mxfp4). Its signal-to-noise
ratio still stays above 12 dB, since the zeroed values are small.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import STAGE_OF, Reading, of_all
from narrowgauge.analysis.snapshot import Facts, Snapshot
from narrowgauge.analysis.spikes import SpikeJudge
from narrowgauge.analysis.step_laws import Counts, Law
from narrowgauge.analysis.thresholds import LOSS_APART, UNIFORM_STEPS

SETTLING_STEPS = 100
"""Steps before the loss scale counts, and steps over which its halvings are counted."""


@dataclass
class Spell:
    """Count values of one tensor beyond a bound, and within it, in a row."""

    num_beyond: int = 0
    num_within: int = 0
    is_told: bool = False

    def begins(self, is_beyond: bool, least: int = 1, calm: int = 3) -> bool:
        """Count a value; return whether it is the ``least``-th one beyond the bound, of a spell
        that was not told. A spell ends after ``calm`` values within it.
        """
        self.num_beyond += 1
        self.num_within += 1
        if is_beyond:
            self.num_within = 0
        else:
            self.num_beyond = 0
        begins = not self.is_told and self.num_beyond >= least
        self.is_told = begins or (self.is_told and self.num_within < calm)
        return begins


def _begins(counts: Counts, place: str, is_beyond: bool, *, least: int = 1, calm: int = 3) -> bool:
    """Count a value of a kind or a tensor, as :meth:`Spell.begins`."""
    spell: Spell = counts.setdefault(place, Spell())
    return spell.begins(is_beyond, least, calm)


def _worst_of(kind: str, values: Mapping[str, float], step: int, facts: Facts) -> Iterator[Reading]:
    """Yield a reading of the worst of several tensors."""
    if not values:
        return
    worst = sorted(values, key=values.__getitem__, reverse=True)
    of_worst, _, name = worst[0].rpartition(":")
    module = name.removesuffix(".weight") or "the layer"
    reading = KINDS[kind].reading(
        of_all(worst), values[worst[0]], step=step, module=module, storage=facts.storage,
        compute=facts.compute,
    )  # fmt: skip
    yield replace(reading, stage=STAGE_OF.get(of_worst, reading.stage))


# ── losses, norms and scales ──────────────────────────────────────────────────────────────────────


def nonfinite_step(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a loss or a gradient norm that is not finite.

    Gradients overflow while a run searches for a loss scale.
    """
    if not now.is_told:
        return
    is_searching = now.loss_scale is not None and now.is_skipped
    is_bad = now.loss is not None and not math.isfinite(now.loss)
    if now.unclipped is not None and not is_searching:
        is_bad = is_bad or not math.isfinite(now.unclipped)
    if _begins(counts, "", is_bad, calm=10):
        reading = KINDS["nonfinite-step"].reading("", 1, step=now.step)
        if now.loss is None or math.isfinite(now.loss):
            reading = replace(reading, stage="gradient")
        yield reading


def diverged(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a run whose loss or gradient norm is not finite for long.

    An overflow is no failure as long as the loss scaler can lower the scale. A scale of 1 and below
    leaves float16 none of its advantage, and torch.amp.GradScaler goes on.
    """
    if not now.is_told:
        return
    scale = now.loss_scale or math.inf
    has_loss = math.isfinite(now.loss or 0.0)
    has_failed = not has_loss or not math.isfinite(now.unclipped or 0.0)
    if now.is_skipped and scale <= 1:
        has_failed = True
    if has_loss and 1 < scale < math.inf:
        has_failed = False
    kind = KINDS["divergence"]
    if _begins(counts, "", has_failed, least=int(kind.bound), calm=1):
        numbers = {"loss": now.loss, "gradient norm": now.unclipped}
        words = " and ".join(f"the {name} is {x:g}" for name, x in numbers.items() if x is not None)
        yield kind.reading("", kind.bound, step=now.step, words=words)


def loss_scale(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a loss scale that was halved often, one at its floor, and one that began anew: from step
    to step it at most doubles, unless a resume forgets it.
    """
    scale = now.loss_scale
    if scale is None:
        return
    before, low = counts.get("last", (now.step, scale))
    counts["last"] = now.step, scale
    most = low * 2.0 ** min(now.step - before, 60)
    if now.step > before and 0 < most < scale < math.inf:
        kind = KINDS["loss-scale-anew"]
        yield kind.reading("", scale, low, low, now.step, before=before)
    scales: deque[float] = counts.setdefault("scales", deque(maxlen=SETTLING_STEPS + 1))
    if now.step > SETTLING_STEPS:
        scales.append(scale)
    halvings = 0.0
    for earlier, later in pairwise(scales):
        if earlier > later > 0:
            halvings += math.log2(earlier / later)
    for name, value in (("scale-halvings", halvings), ("scale-floor", scale)):
        kind = KINDS[name]
        is_beyond = value >= kind.bound
        if kind.side == "below":
            is_beyond = value <= kind.bound
        if _begins(counts, name, is_beyond, calm=SETTLING_STEPS):
            yield kind.reading("", value, step=now.step, compute=facts.compute)


def spikes(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a loss and a gradient norm far above those of the steps before.

    The losses of a generator and its critic rise and fall with each other.
    """
    if now.norm is not None:
        counts["is_game"] = now.is_game
    if now.is_resumed:
        counts["resumed"] = now.step
    if not now.is_told or counts["is_game"]:
        return
    loss = math.nan if now.loss is None else now.loss
    judge: SpikeJudge = counts.setdefault("judge", SpikeJudge())
    judged = {"loss-spike": judge.loss(loss), "gradient-spike": judge.norm(now.unclipped)}
    for name, spike in judged.items():
        if _begins(counts, name, spike is not None, calm=10) and spike is not None:
            kind = KINDS[name]
            if name == "loss-spike" and now.step == counts["resumed"]:
                kind = kind.case("resume")
            yield kind.reading(
                "", spike.value, None, spike.threshold, now.step, words=spike.message
            )
    judge.add(loss, now.unclipped, spiked=any(judged.values()))


def uniform_loss(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read losses that stay at that of a uniform guess."""
    if now.loss is None or facts.vocabulary <= 1:
        return
    expected = math.log(facts.vocabulary)
    kind = KINDS["constant-loss"].case("uniform")
    is_uniform = abs(now.loss / expected - 1) < kind.bound
    counts["losses"] += 1
    counts["uniform"] += is_uniform
    if is_uniform and counts["uniform"] >= max(UNIFORM_STEPS, counts["losses"] / 2):
        words = {"steps": counts["uniform"], "count": counts["losses"]}
        words["vocabulary"] = facts.vocabulary
        yield kind.reading("", now.loss, expected, kind.bound * expected, now.step, **words)


def constant_loss(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a loss that has had one value in all steps.

    A loss of four decimals was rounded, as transformers logs it, or is zero, as GRPO's at first.
    """
    if now.loss is None:
        return
    counts["first"] = counts.get("first", now.loss)
    counts["losses"] += 1
    counts["equal"] += now.loss == counts["first"] != round(now.loss, 4)
    kind = KINDS["constant-loss"]
    if counts["equal"] == counts["losses"] and counts["equal"] >= kind.bound:
        yield kind.reading("", counts["equal"], step=now.step, loss=now.loss)


def rank_loss(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read a rank whose loss is far above the others'."""
    losses = now.rank_losses
    if not losses:
        return
    worst = max(losses, key=lambda x: (not math.isfinite(x), x))
    middle = sorted(losses)[(len(losses) - 1) // 2]
    kind = KINDS["ranks-differ"].case("loss")
    bound = kind.bound * max(middle, 0.0) + LOSS_APART
    if not math.isfinite(worst) or worst > middle + bound:
        yield kind.reading("", worst, middle, bound, now.step, rank=losses.index(worst))


# ── samples of the gauges ─────────────────────────────────────────────────────────────────────────

Tensors = Mapping[str, Mapping[str, float | None]]
"""Metrics by name, of each tensor of one table."""
_NOISY_DB = 8.0
_WINDOW = 10
_LEAST_OUTLIER = 16.0
"""A noisy cast's signal-to-noise ratio; samples of a median; times the rms, which is healthy."""


def _beyond(
    kind: str, field: str, tensors: Tensors, counts: Counts, *, least: int = 1
) -> dict[str, float]:
    """Return the tensors of which a metric is beyond the kind's bound."""
    beyond = {}
    for name, metrics in tensors.items():
        value = metrics.get(field)
        is_beyond = value is not None and value >= KINDS[kind].bound
        if _begins(counts, f"{kind} {name}", is_beyond, least=least) and value is not None:
            beyond[name] = value
    return beyond


def lost_decay(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read weight decay that a storage does not take, in three samples in a row."""
    tensors = now.tables.get("updates", {})
    beyond = _beyond("lost-decay", "lost_decay", tensors, counts, least=3)
    yield from _worst_of("lost-decay", beyond, now.step, facts)


def attention_logits(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read attention logits that are far too large."""
    beyond = _beyond("attention-logits", "max_logit", now.tables.get("attention", {}), counts)
    yield from _worst_of("attention-logits", beyond, now.step, facts)


def lossy_casts(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read casts of which little is left: most values became zero, or too many saturate.

    Below 8 dB rounding error exceeds a sixth of an operand's energy. Healthy casts stay above 12.
    """
    noisy = {}
    for name, metrics in now.tables.get("tensors", {}).items():
        sqnr = metrics.get("sqnr_db")
        noisy[name] = metrics if sqnr is not None and sqnr <= _NOISY_DB else {}
    for kind, least in (("underflow", 2), ("overflow", 1)):
        beyond = _beyond(kind, kind, noisy, counts, least=least)
        yield from _worst_of(kind, beyond, now.step, facts)


def growing_outliers(now: Snapshot, facts: Facts, counts: Counts) -> Iterator[Reading]:
    """Read inputs whose outliers grow far beyond the lowest median of ten samples, as SwiGLU's do.

    Every healthy tensor may have outliers of 16 times its rms. They hurt no operand that enters a
    matmul as it is.
    """
    kind = KINDS["growing-outliers"]
    beyond = {}
    usual: dict[str, float] = counts.setdefault("usual", {})
    for name, metrics in now.tables.get("tensors", {}).items():
        value = metrics.get("outlier")
        if value is None or metrics.get("sqnr_db") is None or not name.startswith("input:"):
            continue
        limit = kind.bound * max(usual.get(name, math.inf), _LEAST_OUTLIER)
        recent: deque[float] = counts.setdefault(("recent", name), deque(maxlen=_WINDOW))
        recent.append(value)
        if len(recent) == _WINDOW:
            usual[name] = min(usual.get(name, math.inf), median(recent))
        if _begins(counts, name, value >= limit, least=3):
            beyond[name] = value
    for reading in _worst_of(kind.name, beyond, now.step, facts):
        worst = max(beyond, key=beyond.__getitem__)
        yield replace(reading, bound=kind.bound * max(usual[worst], _LEAST_OUTLIER))


LOSS_LAWS: tuple[Law, ...] = (uniform_loss, constant_loss, rank_loss)
"""Told as the laws of a watched loop: while they last."""
ROW_LAWS: tuple[Law, ...] = (
    nonfinite_step, diverged, loss_scale, spikes, lost_decay, lossy_casts,
    growing_outliers, attention_logits,
)  # fmt: skip
