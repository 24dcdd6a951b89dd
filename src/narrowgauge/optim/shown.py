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
    return "\n".join([*_definitions(names), struct])


def _definitions(names: set[str]) -> list[str]:
    """Return the definitions of names at the outermost level of ``step.h``, with their comments."""
    chosen = []
    block: list[str] = []
    for line in step_cpp.STEP_H.read_text().split("\n"):
        block.append(line)
        is_inside = line.startswith((" ", "//", "template", "#"))
        if line.startswith("}") or (not is_inside and line.endswith(("}", ";"))):
            text = "\n".join(block)
            head = re.search(r"^(?:template .*)?(?:struct|INLINE [\w:]+) (\w+)", text, re.M)
            if head is not None and head[1] in names:
                chosen.append(text.strip("\n"))
            block = []
    return chosen
