"""Generate the tables and the API reference of the documentation from the package.

Each build replaces ``<!-- table: formats -->`` in a page by that table, and ``<!-- reference -->`` by the public names. Most
tables are those of ``narrowgauge show``; ``OWN`` has the tables of the record and of detectors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from narrowgauge import errors
from narrowgauge._public import homes_of, rooms
from narrowgauge.analysis.diagnosis.causes import cause_table
from narrowgauge.analysis.diagnosis.loop_terms import in_terms_of
from narrowgauge.analysis.diagnosis.pairs.first_difference import STAGES
from narrowgauge.analysis.diagnosis.pairs.reasons import REASONS
from narrowgauge.analysis.diagnosis.replay_findings import variant_table
from narrowgauge.analysis.diagnosis.signs import sign_table
from narrowgauge.analysis.monitor.detectors import CONDITIONS, DETECTORS, SERIOUS, Detector
from narrowgauge.runs import schema
from narrowgauge.runs.arithmetic import PROBES
from narrowgauge.runs.events import KINDS
from narrowgauge.spec import show
from narrowgauge.spec.tables import Column, Row, Table

TABLE = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)
REFERENCE = "<!-- reference -->"
_NOT_LISTED = ("NarrowgaugeError", "ReportedError")


def on_page_markdown(markdown: str, **_context: object) -> str:
    """Fill in the tables of one page; MkDocs calls this for every page."""
    markdown = TABLE.sub(lambda found: table(found.group(1)), markdown)
    return markdown.replace(REFERENCE, reference())


def table(name: str) -> str:
    """The table of that name as GitHub markdown.

    Args:
        name: a key of :data:`OWN`, or a table of ``narrowgauge show``.
    """
    return OWN[name]() if name in OWN else show.markdown(name)


def reference() -> str:
    """One entry per public name, under the path by which it is reached: those of ``narrowgauge``, then those of each room."""
    parts = []
    for package in ("narrowgauge", *(f"narrowgauge.{room}" for room in rooms())):
        homes = homes_of(package) or {name: package for name in vars(errors) if name.endswith("Error")}
        # The base class is among the names of the package itself; the command line alone raises what was printed already.
        homes = {
            name: home for name, home in homes.items() if package != "narrowgauge.errors" or name not in _NOT_LISTED
        }
        parts.append(f"## {package.replace('narrowgauge', 'ng', 1)}\n")
        parts += [f"::: {home}.{name}\n" for name, home in homes.items()]
    return "\n".join(parts)


# ── what a run is watched for ───────────────────────────────────────────────────────────────────────────────────────


def watched() -> str:
    """The kinds of tensor that gauges watch."""
    return _pairs(("kind", "what it is"), schema.TENSOR_KINDS)


def metrics() -> str:
    """Every metric in a row of ``gauges.jsonl``."""
    rows = [
        {"table": table, "metric": metric.name, "unit": metric.unit, "help": metric.help}
        for table, found in schema.METRICS.items()
        for metric in found.values()
    ]
    heads = Column("table", "table", code=True), Column("metric", "metric", code=True)
    return _markdown(rows, *heads, **{"unit": "unit", "what it is": "help"})


def record(kind: str) -> str:
    """The columns of one file of a run folder."""
    rows = [
        {"name": column.name, "type": column.type, "unit": column.unit, "help": column.help}
        for column in schema.TABLES[kind].values()
    ]
    heads = Column("column", "name", code=True), Column("type", "type")
    return _markdown(rows, *heads, **{"unit": "unit", "what it is": "help"})


def detectors() -> str:
    """All detectors: metric, threshold and source; serious ones first."""
    rows = [
        {"name": row.name, "kind": row.kind, "trips": f"{row.metric} {trips(row)}", "source": row.source}
        for row in _by_kind()
    ]
    heads = Column("detector", "name"), Column("event", "kind", code=True)
    return _markdown(rows, *heads, **{"trips at": "trips", "after": "source"})


def advice() -> str:
    """The advice of each kind of event, without duplicates."""
    words = {"storage": "STORAGE", "compute": "COMPUTE", "module": "MODULE"}
    found = dict.fromkeys((detector.kind, detector.advice.format(**words)) for detector in _by_kind())
    rows = [{"kind": kind, "advice": text} for kind, text in found]
    return _markdown(rows, Column("event", "kind", code=True), **{"what to do": "advice"})


def _by_kind() -> list[Detector]:
    return sorted(DETECTORS.values(), key=lambda row: (row.kind not in SERIOUS, list(KINDS).index(row.kind)))


def conditions() -> str:
    """The conditions of detectors, in words."""
    return _pairs(("condition", "holds where"), {name: row.text for name, row in CONDITIONS.items()})


def serious() -> str:
    """The kinds of event that need attention at once."""
    return _pairs(("kind", "why it is serious"), SERIOUS)


def probes() -> str:
    """What ``narrowgauge show arithmetic`` measures."""
    rows = [
        {"name": row.name, "measures": row.measures, "affects": row.affects, "settings": ", ".join(row.settings)}
        for row in PROBES.values()
    ]
    heads = Column("property", "name"), Column("measured", "measures")
    return _markdown(rows, *heads, **{"a difference in a run": "affects", "may change it": "settings"})


def kinds() -> str:
    """Every kind of event."""
    return _pairs(("kind", "says"), KINDS)


def checks() -> str:
    """What ``narrowgauge.check`` looks for."""
    # Imported here since it imports PyTorch, and most pages need none.
    from narrowgauge.integrations.check.table import CHECKS

    rows = [
        {
            "name": row.name,
            "severity": row.severity,
            "looks_at": row.looks_at,
            "docs": _summary(row),
            "watched": row.watched,
        }
        for row in CHECKS.values()
    ]
    heads = Column("check", "name", code=True), Column("severity", "severity")
    return _markdown(rows, *heads, **{"what it finds": "docs", "looks at": "looks_at", "needs steps": "watched"})


def _summary(row: Any) -> str:
    """The first sentence of what a check's function says of itself."""
    text: str = row.find.__doc__.split("\n")[0]
    return text.replace("``", "`").rstrip(".")


