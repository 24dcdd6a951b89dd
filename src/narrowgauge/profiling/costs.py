"""From the seconds of casts and matmuls to a step, to memory, and to the fastest recipe.

Everything except linear layers takes the same time in every compute: a plain step minus its linear layers. So a narrow step is
that rest plus its own linear layers, and only the *difference* between two computes, timed in the same round, must be right.

Seconds come as a :data:`Table`: for each shape and setting those of its operations, the three matmuls (``output``,
``grad_input``, ``grad_weight``) and up to six casts before them (the slots of :mod:`narrowgauge.spec.computes`). A cast that a
compute does not make is missing.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from narrowgauge.planner.time.roofline import Setting, Shape
from narrowgauge.profiling.layer_plan import Kind, Settings, baseline_of, groups_of, plain_recipe, settings_of
from narrowgauge.spec.computes import SLOTS, named
from narrowgauge.spec.recipes import Recipe

# Casts of the layer's input: made once for all layers that get the same input.
SHARED = tuple(name for name, slot in SLOTS.items() if slot.tensor == "input")
# A smaller relative difference is neither a gain nor a loss: repeated measurements differ as much.
EVEN = 0.02

# In a block a layer takes at least this share of its operations: a smaller one means that the machine was faster meanwhile.
_LEAST_FACTOR = 0.5

Seconds = Mapping[str, float]
Table = Mapping[tuple[Shape, Setting], Seconds]


@dataclass(frozen=True)
class Round:
    """Seconds that were timed in one round, or predicted.

    Args:
        steps: of a whole step of each plain recipe and baseline.
        blocks: of all the model's blocks, forward and backward, by recipe; empty where they were not timed.
    """

    steps: Mapping[Recipe, float]
    table: Table
    blocks: Mapping[Recipe, float] = field(default_factory=dict)


@dataclass(frozen=True)
class KindCost:
    """One kind of layer in one recipe; seconds are of one layer, forward and backward.

    Args:
        operations: seconds of each; of a cast of the input that layers share, this kind's share.
        seconds: in a block, with the overhead there.
        ratio: the baseline's seconds over its own: above 1 it gains.
    """

    kind: Kind
    setting: Setting
    operations: Seconds
    seconds: float
    baseline_seconds: float
    ratio: float

    @property
    def verdict(self) -> str:
        """``gains``, ``loses`` or ``even``; ``kept`` where the recipe leaves it plain."""
        if self.setting.is_plain:
            return "kept"
        return "gains" if self.ratio > 1 + EVEN else "loses" if self.ratio < 1 - EVEN else "even"

    def seconds_of(self, *, casts: bool, forward: bool) -> float:
        """The casts or the matmuls of one direction."""
        return sum(
            s for name, s in self.operations.items() if ("." in name) == casts and name.startswith("output") == forward
        )


@dataclass(frozen=True)
class Memory:
    """Bytes that linear layers hold.

    Args:
        kept, baseline_kept: inputs kept for backward, and the same in the baseline.
        weight_casts: casts of weights, where they are cached for the micro-batches of a step.
    """

    kept: float
    baseline_kept: float
    weight_casts: float


@dataclass(frozen=True)
class RecipeCost:
    """What one recipe costs; a ratio is the baseline's seconds over its own.

    Args:
        linears_share: the share of the baseline's step that linear layers take.
        block_factor: seconds of its narrow layers in a block over the sum of their operations.
        overrides: patterns of layers that would be faster plain.
        fastest_ratio: ``step_ratio`` with those plain.
    """

    recipe: Recipe
    baseline: Recipe
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
            return plain_recipe(self.recipe).to_dict()
        added = [{"pattern": pattern, "compute": self.recipe.dtype} for pattern in self.overrides]
        return {**given, "override": [*given.get("override", []), *added]} if added else given


def linears_seconds(settings: Settings, table: Table) -> float:
    """Seconds of all linear layers, forward and backward."""
    return sum(_group_seconds(group, settings, table) * group[0].count for group in groups_of(list(settings)))


def _group_seconds(group: Sequence[Kind], settings: Settings, table: Table) -> float:
    """Seconds of one layer of each kind of a group; casts of their shared input count once for each setting."""
    own = sum(s for kind in group for name, s in table[kind.shape, settings[kind]].items() if name not in SHARED)
    firsts = {settings[kind]: kind.shape for kind in reversed(group)}
    return own + sum(table[shape, setting].get(name, 0.0) for setting, shape in firsts.items() for name in SHARED)


def kind_operations(kind: Kind, settings: Settings, table: Table) -> dict[str, float]:
    """The seconds of one kind's operations, with its share of shared casts of the input."""
    sharing = sum(other.group == kind.group and settings[other] == settings[kind] for other in settings)
    operations = table[kind.shape, settings[kind]]
    return {name: seconds / (sharing if name in SHARED else 1) for name, seconds in operations.items()}


def step_seconds(recipe: Recipe, settings: Settings, round: Round) -> float:
    """A step with its linear layers in the given settings: the rest of the plain recipe's step, plus those layers."""
    plain = plain_recipe(recipe)
    rest = round.steps[plain] - linears_seconds(settings_of(settings, plain), round.table)
    return max(rest, 0.0) + linears_seconds(settings, round.table)


