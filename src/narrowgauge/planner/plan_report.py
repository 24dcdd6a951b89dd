"""A plan in words and tables: its options, the sentences that follow from them, every term, and a settings file.

The tables are plain values. Each sentence says one thing and names the figures it rests on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.planner.formatting import (
    axes_text,
    bytes_text,
    count_text,
    dollars_text,
    duration_text,
    energy_text,
    layout_text,
    seconds_text,
    unit_of,
)
from narrowgauge.planner.inputs.efficiency import software_of
from narrowgauge.planner.measured.scaling_law import BOTTLENECKS
from narrowgauge.planner.question import NODE_POWER, NODE_POWER_SOURCE, OURS, Option, Question
from narrowgauge.planner.search import (
    LEAST_TOKENS_PER_STEP,
    MOST_TOKENS_PER_STEP,
    SIMPLER_STEP_FACTOR,
    usual_tokens_per_step,
)
from narrowgauge.planner.terms import Term, Terms, changes
from narrowgauge.planner.time.step_time import LATE_NODES, SLOWEST_KIND
from narrowgauge.runs.finding import sentences
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.recipes import DEFAULT_RECIPE
from narrowgauge.spec.tables import Column, Row, Table, name_columns, number_columns, text_columns


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a question.

    Args:
        question: what was asked.
        options: best first; those that do not fit come last, the nearest to fitting first.
        shared: with several clusters, one configuration for all: an option on each; empty if there is none.
        trainable: where the best option is not one of this project's trainer, the trainer's best one (the nearest to fitting if
            none fits), or the error that says why it has none; else None.
        names_recipes: whether the recipes were asked for; otherwise they are all that suit the chips.
    """

    question: Question
    options: tuple[Option, ...]
    shared: tuple[Option, ...] = ()
    trainable: Option | RecipeError | None = None
    names_recipes: bool = True

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
        if self.is_state_only:
            return [*_about_state(self), *_about_model(self)]
        return [*_about_choice(self), *_about_best(self), *_about_model(self), *_about_all(self)]

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
        size = count_text(question.architecture.num_parameters)
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
            tables.append(
                terms_table(energy, "J", f"Energy of {count_text(self.question.num_tokens or _TOKENS)} tokens")
            )
        return tables


_TOKENS = 1e9
"""The tokens whose energy is explained where no number was given."""


def energy_terms(option: Option, num_tokens: float) -> Terms | None:
    """The joules of that many tokens: chips at their printed power, and their nodes beyond it; None if that is unknown."""
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
    """Terms in ``"bytes"``, ``"s"`` or ``"J"`` as a table: value and interval in one unit, formula and source."""
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
        Column("80 % interval", "interval", right=True),
        *text_columns(formula="formula", source="source"),
    )  # fmt: skip
    return Table(columns, [*rows, total], title)


def _interval(interval: tuple[float, float], scale: float) -> str:
    return f"{interval[0] / scale:,.3f}–{interval[1] / scale:,.3f}"


def _shown(option: Option, question: Question) -> Row:
    tokens = question.num_tokens
    days, cost = (None, None) if tokens is None else (option.days(tokens), option.cost(tokens))
    energy = None if tokens is None else option.kilowatt_hours(tokens)
    rate = option.tokens_per_second
    return {
        "recipe": option.recipe.title,
        "bytes": option.recipe.bytes_per_param,
        "cluster": option.cluster,
        "layout": (axes_text if option.step is None else layout_text)(option.layout),
        "state": bytes_text(option.memory.total * option.num_chips) if option.step is None else "",
        "memory": bytes_text(option.memory.total),
        "free": "" if option.headroom_bytes is None else bytes_text(option.headroom_bytes),
        "fits": fits_text(option),
        "rate": "" if rate is None else f"{rate:,.0f}",
        "daily": "" if rate is None else count_text(rate * 86_400),
        "mfu": "" if option.mfu is None else f"{option.mfu:.0%}",
        "step": "" if option.step is None else seconds_text(option.step.total),
        "days": "" if days is None else f"{days:,.3g}" if days < 1000 else f"{days:,.0f}",
        "cost": "" if cost is None else f"{cost:,.0f}",
        "energy": "" if energy is None else f"{energy:,.0f}",
        "context": f"{option.sequence_length:,}" if question.largest == "context" else "",
        "batch": f"{option.layout.num_sequences:,}" if question.largest == "batch" else "",
        "limited_by": option.limited_by if option.fits else "",
        "why_not": _clause(option),
    }


