"""Where a replay parts from the record of its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HELD = "held:"
"""What the name of a tensor begins with that the run itself found changed between two steps."""


@dataclass(frozen=True, slots=True)
class Departure:
    """Where a replay parts from the record.

    Args:
        step: of the run.
        what: the column of ``steps.jsonl``, or the tensor; ``held:NAME``: the run itself found it changed between two steps.
        recorded, replayed: the two values; of a tensor its norms.
    """

    step: int
    what: str
    recorded: Any
    replayed: Any

    @property
    def message(self) -> str:
        """One sentence."""
        if self.what.startswith(HELD):
            name = self.what.removeprefix(HELD)
            return (
                f"the run found {name} changed between steps {self.step - 1} and {self.step}, which no replay repeats"
            )
        return f"the replay parts from the record at step {self.step}: {self.what} is {self.replayed} and was {self.recorded}"
