"""Evidence: a run's record, read once, in the form that signs need.

A sign reads a column of the steps, a metric of the gauges, a kind of event or a setting, by names such as ``steps.grad_norm``,
``updates.edq``, ``events.loss_spike`` and ``config.lr``. :meth:`Evidence.has` says whether the record holds it, so that what was
not recorded is unknown, and never taken for absent. Series of gauges are sorted by tensor once, for all signs together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from narrowgauge.analysis.diagnosis.replay_findings import ReplayedStep
from narrowgauge.analysis.monitor.alarms import Alarms
from narrowgauge.analysis.monitor.detectors import DETECTORS
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import METRICS, Row, number, step_of
from narrowgauge.spec.notation import parse_value
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.update_rules import UPDATE_RULES, UpdateRule

Series = dict[str, list[tuple[int, list[float | None]]]]
"""By tensor: the steps that were sampled, each with the metrics of the table."""


def recorded_rule(run: Run) -> UpdateRule | None:
    """The update rule; AdamW where none is recorded, ``None`` where the name, or the recorded optimizer, is no rule's."""
    config, optimizer = run.run.get("config"), run.run.get("optimizer")
    rule = config.get("rule") if isinstance(config, dict) else None
    named = optimizer.get("class") if isinstance(optimizer, dict) else None
    return UPDATE_RULES.get(str(rule or named or "adamw").lower())


def recomputed_steps(run: Run) -> dict[int, Row]:
    """By audited step: what its pieces showed, as the column ``recomputed`` of its row has it."""
    return {step_of(row): row["recomputed"] for row in run.steps if isinstance(row.get("recomputed"), dict)}


