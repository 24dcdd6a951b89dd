"""What all loggers share: a row as named numbers, by the tags of :mod:`narrowgauge.runs.schema`, and the run's identifier."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from narrowgauge.runs.record import DEFINITION_FILE
from narrowgauge.runs.schema import GAUGE, METRICS, Column, Row, metric_of


def numbers_of(table: dict[str, Column], row: Row) -> dict[str, float]:
    """The tagged columns of a row that have a value.

    Args:
        table: of the row, such as :data:`narrowgauge.runs.schema.STEP`.
        row: the row.
    Example:
        >>> from narrowgauge.runs.schema import EVAL
        >>> numbers_of(EVAL, {"step": 3, "val_loss": 2.5})
        {'validation/loss': 2.5}
    """
    found = {column.tag: row.get(column.name) for column in table.values() if column.tag}
    return {tag: float(value) for tag, value in found.items() if value is not None}


def gauge_numbers(row: Row) -> dict[str, float]:
    """The tagged metrics of each tensor in a row of ``gauges.jsonl``, and those of the logits.

    Example:
        >>> gauge_numbers({"step": 1, "logits": {"max": 4.0}})
        {'logits/max': 4.0}
    """
    tagged = [(table, metric) for table, metrics in METRICS.items() for metric in metrics.values() if metric.tag]
    found = {
        metric.tag.format(name): metric_of(row, table, name, metric.name)
        for table, metric in tagged
        for name in row.get(table, {})
    }
    found |= {GAUGE["logits"].tag.format(name): value for name, value in row.get("logits", {}).items()}
    return {tag: float(value) for tag, value in found.items() if value is not None}


def comparison_of(folder: Path) -> str | None:
    """The name of the comparison that a run belongs to, which loggers group it by; ``None`` for a run of its own.

    Args:
        folder: the run folder.
    """
    above = folder.resolve().parent
    return above.name if (above / DEFINITION_FILE).is_file() else None


def kept_id(folder: Path, make: Callable[[], str] = lambda: secrets.token_hex(4)) -> str:
    """The identifier of a run with a logger, made once and kept in ``run_id`` of the logger's folder.

    Args:
        folder: of the logger, in the run folder.
        make: makes it.
    """
    file = folder / "run_id"
    if not file.is_file():
        folder.mkdir(exist_ok=True)
        made = make()
        file.write_text(made)
        return made
    return file.read_text()
