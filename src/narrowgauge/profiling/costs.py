"""From the seconds of casts and matmuls to a step, to memory, and to the recipe that would be fastest.

What is not a linear layer takes the same time in every row: it is what a plain step leaves when the seconds of its linear
layers are taken away. So a row's step is that rest and the row's own linear layers, and all that must be true of their
seconds is the *difference* between two rows, taken in the same round.

Seconds come as a :data:`Table`: for each shape and way to compute it those of its nine parts, the three matmuls
(``output``, ``grad_input``, ``grad_weight``) and the six casts before them (``output.left`` … ``grad_weight.right``, as in
:class:`narrowgauge.spec.computes.Compute`). A part that a row has no need of is missing.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from narrowgauge.profiling.layer_plan import Kind, Shape, groups_of
from narrowgauge.profiling.settings import Rows, Setting, base_of, rows_of, yardstick_of
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.variants import named

# Casts of the layer's input: made once for all the layers that are given it.
SHARED = ("output.left", "grad_weight.right")
# A difference below this share is neither a gain nor a loss: two measurements of the same thing differ as much.
EVEN = 0.02


# A layer takes at least so much of its parts within a block: less is a block that was timed in a better moment.
_LEAST_FACTOR = 0.5

Parts = Mapping[str, float]
Table = Mapping[tuple[Shape, Setting], Parts]


@dataclass(frozen=True)
class Round:
    """What was timed, or predicted, at one time.

    Args:
        steps: seconds of a whole step in each recipe whose rest is taken.
        table: seconds of the parts of a linear layer.
        blocks: seconds of all the model's blocks, forward and backward; none where nothing is known of them.
    """

    steps: Mapping[Recipe, float]
    table: Table
    blocks: Mapping[Recipe, float] = field(default_factory=dict)


@dataclass(frozen=True)
class KindCost:
    """One kind of layer in one recipe; seconds are of one layer, forward and backward.

    Args:
        kind: which.
        setting: how it is computed.
        parts: its seconds; casts of the input are its share of them.
        seconds: in a block; what it takes beyond its parts counted in.
        plain_seconds: in the yardstick.
        ratio: the yardstick's seconds over its own: above 1 it gains.
    """

    kind: Kind
    setting: Setting
    parts: Parts
    seconds: float
    plain_seconds: float
    ratio: float

    @property
    def verdict(self) -> str:
        """``gains``, ``loses`` or ``even``; ``kept`` where the recipe leaves it as it is."""
        if self.setting.is_plain:
            return "kept"
        return "gains" if self.ratio > 1 + EVEN else "loses" if self.ratio < 1 - EVEN else "even"

    def seconds_of(self, *, casts: bool, forward: bool) -> float:
        """The casts or the matmuls of one direction."""
        return sum(
            s for part, s in self.parts.items() if ("." in part) == casts and part.startswith("output") == forward
        )


@dataclass(frozen=True)
class Memory:
    """Bytes that linear layers hold.

    Args:
        kept, plain_kept: of inputs kept for backward, and the same in the yardstick.
        weight_casts: of casts of weights, where they are kept for the micro-batches of a step.
    """

    kept: float
    plain_kept: float
    weight_casts: float


@dataclass(frozen=True)
class RecipeCost:
    """What one recipe costs.

    Args:
        recipe: as asked.
        yardstick: the recipe it is compared with.
        kinds: its linear layers.
        linears_ratio: the yardstick's seconds in linear layers over its own.
        step_ratio: the yardstick's step over its own.
        step_seconds: its own step.
        linears_share: of the yardstick's step, what linear layers take.
        block_factor: how much longer its narrow layers take within a block than their parts say.
        memory: of its linear layers.
        overrides: patterns of layers that would be faster plain.
        fastest_ratio: ``step_ratio`` with them so.
    """

    recipe: Recipe
    yardstick: Recipe
    kinds: tuple[KindCost, ...]
    linears_ratio: float
    step_ratio: float
    step_seconds: float
    linears_share: float
    block_factor: float
    memory: Memory
    overrides: tuple[str, ...]
    fastest_ratio: float

    @property
    def fastest(self) -> dict[str, object]:
        """The recipe with the overrides, as a table that :func:`narrowgauge.spec.notation.parse_table` reads."""
        given = self.recipe.to_dict()
        narrow = {cost.kind.pattern for cost in self.kinds if not cost.setting.is_plain}
        if narrow and narrow == set(self.overrides):
            return base_of(self.recipe).to_dict()
        added = [{"pattern": pattern, "compute": self.recipe.dtype} for pattern in self.overrides]
        return {**given, "override": [*given.get("override", []), *added]} if added else given


def linears_seconds(rows: Rows, table: Table) -> float:
    """Seconds of all linear layers, forward and backward."""
    return sum(_group_seconds(group, rows, table) * group[0].count for group in groups_of(list(rows)))


def _group_seconds(group: Sequence[Kind], rows: Rows, table: Table) -> float:
    """One layer of each kind of a group; each row's casts of their input once."""
    own = sum(s for kind in group for part, s in table[kind.shape, rows[kind]].items() if part not in SHARED)
    firsts = {rows[kind]: kind.shape for kind in reversed(group)}
    return own + sum(table[shape, row].get(part, 0.0) for row, shape in firsts.items() for part in SHARED)


