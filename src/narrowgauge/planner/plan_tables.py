"""A plan in tables and at most eight fixed sentences: options, and all terms of the best option."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.planner.efficiency import RESTARTS
from narrowgauge.planner.jobs import OURS, Job
from narrowgauge.planner.scaling_laws import CAUSES
from narrowgauge.planner.search import LEAST_TOKENS_PER_STEP, MOST_TOKENS_PER_STEP
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.planner.units import (
    axes_text,
    bytes_text,
    count_text,
    dollars_text,
    duration_text,
    layout_text,
    unit_of,
)
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.tables import Column, Row, Table, name_columns, number_columns, text_columns

_LEAST_SHARE = 0.005
_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Answer a question.

    Args:
        options: best first. Jobs that do not fit come last, the nearest to fitting first.
        model: its name in the question; empty for a number of parameters.
        tokens, days: of the whole run, and its deadline; None if not asked.
        optimizer: whose states are counted.
        trainable: the best that this project's trainer runs, if the best of all is not.
        shared: with several kinds of chips, one configuration for all: a job on each; empty if none exists.
    """

    options: tuple[Job, ...]
    model: str = ""
    tokens: float | None = None
    days: float | None = None
    optimizer: str = "adamw"
    trainable: Job | None = None
    shared: tuple[Job, ...] = ()

    @property
    def best(self) -> Job:
        """Return the best option, or the nearest to fitting."""
        return self.options[0]

    @property
    def is_state_only(self) -> bool:
        """Tell whether the plan counts only weights, gradients and optimizer states."""
        return not self.best.architecture.has_shape

    def is_met_by(self, job: Job) -> bool:
        """Tell whether a job fits and meets the deadline."""
        if self.days is None or self.tokens is None:
            return bool(job.fits)
        return bool(job.fits) and job.days(self.tokens) <= self.days

    @property
    def title(self) -> str:
        """Name the model, the machines and the length of a sequence."""
        size = f"{count_text(self.best.architecture.num_parameters)} parameters"
        parts = [f"{self.model}: {size}" if self.model else size]
        if self.optimizer != "adamw":
            parts.append(f"states of {self.optimizer}")
        parts.append(", ".join(_places(self.options)))
        if not self.is_state_only:
            parts.append(f"sequences of {self.best.sequence_length:,} tokens")
        return "; ".join(filter(None, parts))

    def row(self) -> Row:
        """Return the question, the options and the answer as plain values, for JSON."""
        architecture = self.best.architecture
        return {
            "model": self.model,
            "num_parameters": architecture.num_parameters,
            "num_active_parameters": architecture.num_active_parameters,
            "tokens": self.tokens,
            "deadline_days": self.days,
            "optimizer": self.optimizer,
            "options": [job.row(self.tokens) for job in self.options],
            "trainable": self.trainable and self.trainable.row(self.tokens),
            "shared": [job.row(self.tokens) for job in self.shared],
            "answer": self.sentences(),
        }

    def sentences(self) -> list[str]:
        """Return the conclusions, the most important first."""
        return list(_state_sentences(self) if self.is_state_only else _run_sentences(self))

    def tables(self) -> list[Table]:
        """Return the options, and the time of each group in the best option's step."""
        best, ours = self.best, [self.trainable] if self.trainable else []
        tables = [_options_table([*self.options, *ours], self, self.title)]
        if self.shared:
            tables.append(_options_table(self.shared, self, "One configuration for all"))
        if best.fits and not self.is_state_only:
            tables.append(_groups_table(best.step, f"A step of {best.tokens_per_step:,} tokens"))
        return tables

    def explanation(self) -> list[Table]:
        """Return every term of the best option's memory and step."""
        best = self.best
        title = f"Memory of the worst rank, {best.recipe.title}, {layout_text(best.layout)}"
        tables = [_terms_table(best.memory, "bytes", title)]
        if not self.is_state_only:
            tables.append(_terms_table(best.step, "s", f"An optimizer step of {best.tokens_per_step:,} tokens"))
        return tables


