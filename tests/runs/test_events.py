"""Events: what happened is in their columns, and no code reads the sentence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import narrowgauge
from narrowgauge.analysis.detectors import DETECTORS
from narrowgauge.runs.events import RAISED_BY

SOURCE = Path(narrowgauge.__file__).parent
READS = {
    "startswith",
    "endswith",
    "find",
    "index",
    "count",
    "partition",
    "split",
    "search",
    "match",
    "fullmatch",
    "findall",
}


def test_what_raises_events_has_one_id_each() -> None:
    assert not RAISED_BY.keys() & DETECTORS.keys()


def strings(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def is_sentence(node: ast.AST) -> bool:
    """Whether an expression is an event's sentence, or holds one."""
    return any(
        (isinstance(each, ast.Attribute) and each.attr in ("message", "sentence"))
        or (isinstance(each, ast.Call) and ast.unparse(each.func).endswith("get") and "message" in strings(each))
        or (isinstance(each, ast.Subscript) and strings(each.slice) == {"message"})
        or (isinstance(each, ast.Name) and each.id == "message")
        for each in ast.walk(node)
    )


def sentences_read(tree: ast.AST) -> Iterator[int]:
    """The lines at which a sentence is searched, cut or compared."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            if any(map(is_sentence, [node.left, *node.comparators])) and not all(
                isinstance(each, ast.Constant) and each.value is None for each in node.comparators
            ):
                yield node.lineno
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in READS
            and node.args
        ):
            yield from [node.lineno] if any(map(is_sentence, [node.func.value, *node.args])) else []


def test_no_code_reads_a_sentence() -> None:
    """A message may be reworded without changing what any code does."""
    files = list(SOURCE.rglob("*.py"))
    found = {str(path.relative_to(SOURCE)): list(sentences_read(ast.parse(path.read_text()))) for path in files}
    assert len(files) > 100 and {path: lines for path, lines in found.items() if lines} == {}
