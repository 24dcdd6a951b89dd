"""A plan in tables of at most 120 columns and eight fixed sentences: options, what fits instead,
and all terms of the best option.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

from narrowgauge.planner.candidates import keeps_rate, multiplies
from narrowgauge.planner.errors import Ends, runs_of
from narrowgauge.planner.estimate import MOST_RESTARTS, RESTARTS, SECONDS_PER_DAY, Estimate
from narrowgauge.planner.terms import Terms
from narrowgauge.planner.units import bytes_text, count_text, duration_text, layout_text, unit_of
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.tables import Column, Row, Table

_LEAST_SHARE = 0.005
_KINDS = {"mixture": "mixtures of experts", "dense": "dense models"}


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the answer of :func:`narrowgauge.plan`.

    Args:
        options: best first. Jobs that do not fit come last, the nearest to fitting first.
        model: its name in the question.
        tokens: of the whole run; None if not asked.
        left_out: rows that cannot be planned, and why.
        instead: if nothing fits, changes of the question that do, each with its job.
    """

    options: tuple[Estimate, ...]
    model: str
    tokens: float | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    instead: tuple[tuple[str, Estimate], ...] = ()

    @property
    def best(self) -> Estimate:
        """Return the best option, or the nearest to fitting."""
        return self.options[0]

    def row(self) -> Row:
        """Return the question, the options and the answer as plain values, for JSON."""
        best = self.best
        return {
            "model": self.model,
            "num_parameters": best.architecture.num_parameters,
            "trained_parameters": best.trained_parameters,
            "tokens": self.tokens,
            "optimizer": best.optimizer,
            "kind": best.kind,
            "options": [job.row(self.tokens) for job in self.options],
            "instead": [{"change": text, **job.row(self.tokens)} for text, job in self.instead],
            "left_out": self.left_out,
            "answer": self.sentences(),
        }

    def sentences(self) -> list[str]:
        """Return the conclusions, the most important first."""
        best = self.best
        lines = []
        if not best.fits:
            lines.append(_too_large(best))
        lines += _layouts(self.options)
        if best.host_bytes:
            memory = bytes_text(best.cluster.host_memory_bytes)
            lines.append(f"The host of a node holds {bytes_text(best.host_bytes)} of {memory}.")
        for row, reason in self.left_out.items():
            lines.append(f"Left out: {row}: {reason}")
        lines.append(_checked(best))
        lines += _without_effect(best)
        assumed = "; ".join(dict.fromkeys(_assumptions(self)))
        lines.append(f"Assumed: {assumed}.")
        return lines

    def tables(self) -> list[Table]:
        """Return the options of each cluster, what fits instead, the whole run, and the time of each
        group in the best option's step.
        """
        best = self.best
        title = f"{self.model}: {count_text(best.architecture.num_parameters)} parameters"
        if best.trained_parameters != best.architecture.num_parameters:
            title += f", {count_text(best.trained_parameters)} trained"
        if best.optimizer != "adamw":
            title += f"; states of {best.optimizer}"
        tables = []
        for place in _places(self.options):
            rows = [_option(job) for job in self.options if job.cluster.name == place]
            length = f"sequences of {best.sequence_length:,} tokens"
            tables.append(_table(f"{title}; {place}; {length}", rows))
        if self.instead:
            rows = [_change(*change) for change in self.instead]
            tables.append(_table("Nothing fits as asked. With a change it does", rows))
        if self.tokens is not None:
            rows = [_run(job, self.tokens) for job in self.options]
            tables.append(_table(f"A run of {count_text(self.tokens)} tokens", rows))
        if best.fits:
            groups = sorted(best.step.groups.items(), key=itemgetter(1), reverse=True)
            total = best.step.total
            rows = [_group(*group, total) for group in groups if group[1] >= _LEAST_SHARE * total]
            tables.append(_table(f"A step of {best.tokens_per_step:,} tokens", rows))
        return tables

    def explanation(self) -> list[str]:
        """Return every term of the best option's memory and step, one a line."""
        best = self.best
        return [
            f"Memory of the worst rank, {best.recipe.name}, {layout_text(best.layout)}:",
            *term_lines(best.memory, "bytes"),
            f"An optimizer step of {best.tokens_per_step:,} tokens:",
            *term_lines(best.step, "s"),
        ]