# ── tables: options, terms and groups ──────────────────────────────────────────────────────────────────────────────────────


def _table(columns: Sequence[Column], rows: Sequence[Any], title: str) -> Table:
    """Return a table without the columns that only have empty cells."""
    shown = tuple(column for column in columns if any(column.cell(row) for row in rows))
    return Table(shown, list(rows), title)


def _places(jobs: Sequence[Job]) -> dict[str, None]:
    """Return the names of the clusters, in order."""
    return dict.fromkeys(job.cluster.name for job in jobs if job.cluster is not None)


def _options_table(jobs: Sequence[Job], plan: Plan, title: str) -> Table:
    memory = (
        *name_columns(recipe=lambda job: job.recipe.title),
        *number_columns(B_per_parameter=lambda job: job.recipe.bytes_per_param),
        *text_columns(
            cluster=lambda job: job.hardware.name if len(_places(jobs)) > 1 else "",
            layout=lambda job: (axes_text if plan.is_state_only else layout_text)(job.layout),
        ),
        *number_columns(
            all_chips=lambda job: bytes_text(job.memory.total * job.num_chips) if plan.is_state_only else "",
            a_chip=lambda job: bytes_text(job.memory.total),
            free=_free_text,
            while_resuming=lambda job: bytes_text(job.resuming_bytes),
        ),
        *text_columns(fits=lambda job: job.fits),
    )
    why_not = text_columns(why_not=lambda job: job.why_not)
    if plan.is_state_only:
        return _table((*memory, *why_not), jobs, title)

    def cost(job: Job, tokens: float | None) -> str:
        dollars = None if plan.tokens is None or tokens is None else job.cost(tokens)
        return "" if dollars is None else dollars_text(dollars)

    time = (
        Column("tokens/s", lambda job: f"{job.tokens_per_second:,.0f}", right=True),
        Column("80 % interval", lambda job: " to ".join(f"{end:,.0f}" for end in job.rate_interval), right=True),
        Column("MFU", lambda job: f"{job.mfu:.0%}", right=True),
        *number_columns(step=lambda job: duration_text(job.step.total)),
    )
    if (tokens := plan.tokens) is not None:
        time += (
            *number_columns(time=lambda job: duration_text(_DAY * job.days(tokens))),
            Column(
                "80 % interval",
                lambda job: " to ".join(duration_text(_DAY * end) for end in job.days_interval(tokens)),
                right=True,
            ),
            *number_columns(cost=lambda job: cost(job, tokens), a_billion_tokens=lambda job: cost(job, 1e9)),
        )
    limits = text_columns(
        limited_by=lambda job: job.limited_by if job.fits else "",
        runs_with=lambda job: "" if job.runs_with == OURS else job.runs_with,
    )
    return _table((*memory, *time, *limits, *why_not), jobs, title)


def _free_text(job: Job) -> str:
    """Write the worst rank's free memory, with its interval if it may not fit."""
    if job.cluster is None or job.headroom_bytes is None:
        return ""
    free = bytes_text(job.headroom_bytes)
    if job.is_certain:
        return free
    low, high = (bytes_text(job.cluster.memory_bytes - end) for end in reversed(job.memory.interval))
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
        *number_columns(time=lambda item: duration_text(item[1]), share=lambda item: f"{item[1] / step.total:.0%}"),
        *text_columns(what_helps=lambda item: CAUSES["groups"][item[0]]["remedy"]),
    )
    return Table(columns, [item for item in groups if item[1] >= _LEAST_SHARE * step.total], title)


# ── the sentences ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _state_sentences(plan: Plan) -> Iterator[str]:
    best = plan.best
    yield (
        f"Only the state is counted (weights, gradients and optimizer states): "
        f"{bytes_text(best.memory.total * best.num_chips)} in {best.recipe.title} ({axes_text(best.layout)}). "
        "narrowgauge plan run adds activations, logits and buffers."
    )
    yield "While resuming, optimizer states exist twice: those that were made, and those of the checkpoint."
    if best.num_chips > 1:
        yield _data_parallel(plan)


