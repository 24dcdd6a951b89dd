"""What a run shows while it trains: a line now and then."""

from __future__ import annotations

from narrowgauge.runs.schema import EVAL, STEP, Row
from narrowgauge.trainer.settings import Settings

_COLUMNS = ("loss", "tokens_per_second", "lr", "edq")


class Progress:
    """Show the rows of a run, on rank 0, unless it is not ``is_verbose``."""

    def __init__(self, settings: Settings, is_verbose: bool) -> None:
        self.settings = settings
        self.is_verbose = is_verbose

    def say(self, line: str) -> None:
        if self.is_verbose:
            print(line, flush=True)

    def row(self, kind: str, row: Row) -> None:
        """Show a row that was written. What the record warns of are Python's warnings."""
        step = row["step"]
        steps = self.settings.steps
        is_due = step % max(1, min(100, steps // 10)) == 0 or step in (1, steps)
        words = ""
        if kind == "evals":
            words = EVAL["val_loss"].text(row)
        elif kind == "steps" and is_due:
            words = "  ".join(STEP[name].text(row) for name in _COLUMNS if name in row)
        if words:
            self.say(f"step {step:>6}/{steps}  {words}")