def trips(row: Detector) -> str:
    """When a detector trips, in words."""
    if row.name in ("loss-spike", "gradient-spike"):
        return f"more than {row.threshold:g} robust standard deviations above the median"
    side = "at least" if row.side == "above" else "at most"
    said = f"{side} {row.threshold:g}"
    if row.relative:
        whose = f"the lowest median of {row.window} values so far" if row.lowest else "the median of its recent values"
        said = f"{row.threshold:g} times {whose}" + (
            f", and at least {row.threshold * row.floor:g}" if row.floor else ""
        )
    elif row.window:
        said += f" over {row.window} steps"
    said += f", {row.consecutive} times in a row" if row.consecutive > 1 else ""
    said += f"; of {' and '.join(row.tensors)}" if row.tensors else ""
    return said + (f"; if *{row.condition}*" if row.condition else "")


def reasons() -> str:
    """Why two runs part: what decides it, where it acts, and what to do."""
    rows = [
        {
            "name": row.name,
            "title": row.title,
            "decided": ", ".join(f"`{name}`" for name in row.decided_by) or "no setting",
            "stages": ", ".join(row.stages),
            "size": row.size,
            "remedy": in_terms_of("trainer", row.remedy),
        }
        for row in REASONS.values()
    ]
    others = {
        "what it is": "title",
        "decided by": "decided",
        "acts at": "stages",
        "size": "size",
        "what to do": "remedy",
    }
    return _markdown(rows, Column("reason", "name", code=True), **others)


def _pairs(heads: tuple[str, str], entries: dict[str, str]) -> str:
    rows = [{"name": name, "says": says} for name, says in entries.items()]
    return _markdown(rows, Column(heads[0], "name", code=True), **{heads[1]: "says"})


def _markdown(rows: list[Row], *heads: Column, **others: str) -> str:
    return Table((*heads, *(Column(title, key) for title, key in others.items())), rows).markdown()


def causes() -> str:
    """What ``narrowgauge diagnose`` can name."""
    return cause_table().markdown()


def signs() -> str:
    """What a record shows or does not show."""
    return sign_table.sign_table().markdown()


OWN: dict[str, Callable[[], str]] = {
    "causes": causes,
    "signs": signs,
    "replay_variants": lambda: variant_table().markdown(),
    "watched": watched,
    "metrics": metrics,
    **{f"record_{kind}": partial(record, kind) for kind in schema.TABLES},
    "detectors": detectors,
    "advice": advice,
    "conditions": conditions,
    "serious": serious,
    "events": kinds,
    "checks": checks,
    "stages": lambda: _pairs(("stage", "what differs there"), STAGES),
    "reasons": reasons,
    "probes": probes,
}
"""The tables that only the documentation shows, by name."""
