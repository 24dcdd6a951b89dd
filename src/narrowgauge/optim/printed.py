"""The printed step of a storage, for readers: ``narrowgauge show step``."""

from __future__ import annotations

from narrowgauge.errors import RecipeError
from narrowgauge.optim import cpp_step, triton_step
from narrowgauge.optim.rules import elementwise
from narrowgauge.optim.validation import known_row
from narrowgauge.spec.update_rules import refuse_pair

RULES = {
    rule.name: rule for rule in vars(elementwise).values() if isinstance(rule, elementwise.Rule)
}


def printed_step(storage: str, rule: str = "adamw", language: str = "cpp") -> str:
    """Return the text of a step, with the functions of its definition as comments.

    Raises:
        RecipeError: the storage or the rule is unknown, the rule does not support the storage, or
            nothing is printed for it.
    """
    row = known_row(storage)
    if rule not in RULES:
        raise RecipeError(f"Cannot print rule '{rule}'.", f"Choose one of {', '.join(RULES)}.")
    row = row.keeping(RULES[rule].stored_states)
    refuse_pair(rule, row, is_matrix=False, is_adamw=rule == "adamw")
    if row.arithmetic == "float64":
        raise RecipeError(
            f"Cannot print storage '{storage}' because it steps in float64, uncompiled."
        )
    if language == "triton":
        return triton_step.source(RULES[rule], row, with_sources=True).lstrip()
    return cpp_step.source(RULES[rule], row, with_sources=True)
