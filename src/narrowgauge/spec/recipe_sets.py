"""Named sets of recipes: the recipes that answer one question together, under one name for ``--recipes``.

A set adds nothing to its recipes: ``narrowgauge compare --recipes sixteen-bit`` is the comparison that names them all. Whatever
comparison holds a set's recipes answers its question (:mod:`narrowgauge.analysis.comparison.answers`), from what it measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecipeSet:
    """The recipes that answer a question.

    Args:
        name: for ``--recipes``; no recipe, part of a recipe or alias has it.
        recipes: full names, in the order in which they are trained.
        question: what the set answers.
        pairs: of its recipes, two that differ only in what the question asks: the answer says in what they differ.
        where_native: those that are left out where a machine does not multiply their operands, since their only benefit is speed.
        source: who asks.
    """

    name: str
    recipes: tuple[str, ...]
    question: str
    pairs: tuple[tuple[str, str], ...]
    where_native: tuple[str, ...] = ()
    source: str = ""

    @property
    def needed(self) -> tuple[str, ...]:
        """The recipes without which a comparison does not answer the question."""
        return tuple(name for name in self.recipes if name not in self.where_native)


_SETS = (
    RecipeSet(
        "sixteen-bit",
        (
            "float32/float32", "tfloat32/float32", "float16/float32", "bfloat16/float32", "float16/naive", "bfloat16/naive",
        ),
        "Which 16-bit format, mixed or true: what does each save in time and memory, and what does it cost in loss?",
        pairs=(("float16/float32", "bfloat16/float32"), ("float16/naive", "bfloat16/naive")),
        where_native=("tfloat32/float32",),
        source="the precisions of Lightning's Trainer: 32-true, 16-mixed, bf16-mixed, 16-true, bf16-true; tf32 by "
        "torch.set_float32_matmul_precision",
    ),
)  # fmt: skip

RECIPE_SETS: dict[str, RecipeSet] = {row.name: row for row in _SETS}