def fits_text(option: Option) -> str:
    """``yes`` or ``no``; ``barely`` or ``hardly`` where the chip's memory lies inside the interval of what is needed."""
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


# ── sentences ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

_BY_NAME = {cause.name: cause.remedy for cause in BOTTLENECKS}
REMEDIES = {
    "matmuls": "a narrower compute multiplies faster where the chip does it natively (narrowgauge plan layers)",
    "casts": "cast fewer layers, or cache the casts of weights over more micro-batches",
    "attention": "shorter sequences, or more context ranks",
    "elementwise": "compile the model, so that these operations are fused",
    "loss": "compute the loss in chunks of the vocabulary",
    "optimizer": "a storage of fewer bytes, or more tokens per step",
    "communication": _BY_NAME["communication"],
    "bubble": _BY_NAME["pipeline bubble"],
    "waiting": _BY_NAME["synchronization"],
    "data": _BY_NAME["data"],
    "checkpoints": _BY_NAME["checkpoints, evaluations and starts"],
    "faults": _BY_NAME["failures"],
}
"""What makes each group of a step smaller."""
_FEW = 4
MOST_SHARED = 3
"""The most clusters for which one configuration for all is searched."""
_LEAST_SHARE = 0.005
USEFUL = ("matmuls", "attention")
"""Groups of a step that are the model's own operations; all others are overhead."""


def _about_model(plan: Plan) -> Iterator[str]:
    """Parts of the model that are not planned, and lengths beyond those it was published for."""
    question = plan.question
    if question.architecture.left_out:
        yield f"Only the text decoder is planned: {question.architecture.left_out} are left out."
    preset = MODELS.get(question.model)
    if preset is not None and question.sequence_length > preset.max_positions:
        yield (
            f"{preset.name} has {preset.max_positions:,} positions. Rotary embeddings extend beyond them, so longer sequences "
            "are planned; narrowgauge train needs a config.json with a larger max_position_embeddings."
        )


def _about_state(plan: Plan) -> Iterator[str]:
    best = plan.best
    total = bytes_text(best.memory.total * best.num_chips)
    yield (
        f"Only the state is counted (weights, gradients and optimizer states): {total} in {best.recipe.title} "
        f"({axes_text(best.layout)}). narrowgauge plan run adds activations, logits and buffers."
    )
    if best.num_chips > 1 and (best.layout.shard > 1 or best.layout.model_ranks > 1):
        yield _replicated(plan)


def _replicated(plan: Plan) -> str:
    """What pure data parallelism would hold on each chip."""
    size = plan.question.architecture.num_parameters
    states = sorted({option.recipe.bytes_per_param for option in plan.options}, reverse=True)
    needs = [
        f"{bytes_text(size * width)} at {width:g} B a parameter" for width in dict.fromkeys((states[0], states[-1]))
    ]
    capacity = plan.best.capacity_bytes
    verdict = ""
    if capacity is not None:
        is_impossible = size * states[-1] > capacity
        verdict = (
            f"; a chip has {bytes_text(capacity)}: {'impossible' if is_impossible else 'the narrowest state fits'}"
        )
    return f"Pure data parallelism keeps the whole state on every chip: {' and '.join(needs)}{verdict}."


def _about_choice(plan: Plan) -> Iterator[str]:
    """Where no recipe was asked for: how the trainer's own does, before the best of all."""
    best = plan.best
    usual = next((option for option in plan.options if option.recipe.title == DEFAULT_RECIPE), None)
    if plan.names_recipes or usual is None or usual is best or not best.fits:
        return
    told = f"No recipe was named, so {len(plan.options)} are compared. {DEFAULT_RECIPE}, the default of training,"
    if not usual.fits:
        yield f"{told} does not fit: {_clause(usual)}"
        return
    assert usual.tokens_per_second is not None and best.tokens_per_second is not None
    assert usual.headroom_bytes is not None
    yield (
        f"{told} fits with {bytes_text(usual.headroom_bytes)} to spare and takes {usual.tokens_per_second:,.0f} tokens/s, "
        f"{usual.tokens_per_second / best.tokens_per_second:.0%} of what {best.recipe.title} takes."
    )


