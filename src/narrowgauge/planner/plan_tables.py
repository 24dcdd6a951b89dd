"""A plan in tables and at most eight fixed sentences: options, sizes, all terms of the best option, and its settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.planner.efficiency import efficiency_of
from narrowgauge.planner.option import OURS, Option, Question
from narrowgauge.planner.scaling_laws import CAUSES
from narrowgauge.planner.search import LEAST_TOKENS_PER_STEP, MOST_TOKENS_PER_STEP
from narrowgauge.planner.terms import Change, Term, Terms, changes
from narrowgauge.planner.units import (
    axes_text,
    bytes_text,
    count_text,
    dollars_text,
    duration_text,
    layout_text,
    seconds_text,
    unit_of,
)
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.tables import Column, Row, Table, name_columns, number_columns, text_columns

_LEAST_SHARE = 0.005
_NOTES = {
    "muon": "Muon keeps one moment of the layers' matrices, AdamW steps the rest, and orthogonalisation is not timed",
    "lion": "Lion keeps one moment of every parameter",
    "adafactor": "Adafactor keeps a value for each row and column of a matrix, and AdamW steps vectors",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Answer a question.

    Args:
        options: best first. Options that do not fit come last, the nearest to fitting first.
        shared: with several clusters, one configuration for all: an option on each; empty if none exists.
        trainable: the trainer's best option, if the best of all is not the trainer's. If none fits, the nearest to fitting; or
            the error that explains why there is none; else None.
    """

    question: Question
    options: tuple[Option, ...]
    shared: tuple[Option, ...] = ()
    trainable: Option | RecipeError | None = None

    @property
    def best(self) -> Option:
        """Return the best option, or the nearest to fitting."""
        return self.options[0]

    @property
    def is_state_only(self) -> bool:
        """Tell whether the plan counts only weights, gradients and optimizer states."""
        return self.best.step is None

    @property
    def title(self) -> str:
        """Name the model, the machines and the length of a sequence."""
        question, size = self.question, f"{count_text(self.question.architecture.num_parameters)} parameters"
        adapters = question.architecture.adapters
        parts = {
            f"{question.model}: {size}" if question.model else size: True,
            f"LoRA of rank {adapters.rank} over {adapters.base}" if adapters else "": True,
            f"states of {question.optimizer}": question.optimizer != "adamw",
            ", ".join(dict.fromkeys(option.place for option in self.options if option.place)): True,
            f"sequences of {question.sequence_length:,} tokens": not self.is_state_only
            and question.largest != "context",
        }
        return "; ".join(part for part, is_shown in parts.items() if part and is_shown)

    def row(self) -> Row:
        """Return the question, the options and the answer as plain values, for JSON."""
        tokens, ours = self.question.num_tokens, self.trainable
        return {
            "question": self.question.row(),
            "options": [option.row(tokens) for option in self.options],
            "shared": [option.row(tokens) for option in self.shared],
            "trainable": ours.row(tokens) if isinstance(ours, Option) else None if ours is None else str(ours),
            "answer": self.sentences(),
        }

    def sentences(self) -> list[str]:
        """Return the conclusions, the most important first."""
        return list(_state_sentences(self) if self.is_state_only else _run_sentences(self))

    def tables(self) -> list[Table]:
        """Return the options, the time of each group in the best option's step, and the gain of more chips."""
        ours = [self.trainable] if isinstance(self.trainable, Option) else []
        tables = [_options_table([*self.options, *ours], self.question, self.title)]
        if self.shared:
            tables.append(_options_table(self.shared, self.question, "One configuration for all"))
        if self.best.fits and self.best.step is not None:
            tables.append(_groups_table(self.best.step, f"A step of {self.best.tokens_per_step:,} tokens"))
        sizes = _sizes_table(self)
        return [*tables, sizes] if sizes.rows else tables

    def explanation(self) -> list[Table]:
        """Return every term of the best option's memory and step."""
        best = self.best
        title = f"Memory of the worst rank, {best.recipe.title}, {layout_text(best.layout)}"
        tables = [_terms_table(best.memory, "bytes", title)]
        if best.step is not None:
            tables.append(_terms_table(best.step, "s", f"An optimizer step of {best.tokens_per_step:,} tokens"))
        return tables