@dataclass(frozen=True)
class Evidence:
    """One run, read once.

    Args:
        recipe: what it trained in; ``None`` where the record does not say.
        missing: what could not be read, and why, one sentence each.
        replay: one of its steps, computed again, if any was.
    """

    run: Run
    recipe: Recipe | None = None
    missing: tuple[str, ...] = ()
    replay: ReplayedStep | None = None
    _held: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)
    _columns: dict[str, list[float | None]] = field(default_factory=dict, init=False, repr=False, compare=False)

    # ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def setting(self, name: str) -> Any:
        """A setting of the run; ``None`` where the record does not hold it."""
        table = self.run.run.get("config")
        return table.get(name) if isinstance(table, dict) else None

    def number_of(self, name: str) -> float | None:
        return number(self.setting(name))

    @property
    def compute(self) -> str:
        return self.recipe.compute.name if self.recipe is not None else ""

    @property
    def num_ranks(self) -> int:
        machine = self.run.run.get("machine")
        ranks = machine.get("ranks", 1) if isinstance(machine, dict) else 1
        return ranks if isinstance(ranks, int) else 1

    @property
    def hidden_size(self) -> int | None:
        model = self.run.run.get("model")
        size = model.get("hidden_size") if isinstance(model, dict) else None
        return size if isinstance(size, int) and size > 0 else None

    @property
    def first_step(self) -> int:
        return int(self.run.steps[0]["step"]) if self.run.steps else 0

    @property
    def num_steps(self) -> int:
        """Steps from the first row to the last."""
        return int(self.run.steps[-1]["step"]) - self.first_step + 1 if self.run.steps else 0

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def steps(self) -> list[int]:
        return [int(row["step"]) for row in self.run.steps]

    @cached_property
    def starts_trained(self) -> bool:
        """Whether the first losses are those of a model that was trained before: below what token frequencies alone give."""
        pairs = zip(self.column("loss")[:5], self.column("unigram_loss")[:5], strict=True)
        gaps = [unigram - loss for loss, unigram in pairs if loss is not None and unigram is not None]
        return bool(gaps) and median(gaps) > 0.3

    @cached_property
    def is_sparse(self) -> bool:
        """Whether most rows are more than one step after the row before them, as in a log of every tenth step."""
        gaps = [now - before for before, now in pairwise(self.steps)]
        return 2 * sum(gap > 1 for gap in gaps) > len(gaps)

    @cached_property
    def tokens_per_step(self) -> float | None:
        """Tokens of a step, the median; ``None`` where the rows do not count them."""
        known = [
            (step, count) for step, count in zip(self.steps, self.column("tokens"), strict=True) if count is not None
        ]
        rates = [(late - early) / (now - then) for (then, early), (now, late) in pairwise(known) if now > then]
        return median(rates) if rates and median(rates) > 0 else None

    def column(self, name: str) -> list[float | None]:
        """A column of ``steps.jsonl``: a value per row, ``None`` where it has none; not to be changed."""
        if name not in self._columns:
            self._columns[name] = [number(row.get(name)) for row in self.run.steps]
        return self._columns[name]

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def events(self) -> dict[str, list[Row]]:
        """The events by kind; a kind without any has those that the rows raise now: not every writer has detectors."""
        found: dict[str, list[Row]] = {}
        for row in self.run.events:
            found.setdefault(str(row.get("kind")), []).append(row)
        # A run with this setting reacts to what its detectors raise: they ran, and what they did not raise was not there.
        if self.setting("on_spike") is not None:
            return found
        raised: dict[str, list[Row]] = {}
        for row in self._raised():
            raised.setdefault(str(row["kind"]), []).append(row)
        return {**raised, **found}

    def _raised(self) -> list[Row]:
        alarms = Alarms(self.recipe, is_audited=self.has("steps.edq"))
        events = [event for row in self.run.steps for event in alarms.on_step(row)]
        events += [event for row in self.gauges for event in alarms.on_gauges(row)]
        return [event.row() for event in events]

    def raised_by(self, *detectors: str) -> list[Row]:
        """The events that these detectors, or keys of :data:`~narrowgauge.runs.events.RAISED_BY`, raised, by step."""
        rows = [event for events in self.events.values() for event in events if event.get("detector") in detectors]
        return sorted(rows, key=step_of)

    @property
    def resumes(self) -> list[int]:
        """The steps from which the run was resumed."""
        return [step_of(event) for event in self.events.get("resume", [])]

    def row_after(self, step: int) -> int:
        """The first row of a later step; the number of all rows where there is none."""
        return next((row for row, later in enumerate(self.steps) if later > step), len(self.steps))

    # ── steps computed again ─────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def recomputed(self) -> dict[int, Row]:
        """By step that was computed again: what its pieces showed, as the column ``recomputed`` has it."""
        found = recomputed_steps(self.run)
        if self.replay is not None:
            replay = self.replay
            shown = {"equal": replay.checked, "departs": replay.departed, "unchecked": replay.unchecked or {}}
            found.setdefault(replay.step, shown)
        return found

    # ── gauges ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def gauges(self) -> list[Row]:
        """The rows of ``gauges.jsonl``; none where the file is damaged."""
        try:
            return self.run.gauges
        except RecordError:
            return []

    @cached_property
    def _series(self) -> dict[str, Series]:
        tables: dict[str, Series] = {table: {} for table in METRICS}
        for row in self.gauges:
            for table, series in tables.items():
                for name, values in (row.get(table) or {}).items():
                    if values:
                        series.setdefault(name, []).append((row["step"], values))
        return tables

    def metric(self, table: str, metric: str, kind: str = "") -> dict[str, list[tuple[int, float]]]:
        """One metric of all tensors: by tensor, the steps and values, without those that are null.

        Args:
            table: of the gauges, such as ``updates``.
            kind: of tensors, such as ``weight``; all if empty.
        """
        place = list(METRICS[table]).index(metric)
        found = {}
        for name, samples in self._series[table].items():
            if kind and name.partition(":")[0] != kind:
                continue
            values = [(step, float(v[place])) for step, v in samples if place < len(v) and v[place] is not None]  # type: ignore[arg-type]
            if values:
                found[name] = values
        return found

    # ── what its recipe and settings make possible: everything where the record does not name the recipe ─────────────────

    def in_float16(self) -> bool:
        """Whether it computes in float16, where no recipe says so by a sign of it: a loss scale, a setting, a dtype."""
        if self.recipe is None:
            return self.has("steps.loss_scale") or self._names_float16
        return any("float16" in (c.dtype, c.name) for c in self.recipe.computes)

    @cached_property
    def _names_float16(self) -> bool:
        tables = (self.run.run.get(name) for name in ("config", "model"))
        return any(
            _says_float16(name, value) for table in tables if isinstance(table, dict) for name, value in table.items()
        )

    def scales_loss(self) -> bool:
        """Whether the loss is scaled dynamically."""
        return self.has("steps.loss_scale") or (self.recipe is None and self.in_float16())

    @cached_property
    def peak_rate(self) -> float | None:
        """The learning rate of the settings, else the highest of all steps; of a loop of one's own in the other order.

        A schedule may multiply a setting of 1 by the rate.
        """
        known = [rate for rate in self.column("lr") if rate is not None and isfinite(rate)]
        highest, given = max(known, default=None), self.number_of("lr")
        return highest or given if "recorder" in self.run.run else given or highest

    @cached_property
    def reached_rate(self) -> float | None:
        """The peak rate, or less where no step has reached it and the rate rises no more."""
        known = [rate for rate in self.column("lr") if rate is not None and isfinite(rate)]
        if self.peak_rate is None or len(known) < 2 or known[-1] > known[-2]:
            return self.peak_rate
        return min(self.peak_rate, max(known))

    def is_narrow(self) -> bool:
        """Whether an operand of a matmul has fewer than 16 bits."""
        return self.recipe is None or any(not cast.is_wide for c in self.recipe.computes for cast in c.casts.values())

    def is_delayed(self) -> bool:
        """Whether scales are taken from earlier steps."""
        return self.recipe is None or any(compute.is_delayed for compute in self.recipe.computes)

    def in_blocks(self) -> bool:
        if self.recipe is None:
            return True
        return any(cast.block is not None for c in self.recipe.computes for cast in c.casts.values())

    @cached_property
    def _stores_sixteen_bits(self) -> bool:
        model = self.run.run.get("model")
        return "float16" in (str(model.get("dtypes")) if isinstance(model, dict) else "")

    def narrows_gradients(self) -> bool:
        """Whether gradients pass through a narrow format; where no recipe says so, whether a dtype, a scale or a cast does."""
        if self.recipe is None:
            return self.in_float16() or self._stores_sixteen_bits or self.has("tensors.underflow")
        return self.is_narrow() or self.in_float16()

    def rounds_weights(self) -> bool:
        """Whether stored weights are rounded to nearest; where no recipe says so, whether they are narrow, or were measured."""
        if self.recipe is None:
            return self._stores_sixteen_bits or self.has("steps.edq") or self.has("updates.edq")
        return self.recipe.storage.weight.rounding == "nearest"

    def cannot_decay(self) -> bool:
        """Whether second moments are rounded to nearest, and beta2 lowers them by less than half their spacing."""
        beta2 = self.number_of("beta2")
        if self.recipe is None or self.recipe.storage.exp_avg_sq.rounding != "nearest":
            return self.recipe is None
        code = self.recipe.storage.exp_avg_sq
        mantissa_bits = code.parts * (code.mantissa_bits + 1) - 1
        return beta2 is None or 1 - beta2 < 2.0 ** -(mantissa_bits + 1)

    @property
    def rule(self) -> UpdateRule | None:
        """As :func:`recorded_rule`."""
        return recorded_rule(self.run)

    def is_unit_scaled(self) -> bool:
        """Whether the model is known to be unit-scaled, where each tensor has a scale and a rate of its own."""
        return self.recipe is not None and self.recipe.compute.transform == "unit"

    def on_ranks(self) -> bool:
        return self.num_ranks > 1

    def accumulates(self) -> bool:
        """Whether a step has several micro-batches, or may have, in a format that rounds their sum."""
        model = self.run.run.get("model")
        formats = str(model.get("formats", "")) if isinstance(model, dict) else ""
        if formats and set(formats.split(", ")) <= {"float32", "float64"}:
            return False
        return (self.number_of("gradient_accumulation_steps") or 2) > 1

    def was_resumed(self) -> bool:
        return bool(self.resumes)

    # ── what the record holds ────────────────────────────────────────────────────────────────────────────────────────────

    def has(self, read: str) -> bool:
        """Whether the record holds what a sign reads.

        Args:
            read: ``steps.COLUMN``, ``TABLE.METRIC`` of the gauges, ``logits.METRIC``, ``config.SETTING``, ``events.KIND``,
                ``replay.step`` and ``replay.variants``, or ``run.recipe``, ``run.ranks`` (several), ``run.ours``, ``run.data``
                (steps can be computed again), ``run.recomputed`` (pieces of some were), ``run.evals``, ``run.rate`` (a learning
                rate), ``run.blocks`` (block scales), ``run.histograms`` and ``run.on_cpu``.
        """
        if read not in self._held:
            self._held[read] = self._holds(*read.split(".", 1))
        return self._held[read]

    def _holds(self, table: str, name: str) -> bool:
        if table == "steps":
            return any(row.get(name) is not None for row in self.run.steps)
        if table == "config":
            return self.setting(name) is not None
        if table == "run":
            return self._facts[name]
        if table == "replay":
            if self.replay is None:
                return False
            return name == "step" or bool(self.replay.variants)
        if table == "logits":
            return any((row.get("logits") or {}).get(name) is not None for row in self.gauges)
        if table == "events":
            return self._could_raise(name)
        place = list(METRICS[table]).index(name)
        samples = (values for series in self._series[table].values() for _, values in series)
        return any(place < len(values) and values[place] is not None for values in samples)

    @cached_property
    def _facts(self) -> dict[str, bool]:
        return {
            "recipe": self.recipe is not None,
            "ranks": self.num_ranks > 1,
            "ours": not self.run.is_foreign,
            "rate": self.peak_rate is not None,
            "data": "recorder" not in self.run.run and (self.run.path / "data" / "data.json").is_file(),
            "recomputed": any(each.get("equal") or each.get("departs") for each in self.recomputed.values()),
            "evals": bool(self.run.evals),
            "blocks": any(row.get("block_scales") for row in self.gauges),
            "histograms": any(row.get("histograms") for row in self.gauges),
            "on_cpu": isinstance(machine := self.run.run.get("machine"), dict) and machine.get("device") == "cpu",
        }

    def _could_raise(self, kind: str) -> bool:
        """Whether an event of that kind would have been raised: a detector had what it reads, or there is one."""
        if kind in self.events:
            return True
        metrics = {row.metric for row in DETECTORS.values() if row.kind == kind}
        return any(self.has(_COMPUTED.get(metric, metric)) or self._is_audited(metric) for metric in metrics)

    def _is_audited(self, metric: str) -> bool:
        """Whether the audit of all parameters together measures a metric of the updates."""
        table, _, name = metric.partition(".")
        return table == "updates" and name in ("edq", "noise") and self.has(f"steps.{name}")


