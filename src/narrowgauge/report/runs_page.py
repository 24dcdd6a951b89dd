"""The page of runs: one recipe or many, with their costs, figures, findings, events and environment.

Its tables are plain values, which the template renders. Lost updates are shown as the audit last measured them, as in the
verdict: sums over a run are dominated by its first large steps, and hide what is lost while the learning rate is small.

The measurements on a page stay readable whatever the diagnosis does: where it fails, its section says so.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from markupsafe import Markup

from narrowgauge.analysis.comparison.answers import Answer, rows_of
from narrowgauge.analysis.comparison.classification import Classification
from narrowgauge.analysis.comparison.comparison import Comparison
from narrowgauge.analysis.comparison.intervals import MINUS, shown_difference, shown_loss
from narrowgauge.analysis.comparison.labels import listed
from narrowgauge.analysis.diagnosis.diagnosis import Diagnosis
from narrowgauge.report.event_commands import command_of
from narrowgauge.report.figures.heat_maps import HEAT_MAPS, heat_maps
from narrowgauge.report.figures.histograms import SHOWN_FORMATS, format_ranges, histograms
from narrowgauge.report.figures.history_figures import ROUTINE, absent, event_strip
from narrowgauge.report.figures.loss_figures import comparison_figures
from narrowgauge.report.figures.palette import colour, plain
from narrowgauge.report.figures.rank_figures import RANK_COLUMNS, rank_rows
from narrowgauge.report.figures.traces import Figure, mark
from narrowgauge.report.figures.verdict_figure import differences
from narrowgauge.report.memory_section import memory_beside_plan
from narrowgauge.report.page import capitalized, document, template
from narrowgauge.report.recipe_groups import Group, Samples, final_loss, groups_of, run_names
from narrowgauge.report.recipe_tables import Cell, Line, RecipeTable, memory_text, tensor_bytes
from narrowgauge.report.run_settings import environment
from narrowgauge.runs.finding import Finding, counted
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import STEP, SUMMARY, Column, Row, finite_number


def render(found: Comparison, title: str = "") -> str:
    """The report on a comparison as one HTML document; its runs may be unfinished, and without gauges.

    Invariant: the document fetches nothing and shows every name and message as text. The same runs give the same document.

    Cost: about two seconds per ten thousand steps, a third of them the diagnosis; the document is 2 MB for Plotly and some
        0.1 MB per run.
    """
    words = page_words(found, groups_of(found), title)
    return whole_page(words, sections_of(words))


class Named(NamedTuple):
    """A section's link in the bar at the top, and its heading."""

    link: str
    heading: str


SECTIONS: dict[str, Named] = {
    "verdict": Named("Verdict", "Verdict"),
    "diagnosis": Named("Diagnosis", "Diagnosis"),
    "costs": Named("Cost", "Cost"),
    "memory": Named("Memory", "Memory against the plan"),
    "loss": Named("Loss", "Loss"),
    "price": Named("Loss/cost", "Loss against cost"),
    "layers": Named("Layers", "Inside the layers"),
    "ranges": Named("Ranges", "Ranges"),
    "storage": Named("Storage", "What the storage kept"),
    "history": Named("Scale", "Scale and overflow"),
    "ranks": Named("Ranks", "Ranks"),
    "events": Named("Events", "Events"),
    "environment": Named("Environment", "Environment"),
}
"""The sections of the page in their order, by id; the questions of named sets come after the verdict."""
HEADINGS = {name: row.heading for name, row in SECTIONS.items()}


def sections_of(words: Mapping[str, Any]) -> dict[str, Markup]:
    """The sections that have something to show, by id and in order, each rendered by itself.

    Args:
        words: what :func:`page_words` returns.
    """
    macros: Any = template("sections.html.j2").make_module({**words, "headings": HEADINGS})
    made = {name: getattr(macros, f"{name}_section")() for name in SECTIONS}
    first, *others = made.items()
    asked = [(f"question-{one.name}", macros.question_section(one)) for one in words["questions"]]
    return {name: Markup(html.strip()) for name, html in (first, *asked, *others) if html.strip()}


def links_of(sections: Iterable[str]) -> dict[str, str]:
    """The links to these sections."""
    return {name: SECTIONS[name].link for name in sections if name in SECTIONS}