def _run_sentences(plan: Plan) -> Iterator[str]:
    best = plan.best
    if not best.fits:
        yield f"Nothing fits. The closest is {best.recipe.title} ({layout_text(best.layout)}): {best.why_not}."
    if plan.days is not None:
        asked = f"{count_text(plan.tokens or 0.0)} tokens within {duration_text(_DAY * plan.days)}"
        if plan.is_met_by(best):
            yield f"The fewest chips that train {asked}: {best.hardware.name}."
        else:
            yield f"No tried number of chips trains {asked}."
    if best.fits and best.runs_with != OURS:
        yield "narrowgauge train runs FSDP2 alone (--layout fsdp2); the table says what runs other layouts."
    if best.num_chips > 1:
        yield _data_parallel(plan)
    yield (
        f"While resuming, optimizer states exist twice. A chip has {bytes_text(best.hardware.memory_bytes)}: where that is not "
        "enough, load the checkpoint on the CPU."
    )
    if len({job.chip.name for job in plan.options}) > 1 and not plan.shared:
        yield f"No configuration fits on all of {' and '.join(_places(plan.options))}: the chips with the least memory decide."
    yield f"Assumed: {'; '.join(dict.fromkeys(_assumptions(plan)))}."


def _data_parallel(plan: Plan) -> str:
    """Give the memory per chip under pure data parallelism."""
    size, cluster = plan.best.architecture.num_parameters, plan.best.cluster
    widths = sorted({job.recipe.bytes_per_param for job in plan.options}, reverse=True)
    needs = " and ".join(
        f"{bytes_text(size * w)} at {w:g} B a parameter" for w in dict.fromkeys((widths[0], widths[-1]))
    )
    sentence = f"Pure data parallelism keeps the whole state on every chip: {needs}"
    if cluster is None:
        return f"{sentence}."
    verdict = "impossible" if size * widths[-1] > cluster.memory_bytes else "the narrowest state fits"
    return f"{sentence}; a chip has {bytes_text(cluster.memory_bytes)}: {verdict}."


def _assumptions(plan: Plan) -> Iterator[str]:
    """Yield the plan's assumptions: libraries, networks, parts of the model, and losses of recipes."""
    best, preset = plan.best, MODELS.get(plan.model)
    for job in plan.options:
        yield f"{job.efficiency.engines} on {job.chip.name} (--software)"
    for job in plan.options:
        cluster = job.hardware
        if cluster.is_network_assumed and cluster.chips > cluster.chips_per_node:
            rate = cluster.network_bytes_per_second * 8e-9 * cluster.chips_per_node
            yield f"{rate:,.0f} Gbit/s a node of {job.chip.name} (--interconnect)"
    yield f"{best.recipe.title} loses {best.recipe.storage.loses}"
    if plan.tokens is not None:
        yield f"up to {RESTARTS:.0%} for restarts in the interval of the time"
    lossy = dict.fromkeys(job.recipe.title for job in plan.options if not job.recipe.storage.keeps_updates)
    if lossy:
        yield f"{', '.join(lossy)} lose small updates, or their second moments freeze at a beta2 of 0.999, and are listed last"
    if preset is not None and best.sequence_length > preset.max_positions:
        yield f"positions beyond {preset.name}'s {preset.max_positions:,} (a config.json with larger max_position_embeddings)"
    if not LEAST_TOKENS_PER_STEP <= best.tokens_per_step <= MOST_TOKENS_PER_STEP:
        usual = f"{count_text(LEAST_TOKENS_PER_STEP)} to {count_text(MOST_TOKENS_PER_STEP)}"
        yield f"steps of {best.tokens_per_step:,} tokens, where published ones have {usual}"
    if best.architecture.left_out:
        yield f"no time or activations of {best.architecture.left_out}"
