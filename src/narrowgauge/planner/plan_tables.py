"""A plan in tables and at most six fixed sentences: options, and all terms of the best option."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from narrowgauge.planner.efficiency import MOST_RESTARTS, RESTARTS
from narrowgauge.planner.jobs import SECONDS_PER_DAY, Job
from narrowgauge.planner.program import programs_of
from narrowgauge.planner.roofline import multiplies
from narrowgauge.planner.scaling_laws import CAUSES
from narrowgauge.planner.search import LEAST_TOKENS_PER_STEP, MOST_TOKENS_PER_STEP
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.planner.units import bytes_text, count_text, duration_text, layout_text, unit_of
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.tables import Column, Row, Table, name_columns, number_columns, text_columns

_LEAST_SHARE = 0.005
NOTABLE = 0.03
"""Fraction of the memory by which another program must differ to be named."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the answer of :func:`narrowgauge.plan`.

    Args:
        options: best first. Jobs that do not fit come last, the nearest to fitting first.
        model: its name in the question.
        tokens, days: of the whole run, and its target; None if not asked.
        shared: with several kinds of chips, one configuration for all: a job on each; empty if none exists.
        left_out: rows that cannot be planned, and why.
    """

    options: tuple[Job, ...]
    model: str
    tokens: float | None = None
    days: float | None = None
    shared: tuple[Job, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Job:
        """Return the best option, or the nearest to fitting."""
        return self.options[0]

    def row(self) -> Row:
        """Return the question, the options and the answer as plain values, for JSON."""
        return {
            "model": self.model,
            "num_parameters": self.best.architecture.num_parameters,
            "tokens": self.tokens,
            "optimizer": self.best.optimizer,
            "options": [job.row(self.tokens) for job in self.options],
            "shared": [job.row(self.tokens) for job in self.shared],
            "left_out": self.left_out,
            "answer": self.sentences(),
        }

    def sentences(self) -> list[str]:
        """Return the conclusions, the most important first."""
        best, memory, lines = self.best, self.best.chip.memory_bytes, []
        if not best.fits:
            closest = f"{best.recipe.title} ({layout_text(best.layout)})"
            lines.append(
                f"Nothing fits. The closest is {closest}: too large by {bytes_text(-best.headroom_bytes)}."
            )
        if self.days:
            lines.append(
                f"{best.cluster.name} are the fewest with {self.days:g} d at the slow end of the interval."
            )
        if best.faster:
            rival = best.faster
            lines.append(
                f"{rival.tokens_per_second / best.tokens_per_second - 1:.0%} faster if its memory suffices: "
                f"{layout_text(rival.layout)}; free {_free_text(rival)}."
            )
        if best.resuming_bytes > memory:
            lines.append(
                f"While resuming, states exist twice, {bytes_text(best.resuming_bytes)}: load the checkpoint on the CPU."
            )
        for row, reason in self.left_out.items():
            lines.append(f"Left out: {row}: {reason}")
        if len({job.chip.name for job in self.options}) > 1 and not self.shared:
            places = " and ".join(_places(self.options))
            lines.append(
                f"No configuration fits on all of {places}: the chips with the least memory decide."
            )
        return [
            *lines,
            *_program_sentences(best),
            f"Assumed: {'; '.join(dict.fromkeys(_assumptions(self)))}.",
        ]

    def tables(self) -> list[Table]:
        """Return the options, and the time of each group in the best option's step."""
        best = self.best
        states = "" if best.optimizer == "adamw" else f"states of {best.optimizer}; "
        title = f"{self.model}: {count_text(best.architecture.num_parameters)} parameters; {states}"
        title += f"{', '.join(_places(self.options))}; sequences of {best.sequence_length:,} tokens"
        tables = [_options_table(self.options, self.tokens, title)]
        if self.shared:
            tables.append(_options_table(self.shared, self.tokens, "One configuration for all"))
        if best.fits:
            tables.append(_groups_table(best.step, f"A step of {best.tokens_per_step:,} tokens"))
        return tables

    def explanation(self) -> list[Table]:
        """Return every term of the best option's memory and step."""
        best = self.best
        return [
            _terms_table(
                best.memory,
                "bytes",
                f"Memory of the worst rank, {best.recipe.title}, {layout_text(best.layout)}",
            ),
            _terms_table(best.step, "s", f"An optimizer step of {best.tokens_per_step:,} tokens"),
        ]