def kind_parts(kind: Kind, rows: Rows, table: Table) -> dict[str, float]:
    """The seconds of one kind's parts, of the casts of its input its share."""
    sharing = sum(other.group == kind.group and rows[other] == rows[kind] for other in rows)
    parts = table[kind.shape, rows[kind]]
    return {part: seconds / (sharing if part in SHARED else 1) for part, seconds in parts.items()}


def step_seconds(recipe: Recipe, rows: Rows, round: Round) -> float:
    """A step with its linear layers in the given rows: the rest of the base's step, and they."""
    base = base_of(recipe)
    rest = round.steps[base] - linears_seconds(rows_of(rows, base), round.table)
    return max(rest, 0.0) + linears_seconds(rows, round.table)


def block_factor(recipe: Recipe, rows: Rows, round: Round) -> float:
    """How much longer narrow layers take within a block than their parts say; 1 where no block was timed.

    What they take beyond their parts is the difference between the blocks less the difference between the parts.
    """
    base = base_of(recipe)
    plain = rows_of(rows, base)
    narrow = [kind for kind in rows if rows[kind] != plain[kind]]
    if not narrow or recipe not in round.blocks:
        return 1.0
    parts = linears_seconds({kind: rows[kind] for kind in narrow}, round.table)
    beside = linears_seconds({kind: plain[kind] for kind in narrow}, round.table)
    return max((beside + round.blocks[recipe] - round.blocks[base]) / parts, _LEAST_FACTOR)


def in_blocks(recipe: Recipe, rows: Rows, round: Round) -> Round:
    """The round with the parts of narrow layers as long as they are within a block."""
    plain, factor = rows_of(rows, base_of(recipe)), block_factor(recipe, rows, round)
    settings = {setting for kind, setting in rows.items() if setting != plain[kind]}
    table = {
        (shape, setting): {part: s * (factor if setting in settings else 1) for part, s in own.items()}
        for (shape, setting), own in round.table.items()
    }
    return dataclasses.replace(round, table=table)


def fastest_rows(rows: Rows, table: Table) -> dict[Kind, Setting]:
    """The same with those kinds plain that are faster so: of the best choices the one that changes least.

    Kinds that share an input are chosen for together, since the first narrow one pays for the cast.
    """
    chosen: dict[Kind, Setting] = {}
    for group in groups_of(list(rows)):
        own_or_plain = [dict.fromkeys((rows[kind], rows[kind]._replace(row=rows[kind].stream))) for kind in group]
        options = [dict(zip(group, option, strict=True)) for option in itertools.product(*own_or_plain)]
        seconds = [_group_seconds(group, option, table) for option in options]
        changes = [sum(option[kind] != rows[kind] for kind in group) for option in options]
        fit = [place for place, taken in enumerate(seconds) if taken <= min(seconds) * (1 + EVEN)]
        chosen |= options[min(fit, key=lambda place: (changes[place], seconds[place]))]
    return chosen


