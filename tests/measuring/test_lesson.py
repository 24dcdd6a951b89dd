"""What a loss teaches: facts of losses of many kinds, healthy and with one fault."""

from __future__ import annotations

import pytest

import narrowgauge as ng
from measuring.test_programs import ROWS, made


@pytest.mark.parametrize("name", ROWS["lessons"])
def test_a_loss_has_its_facts_and_its_reading(name: str) -> None:
    row = ROWS["lessons"][name]
    names = made(row["edits"])
    model = names["model"]
    lesson = ng.teaches(model, names["batch"], names["loss"], backward=names["backward"])
    facts = {}
    for fact in row.get("taught", {}):
        value = lesson.taught[fact]
        facts[fact] = round(value, 4) if isinstance(value, float) else value
    assert facts == row.get("taught", {})
    readings = [(r.what, r.value) for r in lesson]
    assert readings == ([(row["kind"], row["value"])] if "kind" in row else [])
    assert all(words in str(lesson) for words in row.get("says", []))
    assert all(p.grad is None for p in model.parameters())
