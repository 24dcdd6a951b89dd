"""A step of a training loop as plain numbers: what the hooks measure, what a record holds, and what
the laws read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from narrowgauge.runs.schema import EVAL, STEP, number
from narrowgauge.spec.tables import Row

COLUMNS = STEP | EVAL
"""The columns that laws may read."""
UNNAMED = "tensor "
"""Begins what stands for the tensors of a list that its row left out."""
_TYPES = {"text": str, "names": list, "object": dict}
"""Types of values that are no numbers."""


class StepMetrics:
    """Hold the numbers of one step, or of an evaluation after it. Each of :data:`COLUMNS` is an attribute.

    What was not measured is ``None``, and its laws are silent. An empty list of tensors was measured.

    Args:
        step: optimizer steps done.
        columns: what was measured.
    """

    def __init__(self, step: int, **columns: Any) -> None:
        self.step = step
        self.columns = {name: x for name, x in columns.items() if x not in (None, "", {})}

    def __getattr__(self, name: str) -> Any:
        if name in COLUMNS:
            return self.columns.get(name)
        raise AttributeError(name)

    @classmethod
    def of(cls, row: Row) -> StepMetrics:
        """Return the step of a row of ``steps.jsonl``, of an evaluation, or of another program's log."""
        values = {}
        for name in row.keys() & COLUMNS.keys() - {"step"}:
            type_ = _TYPES.get(COLUMNS[name].type)
            if type_ is None:
                values[name] = number(row[name])
            elif isinstance(row[name], type_):
                values[name] = row[name]
        for name, count in (row.get("counts") or {}).items():
            names = values.get(name)
            if isinstance(names, list):  # its row has the first ones
                rest = range(len(names) + 1, count + 1)
                values[name] = [*names, *map(f"{UNNAMED}{{}}".format, rest)]
        return cls(row["step"], **values)


Emit = Callable[..., None]
"""Takes a reading: its kind, tensors, value, expected and bound, and its step if it is not the current."""
Law = Generator[None, StepMetrics, None]
"""Takes steps, in their order, and gives the readings of each."""


@dataclass(frozen=True, eq=False)  # a law is itself alone, and hashed in every step
class DeclaredLaw:
    """Declare what a law reads.

    Args:
        law: begins the law.
        needs: columns without which it is silent.
        also: further columns that it judges.
        least: steps with these columns before it may speak.
    """

    law: Callable[[Emit], Law]
    needs: frozenset[str]
    also: frozenset[str]
    least: int


def reads(
    needs: str = "", also: str = "", least: int = 1
) -> Callable[[Callable[..., Law]], DeclaredLaw]:
    """Declare what a law reads, in names between spaces."""
    return lambda law: DeclaredLaw(law, frozenset(needs.split()), frozenset(also.split()), least)
