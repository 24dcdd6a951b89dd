"""What a run prints while it trains: a line now and then."""

from __future__ import annotations

from narrowgauge.runs.schema import EVAL, STEP, Row

_COLUMNS = ("loss", "tokens_per_second", "lr", "edq")


class Progress:
    """Print the rows of a run of ``steps`` steps, on rank 0, unless it is not ``is_verbose``."""

    def __init__(self, steps: int, is_verbose: bool) -> None:
        self.steps = steps
        self.is_verbose = is_verbose

    def say(self, line: str) -> None:
        if self.is_verbose:
            print(line, flush=True)

    def row(self, kind: str, row: Row) -> None:
        """Print a row that was written. What the record warns of are Python's warnings."""
        step = row["step"]
        every = max(1, min(100, self.steps // 10))
        words = ""
        if kind == "evals":
            words = EVAL["val_loss"].text(row)
        elif kind == "steps" and (step % every == 0 or step in (1, self.steps)):
            words = "  ".join(STEP[name].text(row) for name in _COLUMNS if name in row)
        if words:
            self.say(f"step {step:>6}/{self.steps}  {words}")
