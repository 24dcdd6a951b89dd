"""A plan in tables of at most 120 columns and eight fixed sentences: options, what fits instead,
and all terms of the best option.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

from narrowgauge.planner.candidates import keeps_rate
from narrowgauge.planner.errors import Ends, is_checked, runs_of
from narrowgauge.planner.estimate import MOST_RESTARTS, RESTARTS, SECONDS_PER_DAY, Estimate
from narrowgauge.planner.nearest import nearest_run
from narrowgauge.planner.roofline import multiplies
from narrowgauge.planner.search import LEAST_TOKENS_PER_STEP, MOST_TOKENS_PER_STEP
from narrowgauge.planner.terms import Terms
from narrowgauge.planner.units import bytes_text, count_text, duration_text, layout_text, unit_of
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.tables import Column, Row, Table

_LEAST_SHARE = 0.005
_NATS = (
    "nats are measured losses of llama-1m less bfloat16/master's after 800 steps, ± half a 95 % "
    "interval; empty: not measured"
)
_KINDS = {
    "adapters": "adapters",
    "mixture": "mixtures of experts",
    "long": "long sequences",
    "dense": "dense models",
    "module": "counted modules",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the answer of :func:`narrowgauge.plan`.

    Args:
        options: best first. Jobs that do not fit come last, the nearest to fitting first.
        model: its name in the question.
        tokens: of the whole run; None if not asked.
        left_out: rows that cannot be planned, and why.
        price: of a chip-hour.
        instead: if nothing fits, changes of the question that do, each with its job.
    """

    options: tuple[Estimate, ...]
    model: str
    tokens: float | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    price: float | None = None
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
        lines.append(f"{_checked(best)} {nearest_run(best)}")
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
            rows = [_run(job, self.tokens, self.price or 0.0) for job in self.options]
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
            f"Memory of the worst rank, {best.recipe.title}, {layout_text(best.layout)}:",
            *_term_lines(best.memory, "bytes"),
            f"An optimizer step of {best.tokens_per_step:,} tokens:",
            *_term_lines(best.step, "s"),
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


def _ends(interval: Ends | None, scale: float, style: str) -> str:
    """Write an interval."""
    if interval is None:
        return "unchecked"
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
        ("recipe", job.recipe.title),
        ("B/param", f"{job.bytes_per_param:g}"),
        ("a chip", bytes_text(job.memory.total)),
        ("80 %", _ends(job.memory_interval, 1e9, ".3g")),
        ("tensors", bytes_text(job.allocated_bytes)),
        ("free", bytes_text(job.headroom_bytes)),
        ("fits", fits),
        ("tokens/s", f"{job.tokens_per_second:,.0f}"),
        ("80 %", _ends(job.rate_interval, 1, ",.0f")),
        ("MFU", f"{job.mfu:.0%}"),
        ("nats", _loss(job)),
        ("a step", count_text(job.tokens_per_step)),
        ("matmuls", "" if multiplies(job.recipe.compute, job.chip) else "emulated"),
    )


def _change(text: str, job: Estimate) -> Cells:
    """Return the row of a change of the question that fits."""
    shown = ("recipe", "a chip", "free", "tokens/s")
    return (("change", text), *(cell for cell in _option(job) if cell[0] in shown))


def _run(job: Estimate, tokens: float, price: float) -> Cells:
    """Return the row of a whole run."""
    days = job.days(tokens)
    hours = 24 * job.num_chips * days
    ends = job.days_interval(tokens) or ()
    return (
        ("recipe", job.recipe.title),
        ("cluster", job.cluster.name),
        ("time", duration_text(SECONDS_PER_DAY * days)),
        ("80 %", " to ".join(duration_text(SECONDS_PER_DAY * end) for end in ends)),
        ("chip hours", f"{hours:,.0f}"),
        ("price", f"{hours * price:,.0f}" if price else ""),
    )


def _group(name: str, seconds: float, total: float) -> Cells:
    share = f"{seconds / total:.0%}"
    return ("group", name), ("time", duration_text(seconds)), ("share", share)


