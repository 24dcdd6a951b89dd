"""The report of a profile: tables and a few sentences, and a list of objects for --json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from narrowgauge.profiling.costs import KindCost, RecipeCost
from narrowgauge.spec.tables import Column, Row, Table

_SHOWN = 12


@dataclass(frozen=True)
class Loss:
    """What one cast of one layer loses.

    Args:
        cast: its slot, ``output.left`` … ``grad_weight.right``.
        operand: ``input``, ``weight`` or ``gradient``.
        sqnr_db: signal to quantization noise, decibels.
        overflow: the share of values beyond the format's largest.
        underflow: the share of nonzero values that become zero.
    """

    layer: str
    cast: str
    operand: str
    sqnr_db: float
    overflow: float
    underflow: float


@dataclass(frozen=True)
class Profile:
    """What each recipe costs a model.

    Args:
        where: the machine or the chip.
        is_predicted: from a chip's data sheet, not measured.
        multiplied: ``native`` or ``emulated``, and why, for each recipe.
        losses: of each recipe's casts, worst first; empty where they were not requested.
        notes: assumptions and warnings.
    """

    model: str
    where: str
    is_predicted: bool
    num_sequences: int
    sequence_length: int
    costs: tuple[RecipeCost, ...]
    multiplied: tuple[str, ...]
    losses: tuple[tuple[Loss, ...], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> RecipeCost:
        """The recipe with the fastest step, with its overrides."""
        return max(self.costs, key=lambda cost: cost.fastest_ratio)

    def rows(self) -> list[Row]:
        """An object for each recipe: times in seconds, memory in bytes, ratios above 1 where it is faster."""
        losses = self.losses or ((),) * len(self.costs)
        return [
            self._row(cost, support, lost)
            for cost, support, lost in zip(self.costs, self.multiplied, losses, strict=True)
        ]

    def tables(self) -> list[Table]:
        """One table of all recipes; then for each its layers and, where requested, what its casts lose."""
        tables = [Table(_SUMMARY, self.rows(), self._title)]
        tables += [_layers_table(cost) for cost in self.costs]
        losses = zip(self.costs, self.losses, strict=False)
        return [*tables, *(_losses_table(cost, lost) for cost, lost in losses)]

    def text(self) -> str:
        """The fastest recipe, and the notes."""
        best = self.best
        verdict = f"Fastest: {_step_of(best)}, {best.fastest_ratio:.2f} × {best.baseline.name}. As a recipe file:"
        if best.fastest == best.baseline.to_dict():
            verdict = f"None of these is faster here: {best.baseline.name} is the fastest. As a recipe file:"
        return "\n".join([verdict, "", _toml(best.fastest), *(f"note: {note}" for note in self.notes)])

    @property
    def _title(self) -> str:
        verb = "PREDICTED for" if self.is_predicted else "measured on"
        return f"{self.model}, {self.num_sequences} × {self.sequence_length} tokens a step, {verb} {self.where}"

    def _row(self, cost: RecipeCost, multiplied: str, losses: Sequence[Loss]) -> Row:
        return {
            "recipe": cost.recipe.name,
            "model": self.model,
            "where": self.where,
            "predicted": self.is_predicted,
            "num_sequences": self.num_sequences,
            "sequence_length": self.sequence_length,
            "yardstick": cost.baseline.name,
            "multiplied": multiplied,
            "step_ratio": cost.step_ratio,
            "step_seconds": cost.step_seconds,
            "linears_ratio": cost.linears_ratio,
            "linears_share": cost.linears_share,
            "block_factor": cost.block_factor,
            "kept_bytes": cost.memory.kept,
            "yardstick_kept_bytes": cost.memory.baseline_kept,
            "weight_cast_bytes": cost.memory.weight_casts,
            "overrides": list(cost.overrides),
            "fastest_ratio": cost.fastest_ratio,
            "fastest": cost.fastest,
            "layers": [_layer_row(layer) for layer in cost.kinds],
            "losses": [asdict(loss) for loss in losses],
            "notes": list(self.notes),
        }


def _layer_row(cost: KindCost) -> Row:
    kind = cost.kind
    return {
        "pattern": kind.pattern,
        "out_features": kind.shape.out_features,
        "in_features": kind.shape.in_features,
        "count": kind.count,
        "compute": cost.setting.compute,
        "forward_cast_seconds": cost.seconds_of(casts=True, forward=True),
        "forward_matmul_seconds": cost.seconds_of(casts=False, forward=True),
        "backward_cast_seconds": cost.seconds_of(casts=True, forward=False),
        "backward_matmul_seconds": cost.seconds_of(casts=False, forward=False),
        "parts_seconds": dict(cost.operations),
        "seconds": cost.seconds,
        "yardstick_seconds": cost.baseline_seconds,
        "ratio": cost.ratio,
        "verdict": cost.verdict,
    }


def _ratio(name: str) -> Any:
    return lambda row: f"{row[name]:.2f} ×"


def _mib(name: str) -> Any:
    return lambda row: f"{row[name] / 2**20:,.1f}"


def _ms(name: str) -> Any:
    return lambda row: f"{1e3 * row[name]:.3g}"


_SUMMARY = (
    Column("recipe", "recipe", code=True),
    Column("step", _ratio("step_ratio"), right=True),
    Column("linears", _ratio("linears_ratio"), right=True),
    Column("their share", lambda row: f"{row['linears_share']:.0%}", right=True),
    Column("faster layers only", _ratio("fastest_ratio"), right=True),
    Column("inputs kept MiB", _mib("kept_bytes"), right=True),
    Column("in the baseline", _mib("yardstick_kept_bytes"), right=True),
    Column("weight casts MiB", _mib("weight_cast_bytes"), right=True),
    Column("baseline", "yardstick", code=True),
    Column("multiplied", "multiplied"),
)
_LAYERS = (
    Column("layer", "pattern", code=True),
    Column("count", "count", right=True),
    Column("out × in", lambda row: f"{row['out_features']} × {row['in_features']}", right=True),
    Column("forward: cast ms", _ms("forward_cast_seconds"), right=True),
    Column("matmul", _ms("forward_matmul_seconds"), right=True),
    Column("backward: cast", _ms("backward_cast_seconds"), right=True),
    Column("matmul", _ms("backward_matmul_seconds"), right=True),
    Column("total", _ms("seconds"), right=True),
    Column("baseline", _ms("yardstick_seconds"), right=True),
    Column("speed-up", _ratio("ratio"), right=True),
    Column("", "verdict"),
)
_LOSSES = (
    Column("layer", "layer", code=True),
    Column("operand", "operand"),
    Column("cast", "cast"),
    Column("SQNR dB", lambda row: f"{row['sqnr_db']:.1f}", right=True),
    Column("overflow", lambda row: f"{row['overflow']:.2%}", right=True),
    Column("underflow", lambda row: f"{row['underflow']:.2%}", right=True),
)


def _layers_table(cost: RecipeCost) -> Table:
    title = f"{cost.recipe.name}: one layer of each kind, against {cost.baseline.compute.name}"
    if cost.block_factor != 1:
        title += f"; in a block narrow ones take {cost.block_factor:.2f} × the sum of their operations"
    return Table(_LAYERS, [_layer_row(layer) for layer in cost.kinds], title)


def _losses_table(cost: RecipeCost, losses: Sequence[Loss]) -> Table:
    rows = [asdict(loss) for loss in losses[:_SHOWN]]
    title = f"{cost.recipe.name}: the {len(rows)} worst of {len(losses)} casts (all with --json)"
    return Table(_LOSSES, rows, title)


def _step_of(cost: RecipeCost) -> str:
    count = len(cost.overrides)
    return cost.recipe.name + (f" with {count} kind{'s' if count > 1 else ''} of layers kept" if count else "")


def _toml(table: dict[str, object]) -> str:
    import tomli_w

    lists = {key: value for key, value in table.items() if key in ("override", "phase")}
    text = tomli_w.dumps({key: value for key, value in table.items() if key not in lists})
    entries = ((key, entry) for key, value in lists.items() if isinstance(value, list) for entry in value)
    return text + "".join(f"\n[[{key}]]\n{tomli_w.dumps(entry)}" for key, entry in entries)
