"""Kinds of readings: a table with the measured value, its bound, the bound's source, and the
advice.

``data/kinds.toml`` has a row for each number. ``narrowgauge show checks`` prints all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.measuring.kinds import KINDS as RUN_KINDS
from narrowgauge.spec.tables import Table, name_columns, number_columns, text_columns
from narrowgauge.spec.toml import load_data


@dataclass(frozen=True, slots=True)
class Kind:
    """Describe one kind of reading.

    Args:
        by: command or call that measures it.
        stage: one of :data:`narrowgauge.analysis.reading.STAGES`.
        value: meaning of the number.
        bound: of the value, or of its distance to the expected value.
        advice: a template for the measured values.
        source: source of the bound.
        side: where the limit is left, as of :class:`~narrowgauge.analysis.reading.Reading`.
        cases: what differs where the same is measured elsewhere, or by another number, by name.
    """

    name: str
    by: str
    stage: str
    value: str
    bound: float
    advice: str
    source: str
    severity: str = "error"
    side: str = "above"
    cases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def case(self, name: str) -> Kind:
        """Return the kind as it is measured in one of its cases."""
        return replace(self, cases={}, **self.cases[name])

    def reading(
        self,
        tensor: str = "",
        value: float | None = None,
        expected: float | None = None,
        bound: float | None = None,
        step: int = 0,
        **values: Any,
    ) -> Reading:
        """Return a reading of this kind; ``values`` fill the advice."""
        bound = self.bound if bound is None else bound
        advice = self.advice.format(value=value, expected=expected, bound=bound, **values)
        return Reading(
            step, self.stage, tensor, self.name, value, expected, bound, advice, self.severity,
            self.side,
        )  # fmt: skip

    def of(self, names: Collection[str], step: int = 0, **values: Any) -> Iterator[Reading]:
        """Yield a reading of the number of tensors, where none is expected; nothing without any."""
        if names:
            yield self.reading(of_all(names), len(names), 0, step=step, **values)


KINDS: dict[str, Kind] = {
    name: Kind(name, **row) for name, row in load_data("kinds", "analysis").items()
}


def kind_table() -> Table:
    """Return the table that ``narrowgauge show checks`` prints."""
    columns = (
        *name_columns(reading="name"), *text_columns(measured_by="by", value="value"), *number_columns(bound="bound"),
        *text_columns(source_of_the_bound="source"),
    )  # fmt: skip
    rows = []
    for kind in KINDS.values():
        rows.append(asdict(kind))
        rows += [asdict(kind.case(name)) for name in kind.cases]
    rows += [asdict(kind) for kind in RUN_KINDS.values()]
    return Table(columns, rows)