def whole_page(words: Mapping[str, Any], sections: Mapping[str, Markup], live: Any = None) -> str:
    """The document around sections; ``live`` as for :func:`~narrowgauge.report.page.document`."""
    return document("page.html.j2", **words, sections=sections, links=links_of(sections), live=live)


def page_words(
    found: Comparison, groups: Sequence[Group], title: str = "", diagnosis: RunFindings | None = None
) -> dict[str, Any]:
    """What the page's template shows, and its figures, as :func:`~narrowgauge.report.page.document` takes them.

    Args:
        groups: of ``found``, with the lines that its figures draw.
        diagnosis: ``None`` to diagnose each run.
    """
    named = run_names(groups)
    samples = [sampled for group in groups for sampled in group.samples]
    diagnosis = run_findings(groups) if diagnosis is None else diagnosis
    apart = differences(groups, found.classes)
    drawn = {"verdict": [apart] if apart is not None else [], **comparison_figures(groups, found.baseline)}
    figures = {name: [marked(figure, diagnosis.rows) for figure in section] for name, section in drawn.items()}
    strip = event_strip(named)
    if strip is not None:
        strip["data"] += sign_marks(diagnosis.rows)
    ranks, num_more_ranks = rank_rows(named)
    return {
        "drawn": [figure for section in figures.values() for figure in section],
        "strip": strip,
        "ranges": format_ranges(),
        "gauges": _gauge_data(groups, samples),
        "title": title or (groups[0].label if len(groups) == 1 else f"{len(groups)} recipes compared"),
        "subtitle": _subtitle([run for run, _ in named]),
        "groups": groups,
        "costs": cost_table(groups, found),
        "questions": questions(groups, found),
        "hints": COLUMN_HINTS,
        "equal_time": equal_time_table(groups, found),
        "memory": memory_beside_plan(groups),
        "comparison": found,
        "diagnosis": diagnosis,
        "figures": figures,
        "absent": absent(groups, figures["history"]),
        "samples": samples,
        # The run whose worst tensor lost most at the end; of healthy runs the first.
        "shown": min(range(len(samples)), key=lambda run: round(samples[run].lowest_edq, 1), default=0),
        "metrics": HEAT_MAPS,
        "ranks": ranks,
        "rank_columns": RANK_COLUMNS,
        "num_more_ranks": num_more_ranks,
        **event_words(named),
        "environment": environment(named),
        "formats": SHOWN_FORMATS,
    }


def event_words(named: Sequence[tuple[Run, str]]) -> dict[str, Any]:
    """What the template of the section of events shows."""
    events, num_more = event_rows(named)
    return {"named": named, "events": events, "num_more_events": num_more, "max_repetitions": MAX_REPETITIONS}


def _subtitle(runs: Sequence[Run]) -> str:
    """What all runs share: model, text, length and device."""
    configs = [run.config for run in runs]
    shared = [
        [config.get("model") for config in configs],
        [config.get("data") for config in configs],
        [f"{config['steps']} steps" if "steps" in config else None for config in configs],
        [run.run.get("machine", {}).get("device") for run in runs],
    ]
    words = [str(values[0]) for values in shared if values and values[0] and len(set(map(str, values))) == 1]
    return " · ".join([*words, counted(len(runs), "run")])


def _gauge_data(groups: Sequence[Group], samples: Sequence[Samples]) -> list[Row]:
    maps = heat_maps([found.steps for found in samples], [found.metrics for found in samples])
    bars = histograms(samples, [group.index for group in groups for _ in group.samples])
    return [{"heat": heat, "histogram": histogram} for heat, histogram in zip(maps, bars, strict=True)]


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

MAX_EVENT_ROWS = 300
MAX_REPETITIONS = 100
"""The most repetitions of one event that its row lists."""

_DIFFERENCE = "mean of the paired differences per seed, and half its 95 % interval"


@dataclass(frozen=True)
class _CostColumn:
    title: str
    column: Column
    form: Callable[[float], str]
    note: str = ""
    is_late: bool = False

    @property
    def name(self) -> str:
        return self.column.name

    @property
    def hint(self) -> str:
        return f"{self.column.help}; {self.note}" if self.note else self.column.help

    def text(self, value: float) -> str:
        text = self.form(value)
        return f"{MINUS}{text[1:]}" if text.startswith("-") else text

    def value(self, one: Classification) -> float | None:
        """A recipe's value; what the audit measured last, where that is meant and known."""
        late = finite_number(one.late.get(self.name)) if self.is_late else None
        return finite_number(one.row.get(self.name)) if late is None else late


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


