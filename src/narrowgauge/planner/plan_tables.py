"""A plan in tables of at most 120 columns and fixed sentences: options, what fits instead, all
terms of the best option.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from narrowgauge.planner.candidates import keeps_rate
from narrowgauge.planner.efficiency import MOST_RESTARTS, RESTARTS, runs_of
from narrowgauge.planner.estimate import SECONDS_PER_DAY, Estimate
from narrowgauge.planner.nearest import nearest_run
from narrowgauge.planner.roofline import multiplies
from narrowgauge.planner.runs_with import programs_of
from narrowgauge.planner.search import (
    LEAST_TOKENS_PER_STEP,
    MOST_TOKENS_PER_STEP,
    fastest_removed,
)
from narrowgauge.planner.terms import Terms
from narrowgauge.planner.units import bytes_text, count_text, duration_text, layout_text, unit_of
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.tables import Column, Row, Table, name_columns, number_columns, text_columns

_LEAST_SHARE = 0.005
NOTABLE = 0.03
"""Fraction of the memory by which another program must differ to be named."""
_KINDS = {
    "adapters": "adapters",
    "mixture": "mixtures of experts",
    "long": "long sequences",
    "dense": "dense models",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the answer of :func:`narrowgauge.plan`.

    Args:
        options: best first. Jobs that do not fit come last, the nearest to fitting first.
        model: its name in the question.
        tokens, days: of the whole run, and its target; None if not asked.
        shared: with several kinds of chips, one configuration for all: a job on each; empty if none
            exists.
        left_out: rows that cannot be planned, and why.
        price: of a chip-hour.
        fixed: the layout's fixed fields.
        instead: if nothing fits, changes of the question that do, each with its job.
        removed: a much faster layout of the best row that no program runs, and why.
    """

    options: tuple[Estimate, ...]
    model: str
    tokens: float | None = None
    days: float | None = None
    shared: tuple[Estimate, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    price: float | None = None
    fixed: dict[str, Any] = field(default_factory=dict)
    instead: tuple[tuple[str, Estimate], ...] = ()
    removed: tuple[Estimate, str] | None = None

    @property
    def best(self) -> Estimate:
        """Return the best option, or the nearest to fitting."""
        return self.options[0]

    def with_removed(self) -> Plan:
        """Return the plan with the much faster layout that its programs do not run."""
        return replace(self, removed=fastest_removed(self.best, self.fixed))

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
            "shared": [job.row(self.tokens) for job in self.shared],
            "instead": [{"change": text, **job.row(self.tokens)} for text, job in self.instead],
            "left_out": self.left_out,
            "answer": self.sentences(),
        }

    def sentences(self) -> list[str]:
        """Return the conclusions, the most important first."""
        best = self.best
        lines = list[str]()
        if not best.fits:
            lines.append(_too_large(best))
        if self.days:
            lines.append(
                f"{best.cluster.name} are the fewest with {self.days:g} d at the slow end of the "
                "interval."
            )
        lines += _layouts(self.options)
        if best.faster:
            rival = best.faster
            lines.append(
                f"{rival.tokens_per_second / best.tokens_per_second - 1:.0%} faster if its memory "
                "suffices: "
                f"{layout_text(rival.layout)}; {bytes_text(rival.headroom_bytes)} free."
            )
        if self.removed:
            option, why = self.removed
            lines.append(
                f"{option.tokens_per_second / best.tokens_per_second:.1f} × as fast, and it would "
                "fit: "
                f"{layout_text(option.layout)}. No known program runs it: {why}."
            )
        if best.host_bytes:
            held = bytes_text(best.host_bytes)
            lines.append(
                f"The host of a node holds {held} of {bytes_text(best.cluster.host_memory_bytes)}."
            )
        if best.resuming_bytes > best.chip.memory_bytes:
            lines.append(
                f"While resuming, states exist twice, {bytes_text(best.resuming_bytes)}: load the "
                "checkpoint on the CPU."
            )
        for row, reason in self.left_out.items():
            lines.append(f"Left out: {row}: {reason}")
        if len({job.chip.name for job in self.options}) > 1 and not self.shared:
            places = " and ".join(_places(self.options))
            lines.append(
                f"No configuration fits on all of {places}: the chips with the least memory decide."
            )
        lines += _doubling(self.options)
        lines += _program_sentences(best)
        lines += [_checked(best), nearest_run(best)]
        return [*lines, f"Assumed: {'; '.join(dict.fromkeys(_assumptions(self)))}."]

    def tables(self) -> list[Table]:
        """Return the options of each cluster, what fits instead, and the time of each group in the
        best option's step.
        """
        best = self.best
        places = _places(self.options)
        states = "" if best.optimizer == "adamw" else f"states of {best.optimizer}; "
        count = count_text(best.architecture.num_parameters)
        if best.trained_parameters != best.architecture.num_parameters:
            count += f" parameters, {count_text(best.trained_parameters)} trained"
        else:
            count += " parameters"
        title = f"{self.model}: {count}; {states}{{}}; sequences of {best.sequence_length:,} tokens"
        tables = []
        for place in places:
            rows = [job for job in self.options if job.cluster.name == place]
            tables.append(_options_table(rows, title.format(place)))
        if self.shared:
            tables.append(_options_table(self.shared, "One configuration for all"))
        if self.instead:
            tables.append(_instead_table(self.instead))
        if self.tokens is not None:
            tables.append(_run_table(self.options, self.tokens, self.price))
        if best.fits:
            tables.append(_groups_table(best.step, f"A step of {best.tokens_per_step:,} tokens"))
        return tables

    def explanation(self) -> list[str]:
        """Return every term of the best option's memory and step, one a line."""
        best = self.best
        return [
            f"Memory of the worst rank, {best.recipe.title}, {layout_text(best.layout)}:",
            *_term_lines(best.memory, "bytes"),
            f"An optimizer step of {best.tokens_per_step:,} tokens:",
            *_term_lines(best.step, "s"),
        ]