def _about_best(plan: Plan) -> Iterator[str]:
    best = plan.best
    if not best.fits:
        yield f"Nothing fits. The closest is {best.recipe.title} ({layout_text(best.layout)}): {_clause(best)}"
        return
    assert best.step is not None and best.tokens_per_second is not None and best.headroom_bytes is not None
    low, high = best.confidence()["tokens_per_second"]
    unsure = "" if best.is_certain else ", which is less than the uncertainty of its memory"
    yield (
        f"{best.recipe.title} with {layout_text(best.layout)} on {best.cluster} fits with {bytes_text(best.headroom_bytes)} to "
        f"spare{unsure}: {best.tokens_per_second:,.0f} tokens/s (80 % interval {low:,.0f} to {high:,.0f}), "
        f"{best.mfu:.0%} of the peak."
    )
    yield from _about_training(plan)
    if plan.question.largest:
        yield _about_largest(plan)
    if plan.question.is_bounded:
        yield _about_bounds(plan)
    if plan.question.num_tokens is not None:
        yield _duration(best, plan.question.num_tokens)
    yield from _about_consumption(best, plan.question.num_tokens)
    yield f"It is limited by {best.limited_by}: {REMEDIES.get(best.limited_by, 'see --explain')}."
    yield _overheads(best)
    yield from _about_pace(best)
    if (
        plan.question.tokens_per_step is None
        and not LEAST_TOKENS_PER_STEP <= best.tokens_per_step <= MOST_TOKENS_PER_STEP
    ):
        yield _about_small_steps(best) if best.tokens_per_step < LEAST_TOKENS_PER_STEP else _about_large_steps(best)
    if best.runs_with != OURS:
        yield _about_trainer(best, plan.trainable)


def _about_small_steps(best: Option) -> str:
    """A step that is one micro-batch because the sum of several does not fit."""
    rows = best.layout.micro_batches
    why = " since a sum of several micro-batches' gradients does not fit" if rows == 1 else ""
    return (
        f"A step is {best.tokens_per_step:,} tokens{why}: fewer than the {count_text(LEAST_TOKENS_PER_STEP)} of the smallest "
        "usual steps; choose the learning rate for it."
    )


def _about_large_steps(best: Option) -> str:
    """A step that is large because every replica computes a sequence."""
    return (
        f"A step is {best.tokens_per_step:,} tokens, one sequence at least for each of {best.layout.num_replicas:,} replicas: "
        f"more than the {count_text(MOST_TOKENS_PER_STEP)} of the largest published steps; on fewer chips steps are smaller."
    )


def _about_trainer(best: Option, ours: Option | RecipeError | None) -> str:
    """What runs a layout that this project's trainer does not, and what the trainer would run instead."""
    said = (
        f"This layout is more than FSDP2 with full sharding: it runs with {best.runs_with}, not with narrowgauge train"
    )
    if not isinstance(ours, Option):
        return f"{said}{'' if ours is None else f': {ours}'}".removesuffix(".") + "."
    layout = layout_text(ours.layout)
    if not ours.fits:
        return f"{said}, whose closest layout ({layout}) {_clause(ours)}".removesuffix(".") + "."
    if ours.tokens_per_step > max(best.tokens_per_step, SIMPLER_STEP_FACTOR * usual_tokens_per_step(best.num_chips)):
        return f"{said}, whose layouts take steps of {ours.tokens_per_step:,} tokens at least ({layout})."
    if ours.tokens_per_step < LEAST_TOKENS_PER_STEP <= best.tokens_per_step:
        return f"{said}, whose layouts fit for certain in steps of {ours.tokens_per_step:,} tokens at most ({layout})."
    if best.is_certain and not ours.is_certain:
        return (
            f"{said}, whose layouts barely fit at most ({layout}: {bytes_text(ours.headroom_bytes or 0.0)} to spare)."
        )
    return f"{said}, which reaches {ours.tokens_per_second:,.0f} tokens/s with {layout} (--layout fsdp2)."


