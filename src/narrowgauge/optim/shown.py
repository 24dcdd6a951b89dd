"""What of ``step.h`` a storage runs, for readers: ``narrowgauge show step``."""

from __future__ import annotations

import re

from narrowgauge.errors import RecipeError
from narrowgauge.optim import step_cpp
from narrowgauge.optim.rules import elementwise
from narrowgauge.optim.validation import known_row
from narrowgauge.spec.update_rules import refuse_pair

RULES = {
    rule.name: rule for rule in vars(elementwise).values() if isinstance(rule, elementwise.Rule)
}

DEFINITION = re.compile(
    r"^(?://.*\n)*(?:template .*\n|template .*> )?(?:struct|INLINE [\w:]+) (\w+)"
    r"(?:.*[;}]|.*\n(?:(?:[ #].*)?\n)*}.*)$",
    re.MULTILINE,
)
"""A definition at the outermost level of ``step.h``, of one line or up to a line that begins with a
brace, with its comments.
"""


def step_text(storage: str, rule: str = "adamw") -> str:
    """Return the struct of a storage, and the definitions that it names.

    Raises:
        RecipeError: the storage or the rule is unknown, the rule does not support the storage, or
            no kernel is written for it.
    """
    row = known_row(storage)
    if rule not in RULES:
        raise RecipeError(f"Cannot show rule '{rule}'.", f"Choose one of {', '.join(RULES)}.")
    row = row.keeping(RULES[rule].stored_states)
    refuse_pair(rule, row, is_matrix=False, is_adamw=rule == "adamw")
    if not step_cpp.has_kernel(RULES[rule], row):
        raise RecipeError(
            f"Cannot show storage '{storage}' because no kernel is written for it: its definition "
            "steps."
        )
    struct = step_cpp.library_text(RULES[rule], row)
    names = set(re.findall(r"\w+", struct))
    if rule in ("adamw", "adam"):
        names |= {"AdamScalars", "begin_adam", "end_adam"}
    if row.arithmetic == "expansion":
        names |= {"AdamW", "Parts", "Pair", "narrow", "fast_two_sum", "grow", "product"}
    if row.weight.parts == 2:
        names.add("InTwoParts")
    shown = [x[0] for x in DEFINITION.finditer(step_cpp.STEP_H.read_text()) if x[1] in names]
    return "\n".join([*shown, struct])