def _term_lines(terms: Terms, unit: str) -> Iterator[str]:
    """Yield each term in ``"bytes"`` or ``"s"`` with its formula and source, and the sum."""
    scale, shown = unit_of(terms.total, unit)
    for term in terms:
        value = f"{term.value / scale:12,.3f} {shown}"
        yield f"{value}  {term.group}, {term.name}: {term.text} [{term.source}]"
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


def _layouts(jobs: Sequence[Estimate]) -> list[str]:
    """Return the layouts and what limits them, once for all rows that share them."""
    rows: dict[str, list[str]] = {}
    has_places = len(_places(jobs)) > 1
    for job in jobs:
        name = job.recipe.title
        if has_places:
            name += f" on {job.cluster.name}"
        text = f"{layout_text(job.layout)}; limited by {job.limited_by}"
        rows.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}." for text, names in rows.items()]


def _checked(job: Estimate) -> str:
    """Say from which published runs the error bars are."""
    parts = []
    for quantity in ("speed", "memory"):
        runs = runs_of(quantity, job.kind)
        text = f"{quantity} from {runs} published runs"
        if not runs:
            text = f"{quantity} checked against no run, so no interval"
        parts.append(text)
    line = f"80 % intervals of {_KINDS[job.kind]}: {', '.join(parts)}"
    if runs_of("speed", job.kind) and not is_checked(job.kind, job.chip):
        line += f"; none on {job.chip.name}, so they are wider"
    return f"{line}."


def _assumptions(plan: Plan) -> Iterator[str]:
    """Yield the plan's assumptions: programs, networks, parts of the model, and losses of recipes."""
    best = plan.best
    a = best.architecture
    for job in plan.options:
        yield f"{job.program} (--program, --part)"
    for job in plan.options:
        cluster = job.cluster
        if cluster.interconnect_gbit_per_second is None and cluster.chips > cluster.chips_per_node:
            rate = cluster.network_bytes_per_second * 8e-9 * cluster.chips_per_node
            yield f"{rate:,.0f} Gbit/s a node of {job.chip.name} (--interconnect)"
    lossy = [job.recipe.title for job in plan.options if not keeps_rate(job.recipe.storage)]
    has_loss = any(job.measured_loss for job in plan.options)
    longest = best.sequence_length
    if a.name in MODELS:
        longest = MODELS[a.name].max_positions
    usual = ""
    is_usual = LEAST_TOKENS_PER_STEP <= best.tokens_per_step <= MOST_TOKENS_PER_STEP
    if not (best.program.has_adapters or is_usual):
        least = count_text(LEAST_TOKENS_PER_STEP)
        usual = f", where published ones have {least} to {count_text(MOST_TOKENS_PER_STEP)}"
    notes = (
        (best.correction != 1, f"{1 / best.correction:.2f} × the planned speed, as in the run of --like"),
        (True, f"{best.recipe.title} loses {best.recipe.storage.loses}"),
        (has_loss, _NATS),
        (plan.tokens, f"{RESTARTS:.0%} for restarts in the time of the run, up to {MOST_RESTARTS:.0%} in its interval"),
        (lossy, f"{', '.join(dict.fromkeys(lossy))} lose small updates, or hold or freeze second moments, and are listed last"),
        (
            longest < best.sequence_length,
            f"positions beyond {a.name}'s {longest:,} (a config.json with larger max_position_embeddings)",
        ),
        (True, f"steps of {best.tokens_per_step:,} tokens{usual} (--tokens-per-step)"),
        (
            best.layout.context > 2,
            "context ranks as fast as their bytes: torchtitan's took 22 to 55 % more time than planned, over 4 and 8 ranks",
        ),
        (a.left_out, f"no time or activations of {a.left_out}"),
        (a.counts, "data and shard ranks only: tensor, pipeline and context ranks would change the module"),
    )  # fmt: skip
    yield from (text for holds, text in notes if holds)