def memory_of(rows: Rows, plain: Rows, tokens: int, weight_bytes: Mapping[Setting, float]) -> Memory:
    """What the linear layers hold.

    Args:
        rows, plain: how each kind is computed, and how in the yardstick.
        tokens: of a micro-batch.
        weight_bytes: of all casts of a weight, for each of its elements.
    """

    def kept(settings: Rows) -> float:
        total = 0.0
        for group in groups_of(list(settings)):
            of_each = sum(named(setting.row).kept_bytes for setting in {settings[kind] for kind in group})
            total += group[0].count * tokens * group[0].shape.in_features * of_each
        return total

    casts = sum(weight_bytes[setting] * kind.shape.num_weights * kind.count for kind, setting in rows.items())
    return Memory(kept(rows), kept(plain), casts)


def cost_of(
    recipe: Recipe, kinds: Sequence[Kind], rounds: Sequence[Round], tokens: int, weight_bytes: Mapping[Setting, float]
) -> RecipeCost:
    """What a recipe costs, from rounds; each ratio is taken within a round, and of those the median.

    Args:
        recipe: which.
        kinds: the model's linear layers.
        rounds: what was timed.
        tokens: of a micro-batch.
        weight_bytes: see :func:`memory_of`.
    """
    yardstick = yardstick_of(recipe)
    rows, plain = rows_of(kinds, recipe), rows_of(kinds, yardstick)
    apart, factor = median_table(rounds), statistics.median(block_factor(recipe, rows, round) for round in rounds)
    rounds = [in_blocks(recipe, rows, round) for round in rounds]
    table = median_table(rounds)
    fastest = fastest_rows(rows, table)

    def over_rounds(ratio: Callable[[Round], float]) -> float:
        return statistics.median(map(ratio, rounds))

    def seconds(kind: Kind, settings: Rows, table: Table) -> float:
        return sum(kind_parts(kind, settings, table).values())

    def kind_cost(kind: Kind) -> KindCost:
        ratio = over_rounds(lambda r: seconds(kind, plain, r.table) / seconds(kind, rows, r.table))
        own, before = seconds(kind, rows, table), seconds(kind, plain, table)
        return KindCost(kind, rows[kind], kind_parts(kind, rows, apart), own, before, ratio)

    return RecipeCost(
        recipe=recipe,
        yardstick=yardstick,
        kinds=tuple(map(kind_cost, kinds)),
        linears_ratio=over_rounds(lambda r: linears_seconds(plain, r.table) / linears_seconds(rows, r.table)),
        step_ratio=over_rounds(lambda r: r.steps[yardstick] / step_seconds(recipe, rows, r)),
        step_seconds=over_rounds(lambda r: step_seconds(recipe, rows, r)),
        linears_share=over_rounds(lambda r: linears_seconds(plain, r.table) / r.steps[yardstick]),
        block_factor=factor,
        memory=memory_of(rows, plain, tokens, weight_bytes),
        overrides=tuple(kind.pattern for kind in kinds if fastest[kind] != rows[kind]),
        fastest_ratio=over_rounds(lambda r: r.steps[yardstick] / step_seconds(recipe, fastest, r)),
    )


def median_table(rounds: Sequence[Round]) -> dict[tuple[Shape, Setting], dict[str, float]]:
    """The median seconds of each part over all rounds."""
    return {
        key: {part: statistics.median(r.table[key][part] for r in rounds) for part in parts}
        for key, parts in rounds[0].table.items()
    }