_FLOAT16 = frozenset({"fp16", "float16", "half", "torch.float16", "16-mixed", "16-true", "fp16-mixed"})


def _says_float16(name: str, value: Any) -> bool:
    """Whether a setting names float16: ``fp16 = true``, ``precision = "16-mixed"``, ``dtypes = "float16, float32"``."""
    if value is True:
        return name in ("fp16", "float16", "half")
    words = {word.strip().lower() for word in str(value).split(",")}
    return bool(words & _FLOAT16) or (name == "precision" and words == {"16"})


_COMPUTED = {
    "updates.intended": "updates.edq", "attention.nonfinite": "attention.max_logit", "logits.nonfinite": "logits.log_z",
    "steps.climb": "steps.loss", "steps.growth": "steps.grad_norm", "steps.halvings": "steps.loss_scale",
    "steps.skipped": "steps.loss_scale", "steps.nonfinite": "steps.loss",
}  # fmt: skip
"""What detectors compute, and the column that they compute it from."""


def gather(run: str | Path | Run, replay: ReplayedStep | None = None) -> Evidence:
    """Read a run from its folder or another framework's log; what is damaged or was not recorded is listed as missing."""
    record = run if isinstance(run, Run) else read_run(run)
    missing, recipe = [], None
    given = record.run.get("config")
    name = given.get("recipe") if isinstance(given, dict) else None
    if name is None:
        missing.append(
            "the recipe: the record does not name it, so what only some formats can cause is considered where it shows"
        )
    else:
        try:
            recipe = parse_value(name)
        except NarrowgaugeError as error:
            missing.append(f"the recipe: {error.message.rstrip('.')}")
    try:
        is_watched = bool(record.gauges)
    except RecordError as error:
        is_watched = True
        missing.append(f"the gauges: {error.message.rstrip('.')}")
    if not is_watched:
        missing.append("the gauges: no tensor was sampled")
    return Evidence(record, recipe, (*missing, *_missing_rows(record)), replay)


def _missing_rows(run: Run) -> Iterator[str]:
    steps = [step_of(row) for row in run.steps]
    if not steps:
        yield "the steps: no row of a step was written"
        return
    if any(row.get("loss") is None for row in run.steps):
        count = sum(row.get("loss") is None for row in run.steps)
        yield f"the loss of {count} of the {len(steps)} steps"
    place = next((k for k in range(1, len(steps)) if steps[k] <= steps[k - 1]), None)
    if place is not None:
        yield f"the order of the steps: row {place + 1} is of step {steps[place]}, after one of step {steps[place - 1]}"
    last = max((step_of(row) for row in run.events), default=0)
    if last > max(steps) + 1:
        yield f"the steps after {max(steps)}: events go on to step {last}"