# ── tables: options, terms and groups ─────────────────────────────────────────────────────────────────────────────────────


def _table(columns: Sequence[Column], rows: Sequence[Any], title: str) -> Table:
    """Return a table without the columns that only have empty cells."""
    shown = tuple(column for column in columns if any(column.cell(row) for row in rows))
    return Table(shown, list(rows), title)


def _places(jobs: Sequence[Job]) -> list[str]:
    """Return the names of the clusters, in order."""
    return list(dict.fromkeys(job.cluster.name for job in jobs))


def _options_table(jobs: Sequence[Job], tokens: float | None, title: str) -> Table:
    columns = (
        *name_columns(recipe=lambda job: job.recipe.title),
        *number_columns(B_per_parameter="bytes_per_param"),
        *text_columns(
            cluster=lambda job: job.cluster.name if len(_places(jobs)) > 1 else "",
            layout=lambda job: layout_text(job.layout),
        ),
        *number_columns(
            a_chip=lambda job: bytes_text(job.memory.total),
            free=_free_text,
            while_resuming=lambda job: bytes_text(job.resuming_bytes),
        ),
        *text_columns(fits=lambda job: job.fits),
        Column("tokens/s", lambda job: f"{job.tokens_per_second:,.0f}", right=True),
        Column(
            "80 % interval",
            lambda job: " to ".join(f"{end:,.0f}" for end in job.rate_interval),
            right=True,
        ),
        Column("MFU of the 16-bit peak", lambda job: f"{job.mfu:.0%}", right=True),
        *number_columns(
            tokens_a_step=lambda job: f"{job.tokens_per_step:,}"
            if len({j.tokens_per_step for j in jobs}) > 1
            else "",
            step=lambda job: duration_text(job.step.total),
        ),
    )
    if tokens is not None:
        columns += (
            *number_columns(time=lambda job: duration_text(SECONDS_PER_DAY * job.days(tokens))),
            Column(
                "80 % interval",
                lambda job: " to ".join(
                    duration_text(SECONDS_PER_DAY * end) for end in job.days_interval(tokens)
                ),
                right=True,
            ),
            *number_columns(chip_hours=lambda job: f"{24 * job.num_chips * job.days(tokens):,.0f}"),
        )
    columns += text_columns(
        matmuls=lambda job: "" if multiplies(job.recipe.compute, job.chip) else "emulated"
    )
    columns += text_columns(limited_by="limited_by", runs_with=_runs_with)
    return _table(columns, jobs, title)


def _runs_with(job: Job) -> str:
    """Name at most two programs that train this job."""
    texts = [program.text for program in programs_of(job)]
    if not texts:
        return "none that is known"
    return (
        texts[0] if len(texts) == 1 else f"{texts[0]}, {texts[1]}{' …' if len(texts) > 2 else ''}"
    )


def _program_sentences(job: Job) -> Iterator[str]:
    """Yield the program that is planned, and the memory of the same layout in the programs that differ."""
    yield f"Program: {job.program} (--program)."
    if not programs_of(job):
        yield f"No known program runs {job.recipe.title} in this layout on {job.chip.name}."
    others = []
    for program in programs_of(replace(job, program=replace(job.program, limits={}))):
        same = {
            name: getattr(job.program, name)
            for name in ("lora", "base", "adapted", "release", "offload")
        }
        other = replace(job, program=replace(program, **same))
        if abs(other.memory.total / job.memory.total - 1) > NOTABLE:
            others.append(
                f"{program.name} {bytes_text(other.memory.total)}{'' if other.fits else ' (too large)'}"
            )
    if others:
        yield f"The same layout in other programs: {', '.join(others)}."