# ── tables: options, changes, the run and its groups ──────────────────────────────────────────────

Cells = tuple[tuple[str, str], ...]
"""The titles of a row's columns, each with its text."""
_LEFT = ("recipe", "fits", "matmuls", "change", "cluster", "group")


def _table(title: str, rows: Sequence[Cells]) -> Table:
    """Return a table without columns of empty cells, and of clusters and steps if all are equal."""
    columns = []
    for place, (name, _) in enumerate(rows[0]):
        texts = {row[place][1] for row in rows}
        is_same = name in ("cluster", "a step") and len(texts) == 1
        if texts != {""} and not is_same:
            cell = partial(_cell, place)
            is_code = rows[0][0][0] == name == "recipe"
            columns.append(Column(name, cell, code=is_code, right=name not in _LEFT))
    return Table(tuple(columns), list(rows), title)


def _cell(place: int, row: Cells) -> str:
    return row[place][1]


def _places(jobs: Sequence[Estimate]) -> list[str]:
    """Return the names of the clusters, in order."""
    return list(dict.fromkeys(job.cluster.name for job in jobs))


def _ends(interval: Ends, scale: float, style: str) -> str:
    """Write an interval."""
    return "–".join(format(end / scale, style) for end in interval)


def _loss(job: Estimate) -> str:
    """Write the measured loss of a recipe; nothing if it was not measured."""
    if job.measured_loss is None:
        return ""
    cost, half = job.measured_loss
    return f"{cost:+.3f} ± {half:.3f}" if half else "0"


def _option(job: Estimate) -> Cells:
    """Return the row of a job. ``tensors`` is what ``torch.cuda.max_memory_allocated`` prints."""
    fits = "no"
    if job.fits:
        fits = "yes" if job.has_room else "barely"
    return (
        ("recipe", job.recipe.name),
        ("B/param", f"{job.storage.bytes_per_param:g}"),
        ("a chip", bytes_text(job.peak_bytes)),
        ("80 %", _ends(job.memory_interval, 1e9, ".3g")),
        ("tensors", bytes_text(job.allocated_bytes)),
        ("free", bytes_text(job.headroom_bytes)),
        ("fits", fits),
        ("tokens/s", f"{job.tokens_per_second:,.0f}"),
        ("80 %", _ends(job.rate_interval, 1, ",.0f")),
        ("MFU", f"{job.mfu:.0%}"),
        ("nats, 1M model", _loss(job)),
        ("a step", count_text(job.tokens_per_step)),
        ("matmuls", "" if multiplies(job.recipe.compute, job.chip) else "emulated"),
    )


def _change(text: str, job: Estimate) -> Cells:
    """Return the row of a change of the question that fits."""
    shown = ("recipe", "a chip", "free", "tokens/s")
    return (("change", text), *(cell for cell in _option(job) if cell[0] in shown))


def _run(job: Estimate, tokens: float) -> Cells:
    """Return the row of a whole run."""
    days = job.days(tokens)
    ends = [duration_text(SECONDS_PER_DAY * end) for end in job.days_interval(tokens)]
    return (
        ("recipe", job.recipe.name),
        ("cluster", job.cluster.name),
        ("time", duration_text(SECONDS_PER_DAY * days)),
        ("80 %", " to ".join(ends)),
        ("chip hours", f"{24 * job.num_chips * days:,.0f}"),
    )


def _group(name: str, seconds: float, total: float) -> Cells:
    share = f"{seconds / total:.0%}"
    return ("group", name), ("time", duration_text(seconds)), ("share", share)