def _clause(option: Option) -> str:
    """Why it cannot run, and what would change that; empty where it can."""
    return "" if option.finding is None else sentences(option.finding.message, option.finding.advice)


def _duration(option: Option, num_tokens: float) -> str:
    days, cost = option.days(num_tokens), option.cost(num_tokens)
    low, high = option.confidence(num_tokens)["days"]
    price = "" if cost is None else f" and {dollars_text(cost)}"
    took, least, most = (duration_text(86_400 * found) for found in (days or 0.0, low, high))
    more = f", with up to {option.restarts:.0%} for restarts" if option.restarts else ""
    return f"{count_text(num_tokens)} tokens take {took} (80 % interval {least} to {most}{more}){price}."


def _about_training(plan: Plan) -> Iterator[str]:
    """What is trained, and by which optimizer, where it is not all by AdamW."""
    architecture = plan.question.architecture
    if (adapters := architecture.adapters) is not None:
        yield (
            f"LoRA of rank {adapters.rank} on the linear layers of attention and MLP trains "
            f"{count_text(architecture.num_trained_parameters)} parameters, {architecture.trained_share:.2%}, over a frozen base "
            f"in {adapters.base} ({adapters.base_bytes:.3g} B a parameter); PEFT's layers run under ng.prepare, not in "
            "narrowgauge train."
        )
    if plan.question.optimizer == "muon":
        yield (
            "Muon keeps one moment of the matrices in layers; AdamW steps embedding, head and vectors. The time of its "
            "orthogonalisation is not in the plan."
        )
    if plan.question.optimizer == "lion":
        yield "Lion keeps one moment of every parameter."
    if plan.question.optimizer == "adafactor":
        yield "Adafactor keeps a value for each row and column of a matrix and no first moment; AdamW steps vectors."


def _about_largest(plan: Plan) -> str:
    """The largest batch or context, and whether it is longer than the model was made for."""
    best, layout = plan.best, plan.best.layout
    if plan.question.largest == "context":
        preset = MODELS.get(plan.question.model)
        more = preset is not None and best.sequence_length > preset.max_positions
        beyond = f"; {preset.name} itself has {preset.max_positions:,} positions" if preset and more else ""
        length = f"{best.sequence_length:,} tokens"
        if (
            0 <= (plan.question.architecture.max_positions or -1) - best.sequence_length < 16
        ):  # OPT's table has two rows more
            return f"Sequences of {length} fit for certain, in {best.recipe.title}: as many as the model has positions for."
        return f"The longest sequences that fit for certain have {length}, in {best.recipe.title}{beyond}."
    return (
        f"The largest batch that fits for certain without accumulation is {layout.num_sequences:,} sequences of "
        f"{best.sequence_length:,} tokens ({layout.micro_batch} on each of {layout.num_replicas}), in {best.recipe.title}."
    )


def _about_bounds(plan: Plan) -> str:
    """Whether the deadline and the budget are kept, and by how much the next size misses them."""
    question, best = plan.question, plan.best
    tokens = question.num_tokens or 0.0
    limits = [f"within {_days(question.deadline_days)}"] if question.deadline_days is not None else []
    limits += [f"for at most {dollars_text(question.budget)}"] if question.budget is not None else []
    asked = f"{count_text(tokens)} tokens {' and '.join(limits)}"
    if question.is_deadline_assumed:
        asked += " (no deadline was given, so that of the longest published run is taken; --days sets another)"
    others = [option for option in plan.options if option.fits and not question.meets(option)]
    if not question.meets(best):
        return f"None of the tried numbers of chips trains {asked}; the closest is {_ending(best, tokens)}."
    if question.deadline_days is not None:
        fewer = [option for option in others if option.num_chips < best.num_chips]
        near = max(fewer, key=lambda option: (option.num_chips, option.tokens_per_second), default=None)
        what = "The fewest chips that train"
    else:
        more = [option for option in others if option.num_chips > best.num_chips]
        near = min(more, key=lambda option: (option.num_chips, option.cost(tokens)), default=None)
        what = "The most chips that train"
    missed = "" if near is None else f"; {_ending(near, tokens)} do{'es' * (near.num_chips == 1)} not"
    return f"{what} {asked} are {_ending(best, tokens)}{missed}."