# ── tables: options, terms and groups ─────────────────────────────────────────────────────────────


def _table(columns: Sequence[Column], rows: Sequence[Any], title: str) -> Table:
    """Return a table without the columns that only have empty cells."""
    shown = tuple(column for column in columns if any(column.cell(row) for row in rows))
    return Table(shown, list(rows), title)


def _places(jobs: Sequence[Estimate]) -> list[str]:
    """Return the names of the clusters, in order."""
    return list(dict.fromkeys(job.cluster.name for job in jobs))


def _options_table(jobs: Sequence[Estimate], title: str) -> Table:
    has_steps = len({job.tokens_per_step for job in jobs}) > 1
    has_places = len(_places(jobs)) > 1
    columns = (
        *name_columns(recipe=lambda job: job.recipe.title),
        *text_columns(cluster=lambda job: job.cluster.name if has_places else ""),
        Column("B/param", lambda job: "" if has_places else f"{job.bytes_per_param:g}", right=True),
        *number_columns(a_chip=lambda job: bytes_text(job.memory.total)),
        Column("80 %", lambda job: _memory_ends(job), right=True),
        *number_columns(free=lambda job: bytes_text(job.headroom_bytes)),
        *text_columns(fits=_fits_text),
        Column("tokens/s", lambda job: f"{job.tokens_per_second:,.0f}", right=True),
        Column("80 %", lambda job: _ends(job.rate_interval), right=True),
        Column("MFU", lambda job: f"{job.mfu:.0%}", right=True),
        *number_columns(
            a_step=lambda job: count_text(job.tokens_per_step) if has_steps else "",
        ),
        *text_columns(
            matmuls=lambda job: "" if multiplies(job.recipe.compute, job.chip) else "emulated"
        ),
    )
    return _table(columns, jobs, title)


def _fits_text(job: Estimate) -> str:
    """Write whether it fits; "barely" if the high end of its memory does not."""
    if not job.fits:
        return "no"
    return "yes" if job.has_room else "barely"


def _memory_ends(job: Estimate) -> str:
    if job.memory_interval is None:
        return "unchecked"
    low, high = (end / 1e9 for end in job.memory_interval)
    return f"{low:.3g}–{high:.3g}"


def _ends(interval: tuple[float, float] | None) -> str:
    return "–".join(f"{end:,.0f}" for end in interval) if interval else "unchecked"