_LATE = "the last values, by which the verdict judges"
_COLUMNS = (
    _CostColumn("Validation loss", SUMMARY["val_loss"], shown_loss, "nats per token, mean over seeds; lower is better"),
    _CostColumn("Tokens/s", SUMMARY["tokens_per_second"], "{:,.0f}".format, "on this machine"),
    _CostColumn("Bytes/param", SUMMARY["bytes_per_param"], "{:.3g}".format),
    _CostColumn("Activations", SUMMARY["activation_bytes"], tensor_bytes),
    _CostColumn("Peak of tensors", SUMMARY["peak_tensor_bytes"], tensor_bytes),
    _CostColumn("Peak memory", SUMMARY["peak_memory_bytes"], memory_text),
    _CostColumn("Late EDQ", STEP["edq"], "{:.3f}".format, _LATE, is_late=True),
    _CostColumn("Noise", SUMMARY["noise"], "{:.3g}".format),
    _CostColumn("Late lost", STEP["lost_fraction"], _percent, _LATE, is_late=True),
    _CostColumn("Seeds", Column("num_seeds", "count", "runs that count: finished and not diverged"), "{:.0f}".format),
)  # fmt: skip
COLUMN_HINTS = {column.title: column.hint for column in _COLUMNS}
"""What the columns of the cost table mean."""


# ── costs ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def cost_table(groups: Sequence[Group], found: Comparison) -> RecipeTable:
    classes = found.classes
    rows = list(zip(groups, classes.values(), strict=True))
    columns = [column for column in _COLUMNS if any(_cell(column, *row).value is not None for row in rows)]
    best = {column.name: _best(column, classes) for column in columns}
    hints = {column.title: column.hint for column in columns}
    minus = f"Minus {found.baseline}"
    if found.differences:
        first, *others = hints.items()
        hints = dict([first, (minus, _DIFFERENCE), *others])
    lines = []
    for group, one in rows:
        cells = [_cell(column, group, one, group.label in best[column.name]) for column in columns]
        if found.differences:
            difference = one.difference
            cells.insert(1, _difference(minus, difference.mean, difference.half) if difference else Cell(minus))
        lines.append(Line(group.label, group.index, cells, **_warning(one), notes=_progress(group)))
    return RecipeTable(hints, lines)


def _best(column: _CostColumn, classes: Mapping[str, Classification]) -> set[str]:
    """The recipes that are the best of a column beyond chance, unless another usable one prints the same."""
    best = {label for label, one in classes.items() if column.name in one.best}
    if column.name == "bytes_per_param":
        return best
    values = [finite_number(one.row.get(column.name)) for one in classes.values() if not one.faults]
    printed = [column.text(value) for value in values if value is not None]
    return {label for label in best if printed.count(column.text(classes[label].row[column.name])) == 1}


def _cell(column: _CostColumn, group: Group, one: Classification, is_best: bool = False) -> Cell:
    value = column.value(one)
    if value is None:
        so_far = _so_far(column.name, group)
        text = "–" if so_far is None else f"{column.text(so_far)} so far"
        return Cell(column.title, text, so_far, is_final=False)
    std = finite_number(one.row["val_loss_std"]) if column.name == "val_loss" else None
    spread = "" if std is None else f"± {f'{std:.4f}' if 1e-4 <= std < 1e5 else f'{std:.1e}'}"
    return Cell(column.title, column.text(value), value, spread, is_best)


def _difference(column: str, mean: float, half: float) -> Cell:
    text, sign, spread = shown_difference(mean, half).partition("±")
    return Cell(column, text.strip(), mean, sign + spread)


def _so_far(name: str, group: Group) -> float | None:
    """The last value of runs that are under way; the mean over them."""
    unfinished = [one.run for one in group.stats if one.run.summary is None and not one.divergence]
    found = [final_loss(run) if name == "val_loss" else _last(run, name) for run in unfinished]
    known = [value for value in found if value is not None]
    return fmean(known) if known else None


