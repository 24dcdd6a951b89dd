"""The board's page, ``board.md``, and tables of it elsewhere: what each format costs, from the records in ``board.jsonl``.

MkDocs calls :func:`on_page_markdown` for every page, which replaces ``<!-- board: NAME -->`` by the table of that name. The
figures lie in ``images/costs.svg`` and ``costs-dark.svg``; ``./dev bench board`` writes them with the records.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from _board_costs import Cost, cell_name, costs, source_of
from _board_methods import METHODS, Logged, Method
from _board_records import MASTER, RULES, Cell, read

from narrowgauge.spec.tables import Column, Row, Table

MARK = re.compile(r"^<!-- board: (\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_context: object) -> str:
    """Fill in the tables of one page; MkDocs calls this for every page."""
    return MARK.sub(lambda found: TABLES[found.group(1)](), markdown)


def by_method() -> str:
    """A line for each published method: its rows and, below them in the same cells, ours."""
    rows = [row for method in METHODS for row in method.rows if isinstance(row, str)]
    found = {cost.row: cost for cost in costs(read(), rows=dict.fromkeys(rows))}
    heads = ("method", "source", "row", "B/param", "nats above baseline", "baseline", "stall error", "verdict", "more")
    return Table(
        tuple(Column(head, head) for head in heads), [_of_method(method, found) for method in METHODS]
    ).markdown()


def _of_method(method: Method, found: Mapping[str, Cost]) -> Row:
    groups = (("against: ", method.against), ("", method.published), ("ours: ", method.ours))
    entries = [_entry(before, row, found) for before, rows in groups for row in rows]
    cells = {head: "<br>".join(entry[head] for entry in entries) for head in entries[0]}
    return {"method": method.name, "source": method.source, **cells, "more": method.more}


def _entry(before: str, row: str | Logged, found: Mapping[str, Cost]) -> dict[str, str]:
    """A row of a method, with the figures of the records or of the log."""
    if isinstance(row, Logged):
        name, baseline = row.row, row.baseline
        figures = {"bytes": f"{row.size} {row.size_of}", "all": row.loss, "stall": "", "verdict": row.verdict}
    else:
        name, baseline, figures = row, found[row].baseline, {**row_of(found[row]), "verdict": found[row].word}
    cells = {
        "row": f"{before}`{name}`",
        "B/param": figures["bytes"],
        "nats above baseline": figures["all"],
        "baseline": baseline,
        "stall error": figures["stall"],
        "verdict": figures["verdict"],
    }
    return {head: cell or "–" for head, cell in cells.items()}


def over_master() -> str:
    """Rows that are compared with ``master``."""
    return _table([cost for cost in costs(read()) if cost.baseline == MASTER])


def over_word() -> str:
    """Other computes over ``word``, compared with bfloat16 over ``word``."""
    return _table([cost for cost in costs(read()) if cost.baseline != MASTER])


def rules() -> str:
    """What every run has in common."""
    rows = [("text", RULES.text), ("beta2", _listed(RULES.betas)), ("peak rates", _listed(RULES.lrs))]
    rows += [("seeds", _listed(RULES.seeds)), ("difference to be resolved", f"{RULES.resolve:g} nats")]
    rows += [(name.replace("_", " "), str(value)) for name, value in RULES.settings.items()]
    rows += [("hash of the settings", f"`{RULES.settings_hash}`")]
    rows += [(f"tokens of seed {seed}", f"`{found}`") for seed, found in RULES.tokens.items()]
    return Table(
        (Column("rule", "name"), Column("value", "value")), [{"name": name, "value": value} for name, value in rows]
    ).markdown()


def by_cell() -> str:
    """The differences in each cell, of the rows that have runs; of baselines their own losses, in brackets."""
    found = [cost for cost in costs(read()) if cost.runs]
    return _by_cell(found) if found else "No run is recorded yet."


def collage() -> str:
    """Collage, and storages of as many bytes or fewer, in each cell: a table of ``ideas/range-of-storages.md``."""
    return _by_cell(costs(read(), rows=("collage-light", "collage-plus", "split", "word")))


def _by_cell(found: Sequence[Cost]) -> str:
    heads = [Column("row", "row", code=True), *(Column(cell_name(cell), cell_name(cell)) for cell in RULES.cells)]
    rows = [{"row": cost.row, **{cell_name(cell): _in_cell(cost, cell) for cell in RULES.cells}} for cost in found]
    return Table(tuple(heads), rows).markdown()


def _in_cell(cost: Cost, cell: Cell) -> str:
    difference, own = cost.of_cell(cell), [run.loss for run in cost.runs if run.cell == cell]
    if cost.is_baseline and own:
        return f"({statistics.fmean(own):.4f})"
    return "–" if difference is None else difference.text


def _table(found: Sequence[Cost]) -> str:
    heads = [
        Column("row", "row", code=True),
        Column("B/param", "bytes"),
        Column(f"nats above {found[0].baseline}", "all"),
    ]
    if found[0].baseline == MASTER:  # computes have their storage's
        heads.append(Column("stall error", "stall"))
    heads += [Column("verdict", "verdict"), Column("source", "source")]
    return Table(tuple(heads), [row_of(cost) for cost in found]).markdown()


def row_of(cost: Cost) -> Row:
    """A row of the page."""
    return {
        "row": cost.row,
        "bytes": f"{cost.bytes_per_param:.2f}",
        "all": "–" if cost.over_all is None else cost.over_all.text,
        "stall": "–" if cost.stall is None else f"{float(cost.stall.error):.3f}",
        "verdict": cost.verdict,
        "source": source_of(cost.row),
    }


def _listed(values: Sequence[object]) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


TABLES: dict[str, Callable[[], str]] = {
    "by_method": by_method,
    "over_master": over_master,
    "over_word": over_word,
    "by_cell": by_cell,
    "collage": collage,
    "rules": rules,
}
"""The tables of the page, by name."""
