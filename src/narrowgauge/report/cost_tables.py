"""The tables of costs and of the environment. Plain HTML, there with and without JavaScript.

The updates that were lost are told as the audit read them last, as the verdict has them: the sums over a run are ruled by
its first large steps, and hide what is lost when the rate is small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from narrowgauge.comparison.comparison import Comparison
from narrowgauge.comparison.equal_time import Standing, standings
from narrowgauge.comparison.intervals import MINUS, shown_difference, shown_loss
from narrowgauge.comparison.labels import counted, listed
from narrowgauge.comparison.run_stats import divergence
from narrowgauge.report.groups import Group, final_loss
from narrowgauge.report.marks import swatch
from narrowgauge.report.markup import scroll, text
from narrowgauge.report.series import number
from narrowgauge.report.standing import best_of, faults_of, late_of
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row

_NOT_TOLD = frozenset({"config.out"})
"""Settings that differ by nature and say nothing."""


@dataclass(frozen=True)
class _Column:
    title: str
    name: str
    hint: str
    said: Callable[[float], str]
    least_is_best: bool | None = None
    is_late: bool = False

    def told(self, value: float) -> str:
        """A figure as a person reads it."""
        said = self.said(value)
        return f"{MINUS}{said[1:]}" if said.startswith("-") else said

    def value(self, row: Row, group: Group | None) -> float | None:
        """Of a recipe: what the audit read last, where that is meant and known."""
        late = late_of(group, self.name) if self.is_late else None
        return number(row.get(self.name)) if late is None else late


def cost_table(groups: Sequence[Group], rows: Sequence[Row], found: Comparison | None = None) -> str:
    """The cost of every recipe, side by side.

    Args:
        groups: of the page.
        rows: of ``compare.json``.
        found: the comparison of these runs, for the paired differences.
    """
    members = {group.label: group for group in groups}
    minus = {row.recipe: row for row in found.differences} if found else {}
    faults = faults_of(found)
    columns = [column for column in _COLUMNS if any(_has(column, row, members) for row in rows)]
    best = {
        column.title: best_of(column.name, column.least_is_best, rows, members, faults, column.said)
        for column in columns
        if column.least_is_best is not None
    }
    heads = [_head(column.title, column.hint) for column in columns]
    beside = f"Minus {found.yardstick}" if found else ""
    if minus:
        heads.insert(1, _head(beside, "mean of the paired differences per seed, and half its 95 % interval"))
    body = ""
    for row in rows:
        name = str(row.get("recipe", ""))
        group = members.get(name)
        cells = [_cell(column, row, group, name in best.get(column.title, ())) for column in columns]
        if minus:
            difference = minus.get(name)
            told = ("", "–") if difference is None else (repr(difference.mean), text(difference.text))
            cells.insert(1, _td(beside, *told))
        mark = swatch(group.place) if group else ""
        state = _state(row, group, faults.get(name, ()))
        body += f'<tr><th scope="row">{mark}{_breakable(name)}{state}</th>{"".join(cells)}</tr>\n'
    return (
        f'{scroll("Cost of each recipe")}<table class="sortable" id="cost-table">\n'
        "<caption>What each recipe costs</caption>\n"
        f'<thead><tr><th scope="col" data-sort>Recipe</th>{"".join(heads)}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>"
        '<p class="reading">Bold is the best of its column among the recipes that are fit for use, where the seeds tell it '
        "apart from all others. A loss is the mean over seeds ± their standard deviation."
        '<span class="needs-script to-sort"> Press a heading to sort.</span></p>'
    )


def equal_time_table(groups: Sequence[Group], found: Comparison) -> str:
    """What each recipe had reached when the fastest was done: the numbers behind the verdict's sentence.

    Args:
        groups: of the page.
        found: the comparison of these runs.

    Returns:
        Nothing where no two recipes have a loss at one moment.
    """
    rows = {str(row["recipe"]): row for row in found.equal_time}
    if not rows:
        return ""
    places = {group.label: group.place for group in groups}
    most = max(int(row["num_seeds"]) for row in rows.values())
    stand = standings(found.equal_time, found.yardstick).items()
    body = "".join(_then(rows[recipe], standing, places.get(recipe), most) for recipe, standing in stand)
    heads = _head("Loss", "nats per token on held-out text at that moment") + _head(
        f"Minus {found.yardstick}", "mean of the paired differences per seed, and half its 95 % interval"
    )
    return (
        f'<div id="equal-time" style="max-width:44rem"><div class="head"><h3>At equal time, after '
        f"{found.equal_time[0]['seconds']:.3g} s</h3></div>"
        f'{scroll("Losses at equal time")}<table class="sortable">\n<caption>Losses at equal time</caption>\n'
        f'<thead><tr><th scope="col" data-sort>Recipe</th>{heads}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'
        '<p class="reading">Each seed is read when the fastest recipe was done with that seed; the time is their median. A '
        "loss is the yardstick's plus the mean of the paired differences; ± is half the 95 % interval of that mean, and beyond "
        "it a recipe is better or worse.</p></div>"
    )


def _then(row: Row, standing: Standing, place: int | None, most: int) -> str:
    """A recipe's row of the table at equal time; the interval stands below its difference, for narrow screens."""
    few = f", {counted(row['num_seeds'], 'seed')}" if row["num_seeds"] < most else ""
    minus = "–" if row["difference"] is None else shown_difference(row["difference"], row["half"])
    mean, sign, half = minus.partition("±")
    spread = f' <span class="state">{sign}{text(half)}</span>' if sign else ""
    return (
        f'<tr><th scope="row">{swatch(place)}{_breakable(row["recipe"])}'
        f'<span class="state">{text(standing.value + few)}</span></th>'
        f'<td class="number" data-value="{row["val_loss"]!r}">{text(shown_loss(row["val_loss"]))}</td>'
        f'<td class="number" data-value="{row["difference"] or 0.0!r}">{text(mean.strip())}{spread}</td></tr>\n'
    )


