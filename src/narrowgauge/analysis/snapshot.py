"""The snapshot of a step: plain numbers by name, which the laws read.

A running loop hands its snapshots to the laws, and writes them to its run folder. The diagnosis
makes the same snapshots of the rows of a record. A row of ``steps.jsonl``, of ``gauges.jsonl`` or of
another program's log is a snapshot with fewer numbers. Nothing here knows a model or a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from narrowgauge.analysis.columns import rows_of
from narrowgauge.measuring.settings import recipe_of
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import METRICS, Row, gauge_metrics, number, step_of
from narrowgauge.spec.recipes import Recipe

_SAMPLED = frozenset({1, 2, 3, 5, 8, 13, 21, 34, 55, 89})
_EVERY = 100
"""Sampled steps at first, and steps between later ones."""


def is_sampled(step: int) -> bool:
    """Return whether a step is repeated: 1, 2, 3, 5, 8, 13 …, and every hundredth.

    Example:
        >>> [step for step in range(301) if is_sampled(step)]
        [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 100, 200, 300]
    """
    return step in _SAMPLED or (step > 0 and step % _EVERY == 0)


@dataclass(frozen=True)
class Facts:
    """Hold what is the same in every step of a loop; the table ``watch`` of ``run.toml``.

    Args:
        vocabulary: number of tokens; 0 if it is not known.
        limit: declared limit of the gradients' norm.
        is_whole: this rank holds all gradients.
        epsilon: largest machine epsilon of the weights.
        mode_dependent: what acts in training mode alone, in words; empty if nothing does.
        ignored: kinds of readings that are intended.
        rates: the learning rate of each group before the first step and its schedule.
        storage, compute: names of a storage that keeps updates, and of a compute with more range.
    """

    num_optimizers: int = 1
    num_ranks: int = 1
    vocabulary: int = 0
    limit: float | None = None
    is_whole: bool = True
    epsilon: float = 0.0
    mode_dependent: str = ""
    ignored: tuple[str, ...] = ()
    rates: dict[str, float] = field(default_factory=dict)
    storage: str = "word"
    compute: str = "bfloat16"

    @classmethod
    def of_run(cls, run: Run) -> Facts:
        """Return the facts that a record holds."""
        table = run.run.get("watch")
        if not isinstance(table, dict):
            return cls().advised_for(recipe_of(run))
        values = {name: table[name] for name in _FACTS if name in table}
        values["ignored"] = tuple(values.get("ignored", ()))
        return cls(**values)

    def advised_for(self, recipe: Recipe | None) -> Facts:
        """Return the facts with the storage and the compute that the advice for a recipe names."""
        if recipe is None:
            return self
        compute = recipe.compute.fallback
        return replace(self, storage=recipe.storage.fallback, compute=compute)

    def table(self) -> Row:
        """Return the facts as a table of ``run.toml``."""
        return asdict(self)


_FACTS = asdict(Facts())


Tables = dict[str, dict[str, dict[str, float | None]]]
"""Metrics by table, tensor and name, of a row of ``gauges.jsonl``."""


@dataclass
class Snapshot:
    """Hold numbers of one step, as ``data/columns.toml`` describes them under ``snapshots``.

    Each is ``None`` or empty where it was not taken, and its laws are silent.
    """

    step: int
    at_row: int = 0
    modes: list[bool] = field(default_factory=list)
    evaluations: list[bool] = field(default_factory=list)
    is_evaluated: bool = False
    generator: str = ""
    num_backward: int = 0
    num_cleared: int = 0
    num_equal: int = 0
    num_dropping: int = 0
    norm: float | None = None
    whole_norm: float | None = None
    first: list[str] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    bad: str = ""
    num_bad: int = 0
    norms: dict[str, float] = field(default_factory=dict)
    bad_output: str = ""
    bad_weight: str = ""
    kept: list[str] = field(default_factory=list)
    clip: float = 1.0
    is_skipped: bool | None = None
    is_repeated: bool = False
    is_written: bool = False
    is_swapped: bool = False
    is_resumed: bool = False
    is_game: bool = False
    loss: float | None = None
    unclipped: float | None = None
    loss_scale: float | None = None
    rank_losses: list[float] = field(default_factory=list)
    alike: str = ""
    ranks_apart: dict[str, list[float]] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    drifting: list[str] | None = None
    frozen: list[str] = field(default_factory=list)
    frozen_norms: list[str] | None = None
    weights: dict[str, str] = field(default_factory=dict)
    untrained: list[str] = field(default_factory=list)
    twice: list[list[str]] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    shares: dict[str, list[Any]] = field(default_factory=dict)
    averages: dict[str, list[Any]] = field(default_factory=dict)
    count: float | None = None
    tables: Tables = field(default_factory=dict)

    @property
    def is_told(self) -> bool:
        """Return whether it holds what the loop, or a log, tells of a step."""
        told = (self.loss, self.unclipped, self.loss_scale)
        return any(value is not None for value in told)

    @property
    def arrived(self) -> float:
        """Return the norm of all gradients that reach the update."""
        norm = self.norm if self.whole_norm is None else self.whole_norm
        return (norm or 0.0) * self.clip

    def row(self) -> Row:
        """Return the row of ``snapshots.jsonl``, without what was not taken."""
        row: Row = {"step": self.step}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                row[name] = value
        return row

    @classmethod
    def of_row(cls, row: Row) -> Snapshot:
        """Return the snapshot of a row of ``snapshots.jsonl``, which may lack fields."""
        values = {name: row[name] for name in _DEFAULTS if row.get(name) is not None}
        return cls(step_of(row), **values)

    @classmethod
    def of_step(cls, row: Row) -> Snapshot:
        """Return the snapshot of a row of ``steps.jsonl``, or of another program's log."""
        skipped = row.get("skipped")
        audit = {name: number(row[name]) for name in METRICS["updates"] if name in row}
        tables = {"updates": {"": audit}} if audit else {}
        return cls(
            step_of(row),
            loss=number(row.get("loss")),
            unclipped=number(row.get("grad_norm")),
            loss_scale=number(row.get("loss_scale")),
            is_skipped=None if skipped is None else bool(skipped),
            tables=tables,
        )

    @classmethod
    def of_gauges(cls, row: Row) -> Snapshot:
        """Return the snapshot of a row of ``gauges.jsonl``."""
        tables: Tables = {}
        for table, name, metrics in gauge_metrics(row):
            tables.setdefault(table, {})[name] = metrics
        return cls(step_of(row), tables=tables)


MOVED = "moved"
AT_ZERO = "rate 0"
_DEFAULTS = asdict(Snapshot(0))
del _DEFAULTS["step"]


def snapshots_of(run: Run) -> Iterator[Snapshot]:
    """Yield the snapshots that a record holds, in the order of their steps."""
    snapshots = [Snapshot.of_row(row) for row in rows_of(run, "snapshots")]
    snapshots += [Snapshot.of_step(row) for row in run.steps]
    snapshots += [Snapshot.of_gauges(row) for row in rows_of(run, "gauges")]
    yield from sorted(snapshots, key=lambda now: now.at_row or now.step)


def shortened(x: float) -> float:
    """Return a number with seven digits: a record of float32 numbers needs no more.

    Example:
        >>> shortened(0.1234567890123), shortened(float("inf"))
        (0.1234568, inf)
    """
    return float(f"{x:.7g}")
