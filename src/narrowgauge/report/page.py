"""The page of runs: one recipe or many, as one HTML file that opens from disk.

Its tables equal the terminal's. Text of a run is escaped, so the name of a tensor is never markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.measuring.comparison import Comparison
from narrowgauge.measuring.diagnose import diagnose
from narrowgauge.measuring.labels import run_labels, seed_of
from narrowgauge.measuring.reading import Reading
from narrowgauge.report.curves import PageRun, curves_of, intervals_of
from narrowgauge.runs.finding import counted, told
from narrowgauge.runs.places import PAGE_MARK
from narrowgauge.runs.record import Run
from narrowgauge.spec.tables import Table, is_number


def render(comparison: Comparison, runs: Sequence[Run], script: str) -> str:
    """Return the page of a comparison and its runs, finished or not.

    Args:
        script: the HTML element that loads Plotly.
    """
    shown = page_runs(runs)
    title = told(run.label for run in shown)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{counted(len(runs), "run")}</p>',
        *_verdict(comparison, runs),
        _section("Cost", html_table(comparison.table())),
        *_curves(comparison, shown),
        *_diagnosis(shown),
    ]
    style = (resources.files(__package__) / "page.css").read_text(encoding="utf-8")
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        PAGE_MARK.decode(),
        f"<title>{escape(title)} · Narrowgauge</title>",
        f"<style>{style}</style>{script}</head><body><main>",
    ]
    return "\n".join([*head, *body, "</main></body></html>\n"])


def page_runs(runs: Sequence[Run]) -> list[PageRun]:
    """Return the runs with the number of their recipe, which gives it a colour."""
    labels = run_labels(runs)
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    shown = []
    for run, label in zip(runs, labels, strict=True):
        shown.append(PageRun(run, label, numbers[label], seed_of(run)))
    return shown


def _section(heading: str, *parts: str) -> str:
    return "\n".join(["<section>", f"<h2>{escape(heading)}</h2>", *parts, "</section>"])


def html_table(table: Table) -> str:
    """Return a table in a box that scrolls sideways."""
    columns = table.columns()
    head = "</th><th>".join(map(escape, columns))
    lines = [f"<th>{head}</th>"]
    for cells in zip(*columns.values(), strict=True):
        line = ""
        for title, cell in zip(columns, cells, strict=True):
            style = ' class="number"' if is_number(columns[title]) else ""
            line += f"<td{style}>{escape(cell)}</td>"
        lines.append(line)
    rows = "</tr>\n<tr>".join(lines)
    return f'<div class="scroll"><table><tr>{rows}</tr></table></div>'


# ── what the runs say ─────────────────────────────────────────────────────────────────────────────


def _verdict(comparison: Comparison, runs: Sequence[Run]) -> Iterator[str]:
    items = ""
    for sentence in learned(comparison, runs):
        items += f"<li>{escape(sentence)}</li>"
    figure = intervals_of(comparison)
    parts = [f'<p class="lead">{escape(comparison.verdict)}</p>', f"<ul>{items}</ul>"]
    if figure:
        caption = (
            "A bar is the 95 % interval of the mean over seeds. Inside the band a recipe is as good "
            "as the baseline; a bar over its edge is not resolved by these seeds."
        )
        parts.append(_figure(figure, "intervals", caption))
    yield _section("Verdict", *parts)


def learned(comparison: Comparison, runs: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence on whether the models learned more than the frequencies of their tokens,
    whose loss on its validation text the trainer records.
    """
    level = 0.0
    for run in runs:
        level = max(level, run.run.get("data", {}).get("unigram_loss", 0.0))
    losses = [row["val_loss"] for row in comparison.rows if row["val_loss"] is not None]
    if losses and level > 0:
        yield (
            f"Token frequencies alone have a loss of {level:.4f}; the recipes end at "
            f"{min(losses):.4f} to {max(losses):.4f}."
        )


def _figure(figure: dict[str, Any], name: str, caption: str, title: str = "") -> str:
    """Return a figure that Plotly draws, in an element of that name; its button saves it as SVG."""
    from plotly.io import to_html

    buttons = {
        "modeBarButtons": [["toImage"]], "displaylogo": False, "toImageButtonOptions": {"format": "svg"},
    }  # fmt: skip
    drawing = to_html(
        figure, buttons, full_html=False, include_plotlyjs=False, validate=False, default_width="100%",
        div_id=name,
    )  # fmt: skip
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f"<figure>{heading}{drawing}<figcaption>{caption}</figcaption></figure>"


def _curves(comparison: Comparison, runs: Sequence[PageRun]) -> Iterator[str]:
    parts = []
    for number, (title, caption, figure) in enumerate(curves_of(runs, comparison.baseline)):
        parts.append(_figure(figure, f"curve-{number}", caption, title))
    if parts:
        yield _section("Curves", '<div class="grid">', *parts, "</div>")


# ── what their records show ───────────────────────────────────────────────────────────────────────


def _diagnosis(runs: Sequence[PageRun]) -> Iterator[str]:
    """Yield the readings beyond their bound, one of each kind and recipe, and the healthy runs."""
    groups: dict[tuple[str, str, str], list[tuple[int, Reading]]] = {}
    lines = []
    for run in runs:
        name = f"{run.label}, seed {run.seed}"
        try:
            readings = diagnose(run.run).readings
        except NarrowgaugeError as error:
            lines.append(f"{name} could not be diagnosed. {error}")
            continue
        for reading in readings:
            kind = (run.label, reading.what, reading.stage)
            groups.setdefault(kind, []).append((run.seed, reading))
        if not readings:
            lines.append(f"Nothing found in {name}.")
    items = ""
    for (label, kind_name, _), members in groups.items():
        items += _finding(label, kind_name, members)
    rest = escape(" ".join(lines))
    findings = f'<ul class="findings">{items}</ul>'
    yield _section("Diagnosis", findings, f'<p class="muted">{rest}</p>')


def _finding(label: str, kind: str, members: list[tuple[int, Reading]]) -> str:
    """Return the sentence of the earliest reading of a kind, and then its place."""
    _, reading = min(members, key=lambda member: member[1].step)
    seeds = ", ".join(map(str, sorted({seed for seed, _ in members})))
    words = [f"{label}, seed {seeds}", kind, reading.tensor, f"step {reading.step}"]
    sentence = escape(reading.text or f"{kind}.")
    return (
        f'<li><p>{sentence}</p><p class="muted">{escape(" · ".join(filter(None, words)))}</p></li>'
    )