def _ending(option: Option, num_tokens: float) -> str:
    """A cluster, and when a run on it ends."""
    cost = option.cost(num_tokens)
    price = "" if cost is None else f", {dollars_text(cost)}"
    return f"{option.cluster} ({_days(option.days(num_tokens) or 0.0)}{price})"


def _days(days: float) -> str:
    return duration_text(86_400 * days)


def _about_consumption(best: Option, num_tokens: float | None) -> Iterator[str]:
    each, joules = best.dollars_per_token, best.joules_per_token
    if each is not None:
        yield f"A billion tokens cost {dollars_text(1e9 * each)}, at the given price, for the chips alone."
    if joules is None or best.watts is None:
        return
    low, high = best.confidence()["joules_per_token"]
    run = "" if num_tokens is None else f", {energy_text(joules * num_tokens)} in all"
    chips = f"{best.num_chips} chip{'s' * (best.num_chips > 1)} of {best.watts / best.num_chips:,.0f} W"
    yield (
        f"Energy: {energy_text(joules)} a token ({energy_text(low)} to {energy_text(high)}){run}: {chips}, and nodes at "
        f"{NODE_POWER[0]:g} times that, without the building's cooling."
    )


def _overheads(option: Option) -> str:
    """Why N chips are not N times one: every group of the step that is not the model's own operations, in seconds."""
    assert option.step is not None
    groups = option.step.groups
    least = _LEAST_SHARE * option.step.total
    lost = sorted(((seconds, name) for name, seconds in groups.items() if name not in USEFUL), reverse=True)
    small = sum(seconds for seconds, _ in lost if seconds < least)
    lost = [(seconds, name) for seconds, name in lost if seconds >= least] + [(small, "smaller ones")]
    useful = sum(groups.get(name, 0.0) for name in USEFUL)
    parts = ", ".join(f"{name} {seconds_text(seconds)}" for seconds, name in lost)
    return (
        f"Of a step of {seconds_text(option.step.total)} ({option.tokens_per_step:,} tokens), matmuls and attention take "
        f"{seconds_text(useful)}; the rest is {parts or 'nothing'}."
    )


def _about_pace(option: Option) -> Iterator[str]:
    """Which chips all others wait for, and what that costs a step."""
    for term in option.step or ():
        if term.name == LATE_NODES:
            remedy = REMEDIES["waiting"].capitalize()
            yield f"Synchronization: {seconds_text(term.value)} of each step: {term.formula}. {remedy}."
        elif term.name == SLOWEST_KIND:
            yield f"Synchronization: {term.formula}. All chips do the same work: the faster ones wait at every step."


def _about_all(plan: Plan) -> Iterator[str]:
    if plan.best.num_chips > 1 and plan.question.architecture.adapters is None:
        yield _replicated(plan)
    yield from _about_networks(plan)
    yield from _about_software(plan)
    kinds = list(dict.fromkeys(cluster.chip_names for cluster in plan.question.clusters))
    for kind in kinds:
        names = {cluster.name for cluster in plan.question.clusters if cluster.chip_names == kind}
        fitting = [option for option in plan.options if option.fits and option.cluster in names]
        yield from _about_sizes(fitting, plan.trainable)
    if plan.shared or (len(kinds) > 1 and len(plan.question.clusters) <= MOST_SHARED):
        yield _about_shared(plan)
    yield from _about_stability(plan)


