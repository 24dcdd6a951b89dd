"""The tables of causes and of signs as rows, for the terminal, JSON and the documentation."""

from __future__ import annotations

from narrowgauge.analysis.diagnosis.causes import CAUSES, Cause
from narrowgauge.analysis.diagnosis.signs import SIGNS
from narrowgauge.spec.tables import Column, Row, Table, name_columns, number_columns, text_columns

_WORDS = {"module": "MODULE", "tensor": "TENSOR", "cure": "STORAGE", "safer": "COMPUTE"}


def cause_rows() -> list[Row]:
    """The table of causes as plain values.

    Example:
        >>> [row["title"] for row in cause_rows() if row["name"] == "dead-layer"]
        ['a layer learns nothing']
    """
    return [_cause_row(cause) for cause in CAUSES.values()]


def _cause_row(cause: Cause) -> Row:
    return {
        "name": cause.name,
        "title": cause.title,
        "effect": cause.effect,
        "predicts": dict(sorted(cause.predicts.items(), key=lambda item: -item[1])),
        "remedy": cause.remedy.format(**_WORDS),
        "source": cause.source,
        "prior": cause.prior,
        "replay": cause.replay,
        "measure": cause.measure,
        "required": list(cause.required),
        "notes": list(cause.notes),
    }


def cause_table() -> Table:
    """The table of causes with the columns to print."""
    columns = (
        *name_columns(cause="name"),
        *text_columns(what_it_does="effect"),
        Column("signs, the likeliest first", _signs),
        *text_columns(what_to_do="remedy", source="source"),
    )
    return Table(columns, cause_rows())


def _signs(row: Row) -> str:
    if row["predicts"]:
        return ", ".join(f"{sign} {chance:.0%}" for sign, chance in row["predicts"].items())
    return f"none of a record; told by: {row['measure']}" if row["measure"] else ""


def sign_rows() -> list[Row]:
    """The table of signs as plain values."""
    return [
        {
            "name": sign.name,
            "meaning": sign.meaning,
            "reads": list(sign.reads),
            "base_rate": sign.base_rate,
            "needs": sign.needs,
            "given": sign.given,
        }
        for sign in SIGNS.values()
    ]


def sign_table() -> Table:
    """The table of signs with the columns to print."""
    columns = (
        *name_columns(sign="name"),
        *text_columns(what_it_says="meaning", reads="reads"),
        *number_columns(of_healthy_runs="base_rate"),
        *text_columns(among_runs_with="given", recorded_by="needs"),
    )
    return Table(columns, sign_rows())