# ── tables: options, sizes, terms, and changes between two sums ───────────────────────────────────────────────────────────


def _table(columns: Sequence[Column], rows: Sequence[Any], title: str) -> Table:
    """Return a table without the columns that only have empty cells."""
    shown = tuple(column for column in columns if any(column.cell(row) for row in rows))
    return Table(shown, list(rows), title)


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
        *number_columns(time=lambda item: seconds_text(item[1]), share=lambda item: f"{item[1] / step.total:.0%}"),
        *text_columns(what_helps=lambda item: _remedy(item[0])),
    )
    return Table(columns, [item for item in groups if item[1] >= _LEAST_SHARE * step.total], title)


def changes_table(differences: Sequence[Change], title: str, least: float = 0.0) -> Table:
    """Return the changes between two sums of seconds, if larger than ``least``."""
    columns = (
        *text_columns(group="group", term="name"),
        *number_columns(
            before=lambda change: seconds_text(change.before), after=lambda change: seconds_text(change.after),
            difference=lambda change: f"{change.difference:+.3g} s",
        ),
        *text_columns(formula="formula"),
    )  # fmt: skip
    return _table(columns, [change for change in differences if abs(change.difference) > least], title)


def _options_table(options: Sequence[Option], question: Question, title: str) -> Table:
    tokens, largest, is_state = question.num_tokens, question.largest, options[0].step is None

    def rates(option: Option) -> str:
        ends = option.confidence()["tokens_per_second"]
        return " to ".join(f"{end:,.0f}" for end in ends or ())

    def days(option: Option) -> str:
        return " to ".join(map(_days_text, option.confidence(tokens)["days"] or ()))

    def cost(option: Option, unit: float = 1.0) -> str:
        dollars = option.cost(tokens)
        return "" if dollars is None else dollars_text(dollars * unit)

    columns = (
        *name_columns(recipe=lambda o: o.recipe.title),
        *number_columns(B_per_parameter=lambda o: o.recipe.bytes_per_param),
        Column("cluster", lambda o: o.place if len({option.place for option in options}) > 1 else ""),
        *text_columns(layout=lambda o: (axes_text if is_state else layout_text)(o.layout)),
        *number_columns(
            context=lambda o: f"{o.sequence_length:,}" if largest == "context" else "",
            batch=lambda o: f"{o.layout.num_sequences:,}" if largest == "batch" else "",
            all_chips=lambda o: bytes_text(o.memory.total * o.num_chips) if is_state else "",
            a_chip=lambda o: bytes_text(o.memory.total),
            free=_free_text,
            while_resuming=lambda o: bytes_text(o.resuming_bytes),
        ),
        *text_columns(fits=lambda o: o.fits),
        Column("tokens/s", lambda o: "" if is_state else f"{o.tokens_per_second:,.0f}", right=True),
        Column("80 % interval", rates, right=True),
        Column("MFU", lambda o: "" if o.mfu is None else f"{o.mfu:.0%}", right=True),
        *number_columns(
            step=lambda o: "" if is_state else seconds_text(o.step.total), time=lambda o: _days_text(o.days(tokens))
        ),
        Column("80 % interval", days, right=True),
        *number_columns(cost=cost, a_billion_tokens=lambda o: cost(o, 1e9 / (tokens or 1.0))),
        *text_columns(
            limited_by=lambda o: o.limited_by if o.fits and not is_state else "",
            runs_with=lambda o: "" if is_state or o.runs_with == OURS else o.runs_with,
            why_not=_clause,
        ),
    )
    return _table(columns, options, title)