def _about_networks(plan: Plan) -> Iterator[str]:
    """The networks whose rates were assumed."""
    used = {option.cluster for option in plan.options}
    assumed = []
    for cluster in plan.question.clusters:
        group = cluster.groups[0]
        if cluster.name in used and group.is_network_assumed and cluster.num_chips > group.chips:
            assumed.append(
                f"{group.network_bytes_per_second * 8e-9 * group.chips:,.0f} Gbit/s a node for {cluster.name}"
            )
    if assumed:
        yield f"Networks are assumed to be the usual ones of such chips: {', '.join(assumed)}; --interconnect sets another."


def _about_software(plan: Plan) -> Iterator[str]:
    """The libraries and years that the times assume."""
    if plan.question.shares is not None:
        return
    found: dict[str, list[str]] = {}
    is_assumed = False
    for cluster in plan.question.clusters:
        for group in cluster.groups:
            row = software_of(group.chip, group.software)
            is_assumed |= not group.software
            chips = found.setdefault(f"{row.engines} of {row.age}", [])
            chips += [group.chip.name] * (group.chip.name not in chips)
    said = "; ".join(f"{software} on {' and '.join(chips)}" for software, chips in found.items())
    more = "; --software names another" if is_assumed else ""
    yield f"Times are {'assumed to be ' * is_assumed}those of {said}{more}."


def _about_sizes(options: list[Option], trainable: Option | RecipeError | None = None) -> Iterator[str]:
    """What more of the same chips buy, and which overhead takes the rest."""
    found: dict[int, Option] = {}
    for option in options:
        if option.recipe == options[0].recipe:
            found.setdefault(option.num_chips, option)
    for few, many in pairwise(found[number] for number in sorted(found)):
        assert few.tokens_per_second and many.tokens_per_second
        speed_up = many.tokens_per_second / few.tokens_per_second
        efficiency = speed_up * few.num_chips / many.num_chips
        why = ""
        if efficiency > 1 and (few.layout.micro_batch, few.layout.recompute) != (
            many.layout.micro_batch,
            many.layout.recompute,
        ):
            why = " (fewer chips have less room for activations, so they recompute them or take smaller micro-batches)"
        yield (
            f"From {few.num_chips} to {many.num_chips} chips {few.recipe.title} is {speed_up:.3g} times as fast on "
            f"{many.cluster}, an efficiency of {efficiency:.0%}{why}{_bottlenecks(few, many, trainable)}."
        )


def _bottlenecks(few: Option, many: Option, trainable: Option | RecipeError | None) -> str:
    """What limits the larger size first, and in the trainer's layout if the best is not one of its own."""
    grown = _grown(few, many)
    if not grown:
        return ""
    cause = f"{grown}: {REMEDIES.get(grown, 'see --explain')}"
    if grown in USEFUL and many.layout.pipeline > few.layout.pipeline:
        cause = "stages of unequal work, since the last has the head: fewer stages, or fewer layers beside the head"
    text = f"; the first bottleneck is {cause}"
    if isinstance(trainable, Option) and (trainable.cluster, trainable.recipe) == (many.cluster, many.recipe):
        other = _grown(few, trainable)
        if other and other != grown:
            text += (
                f"; with {layout_text(trainable.layout)} it would be {other}: {REMEDIES.get(other, 'see --explain')}"
            )
    return text


def _grown(few: Option, many: Option) -> str:
    """The group of the step that grew most beyond its share of the smaller size; empty if none did."""
    assert few.step is not None and many.step is not None
    scale = few.num_chips / many.num_chips * many.tokens_per_step / few.tokens_per_step
    sums: dict[str, float] = {}
    for change in changes(few.step, many.step, scale):
        sums[change.group] = sums.get(change.group, 0.0) + change.difference
    worst = max(sums, key=lambda group: sums[group], default="")
    return worst if worst and sums[worst] > _LEAST_SHARE * many.step.total else ""


def _about_shared(plan: Plan) -> str:
    names = " and ".join(cluster.name for cluster in plan.question.clusters)
    if not plan.shared:
        return f"No configuration fits on both {names}: the chips with the least memory decide."
    first = plan.shared[0]
    rates = ", ".join(f"{option.tokens_per_second:,.0f} tokens/s on {option.cluster}" for option in plan.shared)
    return f"One configuration for {names}: {first.recipe.title} with {layout_text(first.layout)}: {rates}."


