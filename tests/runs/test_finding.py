"""Findings: one type, whoever found it, and one place that puts it into words."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import narrowgauge
from narrowgauge.runs.events import Event
from narrowgauge.runs.finding import SEVERITIES, Finding, at_step, sentences

SOURCE = Path(narrowgauge.__file__).parent
TREES = {str(path.relative_to(SOURCE)): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
WORDS = {"message", "advice", "remedy"}


def test_nothing_else_is_called_a_finding() -> None:
    classes = {
        f"{file}: {node.name}": [ast.unparse(base) for base in node.bases]
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Finding")
    }
    assert classes.pop("runs/finding.py: Finding") == [] and all(bases == ["Finding"] for bases in classes.values())


def templates_filled(tree: ast.AST) -> list[int]:
    """The lines at which the words of a row are filled with values."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("format", "format_map")
        and isinstance(node.func.value, (ast.Attribute, ast.Name))
        and (node.func.value.attr if isinstance(node.func.value, ast.Attribute) else node.func.value.id) in WORDS
    ]


def test_words_are_filled_in_one_place() -> None:
    found = {file: lines for file, tree in TREES.items() if (lines := templates_filled(tree))}
    # A sign is no finding yet, and the table of causes shows names in place of values.
    allowed = {"runs/finding.py", "analysis/diagnosis/signs/sign.py", "analysis/diagnosis/causes.py"}
    assert found.keys() <= allowed, found
    assert templates_filled(ast.parse("said = row.advice.format(module='a')")) == [1]


def test_an_event_takes_every_field_of_its_finding() -> None:
    finding = Finding("rest", "it changed", "Test it.", "exp_avg of a", "error", 7, 2, 0.5, 0.25, "bytes", "a paper")
    event = Event.of("corruption", 8, finding)
    assert event == Event("corruption", 8, "it changed", "exp_avg of a", 0.5, 0.25, "Test it.", 2, "rest")
    assert event.sentence == "it changed. Test it"
    assert Event.of("note", 0, Finding("frozen-parameters", "two.", "")).row() == {
        "kind": "note",
        "step": 0,
        "message": "two.",
        "detector": "frozen-parameters",
    }


@pytest.mark.parametrize(
    ("message", "advice", "said"),
    [("a", "b", "a. b."), ("a.", "b.", "a. b."), ("a", "", "a."), ("", "b", "b."), ("", "", "")],
)
def test_a_message_and_its_advice_are_sentences(message: str, advice: str, said: str) -> None:
    assert sentences(message, advice) == said


def test_a_finding_is_filled_with_the_values_that_its_row_names() -> None:
    row = {"message": "{count} of them are {format}", "advice": "Take '{storage}'."}
    found = Finding.filled(
        "narrow", **row, values={"count": 2, "format": "float16", "storage": "word", "more": 1}, where="w"
    )
    assert (found.message, found.advice) == ("2 of them are float16", "Take 'word'.")
    assert str(found) == "warning: narrow (w)\n  2 of them are float16\n  Take 'word'."
    assert list(SEVERITIES) == ["error", "warning", "note"] and at_step(0, "a") == "step 0: a"
