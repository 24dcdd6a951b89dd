"""The page of runs: one HTML file without a script, which may be mailed, printed and kept.

It says what was run, the verdict, the costs, the curves, and what ``diagnose`` prints of each run. Its
tables equal the terminal's. Text of a run is escaped, so the name of a tensor is never markup.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from html import escape
from importlib import resources
from itertools import cycle

import numpy as np

from narrowgauge.measuring.diagnose.comparison import Comparison, run_labels, seed_of
from narrowgauge.measuring.diagnose.diagnose import Diagnosis
from narrowgauge.report.figures import STYLES, Line, figure
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import EVAL, STEP, number
from narrowgauge.runs.text import join_names, plural
from narrowgauge.spec.tables import Row, Table, is_number

ABOUT = {
    "Runs": "seed {config[seed]}; started {start[time]}; commit {start[commit]}",
    "Model": "{config[model]}; {model[class]}; {model[num_parameters]:,} parameters; {model[dtypes]}",
    "Recipe": "{config[recipe]}",
    "Training": (
        "{config[steps]} steps; {config[batch_size]} × {config[sequence_length]} tokens a step; "
        "{optimizer[class]}; learning rate {config[lr]}; weight decay {config[weight_decay]}"
    ),
    "Data": "{config[data]}; fingerprint {data[fingerprint]:.12}",
    "Machine": "{machine[device]}; {machine[processor]}; ranks: {machine[ranks]}",
    "Software": "Narrowgauge {versions[narrowgauge]}; PyTorch {versions[torch]}; Python {versions[python]}",
}
"""What the page begins with: phrases of settings. One of an absent setting is left out."""
PAGE_MARK = b'<meta name="generator" content="Narrowgauge">'
"""In the first bytes of every page that we write."""
HEAD = 4096
"""Bytes of a file in which the mark is sought: a text may quote it further on."""
MOST_LINES = 20
"""Of more, only the means of the recipes are drawn."""
CURVES = {name: column for name, column in (EVAL | STEP).items() if column.curve}
"""The columns that are drawn."""


def render(comparison: Comparison, runs: Sequence[Run]) -> str:
    """Return the page of a comparison and its runs, finished or not."""
    names = [*_phrases(runs, "{config[model]}"), *run_labels(runs)]
    title = escape(f"{plural(len(runs), 'run')}: {join_names(names, 5)}")
    style = (resources.files(__package__) / "page.css").read_text(encoding="utf-8")
    head = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{PAGE_MARK.decode()}',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title} · Narrowgauge</title><style>{style}</style></head><body><main>",
        f"<h1>{title}</h1><dl>{''.join(_about(runs))}</dl>",
        f'<p class="lead">{escape(comparison.verdict)}</p>',
    ]
    curves = ['<h2>Curves</h2><div class="grid">', *figures(comparison, runs), "</div>"]
    found = ["<h2>Diagnosis</h2>", *map(_diagnosis, runs), "</main></body></html>\n"]
    return "\n".join([*head, html_table(comparison.table()), *curves, *found])


def _about(runs: Sequence[Run]) -> Iterator[str]:
    """Yield what the runs are."""
    for title, phrases in ABOUT.items():
        words = []
        for phrase in phrases.split("; "):
            words += _phrases(runs, phrase)
        text = join_names(words, 9)
        if text:
            yield f"<dt>{title}</dt><dd>{escape(text)}</dd>"


def _phrases(runs: Sequence[Run], phrase: str) -> list[str]:
    """Return a phrase with the settings of each run that has them; of a path, its name."""
    words = []
    for run in runs:
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            words.append(re.sub("^/.*/", "", phrase.format(**run.run)))
    return words


def html_table(table: Table) -> str:
    """Return a table in a box that scrolls sideways, by keyboard too."""
    rows = [""] * (len(table.rows) + 1)
    for title, cells in table.columns().items():
        style = ' class="number"' if is_number(cells) else ""
        rows[0] += f"<th{style}>{escape(title)}</th>"
        for place, cell in enumerate(cells, 1):
            rows[place] += f"<td{style}>{escape(cell)}</td>"
    return _box("div", "Costs", f"<table><tr>{'</tr><tr>'.join(rows)}</tr></table>")


def _diagnosis(run: Run) -> str:
    """Return what ``narrowgauge diagnose`` prints of a run, open if it found something."""
    diagnosis = Diagnosis(run)
    first, _, rest = escape(str(diagnosis)).partition("\n")
    state = " open" if diagnosis.readings else ""
    return f"<details{state}><summary>{first}</summary>{_box('pre', first, rest)}</details>"


def _box(tag: str, name: str, content: str) -> str:
    """Return a box that scrolls sideways, by keyboard too."""
    start = f'<{tag} class="scroll" tabindex="0" role="region" aria-label="{name}">'
    return f"{start}{content}</{tag}>"


# ── figures ───────────────────────────────────────────────────────────────────────────────────────


def figures(comparison: Comparison, runs: Sequence[Run]) -> Iterator[str]:
    """Yield each figure with its caption. One that no run has values for is left out."""
    band = comparison.acceptable
    lines_by_column = lines_of(runs)
    for name, column in CURVES.items():
        lines = lines_by_column.get(name, [])
        if lines:
            yield figure(column.curve, with_means(lines), column.axis)
        apart = differences(lines, comparison.baseline) if column.unit == "loss" else []
        if apart:
            title = f"{column.curve[0]} minus {comparison.baseline}"
            heading = (title, "Of the same seed. Grey: ±1 % of the loss.", column.curve[2])
            yield figure(heading, with_means(apart), (-1.5 * band, 1.5 * band), band)


def lines_of(runs: Sequence[Run]) -> dict[str, list[Line]]:
    """Return a line per run that has values, by column that is drawn.

    A colour is a recipe; of one recipe it is a seed.
    """
    labels = run_labels(runs)
    if len(set(labels)) == 1 < len(runs):
        labels = [f"seed {seed_of(run)}" for run in runs]
    styles = dict(zip(dict.fromkeys(labels), cycle(STYLES), strict=False))
    lines = dict[str, list[Line]]()
    for run, label in zip(runs, labels, strict=True):
        dash, colour = styles[label]
        for rows in (run.steps, run.evals):
            for name, (steps, values) in points_in(rows).items():
                line = Line(label, colour, seed_of(run), steps, values, dash=dash)
                lines.setdefault(name, []).append(line)
    return lines


def points_in(rows: Iterable[Row]) -> dict[str, np.ndarray]:
    """Return the steps and the values of each drawn column that rows have, in one loop: a large file
    is read anew by each.
    """
    pairs = {name: array("d") for name in CURVES}
    for row in rows:
        for name, points in pairs.items():
            value = number(row.get(name))
            if value is not None:
                points.extend((row["step"], value))
    return {name: np.array(points).reshape(-1, 2).T for name, points in pairs.items() if points}


def differences(lines: Sequence[Line], baseline: str | None) -> list[Line]:
    """Return lines minus the baseline's of the same seed, at their common steps."""
    references = {line.seed: line for line in lines if line.label == baseline}
    apart = []
    for line in lines:
        base = references.get(line.seed, line)
        steps, ours, theirs = np.intersect1d(line.steps, base.steps, return_indices=True)
        if line.label != baseline and base is not line and len(steps):
            apart.append(line._replace(steps=steps, values=line.values[ours] - base.values[theirs]))
    return apart


def with_means(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of several seeds, and the mean of each recipe at the common steps."""
    drawn = []
    for label in dict.fromkeys(line.label for line in lines):
        group = [line for line in lines if line.label == label]
        if len(group) > 1 and len(lines) <= MOST_LINES:
            for line in group:
                drawn.append(line._replace(label=f"{label}, seed {line.seed}"))
        steps = reduce(np.intersect1d, [line.steps for line in group])
        if len(steps):
            values = [line.values[np.isin(line.steps, steps)] for line in group]
            mean = np.mean(values, axis=0)
            drawn.append(group[0]._replace(steps=steps, values=mean, is_main=True))
    return drawn