def block_factor(recipe: Recipe, settings: Settings, round: Round) -> float:
    """Seconds of narrow layers in a block over the sum of their operations; 1 where no block was timed.

    The overhead in a block is the difference between the two blocks minus the difference between the operations.
    """
    plain = settings_of(settings, plain_recipe(recipe))
    narrow = [kind for kind in settings if settings[kind] != plain[kind]]
    if not narrow or recipe not in round.blocks:
        return 1.0
    own = linears_seconds({kind: settings[kind] for kind in narrow}, round.table)
    replaced = linears_seconds({kind: plain[kind] for kind in narrow}, round.table)
    return max((replaced + round.blocks[recipe] - round.blocks[plain_recipe(recipe)]) / own, _LEAST_FACTOR)


def in_blocks(recipe: Recipe, settings: Settings, round: Round) -> Round:
    """The round with the operations of narrow layers scaled to the time that they take in a block."""
    plain, factor = settings_of(settings, plain_recipe(recipe)), block_factor(recipe, settings, round)
    narrow = {setting for kind, setting in settings.items() if setting != plain[kind]}
    table = {
        (shape, setting): {name: s * (factor if setting in narrow else 1) for name, s in own.items()}
        for (shape, setting), own in round.table.items()
    }
    return dataclasses.replace(round, table=table)


def fastest_settings(settings: Settings, table: Table) -> dict[Kind, Setting]:
    """The same with those kinds plain that are faster plain: of the best choices the one with the fewest changes.

    Kinds that share an input are chosen together, since the first narrow one pays for the cast.
    """
    chosen: dict[Kind, Setting] = {}
    for group in groups_of(list(settings)):
        own_or_plain = [dict.fromkeys((settings[kind], settings[kind].plain)) for kind in group]
        options = [dict(zip(group, option, strict=True)) for option in itertools.product(*own_or_plain)]
        seconds = [_group_seconds(group, option, table) for option in options]
        changes = [sum(option[kind] != settings[kind] for kind in group) for option in options]
        fit = [index for index, taken in enumerate(seconds) if taken <= min(seconds) * (1 + EVEN)]
        chosen |= options[min(fit, key=lambda index: (changes[index], seconds[index]))]
    return chosen


def memory_of(settings: Settings, baseline: Settings, tokens: int, weight_bytes: Mapping[Setting, float]) -> Memory:
    """What the linear layers hold; ``tokens`` of a micro-batch, ``weight_bytes`` of all casts of a weight, per element."""

    def kept(given: Settings) -> float:
        total = 0.0
        for group in groups_of(list(given)):
            of_each = sum(named(setting.compute).kept_bytes for setting in {given[kind] for kind in group})
            total += group[0].count * tokens * group[0].shape.in_features * of_each
        return total

    casts = sum(weight_bytes[setting] * kind.shape.num_weights * kind.count for kind, setting in settings.items())
    return Memory(kept(settings), kept(baseline), casts)


def cost_of(
    recipe: Recipe, kinds: Sequence[Kind], rounds: Sequence[Round], tokens: int, weight_bytes: Mapping[Setting, float]
) -> RecipeCost:
    """What a recipe costs: each ratio is taken within a round, and the median of all rounds is returned.

    ``tokens`` and ``weight_bytes`` are those of :func:`memory_of`.
    """
    baseline = baseline_of(recipe)
    own, other = settings_of(kinds, recipe), settings_of(kinds, baseline)
    apart, factor = median_table(rounds), statistics.median(block_factor(recipe, own, round) for round in rounds)
    rounds = [in_blocks(recipe, own, round) for round in rounds]
    table = median_table(rounds)
    fastest = fastest_settings(own, table)

    def over_rounds(ratio: Callable[[Round], float]) -> float:
        return statistics.median(map(ratio, rounds))

    def seconds(kind: Kind, settings: Settings, table: Table) -> float:
        return sum(kind_operations(kind, settings, table).values())

    def kind_cost(kind: Kind) -> KindCost:
        ratio = over_rounds(lambda r: seconds(kind, other, r.table) / seconds(kind, own, r.table))
        operations = kind_operations(kind, own, apart)
        return KindCost(kind, own[kind], operations, seconds(kind, own, table), seconds(kind, other, table), ratio)

    return RecipeCost(
        recipe=recipe,
        baseline=baseline,
        kinds=tuple(map(kind_cost, kinds)),
        linears_ratio=over_rounds(lambda r: linears_seconds(other, r.table) / linears_seconds(own, r.table)),
        step_ratio=over_rounds(lambda r: r.steps[baseline] / step_seconds(recipe, own, r)),
        step_seconds=over_rounds(lambda r: step_seconds(recipe, own, r)),
        linears_share=over_rounds(lambda r: linears_seconds(other, r.table) / r.steps[baseline]),
        block_factor=factor,
        memory=memory_of(own, other, tokens, weight_bytes),
        overrides=tuple(kind.pattern for kind in kinds if fastest[kind] != own[kind]),
        fastest_ratio=over_rounds(lambda r: r.steps[baseline] / step_seconds(recipe, fastest, r)),
    )


def median_table(rounds: Sequence[Round]) -> dict[tuple[Shape, Setting], dict[str, float]]:
    """The median seconds of each operation over all rounds."""
    return {
        key: {name: statistics.median(r.table[key][name] for r in rounds) for name in operations}
        for key, operations in rounds[0].table.items()
    }
