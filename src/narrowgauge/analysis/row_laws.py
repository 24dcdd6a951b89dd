"""Laws of the rows of a run: functions from the row of a step, or of a sample of the gauges, to
readings.

:class:`RowLaws` reads nothing but rows: no model, no clock, no random numbers. So the laws can also
read a finished run, and a resumed run restores what they remember from its own rows.

Bounds are published numbers where there are any. Some published ones hold in no healthy run, so
laws of casts read noisy casts alone. For example, a healthy cast to int8 or four bits rounds half of
a tensor to zero (measured: up to 74 % of the inputs of down_proj under mxfp4). Its signal-to-noise
ratio still stays above 12 dB, since the zeroed values are small.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import STAGE_OF, Reading, of_all
from narrowgauge.analysis.spikes import SpikeJudge
from narrowgauge.runs.schema import Row, gauge_metrics, number, step_of
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

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


@dataclass
class Memory:
    """Hold what the laws remember of the rows so far.

    Args:
        words: names of a storage that keeps updates and a compute with more range.
        spells: of each kind of reading and tensor.
    """

    words: Mapping[str, Any]
    judge: SpikeJudge = field(default_factory=SpikeJudge)
    spells: dict[tuple[str, str], Spell] = field(default_factory=dict)
    scales: deque[float] = field(default_factory=lambda: deque(maxlen=SETTLING_STEPS + 1))
    outliers: dict[str, deque[float]] = field(default_factory=dict)
    usual_outliers: dict[str, float] = field(default_factory=dict)

    def begins(self, kind: str, is_beyond: bool, tensor: str = "", **options: int) -> bool:
        """Count a value of a tensor, as :meth:`Spell.begins`."""
        return self.spells.setdefault((kind, tensor), Spell()).begins(is_beyond, **options)

    def read(self, kind: str, values: Mapping[str, float], step: int) -> Iterator[Reading]:
        """Yield a reading of the worst of several tensors."""
        if not values:
            return
        worst = sorted(values, key=values.__getitem__, reverse=True)
        of_worst, _, name = worst[0].rpartition(":")
        module = name.removesuffix(".weight") or "the layer"
        reading = KINDS[kind].reading(
            of_all(worst), values[worst[0]], step=step, module=module, **self.words
        )
        yield replace(reading, stage=STAGE_OF.get(of_worst, reading.stage))


class RowLaws:
    """Ask every law about each row of a run.

    Invariant: the readings depend only on the arguments and on the rows, in their order. Rows of
    steps and rows of gauges are independent, so their interleaving does not matter. A tensor is
    told again only after it was within its bound.

    Args:
        recipe: of the run, as for :func:`narrowgauge.prepare`; ``None`` if unknown.

    Cost: about 30 µs a step, and 5 µs a tensor of a row of gauges.

    Example:
        >>> laws = RowLaws("bfloat16/naive")
        >>> readings = laws.of_sample({"step": 20, "attention": {"layers.0.attn": [250.0]}})
        >>> readings[0].tensor, readings[0].value
        ('layers.0.attn', 250.0)
    """

    def __init__(self, recipe: str | Path | Recipe | None = None) -> None:
        words = {"storage": "word", "compute": "bfloat16"}
        if recipe is not None:
            parsed = parse(recipe)
            words = {"storage": parsed.storage.fallback, "compute": parsed.compute.fallback}
        self._memory = Memory(words)

    def read(self, steps: Iterable[Row], samples: Iterable[Row]) -> list[Reading]:
        """Read the rows of ``steps.jsonl`` and ``gauges.jsonl``, and return their readings."""
        readings = list[Reading]()
        for row in steps:
            readings += self.of_step(row)
        for row in samples:
            readings += self.of_sample(row)
        return readings

    def of_step(self, row: Row) -> list[Reading]:
        """Read a row of ``steps.jsonl``. Pass rows in the order of their steps."""
        readings = list[Reading]()
        for law in STEP_LAWS:
            readings += law(row, step_of(row), self._memory)
        return readings

    def of_sample(self, row: Row) -> list[Reading]:
        """Read a row of ``gauges.jsonl``: at most one reading of a kind, of the worst tensor."""
        tables: dict[str, dict[str, Any]] = {}
        for table, name, metrics in gauge_metrics(row):
            tables.setdefault(table, {})[name] = metrics
        readings = list[Reading]()
        for table, law in SAMPLE_LAWS:
            readings += law(tables.get(table, {}), step_of(row), self._memory)
        return readings


# ── rows of steps ─────────────────────────────────────────────────────────────────────────────────


def nonfinite_step(row: Row, step: int, memory: Memory) -> Iterator[Reading]:
    """Read a loss or a gradient norm that is not finite.

    Gradients overflow while a run searches for a loss scale.
    """
    loss = number(row.get("loss"))
    norm = number(row.get("grad_norm"))
    is_searching = row.get("loss_scale") is not None and row.get("skipped")
    is_bad = loss is not None and not math.isfinite(loss)
    if norm is not None and not is_searching:
        is_bad = is_bad or not math.isfinite(norm)
    if memory.begins("nonfinite-step", is_bad, calm=10):
        yield KINDS["nonfinite-step"].reading("", 1, step=step)


def diverged(row: Row, step: int, memory: Memory) -> Iterator[Reading]:
    """Read a run whose loss or gradient norm is not finite for long.

    An overflow is no failure as long as the loss scaler can lower the scale. A scale of 1 and below
    leaves float16 none of its advantage, and torch.amp.GradScaler goes on.
    """
    loss = number(row.get("loss"))
    norm = number(row.get("grad_norm"))
    scale = number(row.get("loss_scale")) or math.inf
    has_loss = math.isfinite(loss or 0.0)
    has_failed = not has_loss or not math.isfinite(norm or 0.0)
    if row.get("skipped") and scale <= 1:
        has_failed = True
    if has_loss and 1 < scale < math.inf:
        has_failed = False
    kind = KINDS["divergence"]
    if memory.begins(kind.name, has_failed, least=int(kind.bound), calm=1):
        numbers = {"loss": loss, "gradient norm": norm}
        words = " and ".join(f"the {name} is {x:g}" for name, x in numbers.items() if x is not None)
        yield kind.reading("", kind.bound, step=step, words=words)


def loss_scale(row: Row, step: int, memory: Memory) -> Iterator[Reading]:
    """Read a loss scale that was halved often, and one at its floor."""
    scale = number(row.get("loss_scale"))
    if scale is None:
        return
    if step > SETTLING_STEPS:
        memory.scales.append(scale)
    halvings = 0.0
    for before, after in pairwise(memory.scales):
        if before > after > 0:
            halvings += math.log2(before / after)
    for name, value in (("scale-halvings", halvings), ("scale-floor", scale)):
        kind = KINDS[name]
        is_beyond = value >= kind.bound
        if kind.side == "below":
            is_beyond = value <= kind.bound
        if memory.begins(name, is_beyond, calm=SETTLING_STEPS):
            yield kind.reading("", value, step=step, **memory.words)


def spikes(row: Row, step: int, memory: Memory) -> Iterator[Reading]:
    """Read a loss and a gradient norm far above those of the steps before."""
    loss = number(row.get("loss"))
    norm = number(row.get("grad_norm"))
    if loss is None:
        loss = math.nan
    judged = {"loss-spike": memory.judge.loss(loss), "gradient-spike": memory.judge.norm(norm)}
    for name, spike in judged.items():
        if memory.begins(name, spike is not None, calm=10) and spike is not None:
            bound = spike.threshold
            yield KINDS[name].reading("", spike.value, None, bound, step, words=spike.message)
    memory.judge.add(loss, norm, spiked=any(judged.values()))


# ── samples of the gauges ─────────────────────────────────────────────────────────────────────────

Tensors = Mapping[str, Mapping[str, float | None]]
"""Metrics by name, of each tensor of one table."""


def _beyond(
    kind: str, field: str, tensors: Tensors, step: int, memory: Memory, least: int = 1
) -> Iterator[Reading]:
    """Read the tensors of which a metric is beyond the kind's bound."""
    beyond = {}
    for name, metrics in tensors.items():
        value = metrics.get(field)
        is_beyond = value is not None and value >= KINDS[kind].bound
        if memory.begins(kind, is_beyond, name, least=least) and value is not None:
            beyond[name] = value
    yield from memory.read(kind, beyond, step)


