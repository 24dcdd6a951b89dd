"""The page of runs: one recipe or many, with their costs, figures, findings, events and environment.

Its tables are plain values, which the template renders. Lost updates are shown as the audit last measured them, as in the
verdict: sums over a run are dominated by its first large steps, and hide what is lost while the learning rate is small.

The measurements on a page stay readable whatever the diagnosis does: where it fails, its section says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from markupsafe import Markup

from narrowgauge.analysis.comparison.classification import Classification
from narrowgauge.analysis.comparison.comparison import Comparison
from narrowgauge.analysis.comparison.intervals import MINUS, shown_difference, shown_loss
from narrowgauge.analysis.comparison.labels import listed
from narrowgauge.analysis.reading import Reading, reading_table
from narrowgauge.report.event_table import MAX_REPETITIONS, event_rows, event_strip
from narrowgauge.report.figures.curves import absent, comparison_figures
from narrowgauge.report.figures.heat_maps import HEAT_MAPS, heat_maps
from narrowgauge.report.figures.histograms import SHOWN_FORMATS, format_ranges, histograms
from narrowgauge.report.figures.palette import colour, plain
from narrowgauge.report.figures.traces import Figure, mark
from narrowgauge.report.figures.verdict_figure import differences
from narrowgauge.report.memory_section import memory_beside_plan
from narrowgauge.report.page import document, template
from narrowgauge.report.recipe_groups import Group, Samples, final_loss, groups_of, run_names
from narrowgauge.report.recipe_tables import Cell, Line, RecipeTable, memory_text, tensor_bytes
from narrowgauge.report.run_settings import environment
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import STEP, SUMMARY, Column, Row, finite_number
from narrowgauge.spec.tables import Table, text_columns


def render(comparison: Comparison, title: str = "", live: bool = False) -> str:
    """Return the report on a comparison as one HTML document; its runs may be unfinished, and without gauges.

    Invariant: the document fetches nothing and shows every name and message as text. The same runs give the same document.

    Cost: about two seconds per ten thousand steps, a third of them the diagnosis; the document is 2 MB for Plotly and some
        0.1 MB per run.
    """
    words = page_words(comparison, groups_of(comparison), title)
    sections = sections_of(words)
    return document("page.html.j2", **words, sections=sections, links=links_of(sections), live=live)


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
    "events": Named("Events", "Events"),
    "environment": Named("Environment", "Environment"),
}
"""The sections of the page in their order, by id."""
HEADINGS = {name: row.heading for name, row in SECTIONS.items()}


def sections_of(words: Mapping[str, Any]) -> dict[str, Markup]:
    """Return the sections that have something to show, by id and in order, each rendered by itself.

    Args:
        words: what :func:`page_words` returns.
    """
    macros: Any = template("sections.html.j2").make_module({**words, "headings": HEADINGS})
    made = {name: getattr(macros, f"{name}_section")() for name in SECTIONS}
    return {name: Markup(html.strip()) for name, html in made.items() if html.strip()}


def links_of(sections: Iterable[str]) -> dict[str, str]:
    """Return the links to these sections."""
    return {name: SECTIONS[name].link for name in sections if name in SECTIONS}


def page_words(comparison: Comparison, groups: Sequence[Group], title: str = "") -> dict[str, Any]:
    """Return what the page's template shows, and its figures, as :func:`~narrowgauge.report.page.document` takes them.

    Args:
        groups: of ``comparison``, with the lines that its figures draw.
    """
    named = run_names(groups)
    samples = [sampled for group in groups for sampled in group.samples]
    diagnosis = run_readings(groups)
    apart = differences(groups, comparison)
    drawn = {"verdict": [apart] if apart is not None else [], **comparison_figures(groups, comparison.baseline)}
    figures = {name: [marked(figure, diagnosis) for figure in section] for name, section in drawn.items()}
    events, num_more = event_rows(named)
    strip = event_strip(named)
    if strip is not None:
        strip["data"] += reading_marks(diagnosis)
    return {
        "drawn": [figure for section in figures.values() for figure in section],
        "strip": strip,
        "ranges": format_ranges(),
        "gauges": _gauge_data(groups, samples),
        "title": title or (groups[0].label if len(groups) == 1 else f"{len(groups)} recipes compared"),
        "subtitle": _subtitle([run for run, _ in named]),
        "groups": groups,
        "costs": cost_table(groups, comparison),
        "hints": COLUMN_HINTS,
        "equal_time": equal_time_table(groups, comparison),
        "memory": memory_beside_plan(groups),
        "comparison": comparison,
        "diagnosis": diagnosis,
        "figures": figures,
        "absent": absent(groups, figures["history"]),
        "samples": samples,
        # The run whose worst tensor lost most at the end; of healthy runs the first.
        "shown": min(range(len(samples)), key=lambda run: round(samples[run].lowest_edq, 1), default=0),
        "metrics": HEAT_MAPS,
        "named": named,
        "events": events,
        "num_more_events": num_more,
        "max_repetitions": MAX_REPETITIONS,
        "environment": environment(named),
        "formats": SHOWN_FORMATS,
    }


def _subtitle(runs: Sequence[Run]) -> str:
    """Return what all runs share: model, text, length and device."""
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
    maps = heat_maps([sample.steps for sample in samples], [sample.metrics for sample in samples])
    bars = histograms(samples, [group.index for group in groups for _ in group.samples])
    return [{"heat": heat, "histogram": histogram} for heat, histogram in zip(maps, bars, strict=True)]


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

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
        """Return a recipe's value; what the audit measured last, where that is meant and known."""
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


