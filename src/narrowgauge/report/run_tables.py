"""Tables of a page's runs: what happened in them, and their settings and environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from narrowgauge.runs.finding import counted
from narrowgauge.runs.schema import Row
from narrowgauge.spec.tables import Column, Table, text_columns

if TYPE_CHECKING:
    from narrowgauge.report.page_runs import PageRun

ROUTINE = frozenset({"start", "resume", "stop", "finish", "checkpoint", "note", "unseen"})
"""What happens in every healthy run. All other events need attention, unknown ones too."""
_COLUMNS = text_columns(step="step", run="run", what="what", advice="advice")


def event_table(runs: Iterable[PageRun]) -> Table:
    """Return a row per run and kind of event: its steps, its first advice, and the number of
    others. Each note has its own.
    """
    groups: dict[tuple[str, Any, Any], list[Row]] = {}
    for run in runs:
        for event in run.run.events:
            text = event.get("advice", "") if event["what"] == "note" else ""
            groups.setdefault((run.name, event["what"], text), []).append(event)
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


def setting_tables(page_runs: Sequence[PageRun]) -> tuple[Table, Table]:
    """Return the settings that differ between runs, a row per run, and the others, a row per
    setting.
    """
    settings = [_flat(run.run.run) for run in page_runs]
    runs: list[Row] = [{"run": run.name} for run in page_runs]
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