def _free_text(option: Option) -> str:
    """Write the worst rank's free memory, with its interval if it may not fit."""
    if option.headroom_bytes is None or option.capacity_bytes is None:
        return ""
    free = bytes_text(option.headroom_bytes)
    if option.is_certain or option.why_not:
        return free
    low, high = (bytes_text(option.capacity_bytes - end) for end in reversed(option.memory.interval))
    return f"{free} ({low} to {high})"


def _clause(option: Option) -> str:
    """Say why it cannot run and what would help; empty if it can run."""
    return "" if option.fits is not False else f"{option.reason}. {option.advice}".strip()


def _sizes_table(plan: Plan) -> Table:
    """Return the gain of more chips of the same kind, and the step group that limits it."""
    by_kind: dict[tuple[str, ...], dict[int, Option]] = {}
    for option in plan.options:
        if option.fits and option.step and option.cluster:
            sizes = by_kind.setdefault(option.cluster.chip_names, {})
            if option.recipe == next(iter(sizes.values()), option).recipe:
                sizes.setdefault(option.num_chips, option)
    ours = plan.trainable if isinstance(plan.trainable, Option) and plan.trainable.fits else None
    pairs = []
    for sizes in by_kind.values():
        for few, many in pairwise(sizes[number] for number in sorted(sizes)):
            pairs.append((few, many))
            if ours and (ours.cluster, ours.recipe) == (many.cluster, many.recipe):
                pairs.append((few, ours))
    columns = (
        *text_columns(cluster="cluster", layout="layout"), Column("tokens/s", "rate", right=True),
        *number_columns(times="times", efficiency="efficiency"), *text_columns(grew_most="grew", what_helps="remedy"),
    )  # fmt: skip
    return Table(columns, [_size_row(few, many) for few, many in pairs], "More chips")


def _size_row(few: Option, many: Option) -> Row:
    speed_up = (many.tokens_per_second or 0.0) / (few.tokens_per_second or 1.0)
    group = _grown_group(few, many)
    return {
        "cluster": f"{many.place} for {few.num_chips}",
        "layout": layout_text(many.layout),
        "rate": f"{many.tokens_per_second:,.0f}",
        "times": f"{speed_up:.3g}",
        "efficiency": f"{speed_up * few.num_chips / many.num_chips:.0%}",
        "grew": group or "nothing",
        "remedy": _remedy(group) if group else "",
    }


def _grown_group(few: Option, many: Option) -> str:
    """Name the step group that grew most beyond its fraction at the smaller size; empty if none did."""
    assert few.step is not None and many.step is not None
    scale = few.num_chips / many.num_chips * many.tokens_per_step / few.tokens_per_step
    sums: dict[str, float] = {}
    for change in changes(few.step, many.step, scale):
        sums[change.group] = sums.get(change.group, 0.0) + change.difference
    worst = max(sums, key=lambda group: sums[group], default="")
    return worst if worst and sums[worst] > _LEAST_SHARE * many.step.total else ""


def _remedy(group: str) -> str:
    return str(CAUSES["groups"].get(group, {}).get("remedy", "see --explain"))


# ── the sentences ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _state_sentences(plan: Plan) -> Iterator[str]:
    best = plan.best
    yield (
        f"Only the state is counted (weights, gradients and optimizer states): "
        f"{bytes_text(best.memory.total * best.num_chips)} in {best.recipe.title} ({axes_text(best.layout)}). "
        "narrowgauge plan run adds activations, logits and buffers."
    )
    yield "While resuming, optimizer states exist twice: those that were made, and those of the checkpoint."
    if best.layout.shard > 1 or best.layout.model_ranks > 1:
        yield _data_parallel(plan)