def term_lines(terms: Terms, unit: str) -> Iterator[str]:
    """Yield each term in ``"bytes"`` or ``"s"`` with its group, and the sum. The formulas are the
    code of ``planner/memory.py`` and ``planner/step_time.py``.
    """
    scale, shown = unit_of(terms.total, unit)
    for term in terms:
        yield f"{term.value / scale:12,.3f} {shown}  {term.group}: {term.name}"
    yield f"{terms.total / scale:12,.3f} {shown}  all {len(terms)} terms"


# ── sentences ─────────────────────────────────────────────────────────────────────────────────────


def _too_large(best: Estimate) -> str:
    """Return how far the closest option is from fitting, and what the error bar says."""
    closest = f"The closest is {best.recipe.name} ({layout_text(best.layout)})"
    if best.headroom_bytes >= 0:
        needs = f"its host needs {bytes_text(best.host_bytes)}"
        return f"Nothing fits. {closest}: {needs} of {bytes_text(best.cluster.host_memory_bytes)}."
    line = f"Nothing fits. {closest}: too large by {bytes_text(-best.headroom_bytes)}"
    if best.memory_interval[0] <= best.chip.memory_bytes:
        line += ", which is within the error of plans of this kind: try it"
    return f"{line}."


def _layouts(jobs: Sequence[Estimate]) -> list[str]:
    """Return the layouts and what limits them, once for all rows that share them."""
    rows: dict[str, list[str]] = {}
    has_places = len(_places(jobs)) > 1
    for job in jobs:
        name = job.recipe.name
        if has_places:
            name += f" on {job.cluster.name}"
        text = f"{layout_text(job.layout)}; limited by {job.limited_by}"
        rows.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}." for text, names in rows.items()]


def _checked(job: Estimate) -> str:
    """Say from which published runs the error bars are."""
    speed = runs_of("speed", job.kind)
    memory = runs_of("memory", job.kind)
    return (
        f"80 % intervals of {_KINDS[job.kind]}: {speed} published speeds and {memory} peaks, asked "
        "by name. A measured run of yours makes them smaller: narrowgauge plan next."
    )


def _without_effect(job: Estimate) -> Iterator[str]:
    """Say which fields of the program change nothing in this layout."""
    layout = job.layout
    program = job.program
    is_autocast = job.recipe.storage.visible == "float32"
    rows = (
        (program.saved and layout.recompute != "full", "saved=host without recompute=full"),
        (
            program.gathered and is_autocast and not job.gathered,
            "gathered= without sharded weights",
        ),
        (layout.zero not in (0, 3) and layout.num_sharing == 1, "zero= on one shard"),
    )
    for holds, text in rows:
        if holds:
            yield f"Without effect in this layout: {text}."


def _assumptions(plan: Plan) -> Iterator[str]:
    """Yield the plan's assumptions: programs, networks, losses of recipes, and the batch."""
    best = plan.best
    for job in plan.options:
        yield f"{job.program} (--program)"
    for job in plan.options:
        cluster = job.cluster
        if cluster.interconnect_gbit_per_second is None and cluster.chips > cluster.chips_per_node:
            rate = cluster.network_bytes_per_second * 8e-9 * cluster.chips_per_node
            yield f"{rate:,.0f} Gbit/s a node of {job.chip.name} (--cluster)"
    lossy = [job.recipe.name for job in plan.options if not keeps_rate(job.recipe.storage)]
    if lossy:
        names = ", ".join(dict.fromkeys(lossy))
        yield f"{names} lose small updates, or hold or freeze second moments, and are listed last"
    yield f"{best.recipe.name} loses {best.recipe.storage.loses}"
    if plan.tokens:
        yield f"{RESTARTS:.0%} for restarts in the time of the run, up to {MOST_RESTARTS:.0%} in its interval"
    model = MODELS.get(best.architecture.name)
    if model and model.max_positions < best.sequence_length:
        yield (
            f"positions beyond {model.name}'s {model.max_positions:,} (a config.json with larger "
            "max_position_embeddings)"
        )
    yield f"steps of {best.tokens_per_step:,} tokens (--tokens-per-step)"
