"""Tables of a page's runs: what happened in them, and their settings and environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import FIRST_EXPONENT, Row, finite_number
from narrowgauge.spec.formats import FORMATS, Format
from narrowgauge.spec.tables import Column, Table, text_columns

if TYPE_CHECKING:
    from narrowgauge.report.recipe_groups import RunDetails

ROUTINE = frozenset({"start", "resume", "stop", "finish", "checkpoint", "note", "unseen"})
"""What happens in every healthy run. All other events need attention, unknown ones too."""
_COLUMNS = text_columns(step="step", run="run", what="what", advice="advice")


def event_table(named: Iterable[tuple[Run, str]]) -> Table:
    """Return a row per run and kind of event: its steps, its first advice, and the number of
    others. Each note has its own.
    """
    groups: dict[tuple[str, Any, Any], list[Row]] = {}
    for run, name in named:
        for event in run.events:
            text = event.get("advice", "") if event["what"] == "note" else ""
            groups.setdefault((name, event["what"], text), []).append(event)
    rows = []
    for (label, what, _), events in groups.items():
        steps = dict.fromkeys([str(events[0]["step"]), str(events[-1]["step"])])
        advice = events[0].get("advice", "")
        if len(events) > 1:
            advice += f" ({counted(len(events) - 1, 'more event')}: see events.jsonl)"
        rows.append({"step": "–".join(steps), "run": label, "what": what, "advice": advice})
    return Table(_COLUMNS, sorted(rows, key=lambda row: row["what"] in ROUTINE))


def frequencies_alone(run: Row) -> list[str]:
    """Return a sentence on the loss of token frequencies alone, if ``run.toml`` has it.

    Example:
        >>> frequencies_alone({"data": {"unigram_loss": 5.5}}), frequencies_alone({})
        (['Token frequencies alone have a loss of 5.5000.'], [])
    """
    loss = run.get("data", {}).get("unigram_loss")
    if loss is None:
        return []
    return [f"Token frequencies alone have a loss of {loss:.4f}."]


_NOT_SHOWN = "config.out"
"""A meaningless setting that differs between any two runs."""


def setting_tables(named: Sequence[tuple[Run, str]]) -> tuple[Table, Table]:
    """Return the settings that differ between runs, a row per run, and the others, a row per
    setting.
    """
    settings = [_flat(run.run) for run, _ in named]
    runs: list[Row] = [{"run": name} for _, name in named]
    shared = []
    columns = [Column("run", "run")]
    for key in dict.fromkeys(chain(*settings)):
        if key == _NOT_SHOWN:
            continue
        values = [row.get(key, "–") for row in settings]
        if len(set(map(repr, values))) == 1:
            shared.append({"setting": key, "value": values[0]})
        else:
            columns.append(Column(key, key))
            for row, value in zip(runs, values, strict=True):
                row[key] = value
    differing = Table(tuple(columns), runs if len(columns) > 1 else [])
    return differing, Table(text_columns(setting="setting", value="value"), shared)


def _flat(table: Row, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


SHOWN_FORMATS = (
    "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float6_e3m2fn", "float6_e2m3fn", "float4_e2m1fn",
)  # fmt: skip
_RANGE_COLUMNS = (
    *text_columns(run="run", values="values", exponents="exponents"),
    *(Column(name, name) for name in SHOWN_FORMATS),
)


def counts_by_exponent(histogram: Sequence[Any]) -> dict[int, float]:
    """Return the counts above zero of a histogram, by exponent.

    Example:
        >>> counts_by_exponent([0, 3, None, 1])
        {-63: 3.0, -61: 1.0}
    """
    counts = {}
    for exponent, count in enumerate(map(finite_number, histogram), FIRST_EXPONENT):
        if count is not None and count > 0:
            counts[exponent] = count
    return counts


def range_table(named: Sequence[tuple[Run, str]], details: Sequence[RunDetails]) -> Table:
    """Return a row per run and kind of tensor: which share of its values lies outside of formats."""
    rows = []
    for (_, name), run in zip(named, details, strict=True):
        for kind, histogram in run.histograms.items():
            counts = counts_by_exponent(histogram)
            if not counts:
                continue
            row: Row = {
                "run": name,
                "values": kind,
                "exponents": f"{min(counts)} to {max(counts)}",
            }
            for format in SHOWN_FORMATS:
                row[format] = _outside(counts, FORMATS[format])
            rows.append(row)
    return Table(_RANGE_COLUMNS, rows)


def _outside(counts: Mapping[int, float], format: Format) -> str:
    parts = {"to zero": 0.0, "over": 0.0}
    for exponent, count in counts.items():
        if exponent < format.finest_exponent - 1:  # half of the smallest rounds up to it
            parts["to zero"] += count
        elif exponent > format.max_exponent:
            parts["over"] += count
    total = sum(counts.values())
    words = [f"{100 * (part / total):.3g} % {where}" for where, part in parts.items() if part]
    return ", ".join(words) or "0"