def lost_decay(tensors: Tensors, step: int, memory: Memory) -> Iterator[Reading]:
    """Read weight decay that a storage does not take, in three samples in a row."""
    yield from _beyond("lost-decay", "lost_decay", tensors, step, memory, least=3)


def attention_logits(tensors: Tensors, step: int, memory: Memory) -> Iterator[Reading]:
    """Read attention logits that are far too large."""
    yield from _beyond("attention-logits", "max_logit", tensors, step, memory)


def lossy_casts(
    tensors: Tensors, step: int, memory: Memory, noisy_db: float = 8.0
) -> Iterator[Reading]:
    """Read casts of which little is left: most values became zero, or too many saturate.

    Below 8 dB rounding error exceeds a sixth of an operand's energy. Healthy casts stay above 12.
    """
    noisy = {}
    for name, metrics in tensors.items():
        sqnr = metrics.get("sqnr_db")
        noisy[name] = metrics if sqnr is not None and sqnr <= noisy_db else {}
    yield from _beyond("underflow", "underflow", noisy, step, memory, least=2)
    yield from _beyond("overflow", "overflow", noisy, step, memory)


def growing_outliers(
    tensors: Tensors, step: int, memory: Memory, window: int = 10, least: float = 16.0
) -> Iterator[Reading]:
    """Read inputs whose outliers grow far beyond the lowest median of ten samples, as SwiGLU's do.

    Every healthy tensor may have outliers of 16 times its rms. They hurt no operand that enters a
    matmul as it is.
    """
    kind = KINDS["growing-outliers"]
    beyond = {}
    for name, metrics in tensors.items():
        value = metrics.get("outlier")
        if value is None or metrics.get("sqnr_db") is None or not name.startswith("input:"):
            continue
        usual = memory.usual_outliers.get(name, math.inf)
        limit = kind.bound * max(usual, least)
        recent = memory.outliers.setdefault(name, deque(maxlen=window))
        recent.append(value)
        if len(recent) == window:
            memory.usual_outliers[name] = min(usual, median(recent))
        if memory.begins(kind.name, value >= limit, name, least=3):
            beyond[name] = value
    for reading in memory.read(kind.name, beyond, step):
        usual = memory.usual_outliers[max(beyond, key=beyond.__getitem__)]
        yield replace(reading, bound=kind.bound * max(usual, least))


StepLaw = Callable[[Row, int, Memory], Iterator[Reading]]
SampleLaw = Callable[[Tensors, int, Memory], Iterator[Reading]]
STEP_LAWS: tuple[StepLaw, ...] = (nonfinite_step, diverged, loss_scale, spikes)
SAMPLE_LAWS: tuple[tuple[str, SampleLaw], ...] = (
    ("updates", lost_decay),
    ("tensors", lossy_casts),
    ("tensors", growing_outliers),
    ("attention", attention_logits),
)
"""Each with the table of a row that it reads."""
