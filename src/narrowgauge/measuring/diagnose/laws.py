"""Laws of a run: generators that take its steps, and tell what is beyond a bound.

Each remembers what it must in its own variables. The same laws read a running loop and the rows of a
record. A count over the run gives its fraction of the steps in every step, and the newest reading counts.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.measuring.diagnose import gradient_laws, loss_laws, update_laws
from narrowgauge.measuring.diagnose.step_metrics import COLUMNS, DeclaredLaw, StepMetrics
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Reading, failure_of, measured

TWICE = 2.0
"""Report a fault again when it is so many times as far beyond its bound."""
RULES = (
    gradient_laws.nonfinite, update_laws.audits, update_laws.lost_updates, loss_laws.skipped, loss_laws.loss_scale,
    gradient_laws.zero_gradients, gradient_laws.missing_gradients, gradient_laws.gradients_kept, gradient_laws.clip_norm,
    gradient_laws.ranks, gradient_laws.same_data, gradient_laws.zero_rate, gradient_laws.jump, loss_laws.spikes,
    loss_laws.throughput, loss_laws.idle_device,
)  # fmt: skip
"""Every law of a run."""


class Laws:
    """Read the steps of a run by every law.

    Args:
        ignore: kinds of readings that are intended.
        steps: earlier steps of the same run.
        say: called with an error in a law, after which no law reads; without it the error is raised.

    Attributes:
        columns: that were in a step.
        num_rows: of steps, without evaluations.
        usual: counts of the newest step that are below their bound: a loop may mean them.

    Example:
        >>> laws = Laws()
        >>> [reading.what for reading in laws.read(StepMetrics(1, arrived=3.0, limit=1.0))]
        ['clip-norm']
        >>> [reading.what for reading in laws.fresh(StepMetrics(2, arrived=3.0, limit=1.0))]
        ['clip-norm']
        >>> laws.fresh(StepMetrics(3, arrived=3.0, limit=1.0))
        []
    """

    def __init__(
        self,
        ignore: Iterable[str] = (),
        steps: Iterable[StepMetrics] = (),
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.ignore = frozenset(ignore)
        for name in self.ignore:
            if name not in KINDS:
                raise RecipeError(
                    f"Cannot ignore '{name}' because no kind of reading has this name.",
                    suggestion(name, KINDS) or "Try narrowgauge show checks, which lists them.",
                )
        self._say = say
        self._step = 0
        self._readings: list[Reading] = []
        self.usual: list[Reading] = []
        self._laws = [rule.law(self._emit) for rule in RULES]
        self.columns: set[str] = set()
        self.num_rows = 0
        self._counts: Counter[tuple[DeclaredLaw, str]] = Counter()
        self._reported: dict[tuple[str, ...], float] = {}
        for law in self._laws:
            next(law)
        for step in steps:
            self.fresh(step)

    def _emit(
        self, what: str, *numbers: Any, step: int = 0, stage: str = "", is_usual: bool = False
    ) -> None:
        """Take a reading of a law, of the current step if no other is named."""
        if what not in self.ignore:
            reading = measured(what, *numbers, step=step or self._step, stage=stage)
            (self.usual if is_usual else self._readings).append(reading)

    def read(self, step: StepMetrics) -> list[Reading]:
        """Return all readings of a step, which follows those before."""
        self._step = step.step
        self._readings = []
        self.usual = []
        try:
            for law in self._laws:
                law.send(step)
            self._count(step)
        except Exception as error:
            if self._say is None:
                raise
            self._laws = []
            self._say(failure_of("the laws", error))
        return self._readings

    def _count(self, step: StepMetrics) -> None:
        """Count the columns that each law could judge in a step."""
        columns = step.columns.keys()
        self.columns |= columns
        self.num_rows += columns - {"tokens"} != {"val_loss"}
        for rule in RULES:
            if rule.needs <= columns:
                for name in (rule.needs | rule.also) & columns:
                    self._counts[rule, name] += 1

    def looked_at(self) -> Counter[str]:
        """Return the rows of the areas whose columns were there, and that a law with enough of their rows
        has read.
        """
        areas: Counter[str] = Counter()
        for (rule, name), count in self._counts.items():
            if count >= rule.least:
                area = COLUMNS[name].area
                areas[area] = max(areas[area], count)
        return areas

    def fresh(self, step: StepMetrics) -> list[Reading]:
        """Return what is new in a step: the first reading of a kind at a stage, and one that is twice
        as far beyond its bound.
        """
        new = []
        for reading in self.read(step):
            key = reading.what, reading.stage
            if reading.excess > TWICE * self._reported.get(key, -1.0):
                self._reported[key] = reading.excess
                new.append(reading)
        return new