def _instead_table(rows: Sequence[tuple[str, Estimate]]) -> Table:
    columns = (
        *text_columns(change=lambda row: row[0], recipe=lambda row: row[1].recipe.title),
        *number_columns(
            a_chip=lambda row: bytes_text(row[1].memory.total),
            free=lambda row: bytes_text(row[1].headroom_bytes),
        ),
        Column("tokens/s", lambda row: f"{row[1].tokens_per_second:,.0f}", right=True),
    )
    return Table(columns, list(rows), "Nothing fits as asked. With a change it does")


def _run_table(jobs: Sequence[Estimate], tokens: float, price: float | None) -> Table:
    has_places = len(_places(jobs)) > 1

    def hours(job: Estimate) -> float:
        return 24 * job.num_chips * job.days(tokens)

    def interval(job: Estimate) -> str:
        ends = job.days_interval(tokens)
        return " to ".join(duration_text(SECONDS_PER_DAY * end) for end in ends) if ends else ""

    columns = (
        *name_columns(recipe=lambda job: job.recipe.title),
        *text_columns(cluster=lambda job: job.cluster.name if has_places else ""),
        *number_columns(time=lambda job: duration_text(SECONDS_PER_DAY * job.days(tokens))),
        Column("80 %", interval, right=True),
        *number_columns(
            chip_hours=lambda job: f"{hours(job):,.0f}",
            price=lambda job: f"{hours(job) * price:,.0f}" if price else "",
        ),
    )
    return _table(columns, jobs, f"A run of {count_text(tokens)} tokens")


def _groups_table(step: Terms, title: str) -> Table:
    """Return the groups of a step, the largest first.

    Matmuls and attention are the model's own operations.
    """
    groups = sorted(step.groups.items(), key=lambda item: -item[1])
    columns = (
        *text_columns(group=lambda item: item[0]),
        *number_columns(
            time=lambda item: duration_text(item[1]),
            share=lambda item: f"{item[1] / step.total:.0%}",
        ),
    )
    return Table(columns, [item for item in groups if item[1] >= _LEAST_SHARE * step.total], title)


def _term_lines(terms: Terms, unit: str) -> Iterator[str]:
    """Yield each term in ``"bytes"`` or ``"s"`` with its formula and source, and the sum."""
    scale, shown = unit_of(terms.total, unit)
    for term in terms:
        yield f"{term.value / scale:12,.3f} {shown}  {term.group}, {term.name}: {term.formula} [{term.source}]"
    yield f"{terms.total / scale:12,.3f} {shown}  all {len(terms.addends)} terms"


# ── sentences ─────────────────────────────────────────────────────────────────────────────────────


def _too_large(best: Estimate) -> str:
    """Return how far the closest option is from fitting, and what the error bar says."""
    closest = f"The closest is {best.recipe.title} ({layout_text(best.layout)})"
    if best.headroom_bytes >= 0:
        needs = f"its host needs {bytes_text(best.host_bytes)}"
        return f"Nothing fits. {closest}: {needs} of {bytes_text(best.cluster.host_memory_bytes)}."
    line = f"Nothing fits. {closest}: too large by {bytes_text(-best.headroom_bytes)}"
    interval = best.memory_interval
    if interval and interval[0] <= best.chip.memory_bytes:
        line += ", which is within the error of plans of this kind: try it"
    return f"{line}."


def _layouts(jobs: Sequence[Estimate]) -> Iterator[str]:
    """Yield the layouts and the programs that run them, once for all rows that share them."""
    rows: dict[str, list[str]] = {}
    has_places = len(_places(jobs)) > 1
    for job in jobs:
        name = f"{job.recipe.title} on {job.cluster.name}" if has_places else job.recipe.title
        text = (
            f"{layout_text(job.layout)}; limited by {job.limited_by}; runs with {_runs_with(job)}"
        )
        rows.setdefault(text, []).append(name)
    for text, names in rows.items():
        yield f"{', '.join(names)}: {text}."


def _runs_with(job: Estimate) -> str:
    """Name at most two programs that train this job."""
    texts = [program.text for program in programs_of(job)]
    if not texts:
        return "no known program"
    more = " and others" if len(texts) > 2 else ""
    return ", ".join(texts[:2]) + more


