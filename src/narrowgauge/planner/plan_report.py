"""A plan: a question, its options, and their tables; a few sentences say what follows from them (``answers``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.planner import answers
from narrowgauge.planner.architectures import Architecture
from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.memory_figures import LayerCounter
from narrowgauge.planner.options import NODE_POWER, NODE_POWER_SOURCE, Option
from narrowgauge.planner.shares import Shares, software_of
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.planner.words import amount, axes_text, gigabytes, layout_text, seconds_text, unit_of
from narrowgauge.spec.tables import Column, Row, Table, name_columns, number_columns, text_columns


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked.

    Args:
        architecture: the shape of the model.
        model: the name by which it was asked for.
        clusters: to run on; none asks for the state alone.
        sequence_length: tokens of a sequence.
        num_tokens: of the whole run; None if not asked.
        minimize: an objective of :data:`narrowgauge.planner.plan.OBJECTIVES`.
        fixed: fields of the layout that were asked for.
        shares: of the chips' printed rates; None for the published ones.
        counted: what a layer keeps, counted in the model's own modules; None for the formulas.
        tokens_per_step: of an optimizer step; None if not asked.
        deadline_days, budget: within which the run must end, in days and dollars; None for no limit.
        is_deadline_assumed: whether nobody gave the deadline.
        largest: ``"context"`` or ``"batch"`` where the largest that fits is asked for; empty if not.
        optimizer: whose states are counted.
    """

    architecture: Architecture
    model: str
    clusters: tuple[Cluster, ...] = ()
    sequence_length: int = 0
    num_tokens: float | None = None
    minimize: str = "days"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    shares: Shares | None = None
    counted: LayerCounter | None = None
    tokens_per_step: int | None = None
    deadline_days: float | None = None
    budget: float | None = None
    is_deadline_assumed: bool = False
    largest: str = ""
    optimizer: str = "adamw"

    @property
    def is_bounded(self) -> bool:
        """Whether there is a deadline or a budget."""
        return self.deadline_days is not None or self.budget is not None

    def meets(self, option: Option) -> bool:
        """Whether an option fits and ends within the deadline and the budget.

        Example:
            >>> from narrowgauge.planner.plan import plan
            >>> found = plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=64, tokens=1e11, days=3)
            >>> found.question.meets(found.best)
            True
        """
        days = None if self.num_tokens is None else option.days(self.num_tokens)
        if not option.fits or days is None:
            return False
        cost = None if self.num_tokens is None or self.budget is None else option.cost(self.num_tokens)
        is_in_time = self.deadline_days is None or days <= self.deadline_days
        return is_in_time and (self.budget is None or (cost is not None and cost <= self.budget))

    def software_rows(self, cluster: Cluster) -> list[Row]:
        """The software whose speed is planned, of each group of nodes; empty where the machine itself was measured."""
        if self.shares is not None:
            return []
        return [software_of(group.chip, group.software).row() for group in cluster.groups]

    def row(self) -> Row:
        """Plain values, for JSON."""
        adapters = self.architecture.adapters
        return {
            "model": self.model,
            "num_parameters": self.architecture.num_parameters,
            "num_active_parameters": self.architecture.num_active_parameters,
            "num_trained_parameters": self.architecture.num_trained_parameters,
            "clusters": [
                {"name": cluster.name, "chips": cluster.num_chips, "software": self.software_rows(cluster)}
                for cluster in self.clusters
            ],
            "sequence_length": self.sequence_length or None,
            "tokens": self.num_tokens,
            "minimize": self.minimize,
            "layout": dict(self.fixed),
            "deadline_days": self.deadline_days,
            "budget": self.budget,
            "largest": self.largest or None,
            "optimizer": self.optimizer,
            "adapters": None if adapters is None else {"rank": adapters.rank, "base": adapters.base},
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a question.

    Args:
        question: what was asked.
        options: best first; those that do not fit come last, the nearest of them first.
        shared: with several clusters, one configuration for all: an option on each; empty if there is none.
        trainable: the best option of this project's trainer, where the best of all is not one: the nearest to fitting if none
            fits, or why it has none; None where the best of all is one.
    """

    question: Question
    options: tuple[Option, ...]
    shared: tuple[Option, ...] = ()
    trainable: Option | RecipeError | None = None

    @property
    def best(self) -> Option:
        """The best option; the nearest to fitting if none fits."""
        return self.options[0]

    @property
    def is_state_only(self) -> bool:
        """Whether weights, gradients and optimizer states are all that is counted."""
        return self.best.step is None

    def row(self) -> Row:
        """The question, the options and the answer as plain values, for JSON."""
        return {
            "question": self.question.row(),
            "options": [option.row(self.question.num_tokens) for option in self.options],
            "answer": self.sentences(),
        }

    def sentences(self) -> list[str]:
        """What follows from the options, the most important first."""
        return answers.sentences(self)

    def tables(self) -> list[Table]:
        """The table of options."""
        columns = _STATE if self.is_state_only else _FULL
        rows = [_shown(option, self.question) for option in self.options]
        kept = [column for column in columns if any(column.cell(row) for row in rows)]
        if len({row["cluster"] for row in rows}) == 1:
            kept = [column for column in kept if column.key != "cluster"]
        return [Table(tuple(kept), rows, self.title)]

    @property
    def title(self) -> str:
        """The model, the machines and the length of a sequence."""
        question = self.question
        size = amount(question.architecture.num_parameters)
        name = f"{question.model}: {size} parameters" if question.model else f"{size} parameters"
        where = ", ".join(dict.fromkeys(option.cluster for option in self.options if option.cluster))
        length = f"sequences of {question.sequence_length:,} tokens"
        if self.is_state_only or question.largest == "context":
            length = ""
        how = "" if question.optimizer == "adamw" else f"states of {question.optimizer}"
        if (adapters := question.architecture.adapters) is not None:
            how = f"LoRA of rank {adapters.rank} over {adapters.base}" + (f", {how}" if how else "")
        return "; ".join(filter(None, [name, how, where, length]))

    def explanation(self) -> list[Table]:
        """Every term of the best option's memory and step."""
        best = self.best
        tables = [
            terms_table(
                best.memory, "bytes", f"Memory of the worst rank, {best.recipe.title}, {layout_text(best.layout)}"
            )
        ]
        if best.step is not None:
            tables.append(terms_table(best.step, "s", f"An optimizer step of {best.tokens_per_step:,} tokens"))
        energy = energy_terms(best, self.question.num_tokens or _TOKENS)
        if energy is not None:
            tables.append(terms_table(energy, "J", f"Energy of {amount(self.question.num_tokens or _TOKENS)} tokens"))
        return tables


_TOKENS = 1e9
"""Whose energy is explained where no number of tokens was asked for."""


def energy_terms(option: Option, num_tokens: float) -> Terms | None:
    """The energy of that many tokens; None where the chips' power is not known.

    Args:
        option: with a step.
        num_tokens: of the run.
    Returns:
        Terms in joules: of the chips as printed, and of what nodes take beyond.
    """
    rates = option.confidence()["tokens_per_second"]
    if option.watts is None or option.tokens_per_second is None:
        return None
    usual, least, most = NODE_POWER
    seconds = num_tokens / option.tokens_per_second
    fast, slow = num_tokens / rates[1], num_tokens / rates[0]
    chips = option.watts * seconds
    each = f"{option.num_chips} chips × {option.watts / option.num_chips:,.0f} W × {seconds:,.0f} s"
    return Terms(
        (
            Term("energy", "chips at their printed power", chips, each, "narrowgauge show chips --json",
                 low=option.watts * fast, high=option.watts * slow),
            Term("energy", "the rest of their nodes", (usual - 1) * chips,
                 f"{usual - 1:.0%} of it ({least - 1:.0%} to {most - 1:.0%})", NODE_POWER_SOURCE,
                 low=(least - 1) * option.watts * fast, high=(most - 1) * option.watts * slow),
        )
    )  # fmt: skip


def terms_table(terms: Terms, unit: str, title: str) -> Table:
    """Terms as a table: value and interval in one unit, formula and source.

    Args:
        terms: addends.
        unit: ``"bytes"``, ``"s"`` or ``"J"``.
        title: of the table.
    """
    scale, shown = unit_of(terms.total, unit)
    rows: list[Row] = [
        {
            "group": term.group,
            "term": term.name,
            "value": f"{term.value / scale:,.3f}",
            "interval": "" if term.interval == (term.value, term.value) else _interval(term.interval, scale),
            "formula": term.formula,
            "source": term.source,
        }
        for term in terms
    ]
    total: Row = {**dict.fromkeys(rows[0] if rows else (), ""), "group": "total", "term": f"all {len(rows)} terms"}
    total |= {
        "value": f"{terms.total / scale:,.3f}",
        "interval": _interval(terms.interval, scale),
        "formula": "",
        "source": "",
    }
    columns = (
        *text_columns(group="group", term="term"), Column(shown, "value", right=True),
        Column("4 of 5 times", "interval", right=True),
        *text_columns(formula="formula", source="source"),
    )  # fmt: skip
    return Table(columns, [*rows, total], title)


def _interval(interval: tuple[float, float], scale: float) -> str:
    return f"{interval[0] / scale:,.3f}–{interval[1] / scale:,.3f}"


def _shown(option: Option, question: Question) -> Row:
    """The cells of an option's line."""
    tokens = question.num_tokens
    days, cost = (None, None) if tokens is None else (option.days(tokens), option.cost(tokens))
    energy = None if tokens is None else option.kilowatt_hours(tokens)
    rate = option.tokens_per_second
    return {
        "recipe": option.recipe.title,
        "bytes": option.recipe.bytes_per_param,
        "cluster": option.cluster,
        "layout": (axes_text if option.step is None else layout_text)(option.layout),
        "state": gigabytes(option.memory.total * option.num_chips) if option.step is None else "",
        "memory": gigabytes(option.memory.total),
        "free": "" if option.headroom_bytes is None else gigabytes(option.headroom_bytes),
        "fits": fits_text(option),
        "rate": "" if rate is None else f"{rate:,.0f}",
        "daily": "" if rate is None else amount(rate * 86_400),
        "mfu": "" if option.mfu is None else f"{option.mfu:.0%}",
        "step": "" if option.step is None else seconds_text(option.step.total),
        "days": "" if days is None else f"{days:,.3g}" if days < 1000 else f"{days:,.0f}",
        "cost": "" if cost is None else f"{cost:,.0f}",
        "energy": "" if energy is None else f"{energy:,.0f}",
        "context": f"{option.sequence_length:,}" if question.largest == "context" else "",
        "batch": f"{option.layout.num_sequences:,}" if question.largest == "batch" else "",
        "limited_by": option.limited_by if option.fits else "",
        "why_not": " ".join(filter(None, [option.reason and f"{option.reason}.", option.advice]))
        if option.fits is False
        else "",
    }


def fits_text(option: Option) -> str:
    """``yes`` or ``no``, with ``barely`` where the interval of the memory has the chip's inside."""
    if option.fits is None:
        return ""
    return (
        ("yes" if option.fits else "no")
        if option.is_certain or option.why_not
        else ("barely" if option.fits else "hardly")
    )


_STATE = (
    *name_columns(recipe="recipe"), *number_columns(B_per_parameter="bytes"), *text_columns(cluster="cluster", layout="layout"),
    *number_columns(all_chips="state", each="memory", free="free"), *text_columns(fits="fits", why_not="why_not"),
)  # fmt: skip
_FULL = (
    *name_columns(recipe="recipe"), *number_columns(B_per_parameter="bytes"), *text_columns(cluster="cluster", layout="layout"),
    *number_columns(context="context", batch="batch"),
    *text_columns(fits="fits"), *number_columns(memory="memory", free="free"), Column("tokens/s", "rate", right=True),
    Column("tokens/day", "daily", right=True), Column("MFU", "mfu", right=True), *number_columns(step="step", days="days"),
    Column("$", "cost", right=True), Column("kWh", "energy", right=True),
    *text_columns(limited_by="limited_by", why_not="why_not"),
)  # fmt: skip