def _last(run: Run, name: str) -> float | None:
    return next(
        (value for row in reversed(run.steps[-200:]) if (value := finite_number(row.get(name))) is not None), None
    )


def _warning(one: Classification) -> dict[str, str]:
    if not one.faults:
        return {}
    reason, hint = listed(fault.name for fault in one.faults), listed(fault.text for fault in one.faults)
    return {"badge": "not to be used", "reason": reason, "hint": hint}


def _progress(group: Group) -> list[str]:
    unfinished = [run for run in group.runs if run.summary is None]
    if not unfinished:
        return []
    done = ", ".join(str(run.steps[-1].get("step", 0) if run.steps else 0) for run in unfinished)
    steps = unfinished[0].config.get("steps")
    return [f"unfinished: step {done}" + (f" of {steps}" if steps else "")]


def equal_time_table(groups: Sequence[Group], found: Comparison) -> RecipeTable | None:
    """The loss of each recipe when the fastest had finished; ``None`` where no two recipes have one at that moment."""
    if not found.equal_time:
        return None
    indices = {group.label: group.index for group in groups}
    most = max(int(row["num_seeds"]) for row in found.equal_time)
    minus = f"Minus {found.baseline}"
    lines = []
    for one in found.classes.at_equal_time:
        row = one.equal_time or {}
        few = f", {counted(row['num_seeds'], 'seed')}" if row["num_seeds"] < most else ""
        unknown = Cell(minus, value=0.0)
        difference = unknown if row["difference"] is None else _difference(minus, row["difference"], row["half"])
        cells = [Cell("Loss", shown_loss(row["val_loss"]), row["val_loss"]), difference]
        lines.append(Line(one.label, indices[one.label], cells, notes=[one.rank_at_equal_time.value + few]))
    return RecipeTable({"Loss": "nats per token on held-out text at that moment", minus: _DIFFERENCE}, lines)


# ── questions of named sets of recipes ──────────────────────────────────────────────────────────────────────────────────

_STEP_SECONDS = Column(
    "step_seconds", "number", "a run's median step, which no compiling step moves; median over seeds", "s"
)
_STEP_RATIO = Column("step_ratio", "number", "the same, relative to the baseline's")


@dataclass(frozen=True)
class Question:
    """The answer to the question of a named set of recipes: its measured figures, and its sentences."""

    name: str
    question: str
    table: RecipeTable
    sentences: Sequence[str]


def questions(groups: Sequence[Group], found: Comparison) -> list[Question]:
    """The answers that a comparison gives."""
    return [
        Question(one.row.name, one.question, _answer_table(one, groups, found), one.sentences) for one in found.answers
    ]


def _answer_table(answer: Answer, groups: Sequence[Group], found: Comparison) -> RecipeTable:
    columns = (
        _CostColumn("Step", _STEP_SECONDS, lambda seconds: f"{1e3 * seconds:.3g} ms", "on this machine"),
        _CostColumn("Relative", _STEP_RATIO, "{:.2f} ×".format),
        *(
            _CostColumn(title, SUMMARY[name], tensor_bytes)
            for title, name in (
                ("State", "state_bytes"), ("Activations", "activation_bytes"), ("Peak", "peak_tensor_bytes"),
            )
        ),
    )  # fmt: skip
    minus, indices = f"Loss minus {found.baseline}", {group.label: group.index for group in groups}
    lines = []
    for one, row in zip(answer.recipes, rows_of(answer), strict=True):
        known = {column.title: finite_number(row.get(column.name)) for column in columns}
        cells = [
            Cell(column.title)
            if (value := known[column.title]) is None
            else Cell(column.title, column.text(value), value)
            for column in columns
        ]
        cells.append(_difference(minus, one.difference.mean, one.difference.half) if one.difference else Cell(minus))
        lines.append(Line(one.label, indices[one.label], cells, **_warning(one)))
    return RecipeTable({**{column.title: column.hint for column in columns}, minus: _DIFFERENCE}, lines)


# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class EventRow:
    """A row of the table of events: an event of a run, and its repetitions.

    Args:
        run: the run's name.
        last: the step of the last.
        command: what mends it or shows more; empty where nothing is to be done.
        more: the tensor or the message of each repetition, and its step where that is another.
    """

    run: str
    event: Row
    last: float | None
    command: str = ""
    more: list[str] = field(default_factory=list)

    @property
    def is_routine(self) -> bool:
        return str(self.event.get("kind", "")) in ROUTINE

    @property
    def steps(self) -> str:
        first = self.event.get("step", "")
        return str(first) if self.last is None or finite_number(first) == self.last else f"{first}–{self.last:g}"


def event_rows(named: Iterable[tuple[Run, str]]) -> tuple[list[EventRow], int]:
    """Rows of the table of events, those that need attention first, and how many more there are.

    Events of the same kind with the same advice in the same or the next step are one row. Of more rows than the table
    holds, every run keeps its first ones, so that a run with many events does not displace the others.
    """
    found = [(index, row) for run, name in named for index, row in enumerate(_event_rows(run, name))]
    # The first of every run, then the second: those beyond the limit are the last ones of the longest lists.
    kept = {id(row) for _, row in sorted(found, key=lambda at: (at[1].is_routine, at[0]))[:MAX_EVENT_ROWS]}
    rows = sorted((row for _, row in found if id(row) in kept), key=lambda row: row.is_routine)
    return rows, len(found) - len(rows)


def _event_rows(run: Run, name: str) -> list[EventRow]:
    rows: list[EventRow] = []
    open_rows: dict[tuple[object, object], EventRow] = {}
    for event in run.events:
        key, step = (event.get("kind"), event.get("advice")), finite_number(event.get("step"))
        row = open_rows.get(key)
        if row is None or row.is_routine or not _follows(row.last, step):
            row = open_rows[key] = EventRow(name, event, step, command_of(run, event))
            rows.append(row)
            continue
        where = "" if step == finite_number(row.event.get("step")) else f"step {event.get('step')}: "
        row.more.append(f"{where}{event.get('tensor') or event.get('message', '')}")
        row.last = step
    return rows


def _follows(last: float | None, step: float | None) -> bool:
    return last == step if last is None or step is None else last <= step <= last + 1


# ── findings: a row for each, one line for all healthy runs, and marks in the figures ─────────────────────────────────────

MARKED = ("training-loss", "validation-loss", "grad-norm")
"""The figures over steps in which first signs are marked."""
_SHOWN_SIGNS, _ASKED = 3, 4
_NAMED = 12
"""The most healthy runs that are named."""
_HOW = " A dotted upright line is the first sign of what the diagnosis found; hover over its top."


@dataclass(frozen=True)
class FindingRow:
    """A row of the section: one finding of a run, or that its record does not tell.

    Args:
        recipe: the label of the run's recipe.
        group, line: the numbers of its recipe and of the run on the page.
        finding: the cause with its probability, and what to do; without a name, the causes in question and what to measure.
        signs: what shows it.
        command: that tells more.
    """

    run: str
    recipe: str
    group: int
    line: int
    finding: Finding
    signs: Sequence[str]
    command: str


@dataclass(frozen=True)
class FindingGroup:
    """A row of the table: one finding in all runs of a recipe that have it.

    Args:
        rows: of these runs, at least one; what shows it is said of the first.
    """

    rows: Sequence[FindingRow]

    @property
    def first(self) -> FindingRow:
        return self.rows[0]

    @property
    def runs(self) -> str:
        """The run, or the recipe and how many of its runs."""
        return self.first.run if len(self.rows) == 1 else f"{self.first.recipe}, {counted(len(self.rows), 'run')}"

    @property
    def steps(self) -> str:
        """The step of the first sign, or from which to which the runs have theirs."""
        known = sorted(row.finding.step for row in self.rows if row.finding.step is not None)
        return "–".join(str(step) for step in dict.fromkeys([*known[:1], *known[-1:]]))


@dataclass(frozen=True)
class RunFindings:
    """The section of a page: the findings, by run, and a sentence on each run that has none."""

    rows: Sequence[FindingRow]
    lines: Sequence[str]

    @property
    def shared(self) -> list[FindingGroup]:
        """The findings by recipe, in the order of their first runs: the same one of several seeds is one row."""
        found: dict[tuple[int, str, str], list[FindingRow]] = {}
        for row in self.rows:
            # Without a name, it is the causes in question that are the same.
            what = row.finding.name or row.finding.message
            found.setdefault((row.group, what, row.finding.where), []).append(row)
        return [FindingGroup(rows) for rows in found.values()]