def column_hints() -> str:
    """What the columns of the cost table mean, as a list."""
    return "".join(f"<dt>{text(column.title)}</dt><dd>{text(column.hint)}</dd>" for column in _COLUMNS)


def environment(named: Sequence[tuple[Run, str]]) -> str:
    """What the runs were asked for and ran on: first what differs, then what all share."""
    flat = [(name, _flat(run.run)) for run, name in named]
    keys = list(dict.fromkeys(key for _, settings in flat for key in settings))
    missing = object()
    differing = [key for key in keys if len({repr(settings.get(key, missing)) for _, settings in flat}) > 1]
    parts = [_differences(flat, told)] if (told := [key for key in differing if key not in _NOT_TOLD]) else []
    tables: dict[str, list[str]] = {}
    for key in keys:
        if key not in differing:
            tables.setdefault(key.partition(".")[0] if "." in key else "run", []).append(key)
    shared = " of all runs" if len(flat) > 1 else ""
    parts += [_settings(f"[{table}]{shared}", found, flat[0][1]) for table, found in tables.items()]
    return "\n".join(parts)


def _breakable(recipe: str) -> str:
    return text(recipe).replace("/", "/<wbr>")


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _memory(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


_LATE = "as the audit read it last, by which the verdict judges"
_COLUMNS = (
    _Column("Validation loss", "val_loss", "nats per token on held-out text; lower is better", shown_loss, True),
    _Column("Tokens/s", "tokens_per_second", "tokens trained on per second, on this machine", "{:,.0f}".format, False),
    _Column("Bytes/param", "bytes_per_param", "of weight, gradient and optimizer state, per parameter", "{:.3g}".format, True),
    _Column("Peak memory", "peak_memory_bytes", "the most memory the process or device held", _memory, True),
    _Column(
        "Late EDQ", "edq", f"share of the intended update that arrived; 1 is all of it; {_LATE}", "{:.3f}".format, is_late=True
    ),
    _Column("Noise", "noise", "what the storage added beside the update, relative to it", "{:.3g}".format),
    _Column(
        "Late lost", "lost_fraction", f"share of intended changes that left the stored value as it was; {_LATE}", _percent,
        is_late=True,
    ),
    _Column("Seeds", "num_seeds", "runs that count: finished, and not diverged", "{:.0f}".format),
)  # fmt: skip


def _head(title: str, hint: str) -> str:
    return f'<th scope="col" class="number" title="{text(hint)}" data-sort>{text(title)}</th>'


def _has(column: _Column, row: Row, members: Mapping[str, Group]) -> bool:
    group = members.get(str(row.get("recipe")))
    return column.value(row, group) is not None or _so_far(column.name, group) is not None


def _so_far(name: str, group: Group | None) -> float | None:
    """The last figure of runs that are under way; the mean over them."""
    unfinished = [run for run in group.runs if run.summary is None and not divergence(run)] if group else []
    if name == "val_loss":
        found = [final_loss(run) for run in unfinished]
    else:
        found = [_last(run, name) for run in unfinished]
    known = [value for value in found if value is not None]
    return fmean(known) if known else None


def _last(run: Run, name: str) -> float | None:
    return next((value for row in reversed(run.steps[-200:]) if (value := number(row.get(name))) is not None), None)


def _cell(column: _Column, row: Row, group: Group | None, is_best: bool) -> str:
    value = column.value(row, group)
    if value is None:
        so_far = _so_far(column.name, group)
        if so_far is None:
            return _td(column.title, "", "–", "number none")
        return _td(column.title, repr(so_far), f"{text(column.told(so_far))} so far", "number none")
    said = text(column.told(value))
    if is_best:
        said = f"<strong>{said}</strong>"
    spread = number(row.get("val_loss_std")) if column.name == "val_loss" else None
    if spread is not None:
        said += f' <span class="spread">± {f"{spread:.4f}" if 1e-4 <= spread < 1e5 else f"{spread:.1e}"}</span>'
    return _td(column.title, repr(value), said)


def _td(title: str, value: str, said: str, classes: str = "number") -> str:
    """A cell that knows its column: on a telephone a row is a card, and each cell says its own title."""
    return f'<td class="{classes}" data-title="{text(title)}" data-value="{value}">{said}</td>'


def _state(row: Row, group: Group | None, faults: Sequence[str]) -> str:
    """What is to be said of recipes not to be used, and of runs that did not end well, or not yet."""
    words = []
    if faults:
        # The figures behind it stand in the verdict.
        short = listed([fault.partition(" (")[0].partition(" by ")[0] for fault in faults])
        words.append(f'<span class="badge" title="{text(listed(faults))}">not to be used</span> {text(short)}')
    elif row.get("diverged"):
        words.append('<span class="badge">diverged</span>')
    unfinished = [run for run in group.runs if run.summary is None] if group else []
    if unfinished:
        done = ", ".join(str(run.steps[-1].get("step", 0) if run.steps else 0) for run in unfinished)
        asked = unfinished[0].config.get("steps")
        words.append(text(f"unfinished: step {done}" + (f" of {asked}" if asked else "")))
    return "".join(f'<span class="state">{word}</span>' for word in words)


def _flat(table: Row, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _differences(flat: Sequence[tuple[str, dict[str, Any]]], keys: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{text(key)}</th>' for key in keys)
    body = ""
    for name, settings in flat:
        cells = "".join(map(_setting, (settings.get(key, "–") for key in keys)))
        body += f'<tr><th scope="row">{text(name)}</th>{cells}</tr>'
    return (
        "<details open><summary>What differs between the runs</summary>"
        f'{scroll("What differs between the runs")}<table class="settings apart">'
        f'<thead><tr><th scope="col">Run</th>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )


def _setting(value: Any) -> str:
    said = text(value)
    return f'<td class="long">{said}</td>' if len(said) > 60 else f"<td>{said}</td>"


def _settings(title: str, keys: Sequence[str], settings: dict[str, Any]) -> str:
    body = "".join(
        f'<tr><th scope="row">{text(key.partition(".")[2] or key)}</th><td>{text(settings[key])}</td></tr>'
        for key in keys
    )
    return (
        f"<details><summary>{text(title)}</summary>{scroll(title)}"
        f'<table class="settings"><tbody>{body}</tbody></table></div></details>'
    )
