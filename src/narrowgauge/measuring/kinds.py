"""Kinds of readings: what each number is, its bound, the bound's source, and the one sentence
that is printed.

``data/kinds.toml`` has a row for each kind. ``narrowgauge show checks`` prints all rows.
"""

from dataclasses import asdict, dataclass

from narrowgauge.spec.tables import Table
from narrowgauge.spec.toml import load_data

SEVERITIES = ("error", "warning")
"""How serious a reading is.

Error: training computes something else than it says, or changes nothing. Warning: something is lost
that need not be.
"""


@dataclass(frozen=True, slots=True)
class ReadingKind:
    """Describe one kind of reading.

    Args:
        by: command or call that measures it.
        stage: one of :data:`narrowgauge.measuring.reading.STAGES`.
        value: meaning of the number.
        bound: of the value, or of its distance to the expected value.
        text: the sentence of the kind. Its holes are ``value``, ``expected`` and ``bound``.
        source: source of the bound.
        severity: one of :data:`SEVERITIES`.
        over: ``"run"`` for a count over the run: the newest reading counts.
    """

    name: str
    by: str
    stage: str
    value: str
    bound: float
    text: str
    source: str
    severity: str = "error"
    over: str = "step"


KINDS = {name: ReadingKind(name, **row) for name, row in load_data("kinds", "measuring").items()}


def kind_table() -> Table:
    """Return the table that ``narrowgauge show checks`` prints."""
    return Table(
        [asdict(kind) for kind in KINDS.values()],
        {"reading": "name", "measured by": "by", "bound": "bound", "value": "value"},
    )