def run_findings(groups: Iterable[Group]) -> RunFindings:
    """What the diagnosis found in the runs of a page: a row per finding, and a line for all healthy runs.

    Cost: of :func:`narrowgauge.diagnose` for each run, without reading its record again.
    """
    rows: list[FindingRow] = []
    healthy, lines = [], []
    named = [
        (group, run, name, found)
        for group in groups
        for (run, name), found in zip(group.named, group.diagnoses, strict=True)
    ]
    for line, (group, run, name, found) in enumerate(named):
        if isinstance(found, str):
            lines.append(f"{name}: the diagnosis failed, which concerns nothing else on this page ({found}).")
        elif found.is_healthy:
            healthy.append(name)
        elif not found.findings and not found.is_enough:
            lines.append(f"{name}: {found.verdict}")
        else:
            command = f"narrowgauge diagnose {shlex.quote(str(run.path))}"
            rows += _rows(found, name, group, line, command)
    return RunFindings(rows, [*([_healthy(healthy, len(named))] if healthy else []), *lines])


def _healthy(names: Sequence[str], num_runs: int) -> str:
    if num_runs == 1:
        return "No sign of a fault."
    of = listed(names) if len(names) <= _NAMED else f"{len(names)} of the {num_runs} runs"
    return f"No sign of a fault in {of}."


def _rows(found: Diagnosis, name: str, group: Group, line: int, command: str) -> list[FindingRow]:
    if not found.findings:
        step = next((sign.step for sign in found.signs if sign.step is not None), None)
        measure = found.next_measurement
        said = [sign.sentence for sign in found.signs[:_SHOWN_SIGNS]]
        advice = f"To tell: {measure.what.rstrip('?')}." if measure is not None else ""
        asked = [row.cause.name for row in found.causes[:_ASKED] if row.probability >= 0.05]
        finding = Finding("", f"In question: {', '.join(asked)}", advice, step=step)
        return [FindingRow(name, group.label, group.index, line, finding, said, command)]
    return [
        FindingRow(
            name,
            group.label,
            group.index,
            line,
            dataclasses.replace(finding, message=capitalized(finding.message)),
            [sign.sentence for sign in finding.chain[:_SHOWN_SIGNS]],
            command,
        )
        for finding in found.findings
    ]


def marked(figure: Figure, rows: Sequence[FindingRow]) -> Figure:
    """A figure over steps with an upright line at every first sign, if it is one of :data:`MARKED`."""
    signs: dict[tuple[int, int], list[FindingRow]] = {}
    for row in rows:
        if row.finding.name and row.finding.step is not None:
            signs.setdefault((row.group, row.finding.step), []).append(row)
    if figure.name not in MARKED or not signs:
        return figure
    marks = [_mark(group, step, found) for (group, step), found in signs.items()]
    return dataclasses.replace(figure, data=[*figure.data, *marks], how=figure.how + _HOW)


def _mark(group: int, step: int, rows: Sequence[FindingRow]) -> Row:
    """An upright line in the recipe's colour, whose top can be hovered over: what the rows found there."""
    causes = ", ".join(dict.fromkeys(plain(row.finding.name) for row in rows))
    runs = ", ".join(dict.fromkeys(plain(row.run) for row in rows))
    line = {"color": colour(group, 0.8), "width": 1.5, "dash": "dot"}
    return mark(step, group, colour(group), line, f"{causes}: first sign at step {step}<extra>{runs}</extra>")


def sign_marks(rows: Sequence[FindingRow]) -> list[Row]:
    """First signs on the figure of events, which has a line for each run."""
    known = [row for row in rows if row.finding.name and row.finding.step is not None]
    if not known:
        return []
    return [
        {
            "type": "scatter", "mode": "markers", "name": "first sign", "x": [row.finding.step for row in known],
            "y": [row.line for row in known],
            "text": [plain(f"first sign of {row.finding.name}") for row in known],
            "marker": {"symbol": "triangle-down", "size": 13, "color": "@accent", "line": {"width": 1, "color": "@paper"}},
            "hovertemplate": "step %{x}<br>%{text}<extra></extra>",
        }
    ]  # fmt: skip