def _free_text(job: Job) -> str:
    """Write the worst rank's free memory, with its interval if it may not fit."""
    free = bytes_text(job.headroom_bytes)
    if job.is_certain:
        return free
    low, high = (bytes_text(job.chip.memory_bytes - end) for end in reversed(job.memory.interval))
    return f"{free} ({low} to {high})"


def _terms_table(terms: Terms, unit: str, title: str) -> Table:
    """Return terms in ``"bytes"`` or ``"s"``: value and interval in one unit, formula and source."""
    scale, shown = unit_of(terms.total, unit)
    total = Term("total", f"all {len(terms.addends)} terms", terms.total, "", "", *terms.interval)

    def interval(term: Term) -> str:
        low, high = term.interval
        return "" if low == high else f"{low / scale:,.3f}–{high / scale:,.3f}"

    columns = (
        *text_columns(group="group", term="name"), Column(shown, lambda term: f"{term.value / scale:,.3f}", right=True),
        Column("80 % interval", interval, right=True), *text_columns(formula="formula", source="source"),
    )  # fmt: skip
    return _table(columns, [*terms, total], title)


def _groups_table(step: Terms, title: str) -> Table:
    """Return the groups of a step, the largest first. Matmuls and attention are the model's own operations."""
    groups = sorted(step.groups.items(), key=lambda item: -item[1])
    columns = (
        *text_columns(group=lambda item: item[0]),
        *number_columns(
            time=lambda item: duration_text(item[1]),
            share=lambda item: f"{item[1] / step.total:.0%}",
        ),
        *text_columns(what_helps=lambda item: CAUSES["groups"][item[0]]["remedy"]),
    )
    return Table(columns, [item for item in groups if item[1] >= _LEAST_SHARE * step.total], title)


def _assumptions(plan: Plan) -> Iterator[str]:
    """Yield the plan's assumptions: libraries, networks, parts of the model, and losses of recipes."""
    best, preset = plan.best, MODELS.get(plan.best.architecture.name)
    for job in plan.options:
        yield f"{job.efficiency.engines} on {job.chip.name} (--software)"
    for job in plan.options:
        cluster = job.cluster
        if cluster.interconnect_gbit_per_second is None and cluster.chips > cluster.chips_per_node:
            rate = cluster.network_bytes_per_second * 8e-9 * cluster.chips_per_node
            yield f"{rate:,.0f} Gbit/s a node of {job.chip.name} (--interconnect)"
    yield f"{best.recipe.title} loses {best.recipe.storage.loses}"
    if plan.tokens is not None:
        yield f"{RESTARTS:.0%} for restarts in the time of the run, up to {MOST_RESTARTS:.0%} in its interval"
    lossy = dict.fromkeys(
        job.recipe.title for job in plan.options if not job.recipe.storage.keeps_updates
    )
    if lossy:
        yield f"{', '.join(lossy)} lose small updates, or their second moments freeze at a beta2 of 0.999, and are listed last"
    if preset is not None and best.sequence_length > preset.max_positions:
        yield f"positions beyond {preset.name}'s {preset.max_positions:,} (a config.json with larger max_position_embeddings)"
    usual = ""
    if not (
        best.program.lora or LEAST_TOKENS_PER_STEP <= best.tokens_per_step <= MOST_TOKENS_PER_STEP
    ):
        usual = f", where published ones have {count_text(LEAST_TOKENS_PER_STEP)} to {count_text(MOST_TOKENS_PER_STEP)}"
    yield f"steps of {best.tokens_per_step:,} tokens{usual} (--tokens-per-step)"
    if best.layout.context > 2:
        yield "context ranks as fast as their bytes: torchtitan's took 22 to 55 % more time than planned, over 4 and 8 ranks"
    if best.architecture.left_out:
        yield f"no time or activations of {best.architecture.left_out}"
    if best.architecture.counts:
        yield "data and shard ranks only: tensor, pipeline and context ranks would change the module"
