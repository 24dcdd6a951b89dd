"""What of the step's two files a storage runs, for readers: ``narrowgauge show step``."""

from __future__ import annotations

import re
from pathlib import Path

from narrowgauge.errors import RecipeError
from narrowgauge.optim import step_cpp
from narrowgauge.optim.rules import elementwise
from narrowgauge.optim.validation import known_row
from narrowgauge.spec.update_rules import refuse_pair

RULES = {
    rule.name: rule for rule in vars(elementwise).values() if isinstance(rule, elementwise.Rule)
}
STEP_TRITON = Path(__file__).with_name("step_triton.py")
_EVERY = ("decode", "encode", "read_weight", "write_weight", "update", "step")
_BY_RULE = {"adamw": ("adam",), "adam": ("adam",), "sgd": ("sgd",), "lion": ("lion",)}


def step_text(storage: str, rule: str = "adamw", language: str = "cpp") -> str:
    """Return the line of a storage, and the functions that it names.

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
            f"Cannot show storage '{storage}' because its definition steps in float64."
        )
    is_expansion = row.arithmetic == "expansion"
    if language == "triton":
        names = {*_EVERY, *_BY_RULE[rule]}
        if is_expansion:
            names |= {"rn", "grow", "multiply", "collage"}
        return "\n\n\n".join(_definitions(STEP_TRITON.read_text(), names, "@triton.jit\n"))
    line = step_cpp.library_text(RULES[rule], row)
    names = set(re.findall(r"\w+", line))
    if rule in ("adamw", "adam"):
        names |= {"AdamScalars", "begin_adam", "end_adam"}
    if is_expansion:
        names.add("Expansions")
    return "\n".join([*_definitions(step_cpp.STEP_H.read_text(), names, ""), line])


def _definitions(text: str, names: set[str], start: str) -> list[str]:
    """Return the definitions of names at the outermost level of a text, with their comments."""
    blocks = re.split(r"\n\n+", text) if start else _blocks_of_cpp(text)
    chosen = []
    for block in blocks:
        head = re.search(
            r"^(?:def|struct|INLINE [\w:]+) (\w+)|^template .*struct (\w+)", block, re.M
        )
        if head and (head[1] or head[2]) in names and start in block:
            chosen.append(block.strip("\n"))
    return chosen


def _blocks_of_cpp(text: str) -> list[str]:
    """Return the blocks of C++ that end in a line with a brace, or are a line."""
    blocks: list[list[str]] = [[]]
    for line in text.split("\n"):
        blocks[-1].append(line)
        is_line = not line.startswith((" ", "//", "template", "#")) and line.endswith(("}", ";"))
        if line.startswith("}") or is_line:
            blocks.append([])
    return ["\n".join(block) for block in blocks]