def cost_table(groups: Sequence[Group], comparison: Comparison) -> RecipeTable:
    classes = comparison.classes
    rows = list(zip(groups, classes.values(), strict=True))
    columns = [column for column in _COLUMNS if any(_cell(column, *row).value is not None for row in rows)]
    best = {column.name: _best(column, classes) for column in columns}
    hints = {column.title: column.hint for column in columns}
    minus = f"Minus {comparison.baseline}"
    if comparison.differences:
        first, *others = hints.items()
        hints = dict([first, (minus, _DIFFERENCE), *others])
    lines = []
    for group, one in rows:
        cells = [_cell(column, group, one, group.label in best[column.name]) for column in columns]
        if comparison.differences:
            difference = one.difference
            cells.insert(1, _difference(minus, difference.mean, difference.half) if difference else Cell(minus))
        lines.append(Line(group.label, group.index, cells, **_warning(one), notes=_progress(group)))
    return RecipeTable(hints, lines)


def _best(column: _CostColumn, classes: Mapping[str, Classification]) -> set[str]:
    """Return the recipes that are the best of a column beyond chance, unless another usable one prints the same."""
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
    """Return the last value of runs that are under way; the mean over them."""
    unfinished = [one.run for one in group.stats if one.run.summary is None and not one.divergence]
    values = [final_loss(run) if name == "val_loss" else _last(run, name) for run in unfinished]
    known = [value for value in values if value is not None]
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


def equal_time_table(groups: Sequence[Group], comparison: Comparison) -> RecipeTable | None:
    """Return the loss of each recipe when the fastest had finished; ``None`` where no two recipes have one at that moment."""
    if not comparison.equal_time:
        return None
    indices = {group.label: group.index for group in groups}
    most = max(int(row["num_seeds"]) for row in comparison.equal_time)
    minus = f"Minus {comparison.baseline}"
    lines = []
    for one in comparison.at_equal_time:
        row = one.equal_time or {}
        few = f", {counted(row['num_seeds'], 'seed')}" if row["num_seeds"] < most else ""
        unknown = Cell(minus, value=0.0)
        difference = unknown if row["difference"] is None else _difference(minus, row["difference"], row["half"])
        cells = [Cell("Loss", shown_loss(row["val_loss"]), row["val_loss"]), difference]
        lines.append(Line(one.label, indices[one.label], cells, notes=[one.rank_at_equal_time.value + few]))
    return RecipeTable({"Loss": "nats per token on held-out text at that moment", minus: _DIFFERENCE}, lines)


# ── readings: a row for each, one line for the runs without any, and marks in the figures ────────────────────────────────

MARKED = ("training-loss", "validation-loss", "grad-norm")
"""The figures over steps in which the first reading of each run is marked."""
MAX_READINGS = 10
"""The most readings of a run that the page shows."""
_HOW = " A dotted upright line is the first reading beyond its bound; hover over its top."
_READING_COLUMNS = (*text_columns(run="run"), *reading_table([]).columns, *text_columns(what_to_do="advice"))


@dataclass(frozen=True)
class RunReadings:
    """The section of a page.

    Args:
        table: the readings beyond their bound, by run.
        first: by run that has one: the number of its recipe, its name, its number on the page, and its first reading.
        lines: sentences on the other runs.
    """

    table: Table
    first: Sequence[tuple[int, str, int, Reading]]
    lines: Sequence[str]


def run_readings(groups: Iterable[Group]) -> RunReadings:
    """Return what the diagnosis of the runs of a page shows.

    Cost: of :func:`narrowgauge.diagnose` for each run, without reading its record again.
    """
    rows, first, lines = [], [], []
    named = [
        (group, name, diagnosis)
        for group in groups
        for (_, name), diagnosis in zip(group.named, group.diagnoses, strict=True)
    ]
    for line, (group, name, diagnosis) in enumerate(named):
        if isinstance(diagnosis, str):
            lines.append(f"{name}: the diagnosis failed, which concerns nothing else on this page ({diagnosis}).")
        elif diagnosis.ok:
            lines.append(f"{name}: {diagnosis.verdict}")
        else:
            rows += [{"run": name, **reading.to_dict()} for reading in diagnosis.readings[:MAX_READINGS]]
            first.append((group.index, name, line, diagnosis.readings[0]))
            if len(diagnosis.readings) > MAX_READINGS:
                lines.append(f"{name}: {len(diagnosis.readings) - MAX_READINGS} more readings (narrowgauge diagnose).")
    return RunReadings(Table(_READING_COLUMNS, rows), first, lines)


def marked(figure: Figure, readings: RunReadings) -> Figure:
    """Return a figure over steps with an upright line at the first reading of each run, if it is one of :data:`MARKED`."""
    if figure.name not in MARKED or not readings.first:
        return figure
    marks = [_mark(group, name, reading) for group, name, _, reading in readings.first]
    return dataclasses.replace(figure, data=[*figure.data, *marks], how=figure.how + _HOW)


def _mark(group: int, name: str, reading: Reading) -> Row:
    line = {"color": colour(group, 0.8), "width": 1.5, "dash": "dot"}
    words = f"{plain(reading.what)}: step {reading.step}<extra>{plain(name)}</extra>"
    return mark(reading.step, group, colour(group), line, words)


def reading_marks(readings: RunReadings) -> list[Row]:
    """Return the first readings on the figure of events, which has a line for each run."""
    if not readings.first:
        return []
    return [
        {
            "type": "scatter", "mode": "markers", "name": "first reading", "x": [row[3].step for row in readings.first],
            "y": [row[2] for row in readings.first], "text": [plain(row[3].what) for row in readings.first],
            "marker": {"symbol": "triangle-down", "size": 13, "color": "@accent", "line": {"width": 1, "color": "@paper"}},
            "hovertemplate": "step %{x}<br>%{text}<extra></extra>",
        }
    ]  # fmt: skip