def _about_stability(plan: Plan) -> Iterator[str]:
    """What the recipes risk, by their own tables."""
    recipes = {option.recipe.title: option.recipe for option in plan.options}
    scaled = [name for name, recipe in recipes.items() if recipe.compute.scales_loss]
    best = plan.best.recipe
    if scaled and len(recipes) <= _FEW:
        yield (
            f"{', '.join(scaled)}: float16 has a largest value of 65504, so the loss is scaled and steps are skipped when a "
            "gradient overflows; bfloat16 has the range of float32 and needs no loss scale."
        )
    lossy = [name for name, recipe in recipes.items() if not recipe.storage.keeps_updates]
    if lossy:
        yield f"{', '.join(lossy)} are listed last: they lose small updates, or their second moments freeze at a beta2 of 0.999."
    if plan.best.fits:
        yield f"{best.title} loses {best.storage.loses}."


# ── the best option as settings of narrowgauge train ──────────────────────────────────────────────────────────────────────


def train_settings(plan: Plan) -> str:
    """The best option as a TOML file for ``narrowgauge train``; its comments say how many ranks to start.

    Raises:
        NarrowgaugeError: no option fits, or the trainer cannot run it.
    """
    import tomli_w

    best = plan.best
    _require_trainable(plan, best)
    layout = best.layout
    start = "narrowgauge train --config FILE"
    if best.num_chips > 1:
        start = f"torchrun --nproc-per-node N --nnodes M -m {start}, with N × M = {best.num_chips}"
    lines = [f"# {plan.title}", f"# {axes_text(layout)}: {start}"]
    recipe = best.recipe.to_value()
    settings: dict[str, Any] = {
        "model": _trainable_model(plan),
        "batch_size": layout.num_sequences,
        "sequence_length": best.sequence_length,
        "gradient_accumulation_steps": layout.num_sequences // layout.micro_batch,
        "activation_checkpointing": layout.recompute == "full",
        "shard": "full" if layout.shard > 1 else "none",
    }
    if plan.question.num_tokens is not None:
        settings["steps"] = max(1, round(plan.question.num_tokens / best.tokens_per_step))
    if plan.question.optimizer != "adamw":
        settings["rule"] = plan.question.optimizer
    if layout.accumulation_dtype != "float32":
        settings["accumulation_dtype"] = layout.accumulation_dtype
    if layout.shard > 1:
        settings |= {"replicas": layout.data, "offload": layout.offload == "all"}
    # A table must come last: keys after it would be its own.
    settings["recipe"] = recipe
    return "\n".join(lines) + "\n" + tomli_w.dumps(settings)


def _require_trainable(plan: Plan, best: Option) -> None:
    if not best.fits:
        raise NarrowgaugeError(f"settings were requested, and nothing fits: {best.reason}.", best.advice)
    if plan.question.optimizer == "adafactor":
        raise NarrowgaugeError(
            "settings were requested for Adafactor, planned for every matrix, and narrowgauge train leaves embedding and head to "
            "AdamW.",
            "Leave --rule out here, and give it to narrowgauge train.",
        )
    if best.runs_with != OURS:
        raise NarrowgaugeError(
            f"settings were requested for a layout that narrowgauge train does not run ({axes_text(best.layout)}).",
            "Use --layout fsdp2,offload=none or fsdp2,offload=all.",
        )


def _trainable_model(plan: Plan) -> str:
    name = plan.question.model
    path = Path(name).expanduser()
    row = MODELS.get(name.strip().lower())
    if row is not None and plan.best.sequence_length > row.max_positions:
        raise NarrowgaugeError(
            f"settings were requested for sequences of {plan.best.sequence_length:,} tokens of {row.name}, which has "
            f"{row.max_positions:,} positions.",
            "Name a folder with a config.json whose max_position_embeddings says so.",
        )
    if row is not None:
        return row.name
    if path.exists():
        return str(path.resolve())
    raise NarrowgaugeError(
        f"settings were requested for {name!r}, of which only the shape is known here.",
        "Name a folder with its Hugging Face config.json.",
    )