def _run_sentences(plan: Plan) -> Iterator[str]:
    best, question = plan.best, plan.question
    if not best.fits:
        yield f"Nothing fits. The closest is {best.recipe.title} ({layout_text(best.layout)}): {_clause(best)}"
    if question.is_bounded:
        yield _limits(plan)
    if isinstance(plan.trainable, RecipeError):
        yield f"narrowgauge train runs FSDP2 alone, and {str(plan.trainable).rstrip('.')}."
    elif best.fits and best.runs_with != OURS:
        yield "narrowgauge train runs FSDP2 alone (--layout fsdp2); the table says what runs other layouts."
    if best.num_chips > 1 and question.architecture.adapters is None:
        yield _data_parallel(plan)
    yield (
        f"While resuming, optimizer states exist twice. A chip has {bytes_text(best.capacity_bytes or 0.0)}: where that is not "
        "enough, load the checkpoint on the CPU."
    )
    if len({cluster.chip_names for cluster in question.clusters}) > 1 and not plan.shared:
        names = " and ".join(cluster.name for cluster in question.clusters)
        yield f"No configuration fits on all of {names}: the chips with the least memory decide."
    yield f"Assumed: {'; '.join(_assumptions(plan))}."


def _limits(plan: Plan) -> str:
    """Say whether the plan meets the deadline and the budget."""
    question, best = plan.question, plan.best
    limits = [f"within {_days_text(question.deadline_days)}"] if question.deadline_days is not None else []
    limits += [f"for at most {dollars_text(question.budget)}"] if question.budget is not None else []
    asked = f"{count_text(question.num_tokens or 0.0)} tokens {' and '.join(limits)}"
    if not question.meets(best):
        return f"No tried number of chips trains {asked}."
    return f"The {'fewest' if question.deadline_days is not None else 'most'} chips that train {asked}: {best.place}."


def _days_text(days: float | None) -> str:
    return "" if days is None else duration_text(86_400 * days)


def _data_parallel(plan: Plan) -> str:
    """Give the memory per chip under pure data parallelism."""
    size, capacity = plan.question.architecture.num_parameters, plan.best.capacity_bytes
    widths = sorted({option.recipe.bytes_per_param for option in plan.options}, reverse=True)
    needs = " and ".join(
        f"{bytes_text(size * w)} at {w:g} B a parameter" for w in dict.fromkeys((widths[0], widths[-1]))
    )
    sentence = f"Pure data parallelism keeps the whole state on every chip: {needs}"
    if capacity is None:
        return f"{sentence}."
    verdict = "impossible" if size * widths[-1] > capacity else "the narrowest state fits"
    return f"{sentence}; a chip has {bytes_text(capacity)}: {verdict}."


def _assumptions(plan: Plan) -> Iterator[str]:
    """Yield the plan's assumptions: networks, libraries, parts of the model, and losses of recipes."""
    question, best = plan.question, plan.best
    architecture, recipes = question.architecture, {option.recipe.title: option.recipe for option in plan.options}
    groups = [(cluster.num_chips, group) for cluster in question.clusters for group in cluster.groups]
    yield from dict.fromkeys(
        f"{efficiency_of(g.chip, g.software).engines} on {g.chip.name} (--software)" for _, g in groups
    )
    yield from dict.fromkeys(
        f"{group.network_bytes_per_second * 8e-9 * group.chips:,.0f} Gbit/s a node of {group.chip.name} (--interconnect)"
        for num_chips, group in groups
        if group.is_network_assumed and num_chips > group.chips
    )
    yield f"{best.recipe.title} loses {best.recipe.storage.loses}"
    if question.num_tokens is not None and best.restarts:
        yield f"up to {best.restarts:.0%} for restarts in the interval of the time"
    lossy = [name for name, recipe in recipes.items() if not recipe.storage.keeps_updates]
    if lossy:
        yield f"{', '.join(lossy)} lose small updates, or their second moments freeze at a beta2 of 0.999, and are listed last"
    if any(recipe.compute.scales_loss for recipe in recipes.values()):
        yield "float16 ends at 65504, so its loss is scaled and steps that overflow are skipped; bfloat16 needs no loss scale"
    preset = MODELS.get(question.model)
    if preset is not None and best.sequence_length > preset.max_positions:
        yield f"positions beyond {preset.name}'s {preset.max_positions:,} (a config.json with larger max_position_embeddings)"
    if question.tokens_per_step is None and not LEAST_TOKENS_PER_STEP <= best.tokens_per_step <= MOST_TOKENS_PER_STEP:
        usual = f"{count_text(LEAST_TOKENS_PER_STEP)} to {count_text(MOST_TOKENS_PER_STEP)}"
        yield f"steps of {best.tokens_per_step:,} tokens, where published ones have {usual}"
    if architecture.left_out:
        yield f"no time or activations of {architecture.left_out}"
    if (adapters := architecture.adapters) is not None:
        trained = f"{count_text(architecture.num_trained_parameters)} parameters, {architecture.trained_share:.2%}"
        yield f"LoRA of rank {adapters.rank} trains {trained}; PEFT runs it under ng.prepare, not narrowgauge train"
    if question.optimizer in _NOTES:
        yield _NOTES[question.optimizer]