def _program_sentences(job: Estimate) -> Iterator[str]:
    """Yield the program that is planned, and the memory of the same layout in the programs that
    differ.
    """
    yield f"Program: {job.program} (--program, --part)."
    if not programs_of(job):
        yield f"No known program runs {job.recipe.title} in this layout on {job.chip.name}."
    others = []
    for program in programs_of(replace(job, program=replace(job.program, limits={}))):
        same = {
            name: getattr(job.program, name)
            for name in ("lora", "base", "adapted", "release", "offload", "parts")
        }
        other = replace(job, program=replace(program, **same))
        if abs(other.memory.total / job.memory.total - 1) > NOTABLE:
            large = "" if other.fits else " (too large)"
            others.append(f"{program.name} {bytes_text(other.memory.total)}{large}")
    if others:
        yield f"The same layout in other programs: {', '.join(others)}."


def _checked(job: Estimate) -> str:
    """Say from which published runs the error bars are."""
    speed = runs_of("named" if job.is_named else "assumed", job.kind)
    memory = runs_of("memory", job.kind)
    parts = []
    for what, runs in (("speed", speed), ("memory", memory)):
        parts.append(f"{what} from {runs} published runs" if runs else f"{what} from none")
    kind = _KINDS[job.kind]
    line = f"80 % intervals of {kind}: {', '.join(parts)}."
    if not speed or not memory:
        line += " What is unchecked has no interval."
    return line


def _doubling(jobs: Sequence[Estimate]) -> Iterator[str]:
    """Say what more chips change beside the speed, if several numbers of one chip are compared."""
    counts = sorted({job.num_chips for job in jobs})
    if len({job.chip.name for job in jobs}) > 1 or len(counts) < 2:
        return
    yield (
        f"From {counts[0]:,} to {counts[-1]:,} chips: at equal tokens a step the learning rate "
        "stays; at k times the tokens "
        "Adam's grows by about √k (arXiv 2205.10287). The bits of a run change with the chips, but "
        "for /reproducible sums."
    )


def _assumptions(plan: Plan) -> Iterator[str]:
    """Yield the plan's assumptions: libraries, networks, parts of the model, and losses of recipes."""
    best = plan.best
    preset = MODELS.get(plan.best.architecture.name)
    for job in plan.options:
        yield f"{job.efficiency.engines} on {job.chip.name} (--software)"
    for job in plan.options:
        cluster = job.cluster
        if cluster.interconnect_gbit_per_second is None and cluster.chips > cluster.chips_per_node:
            rate = cluster.network_bytes_per_second * 8e-9 * cluster.chips_per_node
            yield f"{rate:,.0f} Gbit/s a node of {job.chip.name} (--interconnect)"
    if best.correction != 1:
        yield f"{1 / best.correction:.2f} × the planned speed, as in the run of --like"
    yield f"{best.recipe.title} loses {best.recipe.storage.loses}"
    if plan.tokens is not None:
        yield f"{RESTARTS:.0%} for restarts in the time of the run, up to {MOST_RESTARTS:.0%} in its interval"
    lossy = dict.fromkeys(
        job.recipe.title for job in plan.options if not keeps_rate(job.recipe.storage)
    )
    if lossy:
        yield f"{', '.join(lossy)} lose small updates, or hold or freeze second moments, and are listed last"
    if preset is not None and best.sequence_length > preset.max_positions:
        yield f"positions beyond {preset.name}'s {preset.max_positions:,} (a config.json with larger max_position_embeddings)"
    usual = ""
    is_usual = LEAST_TOKENS_PER_STEP <= best.tokens_per_step <= MOST_TOKENS_PER_STEP
    if not (best.program.lora or is_usual):
        usual = f", where published ones have {count_text(LEAST_TOKENS_PER_STEP)} to {count_text(MOST_TOKENS_PER_STEP)}"
    yield f"steps of {best.tokens_per_step:,} tokens{usual} (--tokens-per-step)"
    if best.layout.context > 2:
        yield "context ranks as fast as their bytes: torchtitan's took 22 to 55 % more time than planned, over 4 and 8 ranks"
    if best.architecture.left_out:
        yield f"no time or activations of {best.architecture.left_out}"
    if best.architecture.counts:
        yield "data and shard ranks only: tensor, pipeline and context ranks would change the module"
