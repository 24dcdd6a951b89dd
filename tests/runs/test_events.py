"""Events: what happened is in their columns, and no code reads the sentence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import narrowgauge
from narrowgauge.analysis.monitor.detectors import DETECTORS
from narrowgauge.runs.events import RAISED_BY
from narrowgauge.runs.older_events import with_detector

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


@pytest.mark.parametrize(
    ("kind", "message", "tensor", "columns"),
    [
        ("lost_updates", "a.weight stores 4% of its update", "a.weight", {"detector": "lost-updates"}),
        ("corruption", "exp_avg of a of rank 1 changed in memory after step 2", "exp_avg of a", {"detector": "rest"}),
        ("corruption", "rank 1 computes another gradient of a each time", "a", {"detector": "recomputation"}),
        ("corruption", "rank 0 and rank 1 compute different gradients of a", "a", {"detector": "recomputation"}),
        ("corruption", "a of rank 1 differs from that of 3 other ranks", "a", {"detector": "replicas"}),
        ("note", "lr was 0.1 up to step 8 and is 0.2 from there on", None, {"detector": "changed-settings"}),
        ("note", "the run started with torch 2.12 and resumes with 2.13", None, {"detector": "changed-software"}),
        ("straggler", "rank 3 was the last to arrive in 48 of 50 steps", None, {"detector": "straggler"}),
        (
            "first_bad_value",
            "aten.mm in a (forward) made nan",
            "a",
            {"detector": "replay", "phase": "forward", "operation": "aten.mm"},
        ),
        ("first_bad_value", "aten.mm in a (in backward) made nan", "a", {"detector": "replay", "operation": "aten.mm"}),
        ("note", "the data were prepared by an earlier command", None, {}),
        ("checkpoint", "step-00000010", None, {}),
        ("outliers", "a sentence of a loop of one's own", "input:a", {}),
    ],
)
def test_an_older_event_tells_its_detector_by_its_sentence(
    kind: str, message: str, tensor: str | None, columns: dict[str, str]
) -> None:
    row = {"kind": kind, "step": 8, "message": message, **({"tensor": tensor} if tensor else {})}
    assert with_detector(row) == {**row, **columns}
    told = {**row, "detector": "audit"}
    assert with_detector(told) is told


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
    """A message may be reworded without changing what any code does; the adapter of older records alone reads theirs."""
    files = [path for path in SOURCE.rglob("*.py") if path.name != "older_events.py"]
    found = {str(path.relative_to(SOURCE)): list(sentences_read(ast.parse(path.read_text()))) for path in files}
    assert len(files) > 100 and {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "code",
    [
        'found = "differs" in event.message',
        'found = "differs" in str(event.get("message", ""))',
        'found = re.search("differs", row["message"])',
        'found = event.message.startswith("a")',
        'found = error.message == "a"',
    ],
)
def test_reading_a_sentence_is_noticed(code: str) -> None:
    assert list(sentences_read(ast.parse(code))) == [1]