# ── the best option as settings of narrowgauge train ──────────────────────────────────────────────────────────────────────


def train_settings(plan: Plan) -> str:
    """Return the best option as a TOML file for ``narrowgauge train``. Its comments give the number of ranks.

    Raises:
        NarrowgaugeError: no option fits, or the trainer cannot run it.
    """
    import tomli_w

    best, question, layout = plan.best, plan.question, plan.best.layout
    refusals = (
        (not best.fits, f"nothing fits: {best.reason}.", best.advice),
        (
            question.optimizer == "adafactor",
            "Adafactor is planned for every matrix, and narrowgauge train leaves embedding and head to AdamW.",
            "Leave --rule out here, and give it to narrowgauge train.",
        ),
        (
            best.runs_with != OURS,
            f"narrowgauge train does not run this layout ({axes_text(layout)}).",
            "Use --layout fsdp2,offload=none or fsdp2,offload=all.",
        ),
    )
    for is_refused, reason, advice in refusals:
        if is_refused:
            raise NarrowgaugeError(f"Cannot write settings, because {reason}", advice)
    settings: dict[str, Any] = {
        "model": _trainable_model(plan),
        "batch_size": layout.num_sequences,
        "sequence_length": best.sequence_length,
        "gradient_accumulation_steps": layout.num_sequences // layout.micro_batch,
        "activation_checkpointing": layout.recompute == "full",
        "shard": "full" if layout.shard > 1 else "none",
    }
    if question.num_tokens is not None:
        settings["steps"] = max(1, round(question.num_tokens / best.tokens_per_step))
    if question.optimizer != "adamw":
        settings["rule"] = question.optimizer
    if layout.accumulation_dtype != "float32":
        settings["accumulation_dtype"] = layout.accumulation_dtype
    if layout.shard > 1:
        settings |= {"replicas": layout.data, "offload": layout.offload == "all"}
    # Tables must come last: later keys would belong to them.
    settings["recipe"] = best.recipe.to_value()
    start = "narrowgauge train --config FILE"
    if best.num_chips > 1:
        start = f"torchrun --nproc-per-node N --nnodes M -m {start}, with N × M = {best.num_chips}"
    return f"# {plan.title}\n# {axes_text(layout)}: {start}\n{tomli_w.dumps(settings)}"


def _trainable_model(plan: Plan) -> str:
    name = plan.question.model
    path, preset = Path(name).expanduser(), MODELS.get(name.strip().lower())
    if preset is not None and plan.best.sequence_length > preset.max_positions:
        raise NarrowgaugeError(
            f"Cannot write settings, because {preset.name} has {preset.max_positions:,} positions and sequences have "
            f"{plan.best.sequence_length:,} tokens.",
            "Name a folder with a config.json whose max_position_embeddings says so.",
        )
    if preset is None and not path.exists():
        raise NarrowgaugeError(
            f"Cannot write settings, because only the shape of {name!r} is known here.",
            "Name a folder with its Hugging Face config.json.",
        )
    return str(path.resolve()) if preset is None else preset.name
